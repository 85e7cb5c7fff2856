"""What sums of stochastic roundings tell, where many numbers moved a little: curves for the smoothed certificate.

Given all noise, a coordinate of a sum is a sum of independent coins. Two neighbours' sums have nearly the same mean.
Among the coins are N that are fair, as the adversary is told; the others are constants but for rare moves. With b the
law of a fair coin and D the difference operator, the two laws A and B satisfy

    A - B = t (r D b^(N-1) + Q D² b^(N-2) + at most C |D³ b^(N-3)|),    B >= b^N - x |D b^(N-1)|,

with known ranges of r (what is left of the mean's move) and Q (half of the variance's). All of these arrays are fair
coins' masses times polynomials. docs/proofs/rounded-correlated.md has the proofs; names are those of its section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ConditionError
from cpsgd.privacy.curves import Curve, Family

Array = NDArray[np.float64]

# The window of a law of coins, in standard deviations; 1e-42 of the mass is outside.
_WIDE = 14.0
# Poisson numbers are followed until so much of their mass is left.
_LEFT = 1e-26
# Nodes of a curve: so many per deviation near its centre, then four.
_FINE, _CENTRE, _COARSE = 28.0, 5.0, 4.0
# All floating-point errors of the arrays, relative.
_SAFE = 1e-9
# A curve that is not under the tail where a likelihood ratio is this far from one is given up.
_FARTHEST = 0.6


@dataclass(frozen=True)
class Moves:
    """Bounds on the difference of two neighbours' sums of coins, per unit of their distance.

    Attributes:
        means: The least and largest r, what is left of the mean's move.
        spreads: The least and largest Q, half of the change of the variance.
        third: C, a bound on everything of third order.
        reference: x, the largest mean move of the coins that are rare in the law B, at the largest distance.
        shift: The largest number of whole steps that the law B may be moved by.
        rare: The mean number of rare events in the law B, at the largest distance.
        wander: The mean number of rare events in any of the laws, at the largest distance.
    """

    means: tuple[float, float]
    spreads: tuple[float, float]
    third: float
    reference: float
    shift: int
    rare: float
    wander: float


def family(moves: Moves, coins: Sequence[tuple[float, int]], *, reach: float, tail: float, factor: float) -> Family:
    """Returns the curve of all pairs with these moves, at distances up to `reach`.

    Args:
        moves: Bounds on the moves.
        coins: Pairs of a probability and a number of fair coins: with at most that probability there are no more.
            They cover all but what is charged elsewhere.
        reach: The largest distance.
        tail: Mass that may be left out.
        factor: What all excesses are multiplied with, at least 1.

    Raises:
        ConditionError: There are too few coins.
    """
    if min(count for _, count in coins) < 64:
        raise ConditionError("Too few clients round at random for this proof; use more clients.")
    parts = [(weight * factor, _Laws(count, moves)) for weight, count in coins]
    variance = coins[-1][1] / 4.0
    largest = max(abs(each) for each in moves.spreads)
    deviation = math.sqrt(moves.means[1] ** 2 / variance + 2.0 * (largest / variance) ** 2)
    lost = max(laws.lost for _, laws in parts) * factor
    sides = [_side(parts, sign, deviation, tail / reach, 1.0 / reach) for sign in (1.0, -1.0)]
    (v, above), (u, below) = sides
    x = np.concatenate([np.log1p(-reach * u[:0:-1]), np.log1p(reach * v)])
    excess = np.concatenate([below[:0:-1], above]) * reach * (1.0 + 1e-12)
    # Both sides have the same value at zero, but for roundings.
    excess[len(u) - 1] = max(above[0], below[0]) * reach * (1.0 + 1e-12)
    return Family(Curve(reach, x, excess), (), reach, tail + reach * lost)


def _side(
    parts: Sequence[tuple[float, _Laws]], sign: float, deviation: float, tail: float, end: float
) -> tuple[Array, Array]:
    """Returns nodes v and bounds on the excess at 1 + sign v, per unit of distance."""

    def excess(v: float) -> float:
        return sum(weight * laws.excess(sign, v) for weight, laws in parts)

    nodes, found = [0.0], [excess(0.0)]
    while found[-1] > tail * (1.0 - _FARTHEST):
        fine = nodes[-1] < _CENTRE * deviation
        nodes.append(nodes[-1] + deviation / (_FINE if fine else _COARSE))
        if nodes[-1] > _FARTHEST * end:
            raise ConditionError("What one client moves is too large against the roundings of the others.")
        found.append(excess(nodes[-1]))
    return np.array(nodes), np.array(found)


class _Laws:
    """Arrays over the outcomes of `count` fair coins and few others."""

    def __init__(self, count: int, moves: Moves) -> None:
        width = math.ceil(_WIDE * 0.5 * math.sqrt(count)) + 8
        centre = count // 2
        fixed = 2 + moves.shift
        weights = _poisson(moves.wander)
        pad = fixed + len(weights)
        k = np.arange(centre - width - pad, centre + width + pad + 1, dtype=np.float64)
        inner = slice(pad, len(k) - pad)
        masses = {j: _fair(count - j, k) for j in range(pad + 1)}
        self._first = _first(count, k)[inner] * masses[0][inner]
        self._second = _second(count, k)[inner] * masses[0][inner]
        firsts = [np.abs(_first(count - j, k)) * masses[j] for j in range(pad + 1)]
        thirds = [np.abs(_third(count - j, k)) * masses[j] for j in range(pad + 1)]
        self._rest = moves.third * _wandering(thirds, fixed, weights, pad) * (1.0 + _SAFE)
        near = masses[0][inner].copy()
        for step in range(1, moves.shift + 1):
            for way in (-step, step):
                np.minimum(near, masses[0][pad + way : len(k) - pad + way], out=near)
        moved = masses[0][inner] - moves.reference * _wandering(firsts, fixed, weights, pad)
        self._mass = np.maximum(moved, math.exp(-moves.rare) * near) * (1.0 - _SAFE)
        corners = [(r, q) for r in moves.means for q in moves.spreads]
        self._corners = [r * self._first + q * self._second for r, q in corners]
        # Everything outside of the window, and Poisson numbers that were not followed.
        self.lost = 1e-36 + (8.0 * moves.third + 2.0 * moves.reference) * _LEFT

    def excess(self, sign: float, v: float) -> float:
        """Returns a bound on Σ (sign (A - B)/t - v B)₊ over all moves."""
        less = self._rest - v * self._mass
        best = max(float(np.sum(np.maximum(sign * each + less, 0.0))) for each in self._corners)
        return best * (1.0 + _SAFE)


def _fair(count: int, k: Array) -> Array:
    """Returns the masses of `count` fair coins, by ratios from the middle outwards."""
    mode = count // 2
    upper, lower = np.arange(mode, k[-1]), np.arange(mode, k[0], -1.0)
    up = np.cumprod(np.concatenate([[1.0], np.maximum(count - upper, 0.0) / (upper + 1.0)]))
    down = np.cumprod(np.concatenate([[1.0], np.maximum(lower, 0.0) / (count - lower + 1.0)]))
    found = np.concatenate([down[:0:-1], up])
    # All but 1e-40 of the mass is within the window, so that the total is one.
    total = float(found.sum())
    scaled: Array = found / total
    return scaled


def _first(count: int, k: Array) -> Array:
    """Returns minus D b^(N-1) over b^N."""
    return 2.0 * (2.0 * k - count) / count


def _second(count: int, k: Array) -> Array:
    """Returns D² b^(N-2) over b^N."""
    return 4.0 * ((2.0 * k - count) ** 2 - count) / (count * (count - 1.0))


def _third(count: int, k: Array) -> Array:
    """Returns D³ b^(N-3) over b^N, but for its sign."""
    s = 2.0 * k - count
    return 8.0 * s * (s * s - (3.0 * count - 2.0)) / (count * (count - 1.0) * (count - 2.0))


def _poisson(mean: float) -> Array:
    """Returns the masses of a Poisson number, until next to nothing is left."""
    found = [math.exp(-mean)]
    while len(found) <= mean or found[-1] * 4.0 > _LEFT:
        found.append(found[-1] * mean / len(found))
    return np.array(found)


def _wandering(arrays: Sequence[Array], fixed: int, weights: Array, pad: int) -> Array:
    """Returns, at each k, the mean of the largest |array| up to Y places away and with up to Y coins fewer.

    Y is `fixed` plus a number with these weights.
    """
    size = len(arrays[0]) - 2 * pad
    found, largest = np.zeros(size), np.zeros(size)
    for y in range(pad):
        for fewer in range(y + 1):
            places = (-y, y) if fewer < y else range(-y, y + 1)
            for place in places:
                np.maximum(largest, arrays[fewer][pad + place : pad + place + size], out=largest)
        if y >= fixed:
            found += weights[y - fixed] * largest
    return found
