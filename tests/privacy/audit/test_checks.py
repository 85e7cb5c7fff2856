"""Each check allows what chance does and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.privacy.audit import _checks
from cpsgd.privacy.audit._checks import Batch, Check
from cpsgd.privacy.audit._law import Law

FALSE_ALARM = 1e-6
DIM = 16
PROTOCOL = Protocol.binomial(clients=1, dim=DIM, clip_norm=1.0, levels=4, trials=100)
LAW = Law(PROTOCOL, [(np.full(DIM, 1.0), 1)])


def batch(exact: np.ndarray) -> Batch:
    return Batch("test", LAW, 0.0, exact, np.arange(len(exact)))


def honest(rounds: int, seed: int = 1) -> np.ndarray:
    return 1.0 + np.random.default_rng(seed).binomial(100, 0.5, size=(rounds, DIM))


def uniform(exact: np.ndarray) -> np.ndarray:
    return LAW.uniform(batch(exact).sums, np.random.default_rng(2))


@pytest.mark.parametrize("trials", [1, 20, 1_000, 100_000])
@pytest.mark.parametrize("p", [0.5, 0.01])
@pytest.mark.parametrize("false_alarm", [0.1, 1e-3, 1e-8])
def test_bernstein_bounds_coins(trials: int, p: float, false_alarm: float) -> None:
    reach = _checks.bernstein(trials * p * (1 - p), 1.0, false_alarm)
    above = binom.sf(math.ceil(trials * p + reach) - 1, trials, p)
    below = binom.cdf(math.floor(trials * p - reach), trials, p)
    assert above + below <= false_alarm


def test_bernstein_is_not_idle() -> None:
    # With many coins, within an eighth of the normal law's quantile.
    assert _checks.bernstein(1e6, 1.0, 1e-6) < 1.125 * 4.8916 * 1e3


def test_honest_sums_pass_all_checks() -> None:
    for seed in range(20):
        exact = honest(500, seed)
        numbers = uniform(exact)
        checks = [
            _checks.integers([batch(exact)]),
            _checks.unbiased([batch(exact)], FALSE_ALARM),
            _checks.distribution([batch(exact)], [numbers], FALSE_ALARM),
            _checks.coordinates(numbers, FALSE_ALARM),
            _checks.successive(numbers, FALSE_ALARM),
            _checks.repeats([batch(exact)], FALSE_ALARM),
        ]
        assert [check.name for check in checks if not check.passed] == []


def test_integers() -> None:
    exact = honest(10)
    assert _checks.integers([batch(exact + 0.1)]).passed
    exact[3, 2] += 0.3
    assert not _checks.integers([batch(exact)]).passed
    exact[3, 2] = math.nan
    assert not _checks.integers([batch(exact)]).passed


def test_what_is_no_number_counts_as_far_away() -> None:
    exact = honest(2)
    exact[0, :3] = [math.nan, math.inf, -math.inf]
    assert batch(exact).sums[0, :3].tolist() == [2**52, 2**52, -(2**52)]


def test_a_shift_is_found_in_one_coordinate_and_in_all() -> None:
    exact = honest(2_000)
    standard_error = 5.0 / math.sqrt(2_000)
    one = exact.copy()
    one[:, 3] += 1.0
    assert not _checks.unbiased([batch(one)], FALSE_ALARM).passed
    # A shift of two standard errors shows only where all coordinates are added up: 2 · √2000 · 16 / √16.
    many = exact.copy()
    many[: int(4.0 * standard_error * 2_000)] += 1.0
    assert not _checks.unbiased([batch(many)], FALSE_ALARM).passed


def test_what_pushes_outwards_is_found_though_it_cancels_out() -> None:
    law = Law(PROTOCOL, [(np.where(np.arange(DIM) % 2, 3.0, 0.0), 1)])
    exact = np.where(np.arange(DIM) % 2, 3.0, 0.0) + np.random.default_rng(4).binomial(100, 0.5, size=(1_000, DIM))
    for push, passed in ((0.0, True), (0.5, False)):
        pushed = exact.copy()
        pushed[: int(push * 1_000)] += law.outward
        played = Batch("test", law, 0.0, pushed, np.arange(1_000))
        assert _checks.unbiased([played], FALSE_ALARM).passed is passed
    pushed = exact + law.outward
    played = Batch("test", law, 0.0, pushed, np.arange(1_000))
    assert not _checks.distribution([played], [law.uniform(played.sums, np.random.default_rng(5))], FALSE_ALARM).passed


def test_resolution_is_forgiven() -> None:
    exact = honest(2_000)
    exact[:, 3] += 1.0
    assert _checks.unbiased([Batch("test", LAW, 1.0, exact, np.arange(2_000))], FALSE_ALARM).passed


def test_half_the_variance_is_found() -> None:
    exact = 26.0 + np.random.default_rng(3).binomial(50, 0.5, size=(1_000, DIM))
    assert _checks.unbiased([batch(exact)], FALSE_ALARM).passed
    assert not _checks.distribution([batch(exact)], [uniform(exact)], FALSE_ALARM).passed


def test_dependent_coordinates_are_found() -> None:
    exact = honest(1_000)
    assert _checks.coordinates(uniform(exact), FALSE_ALARM).passed
    exact[:, 6] = exact[:, 1]
    assert not _checks.coordinates(uniform(exact), FALSE_ALARM).passed
    assert _checks.coordinates(uniform(exact)[:, :1], FALSE_ALARM).limit is None


def test_dependent_rounds_are_found() -> None:
    exact = honest(400)
    exact[1::2] = 102.0 - exact[::2]
    assert not _checks.successive(uniform(exact), FALSE_ALARM).passed


def test_rounds_are_put_in_order() -> None:
    first = Batch("a", LAW, 0.0, honest(2), np.array([0, 3]))
    second = Batch("b", LAW, 0.0, honest(2), np.array([1, 2]))
    ordered = _checks.in_order([first, second], [np.array([[0.0], [3.0]]), np.array([[1.0], [2.0]])])
    assert ordered.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_repeats_are_found_however_late() -> None:
    exact = honest(300)
    assert _checks.repeats([batch(exact)], FALSE_ALARM).passed
    exact[290] = exact[3]
    check = _checks.repeats([batch(exact)], FALSE_ALARM)
    assert (check.statistic, check.limit, check.passed) == (1.0, 0.0, False)


def test_repeats_are_not_asked_for_where_honest_rounds_repeat() -> None:
    protocol = Protocol.binomial(clients=1, dim=1, clip_norm=1.0, levels=4, trials=100)
    law = Law(protocol, [(np.ones(1), 1)])
    check = _checks.repeats([Batch("test", law, 0.0, honest(50)[:, :1], np.arange(50))], FALSE_ALARM)
    assert check.limit is None
    assert check.passed


def test_a_check_without_a_limit_passes() -> None:
    assert Check("name", "question", 5.0, None).passed
    assert Check("name", "question", 5.0, 5.0).passed
    assert not Check("name", "question", 5.1, 5.0).passed
