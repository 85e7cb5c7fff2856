"""The mean error of rounding and clipping a coordinate, for the planner's model of the error.

A rotated vector of norm D has coordinates close to N(0, D²/d), so that expectations are one-dimensional integrals.
Without rotation nothing is known of the coordinates but their norm, and the worst vector counts.
"""

from __future__ import annotations

import math

import numpy as np

LEAST_REACH = 2.5
"""X is at least this many standard deviations of a rotated coordinate: clipping then takes at most 0.2 % of D².

Without a bound, where the noise is larger than any vector, clipping everything to nothing would "win"."""

ENOUGH_REACH = 7.0
"""Beyond this many standard deviations of a rotated coordinate clipping costs nothing worth a wider range."""

# Coordinates beyond this many standard deviations carry less than 1e-30 of the energy.
_FARTHEST = 12.0
# With more cells than this per standard deviation f is uniform to many digits and E[f(1-f)] is 1/6.
_FINEST = 16.0
_GAUSS = np.polynomial.legendre.leggauss(8)
_NODES, _WEIGHTS = 0.5 * (1.0 + _GAUSS[0]), 0.5 * _GAUSS[1]  # on [0, 1]


def expected_clipping(reach: float, *, dim: int, clip_norm: float, rotate: bool) -> float:
    """Returns the squared bias of the mean of vectors of norm D whose coordinates are clipped to ±`reach`.

    Bias does not average out when clients hold similar vectors, so all clients hold the same: d E[(|x| - X)₊²]. For
    unrelated vectors it is n times smaller. Without rotation, and as a limit with it, a single coordinate is worst.
    """
    clipped = max(0.0, clip_norm - reach) ** 2
    if rotate:
        clipped = min(clipped, clip_norm**2 * gaussian_clipping(reach / clip_norm * math.sqrt(dim)))
    return clipped


def gaussian_clipping(reach: float) -> float:
    """Returns E[(|g| - reach)₊²] of a standard normal g: 2[(1+x²) Φ(-x) - x φ(x)] at x = reach."""
    from scipy.special import erfcx  # late: who only encodes does without SciPy

    mills = math.sqrt(0.5 * math.pi) * float(erfcx(reach / math.sqrt(2.0)))  # Φ(-x)/φ(x)
    density = math.exp(-0.5 * reach * reach) / math.sqrt(2.0 * math.pi)
    return max(0.0, 2.0 * density * ((1.0 + reach * reach) * mills - reach))


def clipped_square(reach: float) -> float:
    """Returns E[min(g², reach²)] of a standard normal g: 1 - 2 [(1 - x²) Φ(-x) + x φ(x)] at x = reach."""
    tail = 0.5 * math.erfc(reach / math.sqrt(2.0))
    density = math.exp(-0.5 * reach * reach) / math.sqrt(2.0 * math.pi)
    return 1.0 - 2.0 * ((1.0 - reach * reach) * tail + reach * density)


def gaussian_rounding(step: float, levels: int) -> float:
    """Returns E[f(1-f)] of a standard normal coordinate on `levels` levels, `step` apart and symmetric about zero.

    f is the fractional part of the coordinate in units of the step. Beyond the outermost levels a coordinate is
    clipped onto a level and rounding costs nothing. An odd number of levels puts one at zero: coordinates small
    against the step then cost about |x|/s and not 1/4 each.
    """
    half_range = 0.5 * step * (levels - 1)
    if step * _FINEST < 1.0:
        return math.erf(half_range / math.sqrt(2.0)) / 6.0
    # By symmetry only the half line: full cells from the outermost level inwards, for even k half a cell at zero.
    first = 0.0 if levels % 2 else -0.5 * step
    count = min(levels // 2, math.ceil(_FARTHEST / step) + 1)
    left = first + step * np.arange(count)
    if step <= 1.0:
        x = left[:, None] + step * _NODES
        cells = step * (_NODES * (1.0 - _NODES) * np.exp(-0.5 * x * x)) @ _WEIGHTS
    else:
        cells = np.array([_cell(a, step) for a in left])
    if levels % 2 == 0:
        cells[0] *= 0.5  # the cell around zero belongs to both half lines
    return float(2.0 * cells.sum() / math.sqrt(2.0 * math.pi))


def _cell(left: float, step: float) -> float:
    """Returns ∫ f(1-f) exp(-x²/2) dx over one wide cell, in pieces no longer than half a standard deviation."""
    low, high = max(left, -_FARTHEST), min(left + step, _FARTHEST)
    if high <= low:
        return 0.0
    pieces = math.ceil(2.0 * (high - low))
    width = (high - low) / pieces
    x = low + width * (np.arange(pieces)[:, None] + _NODES)
    fraction = (x - left) / step
    return float(width * (fraction * (1.0 - fraction) * np.exp(-0.5 * x * x) @ _WEIGHTS).sum())


def worst_rounding(spread: float, levels: int) -> float:
    """Returns the largest mean of f(1-f) over all vectors with coordinates of root mean square `spread` (in steps).

    With a level at zero f(1-f) <= y - y² for y = min(|u|, 1/2), a concave function of u², so that spreading the norm
    evenly is worst (Jensen). Without one, zeros lie halfway between two levels and cost 1/4 each.
    """
    if levels % 2 == 0:
        return 0.25
    fraction = min(spread, 0.5)
    return fraction * (1.0 - fraction)
