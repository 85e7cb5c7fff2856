"""The exact law against coins added up one by one, and what is computed from it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.audit import sum_law
from cpsgd.audit.sum_law import LikelihoodRatio, SumLaw
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Coins

PROTOCOL = Protocol.binomial(clients=3, dim=3, clip_norm=1.0, levels=6, trials=5, p=0.3)
GROUPS = [(np.array([0.0, 1.25, 4.9]), 1), (np.array([2.0, 2.5, 0.125]), 2)]


def coin_by_coin(coordinate: int) -> dict[int, float]:
    """The law of one coordinate by convolving a coin at a time."""
    masses = np.ones(1)
    first = 0
    for _ in range(15):
        masses = np.convolve(masses, [0.7, 0.3])
    for points, clients in GROUPS:
        for _ in range(clients):
            below = int(points[coordinate])
            up = points[coordinate] - below
            first += below
            masses = np.convolve(masses, [1.0 - up, up])
    return {first + i: mass for i, mass in enumerate(masses)}


@pytest.mark.parametrize("coordinate", range(3))
def test_law(coordinate: int) -> None:
    law = SumLaw(PROTOCOL, GROUPS)
    expected = coin_by_coin(coordinate)
    found = {int(law.first[coordinate]) + i: mass for i, mass in enumerate(law.mass[coordinate])}
    for outcome, mass in expected.items():
        assert found[outcome] == pytest.approx(mass, rel=1e-12, abs=1e-300)
    mean = sum(outcome * mass for outcome, mass in expected.items())
    assert law.mean[coordinate] == pytest.approx(mean, rel=1e-12)
    variance = sum((outcome - mean) ** 2 * mass for outcome, mass in expected.items())
    assert law.variance[coordinate] == pytest.approx(variance, rel=1e-10)


def test_coincidence() -> None:
    law = SumLaw(PROTOCOL, GROUPS)
    for rounds in (2, 3):
        each = [sum(mass**rounds for mass in coin_by_coin(coordinate).values()) for coordinate in range(3)]
        assert law.coincidence(rounds) == pytest.approx(each[0] * each[1] * each[2], rel=1e-12)


def test_probability() -> None:
    law = SumLaw(PROTOCOL, GROUPS)
    laws = [coin_by_coin(coordinate) for coordinate in range(3)]
    sums = np.array([law.first, law.first + np.array([7, 2, 5]), law.first - np.array([0, 1, 0]), [1000] * 3])
    expected = [np.prod([laws[i].get(int(outcome), 0.0) for i, outcome in enumerate(row)]) for row in sums]
    np.testing.assert_allclose(law.probability(sums), expected, rtol=1e-12)


@pytest.mark.parametrize("divisor", [2, 3, 16])
def test_remainders(divisor: int) -> None:
    law = SumLaw(PROTOCOL, GROUPS)
    expected = np.zeros((3, divisor))
    for coordinate in range(3):
        for outcome, mass in coin_by_coin(coordinate).items():
            expected[coordinate, (outcome - law.first[coordinate]) % divisor] += mass
    np.testing.assert_allclose(law.remainders(divisor), expected, atol=1e-15)


def test_uniform_numbers_stand_for_the_outcomes() -> None:
    law = SumLaw(PROTOCOL, GROUPS)
    sums = np.array([[*law.first], [*(law.first + 7)], [-1000] * 3, [1000] * 3])
    uniform = law.uniform(sums, np.random.default_rng(0))
    for coordinate in range(3):
        masses = law.mass[coordinate]
        assert 0.0 <= uniform[0, coordinate] <= masses[0]
        assert masses[:7].sum() <= uniform[1, coordinate] <= masses[:8].sum()
    assert (uniform[2] == 0.0).all()
    assert (uniform[3] == 1.0).all()


def test_likelihood_ratio() -> None:
    protocol = Protocol.binomial(clients=1, dim=2, clip_norm=1.0, levels=6, trials=40)
    zero, one = (SumLaw(protocol, [(np.array(points), 1)]) for points in ([1.0, 3.0], [3.5, 2.0]))
    sums = np.array([[25, 20], [10, 30], [22, 23]])
    expected = [
        np.log(0.5 * binom.pmf(a - 3, 40, 0.5) + 0.5 * binom.pmf(a - 4, 40, 0.5))
        + binom.logpmf(b - 2, 40, 0.5)
        - binom.logpmf(a - 1, 40, 0.5)
        - binom.logpmf(b - 3, 40, 0.5)
        for a, b in sums
    ]
    np.testing.assert_allclose(LikelihoodRatio(zero, one).score(sums), expected, rtol=1e-9)


def test_likelihood_ratio_is_tabulated_to_the_last_outcome_of_both() -> None:
    protocol = Protocol.binomial(clients=1, dim=1, clip_norm=1.0, levels=6, trials=40)
    half, whole = (SumLaw(protocol, [(np.array([point]), 1)]) for point in (0.5, 1.0))
    for zero, one, sign in ((half, whole, 1.0), (whole, half, -1.0)):
        assert LikelihoodRatio(zero, one).score(np.array([[41]]))[0] == pytest.approx(sign * np.log(2.0))


def test_likelihood_ratio_goes_on_where_no_law_reaches() -> None:
    protocol = Protocol.binomial(clients=1, dim=1, clip_norm=1.0, levels=6, trials=40)
    zero, one = (SumLaw(protocol, [(np.array([point]), 1)]) for point in (1.0, 3.5))
    scores = LikelihoodRatio(zero, one).score(np.arange(-50, 150)[:, None])
    assert np.isfinite(scores).all()
    assert (np.diff(scores) > 0.0).all()


def test_tails_end_at_the_first_mass_or_the_last() -> None:
    """A tail that is less than an outcome gains or loses what is next to its end: here all that there is."""
    coin = Protocol(clients=1, dim=1, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.375, coordinate_range=1.0))
    for point, masses in ((0.0, [0.875, 0.125]), (1.0, [0.125, 0.875])):
        law = SumLaw(coin, [(np.array([point]), 1)])
        np.testing.assert_allclose(law.mass, [masses])
        np.testing.assert_allclose(law.tail_ends(np.array([0.1, 0.2])), 2.0 * law.narrowing * 0.875)
    # Seven equal coins: 1/128 and 7/128 are in a tail of a tenth, and 21/128, 35/128 and 35/128 are next to its end.
    fair = Protocol(clients=7, dim=1, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.375, coordinate_range=1.0))
    law = SumLaw(fair, [(np.array([0.5]), 7)])
    found = law.tail_ends(np.array([0.1, 1e-9]))
    np.testing.assert_allclose(found, 2.0 * law.narrowing * np.array([35.0, 21.0]) / 128.0)


def test_as_many_outcomes_as_are_computed() -> None:
    sum_law._check_size(4, 1 << 22)
    with pytest.raises(ParameterError, match="4 coordinates with 4194305 outcomes"):
        sum_law._check_size(4, (1 << 22) + 1)


def test_too_large() -> None:
    protocol = Protocol.binomial(clients=1, dim=2048, clip_norm=1.0, levels=2, trials=10**6)
    with pytest.raises(ParameterError, match="fewer coordinates"):
        SumLaw(protocol, [(np.zeros(2048), 1)])


def test_sums_at_the_ends_of_the_law_are_spread_and_those_beyond_are_not() -> None:
    law, generator = SumLaw(PROTOCOL, GROUPS), np.random.default_rng(1)
    size = law.mass.shape[1]
    first = np.tile(law.first, (50, 1))
    low, high = law.uniform(first, generator), law.uniform(first + size - 1, generator)
    assert np.all((low > 0.0) & (low <= law.mass[:, 0]))
    assert np.all(high < 1.0 + 1e-15)
    assert np.all(law.uniform(first - 1, generator) == 0.0)
    assert np.all(law.uniform(first + size, generator) == 1.0)
