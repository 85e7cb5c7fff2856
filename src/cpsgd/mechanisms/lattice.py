"""Stochastic rounding to k levels plus independent integer noise: what the paper's mechanism and its rivals share.

A coordinate is clipped to ±X, rounded without bias to one of k levels that lie s = 2X/(k-1) apart, and noise with a
log-concave law on the integers is added. A subclass says which noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec import clip
from cpsgd.codec.formats import Integers
from cpsgd.codec.rounding import KEYSTREAM_BYTES, MAX_LEVELS, Grid, Rounder, Table
from cpsgd.mechanisms.base import Deviation, ExpectedError, Mechanism, Rounding, Search
from cpsgd.mechanisms.sums import MeanCoordinate, rounding_cumulant
from cpsgd.neighbours import Adjacency
from cpsgd.paper import bounds
from cpsgd.randomness import Keystream

RANGES = (1e-20, 1e20)
"""Outside this interval float32 arithmetic could overflow or vanish on the way through the codec."""

# Draws of noise at a time, where it is drawn for many clients.
_BLOCK = 1 << 20
# Four float operations, each within 2^-53 of the exact result; one spare.
_ROUNDING = 1.0 + 5 * 2.0**-53
# Beyond this many standard deviations of a rotated coordinate clipping costs nothing worth a wider range.
ENOUGH_REACH = 7.0
# X is at least this many standard deviations of a rotated coordinate, which bounds the bias: clipping takes at most
# 0.2 % of D². Without a bound, where the noise is larger than any vector, clipping everything to nothing would "win".
LEAST_REACH = 2.5
# Coordinates beyond this many standard deviations carry less than 1e-30 of the energy.
_FARTHEST = 12.0
# With more cells than this per standard deviation f is uniform to many digits and E[f(1-f)] is 1/6.
_FINEST = 16.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True, kw_only=True)
class Lattice(Mechanism):
    """Rounding to k levels and integer noise.

    Attributes:
        levels: k, levels that a coordinate is rounded to.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.
    """

    levels: int
    coordinate_range: float

    def __post_init__(self) -> None:
        low, high = RANGES
        levels = _validate.integer("levels", self.levels, low=2, high=MAX_LEVELS)
        object.__setattr__(self, "levels", levels)
        reach = _validate.positive("coordinate_range", self.coordinate_range, low=low, high=high)
        object.__setattr__(self, "coordinate_range", reach)

    # ------------------------------------------------------------------ the noise of a client, from 0 up

    @property
    @abstractmethod
    def largest_noise(self) -> int:
        """The noise that is added is an integer between 0 and this."""

    @property
    @abstractmethod
    def noise_mean(self) -> float:
        """The mean of what is added."""

    @abstractmethod
    def noise_table(self) -> Table:
        """Cumulative probabilities of the noise; empty where fair coins are counted."""

    @property
    @abstractmethod
    def noise_bytes(self) -> int:
        """Keystream bytes per coordinate for the noise."""

    @property
    @abstractmethod
    def noise_proxy(self) -> tuple[float, float]:
        """V and a largest λ, such that a client's centred noise Z has E exp(λ Z) <= exp(λ² V/2) up to that λ."""

    def noise_cumulant(self, slope: float) -> float:
        """A bound on log E exp(λ Z) of a client's centred noise, for both signs of a λ of this size; convex."""
        proxy, steepest = self.noise_proxy
        return 0.5 * proxy * slope * slope if slope <= steepest else math.inf

    @classmethod
    @abstractmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """The mechanism with so many levels and as much noise as fits the search; None if none fits."""

    # ------------------------------------------------------------------ what follows from it

    @property
    def grid(self) -> Grid:
        """2^F points per level."""
        return Grid.of_levels(self.levels, self.coordinate_range)

    @property
    def keystream_bytes(self) -> int:
        """Four bytes for rounding, and those of the noise."""
        return 4 + self.noise_bytes

    def kernel(self) -> Rounder:
        """Rounds, and adds noise by counting coins or by inversion."""
        table = self.noise_table()
        return Rounder(self.levels, self.grid.fraction_bits, self.largest_noise, table.high, table.low, table.base)

    def clients_noise(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Many clients' at a time."""
        noise = np.zeros(dim, dtype=np.int64)
        table, largest = self.noise_table(), self.largest_noise
        rows = max(1, _BLOCK // dim)
        for start in range(0, count, rows):
            here = min(rows, count - start)
            noise += draw(table, largest, here * dim, keystream).reshape(here, dim).sum(axis=0, dtype=np.int64)
        return noise

    def device_rounding(self) -> Rounding:
        """To one of k levels."""
        limit = int(self.grid.limit)
        return Rounding(limit, limit, self.grid.fraction_bits)

    def format(self, clip_norm: float, modulus: int | None) -> Integers:
        """Packed integers."""
        return Integers(modulus or self.values, self.values)

    @property
    def values(self) -> int:
        """k levels and the noise's largest value."""
        return self.levels + self.largest_noise

    @property
    def centre(self) -> float:
        """The middle level and the mean of the noise."""
        return self.noise_mean + (self.levels - 1) / 2

    @property
    def scale(self) -> float:
        """s = 2 X / (k - 1), the distance of two levels."""
        return 2.0 * self.coordinate_range / (self.levels - 1)

    def deviations(
        self, *, clients: int, dim: int, clip_norm: float, rotate: bool, mean_norm: float | None = None
    ) -> list[Deviation]:
        """Bounds from the vectors, the rounding and the noise, which are independent given the rotation.

        docs/planning.md has the proof. Noise and rounding have cumulants; the vectors enter by a coordinate of their
        mean (`MeanCoordinate`), n/s times.
        """
        mean = MeanCoordinate(clients, dim, clip_norm, self.coordinate_range, rotate, mean_norm, self.grid.unit)
        # Vectors are rounded to the grid, and a float32 transform is off by less than 2^-18 D per coordinate.
        slack = clients * (2.0**-self.grid.fraction_bits + 2.0**-18 * clip_norm / self.scale)

        unit = clients / self.scale

        def noise(slope: float) -> float:
            return clients * self.noise_cumulant(slope)

        def spread(slope: float) -> float:
            return noise(slope) + clients * rounding_cumulant(slope)

        def rotated(vectors: Callable[[float], float]) -> Callable[[float], float]:
            return lambda slope: spread(slope) + vectors(slope * unit)

        found = [Deviation(mean.largest * unit + slack, 0.0, cumulant=spread)]
        if self.coordinate_range <= clip_norm:
            # Rounded values themselves lie within ±(k-1)/2.
            found.append(Deviation(self.coordinate_range * unit, 0.0, cumulant=noise))
        found += [Deviation(slack, 0.0, cumulant=rotated(vectors)) for vectors in mean.cumulants()]
        return found

    @property
    def largest_rounding_variance(self) -> float:
        """A coordinate halfway between two levels has 1/4."""
        return 0.25

    def predicted_error(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ExpectedError:
        """What the mean of rounded vectors will be off by, a sum of three independent causes.

        With s the distance of two levels:

        * noise: d s² v / n, v the variance of a client's noise, exact whatever the vectors are;
        * rounding: (s²/n) Σ_j E[f_j(1 - f_j)], f_j the fractional part of a coordinate in units of s. A rotated vector
          of norm D has coordinates close to N(0, τ²), τ = D/√d, and the expectation is a one-dimensional integral. An
          odd number of levels puts a level at zero: coordinates small against s then cost about |x|/s and not 1/4 each;
        * clipping: coordinates beyond ±X are cut to it, a bias of the mean. Bias does not average out when the clients
          hold similar vectors, so the model takes the worst case, that all clients hold the same: d E[(|x| - X)₊²].
          For vectors that have nothing to do with each other it is n times smaller. Also counted here, though it is
          next to nothing but for very many clients or a very large ε: the codec's own resolution, which is the margin
          that vectors are clipped with and the grid they are put on.

        Without rotation nothing is known of the coordinates but their norm. The planner then never clips (X >= D) and
        the rounding term is its maximum over all vectors of norm D instead of an expectation.

        Example:
            >>> from cpsgd.mechanisms import Binomial
            >>> mechanism = Binomial(levels=3, trials=5, coordinate_range=0.1)
            >>> error = mechanism.predicted_error(clients=1000, dim=4096, clip_norm=1.0, rotate=True)
            >>> round(error.noise, 6), round(error.rounding, 6), error.clipping < 1e-9
            (0.0512, 0.004106, True)
        """
        scale, reach = self.scale, self.coordinate_range
        per_unit = dim * scale * scale / clients
        resolution = (clip.MARGIN * clip_norm) ** 2 + dim * (scale * 2.0**-self.grid.fraction_bits) ** 2 / 12.0
        noise = per_unit * self.noise_variance
        if rotate:
            deviation = clip_norm / math.sqrt(dim)
            rounding = per_unit * gaussian_rounding(scale / deviation, self.levels)
            # No coordinate of a vector of norm D exceeds D, whatever the rotation.
            clipped = 0.0 if reach >= clip_norm else gaussian_clipping(reach / deviation)
            return ExpectedError(noise, rounding, clip_norm * clip_norm * clipped + resolution)
        rounding = per_unit * worst_rounding(clip_norm / scale / math.sqrt(dim), self.levels)
        return ExpectedError(noise, rounding, max(0.0, clip_norm - reach) ** 2 + resolution)

    def sensitivity(
        self, *, dim: int, clip_norm: float, adjacency: Adjacency, replace_one_distance: float | None = None
    ) -> float:
        """S = 2D/s for replace-one and D/s for zero-out, and never more than the cube of coordinates allows.

        That is its diagonal, √d (k - 1), half of it for zero-out. Rotation keeps distances and clipping coordinates is
        a projection on a convex set, so neither increases S. The encoder's finite resolution does not either: it
        rounds on a fixed grid of fractions of s, and shrinks a vector whose norm *on that grid* exceeds D/s, so that S
        bounds what is really rounded and sent. Rounding is then exact on the grid.

        Nothing on the grid enforces a distance that is stated for replace-one: there the resolution is added.
        """
        ball = adjacency.distance(clip_norm) * (self.levels - 1) / (2.0 * self.coordinate_range)
        side = adjacency.distance(0.5 * (self.levels - 1))
        found = min(ball, math.sqrt(dim) * side) * _ROUNDING
        if replace_one_distance is None or adjacency is not Adjacency.REPLACE_ONE:
            return found
        grid = self.grid
        points = clip.apart(replace_one_distance, dim=dim, clip_norm=clip_norm, unit=grid.unit)
        return min(found, points * 2.0**-grid.fraction_bits)

    def reach(self, adjacency: Adjacency) -> float:
        """From the lowest level to the highest, or from the middle to one of them."""
        return adjacency.distance(0.5 * (self.levels - 1))

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Two levels, and the paper's X^max."""
        reach = bounds.coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)
        return {"levels": 2, "coordinate_range": reach if rotate else clip_norm}

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """All small numbers of levels, odd and even, and a geometric ladder of odd ones, with the most noise each."""
        for levels in _ladder(search.values):
            candidate = cls.loudest(levels, search)
            if candidate is None:
                continue
            yield candidate
            # More levels only widen the range, and this one is wide enough already.
            if levels % 2 and levels > 3:
                _, widest = candidate.useful_scales(dim=search.dim, clip_norm=search.clip_norm, rotate=search.rotate)
                if search.rough_scale(candidate) >= widest:
                    return

    def with_scale(self, scale: float) -> Self:
        """The same with X = s (k - 1)/2."""
        return replace(self, coordinate_range=0.5 * (self.levels - 1) * scale)

    def useful_scales(self, *, dim: int, clip_norm: float, rotate: bool) -> tuple[float, float]:
        """From ranges of a few standard deviations of a rotated coordinate; unrotated, nothing may be clipped."""
        half = 0.5 * (self.levels - 1)
        least, enough = (min(1.0, r / math.sqrt(dim)) if rotate else 1.0 for r in (LEAST_REACH, ENOUGH_REACH))
        return clip_norm * least / half, clip_norm * enough / half


# ---------------------------------------------------------------------- the model of the error


def gaussian_rounding(step: float, levels: int) -> float:
    """E[f(1-f)] of a standard normal coordinate on `levels` levels, `step` apart and symmetric about zero.

    Beyond the outermost levels a coordinate is clipped onto a level and rounding costs nothing.
    """
    half_range = 0.5 * step * (levels - 1)
    if step * _FINEST < 1.0:
        return math.erf(half_range / math.sqrt(2.0)) / 6.0
    # By symmetry only the half line: full cells from the outermost level inwards, for even k half a cell at zero.
    first = 0.0 if levels % 2 else -0.5 * step
    count = min(levels // 2, math.ceil(_FARTHEST / step) + 1)
    left = first + step * np.arange(count)
    fraction = 0.5 * (1.0 + _NODES)
    if step <= 1.0:
        x = left[:, None] + step * fraction
        inside = fraction * (1.0 - fraction) * np.exp(-0.5 * x * x)
        cells = 0.5 * step * inside @ _WEIGHTS
    else:
        cells = np.array([_cell(a, step) for a in left])
    if levels % 2 == 0:
        cells[0] *= 0.5  # the cell around zero belongs to both half lines
    return float(2.0 * cells.sum() / math.sqrt(2.0 * math.pi))


def _cell(left: float, step: float) -> float:
    """∫ f(1-f) exp(-x²/2) dx over one wide cell, in pieces no longer than half a standard deviation."""
    low, high = max(left, -_FARTHEST), min(left + step, _FARTHEST)
    if high <= low:
        return 0.0
    pieces = math.ceil(2.0 * (high - low))
    width = (high - low) / pieces
    x = low + width * (np.arange(pieces)[:, None] + 0.5 * (1.0 + _NODES))
    fraction = (x - left) / step
    return float(0.5 * width * (fraction * (1.0 - fraction) * np.exp(-0.5 * x * x) @ _WEIGHTS).sum())


def gaussian_clipping(reach: float) -> float:
    """E[(|g| - reach)₊²] of a standard normal g: 2[(1+x²) Φ(-x) - x φ(x)] at x = reach."""
    from scipy.special import erfcx  # late: who only encodes does without SciPy

    mills = math.sqrt(0.5 * math.pi) * float(erfcx(reach / math.sqrt(2.0)))  # Φ(-x)/φ(x)
    density = math.exp(-0.5 * reach * reach) / math.sqrt(2.0 * math.pi)
    return max(0.0, 2.0 * density * ((1.0 + reach * reach) * mills - reach))


def worst_rounding(spread: float, levels: int) -> float:
    """The largest mean of f(1-f) over all vectors whose coordinates have root mean square `spread` (in units of s).

    With a level at zero f(1-f) <= y - y² for y = min(|u|, 1/2), a concave function of u², so that spreading the norm
    evenly is worst (Jensen). Without one, zeros lie halfway between two levels and cost 1/4 each.
    """
    if levels % 2 == 0:
        return 0.25
    fraction = min(spread, 0.5)
    return fraction * (1.0 - fraction)


# ---------------------------------------------------------------------- planning and sampling


def _ladder(values: int) -> list[int]:
    """Numbers of levels worth trying, in increasing order.

    All up to 9; then odd ones, each about a seventh larger than the last; and the mirror image of these, for where
    levels are needed so badly that only few values are left for noise.
    """
    steps = [*range(1, 10)]
    while steps[-1] < values:
        steps.append((round(steps[-1] * 1.15) + 1) | 1)
    levels = {step for step in steps if 2 <= step < values}
    levels |= {values - step for step in steps if values - step >= 2}
    return sorted(k for k in levels if k <= MAX_LEVELS)


def draw(table: Table, largest: int, count: int, keystream: Keystream) -> NDArray[np.uint32]:
    """Noise alone, from a kernel that starts on the lowest level: by inversion, or by counting `largest` coins."""
    points = Grid.of_levels(2, 1.0)
    rounder = Rounder(2, points.fraction_bits, largest, table.high, table.low, table.base)
    width = KEYSTREAM_BYTES if table.high.size else coin_bytes(largest)
    noise = np.empty(count, dtype=np.uint32)
    rounder.values(np.full(count, -points.limit, dtype=np.float32), keystream.take(count * (4 + width)), noise)
    return noise


def coin_bytes(trials: int) -> int:
    """Keystream bytes for so many fair coins: sixteen of them share the word that rounding uses half of."""
    return 4 * -(-max(0, trials - 16) // 32)
