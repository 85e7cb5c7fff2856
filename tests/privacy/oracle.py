"""Slow, simple and independent answers that the fast ones are compared with.

Everything here follows the definitions: outputs are enumerated, suprema are taken over grids (and so are lower bounds),
and where floating point matters, mpmath computes with 50 digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Array = NDArray[np.float64]
DIGITS = 50


@dataclass(frozen=True)
class Pair:
    """Two neighbours in lattice units, the noise on their sum, and a wish."""

    u: tuple[float, ...]
    v: tuple[float, ...]
    levels: int
    clients: int
    trials: int
    p: float
    delta: float

    @property
    def noise_trials(self) -> int:
        return self.clients * self.trials

    @property
    def distance(self) -> float:
        return math.dist(self.u, self.v)

    def laws(self) -> tuple[Array, Array]:
        """The laws of the whole sum for both neighbours, by enumeration."""
        first, second = np.ones(1), np.ones(1)
        for a, b in zip(self.u, self.v, strict=True):
            first = np.outer(first, coordinate_law(a, self.noise_trials, self.p, self.levels)).ravel()
            second = np.outer(second, coordinate_law(b, self.noise_trials, self.p, self.levels)).ravel()
        return first, second

    def delta_at(self, epsilon: float, rounds: int = 1) -> float:
        """The smallest δ with which this pair, over so many rounds, is (ε, δ)-indistinguishable."""
        first, second = composed([self.laws()] * rounds) if rounds > 1 else self.laws()
        return max(hockey_stick(first, second, epsilon), hockey_stick(second, first, epsilon))


def hockey_stick(first: Array, second: Array, epsilon: float) -> float:
    """The sum of all by which the first law exceeds e^ε times the second."""
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def composed(rounds: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The laws of all rounds' outputs together, outputs of (nearly) equal likelihood ratio put together.

    That is post-processing, so that no divergence is too large; and it makes none smaller by more than 1e-9 of losses.
    What the last round makes of them is left as it is, since nothing has to be made of that.
    """
    (first, second), *others = rounds
    for one, other in others:
        first, second = _grouped(first, second)
        first, second = np.outer(first, one).ravel(), np.outer(second, other).ravel()
    return first, second


def _grouped(first: Array, second: Array) -> tuple[Array, Array]:
    possible = (first > 0.0) | (second > 0.0)
    first, second = first[possible], second[possible]
    with np.errstate(divide="ignore"):
        keys = np.round(np.log(first) - np.log(second), 10)
    _, groups = np.unique(keys, return_inverse=True)
    first, second = (np.bincount(groups, law).astype(np.float64) for law in (first, second))
    return first, second


def coordinate_law(u: float, trials: int, p: float, levels: int) -> Array:
    """Law of ⌊u⌋ + Bernoulli(u - ⌊u⌋) + Binomial(N, p) on 0, ..., N + k."""
    noise = binom.pmf(np.arange(trials + 1), trials, p)
    floor = math.floor(u)
    law = np.zeros(trials + levels + 1)
    law[floor : floor + trials + 1] += (1.0 - (u - floor)) * noise
    law[floor + 1 : floor + trials + 2] += (u - floor) * noise
    return law


def shift_epsilon(trials: int, p: float, delta: float, shift: int = 1) -> float:
    """Exact ε of one coordinate that moves by an integer: a finite sum, solved for ε by bisection."""
    points = np.arange(-shift, trials + shift + 1)
    first, second = binom.pmf(points, trials, p), binom.pmf(points - shift, trials, p)

    def delta_at(epsilon: float) -> float:
        growth = math.exp(epsilon)
        return max(
            float(np.maximum(first - growth * second, 0.0).sum()), float(np.maximum(second - growth * first, 0.0).sum())
        )

    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


class Exact:
    """Binomial(N, p) with 50 digits."""

    def __init__(self, trials: int, p: float) -> None:
        self.trials, self.p = trials, p
        with mpmath.workdps(DIGITS):
            success = mpmath.mpf(p)
            odds = success / (1 - success)
            self.mass = [(1 - success) ** trials]
            for j in range(trials):
                self.mass.append(self.mass[-1] * odds * (trials - j) / (j + 1))
            self.below, total = [], mpmath.mpf(0)
            for mass in self.mass:
                total += mass
                self.below.append(total)
            self.above, total = [mpmath.mpf(0)], mpmath.mpf(0)
            for mass in reversed(self.mass[1:]):
                total += mass
                self.above.append(total)
            self.above.reverse()

    def central_range(self, mass: float) -> tuple[int, int]:
        """The narrowest [a, b] with at most mass/2 on either side."""
        low = next(z for z in range(self.trials + 1) if self.below[z] > mass / 2)
        high = next(z for z in range(self.trials, -1, -1) if self.above[z] + self.mass[z] > mass / 2)
        return low, high

    def unit_mu(self, low: int, high: int) -> mpmath.mpf:
        """Max over z in [low, high] of f(z) / min(φ(q(F(z-1))), φ(q(F(z))))."""
        with mpmath.workdps(DIGITS):
            return max(
                self.mass[z] / min(normal_density_at(self._side(z - 1)), normal_density_at(self._side(z)))
                for z in range(low, high + 1)
            )

    def _side(self, z: int) -> mpmath.mpf:
        return min(self.below[z], self.above[z])

    def kappa(self, order: float, low: int, high: int, reach: float, points: int = 40) -> mpmath.mpf:
        """Max over a grid of |t| <= reach, and both directions, of the clamped D_α / t²."""
        steps = math.ceil(reach)
        with mpmath.workdps(DIGITS):
            best = mpmath.mpf(0)
            for sign in (1, -1):
                ends = (low - 1, high + steps + 1) if sign == 1 else (low - steps - 1, high + 1)
                base = self._clamped(0, *ends)
                for i in range(1, points + 1):
                    t = reach * i / points
                    floor = min(math.floor(t), steps - 1)
                    fraction = mpmath.mpf(t) - floor
                    near, far = self._clamped(sign * floor, *ends), self._clamped(sign * (floor + 1), *ends)
                    moved = [(1 - fraction) * a + fraction * b for a, b in zip(near, far, strict=True)]
                    for one, other in ((moved, base), (base, moved)):
                        moment = mpmath.fsum(a * (a / b) ** (order - 1) for a, b in zip(one, other, strict=True))
                        best = max(best, mpmath.log(moment) / (order - 1) / mpmath.mpf(t) ** 2)
            return best

    def _clamped(self, shift: int, first: int, last: int) -> list[mpmath.mpf]:
        inner = [self.mass[z - shift] for z in range(first + 1, last)]
        return [self.below[first - shift], *inner, self.above[last - shift - 1]]


def normal_density_at(probability: mpmath.mpf) -> mpmath.mpf:
    """φ(q(y)) for y <= 1/2."""
    quantile = mpmath.sqrt(2) * mpmath.erfinv(2 * probability - 1)
    return mpmath.npdf(quantile)
