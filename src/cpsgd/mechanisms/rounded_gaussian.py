"""Gaussian noise before rounding: integers whose sum is a post-processing of the exact Gaussian mechanism.

A client adds Gaussian noise to a coordinate, in units of a step s, and rounds to the nearest integer. Given the sum of
the clients' noisy numbers, their fractional parts have a density within 1 ± τ of uniform, whatever the clients hold; τ
falls like 2n exp(-2π²σ²(1 - 1/n)). So the sum of the rounded numbers is that of the unrounded ones, which is exactly
Gaussian, rounded at random in a way that has nothing to do with the data (docs/proofs/rounded-gaussian.md). Rounds,
sampling and few clients then cost what they cost the Gaussian mechanism, and rounding is a variance of 1/12.

Coordinates and noise lie on a grid of 2^F points per step (`fine_gaussian`). A message holds `window` integers; numbers
beyond it are cut off at its ends. That, too, is a total variation that δ pays for (`variation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.clip import Grid
from cpsgd.codec.rounding import UNIFORMS, GaussianRounder
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.binomial import Binomial
from cpsgd.mechanisms.clipping import ENOUGH_REACH, LEAST_REACH
from cpsgd.mechanisms.discrete_gaussian import closeness
from cpsgd.mechanisms.fine_gaussian import CELL
from cpsgd.mechanisms.interface import RANGES, Extent, Mechanism, Rounding, Search
from cpsgd.mechanisms.law import RoundedNormal
from cpsgd.mechanisms.noise import Noise, SumRounding

LEAST_SIGMA, MOST_SIGMA = 0.8, 2047.0
MAX_WINDOW = 1 << 17
_MAX_POINTS = 1 << 24
# Of the range, in standard deviations of a rotated coordinate, what the planner tries.
_REACHES = (LEAST_REACH, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, ENOUGH_REACH)
# And what the window may cost, over what the planner allows a sampler.
_SHARES = (1.0, 0.3, 0.06, 0.01)
# With more noise than this rounding costs less than a thousandth of a percent of it.
_ENOUGH_SIGMA = 90.0
# A window that costs less than this is of no use.
_LEAST_CUT = 2.0**-110
# The range's share of the window, at most, where a step is chosen: half of it either way, and a little for noise.
_MOST_OF_WINDOW = 0.49
# Float operations that a number has behind it, each within 2^-53.
_ROUNDING = 1.0 + 8 * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class RoundedGaussian(Mechanism):
    """Gaussian noise, and then rounding to the nearest integer.

    Attributes:
        noise_deviation: σ, standard deviation of the noise that each client adds, in steps; from 0.8 to 2047.
        step: s, the distance of two integers in the vector's units.
        window: How many integers a message can hold; what would lie beyond is cut off.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.

    Example:
        >>> from cpsgd.mechanisms import RoundedGaussian
        >>> print(RoundedGaussian(noise_deviation=4.0, step=0.01, window=64, coordinate_range=0.1).describe())
        Gaussian noise of 4 steps of 0.01, rounded to one of 64 integers, in ±0.1
    """

    name = "rounded-gaussian"
    title = "Gaussian noise before rounding"
    summary = (
        "Gaussian noise of {noise_deviation:.4g} steps of {step:.4g}, rounded to one of {window:,} integers, in "
        "±{coordinate_range:.4g}"
    )
    sampler_remedy: ClassVar[str] = "use a wider window, more noise per client (noise_deviation), or more clients"
    fewest_values = 12
    least_deviation: ClassVar[float] = LEAST_SIGMA

    noise_deviation: float
    step: float
    window: int
    coordinate_range: float

    def __post_init__(self) -> None:
        low, high = RANGES
        sigma = _validate.finite("noise_deviation", self.noise_deviation)
        if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
            raise ParameterError(
                f"Expected noise_deviation in [{LEAST_SIGMA:g}, {MOST_SIGMA:g}] steps, got noise_deviation={sigma!r}; "
                "with less, rounding could be told from noise, and more is of no use: change the step instead."
            )
        object.__setattr__(self, "noise_deviation", sigma)
        object.__setattr__(self, "step", _validate.positive("step", self.step, low=low, high=high))
        object.__setattr__(self, "window", _validate.integer("window", self.window, low=2, high=MAX_WINDOW))
        reach = _validate.positive("coordinate_range", self.coordinate_range, low=low, high=high)
        object.__setattr__(self, "coordinate_range", reach)
        if self._steps >= 0.5 * self.window:
            raise ParameterError(
                f"Expected coordinate_range={reach:g} to lie within the window, {0.5 * self.window:g} steps of "
                f"step={self.step:g} either way; use a wider window, a larger step or a smaller range."
            )
        if self.grid.limit > _MAX_POINTS:
            raise ParameterError(
                f"Expected coordinate_range={reach:g} to be at most {_MAX_POINTS} grid points of "
                f"{self.step * 2.0**-self.fraction_bits:.3g}; use a larger step or a smaller range."
            )

    # ------------------------------------------------------------------ what a coordinate becomes

    @property
    def _steps(self) -> float:
        """The range X, in steps."""
        return self.coordinate_range / self.step

    @cached_property
    def fraction_bits(self) -> int:
        """Fraction bits F of the grid, chosen so that σ has between 8 and 16 cells of 2^8 points."""
        return math.ceil(math.log2(fine_gaussian.LEAST_RATIO * CELL / self.noise_deviation))

    @property
    def _ratio(self) -> float:
        """σ in units of cells, as an exact fraction."""
        return math.ldexp(self.noise_deviation, self.fraction_bits) / CELL

    @property
    def cells(self) -> int:
        """The largest |H|: further out every coordinate would be cut off, or nothing is worth drawing."""
        reach = (self.window << (self.fraction_bits - 1)) + int(self.grid.limit) + UNIFORMS * CELL // 2
        return min(fine_gaussian.farthest(self._ratio), math.ceil(reach / CELL))

    @property
    def grid(self) -> Grid:
        """2^F points per step."""
        bits = self.fraction_bits
        limit = max(1.0, math.floor(math.ldexp(self._steps, bits)))
        return Grid(math.ldexp(1.0, bits) / self.step, limit, bits)

    @property
    def keystream_bytes(self) -> int:
        """Bytes of the noise: rounding to the nearest integer needs none."""
        return fine_gaussian.DRAW_BYTES

    def kernel(self) -> GaussianRounder:
        """Returns the kernel that adds the noise and rounds."""
        table = fine_gaussian.table(self._ratio, self.cells)
        return GaussianRounder(int(self.grid.limit), self.window, self.fraction_bits, table.high, table.low)

    @property
    def values(self) -> int:
        """Number of values of a message: the window."""
        return self.window

    @property
    def centre(self) -> float:
        """The middle of the window, and half a grid point: halves are rounded up."""
        return 0.5 * (self.window - 1) + math.ldexp(0.5, -self.fraction_bits)

    @property
    def scale(self) -> float:
        """The step s between two integers, in units of a coordinate."""
        return self.step

    @property
    def noise(self) -> RoundedNoise:
        """Gaussian noise of deviation σ."""
        return RoundedNoise(self)

    def without_noise(self) -> Binomial:
        """Returns rounding without noise, to as many levels as the window has, over the same range."""
        return Binomial(levels=self.window, trials=0, coordinate_range=self.coordinate_range)

    def device_rounding(self) -> Rounding:
        """Describes no rounding: a device adds up grid points, and rounds their sum (`RoundedNoise.on_device`)."""
        return Rounding(int(self.grid.limit), int(self.grid.limit), 0)

    @property
    def largest_rounding_variance(self) -> float:
        """1/12 at every coordinate (Sheppard), within a relative error of 2e-4."""
        return 1.0 / 12.0

    def rounding_variance(self, points: NDArray[np.float32]) -> float:
        """Returns 1/12 for each coordinate."""
        return points.size / 12.0

    @property
    def extent(self) -> Extent:
        """The coordinate range in units of one step. Its half is X, or one grid point if X is smaller."""
        return Extent(self.step, max(self._steps, math.ldexp(1.0, -self.fraction_bits)) * _ROUNDING)

    @property
    def farthest_point(self) -> float:
        """The largest |coordinate| on the grid, in steps."""
        return math.ldexp(self.grid.limit, -self.grid.fraction_bits)

    @property
    def lowest(self) -> float:
        """The mean of a client's integer whose coordinate is at the lower end of its range."""
        return self.centre - self.farthest_point

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields, for each range and price of the window, as much noise as the window holds, or the modulus."""
        root = math.sqrt(search.dim)
        reaches = sorted({min(reach, root) for reach in _REACHES}) if search.rotate else [root]
        # σ s is the same for all candidates.
        unit = search.rough_scale(cls(noise_deviation=1.0, step=1.0, window=64, coordinate_range=1.0))
        for reach in reaches:
            coordinate_range = search.clip_norm * reach / root
            if not RANGES[0] <= coordinate_range <= RANGES[1]:
                continue
            for share in _SHARES:
                tails = reach_of(max(share * search.variation, _LEAST_CUT))
                widest = min(search.values, MAX_WINDOW)
                sigma = 0.5 * widest / (coordinate_range / unit + tails) * (1.0 - 1e-9)
                found = cls._fitting(min(sigma, _ENOUGH_SIGMA), unit, coordinate_range, tails, search)
                if found is not None:
                    yield found

    @classmethod
    def _at(cls, sigma: float, unit: float, coordinate_range: float, tails: float) -> Self:
        """Returns the mechanism with a window for the range plus `tails` standard deviations on either side."""
        window = max(2, math.ceil(2.0 * sigma * (coordinate_range / unit + tails)))
        return cls(noise_deviation=sigma, step=unit / sigma, window=window, coordinate_range=coordinate_range)

    @classmethod
    def _fitting(cls, sigma: float, unit: float, coordinate_range: float, tails: float, search: Search) -> Self | None:
        """Returns the candidate with the most noise up to σ, to within 1 %, whose sums fit the modulus.

        None if not even `LEAST_SIGMA` will do. `unit` is σ s, the same for all.
        """
        if sigma < LEAST_SIGMA:
            return None
        try:
            if search.fits(found := cls._at(sigma, unit, coordinate_range, tails)):
                return found
            low, high = LEAST_SIGMA, sigma
            if not search.fits(found := cls._at(low, unit, coordinate_range, tails)):
                return None
            while high > 1.01 * low:
                middle = math.sqrt(low * high)
                tried = cls._at(middle, unit, coordinate_range, tails)
                if search.fits(tried):
                    low, found = middle, tried
                else:
                    high = middle
        except ParameterError:
            return None  # the range is far too wide for the step, or the window
        return found

    def with_scale(self, scale: float) -> Self:
        """Returns a copy with another step; X shrinks if it would exceed the window or the grid."""
        if scale == self.step:
            return self
        widest = min(self.widest_range, math.ldexp(_MAX_POINTS, -self.fraction_bits))
        return replace(self, step=scale, coordinate_range=min(self.coordinate_range, widest * scale))

    @property
    def widest_range(self) -> float:
        """A little less than half of the window."""
        return _MOST_OF_WINDOW * self.window

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with less noise and the same window."""
        sigma = self.noise_deviation * math.sqrt(min(factor, 0.99))
        return replace(self, noise_deviation=sigma) if sigma >= self.least_deviation else None

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns a σ of 4 in 8 bits; the noise of the sum has about the norm of one vector."""
        return usual_fields(4.0, 256, 90.0, clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)


@dataclass(frozen=True)
class RoundedNoise(Noise):
    """Gaussian noise before the rounding, together with the rounding."""

    of: RoundedGaussian
    separate = False

    @property
    def variance(self) -> float:
        """Variance of the noise before the rounding: σ²."""
        return self.of.noise_deviation**2

    @property
    def counted_variance(self) -> float:
        """The variance of the continuous Gaussian, in squared steps, that the noise on the grid is a rounding of."""
        return self.of.noise_deviation**2 - math.ldexp(fine_gaussian.GRID_VARIANCE, -2 * self.of.fraction_bits)

    def law(self, honest: int) -> RoundedNormal:
        """Returns N(0, honest σ²), its deviation rounded down."""
        if honest == 0:
            raise ConditionError("No noise arrived, so there is no privacy: raise honest clients.")
        deviation = math.sqrt(honest * self.counted_variance) / _ROUNDING
        return RoundedNormal(deviation, self.of.noise_deviation, self.of.lowest)

    @property
    def variation(self) -> float:
        """Total variation of a draw, from the tails beyond the window, the sampler and the grid."""
        resolution = 2.0 * (2 * self.of.cells + 2) * 2.0**-128
        return self.cut + fine_gaussian.SMOOTHING + resolution + fine_gaussian.GRID_VARIATION

    def slack(self, honest: int) -> float:
        """Returns a bound on -log(1 - τ), in nats: given the sum, fractional parts have a density within 1 ± τ."""
        excess = uniformity(self.counted_variance, honest)
        return -math.log1p(-excess) * (1.0 + 1e-12) if excess < 1.0 else math.inf

    @property
    def cut(self) -> float:
        """Upper bound on the probability that noise leaves the window, for the coordinate nearest to an end."""
        room = (0.5 * self.of.window - self.of.farthest_point) * (1.0 - 1e-12)
        return cut_off(room / self.of.noise_deviation)

    @property
    def ripple(self) -> float:
        """Relative size of the periodic term that rounding adds to a moment generating function."""
        return 2.1 * math.exp(-2.0 * math.pi**2 * self.of.noise_deviation**2)

    def cumulant(self, slope: float) -> float:
        """Returns an upper bound on the cumulant of a client's integer Y at λ = `slope` (proof: docs/planning.md).

        Without a window, E exp(λ(Y - x)) <= exp(λ²(σ² + 1/12)/2) (1 + 2.1 exp(-2π²σ²)). Cutting off at the window's
        ends adds at most the probability that it happens.
        """
        square, constant = self._cumulant
        return square * slope * slope + constant

    @cached_property
    def _cumulant(self) -> tuple[float, float]:
        """The factor of λ² in the bound, and its constant term."""
        return 0.5 * (self.settled_variance + 1.0 / 12.0) * _ROUNDING, self.ripple + self.cut

    def on_device(self, count: int) -> SumRounding:
        """Returns the Gaussian noise and the rounding of a sum of `count` clients, for a device to draw."""
        of = self.of
        deviation = math.ldexp(math.sqrt(self.variance), of.fraction_bits) * math.sqrt(count)
        return SumRounding(deviation, of.fraction_bits, count, int(of.grid.limit), of.centre)


def usual_fields(
    sigma: float, window: int, steps: float, *, clients: int, dim: int, clip_norm: float, rotate: bool
) -> dict[str, Any]:
    """Returns default fields: the sum's noise has about the norm of one vector, and the range at most `steps` steps."""
    reach = clip_norm * min(1.0, 4.0 / math.sqrt(dim)) if rotate else clip_norm
    step = max(clip_norm / (sigma * math.sqrt(clients)), reach / steps)
    return {"noise_deviation": sigma, "step": step, "window": window, "coordinate_range": reach}


def uniformity(variance: float, honest: int) -> float:
    """Returns τ: given their sum, fractional parts of n clients' noisy numbers have a density within 1 ± τ of uniform.

    The theta series of the lattice dual to A_{n-1}, without its constant term; `closeness` is that.
    """
    return closeness(variance, honest)


def cut_off(deviations: float) -> float:
    """Returns Chernoff's bound on the probability that noise is further out than this many standard deviations."""
    return min(1.0, 2.0 * math.exp(-0.5 * deviations * deviations) * (1.0 + 1e-12)) if deviations > 0.0 else 1.0


def reach_of(probability: float) -> float:
    """Returns the number of standard deviations at which `cut_off` is this probability."""
    return math.sqrt(2.0 * math.log(2.0 / probability)) * (1.0 + 1e-9)
