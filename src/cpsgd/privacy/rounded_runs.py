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
# Shares θ that are tried.
_SHARES = np.linspace(0.0, 0.6, 61)
# Places, from so many deviations of coins on, from which on tails are taken, and the largest exponent.
_NEAREST, _PLACES, _STEEPEST = 2.0, 80, 100.0
# Rounds that inherit nearly as much as the one after are counted like it.
_NEARLY, _LITTLE, _ROUGHLY = 0.98, 2e-3, 0.5
# Distances of a coordinate are cut into so many pieces in the client's own round.
_PIECES = 6
_UP = 1.0 + 1e-9
# E|N|^j of a standard Gaussian.
_ABSOLUTE = tuple(2.0 ** (j / 2.0) * math.gamma((j + 1) / 2.0) / math.sqrt(math.pi) for j in range(6))
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
    share, own_share, shifts, moved = _split(law, coins)
    slots = shifts * shifts / (law.untold * law.deviation**2) * _UP
    squared = distance * distance * _UP
    w = _GIVEN * squared * float(slots.sum())
    # From the last round to the first: its coins beside what was swapped, then its slots.
    rate, counted = 0.0, -1.0
    for k in range(len(slots) - 1, -1, -1):
        q = float(moved[k])
        if k == 0 or not counted * (_NEARLY if q > _LITTLE else _ROUGHLY) <= q <= counted:
            # κ falls with w, and rises with what is inherited.
            counted = q * (2.0 - _NEARLY if q > _LITTLE else 1.0 / _ROUGHLY)
            rate = coins.rate(_later_moves(coins, share, counted, 1.0 - own_share), w, reach) if k else 0.0
        if k == 0:
            # Fractions of a longer move are nearer to a half on its way.
            ends = reach * np.linspace(0.0, 1.0, _PIECES + 1)
            pieces = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
            rate = max(coins.rate(_own_moves(coins, own_share, low), w, high) for low, high in pieces)
        w = (w + squared * rate) * (1.0 + 1e-15)
        w = (w + squared * slots[k]) * (1.0 + 1e-15)
    # What a grid leaves of shifts, and what lies outside of windows in products that cancel.
    rest = 4004.0 * coins.grid**2 / coins.variance * dim * law.weighting.rounds + 1e-9 * w
    return RunCost((w * 1.001 + rest) * _UP, squared * float(slots.sum()), tail)


@dataclass(frozen=True)
class Moves:
    """Changes of a round's numbers for a unit of distance in the coordinate.

    Attributes:
        mean: |r|, of their sum.
        square: The mean of r² over what others draw.
        twist: |W|.
        path: Σ|δ|.
    """

    mean: float
    square: float
    twist: float
    path: float


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

    def rate(self, moves: Moves, w: float, reach: float) -> float:
        """Returns κ: beside G(w) the coins at a distance t <= reach cost at most κ t².

        Raises:
            ConditionError: The coins are too far apart for so small a w.
        """
        width = math.sqrt(2.0 * self.log) + 0.5 * math.sqrt(w) + 1.0
        slope = width / math.sqrt(w) + 2.5
        norm = moves.twist * self.norm(2) + moves.path * (0.5 + self.skew) * 1.5 * self.norm(3)
        found = self._moment(moves, norm, slope, reach)
        # Δ (1 - Δ/(2w) - Δ/8) is at least κ t², and thresholds reach beyond all losses.
        largest = found * reach * reach
        farthest = float(self._loss(moves, reach, np.array([self.window]))[0]) * reach
        if not (largest <= 0.05 * w and largest <= math.sqrt(w) and farthest + w <= width * math.sqrt(w)):
            raise ConditionError("What one client can change in a coordinate is too large against the whole.")
        return found * (1.0 + largest / w + largest) * _UP

    def _moment(self, moves: Moves, norm: float, slope: float, reach: float) -> float:
        """Returns a bound on E score² exp(λ|loss|) for a unit of distance.

        Near the mean moments are known, further out tails; where one begins is chosen for each of two parts.
        """
        v = self.variance
        y = np.linspace(_NEAREST * math.sqrt(v), self.window, _PLACES)
        exponents = slope * reach * self._loss(moves, reach, y)
        if exponents[-1] > _STEEPEST:
            return math.inf
        grown = np.exp(exponents)
        tails = np.minimum(1.0, 2.0 * np.exp(-0.5 * y * y / (v + y / 3.0)))
        lines = float(np.min(self._raised(moves, reach, slope, y, grown) + _beyond(y * y * grown, tails)))
        bent = float(np.min(norm * norm * (grown - 1.0) + _beyond(self._bent(moves, y) ** 2 * grown, tails)))
        straight = moves.square / v
        first, second = straight / v * lines, bent
        return straight + norm * norm + (math.sqrt(first) + math.sqrt(second)) ** 2

    def _raised(self, moves: Moves, reach: float, slope: float, most: Array, grown: Array) -> Array:
        """Returns bounds on E y² (e^E - 1), E = λ|loss| <= c + b|y| + a y², for |y| up to each of these places."""
        c, b, a = (slope * reach * part for part in self._parabola(moves, reach, most))
        v = self.variance
        fourth, sixth = 3.0 * v * v + v, 15.0 * v**3 + 25.0 * v * v + v
        third, fifth = math.sqrt(v * fourth), math.sqrt(fourth * sixth)
        once = c * v + b * third + a * fourth
        twice = c * c * v + 2.0 * c * b * third + (b * b + 2.0 * a * c) * fourth + 2.0 * a * b * fifth + a * a * sixth
        return once + 0.5 * grown * twice

    def _loss(self, moves: Moves, reach: float, y: Array) -> Array:
        """Returns bounds on |score| at these distances from any of the means on the way."""
        far = y + moves.mean * reach
        return moves.mean * far / self.variance + self._bent(moves, np.minimum(far, self.window * 1.01))

    def _bent(self, moves: Moves, y: Array) -> Array:
        """Returns bounds on |G| at these distances from the mean."""
        heavier = 1.5 * moves.path * (0.5 + self.skew)
        powers = y[:, None] ** np.arange(4.0)
        two, three = ((self.local(m, y) * powers[:, : m + 1]).sum(axis=1) for m in (2, 3))
        found: Array = moves.twist * two + heavier * three
        return found

    def _parabola(self, moves: Moves, reach: float, most: Array) -> tuple[Array, Array, Array]:
        """Returns c, b, a with |score| <= c + b|y| + a y² for |y| <= most, y from any of the means on the way."""
        moved = moves.mean * reach
        y = most + moved
        heavier = 1.5 * moves.path * (0.5 + self.skew)
        two, three = (self.local(m, y).T for m in (2, 3))
        c = moves.twist * two[0] + heavier * three[0]
        b = moves.twist * two[1] + heavier * three[1] + moves.mean / self.variance
        a = moves.twist * two[2] + heavier * (three[2] + three[3] * y)
        # (|y| + m)² <= (1 + m) y² + m + m².
        return c + b * moved + a * (moved + moved * moved), b, a * (1.0 + moved)

    @property
    def window(self) -> float:
        """Y: sums lie within this of their mean."""
        return _bernstein(self.variance, 1.0, self.log + math.log(2.0))

    def local(self, order: int, y: Array) -> Array:
        """Returns c_i, one row per y, with |D^m P⁻(k)|/P(k) <= Σ_i c_i |y|^i as far as y from the mean."""
        v = self.variance
        grown = 1.0 / (1.0 - y / v)  # e^θ, θ the largest tilt whose mean is so far away
        tilted = v / grown
        top, steep = np.sqrt(12.0 * tilted + 1.0), (grown - 1.0) / np.maximum(y, 1e-300)
        parts = [
            math.comb(order, i) * steep**i * grown ** (order - i) * _fourier(order - i, tilted - 1.0) * top
            for i in range(order + 1)
        ]
        return np.stack(parts, axis=1) * _UP

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


def _beyond(values: Array, tails: Array) -> Array:
    """Returns, for each place, a bound on E f beyond it, f rising through these values."""
    rises = np.append(np.cumsum((np.diff(values)[1:] * tails[1:-1])[::-1])[::-1], 0.0)
    return np.append(values[1:] * tails[:-1] + rises, 0.0)


def _fourier(order: int, variance: Array) -> Array:
    """Returns a bound on sup |D^m P| of coins with this variance: (1/2π) ∫ |2 sin(θ/2)|^m exp(-2V sin²(θ/2)) dθ."""
    first = _ABSOLUTE[order] * variance ** (-0.5 * (order + 1))
    second = _ABSOLUTE[order + 2] * variance ** (-0.5 * (order + 3)) / 6.0
    found: Array = (first + second) / math.sqrt(2.0 * math.pi) + 2.0**order * np.exp(-0.5 * variance)
    return found


def _bernstein(variance: float, bound: float, log: float) -> float:
    """Returns x with P(sum >= mean + x) <= e^-log."""
    linear = bound * log / 3.0
    return (linear + math.sqrt(linear * linear + 2.0 * log * variance)) * _UP


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


def _own_moves(coins: RoundingCoins, share: float, least: float) -> Moves:
    """Returns the moves of the client's own round, for distances from `least` on."""
    whole, part = divmod(least, 1.0)
    # The mean of |½ - p| over a way of this length, at most.
    centred = 0.5 if least == 0.0 else (0.25 * whole + part * (0.5 - 0.25 * part)) / least
    mean = share + (1.0 - share) * coins.saturated
    usual = share + (1.0 - share) * coins.chance
    square = usual**2 + 2.0 * (1.0 - share) ** 2 * coins.chance / coins.untold
    twist = centred + coins.lean + 0.5 * coins.saturated + mean * coins.skew
    return Moves(mean, square * 1.002, twist, 2.0 - share)


def _later_moves(coins: RoundingCoins, share: float, q: float, first: float) -> Moves:
    """Returns the moves of a later round whose messages inherit q; `first` is S of the own round."""
    small, p = first / coins.untold, coins.chance
    told = min(q, coins.told * small)
    lost = min(2.0 * p * q + _bernstein(2.0 * p * small * q, small, coins.log), 2.0 * q)
    mean = share * q + lost + told
    usual = share * q + p * q + told
    square = usual**2 + 2.0 * p * small * q + 4.0 * q * q / coins.untold
    mixed = math.sqrt(coins.log * small * q) + (p + 2.0 * coins.uneven) * q
    twist = mean * coins.skew + mixed + 0.5 * lost + 0.5 * told + 2.0 * q * small
    return Moves(mean, min(square, mean**2) * 1.002, twist, 2.0 * q)


def _split(law: SlotsAndCoins, coins: RoundingCoins) -> tuple[float, float, Array, Array]:
    """Returns θ of later rounds and of the own one, the shifts S_k and what messages inherit, q_k."""
    best: tuple[float, float, float, Array, Array] | None = None
    v, lost, chi = coins.variance / 1.3, coins.chance, coins.chance
    for share in _SHARES.tolist():
        grown = _grown(law.weighting, 1.0 - share)
        slots = float(grown @ grown) / (law.untold * law.deviation**2)
        moved = grown / (1.0 - share)
        coin = (share + lost) ** 2 * float(moved[1:] @ moved[1:]) / v
        # (1 - θ₀)² (slots + coin) + (θ₀ + (1 - θ₀) χ)²/V is least here.
        whole = slots + coin
        own = max(0.0, (whole - chi * (1.0 - chi) / v) / (whole + (1.0 - chi) ** 2 / v))
        cost = (1.0 - own) ** 2 * whole + (own + (1.0 - own) * chi) ** 2 / v
        if best is None or cost < best[0]:
            best = cost, share, own, (1.0 - own) * grown, (1.0 - own) * moved
    assert best is not None
    return best[1:]


@lru_cache(maxsize=2048)
def _grown(weighting: Any, kept: float) -> Array:
    """Returns S_k of the recursion S_k = kept Σ_j |g_j| S_(k-j), S_0 = 1, rounded up."""
    steps = -weighting.factors[1:][::-1] * kept
    found = np.zeros(weighting.rounds)
    found[0] = 1.0
    for k in range(1, weighting.rounds):
        width = min(k, len(steps))
        found[k] = steps[len(steps) - width :] @ found[k - width : k]
    return found * _UP
