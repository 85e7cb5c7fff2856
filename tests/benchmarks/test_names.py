"""A script's folder comes first where it imports from: its neighbours must not hide the standard library's modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["benchmarks", "packaging", "reproduction"])
def test_no_script_hides_a_standard_module(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert names
    assert names & sys.stdlib_module_names == set()
