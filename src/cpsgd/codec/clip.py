"""Bounds what one client can say: the norm of its vector, also on the grid that rounding starts from.

**The grid.** The k levels lie s = 2 X^max/(k-1) apart, from -X^max to X^max. A finer grid, 2^F points per level,
carries the coordinates. The vector is first put on the grid: to the nearest point, at most 2^-(F+1) levels away. From
there it is rounded to one of its two neighbouring levels. F random bits give exactly the right probability, a multiple
of 2^-F. So the mechanism that is analysed, which starts from a point of the grid within the norm bound, is the one that
runs.

**Clipping.** `factor` scales a vector down to norm D. `enforce` is the second look after the rotation: whatever float32
arithmetic did on the way, the grid point that rounding starts from has norm at most D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels
from cpsgd.errors import NonFiniteError, VectorError

# What float32 arithmetic adds to the distance of two grid points, over D in grid units; see `apart`.
_FLOAT_SLACK = 2.0**-16

Vector = NDArray[np.float32] | NDArray[np.float64]

# Vectors are clipped to D (1 - 2^-20), so that the rounding of the rotation and of the grid, some 1e-7 of the norm,
# rarely leaves anything for `enforce` to do.
MARGIN = 2.0**-20

MAX_LEVELS = 2**24
# Coordinates worked on at a time, so that wide temporaries stay in the cache.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Grid:
    """The points that coordinates lie on before they are rounded.

    Attributes:
        unit: Grid points per unit of the vector, 2^F / s.
        limit: X^max in grid points, an integer.
        fraction_bits: F.
    """

    unit: float
    limit: float
    fraction_bits: int

    @classmethod
    def of_levels(cls, levels: int, coordinate_range: float, most_bits: int = 16) -> Grid:
        """Returns the grid under k levels in [-X^max, X^max]: F is 16, or smaller so that k 2^F fits into 32 bits.

        With fewer bits the grid is coarser. With 0, which an odd k may have, its points are the levels.

        Example:
            >>> Grid.of_levels(3, 1.0)
            Grid(unit=65536.0, limit=65536.0, fraction_bits=16)
        """
        bits = min(most_bits, 32 - (levels - 1).bit_length())
        unit = 2.0**bits * (levels - 1) / (2.0 * coordinate_range)
        return cls(unit, float(((levels - 1) << bits) >> 1), bits)

    def fraction_variance(self, points: NDArray[np.float32]) -> float:
        """Returns Σ f(1-f) over the fractional parts f, in levels, of a vector of grid points within the limit."""
        one, offset = np.uint32(1 << self.fraction_bits), np.uint32(self.limit)
        total = 0
        for start in range(0, points.size, _BLOCK):
            # In 32-bit integers, hence exactly: grid points are below 2^31 and f(1-f) in units of 4^-F at most 2^30.
            parts = points[start : start + _BLOCK].astype(np.int32).view(np.uint32)
            parts += offset
            parts &= one - np.uint32(1)
            total += int(np.sum(parts * (one - parts), dtype=np.uint64))
        return total * 2.0 ** (-2 * self.fraction_bits)


def _norm(vector: Vector) -> tuple[float, float]:
    """Returns the norm as a number of units, and the unit: 1, or the largest coordinate where squares overflow."""
    squared = kernels.norm_squared(vector)
    if math.isfinite(squared):
        return math.sqrt(squared), 1.0
    finite = np.isfinite(vector)
    if not finite.all():
        raise NonFiniteError(int(np.argmin(finite)))
    largest = float(np.abs(vector).max())
    return math.sqrt(kernels.norm_squared(vector / largest)), largest


def factor(vector: Vector, clip_norm: float) -> float:
    """Returns the factor, at most 1, that scales `vector` to norm at most D = `clip_norm`, minus a safety margin."""
    length, unit = _norm(vector)
    bound = clip_norm * (1.0 - MARGIN)
    return 1.0 if length * unit <= bound else bound / unit / length


def enforce(
    grid: NDArray[np.float32], *, norm_limit: float, coordinate_limit: float, squared: float | None = None
) -> None:
    """Shrinks `grid` in place until the grid point nearest to it surely has norm at most `norm_limit`.

    Args:
        grid: A vector in grid units. Rounding starts from the nearest integers, clipped to ±`coordinate_limit`.
        norm_limit: D in grid units.
        coordinate_limit: X^max in grid units.
        squared: Its `kernels.grid_norm_squared`, where that is known already.
    """
    # Integer squares summed in float64 are off by at most a relative (d + 1) 2^-53; the limit itself came out of a
    # handful of float64 operations. Both are covered twice over.
    slack = 1.0 + (grid.size + 16) * 2.0**-52
    margin = MARGIN
    if squared is None:
        squared = kernels.grid_norm_squared(grid, coordinate_limit)
    while not (bound := squared * slack) <= norm_limit * norm_limit:
        if not math.isfinite(bound):
            raise VectorError("The vector changed while it was being encoded.")
        # A larger margin each time: where the grid is coarse, a little less may round to the same point again.
        kernels.scale(grid, norm_limit / math.sqrt(bound) * (1.0 - margin), grid)
        squared = kernels.grid_norm_squared(grid, coordinate_limit)
        margin = min(1.0, 2.0 * margin)


def apart(distance: float, *, dim: int, clip_norm: float, unit: float) -> float:
    """Returns the largest distance of the grid points of two vectors this far apart, in grid points and rounded up.

    The bound is distance · unit + √d + 2^-16 D · unit. Putting two vectors on the grid moves them apart by at most √d.
    Clipping, to the norm as well as to the range, is a projection. What `enforce` does to one vector alone brings it
    nearer to zero, from which the other is D away at most; so a distance below D counts as D. The rest is for float32
    arithmetic, some hundred roundings per vector, each of 2^-24 of its norm. docs/proofs/nearer-vectors.md has the
    proof.

    Args:
        distance: The vectors' distance once they are clipped to norm D.
        dim: d.
        clip_norm: D.
        unit: Grid points per unit of the vectors.
    """
    real = max(distance, clip_norm) * unit
    # The factor covers numbers that vanish in float32, 2^-126 each, and the float64 arithmetic of this line.
    return (real + math.sqrt(dim) + _FLOAT_SLACK * clip_norm * unit) * (1.0 + 2.0**-40)


def l1_apart(distance: float, *, dim: int, unit: float) -> float:
    """Returns the largest L1 distance of the grid points of two vectors this far apart, rounded up; unrotated.

    The bound is (1 + 2^-16) distance · unit + d: each coordinate of each vector goes to the grid by at most ½. Clipping
    to the norm and `enforce` multiply a vector by a number below 1, which brings two vectors no further apart than they
    are, or than one of them is from zero. docs/proofs/nearer-vectors.md has the proof.

    Args:
        distance: The largest sum of absolute differences of two vectors, zero among them.
        dim: d.
        unit: Grid points per unit of the vectors.
    """
    return (distance * unit * (1.0 + _FLOAT_SLACK) + dim) * (1.0 + 2.0**-40)
