"""What the mean of rounded vectors will be off by, before any vector is seen.

The squared error of the mean of n messages is a sum of three independent causes. With s the distance of two levels:

* noise: d s² v / n, v the variance of a client's noise, exact whatever the vectors are;
* rounding: (s²/n) Σ_j E[f_j(1 - f_j)], f_j the fractional part of a coordinate in units of s. A rotated vector of
  norm D has coordinates close to N(0, τ²), τ = D/√d, and the expectation is a one-dimensional integral. An odd
  number of levels puts a level at zero: coordinates small against s then cost about |x|/s and not 1/4 each;
* clipping: coordinates beyond ±X are cut to it, a bias of the mean. Bias does not average out when the clients hold
  similar vectors, so the model takes the worst case, all clients holding the same vector: d E[(|x| - X)₊²].
  For vectors that have nothing to do with each other it is n times smaller. Also counted here, though it is next to
  nothing but for very many clients or a very large ε: the codec's own resolution, which is the margin that vectors are
  clipped with and the grid they are put on.

Without rotation nothing is known of the coordinates but their norm. The planner then never clips (X >= D) and
the rounding term is its maximum over all vectors of norm D instead of an expectation.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erfcx

# Coordinates beyond this many standard deviations carry less than 1e-30 of the energy.
_REACH = 12.0
# With more cells than this per standard deviation f is uniform to many digits and E[f(1-f)] is 1/6.
_FINEST = 16.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def gaussian_rounding(step: float, levels: int) -> float:
    """E[f(1-f)] of a standard normal coordinate on `levels` levels, `step` apart and symmetric about zero.

    Beyond the outermost levels a coordinate is clipped onto a level and rounding costs nothing.
    """
    half_range = 0.5 * step * (levels - 1)
    if step * _FINEST < 1.0:
        return math.erf(half_range / math.sqrt(2.0)) / 6.0
    # By symmetry only the half line: full cells from the outermost level inwards, for even k half a cell at zero.
    first = 0.0 if levels % 2 else -0.5 * step
    count = min(levels // 2, math.ceil(_REACH / step) + 1)
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
    low, high = max(left, -_REACH), min(left + step, _REACH)
    if high <= low:
        return 0.0
    pieces = math.ceil(2.0 * (high - low))
    width = (high - low) / pieces
    x = low + width * (np.arange(pieces)[:, None] + 0.5 * (1.0 + _NODES))
    fraction = (x - left) / step
    return float(0.5 * width * (fraction * (1.0 - fraction) * np.exp(-0.5 * x * x) @ _WEIGHTS).sum())


def gaussian_clipping(reach: float) -> float:
    """E[(|g| - reach)₊²] of a standard normal g: 2[(1+x²) Φ(-x) - x φ(x)] at x = reach."""
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
