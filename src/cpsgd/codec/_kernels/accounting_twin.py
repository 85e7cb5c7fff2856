"""The kernels of the accounting in plain NumPy: what `cpsgd.privacy` and the Skellam law take most of their time for.

Every number is the result of the same operations in the same order as in `accounting.h`, and so the same bit for bit.
Exponentials and logarithms are therefore our own; their few roundings are far below the margins of the certificates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def exponential(x: Array) -> Array:
    """Returns exp within a few roundings, x clipped to ±700: 2^k times a Taylor polynomial."""
    x = np.clip(x, -700.0, 700.0)
    k = np.rint(x * 1.4426950408889634)
    # log 2 in two parts, the first so short that k times it is exact.
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = np.full_like(r, 1.0 / math.factorial(13))
    for order in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(order)
    return np.ldexp(p, k.astype(np.int32))


def logarithm(x: Array) -> Array:
    """Returns the natural logarithm of normal numbers within a few roundings: of a number near 1 and a power of two."""
    m, exponent = np.frexp(x)
    m, k = 2.0 * m, exponent - 1.0
    high = m > 1.4142135623730951
    k, m = np.where(high, k + 1.0, k), np.where(high, 0.5 * m, m)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.full_like(z, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        p = p * z + 1.0 / odd
    return k * 6.93147180369123816490e-01 + (2.0 * s * p + k * 1.90821492927058770002e-10)


def powers(y: Array) -> tuple[Array, Array, Array]:
    """Returns averages of exp(y ξ), ξ exp(y ξ) and ξ² exp(y ξ) over ξ from -1 to 1."""
    z = y * y
    even = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880 + z / 39916800))))
    odd = y * (1 / 3 + z * (1 / 30 + z * (1 / 840 + z * (1 / 45360 + z * (1 / 3991680 + z / 518918400)))))
    square = 1 / 3 + z * (1 / 10 + z * (1 / 168 + z * (1 / 6480 + z * (1 / 443520 + z / 47174400))))
    large = z > 1.0
    if not np.any(large):
        return even, odd, square
    safe = np.where(large, y, 1.0)
    up = exponential(safe)
    down = 1.0 / up
    sinh, cosh = 0.5 * (up - down), 0.5 * (up + down)
    even = np.where(large, sinh / safe, even)
    odd = np.where(large, (safe * cosh - sinh) / (safe * safe), odd)
    cube = safe * safe * safe
    square = np.where(large, ((safe * safe + 2.0) * sinh - 2.0 * safe * cosh) / cube, square)
    return even, odd, square


def cell_masses(x: Array, e: Array, w: float, bent: float, mass: Array) -> float:
    """Returns the measure ẽ(x) exp(-x²/(2w) - x/2) dx of the cells of curves, a row each, moved to the cells' ends.

    `cpsgd.privacy.smoothed` says why, and what `bent` is. Returns the largest |y|, the tilt of a cell.
    """
    width, middle = x[:, 1:] - x[:, :-1], 0.5 * (x[:, 1:] + x[:, :-1])
    fall = np.maximum(0.0, e[:, :-1] - e[:, 1:])
    mean, half = 0.5 * (e[:, 1:] + e[:, :-1]) + fall * width * bent, 0.5 * (e[:, 1:] - e[:, :-1])
    y = -(middle / w + 0.5) * 0.5 * width
    even, odd, square = powers(y)
    scale = 0.5 * width * exponential(-middle * (0.5 * middle / w + 0.5))
    both, apart = mean * even + half * odd, mean * odd + half * square
    mass[:, 0] = 0.0
    mass[:, 1:] = scale * (both + apart)
    mass[:, :-1] += scale * (both - apart)
    return float(np.max(np.abs(y)))


def tilted_sums(mass: Array, x: Array, step: float, sums: Array) -> None:
    """Returns sums of mass · exp(k · step · x) over the points of each curve, a row each, for k from -K to K."""
    half = sums.shape[1] // 2
    factor = exponential(np.ascontiguousarray(step * x.T))
    for sign in (1, -1):
        term = np.ascontiguousarray(mass.T)
        by = factor if sign > 0 else 1.0 / factor
        for k in range(half + 1):
            # Along this axis NumPy adds row to row.
            sums[:, half + sign * k] = np.add.reduce(term, axis=0)
            term = term * by


def log_averages(
    constant: Array,
    slope: Array,
    mean_constant: Array,
    mean_slope: Array,
    y: Array,
    least: Array,
    enough: Array,
    value: Array,
    bend: Array,
) -> None:
    """Returns logs of averages over parts of exp of functions affine in y, and slopes: a row each, a column per y.

    Where `least`, of the column, is at least `enough`, of the row, of what is linear between the `constant` + `slope` y
    at the ends of each part; elsewhere of `mean_constant` + `mean_slope` y, one per part.
    """
    parts = mean_slope.shape[1]
    ends = [constant[:, p, None] + slope[:, p, None] * y for p in range(parts + 1)]
    means = [mean_constant[:, p, None] + mean_slope[:, p, None] * y for p in range(parts)]
    top, mean_top = np.max(ends, axis=0), np.max(means, axis=0)
    total, tilt, mean_total, mean_tilt = np.zeros((4, *top.shape))
    last = exponential(ends[0] - top)
    for p in range(parts):
        rise = ends[p + 1] - ends[p]
        first, last = last, exponential(ends[p + 1] - top)
        # Series where differences cancel.
        small = np.abs(rise) < 0.01
        safe = np.where(small, 1.0, rise)
        series = 1.0 + rise * (1 / 2 + rise * (1 / 6 + rise * (1 / 24 + rise / 120)))
        whole = np.where(small, first * series, (last - first) / safe)
        series = 1 / 2 + rise * (1 / 3 + rise * (1 / 8 + rise * (1 / 30 + rise / 144)))
        moment = np.where(small, first * series, (last - whole) / safe)
        total += whole
        tilt += whole * slope[:, p, None] + moment * (slope[:, p + 1, None] - slope[:, p, None])
        weight = exponential(means[p] - mean_top)
        mean_total += weight
        mean_tilt += weight * mean_slope[:, p, None]
    concave = least >= enough[:, None]
    whole = np.where(concave, total, mean_total)
    value[:] = np.where(concave, top, mean_top) + logarithm(whole * (1.0 / parts))
    bend[:] = np.where(concave, tilt, mean_tilt) / whole


def log_sums(a: Array, b: Array, sums: Array, shares: Array) -> None:
    """Returns the logarithm of exp a + exp b, and the share of exp b."""
    apart = b - a
    less = exponential(-np.abs(apart))
    sums[:] = np.where(apart > 0.0, b, a) + logarithm(1.0 + less)
    shares[:] = np.where(apart > 0.0, 1.0, less) / (1.0 + less)


def raise_to_excess(
    start: Array,
    rise: Array,
    value: Array,
    bend: Array,
    wanted: NDArray[np.bool_],
    y: Array,
    c0: Array,
    c1: Array,
    found: Array,
) -> None:
    """Raises `found`, one per row, to the largest start - value + bend y + rise c - bend c², c from c0 to c1.

    Only what is wanted counts. It is concave in c, hence largest where its slope is zero, or at the end that is nearest
    to that. What is not a number is not lost.
    """
    with np.errstate(over="ignore"):
        c = np.clip(rise / (2.0 * np.maximum(bend, 1e-300)), c0, c1)
    here = (start - value + bend * y) + (rise - bend * c) * c
    found[:] = np.maximum(found, np.max(np.where(wanted, here, -np.inf), axis=1))


def bessel_ratios(variance: float, start: int, ratio: float, error: float, ratios: Array, errors: Array) -> None:
    """Returns I_{j+1}(v)/I_j(v) from j = 0 on, by recurrence downwards from `start`, and bounds on their errors."""
    for j in range(start, 0, -1):
        below = 1.0 / (2.0 * j / variance + ratio)
        error = 4.0 + 1.000001 * ratio * below * error
        ratio = below
        if j <= ratios.size:
            ratios[j - 1], errors[j - 1] = ratio, 1.01 * error
