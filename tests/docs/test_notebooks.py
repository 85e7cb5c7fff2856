"""The notebooks run, and show what they showed when they were committed."""

from __future__ import annotations

import warnings
from pathlib import Path

import nbformat
import pytest

from docs._site.execute import execute, outputs

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_five() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["audit", "federation", "one-bit", "planning", "table"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_did(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    with warnings.catch_warnings():  # jupyter_client's and tornado's, of their own insides
        warnings.simplefilter("ignore")
        fresh = execute(path)
    for before, now in zip(committed.cells, fresh.cells, strict=True):
        assert outputs(now) == outputs(before), before.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_was_executed(path: Path) -> None:
    assert path.stat().st_size < 60_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(outputs(cell) for cell in cells)
