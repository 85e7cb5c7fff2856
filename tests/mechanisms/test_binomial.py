from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from scipy import stats

from cpsgd.mechanisms import Binomial, binomial
from cpsgd.randomness import Keystream

# Each chi-square test below raises a false alarm with this probability over seeds; the seed is fixed.
FALSE_ALARM = 1e-7
DRAWS = 400_000


def draw(trials: int, p: float, count: int = DRAWS, name: int = 1) -> np.ndarray:
    return binomial.sample(trials, p, count, Keystream(bytes([name] * 16)))


def p_value(sample: np.ndarray, trials: int, p: float) -> float:
    """Chi-square test of a sample against Binomial(m, p), outcomes pooled to at least 20 expected."""
    mass = stats.binom.pmf(np.arange(trials + 1), trials, p) * sample.size
    counts = np.bincount(sample, minlength=trials + 1).astype(float)
    assert counts.size == trials + 1, "an outcome above m"
    if int((mass >= 20).sum()) == 1:  # all but certain: a single other outcome would be a wonder
        return float(counts[mass >= 20].sum() == sample.size)
    big = mass >= 20
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(mass[big], mass[~big].sum())
    if expected[-1] < 5:  # too rare to test on their own: pool with their neighbour
        observed[-2:], expected[-2:] = [observed[-2:].sum(), 0], [expected[-2:].sum(), 0]
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


LAWS = [
    *((1, 0.5), (14, 0.5), (16, 0.5), (17, 0.5), (64, 0.5), (256, 0.5), (257, 0.5), (14, 0.25), (30, 0.9)),
    *((1000, 0.3), (5, 1e-3), (10**6, 0.5), (10, 1e-60), (10, 1 - 2**-53), (5000, 5e-324)),
]


@pytest.mark.parametrize(("trials", "p"), LAWS)
def test_law(trials: int, p: float) -> None:
    assert p_value(draw(trials, p), trials, p) > FALSE_ALARM


def wrong_one_coin_less(trials: int, p: float) -> np.ndarray:
    return draw(trials - 1, p)


def wrong_biased_coin(trials: int, p: float) -> np.ndarray:
    return draw(trials, p + 0.005)


def wrong_one_coin_twice(trials: int, p: float) -> np.ndarray:
    once = draw(1, p, name=2)
    return draw(trials - 2, p) + 2 * once


def wrong_gaussian(trials: int, p: float) -> np.ndarray:
    random = np.random.default_rng(0)
    rounded = np.rint(trials * p + (trials * p * (1 - p)) ** 0.5 * random.standard_normal(DRAWS))
    return np.clip(rounded, 0, trials).astype(np.int64)


@pytest.mark.parametrize("wrong", [wrong_one_coin_less, wrong_biased_coin, wrong_one_coin_twice, wrong_gaussian])
@pytest.mark.parametrize("p", [0.5, 0.3])
def test_the_test_sees_a_wrong_sampler(wrong: Callable[[int, float], np.ndarray], p: float) -> None:
    assert p_value(wrong(14, p), 14, p) < FALSE_ALARM


def test_coins_of_one_coordinate_are_independent_of_the_next() -> None:
    values = draw(64, 0.5).astype(float) - 32
    # Sum of 400,000 products of independent unit-variance pairs: normal with standard deviation 1/√400,000.
    for lag in (1, 2, 8, 16, 1000):
        assert abs(float(np.mean(values[:-lag] * values[lag:])) / 16) < 5.4 / DRAWS**0.5


@pytest.mark.parametrize(("trials", "p"), [(1, 0.3), (7, 0.25), (40, 0.9), (300, 0.5), (300, 0.01)])
def test_the_table_is_within_its_stated_distance(trials: int, p: float) -> None:
    success = Fraction(p)
    exact = [comb(trials, j) * success**j * (1 - success) ** (trials - j) for j in range(trials + 1)]
    table = binomial.table(trials, p)
    thresholds = [0, *(int(h) << 64 | int(low) for h, low in zip(table.high, table.low, strict=True)), 2**128]
    drawn = [Fraction(0)] * (trials + 1)
    for j in range(len(thresholds) - 1):
        drawn[table.base + j] = Fraction(thresholds[j + 1] - thresholds[j], 2**128)
    distance = sum(abs(a - b) for a, b in zip(exact, drawn, strict=True)) / 2
    assert distance <= Fraction(binomial.total_variation(trials, p))
    # The bound is not vacuous: where the probabilities need more than 128 bits it is within a factor of 1000 of the
    # truth.
    assert trials == 1 or float(distance) > binomial.total_variation(trials, p) / 1000
    assert binomial.total_variation(trials, p) < 1e-32


def test_coins_are_exact() -> None:
    assert binomial.total_variation(14, 0.5) == 0.0
    assert binomial.total_variation(0, 0.3) == 0.0
    assert binomial.total_variation(binomial.MAX_COINS, 0.5) == 0.0
    assert binomial.total_variation(binomial.MAX_COINS + 1, 0.5) > 0.0


def test_the_largest_table() -> None:
    table = binomial.table(binomial.MAX_TRIALS, 0.5)
    deviation = (binomial.MAX_TRIALS / 4) ** 0.5
    assert 2 * 14 * deviation < table.high.size < 2 * 16 * deviation
    assert binomial.total_variation(binomial.MAX_TRIALS, 0.5) < 1e-32
    values = draw(binomial.MAX_TRIALS, 0.5, 10_000).astype(float)
    # Mean of 10,000 draws: within 5.4 standard errors with probability 1 - 1e-7.
    assert abs(values.mean() - binomial.MAX_TRIALS / 2) < 5.4 * deviation / 100


def test_the_mean_is_that_of_the_draws() -> None:
    values = draw(14, 0.25).astype(np.float64)
    mean = Binomial(levels=2, trials=14, p=0.25, coordinate_range=1.0).noise.mean
    assert abs(float(values.mean()) - mean) < 5.4 * (14 * 0.1875 / DRAWS) ** 0.5
