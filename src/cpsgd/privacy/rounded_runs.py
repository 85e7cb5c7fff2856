"""The privacy cost of a run with correlated noise and random rounding, by docs/proofs/rounded-correlated.md.

The names are those of the page. Everything is an upper bound, but the lower bounds on V.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Array, SlotsAndCoins
from cpsgd.privacy.coin_sums import UP, bernstein, central, chernoff, error, summed

# Events of a coordinate and round that the tail pays for.
_EVENTS = 20.0
# Shares of the slots that the adversary is given; the first that is enough is taken.
_GIVEN = (0.005, 0.1, 0.5)
# Coins cost so much more than V says where shares are chosen, and the largest share of a round's move that is theirs.
_DEARER, _LARGEST_SHARE = 1.15, 0.9
# Cells of outcomes where there are many rounds, and else; the largest exponent.
_PLACES, _MORE_PLACES, _MANY, _STEEPEST = 80, 400, 20, 100.0
# The coordinates of the client's own round are taken in so many parts, and their distances in as many.
_PIECES = 8
# More than `_OTHERS` coins have fractions within `_MIDDLE` of a half.
_MIDDLE, _OTHERS = 0.1, 5.0
# max of p(1-p)|p-½|, rounded up.
_SKEWED = 0.0482
# With fewer others there are too few coins.
_FEWEST = 200


@dataclass(frozen=True)
class RunCost:
    """Cost of a run: the run is ≼ G(w), as private as a Gaussian pair with w = μ², up to the tail mass."""

    w: float
    slots: float
    tail_mass: float


@lru_cache(maxsize=256)
def run_cost(law: SlotsAndCoins, *, distance: float, reach: float, dim: int, tail: float) -> RunCost:
    """Returns the privacy cost of a run for a client that is in one of its rounds.

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
    split = _split(law, coins)
    squared = distance * distance * UP
    slots = squared * split.shifts * split.shifts / (law.untold * law.deviation**2) * UP
    w = next((w for share in _GIVEN if (w := _swapped(coins, split, slots, squared, reach, share)) < math.inf), None)
    if w is None:
        raise ConditionError("What one client can change in a coordinate is too large against the whole.")
    # (r + g)² <= (1 + s) r² + (1 + 1/s) g² for what a grid leaves of shifts, with the best s.
    grid = 4.0 * coins.grid**2 / coins.variance * dim * law.weighting.rounds
    return RunCost((math.sqrt(w) + math.sqrt(grid)) ** 2 * UP, float(slots.sum()), tail)


def _swapped(coins: RoundingCoins, split: Split, slots: Array, squared: float, reach: float, share: float) -> float:
    """Returns w after all rounds, from the last to the first, if it starts at a share of the slots; may be infinite."""
    later = _later_moves(coins, split.left[1:], split.moved[1:], float(split.shifts[0]), reach)
    # Beside each round lie at least what was given, and the slots and linear parts of the rounds after it.
    least = slots[1:] + squared * split.left[1:] ** 2 / coins.variance
    after = np.append(np.cumsum(least[:0:-1])[::-1], 0.0)[: len(least)]
    given = share * float(slots.sum())
    w = (
        given
        + (math.fsum(slots[1:]) + squared * math.fsum(coins.rates(later, given + after * (1.0 - 1e-9), reach))) * UP
    )
    # The coordinates of the own round one after the other: their coins lie beside the slots of those before.
    ends = reach * np.linspace(0.0, 1.0, _PIECES + 1)
    own = _own_moves(coins, float(split.left[0]), ends[:-1])
    for _ in range(_PIECES):
        if w < math.inf:
            rate = float(np.max(coins.rates(own, np.full(_PIECES, w), ends[1:])))
            w += ((float(slots[0]) + squared * rate) / _PIECES + reach * reach * rate) * UP
    return w


@dataclass(frozen=True)
class Moves:
    """Changes of rounds' numbers for a unit of distance in the coordinate; one number per round.

    Attributes:
        mean: |r|, of their sum.
        square: The mean of r² over what others draw.
        twist: |W|.
        way: The mean of |W| over the way from one world's numbers to the other's.
        twists: √ of the mean of W² over what is drawn.
        path: Σ|δ|.
    """

    mean: Array
    square: Array
    twist: Array
    way: Array
    twists: Array
    path: Array


class Differences(NamedTuple):
    """Bounds on |D^m P⁻|/P in cells of |k - m|, for the law with the mean m and for any other on the way."""

    own: Array
    everywhere: Array


@dataclass(frozen=True)
class RoundingCoins:
    """Bounds on the random rounding of a round in one coordinate; the tail pays for the probability that one fails.

    Attributes:
        variance: V, at least.
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
        """Returns the bounds for a law, by Bernstein's, Chernoff's and Hoeffding's inequalities.

        Args:
            law: The noise.
            reach: The largest distance in a coordinate, in steps.
            log: Minus the logarithm of the probability with which each bound may fail.

        Raises:
            ConditionError: Too few messages round at random, or the noise does not hide fractions.
        """
        count = law.untold
        # Given the sum of what others draw, their means may be so many deviations off, and shifts come on top.
        p = law.saturating(math.sqrt(2.0 * log / count) + 0.01 + reach / (count * law.deviation))
        uneven = 2.2 * math.exp(-2.0 * math.pi**2 * law.deviation**2) + law.point
        if uneven > 0.01:
            raise ConditionError(
                f"Noise of {law.deviation:.3g} steps does not hide fractions of numbers; use smaller steps."
            )
        mean = 1.0 / 6.0 - 0.25 * p - uneven
        spread = 1.0 / 30.0 - 1.0 / 36.0 + p / 36.0 + uneven
        variance = count * mean - bernstein(count * spread, 1.0 / 6.0 + uneven, log) - 2.0 * reach - 1.0
        middle = 2.0 * _MIDDLE - p - uneven
        # So many of the others' numbers pass an integer, or another place, on their way.
        passed = reach + uneven * count
        passed += bernstein(passed, 1.0, log)
        among = count * middle - bernstein(count * 2.0 * _MIDDLE, 1.0, log) - 4.0 * passed
        # With so many in the middle the variance is positive.
        if not (among > _OTHERS and _window(variance, log) < 0.5 * variance):
            raise ConditionError("Too few messages of a round round at random; use more clients, or a wider window.")
        saturated = chernoff(p, count, log)
        lean = math.sqrt(0.5 * log / count) + 0.5 * p + uneven + passed / count
        # p(1-p)(p-½) has slopes of at most a half.
        skew = (_SKEWED * (math.sqrt(2.0 * log * count) + (p + uneven) * count + law.told) + reach) / variance
        grid = 4.0 * (count + law.told) * law.point
        return cls(variance, count, law.told, log, p, saturated, min(0.5, skew), lean, grid, uneven)

    # ------------------------------------------------------------------ one round's swap

    def rates(self, moves: Moves, w: Array, reach: Array | float) -> Array:
        """Returns κ of each round: at a distance t <= reach, its coins add at most κ t² to w.

        κ is infinite where `reach` is too large for this proof at w.
        """
        far = np.broadcast_to(np.asarray(reach, dtype=np.float64), w.shape)
        found, beyond = self._moment(moves, np.sqrt(w)[:, None], far[:, None])
        # Δ (1 - Δ/(2w) - Δ/8) is at least κ t², and thresholds further out pay next to nothing.
        largest = found * far * far
        proved = (largest <= 0.05 * np.minimum(w, 1.0)) & (beyond <= math.exp(-self.log))
        rates: Array = np.where(proved, found * (1.0 + largest / w + largest) * UP, math.inf)
        return rates

    def _moment(self, moves: Moves, root: Array, reach: Array) -> tuple[Array, Array]:
        """Returns bounds on R(c) for a unit of distance, and on the excess beyond these c; root is √w.

        |c| is at most (√(2 log) + 1 + √w/2) √w.
        """
        v, width = self.variance, math.sqrt(2.0 * self.log) + 1.0
        slope = width / root + 1.0
        mean, square, twist, way, twists, path = (part[:, None] for part in astuple(moves))
        moved, swell = mean * reach, 1.0 + 2.0 * path * reach / v
        places = _PLACES if len(slope) > _MANY else _MORE_PLACES
        step = max(1, math.floor(self.window / places))
        mass, y, two, three = self.cells(step)
        third = 2.0 * (0.5 + _MIDDLE) * path * (0.5 + self.skew)
        # |L|, |G| and |G| in the mean over the way, of any of the laws on it.
        line = reach * mean * swell / v * (y + moved)
        bend, mild = (reach * (size * two.everywhere + third * three.everywhere) for size in (twist, way))
        both = line + bend
        largest = (float(np.max(part, initial=0.0)) for part in (moved, swell - 1.0, slope * both / _STEEPEST))
        if not all(part <= 1.0 for part in largest):
            return np.full(len(mean), math.inf), np.full(len(mean), math.inf)
        near = np.expm1(both)
        fourth = (slope * both) ** 2 / 6.0 * np.exp(slope * (line + mild))
        lines = square * (swell / v * (y + moved)) ** 2
        bends = (twists * two.own + third * three.own) ** 2
        lines *= 0.5 * near + slope * bend + fourth
        bends *= 1.0 + 1.5 * near + (slope * (line + bend / 3.0) + fourth) * (1.0 + near)
        skewed = slope / 1.5 * moved * square * (self.skew + moved) / v**2
        outside = 16.0 * path * mean * math.exp(-self.log)
        found = (square / v + skewed + outside)[:, 0] + summed((lines + bends) * mass, step)
        beyond = summed(np.exp(-0.5 * np.maximum(width - both / root, 0.0) ** 2) * mass, step)
        return found * (1.0 + 1e-7), beyond * (1.0 + 1e-7)

    @property
    def window(self) -> float:
        """Largest distance Y of a sum from its mean, except with the event's probability."""
        return _window(self.variance, self.log)

    @lru_cache(maxsize=64)  # noqa: B019
    def cells(self, step: int) -> tuple[Array, Array, Differences, Differences]:
        """Returns masses of cells of |k - m|, their far ends, and bounds on |D²P⁻|/P and |D³P⁻|/P in them.

        A cell has `step` outcomes k on either side of the mean m.
        """
        ends = np.arange(0.0, self.window + 1.0 + step, step)
        rate = 0.5 * ends**2 / (self.variance + ends / 3.0)
        tilted = self.variance - ends
        density = (1.0 + error(0, 0, tilted)) / np.sqrt(2.0 * math.pi * tilted)
        mass = 2.0 * step * np.exp(-rate)[:-1] * density[1:] * UP
        return mass, ends[1:], self.differences(2, ends), self.differences(3, ends)

    def differences(self, order: int, ends: Array) -> Differences:
        """Returns bounds on |D^m P⁻(k)|/P(k) between these distances from the mean, m = 2 or 3."""
        terms = self._terms(order, ends)
        first, second, odd, least, least_second = (part[1:] for part in terms)
        # Of lower bounds the power of y is least at the near end, and the rest at the far one.
        near = ends[:-1] / self.variance
        least, least_second = near**order * least, near ** (order - 2) * least_second
        farther = self._terms(order, ends[1:] + 1.0)
        own = np.maximum(np.maximum(first - least_second, second - least), 0.0) + odd
        return Differences(own * UP, (farther[0] + farther[1] + farther[2]) * UP)

    def _terms(self, order: int, y: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Returns bounds on the terms of D^m P⁻/P at these distances from the mean.

        Upper bounds on those with j = 0, j = 2 (a negative one) and odd j, which rise with y; lower bounds on the first
        two, which fall, but for the factors (y/V)^m and (y/V)^(m-2).
        """
        v, pairs = self.variance, math.comb(order, 2)
        x, tilted = y / v, v - y
        grown = 1.0 / (1.0 - x)  # e^θ, at most; the variance of the tilted law is at least V e^-θ
        most, little = 1.0 + error(0, 0, tilted), 2.0 * np.exp(-4.0 * (tilted - 1.0))
        least = 2.0 - most - little
        if not float(np.min(least)) > 0.5:
            raise ConditionError("Too few messages of a round round at random; use more clients.")
        steep = grown - 1.0
        odd = np.zeros_like(y)
        for j in range(1, order + 1, 2):
            odd += math.comb(order, j) * steep ** (order - j) * grown**j * central(j, order, tilted) / least
        less, shrunk = tilted - 0.25 * order, (1.0 - x) ** order / most
        certain = 1.0 - 0.5 * order**2 / less - error(0, order, tilted) - little
        bent = 0.25 + 1.5 * (order - 1) ** 2
        certain_second = (1.0 - x) / v - bent * np.sqrt(tilted) * less**-2.5 - error(2, order, tilted)
        return (
            steep**order * central(0, order, tilted) / least,
            pairs * steep ** (order - 2) * grown**2 * central(2, order, tilted) / least,
            odd,
            shrunk * np.maximum(certain, 0.0),
            pairs * shrunk * np.maximum(certain_second, 0.0),
        )


def _window(variance: float, log: float) -> float:
    return float(bernstein(variance, 1.0, log + math.log(2.0)))


# ---------------------------------------------------------------------- shifts and moves


def _own_moves(coins: RoundingCoins, share: float, least: Array) -> Moves:
    """Returns the moves of the client's own round for distances from each of these on, `share` left to the coins."""
    p, many = coins.chance, coins.untold
    mean = share + (1.0 - share) * coins.saturated
    square = (share + (1.0 - share) * p) ** 2 + 3.0 * (1.0 - share) ** 2 * p / many
    others = coins.lean + 0.5 * coins.saturated + mean * coins.skew
    # The mean of |½ - p| over a way of this length or longer: 1 - √½ at a length of √2, and less beyond.
    centred = np.maximum(0.5 - 0.25 * least, 0.293)
    twists = math.sqrt(1.0 / 12.0 + coins.uneven) + math.sqrt(0.5 / many) + 0.5 * p + coins.uneven + mean * coins.skew
    moves = mean, square * 1.002, 0.5 + others, centred + others, twists, 2.0 - share
    return Moves(*np.broadcast_arrays(*moves))


def _later_moves(coins: RoundingCoins, left: Array, q: Array, first: float, reach: float) -> Moves:
    """Returns the moves of later rounds, whose messages inherit `q`; slots bear all but `left` of it."""
    small, p = first / coins.untold, coins.chance
    told = np.minimum(q, coins.told * small)
    lost = np.minimum(2.0 * p * q + bernstein(2.0 * p * small * q, small, coins.log), 2.0 * q)
    mean = left + lost + told
    square = (left + p * q + told) ** 2 + 2.0 * p * small * q + 5.0 * p * q * q / coins.untold
    common = mean * coins.skew + (p + 2.0 * coins.uneven) * q + 0.5 * told
    # Moves of numbers that pass an integer on their way, which is the likelier the farther the client's goes.
    passed = 2.0 * q * (small * max(1.0, reach) + coins.uneven)
    passed += bernstein(passed * small, small, coins.log)
    twist = np.sqrt(coins.log * small * q) + common + 0.5 * lost + passed
    twists = np.sqrt(0.5 * small * q + 1.25 * q * q / coins.untold) + common
    return Moves(mean, np.minimum(square, mean**2) * 1.002, twist, twist, twists, 2.0 * q)


class Split(NamedTuple):
    """The shifts S_k of slots, what is left to the coins, θ_k q_k, and the moves of messages, q_k, rounded up."""

    shifts: Array
    left: Array
    moved: Array


def _split(law: SlotsAndCoins, coins: RoundingCoins) -> Split:
    """Returns how much of a move slots bear, and how much coins bear.

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
    # What is summed up here is positive: each round adds a rounding per weight.
    up = UP + rounds * (len(weights) + 4) * 2.0**-52
    steps = -weights[1:][::-1]
    moved, shifts = np.zeros(rounds), np.zeros(rounds)
    moved[0] = 1.0
    shifts[0] = 1.0 - shares[0]
    for k in range(1, rounds):
        width = min(k, len(steps))
        moved[k] = steps[len(steps) - width :] @ shifts[k - width : k]
        shifts[k] = (1.0 - shares[k]) * moved[k]
    return Split(shifts * up, shares * moved * up, moved * up)
