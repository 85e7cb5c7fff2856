"""What a run of correlated noise costs where clients round at random: docs/proofs/rounded-correlated.md in numbers.

The names are those of the page. Everything is an upper bound, but the lower bounds V and F of coins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Array, SlotsAndCoins

# Events of a coordinate and round that the tail pays for.
_EVENTS = 20.0
# Share of w that the adversary is given.
_GIVEN = 0.01
# Coins cost so much more than V says where shares are chosen, and the largest share of a round's move that is theirs.
_DEARER, _LARGEST_SHARE = 1.15, 0.9
# Distances from the mean at which tails are taken, and the largest exponent.
_PLACES, _STEEPEST = 80, 100.0
# The coordinates of the client's own round are taken in so many parts.
_PIECES = 8
_UP = 1.0 + 1e-9
# E|N|^j of a standard Gaussian.
_ABSOLUTE = tuple(2.0 ** (j / 2.0) * math.gamma((j + 1) / 2.0) / math.sqrt(math.pi) for j in range(10))
# max of p(1-p)|p-½|, rounded up.
_SKEWED = 0.0482
# With fewer others there are too few coins.
_FEWEST = 200


@dataclass(frozen=True)
class RunCost:
    """A run: it is ≼ G(w) up to the tail mass."""

    w: float
    slots: float
    tail_mass: float


@lru_cache(maxsize=256)
def run_cost(law: SlotsAndCoins, *, distance: float, reach: float, dim: int, tail: float) -> RunCost:
    """Returns what a run costs a client that is in one of its rounds.

    Args:
        law: The noise.
        distance: The largest distance of neighbours, in steps.
        reach: The largest distance in a coordinate, in steps.
        dim: d.
        tail: Probability that may be left out, over all coordinates and rounds.

    Raises:
        ConditionError: There are too few clients, or too little noise, for this proof.
    """
    reach = min(reach, distance)
    each = tail / (_EVENTS * dim * law.weighting.rounds)
    if law.untold < _FEWEST or not each > 1e-200:
        raise ConditionError(
            f"Of the others in a round {law.untold} have noise that nobody tells; rounding at random is proved for "
            "more clients, hundreds at least."
        )
    coins = RoundingCoins.of(law, reach, -math.log(each))
    shifts, left, moved = _split(law, coins)
    slots = shifts * shifts / (law.untold * law.deviation**2) * _UP
    squared = distance * distance * _UP
    later = _later_moves(coins, left[1:], moved[1:], float(shifts[0]))
    # Beside each round lie at least what was given, and the slots and linear parts of the rounds after it.
    least = slots[1:] + left[1:] ** 2 / (0.25 * (coins.untold + coins.told))
    after = np.append(np.cumsum(least[:0:-1])[::-1], 0.0)
    given = _GIVEN * squared * float(slots.sum())
    rates = coins.rates(later, given + squared * after * (1.0 - 1e-9), reach)
    w = given + squared * (math.fsum(slots[1:]) + math.fsum(rates)) * _UP
    # The coordinates of the own round one after the other: their coins lie beside the slots of those before.
    own = _own_moves(coins, float(left[0]))
    for _ in range(_PIECES):
        rate = float(coins.rates(own, np.array([w]), reach)[0])
        w += (squared * (float(slots[0]) + rate) / _PIECES + reach * reach * rate) * _UP
    # What a grid leaves of shifts, and what lies outside of windows in products that cancel.
    rest = 4004.0 * coins.grid**2 / coins.variance * dim * law.weighting.rounds + 1e-7 * w
    return RunCost((w * 1.001 + rest) * _UP, squared * float(slots.sum()), tail)


@dataclass(frozen=True)
class Moves:
    """How the numbers of rounds move, for a unit of distance in the coordinate; one number per round.

    Attributes:
        mean: |r|, of their sum.
        square: The mean of r² over what others draw.
        twist: |W|.
        twists: √ of the mean of W² over what is drawn.
        path: Σ|δ|.
    """

    mean: Array
    square: Array
    twist: Array
    twists: Array
    path: Array


@dataclass(frozen=True)
class RoundingCoins:
    """The coins of a round in one coordinate, all but with a probability that the tail pays for.

    Attributes:
        variance: V, at least.
        fair: F, the mean number of fair coins, at least.
        untold: U.
        told: Messages whose own slot may be told, the client's among them.
        log: Minus the logarithm of an event's probability.
        chance: Bound on the probability that a message saturates.
        saturated: χ, a bound on the share of messages that do.
        skew: Bound on |p̄ - ½|, p̄ the mean of fractions weighted by variance.
        lean: Bound on |p̄ - ½| for others that do not saturate, with equal weights.
        grid: What the grid of z leaves of a round's shift.
        uneven: Distance of means over fractions from those over uniform ones.
    """

    variance: float
    fair: float
    untold: int
    told: int
    log: float
    chance: float
    saturated: float
    skew: float
    lean: float
    grid: float
    uneven: float

    @classmethod
    def of(cls, law: SlotsAndCoins, reach: float, log: float) -> RoundingCoins:
        """Counts coins by Bernstein's, Chernoff's and Hoeffding's inequalities."""
        count = law.untold
        # Given the sum of what others draw, their means may be so many deviations off.
        p = law.saturating(math.sqrt(2.0 * log / count) + 0.01)
        uneven = 2.2 * math.exp(-2.0 * math.pi**2 * law.deviation**2) + law.point
        if uneven > 0.01:
            raise ConditionError(
                f"Noise of {law.deviation:.3g} steps does not hide fractions of numbers; use smaller steps."
            )
        mean = 1.0 / 6.0 - 0.25 * p - uneven
        spread = 1.0 / 30.0 - 1.0 / 36.0 + p / 36.0 + uneven
        variance = count * mean - _bernstein(count * spread, 1.0 / 6.0 + uneven, log) - 2.0 * reach - 1.0
        half = 0.5 - p - uneven
        fair = count * half - _bernstein(count * (1.0 / 12.0 + 0.25 * p + uneven), 0.5, log) - 2.0 * reach - 4.0
        if not (variance > 4.0 * log and fair > 8.0 * log):
            raise ConditionError("Too few messages of a round round at random; use more clients, or a wider window.")
        saturated = _chernoff(p, count, log)
        lean = math.sqrt(0.5 * log / count) + 0.5 * p + uneven + (reach + 1.0) / count
        skew = _SKEWED * (math.sqrt(2.0 * log * count) + (p + uneven) * count + law.told + 2.0 * reach) / variance
        grid = 4.0 * (count + law.told) * law.point
        return cls(variance, fair, count, law.told, log, p, saturated, min(0.5, skew), lean, grid, uneven)

    # ------------------------------------------------------------------ one round's swap

    def rates(self, moves: Moves, w: Array, reach: float) -> Array:
        """Returns κ of each round: beside G(w) its coins at a distance t <= reach cost at most κ t².

        Raises:
            ConditionError: The coins are too far apart for so small a w.
        """
        width = math.sqrt(2.0 * self.log) + 0.5 * np.sqrt(w) + 1.0
        found, farthest = self._moment(moves, (width / np.sqrt(w) + 0.5)[:, None], reach)
        # Δ (1 - Δ/(2w) - Δ/8) is at least κ t², and thresholds reach beyond all losses.
        largest = found * reach * reach
        if not np.all((largest <= 0.05 * np.minimum(w, 1.0)) & (farthest + w <= width * np.sqrt(w))):
            raise ConditionError("What one client can change in a coordinate is too large against the whole.")
        rates: Array = found * (1.0 + largest / w + largest) * _UP
        return rates

    def _moment(self, moves: Moves, slope: Array, reach: float) -> tuple[Array, Array]:
        """Returns bounds on R(c) for a unit of distance, |c|/w + ½ <= slope, and on the largest loss."""
        v = self.variance
        y = np.linspace(0.0, self.window, _PLACES)
        tails = np.minimum(1.0, 2.0 * np.exp(-0.5 * y * y / (v + y / 3.0)))
        mean, square, twist, twists, path = (
            part[:, None] for part in (moves.mean, moves.square, moves.twist, moves.twists, moves.path)
        )
        third = 1.5 * path * (0.5 + self.skew)
        two, three = self.local(2, y), self.local(3, y)
        # Of any of the laws on the way, at these distances from the mean of any other.
        moved, swell = mean * reach, 1.0 + path * reach / v
        far = y + moved
        line = reach * mean * swell / v * far
        steps = far[:, -1:].max() * np.linspace(0.0, 1.0, _PLACES)
        bend = reach * (
            twist * np.interp(far, steps, self.local(2, steps)) + third * np.interp(far, steps, self.local(3, steps))
        )
        both = line + bend
        if float(np.max(slope * both)) > _STEEPEST:
            return np.full(len(mean), math.inf), both[:, -1]
        near = np.expm1(both)
        squares = square * (swell / v * far) ** 2, (twists * two + third * three) ** 2
        wholes = square * (swell * (math.sqrt(v) + moved) / v) ** 2, (twists * self.norm(2) + third * self.norm(3)) ** 2
        fourth = (slope * both) ** 2 / 6.0 * np.exp(slope * both)
        lines = _raised(wholes[0], squares[0], 0.5 * near + slope * bend + fourth, tails)
        more = (slope / 3.0 * (3.0 * line + bend) + fourth) * (1.0 + near)
        bends = _raised(wholes[1], squares[1], near + more, tails)
        skewed = slope / 3.0 * mean * reach * square * (2.0 * self.skew + 2.0 * moved) / v**2
        found = square / v + wholes[1] + lines[:, None] + bends[:, None] + skewed
        return found[:, 0] * (1.0 + 1e-7), both[:, -1]

    @property
    def window(self) -> float:
        """Y: sums lie within this of their mean."""
        return _bernstein(self.variance, 1.0, self.log + math.log(2.0))

    def local(self, order: int, y: Array) -> Array:
        """Returns bounds on |D^m P⁻(k)|/P(k) for k at these distances from the mean."""
        grown = 1.0 / (1.0 - y / self.variance)  # e^θ, θ the largest tilt whose mean is so far away
        tilted = self.variance / grown
        least = 1.0 - 2.0 * np.exp(-4.0 * tilted) - _central_error(0, tilted, tilted)
        found = np.zeros_like(y)
        for j in range(order + 1):
            part = _central(j, order, tilted)
            found += math.comb(order, j) * (grown - 1.0) ** (order - j) * grown**j * part
        return found / least * _UP

    @lru_cache(maxsize=64)  # noqa: B019
    def norm(self, order: int) -> float:
        """Returns a bound on the norm of D^m P⁻ in L²(1/P), by telling all coins but N fair ones."""
        y, v = self.window, self.variance
        tilt, part = -math.log1p(-y / v), y / v
        # P(k) >= exp(-∫θ)/√(12 V e^θ + 1) in the window.
        least = v * ((1.0 - part) * math.log1p(-part) + part) + 0.5 * math.log(96.0 * v * math.exp(tilt) + 1.0)
        spread = 0.25 * self.untold
        usual = math.floor(self.fair - _bernstein(spread, 1.0, 14.0))
        fewest = math.floor(self.fair - _bernstein(spread, 1.0, least + 40.0))
        if fewest < 64:
            raise ConditionError("Too few messages of a round round at random; use more clients.")
        squared = differences(usual, order, least + 40.0) + math.exp(-14.0) * differences(fewest, order, least + 40.0)
        return math.sqrt(squared) * _UP + 1e-15


@lru_cache(maxsize=4096)
def differences(coins: int, order: int, nats: float) -> float:
    """Returns the largest Σ (D^m b(k))²/b(k-h), h = 0, ..., 4, b the law of so many fair coins, where b >= e^-nats.

    Raises:
        ConditionError: There are too few coins for that.
    """
    half = math.ceil(math.sqrt(0.5 * coins * nats)) + order + 8
    if half + 6 > 0.45 * coins:
        raise ConditionError("Too few messages of a round round at random; use more clients.")
    k = np.arange(coins // 2 - half, coins // 2 + half + 1, dtype=np.float64)
    steps = np.log((coins - k[:-1]) / (k[:-1] + 1.0))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    b = np.exp(logs - logs.max())
    b /= float(b.sum()) * (1.0 - 1e-9)
    found = b
    for _ in range(order):
        found = np.diff(found)
    squares = found * found
    best = 0.0
    for shift in range(5):
        # found[i] belongs to k[i + order]; b(k - shift) beside it.
        start = max(0, shift - order)
        over = b[order - shift + start : len(b) - shift]
        best = max(best, float(np.sum(squares[start:] / over)))
    return best * (1.0 + 1e-6)


def _raised(whole: Array, values: Array, factor: Array, tails: Array) -> Array:
    """Returns bounds on E f h, E f <= whole, f and h rising through these values and factors."""
    rises = np.cumsum((np.diff(values)[:, 1:] * tails[1:-1])[:, ::-1], axis=1)[:, ::-1]
    beyond = values[:, 1:] * tails[:-1]
    beyond[:, :-1] += rises
    found: Array = whole[:, 0] * factor[:, 0] + (np.minimum(whole, beyond) * np.diff(factor)).sum(axis=1)
    return found


def _central(j: int, order: int, variance: Array) -> Array:
    """Returns a bound on |D^j Q⁻(k)| √(2πV) at the mean k of Q, with V its variance and `order` coins left out."""
    less = variance - 0.25 * order
    if j % 2:
        first = (order - 0.5 * j) * _ABSOLUTE[j + 1] * less ** (-0.5 * (j + 2))
    else:
        first = _ABSOLUTE[j] * less ** (-0.5 * (j + 1))
    found: Array = np.sqrt(variance) * first + _central_error(j, less, variance)
    return found


def _central_error(j: int, less: Array, variance: Array) -> Array:
    """Returns a bound on √(2πV) (1/2π) ∫ |2 sin(u/2)|^j |φ(u) - exp(-V⁻u²/2)| du, φ the characteristic function."""
    near = sum(
        share * (_ABSOLUTE[i] * x ** (-0.5 * (i + 1)) + _ABSOLUTE[i + 2] * x ** (-0.5 * (i + 3)) / 6.0)
        for x in [less - 0.25]
        for share, i in ((1.149 / 6.0, j + 3), (1.203 / 32.0, j + 4))
    )
    found: Array = np.sqrt(variance) * less * (near + 21.0 * 2.0**j * np.exp(-0.5 * (less - 0.25)))
    return found


def _bernstein(variance: Any, bound: float, log: float) -> Any:
    """Returns x with P(sum >= mean + x) <= e^-log."""
    linear = bound * log / 3.0
    found: Any = (linear + np.sqrt(linear * linear + 2.0 * log * variance)) * _UP
    return found


def _chernoff(probability: float, count: int, log: float) -> float:
    """Returns a share that is exceeded by `count` independent events with a probability of at most e^-log."""

    def exponent(share: float) -> float:
        if share >= 1.0:
            return math.inf
        first = share * math.log(share / probability)
        return count * (first + (1.0 - share) * math.log((1.0 - share) / (1.0 - probability)))

    low, high = probability, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exponent(middle) < log else (low, middle)
    return high


# ---------------------------------------------------------------------- shifts and moves


def _own_moves(coins: RoundingCoins, share: float) -> Moves:
    """Returns the moves of the client's own round, of which this share is left to the coins."""
    p, many = coins.chance, coins.untold
    mean = share + (1.0 - share) * coins.saturated
    square = (share + (1.0 - share) * p) ** 2 + 6.0 * (1.0 - share) ** 2 * p / many
    twist = 0.5 + coins.lean + 0.5 * coins.saturated + mean * coins.skew
    twists = math.sqrt(1.0 / 12.0 + coins.uneven) + math.sqrt(0.5 / many) + 0.5 * p + coins.uneven + mean * coins.skew
    return Moves(*(np.array([part]) for part in (mean, square * 1.002, twist, twists, 2.0 - share)))


def _later_moves(coins: RoundingCoins, left: Array, q: Array, first: float) -> Moves:
    """Returns the moves of later rounds whose messages inherit q, all but `left` shifted; `first` is S of the own."""
    small, p = first / coins.untold, coins.chance
    told = np.minimum(q, coins.told * small)
    lost = np.minimum(2.0 * p * q + _bernstein(2.0 * p * small * q, small, coins.log), 2.0 * q)
    mean = left + lost + told
    square = (left + p * q + told) ** 2 + 2.0 * p * small * q + 5.0 * p * q * q / coins.untold
    common = mean * coins.skew + (p + 2.0 * coins.uneven) * q + 0.5 * told
    twist = np.sqrt(coins.log * small * q) + common + 0.5 * lost + 2.0 * q * small
    twists = np.sqrt(0.5 * small * q + 1.25 * q * q / coins.untold) + common
    return Moves(mean, np.minimum(square, mean**2) * 1.002, twist, twists, 2.0 * q)


def _split(law: SlotsAndCoins, coins: RoundingCoins) -> tuple[Array, Array, Array]:
    """Returns the shifts S_k, what is left to the coins, θ_k q_k, and what messages inherit, q_k, rounded up.

    Fixed shares θ_k that make Σ S²/(Uσ²) + Σ (θq)²/V least, V a little less than it is.
    """
    weights, rounds = law.weighting.factors, law.weighting.rounds
    slots, v = law.untold * law.deviation**2, coins.variance / _DEARER
    from scipy.linalg import solveh_banded  # late: who only encodes does without SciPy

    products = np.zeros((len(weights), rounds))
    for lag in range(len(weights)):
        sums = np.cumsum(weights[: len(weights) - lag] * weights[lag:])
        products[lag, : rounds - lag] = np.append(sums, np.full(rounds, sums[-1]))[: rounds - lag]
    products *= slots
    products[0] += v
    unit = np.zeros(rounds)
    unit[0] = 1.0
    solved = solveh_banded(products, unit, lower=True)
    padded = np.append(solved, np.zeros(len(weights)))
    shifted = slots * sum(weight * padded[age : age + rounds] for age, weight in enumerate(weights) if weight)
    shares = np.clip(v * solved / np.maximum(v * solved + shifted, 1e-300), 0.0, _LARGEST_SHARE)
    steps = -weights[1:][::-1]
    moved, shifts = np.zeros(rounds), np.zeros(rounds)
    moved[0] = 1.0
    shifts[0] = 1.0 - shares[0]
    for k in range(1, rounds):
        width = min(k, len(steps))
        moved[k] = steps[len(steps) - width :] @ shifts[k - width : k]
        shifts[k] = (1.0 - shares[k]) * moved[k]
    return shifts * _UP, shares * moved * _UP, moved * _UP


