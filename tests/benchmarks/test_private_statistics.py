"""The errors that `benchmarks/private_statistics.py` calculates, against the laws that OpenDP's noise has."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.private_statistics import cases, opendp_error
from cpsgd.privacy.gaussian import analytic_sigma
from cpsgd.statistics import prepare

CLIENTS, DELTA = 1000, 1e-6
CASES = cases(CLIENTS)
# Two percent of ε go to the estimate of what is cut off, on one machine.
MOST = 1.05


def best_error(epsilon: float, l1: float, l2: float, *, whole: bool) -> float:
    """Returns the smaller deviation: Laplace noise (for counts on integers), or the least Gaussian noise there is.

    OpenDP's own Gaussian noise is some percent larger, for it is calibrated by zero-concentrated privacy.
    """
    laplace = math.sqrt(0.5) / math.sinh(0.5 * epsilon / l1) if whole else math.sqrt(2.0) * l1 / epsilon
    return min(laplace, analytic_sigma(epsilon=epsilon, sensitivity=l2, delta=DELTA))


def test_the_laws_are_those_that_opendp_reports() -> None:
    required = {"epsilon": 2.0, "delta": DELTA}
    for l1, whole in ((1.0, True), (2.0, True), (1.0, False)):
        theirs = opendp_error("laplace", l1, required, whole=whole)
        assert theirs == pytest.approx(best_error(2.0, l1, 1e9, whole=whole), rel=1e-6)
    least = analytic_sigma(epsilon=2.0, sensitivity=1.0, delta=DELTA)
    assert least <= opendp_error("gaussian", 1.0, required, whole=False) <= 1.1 * least


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
@pytest.mark.parametrize("name", CASES)
def test_no_question_has_much_more_error_than_the_better_of_two_mechanisms(name: str, epsilon: float) -> None:
    _, question, _, _, l1, l2 = CASES[name]
    whole = question.statistic in ("count", "histogram")
    required: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA}
    best = best_error(epsilon, l1, l2, whole=whole)
    table = question.error(math.sqrt(prepare(question, **required).job.tasks[0].noise.variance) / CLIENTS, CLIENTS)
    assert table <= MOST * best
    for secure in (False, True):
        asked = question.plan(CLIENTS, **required, secure=secure)
        assert asked.plan.guarantee.epsilon <= epsilon
        assert asked.plan.guarantee.delta <= DELTA
        error = question.error(math.sqrt(asked.variance(CLIENTS)), CLIENTS)
        assert error <= (1.0 + 1e-6 if whole else MOST) * best
        # What is predicted for the plan is no other error.
        predicted = question.error(math.sqrt(asked.plan.error.total / asked.protocol.dim), CLIENTS)
        assert predicted <= error * (1.0 + 1e-9)
