"""Stochastic rounding to k levels plus Skellam noise, the difference of two Poisson variables of equal mean.

Skellam noise is closed under sums: n clients with variance v each add Skellam noise of variance n v. (Agarwal, Kairouz,
Liu: "The Skellam Mechanism for Differentially Private Federated Learning", NeurIPS 2021. The accounting here is ours.)

Masses are f(j) = e^-v I_j(v), I_j the modified Bessel function. Everything follows from the recurrence
I_{j-1}(v) = I_{j+1}(v) + (2j/v) I_j(v), run downwards: all its terms are positive, so that relative errors only add up,
and what it was started with is forgotten (Miller's algorithm).

A client draws from a table of the law itself, by one inversion instead of one per Poisson variable. Noise beyond ±W
(`noise_limit`) is never drawn; `variation` is what that and the table's resolution move; the accounting adds it to δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.rounding import COINS, KEYSTREAM_BYTES, WORKING_BITS, Table
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import lattice
from cpsgd.mechanisms.base import Search
from cpsgd.mechanisms.lattice import Lattice
from cpsgd.mechanisms.law import Array, Law, Window, check_points, window_of_ratios
from cpsgd.randomness import Keystream

MAX_VARIANCE = 2.0**29
MAX_LIMIT = 2**19 - 1
_SMALLEST_VARIANCE = 2.0**-20
# What a limit that is not given costs: far less than any δ. A limit that costs less than the second of these is of no
# use, and its table would be huge; one that costs more than the last is no Skellam noise any more.
_DEFAULT_TRUNCATION, _LEAST_TRUNCATION, _MOST_TRUNCATION = 2.0**-120, 2.0**-200, 1e-6
# More noise than this is as good as Gaussian already, and slow to certify.
_MOST_VARIANCE = 2.5e9
# E exp(λ Z) = exp(v (cosh λ - 1)), and cosh λ - 1 <= _STEEPNESS λ²/2 up to λ = _STEEPEST.
_STEEPEST = 0.5
_STEEPNESS = 2.0 * (math.cosh(_STEEPEST) - 1.0) / _STEEPEST**2 * (1.0 + 1e-12)
# What is left of a recurrence's first ratio when it reaches the first one that is used.
_FORGOTTEN = 2.0**-60


@dataclass(frozen=True, kw_only=True)
class Skellam(Lattice):
    """k levels and Skellam noise.

    Attributes:
        levels: k, levels that a coordinate is rounded to.
        variance: v, variance of a client's noise per coordinate, in squared levels; 0 is rounding without noise.
        noise_limit: W, the largest noise either way; by default so large that it costs nothing.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.
    """

    name = "skellam"
    title = "rounding and Skellam noise"
    fewest_values = 4
    sampler_remedy = "use a larger noise_limit, or add noise"

    variance: float
    noise_limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        variance = _validate.finite("variance", self.variance) + 0.0  # which makes -0.0 zero
        if variance != 0.0 and not _SMALLEST_VARIANCE <= variance <= MAX_VARIANCE:
            raise ParameterError(
                f"Expected variance to be 0 or in [{_SMALLEST_VARIANCE:g}, {MAX_VARIANCE:g}], got {variance!r}."
            )
        object.__setattr__(self, "variance", variance)
        limit = self.noise_limit
        if limit is None:
            limit = _limit(variance, _DEFAULT_TRUNCATION) if variance else 0
        low, high = 0, 0
        if variance:
            low, high = _limit(variance, _MOST_TRUNCATION), _limit(variance, _LEAST_TRUNCATION)
        object.__setattr__(self, "noise_limit", _validate.integer("noise_limit", limit, low=low, high=high))

    @property
    def _limit(self) -> int:
        assert self.noise_limit is not None  # set when the object was made
        return self.noise_limit

    @property
    def largest_noise(self) -> int:
        """2 W: noise is sent from 0 up."""
        return 2 * self._limit

    @property
    def noise_mean(self) -> float:
        """W."""
        return float(self._limit)

    @property
    def noise_variance(self) -> float:
        """The variance v."""
        return self.variance

    @property
    def noise_proxy(self) -> tuple[float, float]:
        """E exp(λ Z) = exp(v (cosh λ - 1)); leaving out large |Z| only lowers E cosh(λ Z)."""
        return _STEEPNESS * self.variance, _STEEPEST

    def noise_cumulant(self, slope: float) -> float:
        """The exact v (cosh λ - 1) = 2 v sinh²(λ/2); leaving out large |Z| only lowers it."""
        return 2.0 * self.variance * math.sinh(0.5 * slope) ** 2 if slope < 700.0 else math.inf

    def noise_table(self) -> Table:
        """Thresholds of the law between -W and W."""
        return table(self.variance, self._limit) if self.variance else COINS

    @property
    def noise_bytes(self) -> int:
        """One number of 128 bits."""
        return KEYSTREAM_BYTES if self.variance else 0

    @property
    def variation(self) -> float:
        """The mass beyond ±W, and what rounding of the thresholds moves."""
        if not self.variance:
            return 0.0
        return truncation(self.variance, self._limit) + table(self.variance, self._limit).rounding

    def without_noise(self) -> Self:
        """The same with v = 0."""
        return replace(self, variance=0.0, noise_limit=0)

    @property
    def is_noisy(self) -> bool:
        """Whether v > 0."""
        return self.variance > 0.0

    def sum_noise(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Skellam noise of variance count v, and what the clients add to send it from 0 up."""
        noise = np.full(dim, count * self._limit, dtype=np.int64)
        left, most = count * self.variance, count * self._limit
        while left > 0.0:
            part = min(left, MAX_VARIANCE)
            limit = min(_limit(part, _DEFAULT_TRUNCATION), most)
            noise += lattice.draw(table(part, limit), 2 * limit, dim, keystream).astype(np.int64) - limit
            left -= part
        return noise

    def law(self, honest: int) -> SkellamLaw:
        """Skellam noise of variance v · honest, as it is sent."""
        if not self.variance:
            raise ConditionError("variance=0 adds no noise, so there is no privacy; choose a variance > 0.")
        return SkellamLaw(honest, self.variance, self._limit)

    # ------------------------------------------------------------------ planning

    @classmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """The largest v for these levels and values whose truncation the search can afford."""
        room = (search.values - levels) // 2
        affordable = min(max(0.5 * search.variation, 2.0**-100), _MOST_TRUNCATION)
        if room < 1 or truncation(_SMALLEST_VARIANCE, room) > affordable:
            return None

        most = min(MAX_VARIANCE, max(_MOST_VARIANCE / search.honest, _SMALLEST_VARIANCE))
        variance = _largest(lambda v: truncation(v, room) <= affordable, most)
        start = cls(
            levels=levels, variance=variance, noise_limit=min(room, _limit(variance, affordable)), coordinate_range=1.0
        )
        if search.fits(start):
            return start
        fitting = _largest(lambda v: search.fits(start.quieter(v / variance) or start), variance)
        return start.quieter(fitting / variance) or start

    def quieter(self, factor: float) -> Self | None:
        """The same with a smaller v, cut off where it costs as much."""
        variance = self.variance * min(factor, 0.99)
        if variance < _SMALLEST_VARIANCE:
            return None
        allowed = max(truncation(self.variance, self._limit), _LEAST_TRUNCATION)
        return replace(self, variance=variance, noise_limit=min(self._limit, _limit(variance, allowed)))

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """The noise of 14 coins."""
        found = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return {**found, "variance": 3.5}

    def describe(self) -> str:
        """Levels, range and noise."""
        return (
            f"k = {self.levels:,} levels in ±{self.coordinate_range:.4g}, Skellam noise of variance "
            f"{self.variance:.6g} within ±{self.noise_limit:,}"
        )


def _largest(fits: Callable[[float], bool], most: float) -> float:
    """The largest variance up to `most` that fits, within a thousandth, or else the smallest there is."""
    if fits(most):
        return most
    low, high = _SMALLEST_VARIANCE, most
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def truncation(variance: float, limit: int) -> float:
    """An upper bound on P(|Z| > W): Chernoff's, 2 exp(v (√(1+y²) - 1 - y asinh y)) with y = (W + 1)/v."""
    y = (limit + 1) / variance
    root = math.hypot(1.0, y)
    # √(1+y²) - 1 = y²/(1 + √(1+y²)), without cancellation.
    exponent = variance * (y * y / (1.0 + root) - y * math.asinh(y))
    return min(1.0, 2.0 * math.exp(exponent * (1.0 - 1e-12)) * (1.0 + 1e-12))


def _limit(variance: float, allowed: float) -> int:
    """The smallest W with a truncation of at most `allowed`."""
    low, high = 0, 1
    while truncation(variance, high) > allowed:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if truncation(variance, middle) <= allowed else (middle, high)
    return high


@lru_cache(maxsize=16)
def table(variance: float, limit: int) -> Table:
    """The thresholds of the outcomes 0, ..., 2W, which mean -W, ..., W; v as the exact fraction that the float is.

    The recurrence is started with w_{K+1} = 0 and w_K = 2^320. That changes a weight w_j by a factor of about
    1 - (w_K/w_j)², and K is so large that this is below 2^-200 for all j <= W.
    """
    exact = Fraction(variance)
    start = _start(variance, limit, math.log(2.0) * 100.0)
    above, here = 0, 1 << WORKING_BITS
    weights = [here] if start <= limit else []
    for j in range(start, 0, -1):
        above, here = here, above + 2 * j * exact.denominator * here // exact.numerator
        if j - 1 <= limit:
            weights.append(here)
    return Table.of_weights(0, weights[:-1] + weights[::-1])


def _start(variance: float, last: int, nats: float) -> int:
    """A K with log(I_K/I_last) <= -nats, from log(I_{j+1}/I_j) <= -asinh((j + 1/2)/v) (Amos 1974)."""
    j, left = last, nats
    while left > 0.0:
        left -= math.asinh((j + 0.5) / variance)
        j += 1
    return j


@dataclass(frozen=True)
class SkellamLaw(Law):
    """The sum of `parts` Skellam variables of variance v each, moved up by W each."""

    parts: int
    each: float
    limit: int

    part_name = "clients"
    lowest = -math.inf
    highest = math.inf

    @property
    def variance(self) -> float:  # type: ignore[override]
        """The variance of all clients, rounded down."""
        return self.parts * self.each * (1.0 - 2.0**-52)

    @property
    def mirror(self) -> int:  # type: ignore[override]
        """Twice the centre."""
        return 2 * self.parts * self.limit

    def with_parts(self, parts: int) -> SkellamLaw:
        """With another number of clients."""
        return replace(self, parts=parts)

    def __str__(self) -> str:
        return f"Skellam noise of {self.parts} clients with variance {self.each:g} each"

    def window(self, nats: float, margin: int = 0) -> Window:
        """The window around the centre: Bernstein's inequality holds, since cosh λ - 1 <= (λ²/2)/(1 - λ/3)."""
        reach = math.ceil(math.sqrt(2.0 * self.variance * nats) + 2.0 / 3.0 * nats + 2.0 + margin)
        check_points(2 * reach + 1, self)
        ratios, _, steps = _ratios(self.variance, reach + 1)
        centre = self.parts * self.limit
        outer = float(ratios[reach])
        return window_of_ratios(centre, ratios[:reach], ratios[:reach], outer, outer, extra_steps=steps)

    def step(self, points: Array, direction: int) -> tuple[Array, Array]:
        """f(i - direction)/f(i) - 1: a ratio of neighbouring masses, or its inverse towards the centre.

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
    """I_{j+1}(v)/I_j(v) for j = 0, ..., count - 1; bounds on their relative errors, in units of 2^-53; steps taken.

    r_{j-1} = 1/(2j/v + r_j), four roundings each. An error of r_j enters r_{j-1} by the factor r_j r_{j-1} < 1, so the
    ratio that the recurrence starts with, an upper bound (Amos 1974), is forgotten. The products of the ratios are
    those of a recurrence I_{j-1} = I_{j+1} + (2j/v) I_j whose positive terms have four roundings each: over all steps
    they add up to no more than five roundings per step.
    """
    start = _start(variance, count, -math.log(_FORGOTTEN))
    ratio = variance / (start + 0.5 + math.hypot(start + 1.5, variance))
    lower = variance / (start + 1.0 + math.hypot(start + 1.0, variance))
    error = (ratio / lower - 1.0) * 2.0**53 + 8.0
    ratios, errors = np.empty(count), np.empty(count)
    for j in range(start, 0, -1):
        below = 1.0 / (2.0 * j / variance + ratio)
        error = 4.0 + 1.000001 * ratio * below * error
        ratio = below
        if j <= count:
            ratios[j - 1], errors[j - 1] = ratio, 1.01 * error
    ratios.flags.writeable = errors.flags.writeable = False
    return ratios, errors, start - count
