"""Several questions, one budget: the split, the total, one charge, and errors as wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import statistics
from cpsgd.errors import BudgetExceededError, ParameterError
from cpsgd.ledger import Budget, Ledger
from cpsgd.statistics import Count, Histogram, Mean, Quantiles


def table(n: int = 4000) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "id": np.repeat(np.arange(n // 2), 2),
        "age": generator.uniform(10, 90, n),
        "smokes": generator.integers(2, size=n),
    }


QUESTIONS: dict[str, Any] = {
    "age": Mean({"age": (0, 100)}),
    "smokers": Count(["smokes"], rows=2),
    "ages": Histogram("age", edges=[0, 30, 60, 100], rows=2),
    "middle": Quantiles({"age": (0, 100)}, [0.5]),
}


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_all_questions_keep_one_claim(fixed_seed: None, delta: float) -> None:
    data = table()
    found = statistics.report(data, QUESTIONS, epsilon=2.0, delta=delta, user="id", confidence=1 - 1e-7)
    assert 1.5 < found.claim.epsilon <= 2.0
    assert found.claim.delta <= delta
    truth = {"age": data["age"].mean(), "smokers": data["smokes"].sum(), "middle": np.median(data["age"])}
    for name, value in truth.items():
        assert found[name].low[0] <= value <= found[name].high[0]
    assert set(found.to_dict()["split"]) == set(QUESTIONS)
    assert "of the budget" in repr(found)


def test_errors_are_in_proportion_to_those_wanted() -> None:
    asked = {name: QUESTIONS[name] for name in ("age", "smokers")}
    wanted = {"age": 0.1, "smokers": 50.0}
    found = statistics.report(table(), asked, epsilon=2.0, user="id", wanted=wanted)
    times = [found.split[name].error / wanted[name] for name in asked]
    assert times[0] == pytest.approx(times[1], rel=0.1)


def test_one_charge_or_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=2.0, delta=1e-6))
    paid: dict[str, Any] = {"user": "id", "ledger": ledger, "population": "people", "delta": 1e-6}
    with pytest.raises(BudgetExceededError):
        statistics.report(table(), QUESTIONS, epsilon=4.0, **paid)
    assert ledger.total("people").rounds == 0
    statistics.report(table(), QUESTIONS, epsilon=2.0, **paid)
    assert ledger.total("people").epsilon <= 2.0


@pytest.mark.parametrize(
    ("questions", "options"),
    [
        ({}, {}),
        ([Mean({"age": (0, 1)})], {}),
        ({"age": "mean"}, {}),
        (QUESTIONS, {"wanted": {"ages": 1.0}}),
        (QUESTIONS, {"wanted": {"nobody": 1.0}}),
        (QUESTIONS, {"epsilon": 0.0}),
        ({"id": Mean({"id": (0, 1)})}, {"user": "id"}),
        (QUESTIONS, {"user": ["id"]}),
        ({"users": Count()}, {}),
    ],
)
def test_bad_reports_are_refused(questions: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        statistics.report(table(), questions, **{"epsilon": 1.0} | options)
