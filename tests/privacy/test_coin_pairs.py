"""The curves of rounded correlated noise lie over the exact excess of sums of stochastic roundings."""

import math

import numpy as np
import pytest

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.privacy.coin_pairs import Moves, family
from cpsgd.privacy.curves import Family
from cpsgd.privacy.proofs import rounded_correlated as proof


def _sum_law(numbers: np.ndarray, low: int) -> np.ndarray:
    """Returns the exact law of a sum of stochastic roundings, from the outcome `low` on."""
    floors = np.floor(numbers).astype(int)
    law = np.ones(1)
    for fraction in numbers - floors:
        law = np.convolve(law, [1.0 - fraction, fraction])
    padded = np.zeros(len(law) + 40)
    start = int(floors.sum()) - low
    padded[start : start + len(law)] = law
    return padded


def _excess(first: np.ndarray, second: np.ndarray, s: float) -> float:
    return float(np.maximum(first - s * second, 0.0).sum()) - max(0.0, 1.0 - s)


def _under(curve_family: Family, pairs: list[tuple[np.ndarray, np.ndarray]], distance: float) -> None:
    """Asserts that the mean exact excess over the pairs is under the curve, scaled to the distance."""
    curve = curve_family.first
    scale = distance / curve.distance
    v = np.expm1(curve.log_ratios)
    for x in np.linspace(-0.9, 0.9, 25) * 6.0 * 0.02 * scale:
        exact = float(np.mean([_excess(a, b, 1.0 + x) for a, b in pairs]))
        bound = scale * float(np.interp(x / scale, v, curve.excess))
        assert exact <= bound + curve_family.tail, (x, exact, bound)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("integer_first", [True, False])
def test_own_round_is_under_its_curve(distance: float, share: float, integer_first: bool) -> None:
    others, log = 6000, math.log(2e8)
    law = _law(others)
    coins = proof._coins(law, others, 0.0, 0.5, log)
    generator = np.random.default_rng(7)
    moves = proof._own(law, share, 0.0, coins, 0.5, log)
    families = [family(each, coins, reach=0.5, tail=1e-8, factor=1.0) for each in moves]
    pairs = []
    for _ in range(4):
        fractions = generator.random(others)
        before = np.concatenate([fractions, [0.0 if integer_first else -distance]])
        after = np.concatenate([fractions - (1.0 - share) * distance / others, [distance if integer_first else 0.0]])
        low = int(np.floor(after).sum()) - 10
        pairs.append((_sum_law(after, low), _sum_law(before, low)))
    _under(families[0 if integer_first else 1], pairs, distance)


@pytest.mark.slow
def test_later_round_with_broken_lineages_is_under_its_curve() -> None:
    others, log, share, distance = 6000, math.log(2e8), 0.1, 0.3
    law = _law(others)
    coins = proof._coins(law, others, 0.0, 0.3, log)
    curve = family(proof._later(law, share, 0.3, log), coins, reach=0.3, tail=1e-8, factor=1.0)
    generator = np.random.default_rng(8)
    pairs = []
    for _ in range(4):
        fractions = generator.random(others)
        # Half of the messages inherit a move, and all slots are shifted back but for the share.
        inherited = np.where(np.arange(others) < others // 2, 1.0, 0.0) * 2.0 * 0.5 * distance / others
        moved = inherited - (1.0 - share) * inherited.sum() / others
        low = int(np.floor(fractions).sum()) - 10
        pairs.append((_sum_law(fractions + moved, low), _sum_law(fractions, low)))
    _under(curve, pairs, distance)


def test_arrays_of_coins_are_differences_of_binomials() -> None:
    from cpsgd.privacy import coin_pairs

    k = np.arange(0.0, 41.0)
    exact = {n: np.array([math.comb(n, int(j)) / 2.0**n if j <= n else 0.0 for j in k]) for n in (37, 38, 39, 40)}
    b = coin_pairs._fair(40, k)
    assert np.allclose(b, exact[40], rtol=1e-12)
    for order, ratio in ((1, coin_pairs._first), (2, coin_pairs._second), (3, coin_pairs._third)):
        difference = np.concatenate([np.zeros(order), exact[40 - order]])
        for _ in range(order):
            difference = np.diff(difference)
        sign = -1.0 if order % 2 else 1.0
        assert np.allclose(np.abs(ratio(40, k) * b), np.abs(sign * difference), atol=1e-14)


def test_too_few_coins_are_refused() -> None:
    with pytest.raises(ConditionError, match="more clients"):
        family(Moves((0.0, 0.1), (-0.5, 0.5), 1.0, 0.1, 0, 0.1, 0.1), [(1.0, 10)], reach=1.0, tail=1e-9, factor=1.0)


def _law(others: int) -> SlotsAndCoins:
    from cpsgd.correlated.saturating import RoundedCorrelated

    mechanism = RoundedCorrelated(
        noise_deviation=1.8,
        step=1.0,
        window=32,
        coordinate_range=0.5,
        bands=8,
        run_length=100,
        untrusted_holders=0,
        inherited_range=2.0,
    )
    return mechanism.noise.law(others + 1)
