from __future__ import annotations

import pytest

from cpsgd.errors import ConditionError
from cpsgd.privacy._binomial import window

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


def test_too_many_points_are_refused() -> None:
    with pytest.raises(ConditionError, match="Account for fewer trials"):
        window(10**14, 0.5, 60.0)
