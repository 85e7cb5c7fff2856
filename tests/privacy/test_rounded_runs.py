"""The cost of a run that is rounded at random lies over exact laws, bound by bound and as a whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.privacy import rounded_runs
from cpsgd.privacy.rounded_runs import Moves, RoundingCoins, differences, run_cost

LOG = 30.0


def law(
    untold: int = 6000, deviation: float = 1.8, told: int = 1, room: float = 2.5, rounds: int = 40
) -> SlotsAndCoins:
    """Returns the noise of a small run."""
    return SlotsAndCoins(untold, told, deviation, deviation * 2.0**-38, room, 2.0 * room, Correlation(4, rounds))


def sum_law(fractions: np.ndarray) -> np.ndarray:
    """Returns the exact law of a sum of independent coins."""
    found = np.ones(1)
    for p in fractions:
        found = np.convolve(found, [1.0 - p, p])
    return found


def differences_of(found: np.ndarray, order: int) -> np.ndarray:
    """Returns D^m of a law, longer by m."""
    for _ in range(order):
        found = np.diff(np.concatenate([[0.0], found, [0.0]])) * -1.0
    return found


@pytest.fixture(scope="module")
def fractions() -> np.ndarray:
    """Returns fractions of 6000 numbers with Gaussian noise."""
    z = np.random.default_rng(3).normal(0.3, 1.8, 6000)
    return z - np.floor(z)


def test_score_is_linear_but_for_second_differences(fractions: np.ndarray) -> None:
    # The identity of the page: Σδ_i D P^-i = r (k - m)/V P + Σ_i δ_i Σ_j (v_j/V)(p_j - p_i) D² P^-ij.
    p = fractions[:9]
    moves = np.random.default_rng(4).normal(size=9)
    v, whole = p * (1.0 - p), sum_law(p)
    left = sum(moves[i] * differences_of(sum_law(np.delete(p, i)), 1) for i in range(9))
    k = np.arange(len(whole))
    right = moves.sum() * (k - p.sum()) / v.sum() * whole
    for i in range(9):
        for j in range(9):
            if i != j:
                weight = moves[i] * v[j] / v.sum() * (p[j] - p[i])
                right += weight * differences_of(sum_law(np.delete(p, [i, j])), 2)
    assert np.allclose(left, right, atol=1e-14)
    # What is not linear is orthogonal to what is.
    assert abs(float((k - p.sum()) @ (right - moves.sum() * (k - p.sum()) / v.sum() * whole))) < 1e-13


@pytest.mark.parametrize("order", [2, 3])
def test_bounds_on_differences_hold_for_exact_laws(fractions: np.ndarray, order: int) -> None:
    coins = RoundingCoins.of(law(), 1.0, LOG)
    # Any coins may be taken out, also certain ones.
    for extra in ([0.0, 1.0, 0.5][:order], [0.0] * order, [0.01, 0.5, 0.99][:order]):
        rest = sum_law(fractions)
        p = sum_law(np.concatenate([fractions, extra]))
        found = differences_of(rest, order)
        k, mean = np.arange(len(p)), fractions.sum() + sum(extra)
        near = np.abs(k - mean) <= coins.window
        exact = math.sqrt(float(np.sum(found[near] ** 2 / p[near])))
        assert 0.5 * coins.norm(order) < exact <= coins.norm(order)
        y = np.maximum(np.abs(k - mean)[near], 1e-9)
        bound = (coins.local(order, y) * y[:, None] ** np.arange(order + 1.0)).sum(axis=1)
        assert np.all(np.abs(found[near] / p[near]) <= bound)


def test_coins_are_as_many_as_counted(fractions: np.ndarray) -> None:
    coins = RoundingCoins.of(law(), 1.0, LOG)
    assert coins.variance < float(np.sum(fractions * (1.0 - fractions)))
    assert coins.fair < float(np.sum(2.0 * np.minimum(fractions, 1.0 - fractions)))


def test_differences_of_fair_coins_are_those_of_binomials() -> None:
    b = stats.binom.pmf(np.arange(401), 400, 0.5)
    for order in (2, 3):
        found = differences_of(b, order)
        exact = max(
            float(np.sum(found[150 : 251 + order] ** 2 / stats.binom.pmf(np.arange(150, 251 + order) - h, 400, 0.5)))
            for h in range(3)
        )
        assert exact <= differences(400, order, 25.0) <= 1.3 * exact


def gaussian(w: float, c: np.ndarray | float) -> np.ndarray:
    """Returns H of G(w) at e^c."""
    root = math.sqrt(w)
    return np.asarray(stats.norm.cdf(root / 2 - c / root) - np.exp(c) * stats.norm.cdf(-root / 2 - c / root))


def beside(first: np.ndarray, second: np.ndarray, w: float, c: float) -> float:
    """Returns H at e^c of a pair beside G(w), exactly: a mean over the outcomes of the pair."""
    both = (first > 1e-280) & (second > 1e-280)
    a, b = first[both], second[both]
    return float(a @ gaussian(w, c + np.log(b / a)) + first[~both].sum())


@pytest.mark.parametrize("own", [0.0, 0.5, 0.93])
@pytest.mark.parametrize("distance", [0.3, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_own_round_beside_a_gaussian_is_within_its_rate(
    fractions: np.ndarray, own: float, distance: float, share: float
) -> None:
    # The client's number goes from `own` to `own` + distance, the others back by (1 - share) of that together.
    coins, w = RoundingCoins.of(law(), distance, LOG), 0.1
    kappa = coins.rate(rounded_runs._own_moves(coins, share, 0.0), w, distance)
    after = fractions - (1.0 - share) * distance / len(fractions)
    low = -int(np.floor(after).sum()) + 1

    def placed(numbers: np.ndarray) -> np.ndarray:
        floors = np.floor(numbers).astype(int)
        found = sum_law(numbers - floors)
        return np.concatenate([np.zeros(low + floors.sum()), found, np.zeros(4 - floors.sum())])[: len(fractions) + low]

    first, second = placed(np.append(after, own + distance)), placed(np.append(fractions, own))
    assert abs(first.sum() - 1.0) < 1e-9
    assert abs(second.sum() - 1.0) < 1e-9
    for c in (-1.5, -0.7, -0.1, 0.0, 0.3, 0.8, 1.5):
        assert gaussian(w, c) <= beside(first, second, w, c) + 1e-12
        assert beside(first, second, w, c) <= gaussian(w + kappa * distance**2, c) + 1e-12


def test_later_round_with_broken_lineages_is_within_its_rate(fractions: np.ndarray) -> None:
    count, q, share, w = len(fractions), 0.8, 0.1, 0.1
    coins = RoundingCoins.of(law(), 1.0, LOG)
    kappa = coins.rate(rounded_runs._later_moves(coins, share, q, 1.0), w, 1.0)
    inherited = np.where(np.arange(count) < count // 2, 2.0 * q / count, 0.0)
    inherited = np.minimum(inherited, 1.0 / count)
    moved = inherited - (1.0 - share) * inherited.sum() / count
    inside = (fractions > 2.0 / count) & (fractions < 1.0 - 2.0 / count)
    first, second = sum_law((fractions + moved)[inside]), sum_law(fractions[inside])
    for c in (-1.0, 0.0, 0.5, 1.2):
        assert beside(first, second, w, c) <= gaussian(w + kappa, c) + 1e-13


def test_shares_of_saturated_messages_are_tail_bounds() -> None:
    for p, count in ((0.01, 2000), (0.1, 300)):
        share = rounded_runs._chernoff(p, count, 12.0)
        assert stats.binom.sf(math.floor(share * count), count, p) <= math.exp(-12.0)
        assert stats.binom.sf(math.floor(0.9 * share * count), count, p) > math.exp(-14.0)


def test_cost_falls_with_clients_and_rises_with_all_else() -> None:
    def w(distance: float = 45.0, reach: float = 0.5, dim: int = 10_000, **changes: float) -> float:
        return run_cost(law(**changes), distance=distance, reach=reach, dim=dim, tail=1e-9).w  # type: ignore[arg-type]

    usual = w()
    assert w(untold=9000) < usual < w(told=50)
    assert w(deviation=2.5) < usual < w(reach=0.7)
    assert usual < w(room=2.0)
    assert usual < w(distance=48.0)
    # Never below what slots alone would be if all protected, and rounding took half.
    assert usual > run_cost(law(), distance=45.0, reach=0.5, dim=10_000, tail=1e-9).slots > 0.0


def test_what_is_not_proved_is_refused() -> None:
    for changes in ({"untold": 100}, {"deviation": 0.3}, {"room": -1.0}):
        with pytest.raises(ConditionError):
            run_cost(law(**changes), distance=12.0, reach=0.5, dim=1000, tail=1e-9)  # type: ignore[arg-type]
    with pytest.raises(ConditionError, match="too large"):
        RoundingCoins.of(law(), 20.0, LOG).rate(Moves(0.5, 0.25, 0.5, 2.0), 1e-4, 20.0)


def test_more_coins_never_cost_more() -> None:
    coins = RoundingCoins.of(law(), 0.7, LOG)
    for moves in (rounded_runs._own_moves(coins, 0.1, 0.0), rounded_runs._later_moves(coins, 0.1, 0.4, 0.9)):
        rates = [replace(coins, variance=coins.variance * more).rate(moves, 0.05, 0.7) for more in (1.0, 1.1, 1.5, 2.5)]
        assert rates == sorted(rates, reverse=True)
