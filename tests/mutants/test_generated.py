"""Mutants are generated where a fault could be, and named so that a list of them stays true."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from . import generated
from .generated import ROOMS, drawn, equivalent
from .operators import mutants
from .runner import SOURCE

_MODULE = '''
"""A module."""
import math

LIMIT = 3


class Budget:
    def spend(self, cost: float = 1.0) -> float:
        """Spends."""
        if cost < 0:
            raise ValueError(f"Expected cost={cost} >= {0}.")
        self.check(cost)
        return math.nextafter(self.spent + cost, math.inf) if self.open and cost > LIMIT else min(cost, 2)

    def __repr__(self) -> str:
        return "budget" * 2
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "budget.py"
    path.write_text(_MODULE)
    return path


def test_every_operator_finds_its_place(module: Path) -> None:
    changes = {mutant.change for mutant in mutants(module, "budget.py")}
    assert changes == {
        "constant: 3 -> 4",
        "compare: cost < 0 -> cost <= 0",
        "constant: 0 -> 1",
        "guard: if cost < 0: -> if False:",
        "statement: self.check(cost) -> pass",
        "direction: math.nextafter(self.spent + cost, math.inf) -> self.spent + cost",
        "compute: self.spent + cost -> self.spent - cost",
        "logic: self.open and cost > LIMIT -> self.open or cost > LIMIT",
        "compare: cost > LIMIT -> cost >= LIMIT",
        "choice: math.nextafter(self.spent + cost, math.inf) if self.open and cost > LIMIT else min(cost, 2)"
        " -> math.nextafter(self.spent + cost, math.inf) if not (self.open and cost > LIMIT) else min(cost, 2)",
        "call: min(cost, 2) -> max(cost, 2)",
        "constant: 2 -> 3",
    }


def test_a_mutant_differs_from_the_module_in_one_place(module: Path) -> None:
    made = mutants(module, "budget.py")
    assert len({mutant.source for mutant in made}) == len(made) == len({mutant.name for mutant in made})
    for mutant in made:
        compile(mutant.source, "budget.py", "exec")


def test_a_sample_does_not_depend_on_other_code(module: Path) -> None:
    before = {mutant.name for mutant in mutants(module, "budget.py", 0.5, seed=3)}
    module.write_text(_MODULE.replace("LIMIT = 3", "LIMIT = 3\nMORE = 5\n"))
    after = {mutant.name for mutant in mutants(module, "budget.py", 0.5, seed=3)}
    assert 0 < len(before) < 12
    assert {name for name in after if "::MORE::" not in name} == before


def test_a_mutant_is_put_into_functions_and_constants(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_PACKAGE", f"{module.parent}/")
    budget = types.ModuleType("cpsgd_budget")
    budget.__file__ = str(module)
    exec(compile(_MODULE, str(module), "exec"), vars(budget))
    monkeypatch.setitem(sys.modules, "cpsgd_budget", budget)
    own = budget.Budget()
    own.check, own.open, own.spent = lambda cost: None, True, 0.0
    assert own.spend(2.5) == 2
    made = {mutant.change: mutant for mutant in mutants(module, "budget.py")}
    functions = {("budget.py", "Budget.spend"): [budget.Budget.spend]}
    assert generated._apply(made["call: min(cost, 2) -> max(cost, 2)"], functions)
    assert own.spend(2.5) == 2.5
    assert generated._apply(made["constant: 3 -> 4"], functions)
    assert budget.LIMIT == 4


def test_every_listed_equivalent_exists_and_has_a_reason() -> None:
    """A listed mutant whose code is gone goes from the list."""
    everywhere = {
        mutant.name
        for path in {SOURCE / "cpsgd" / name.partition("::")[0] for name in equivalent()}
        for mutant in mutants(path, str(path.relative_to(SOURCE / "cpsgd")))
    }
    assert set(equivalent()) <= everywhere
    assert all(len(reason) > 10 for reason in equivalent().values())


def test_listed_equivalents_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ("audit",)
    every = drawn(room, 0.02, seed=1)
    assert every
    monkeypatch.setattr(generated, "equivalent", lambda: {every[0].name: "for this test"})
    assert drawn(room, 0.02, seed=1) == every[1:]
    assert set(room) < set(ROOMS)
