"""The list of seeded faults stays true: `make mutants` seeds them."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace

import pytest

from .faults import AREAS, FAULTS, Fault
from .runner import ROOT, SOURCE, seeded


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_seeded(fault: Fault) -> None:
    """Its text stands there once, what is written in its place is a program, and its tests exist."""
    ast.parse(seeded(fault, SOURCE))
    assert fault.old != fault.new
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_there_are_faults_of_every_kind() -> None:
    assert {fault.area for fault in FAULTS} == set(AREAS)
    assert len(FAULTS) >= 25
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


@pytest.mark.parametrize("old", ["no such text", "import"])
def test_a_text_that_is_gone_or_not_alone_is_told(old: str) -> None:
    with pytest.raises(ValueError, match="once, found it"):
        seeded(replace(FAULTS[0], old=old), SOURCE)
