"""`Mechanism`: everything that is particular to one way of turning a coordinate into a few bits.

A mechanism is a frozen dataclass. No other room asks which one it is: they ask the questions below. To add one, write
a file beside this one and name its class in `cpsgd/registry.py`. The abstract members are all that it must
write; the others follow from these and may be overridden.

Vectors reach a mechanism clipped to norm D and, if the protocol says so, rotated. A client sends one *integer* per
coordinate; one unit of it is worth `scale` (s) in the vector's units.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import clip
from cpsgd.codec.clip import Grid
from cpsgd.codec.pack import Format, Integers
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.clipping import ENOUGH_REACH, LEAST_REACH, expected_clipping
from cpsgd.mechanisms.memory import INDEPENDENT, NoiseMemory
from cpsgd.mechanisms.noise import Noise
from cpsgd.mechanisms.sums import Deviation, MeanCoordinate, rounding_cumulant
from cpsgd.neighbours import Adjacency

RANGES = (1e-20, 1e20)
"""Outside this interval float32 arithmetic could overflow or vanish on the way through the codec."""

# At most eight float operations behind a sensitivity, each within 2^-53 of the exact result.
_ROUNDING = 1.0 + 8 * 2.0**-53


@dataclass(frozen=True)
class ErrorBound:
    """An upper bound on E‖estimate - mean‖² and the theorem that gives it.

    Example:
        >>> from cpsgd import Protocol
        >>> given = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=12)
        >>> bound = given.error_bound()
        >>> round(bound.squared_error, 4), bound.theorem.partition(",")[0]
        (0.1877, 'cpSGD')
    """

    squared_error: float
    theorem: str


@dataclass(frozen=True)
class ExpectedError:
    """E‖estimate - mean‖², the sum of three independent causes.

    Attributes:
        noise: Variance of the noise that was added.
        rounding: Variance of the stochastic rounding.
        clipping: Squared bias by clipping (to the norm, to the range, to the grid).

    Example:
        >>> ExpectedError(noise=0.5, rounding=0.25, clipping=0.0).total
        0.75
    """

    noise: float
    rounding: float
    clipping: float

    @property
    def total(self) -> float:
        """The expected squared error."""
        return self.noise + self.rounding + self.clipping


@dataclass(frozen=True)
class Rounding:
    """Describes to a device's kernels how a grid point g becomes an integer.

    g is clipped to ±`limit`. A draw is ⌊(g + offset + u) / 2^F⌋, u uniform on 0, ..., 2^F - 1: one of the two
    neighbouring levels. It is a coin, 0 or 1, where F = 16 and limit <= offset = 2^15.

    Attributes:
        limit: The largest |g|.
        offset: Added to g, at least `limit`.
        fraction_bits: F, at most 16; 0 leaves grid points as they are.
        coins: Number of coins that are tossed, of which the heads are counted; None for a single draw.
        rate: In units of 2^-16, the probability that a coin is tossed: 2 for heads, 0 for tails, 1 for no toss.
            None where every coordinate is included.
    """

    limit: int
    offset: int
    fraction_bits: int
    coins: int | None = None
    rate: int | None = None

    @property
    def largest(self) -> int:
        """The largest integer."""
        draw = (self.limit + self.offset + (1 << self.fraction_bits) - 1) >> self.fraction_bits
        return draw * (self.coins or 1) * (1 if self.rate is None else 2)


@dataclass(frozen=True)
class Extent:
    """The size of a coordinate's range in the unit that the noise's law is stated in.

    Attributes:
        unit: One unit of the law, in the vector's units.
        half: Half of the range: no coordinate moves further from zero, in units of the law.
        growth: Factor on all distances, for noise that is accounted for over several rounds at once; rounded up.
    """

    unit: float
    half: float
    growth: float = 1.0

    def reach(self, adjacency: Adjacency) -> float:
        """Returns the largest distance of two neighbours in one coordinate."""
        return adjacency.distance(self.half) * self.growth

    def sensitivity(
        self, grid: Grid | None, *, dim: int, clip_norm: float, adjacency: Adjacency, replace_one_distance: float | None
    ) -> float:
        """Returns the largest Euclidean distance of two neighbours, rounded up.

        That is 2D for replace-one and D for zero-out, and never more than the diagonal of the cube of coordinates.
        Rotation keeps distances, and clipping coordinates is a projection on a convex set: neither increases it. Nor
        does the grid, since the encoder shrinks a vector whose norm *on the grid* exceeds D. Nothing on the grid
        enforces a distance that is stated for replace-one: there the resolution (`cpsgd.codec.clip.apart`) is added.
        """
        if grid is None:
            return adjacency.distance(clip_norm, replace_one_distance) / self.unit
        ball, side = adjacency.distance(clip_norm) / self.unit, adjacency.distance(self.half)
        found = min(ball, math.sqrt(dim) * side)
        if replace_one_distance is not None and adjacency is Adjacency.REPLACE_ONE:
            points = clip.apart(replace_one_distance, dim=dim, clip_norm=clip_norm, unit=grid.unit)
            found = min(found, points / (grid.unit * self.unit))
        return found * self.growth * _ROUNDING

    def l1_sensitivity(
        self, grid: Grid | None, sensitivity: float, dim: int, adjacency: Adjacency, stated: float | None
    ) -> float:
        """Returns the largest sum of absolute differences of two neighbours without rotation, rounded up.

        It is at most √d times the Euclidean distance, and d times the reach; or what is stated, with the resolution of
        the codec.
        """
        found = min(math.sqrt(dim) * sensitivity, dim * self.reach(adjacency)) * _ROUNDING
        if stated is None or grid is None:
            return found
        points = clip.l1_apart(stated, dim=dim, unit=grid.unit)
        return min(found, points / (grid.unit * self.unit) * self.growth * _ROUNDING)


@dataclass(frozen=True)
class Search:
    """The planner's request for candidates, which a mechanism answers (`Mechanism.candidates`).

    Attributes:
        values: Number of values that a message may hold.
        honest: Clients whose noise counts.
        variation: The total variation that a client's sampler may have per draw.
        dim: d.
        clip_norm: D.
        rotate: Whether vectors are rotated.
        rough_scale: Estimates the scale that a candidate will need for the (ε, δ) asked for.
        fits: Says whether sums of a candidate, at its rough scale, fit the modulus (always, where there is none).
        bits: Bits per coordinate, may be less than one; None if `values` alone limits the message.
        levels: k and X, where all coordinates are known to be on k levels from -X to X.
    """

    values: int
    honest: int
    variation: float
    dim: int
    clip_norm: float
    rotate: bool
    rough_scale: Callable[[Mechanism], float]
    fits: Callable[[Mechanism], bool]
    bits: float | None = None
    levels: tuple[int, float] | None = None


class Mechanism(ABC):
    """One way of rounding a coordinate and adding noise, so that few bits can be sent."""

    name: ClassVar[str]
    """Its name in protocol files and on the command line."""

    title: ClassVar[str]
    """A few words on what it does to a coordinate."""

    summary: ClassVar[str]
    """Its parameters in a line, as a format string."""

    sampler_remedy: ClassVar[str] = "add noise"
    """The advice where the resolution of the sampler (`Noise.variation`) costs too much of δ."""

    planned: ClassVar[bool] = True
    """Whether the planner is to consider it where no mechanism is named."""

    not_summed: ClassVar[str | None] = None
    """Why clients' integers may not be added up by others (secure aggregation, an all-reduce), and the alternative."""

    caution: ClassVar[str | None] = None
    """A warning to users of this mechanism, beyond those that hold for all."""

    pure: ClassVar[bool] = False
    """Whether its noise has pure differential privacy (δ = 0)."""

    wraps: ClassVar[bool] = False
    """Whether clients send integers modulo `values`, so that sums must be taken modulo the same number."""

    on_levels: ClassVar[bool] = False
    """Whether it is for coordinates that are on levels already, which the planner is told (`Search.levels`)."""

    fewest_values: ClassVar[int] = 3
    """The fewest values of a private message."""

    memory: ClassVar[NoiseMemory] = INDEPENDENT
    """The dependence of the noise on other rounds of a run; none by default."""

    levels: int = 0
    """k: neighbours' integers differ by at most k - 1 before the noise; 0 for floats and real numbers."""

    coordinate_range: float
    """X, each (rotated) coordinate is clipped to plus or minus this; infinite for floats."""

    # ------------------------------------------------------------------ to be written: what a coordinate becomes

    @property
    @abstractmethod
    def grid(self) -> Grid | None:
        """The grid that coordinates are put on before they are rounded; None where floats are sent as they are."""

    @property
    @abstractmethod
    def keystream_bytes(self) -> int:
        """Bytes of private randomness per coordinate, rounding and noise together."""

    @abstractmethod
    def kernel(self) -> Any:
        """Returns the kernel for one client's coordinates: a `cpsgd.codec.pack.RoundingKernel`, or a `FloatKernel`."""

    @property
    @abstractmethod
    def values(self) -> int:
        """Number of values of a client's integer, which is 0, ..., values - 1; 0 for floats."""

    @property
    @abstractmethod
    def centre(self) -> float:
        """The mean of a client's integer whose coordinate is zero."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """s, the size of one unit of the integers in the vector's units."""

    @property
    @abstractmethod
    def noise(self) -> Noise:
        """The noise of a client."""

    @property
    @abstractmethod
    def extent(self) -> Extent:
        """The range of coordinates in units of the noise's law."""

    @abstractmethod
    def without_noise(self) -> Mechanism:
        """Returns rounding to the same range without noise, hence without privacy."""

    # ------------------------------------------------------------------ to be written: planning

    @classmethod
    @abstractmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields mechanisms that fit the search and are worth certifying, at any scale: the planner finds the scale."""

    @abstractmethod
    def with_scale(self, scale: float) -> Self:
        """Returns a copy with another scale. A larger scale means more noise in the vector's units: more privacy.

        Where coordinates are on levels (`on_levels`), the scale is theirs: this returns the mechanism itself.
        """

    @property
    @abstractmethod
    def widest_range(self) -> float:
        """The largest `coordinate_range` that `with_scale` leaves, in units of the scale."""

    @abstractmethod
    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with about `factor` < 1 times the noise's variance, never more; None if there is none."""

    # ------------------------------------------------------------------ messages and their sums

    def packer(self) -> tuple[Any, int]:
        """Returns the kernel that writes payloads and its bytes of private randomness per written coordinate.

        These are `kernel` and `keystream_bytes`, unless messages leave coordinates out.
        """
        return self.kernel(), self.keystream_bytes

    @property
    def inheriting_bytes(self) -> int:
        """Bytes of private randomness per coordinate of a message whose noise is inherited (`memory.inherited`)."""
        return self.keystream_bytes

    def format(self, clip_norm: float, modulus: int | None) -> Format:
        """Returns the layout of a message, which also says how messages are summed; packed integers by default."""
        return Integers(modulus or self.values, self.values)

    def deviations(
        self, *, clients: int, dim: int, clip_norm: float, rotate: bool, mean_norm: float | None = None
    ) -> list[Deviation]:
        """Returns several valid bounds on the distance of one coordinate of a sum from its centre.

        Vectors, rounding and noise are independent given the rotation, and have cumulants. The vectors enter by a
        coordinate of their mean (`MeanCoordinate`), n/s times. docs/planning.md has the proof. `mean_norm` bounds the
        norm of the mean of the vectors, clipped to `clip_norm`.
        """
        grid, noise = self.grid, self.noise
        if grid is None:
            return []  # sums of floats do not wrap around
        mean = MeanCoordinate(clients, dim, clip_norm, self.coordinate_range, rotate, mean_norm, grid.unit)
        # Vectors are rounded to the grid, and a float32 transform is off by less than 2^-18 D per coordinate.
        slack = clients * (2.0**-grid.fraction_bits + 2.0**-18 * clip_norm / self.scale)
        unit = clients / self.scale

        def noise_alone(slope: float) -> float:
            return clients * noise.cumulant(slope)

        def spread(slope: float) -> float:
            return noise_alone(slope) + (clients * rounding_cumulant(slope) if noise.separate else 0.0)

        def rotated(vectors: Callable[[float], float]) -> Callable[[float], float]:
            return lambda slope: spread(slope) + vectors(slope * unit)

        found = [Deviation(mean.largest * unit + slack, spread)]
        if noise.separate and self.coordinate_range <= clip_norm:
            # Rounded values themselves lie within the range.
            found.append(Deviation(self.coordinate_range * unit, noise_alone))
        return found + [Deviation(slack, rotated(vectors)) for vectors in mean.cumulants()]

    def device_rounding(self) -> Rounding | None:
        """Describes the rounding to a device's kernels; None where floats are sent as they are."""
        if self.grid is None:
            return None
        limit = int(self.grid.limit)
        return Rounding(limit, limit, self.grid.fraction_bits)

    # ------------------------------------------------------------------ error

    @property
    def is_noisy(self) -> bool:
        """Whether there is noise, hence privacy."""
        return self.noise.variance > 0.0

    @property
    def largest_rounding_variance(self) -> float:
        """The largest variance of one coordinate's rounding, in squared integers; 1/4 halfway between two levels."""
        return 0.0 if self.grid is None else 0.25

    def rounding_variance(self, points: NDArray[np.float32]) -> float:
        """Returns the variance of rounding, summed over a vector of grid points within the limit."""
        assert self.grid is not None  # floats are not rounded
        return self.grid.fraction_variance(points)

    def expected_rounding(self, *, dim: int, clip_norm: float, rotate: bool) -> float:
        """Returns the mean variance of rounding per coordinate over vectors of norm D; unrotated, its maximum."""
        return self.largest_rounding_variance

    def predicted_error(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ExpectedError:
        """Predicts the squared error of the mean over vectors of norm D, before any is seen.

        * noise: d s² v / n, v the variance of a client's noise, exact whatever the vectors are;
        * rounding: d s²/n times `expected_rounding`;
        * clipping: coordinates beyond ±X are cut to it, a bias of the mean (`expected_clipping`). With it counts the
          codec's own resolution, next to nothing but for very many clients or a very large ε: the margin that vectors
          are clipped with and the grid they are put on.

        Example:
            >>> from cpsgd.mechanisms import Binomial
            >>> mechanism = Binomial(levels=3, trials=5, coordinate_range=0.1)
            >>> error = mechanism.predicted_error(clients=1000, dim=4096, clip_norm=1.0, rotate=True)
            >>> round(error.noise, 6), round(error.rounding, 6), round(error.clipping, 6)
            (0.0512, 0.004106, 0.0)
        """
        per_unit = dim * self.scale**2 / clients
        noise = per_unit * self.noise.variance
        if self.grid is None:
            return ExpectedError(noise, 0.0, 0.0)
        rounding = per_unit * self.expected_rounding(dim=dim, clip_norm=clip_norm, rotate=rotate)
        clipped = expected_clipping(self.coordinate_range, dim=dim, clip_norm=clip_norm, rotate=rotate)
        resolution = (clip.MARGIN * clip_norm) ** 2 + dim / self.grid.unit**2 / 12.0
        return ExpectedError(noise, rounding, clipped + resolution)

    def error_bound(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ErrorBound:
        """Returns the published bound on the expected squared error of the mean, with its theorem.

        Raises:
            ConditionError: There is none, or it does not cover these parameters.
        """
        raise ConditionError(f"There is no published error bound for {self.name}; use expected_squared_error.")

    # ------------------------------------------------------------------ privacy

    def sensitivity(
        self, *, dim: int, clip_norm: float, adjacency: Adjacency, replace_one_distance: float | None = None
    ) -> float:
        """Returns the largest Euclidean distance of two neighbours in units of the law, rounded up: see `Extent`.

        `replace_one_distance` is a bound on the distance of two clients' vectors that is stated beside D, if any.
        """
        return self.extent.sensitivity(
            self.grid, dim=dim, clip_norm=clip_norm, adjacency=adjacency, replace_one_distance=replace_one_distance
        )

    def norm_limit(self, clip_norm: float) -> float:
        """Returns D in grid points, rounded down, so that the norm is within D also for the exact quotient."""
        return math.inf if self.grid is None else clip_norm * self.grid.unit * (1.0 - 2.0**-48)

    def levels_apart(self, *, dim: int, clip_norm: float, adjacency: Adjacency) -> int | None:
        """Returns the most levels between two neighbours' rounded vectors, added up over the coordinates.

        None, unless what is rounded is enforced to be as near as that.
        """
        return None

    # ------------------------------------------------------------------ planning

    def useful_scales(self, *, dim: int, clip_norm: float, rotate: bool) -> tuple[float, float]:
        """Returns the smallest and largest scale worth trying: below too much is clipped, above nothing more is gained.

        Ranges are a few standard deviations of a rotated coordinate; without rotation nothing may be clipped.
        """
        least, enough = (min(1.0, r / math.sqrt(dim)) if rotate else 1.0 for r in (LEAST_REACH, ENOUGH_REACH))
        return clip_norm * least / self.widest_range, clip_norm * enough / self.widest_range

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns the default parameters, for users who name none."""
        return {}

    def describe(self) -> str:
        """Returns one line of text with the parameters."""
        return self.summary.format(**self._parameters())

    def to_fields(self, clip_norm: float) -> dict[str, Any]:
        """Returns the mechanism's fields of a protocol file, as plain JSON values."""
        return {"mechanism": self.name, **self._parameters()}

    def _parameters(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # every one is a dataclass

    @classmethod
    def of_fields(cls, fields: dict[str, Any], clip_norm: float) -> Self:
        """Returns the mechanism with these fields of a protocol file, as `to_fields` wrote them without the name.

        Raises:
            ParameterError: A field is unknown, missing or out of range.
        """
        parameters = dataclasses.fields(cls)  # type: ignore[arg-type]  # every one is a dataclass
        known = sorted(parameter.name for parameter in parameters)
        unknown = sorted(str(name) for name in fields.keys() - set(known))
        if unknown:
            raise ParameterError(
                f"Unknown protocol fields {reprlib.repr(unknown)}; "
                f"beside those of every protocol, {cls.name} has {known}."
            )
        needed = {parameter.name for parameter in parameters if parameter.default is dataclasses.MISSING}
        missing = sorted(needed - fields.keys())
        if missing:
            raise ParameterError(f"Missing protocol fields {missing}.")
        return cls(**fields)
