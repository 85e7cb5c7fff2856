"""Stochastic rounding to k levels plus Skellam noise, the difference of two Poisson variables of equal mean.

Skellam noise is closed under sums: n clients with variance v each add Skellam noise of variance n v. (Agarwal, Kairouz,
Liu: "The Skellam Mechanism for Differentially Private Federated Learning", NeurIPS 2021. The guarantee is ours, theirs
is shown beside it.)

Masses are f(j) = e^-v I_j(v), I_j the modified Bessel function. Everything follows from the recurrence
I_{j-1}(v) = I_{j+1}(v) + (2j/v) I_j(v), run downwards: all its terms are positive, so that relative errors only add up,
and what it was started with is forgotten (Miller's algorithm).

A client draws from a table of the law itself, by one inversion instead of one per Poisson variable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import WORKING_BITS, Table, kernels
from cpsgd.mechanisms import lattice
from cpsgd.mechanisms.law import Array, Window, window_of_ratios
from cpsgd.mechanisms.symmetric import DEFAULT_TRUNCATION, MAX_SIZE, Symmetric, SymmetricLaw, SymmetricNoise
from cpsgd.randomness import Keystream

# What is left of a recurrence's first ratio when it reaches the first one that is used.
_FORGOTTEN = 2.0**-60
# Bound on that ratio's relative error, in units of 2^-53: Amos's bounds are never more than a seventh apart.
_FIRST_ERROR = 2.0**52


@dataclass(frozen=True)
class SkellamNoise(SymmetricNoise):
    """Skellam noise of variance v."""

    size_name = "variance"

    @property
    def variance(self) -> float:
        """Variance of a client's noise: v."""
        return self.size

    def sum_law(self, honest: int) -> SkellamLaw:
        """Returns the law of the summed noise: Skellam of variance v · honest, shifts included."""
        return SkellamLaw(honest, self.size, self.limit)

    def cumulant(self, slope: float) -> float:
        """Returns the exact v (cosh λ - 1) = 2 v sinh²(λ/2); leaving out large |Z| only lowers it."""
        return 2.0 * self.size * math.sinh(0.5 * slope) ** 2 if slope < 700.0 else math.inf

    @staticmethod
    def truncation(size: float, limit: int) -> float:
        """Returns Chernoff's bound on P(|Z| > W)."""
        return truncation(size, limit)

    @staticmethod
    def thresholds(size: float, limit: int) -> Table:
        """Returns the sampler's thresholds, computed by a recurrence in integers."""
        return table(size, limit)

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Draws Skellam noise of variance count v, and adds W per client."""
        noise = np.full(dim, count * self.limit, dtype=np.int64)
        for part, limit in self._parts(count):
            noise += lattice.draw(table(part, limit), 2 * limit, dim, keystream).astype(np.int64) - limit
        return noise

    def sum_variation(self, count: int) -> float:
        """Returns the bound for all draws together: the mass beyond their limits, and their tables' rounding."""
        return sum(truncation(part, limit) + table(part, limit).rounding for part, limit in self._parts(count))

    def _parts(self, count: int) -> list[tuple[float, int]]:
        """Splits the noise of a sum into draws; returns the variance and limit of each."""
        left, most = count * self.size, count * self.limit
        found = []
        while left > 0.0:
            part = min(left, MAX_SIZE)
            found.append((part, min(self.limit_of(part, DEFAULT_TRUNCATION), most)))
            left -= part
        return found


@dataclass(frozen=True, kw_only=True)
class Skellam(Symmetric):
    """k levels and Skellam noise.

    Attributes:
        variance: v, variance of a client's noise per coordinate, in squared levels; 0 is rounding without noise.

    Example:
        >>> from cpsgd.mechanisms import Skellam
        >>> print(Skellam(levels=16, variance=25.0, coordinate_range=0.1, noise_limit=60).describe())
        k = 16 levels in ±0.1, Skellam noise of variance 25 within ±60
    """

    name = "skellam"
    title = "rounding and Skellam noise"
    summary = (
        "k = {levels:,} levels in ±{coordinate_range:.4g}, Skellam noise of variance {variance:.6g} "
        "within ±{noise_limit:,}"
    )
    noise_type = SkellamNoise
    least_size = 2.0**-20

    variance: float


def truncation(variance: float, limit: int) -> float:
    """Returns an upper bound on P(|Z| > W): Chernoff's, 2 exp(v (√(1+y²) - 1 - y asinh y)) with y = (W + 1)/v."""
    y = (limit + 1) / variance
    root = math.hypot(1.0, y)
    # √(1+y²) - 1 = y²/(1 + √(1+y²)), without cancellation.
    exponent = variance * (y * y / (1.0 + root) - y * math.asinh(y))
    return min(1.0, 2.0 * math.exp(exponent * (1.0 - 1e-12)) * (1.0 + 1e-12))


@lru_cache(maxsize=16)
def table(variance: float, limit: int) -> Table:
    """Returns thresholds of the outcomes 0, ..., 2W, which mean -W, ..., W; v is the exact fraction that the float is.

    The recurrence is started with w_{K+1} = 0 and w_K = 2^320. That changes a weight w_j by a factor of about
    1 - (w_K/w_j)², and K is so large that this is below 2^-200 for all j <= W.
    """
    exact = Fraction(variance)
    start = _start(variance, limit, math.log(2.0) * 100.0)
    above, here = 0, 1 << WORKING_BITS
    weights = []
    for j in range(start, 0, -1):
        above, here = here, above + 2 * j * exact.denominator * here // exact.numerator
        if j - 1 <= limit:
            weights.append(here)
    return Table.of_weights(0, weights[:-1] + weights[::-1])


def _start(variance: float, last: int, nats: float) -> int:
    """Returns a K for which the Bessel functions I_j(v) have log(I_K/I_last) <= -nats.

    It follows from log(I_{j+1}/I_j) <= -asinh((j + 1/2)/v) (Amos 1974).
    """
    j, left, count = last, nats, 64
    while True:
        steps = np.cumsum(np.arcsinh((np.arange(j, j + count) + 0.5) / variance))
        if steps[-1] >= left:
            return j + int(np.searchsorted(steps, left)) + 1
        j, left, count = j + count, left - float(steps[-1]), 2 * count


@dataclass(frozen=True)
class SkellamLaw(SymmetricLaw):
    """The sum of `parts` Skellam variables of variance v each, moved up by W each."""

    @property
    def variance(self) -> float:  # type: ignore[override]
        """The variance of all clients, rounded down."""
        return self.parts * self.each * (1.0 - 2.0**-52)

    def __str__(self) -> str:
        return f"Skellam noise of {self.parts} clients with variance {self.each:g} each"

    def window(self, nats: float, margin: int = 0) -> Window:
        """Returns the window around the centre: Bernstein's inequality holds, since cosh λ - 1 <= (λ²/2)/(1 - λ/3)."""
        reach = self.half_window(nats, margin)
        ratios, _, steps = _ratios(self.variance, reach + 1)
        centre = self.parts * self.limit
        outer = float(ratios[reach])
        return window_of_ratios(centre, ratios[:reach], ratios[:reach], outer, outer, extra_steps=steps)

    def step(self, points: Array, direction: int) -> tuple[Array, Array]:
        """Returns f(i - direction)/f(i) - 1 at each point i, and bounds on the relative errors, in units of 2^-53.

        Taking 1 off costs up to one rounding of the difference, which is large relative to a small ratio.
        """
        distance = (points - self.parts * self.limit) * direction
        index = np.abs(distance).astype(np.int64)
        ratios, errors, _ = _ratios(self.variance, int(index.max()) + 2)
        towards = distance >= 1.0
        place = np.where(towards, index - 1, index)
        ratio = np.where(towards, 1.0 / ratios[place], ratios[place])
        return ratio - 1.0, errors[place] + 2.0 + 2.0 / ratio


@lru_cache(maxsize=8)
def _ratios(variance: float, count: int) -> tuple[Array, Array, int]:
    """Returns I_{j+1}(v)/I_j(v) for j < `count`; bounds on their relative errors, in units of 2^-53; steps taken.

    r_{j-1} = 1/(2j/v + r_j), four roundings each. An error of r_j enters r_{j-1} by the factor r_j r_{j-1} < 1, so the
    ratio that the recurrence starts with, an upper bound (Amos 1974), is forgotten. The products of the ratios are
    those of a recurrence I_{j-1} = I_{j+1} + (2j/v) I_j whose positive terms have four roundings each: over all steps
    they add up to no more than five roundings per step.
    """
    start = _start(variance, count, -math.log(_FORGOTTEN))
    ratio = variance / (start + 0.5 + math.hypot(start + 1.5, variance))
    ratios, errors = np.empty(count), np.empty(count)
    kernels.bessel_ratios(variance, start, ratio, _FIRST_ERROR, ratios, errors)
    ratios.flags.writeable = errors.flags.writeable = False
    return ratios, errors, start - count
