"""Rounding that is the noise: integers whose law is affine in the coordinate and never certain.

A coordinate x, clipped to ±X, tilts the odds of a few small integers: with x̄ = θ x/X, |x̄| <= θ, a client's integer has
mean centre + γ x̄ and variance a - b x̄². A subclass says what the integers are and so what γ (`gain`), a and b are.
There is no noise beside them. In the words of the interface the *noise* is the variance that is there whatever the
coordinate is, a - b θ², and *rounding* the rest, b (θ² - x̄²).

Coordinates lie on a grid of 2^16 points per unit of x̄, so that every probability is a multiple of 2^-16 and sampling is
exact. The norm is enforced on that grid, as everywhere.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.clip import Grid
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.clipping import ENOUGH_REACH, LEAST_REACH, clipped_square
from cpsgd.mechanisms.interface import RANGES, Extent, Mechanism, Search
from cpsgd.mechanisms.law import Steps
from cpsgd.mechanisms.noise import FairCoins, Noise
from cpsgd.mechanisms.sums import Deviation, MeanCoordinate

FRACTION_BITS = 16
_ONE = 1 << FRACTION_BITS
# Three float operations, each within 2^-53 of the exact result; one spare.
_ROUNDING = 1.0 + 4 * 2.0**-53
# Ranges that are tried, in standard deviations of a rotated coordinate.
_REACHES = (LEAST_REACH, 2.75, *(3.0 + 0.1 * i for i in range(11)), 4.25, 4.5, 5.0, 6.0, ENOUGH_REACH)
_USUAL_REACH = 4.0
_LARGEST_EXPONENT = 700.0
_TILT = "Odds are ½ ± theta: take the nearest that is allowed; a wider range is more noise, too."


def sixteenth_bits(name: str, value: object, *, most: float, remedy: str) -> float:
    """Returns a number in (0, most], rounded down to a multiple of 2^-16. `remedy` is the advice if it is not in there.

    Raises:
        ParameterError: It is not in there, or less than 2^-16.
    """
    found = _validate.finite(name, value)
    if not 2.0**-FRACTION_BITS <= found <= most:
        raise ParameterError(
            f"Expected {name} in [2^-{FRACTION_BITS}, {most:.6g}], got {name}={found!r}; it is a multiple of "
            f"2^-{FRACTION_BITS}, which is what {FRACTION_BITS} random bits can be compared with. {remedy}"
        )
    return math.floor(found * _ONE) / _ONE


@dataclass(frozen=True)
class TiltedNoise(Noise):
    """The noise of rounding alone: the variance a - b θ² that a client's integer has at any coordinate."""

    of: Tilted
    separate = False

    @property
    def variance(self) -> float:
        """a - b θ², the variance at the ends of the range."""
        most, fall = self.of.variances
        return most - fall * self.of.theta**2

    def law(self, honest: int) -> Steps:
        """Returns the law of a sum over `honest` clients."""
        if honest == 0:
            raise ConditionError("No noise arrived, so there is no privacy: raise honest clients.")
        return self.of.steps(honest)

    def cumulant(self, slope: float) -> float:
        """Returns λ² m w²/8, by Hoeffding's lemma: a client adds up m independent integers, each one of 0..w."""
        steps = self.of.steps(1)
        return 0.125 * slope * slope * steps.copies * (len(steps.low) - 1) ** 2

    def on_device(self, count: int) -> FairCoins:
        """Describes no noise to a device: the rounding is the noise."""
        return FairCoins(0)


@dataclass(frozen=True, kw_only=True)
class Tilted(Mechanism):
    """Integers whose odds a coordinate tilts.

    Attributes:
        theta: θ, how far a coordinate at the end of its range moves the odds from even; a multiple of 2^-16.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.
    """

    levels = 2
    most_theta: ClassVar[float] = 0.5

    theta: float
    coordinate_range: float

    def __post_init__(self) -> None:
        low, high = RANGES
        object.__setattr__(self, "theta", sixteenth_bits("theta", self.theta, most=self.most_theta, remedy=_TILT))
        reach = _validate.positive("coordinate_range", self.coordinate_range, low=low, high=high)
        object.__setattr__(self, "coordinate_range", reach)

    # ------------------------------------------------------------------ the integers of a client

    @property
    @abstractmethod
    def gain(self) -> float:
        """Factor γ: the mean of a client's integer moves by γ θ x/X."""

    @property
    @abstractmethod
    def variances(self) -> tuple[float, float]:
        """a and b: the variance of a client's integer is a - b (θ x/X)²."""

    @abstractmethod
    def steps(self, honest: int) -> Steps:
        """Returns the law of a sum over `honest` clients."""

    # ------------------------------------------------------------------ what follows from it

    @property
    def grid(self) -> Grid:
        """The grid of coordinates: θ 2^16 points in X."""
        limit = self.theta * _ONE
        return Grid(limit / self.coordinate_range, limit, FRACTION_BITS)

    @property
    def scale(self) -> float:
        """Factor from the mean of the integers to the mean of the coordinates: s = X / (θ γ)."""
        return self.coordinate_range / (self.theta * self.gain)

    @property
    def noise(self) -> TiltedNoise:
        """The part of the spread that does not depend on the coordinate."""
        return TiltedNoise(self)

    @property
    def extent(self) -> Extent:
        """The law is in units of X."""
        return Extent(self.coordinate_range, 1.0)

    @property
    def largest_rounding_variance(self) -> float:
        """The largest rounding variance, b θ², which zero coordinates have."""
        return self.variances[1] * self.theta**2

    def rounding_variance(self, points: NDArray[np.float32]) -> float:
        """Returns the variance of rounding, summed over a vector's grid points: b Σ (θ² - x̄²)."""
        limit = self.grid.limit
        # Squares of integers up to 2^15: exact, and so are sums of a few millions of them.
        squares = float(np.sum(np.square(points, dtype=np.float64)))
        return self.variances[1] * (points.size * limit * limit - squares) / _ONE**2

    def deviations(
        self, *, clients: int, dim: int, clip_norm: float, rotate: bool, mean_norm: float | None = None
    ) -> list[Deviation]:
        """Returns bounds from the vectors and the integers' own spread; docs/planning.md has the proof.

        One of a client's integers, less its centre, has E exp(λ Z) = a + b x/X, affine in the coordinate. By the
        inequality of the means the product over clients is at most (a + b y/X)^n with y the coordinate of the mean, and
        that is at most a^n exp(n (b/a) y/X): the largest y bounds it, or a cumulant of y (`MeanCoordinate`).
        """
        steps, reach = self.steps(clients), self.coordinate_range
        count, centre = clients * steps.copies, self.centre / steps.copies
        mean = MeanCoordinate(clients, dim, clip_norm, reach, rotate, mean_norm, self.grid.unit)
        # Vectors are rounded to the grid, and a float32 transform is off by less than 2^-18 D per coordinate.
        slack = clients * (self.gain / _ONE + 2.0**-18 * clip_norm / self.scale)

        def moments(slope: float) -> tuple[float, float]:
            """Returns a and b of the bound above; by symmetry they serve both signs of λ."""
            a, b = 1.0 + 1e-15, 0.0
            for v, (low, high) in enumerate(zip(steps.low, steps.high, strict=True)):
                grown = math.expm1(slope * (v - centre))
                a, b = a + 0.5 * (low + high) * grown, b + 0.5 * (high - low) * grown
            return a, b

        def at_most(slope: float) -> float:
            a, b = moments(slope)
            return count * math.log(a + b * mean.largest / reach)

        def rotated(vectors: Callable[[float], float]) -> Callable[[float], float]:
            def cumulant(slope: float) -> float:
                a, b = moments(slope)
                return count * math.log(a) + vectors(count * b / a / reach)

            return cumulant

        cumulants = [at_most, *map(rotated, mean.cumulants())]
        # Beyond this floats overflow, and nothing is claimed.
        steepest = _LARGEST_EXPONENT / (len(steps.low) - 1 - centre)
        return [Deviation(slack, cumulant, steepest) for cumulant in cumulants]

    def expected_rounding(self, *, dim: int, clip_norm: float, rotate: bool) -> float:
        """Returns b θ² (1 - E[x²]/X²), x the clipped coordinate.

        A rotated vector of norm D has coordinates close to N(0, D²/d). Without rotation the worst vector of norm D has
        the largest coordinate there is.
        """
        reach, deviation = self.coordinate_range, clip_norm / math.sqrt(dim)
        # No coordinate of a vector of norm D exceeds D. Clipping takes most from a vector with a single coordinate.
        square = min(clip_norm, reach) ** 2 / dim
        if rotate:
            square = max(deviation**2 * clipped_square(reach / deviation), square)
        return self.largest_rounding_variance * (1.0 - square / reach**2)

    # ------------------------------------------------------------------ planning

    def with_scale(self, scale: float) -> Self:
        """Returns a copy with θ = X/(s γ), to the nearest multiple of 2^-16; X makes up for the difference."""
        if scale == self.scale:
            return self
        wanted = self.coordinate_range / (scale * self.gain) * _ONE
        theta = min(max(1.0, float(round(wanted))), math.floor(self.most_theta * _ONE)) / _ONE
        return replace(self, theta=theta, coordinate_range=scale * (theta * self.gain))

    @property
    def widest_range(self) -> float:
        """The range X for a step of 1: γ times the largest θ."""
        return self.most_theta * self.gain

    @staticmethod
    def usual_range(*, dim: int, clip_norm: float, rotate: bool) -> float:
        """Returns four standard deviations of a rotated coordinate; D without rotation."""
        return clip_norm * min(1.0, _USUAL_REACH / math.sqrt(dim)) if rotate else clip_norm

    @staticmethod
    def ranges(search: Search) -> list[float]:
        """Returns the X worth trying: a few standard deviations of a rotated coordinate; D without rotation."""
        root = math.sqrt(search.dim)
        reaches = {min(reach, root) for reach in _REACHES} if search.rotate else {root}
        return [search.clip_norm * reach / root for reach in sorted(reaches)]

    def at_rough_scale(self, search: Search) -> Self:
        """Returns a copy at roughly the scale that it will need.

        That scale is S/√(a - b θ²) for a constant S, and θ = X/(γ s): solved for θ.
        """
        most, fall = self.variances
        constant = search.rough_scale(self) * math.sqrt(self.noise.variance)
        tilt = self.coordinate_range / (self.gain * constant)
        theta = tilt * math.sqrt(most / (1.0 + fall * tilt * tilt))
        return self.with_scale(self.coordinate_range / (self.gain * theta))
