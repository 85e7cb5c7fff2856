from __future__ import annotations

import math

import pytest
from cpsgd.privacy._binomial import window

from cpsgd.errors import ConditionError

from .oracle import Exact


@pytest.mark.parametrize(("trials", "p"), [(1, 0.5), (7, 0.9), (200, 0.5), (1500, 0.03), (1500, 0.7), (3000, 1e-4)])
@pytest.mark.parametrize("nats", [3.0, 40.0, 500.0])
def test_bounds_hold(trials: int, p: float, nats: float) -> None:
    law, exact = window(trials, p, nats), Exact(trials, p)
    r = law.error
    assert r < 1e-10 or nats == 3.0
    for i, z in enumerate(range(law.first, law.last + 1)):
        assert law.mass[i] * (1 - r) <= exact.mass[z] <= law.mass[i] * (1 + r)
        assert law.below[i] * (1 - r) <= exact.below[z] <= law.below[i] * (1 + r) + law.outside_below
        assert law.above[i] * (1 - r) <= exact.above[z] <= law.above[i] * (1 + r) + law.outside_above
    before = exact.below[law.first - 1] if law.first else 0
    assert before <= law.outside_below
    assert exact.above[law.last] <= law.outside_above
    assert law.outside_below + law.outside_above < 2.0 * 2.718 ** -min(nats, 600.0)


def test_large_trials_against_the_normal_limit() -> None:
    law = window(10**8, 0.5, 60.0)
    assert law.error < 1e-9
    assert law.mass[5 * 10**7 - law.first] == pytest.approx(0.3989422804014327 / 5000, rel=1e-8)
    assert law.below[5 * 10**7 - 1 - law.first] + 0.5 * law.mass[5 * 10**7 - law.first] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("trials", "p"), [(2, 0.75), (999, 0.75), (999, 0.99), (999, 1 - 2.0**-40), (2**40, 1 - 2.0**-40)]
)
def test_mirrored(trials: int, p: float) -> None:
    # Failures of this law are successes of the other one, and 1 - p is exact.
    law, other = window(trials, p, 30.0), window(trials, 1 - p, 30.0)
    assert (law.first, law.last) == (trials - other.last, trials - other.first)
    assert (law.mass == other.mass[::-1]).all()
    assert (law.above[:-1] == other.below[-2::-1]).all()
    assert (law.below[:-1] == other.above[-2::-1]).all()
    assert (law.outside_below, law.outside_above) == (other.outside_above, other.outside_below)


def test_many_trials_near_one_are_a_poisson_law() -> None:
    # N - Z is nearly Poisson with mean N 2^-52 = 1: errors of one trial would be as large as the mean.
    law = window(2**52, 1 - 2.0**-52, 30.0)
    assert law.last == 2**52
    for failures in range(8):
        expected = math.exp(-1) / math.factorial(failures)
        assert law.mass[-1 - failures] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("p", [1e-15, 0.5, 1 - 2.0**-53])
def test_too_many_trials_are_refused(p: float) -> None:
    with pytest.raises(ConditionError, match=r"at most N=2\^52"):
        window(2**52 + 1, p, 30.0)


def test_too_many_points_are_refused() -> None:
    with pytest.raises(ConditionError, match="Account for fewer trials"):
        window(10**14, 0.5, 60.0)
