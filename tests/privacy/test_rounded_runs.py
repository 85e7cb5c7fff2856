"""The cost of a run that is rounded at random lies over exact laws, bound by bound and as a whole."""

from __future__ import annotations

import bisect
import contextlib
import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.privacy import coin_sums, rounded_runs
from cpsgd.privacy.rounded_runs import RoundingCoins, run_cost
from tests import known_values as known

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
@pytest.mark.parametrize("extra", [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
@pytest.mark.parametrize("skewed", [0.0, 0.1, 0.9], ids="{:g}".format)
def test_bounds_on_outcomes_hold_for_exact_laws(
    fractions: np.ndarray, order: int, extra: list[float], skewed: float
) -> None:
    # Any coins may be taken out, also certain ones. The bounds are about any coins of this variance.
    coins, step = RoundingCoins.of(law(), 1.0, LOG), 2
    if skewed:
        fractions = np.full(7000, skewed)
        coins = replace(coins, variance=float(np.sum(fractions * (1.0 - fractions))))
    p = sum_law(np.concatenate([fractions, extra[:order]]))
    found = differences_of(sum_law(fractions), order)
    y = np.abs(np.arange(len(p)) - fractions.sum() - sum(extra[:order]))
    mass, ends, *both = coins.cells(step)
    bound = both[order - 2]
    for i, end in enumerate(ends):
        inside = (y >= end - step) & (y <= end)
        assert p[inside & (y < end)].sum() <= mass[i]
        assert np.all(np.abs(found[inside]) <= bound.own[i] * p[inside])
        # And of a law whose mean is one further away.
        farther = (y >= end - step) & (y <= end + 1.0)
        assert np.all(np.abs(found[farther]) <= bound.everywhere[i] * p[farther])
    near = y <= coins.window
    exact = float(np.sum(found[near] ** 2 / p[near]))
    # V is counted low by up to 6 % here, and the skew of coins is not known.
    assert exact <= float(mass @ bound.own**2) <= (4.0 if order == 2 else 12.0) * exact


def test_coins_are_as_many_as_counted(fractions: np.ndarray) -> None:
    coins = RoundingCoins.of(law(), 1.0, LOG)
    assert 0.9 * float(np.sum(fractions * (1.0 - fractions))) < coins.variance < np.sum(fractions * (1.0 - fractions))


def gaussian(w: float, c: np.ndarray | float) -> np.ndarray:
    """Returns H of G(w) at e^c."""
    root = math.sqrt(w)
    return np.asarray(stats.norm.cdf(root / 2 - c / root) - np.exp(c) * stats.norm.cdf(-root / 2 - c / root))


def beside(first: np.ndarray, second: np.ndarray, w: float, c: float) -> float:
    """Returns H at e^c of a pair beside G(w), exactly: a mean over the outcomes of the pair."""
    both = (first > 1e-280) & (second > 1e-280)
    a, b = first[both], second[both]
    return float(a @ gaussian(w, c + np.log(b / a)) + first[~both].sum())


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.6])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_own_round_beside_a_gaussian_is_within_its_rate(fractions: np.ndarray, distance: float, share: float) -> None:
    # The client's number goes from `own` to `own` + distance, the others back by (1 - share) of that together. Where
    # it begins is as likely anywhere: the rate is about the mean over that.
    coins, w = RoundingCoins.of(law(), distance, LOG), 0.1
    moves = rounded_runs._own_moves(coins, share, np.array([distance]))
    kappa = float(coins.rates(moves, np.array([w]), distance)[0])
    assert kappa < math.inf
    after = fractions - (1.0 - share) * distance / len(fractions)
    down = np.floor(after).astype(int)
    others, moved = sum_law(fractions), sum_law(after - down)
    room = 4 - int(down.sum())
    starts = (np.arange(16) + 0.5) / 16
    pairs = [
        (
            np.convolve(np.pad(moved, (room + int(down.sum()), 8)), _coin(own + distance, 6)),
            np.convolve(np.pad(others, (room, 8 + int(down.sum()))), _coin(own, 6)),
        )
        for own in starts
    ]
    assert all(abs(part.sum() - 1.0) < 1e-9 for pair in pairs for part in pair)
    for c in (-1.8, -0.7, 0.0, 0.3, 0.8, 1.8):
        exact = float(np.mean([beside(first, second, w, c) for first, second in pairs]))
        assert gaussian(w, c) <= exact + 1e-12
        assert exact <= gaussian(w + kappa * distance**2, c) + 1e-12


def _coin(number: float, size: int) -> np.ndarray:
    """Returns the law of a number that is rounded at random."""
    found: np.ndarray = np.maximum(0.0, 1.0 - np.abs(np.arange(size) - number))
    return found


def test_later_round_with_broken_lineages_is_within_its_rate(fractions: np.ndarray) -> None:
    count, q, share, w = len(fractions), 0.8, 0.1, 0.1
    coins = RoundingCoins.of(law(), 1.0, LOG)
    moves = rounded_runs._later_moves(coins, np.array([share * q]), np.array([q]), 1.0, 1.0)
    kappa = float(coins.rates(moves, np.array([w]), 1.0)[0])
    inherited = np.where(np.arange(count) < count // 2, 2.0 * q / count, 0.0)
    inherited = np.minimum(inherited, 1.0 / count)
    moved = inherited - (1.0 - share) * inherited.sum() / count
    inside = (fractions > 2.0 / count) & (fractions < 1.0 - 2.0 / count)
    first, second = sum_law((fractions + moved)[inside]), sum_law(fractions[inside])
    for c in (-1.0, 0.0, 0.5, 1.2):
        assert beside(first, second, w, c) <= gaussian(w + kappa, c) + 1e-13


@pytest.mark.parametrize("b", [-40.0, -1.0, -0.5, 0.3, 1.0, 40.0])
def test_what_is_left_of_the_expansion_is_of_fourth_order(b: float) -> None:
    # h(x) = (e^(bx) - 1)/b against x + bx²/2, and 2 ∫ (1 - e^(x-a)) e^(bx) dx from 0 to a, whose Φ + Φ' is 2h.
    x = np.linspace(-0.2, 0.2, 401)
    rest = np.expm1(b * x) / b - x - 0.5 * b * x * x
    assert np.all(np.abs(rest) <= b * b * np.abs(x) ** 3 / 6.0 * np.exp(np.abs(b * x)) + 1e-15)

    def phi(at: float) -> float:
        grid = np.linspace(0.0, at, 20_001)
        return float(2.0 * np.trapezoid((1.0 - np.exp(grid - at)) * np.exp(b * grid), grid))

    for at in (-0.15, 0.1):
        slope = (phi(at + 1e-4) - phi(at - 1e-4)) / 2e-4
        assert abs(phi(at) + slope - 2.0 * math.expm1(b * at) / b) < 1e-5 * math.exp(abs(b * at))


def test_shares_of_saturated_messages_are_tail_bounds() -> None:
    for p, count in ((0.01, 2000), (0.1, 300)):
        assert coin_sums.chernoff(1.0, count, 12.0) == 1.0
        share = coin_sums.chernoff(p, count, 12.0)
        assert stats.binom.sf(math.floor(share * count), count, p) <= math.exp(-12.0)
        assert stats.binom.sf(math.floor(0.9 * share * count), count, p) > math.exp(-14.0)


def test_numbers_that_pass_an_integer_on_their_way_are_as_many_as_counted() -> None:
    # Their fractions jump from 1 to 0: some Poisson number, and not its mean.
    for reach in (0.3, 2.0):
        coins = RoundingCoins.of(law(), reach, LOG)
        passed = coins.untold * (coins.lean - math.sqrt(0.5 * LOG / coins.untold) - 0.5 * coins.chance - coins.uneven)
        assert stats.binom.sf(math.floor(passed), coins.untold, reach / coins.untold) <= math.exp(-LOG)


def test_sums_over_outcomes_are_bounded_whatever_turns_functions_take() -> None:
    rng = np.random.default_rng(7)
    for step in (1, 3):
        cells = rng.exponential(size=(1, 12)) * (rng.random((1, 12)) < 0.6)
        bound = float(coin_sums.summed(2.0 * step * cells, step)[0])
        for wider in (1.0, 1.01, 1.7, 4.3):
            # Outcomes of a law with more variance lie closer together, and weigh less.
            for offset in np.linspace(0.0, 0.999, 12):
                places = (np.arange(0.0, 12 * step * wider) + offset) / wider
                inside = places[places < 12 * step]
                assert 2.0 * cells[0][(inside // step).astype(int)].sum() / wider <= bound * (1.0 + 1e-12)


@pytest.mark.parametrize("changes", [{"rounds": 1}, {"room": 50.0}])
def test_short_runs_and_wide_windows_have_a_cost(changes: dict[str, float]) -> None:
    # Both divided by zero, or took the largest of nothing.
    fields = {"untold": 6000, "told": 1, "deviation": 1.8, "point": 1e-11, "room": 2.5, "farther": 60.0}
    fields.update({k: v for k, v in changes.items() if k == "room"})
    weighting = Correlation(1, 1) if "rounds" in changes else Correlation(4, 40)
    cost = run_cost(
        SlotsAndCoins(**fields, weighting=weighting),  # type: ignore[arg-type]
        distance=45.0,
        reach=0.5,
        dim=10_000,
        tail=1e-9,
    )
    assert cost.slots < cost.w < 1.3 * cost.slots


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
    for untold, tail in ((199, 1e-9), (6000, 1e-193)):
        with pytest.raises(ConditionError, match="nobody tells"):
            run_cost(law(untold=untold), distance=12.0, reach=0.5, dim=10**6, tail=tail)
    with pytest.raises(ConditionError, match="does not hide fractions"):
        run_cost(law(deviation=0.5), distance=12.0, reach=0.5, dim=1000, tail=1e-9)
    assert len(replace(COUNTED, variance=200.0)._terms(2, np.zeros(1))) == 5
    with pytest.raises(ConditionError, match="Too few messages"):
        replace(COUNTED, variance=9.0)._terms(2, np.zeros(1))
    with pytest.raises(ConditionError, match="Too few messages"):
        run_cost(law(untold=200), distance=12.0, reach=0.5, dim=10**6, tail=1e-9)
    for changes in ({"untold": 100}, {"deviation": 0.3}, {"room": -1.0}):
        with pytest.raises(ConditionError):
            run_cost(law(**changes), distance=12.0, reach=0.5, dim=1000, tail=1e-9)  # type: ignore[arg-type]
    with pytest.raises(ConditionError, match="too large"):
        run_cost(law(), distance=20.0, reach=20.0, dim=1000, tail=1e-9)


def test_more_coins_never_cost_more() -> None:
    coins = RoundingCoins.of(law(), 0.7, LOG)
    own = rounded_runs._own_moves(coins, 0.1, np.zeros(1))
    later = rounded_runs._later_moves(coins, np.array([0.04]), np.array([0.4]), 0.9, 0.7)
    for moves in (own, later):
        more = (replace(coins, variance=coins.variance * factor) for factor in (1.0, 1.1, 1.5, 2.5))
        rates = [float(each.rates(moves, np.array([0.05]), 0.7)[0]) for each in more]
        assert rates == sorted(rates, reverse=True)


def test_shares_of_slots_and_coins_are_the_best_there_are() -> None:
    # μ² = Δ² [(Uσ² LLᵀ + V)⁻¹]₀₀ of the linear Gaussian problem, V less by the factor that coins are dearer.
    given = law(rounds=12)
    coins = RoundingCoins.of(given, 0.5, LOG)
    split = rounded_runs._split(given, coins)
    weights = np.zeros(12)
    weights[:4] = given.weighting.factors
    lower = np.array([[weights[i - j] if i >= j else 0.0 for j in range(12)] for i in range(12)])
    slots, v = given.untold * given.deviation**2, coins.variance / rounded_runs._DEARER
    best = np.linalg.inv(slots * lower @ lower.T + v * np.eye(12))[0, 0]
    cost = float(split.shifts @ split.shifts) / slots + float(split.left @ split.left) / v
    assert best <= cost <= best * (1.0 + 1e-6)
    assert np.allclose(split.shifts + split.left, split.moved, rtol=1e-8)


COUNTED = RoundingCoins(
    variance=900.0, untold=6000, told=30, log=40.0, chance=0.01, saturated=0.03, skew=0.02, lean=0.05, grid=1e-6,
    uneven=1e-3,
)  # fmt: skip


def test_moves_of_the_own_round_are_those_of_the_page() -> None:
    p, u, least = 0.01, 6000, np.array([0.0, 0.4, 1.0, 2.7])
    # The largest mean of |½ - p| over a way of each length, wherever it begins: one of 1.4 leans more than one of 1.
    lengths = np.arange(0.0, 4.0, 0.1)
    begins, along = np.linspace(0.0, 1.0, 40, endpoint=False)[:, None], (np.arange(400) + 0.5) / 400
    ways = np.array([np.abs(0.5 - (begins + along * length) % 1.0).mean(axis=1).max() for length in lengths])
    for share in (0.0, 0.3, 0.9):
        moves = rounded_runs._own_moves(COUNTED, share, least)
        mean = share + (1.0 - share) * 0.03
        np.testing.assert_allclose(moves.mean, mean, rtol=1e-12)
        np.testing.assert_allclose(moves.path, 2.0 - share, rtol=1e-12)
        # r = θ + (1 - θ) (the share that saturates): its mean, and a variance by Gebelein's inequality.
        exact = share**2 + 2 * share * (1 - share) * p + (1 - share) ** 2 * (p * p + 3 * p / u)
        np.testing.assert_allclose(moves.square, 1.002 * exact, rtol=1e-12)
        others = 0.05 + 0.03 / 2 + mean * 0.02
        np.testing.assert_allclose(moves.twist, 0.5 + others, rtol=1e-12)
        twists = math.sqrt(1 / 12 + 1e-3) + math.sqrt(1 / (2 * u)) + p / 2 + 1e-3 + mean * 0.02
        np.testing.assert_allclose(moves.twists, twists, rtol=1e-12)
        for length, way in zip(least, moves.way, strict=True):
            longer = ways[lengths >= length - 1e-9].max()
            assert longer - 1e-3 <= way - others <= max(longer, 1.0 - math.sqrt(0.5)) + 1e-3


def test_moves_of_later_rounds_are_those_of_the_page() -> None:
    p, u, skew, uneven, log = 0.01, 6000, 0.02, 1e-3, 40.0
    lefts, qs, first = np.array([0.1, 0.02, 0.0]), np.array([0.5, 0.2, 1e-4]), 0.9
    moves, step = rounded_runs._later_moves(COUNTED, lefts, qs, first, 1.5), first / 6000
    for i, (left, q) in enumerate(zip(lefts, qs, strict=True)):
        told = min(q, 30 * step)
        spread = 2 * p * step * q
        # Bernstein: x²/2 = log (variance + bound x/3).
        x = float(np.max(np.roots([0.5, -log * step / 3, -log * spread])))
        lost = min(2 * p * q + x, 2 * q)
        mean = left + lost + told
        square = min((left + p * q + told) ** 2 + spread + 5 * p * q**2 / u, mean**2)
        common = mean * skew + p * q + 2 * uneven * q + told / 2
        # A number that moves by δ passes an integer with the probability |δ|, at most 1.5 steps' here.
        passed = 2 * q * (1.5 * step + uneven)
        passed += float(np.max(np.roots([0.5, -log * step / 3, -log * step * passed])))
        twist = math.sqrt(step * q * log) + common + lost / 2 + passed
        twists = math.sqrt(step * q / 2 + 5 * q**2 / (4 * u)) + common
        expected = (mean, 1.002 * square, twist, twist, twists, 2 * q)
        found = (moves.mean, moves.square, moves.twist, moves.way, moves.twists, moves.path)
        np.testing.assert_allclose([part[i] for part in found], expected, rtol=1e-8)


@pytest.mark.parametrize(("told", "reach", "log"), [(1, 0.5, 30.0), (40, 2.0, 60.0)])
def test_coins_are_counted_as_the_page_does(told: int, reach: float, log: float) -> None:
    noise = law(told=told, room=4.0, deviation=0.6)
    coins, count = RoundingCoins.of(noise, reach, log), 6000
    margin = math.sqrt(2 * log / count) + 0.01 + reach / (count * 0.6)
    p = stats.norm.sf(4.0 - margin) + stats.norm.sf(8.0 - margin)
    uneven = 2.2 * math.exp(-2 * math.pi**2 * 0.36) + noise.point
    assert coins.chance == pytest.approx(p, rel=1e-8)
    assert coins.uneven == pytest.approx(uneven, rel=1e-12)
    # E v = 1/6 and Var v = 1/180 of uniform fractions; Bernstein's inequality, and what neighbours move.
    mean, spread, bound = 1 / 6 - p / 4 - uneven, 1 / 180 + p / 36 + uneven, 1 / 6 + uneven
    x = float(np.max(np.roots([0.5, -log * bound / 3, -log * count * spread])))
    assert coins.variance == pytest.approx(count * mean - x - 2 * reach - 1, rel=1e-8)
    passed = reach + uneven * count
    passed += float(np.max(np.roots([0.5, -log / 3, -log * passed])))
    assert coins.lean == pytest.approx(math.sqrt(log / (2 * count)) + p / 2 + uneven + passed / count, rel=1e-8)
    leaning = math.sqrt(2 * log * count) + (p + uneven) * count + told
    assert coins.skew == pytest.approx((rounded_runs._SKEWED * leaning + reach) / coins.variance, rel=1e-8)
    fractions = np.linspace(0.0, 1.0, 10_001)
    assert 0 <= rounded_runs._SKEWED - np.max(fractions * (1 - fractions) * np.abs(fractions - 0.5)) < 1e-4
    assert coins.grid == pytest.approx(4 * (count + told) * noise.point, rel=1e-12)
    assert coins.saturated == coin_sums.chernoff(coins.chance, count, log)
    assert (coins.told, coins.untold, coins.log) == (told, count, log)


def bernstein(variance: float, bound: float, log: float) -> float:
    """Returns x with x²/2 = log (variance + bound x/3)."""
    return float(np.max(np.roots([0.5, -log * bound / 3, -log * variance])))


@pytest.mark.parametrize(
    ("room", "deviation", "reach", "log"),
    [(2.5, 1.8, 0.5, 30.0), (4.0, 0.6, 2.0, 60.0), (1.3, 1.8, 0.5, 30.0), (4.0, 1.8, 20.0, 3.0), (4.0, 0.6, 80.0, 3.0)],
)
def test_coins_are_enough_where_the_page_says(room: float, deviation: float, reach: float, log: float) -> None:
    # The number of others from which on it holds: a window of half the variance, or five fractions near a half.
    def known_to_be_enough(count: int) -> bool:
        margin = math.sqrt(2 * log / count) + 0.01 + reach / (count * deviation)
        p = min(1.0, stats.norm.sf(room - margin) + stats.norm.sf(2 * room - margin))
        uneven = 2.2 * math.exp(-2 * math.pi**2 * deviation**2) + deviation * 2.0**-38
        spread, bound = 1 / 180 + p / 36 + uneven, 1 / 6 + uneven
        variance = count * (1 / 6 - p / 4 - uneven) - bernstein(count * spread, bound, log) - 2 * reach - 1
        passed = reach + uneven * count
        passed += bernstein(passed, 1.0, log)
        among = count * (0.2 - p - uneven) - bernstein(0.2 * count, 1.0, log) - 4 * passed
        return among > 5 and variance > 0 and bernstein(variance, 1.0, log + math.log(2)) < variance / 2

    def is_enough(count: int) -> bool:
        with contextlib.suppress(ConditionError):
            return bool(RoundingCoins.of(law(untold=count, deviation=deviation, room=room), reach, log))
        return False

    least = bisect.bisect(range(10**5), False, lo=200, key=known_to_be_enough)
    assert [is_enough(count) for count in (least - 1, least, 2 * least)] == [False, True, True]


@pytest.mark.parametrize(("name", "limit"), [("mean", 1.0), ("path", 0.5 * COUNTED.variance)])
def test_moves_beyond_the_reach_of_the_bounds_cost_infinity(
    name: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without differences only the limits of the shift, and of the swelling of V, are left.
    flat = rounded_runs.Differences(*np.zeros((2, 5)))
    monkeypatch.setattr(RoundingCoins, "cells", lambda _, step: (np.zeros(5), np.zeros(5), flat, flat))
    small = rounded_runs.Moves(*np.full((6, 1), 1e-9))
    for factor in (0.99, 1.01):
        moves = replace(small, **{name: np.array([factor * limit])})
        moment = COUNTED._moment(moves, np.full((1, 1), 1.4), np.ones((1, 1)))[0]
        assert math.isfinite(float(moment[0])) == (factor < 1.0)


_RUNS = {
    "small": (law(), 20.0, 0.5, 3),
    "told": (law(untold=9000, deviation=1.1, told=7, room=3.0, rounds=12), 30.0, 0.7, 20),
    "saturating": (law(untold=40_000, deviation=2.5, told=3, room=1.8, rounds=60), 50.0, 2.0, 5),
    "noisy": (law(untold=2_000_000, deviation=0.9, told=100, room=3.5), 400.0, 1.7, 1000),
}


@pytest.mark.parametrize("name", _RUNS)
def test_known_costs(name: str) -> None:
    given, distance, reach, dim = _RUNS[name]
    cost = run_cost(given, distance=distance, reach=reach, dim=dim, tail=1e-7)
    values: dict[str, Any] = {"cost": astuple(cost)}
    for log in (LOG, 12.0):
        coins = RoundingCoins.of(given, reach, log)
        coins = replace(coins, uneven=coins.uneven + 1e-4, saturated=coins.saturated + 1e-3, grid=0.01)
        split = rounded_runs._split(given, coins)
        later = rounded_runs._later_moves(coins, split.left[1:], split.moved[1:], float(split.shifts[0]), reach)
        own = rounded_runs._own_moves(coins, 0.2, np.linspace(0.0, 1.5, 5))
        values |= {f"coins {log}": astuple(coins), f"split {log}": np.concatenate(split)}
        for kind, moves in (("own", own), ("later", later)):
            values[f"{kind} {log}"] = np.concatenate(astuple(moves))
            for w in (0.003, 0.3, 3.0):
                wide = np.full(len(moves.mean), w)
                values[f"{kind} {log} {w} rates"] = coins.rates(moves, wide, 0.3)
                moment = coins._moment(moves, np.sqrt(wide)[:, None], np.full((len(wide), 1), 0.3))
                values[f"{kind} {log} {w} moment"] = np.concatenate(moment)
        for step in (1, 3):
            mass, ends, two, three = coins.cells(step)
            values[f"cells {log} {step}"] = np.concatenate([mass, ends])
            for order, bound in ((2, two), (3, three)):
                values |= {f"own {log} {step} {order}": bound.own, f"all {log} {step} {order}": bound.everywhere}
        for order in (2, 3):
            terms = coins._terms(order, np.array([0.0, 1.0, 7.0, 0.2 * coins.variance]))
            values[f"terms {log} {order}"] = np.concatenate(terms)
        values[f"swapped {log}"] = [
            rounded_runs._swapped(coins, split, 0.2 * split.shifts**2, distance**2, 0.1, share)
            for share in (0.1, 0.5, 3.0)
        ]
    # So near that also what is allowed for roundings counts.
    known.check("privacy/rounded_runs", {f"{name} {key}": value for key, value in values.items()}, rel=2e-10)


def test_known_sums_of_coins() -> None:
    values: dict[str, object] = {"moments": coin_sums._ABSOLUTE}
    variance = np.array([3.0, 20.0, 400.0])
    for order in (2, 3):
        for j in range(4):
            values[f"central {j} {order}"] = coin_sums.central(j, order, variance)
            values[f"error {j} {order}"] = coin_sums.error(j, order, variance)
    cells = np.array([[1.0, 3.0, 2.0, 2.5], [0.5, 0.0, 0.0, 4.0]])
    values |= {f"summed {step}": coin_sums.summed(cells, step) for step in (1, 3)}
    values["bernstein"] = coin_sums.bernstein(variance, 0.7, 12.0)
    values["chernoff"] = [
        coin_sums.chernoff(p, count, log) for p in (0.0, 0.01, 0.6) for count in (3, 500) for log in (2.0, 40.0)
    ]
    known.check("privacy/coin_sums", values)


@pytest.mark.parametrize("j", range(10))
def test_absolute_moments_of_a_gaussian(j: int) -> None:
    x = np.linspace(0.0, 14.0, 200_001)
    moment = 2.0 * np.trapezoid(x**j * np.exp(-0.5 * x * x), x) / math.sqrt(2.0 * math.pi)
    assert coin_sums._ABSOLUTE[j] == pytest.approx(moment, rel=1e-8)


def test_a_rate_is_proved_for_small_steps_and_little_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, w, reach = rounded_runs._own_moves(COUNTED, 0.1, np.zeros(2)), np.array([0.5, 4.0]), 0.3
    for share, beyond, proved in ((0.99, 0.99, True), (1.01, 0.99, False), (0.99, 1.01, False)):
        found = share * 0.05 * np.minimum(w, 1.0) / reach**2
        answer = found, np.full(2, beyond * math.exp(-COUNTED.log))
        monkeypatch.setattr(RoundingCoins, "_moment", lambda *_, answer=answer: answer)
        largest = found * reach**2
        expected = found * (1.0 + largest / w + largest) if proved else np.full(2, math.inf)
        assert COUNTED.rates(moves, w, reach) == pytest.approx(expected, rel=1e-8)


def test_places_are_closer_where_there_are_few_rounds() -> None:
    one, many, more = (
        float(COUNTED.rates(rounded_runs._own_moves(COUNTED, 0.1, np.zeros(rounds)), np.full(rounds, 1.4), 1.0)[0])
        for rounds in (1, rounded_runs._MANY, rounded_runs._MANY + 1)
    )
    assert one == many != more
    assert one == pytest.approx(more, rel=0.05)
