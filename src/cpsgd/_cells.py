"""Cells of text files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import _csv


def filled_lines(reader: _csv.Reader) -> Iterator[tuple[int, list[str]]]:
    """The lines that are not blank, with their numbers from 1."""
    for cells in reader:
        if cells and cells != [""]:
            yield reader.line_num, cells


def is_number(cell: str) -> bool:
    """Whether a cell holds a number, not a name."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
