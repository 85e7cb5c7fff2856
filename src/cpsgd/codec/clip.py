"""Bounds what one client can say.

`factor` is what a vector is multiplied by to have Euclidean norm at most D. `enforce` is the second look after the
rotation: whatever float32 arithmetic did on the way, the grid point that rounding starts from has norm at most D, so
the sensitivity used by the accounting is a fact. Of vectors that are nearer to each other than 2D, `apart` says how far
apart their grid points can be.
"""

from __future__ import annotations

import math

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


def _norm(vector: Vector) -> tuple[float, float]:
    """The norm as a number of units, and the unit: 1, or the largest coordinate where squares overflow."""
    squared = kernels.norm_squared(vector)
    if math.isfinite(squared):
        return math.sqrt(squared), 1.0
    finite = np.isfinite(vector)
    if not finite.all():
        raise NonFiniteError(int(np.argmin(finite)))
    largest = float(np.abs(vector).max())
    return math.sqrt(kernels.norm_squared(vector / largest)), largest


def factor(vector: Vector, clip_norm: float) -> float:
    """What `vector` is to be multiplied by to have norm at most `clip_norm` (D), less the margin; at most 1."""
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
        squared: What `kernels.grid_norm_squared` says of it, where that is known already.
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
    """The largest distance, in grid points, of the grid points of two vectors that lie this far apart, rounded up.

    The bound is distance · unit + √d + 2^-16 D · unit. Putting two vectors on the grid moves them apart by at most √d.
    Clipping, to the norm as well as to the range, is a projection. What `enforce` does to one vector alone brings it
    nearer to zero, from which the other is D away at most; so a distance below D counts as D. The rest is for float32
    arithmetic, some hundred roundings per vector, each of 2^-24 of its norm. docs/accounting.md, section 10, has the
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
