"""Cells of text files."""

from __future__ import annotations

import csv

import pytest

from cpsgd._cells import filled_lines, is_number


def test_blank_lines_are_passed_over_and_counted() -> None:
    assert list(filled_lines(csv.reader(["a,b", "", '""', "1,", '"x', 'y",2']))) == [
        (1, ["a", "b"]),
        (4, ["1", ""]),
        (6, ["xy", "2"]),
    ]


@pytest.mark.parametrize(
    ("cell", "expected"), [("1", True), (" -2.5e3 ", True), ("nan", True), ("", False), ("x1", False), ("1,5", False)]
)
def test_numbers_are_told_from_names(cell: str, expected: bool) -> None:
    assert is_number(cell) is expected
