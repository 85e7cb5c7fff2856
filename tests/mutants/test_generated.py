"""Mutants are generated where a fault could be, and named so that a list of them stays true."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from . import generated
from .generated import ROOMS, drawn, equivalent, sample
from .operators import Mutant, mutants

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
    def half(mutant: Mutant) -> bool:
        return mutant.drawn(0.5, seed=3)

    before = {mutant.name for mutant in mutants(module, "budget.py", half)}
    module.write_text(_MODULE.replace("LIMIT = 3", "LIMIT = 3\nMORE = 5\n"))
    after = {mutant.name for mutant in mutants(module, "budget.py", half)}
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


def test_functions_are_found_where_objects_are_frozen() -> None:
    """As they are once tests are collected: without them no mutant is tried."""
    gc.freeze()
    found = generated._functions(["_numbers.py"])
    assert [function.__name__ for function in found["_numbers.py", "rounded_down"]] == ["rounded_down"]


def test_every_listed_equivalent_exists_and_has_a_reason() -> None:
    """A listed mutant whose code is gone goes from the list."""
    listed = equivalent()
    assert {mutant.name for mutant in drawn(ROOMS, lambda mutant: mutant.name in listed)} == set(listed)
    assert all(len(reason) > 10 for reason in listed.values())


def test_slack_searches_and_texts_have_no_mutants(tmp_path: Path) -> None:
    path = tmp_path / "slack.py"
    path.write_text(
        "def f(x):\n"
        "    for _ in range(60):\n"
        "        x = x * (1.0 + 1e-12) + 1e-9\n"
        "    x = x * _UP + (8.0 * x + 3.0) * _UNIT\n"
        "    name = f'{x} rounds' if x else 'none'\n"
        "    return solve(x, rtol=1e-3, maxiter=50, name=name)\n"
    )
    assert [mutant.change for mutant in mutants(path, "slack.py")] == ["constant: 1.0 -> 2.0"]


def test_tests_are_mapped_to_the_lines_and_constants_that_they_use(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "_PACKAGE", f"{module.parent}/")
    names: dict[str, Any] = {}
    exec(compile(_MODULE, str(module), "exec"), names)
    budget = names["Budget"]()
    budget.check, budget.open, budget.spent = lambda cost: None, False, 0.0

    def passes(item: Any) -> bool:
        try:
            return bool(budget.spend(item.cost))
        except ValueError:
            return False

    monkeypatch.setattr(generated, "_passes", passes)
    made = {mutant.change: mutant for mutant in mutants(module, "budget.py")}
    constant, last = made["constant: 3 -> 4"], made["call: min(cost, 2) -> max(cost, 2)"]
    tracer = generated.Tracer([constant, last])
    good, bad = (tracer.run(cast(Any, types.SimpleNamespace(nodeid="test", cost=cost))) for cost in (1.0, -1.0))
    assert good[2:] == (True, {("budget.py", "LIMIT"), ("budget.py", last.lines)})
    assert bad[2:] == (False, {("budget.py", "LIMIT")})


def test_listed_equivalents_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ("audit",)
    every = sample(room, 0.02, seed=1)
    assert every
    listed = {**equivalent(), every[0].name: "for this test"}
    monkeypatch.setattr(generated, "equivalent", lambda: listed)
    assert sample(room, 0.02, seed=1) == every[1:]
    assert set(room) < set(ROOMS)
