"""The law of sums whose rounding is the noise, against sums over all outcomes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.audit.sum_law import LikelihoodRatio, SumLaw, convolved
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Binomial, Coins, LazyCoins, SampledCoins
from cpsgd.mechanisms.law import Law
from cpsgd.mechanisms.tilted import Tilted

MECHANISMS: list[Tilted] = [
    Coins(coins=1, theta=0.3, coordinate_range=0.5),
    Coins(coins=3, theta=0.1, coordinate_range=0.5),
    Coins(coins=1, theta=Coins.most_theta, coordinate_range=0.5),
    SampledCoins(rate=0.2, theta=0.4, coordinate_range=0.5),
    LazyCoins(rate=2.0 / 3.0, theta=0.5, coordinate_range=0.5),
]
GROUPS = [(np.array([0.0, 0.3, 1.0]), 1), (np.array([0.5, 0.8, 0.0]), 2)]

mechanisms = pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.describe())


def integer_law(mechanism: Tilted, point: float) -> dict[int, float]:
    """What a client with a point between the ends of the range sends, from the mechanism's description."""
    odds = 0.5 + mechanism.theta * (2.0 * point - 1.0)
    if isinstance(mechanism, Coins):
        return {heads: float(binom.pmf(heads, mechanism.coins, odds)) for heads in range(mechanism.coins + 1)}
    assert isinstance(mechanism, SampledCoins)
    rate = mechanism.rate
    return {0: rate * (1.0 - odds), 1: 1.0 - rate, 2: rate * odds}


def by_outcome(mechanism: Tilted, coordinate: int) -> dict[int, float]:
    """Adds up all that three clients can send."""
    clients = [integer_law(mechanism, points[coordinate]) for points, number in GROUPS for _ in range(number)]
    masses: dict[int, float] = {}
    for outcomes in itertools.product(*(client.items() for client in clients)):
        total = sum(outcome for outcome, _ in outcomes)
        masses[total] = masses.get(total, 0.0) + float(np.prod([mass for _, mass in outcomes]))
    return masses


@mechanisms
@pytest.mark.parametrize("coordinate", range(3))
def test_law(mechanism: Tilted, coordinate: int) -> None:
    protocol = Protocol(clients=3, dim=3, clip_norm=1.0, mechanism=mechanism)
    law = SumLaw(protocol, GROUPS)
    expected = by_outcome(mechanism, coordinate)
    outcomes = np.arange(-2, 3 * mechanism.values)
    found = law.masses(np.tile(outcomes, (3, 1)))[coordinate]
    np.testing.assert_allclose(found, [expected.get(int(v), 0.0) for v in outcomes], rtol=1e-12, atol=1e-300)
    mean = sum(outcome * mass for outcome, mass in expected.items())
    variance = sum((outcome - mean) ** 2 * mass for outcome, mass in expected.items())
    assert law.mean[coordinate] == pytest.approx(mean, rel=1e-12)
    assert law.variance[coordinate] == pytest.approx(variance, rel=1e-10)
    assert law.pull[coordinate] == pytest.approx((mean - 3 * mechanism.centre) / variance, rel=1e-9, abs=1e-12)


@mechanisms
@pytest.mark.parametrize("point", [0.0, 0.25, 0.5, 1.0])
def test_no_part_is_further_from_its_mean_and_no_mass_of_the_rest_larger(mechanism: Tilted, point: float) -> None:
    steps = mechanism.steps(3)
    found = steps.summands(200.0)
    part = (1.0 - point) * np.array(steps.low) + point * np.array(steps.high)
    integers = np.arange(len(part))
    assert np.abs(integers - part @ integers).max() <= found.largest * (1.0 + 1e-12)
    rest = np.ones(1)
    for _ in range(3 * steps.copies - 1):
        rest = np.convolve(rest, part)
    whole = np.pad(np.convolve(rest, part), 1)
    near = [whole[i : i + len(part) + 2].max() for i in range(len(rest))]
    assert (rest <= found.narrowing * np.array(near) * (1.0 + 1e-12)).all()


def test_many_coins_keep_their_tails() -> None:
    mechanism = Coins(coins=7, theta=0.2, coordinate_range=0.5)
    first, mass = convolved(mechanism.steps(5_000).summands(200.0), [(np.array([0.9, 0.9]), 5_000)])
    assert mass.shape[1] < 10_000  # of 35,001 outcomes
    outcomes = first[0] + np.arange(mass.shape[1])
    np.testing.assert_allclose(np.log(mass[0]), binom.logpmf(outcomes, 35_000, 0.5 + 0.8 * mechanism.theta), atol=1e-6)
    assert mass[0].sum() == pytest.approx(1.0, abs=1e-12)
    assert np.log(mass[0, [0, -1]]).max() < -190.0


def test_the_noise_beside_rounding_is_the_same_whatever_coordinates_are_alike() -> None:
    noise = Binomial(levels=6, trials=5, p=0.3, coordinate_range=1.0).noise.law(3)
    assert isinstance(noise, Law)
    points = np.array([1.25, 4.0, 1.25, 4.0 + 1e-15, 2.5])
    first, mass = convolved(noise.summands(200.0), [(points, 3)])
    for coordinate, point in enumerate(points):
        lowest, alone = convolved(noise.summands(200.0), [(np.array([point]), 3)])
        assert first[coordinate] == lowest[0]
        np.testing.assert_allclose(mass[coordinate, : alone.shape[1]], alone[0], atol=1e-15)


def test_likelihood_ratio_of_laws_of_different_widths() -> None:
    # At the ends of the range a coin of the largest θ is next to certain, and one law is all but a point.
    protocol = Protocol(clients=2, dim=1, clip_norm=1.0, mechanism=MECHANISMS[3])
    zero, one = (SumLaw(protocol, [(np.array([point]), 2)]) for point in (0.1, 1.0))
    sums = np.arange(5)[:, None]
    expected = [np.log(one.masses(np.array([[s]]))[0, 0] / zero.masses(np.array([[s]]))[0, 0]) for s in range(5)]
    np.testing.assert_allclose(LikelihoodRatio(zero, one).score(sums), expected, rtol=1e-12)
    beyond = LikelihoodRatio(zero, one).score(np.arange(-20, 30)[:, None])
    assert np.isfinite(beyond).all()
    assert (np.diff(beyond) > 0.0).all()


def test_too_large() -> None:
    steps = Coins(coins=4096, theta=0.2, coordinate_range=0.5).steps(100)
    with pytest.raises(ParameterError, match="fewer coordinates"):
        convolved(steps.summands(200.0), [(np.full(2048, 0.5), 100)])
