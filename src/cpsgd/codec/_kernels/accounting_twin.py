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


def log_averages(w: float, widths: Array, y0: Array, y1: Array, parts: int, value: Array, bend: Array) -> None:
    """Writes lower bounds on log J/Δ to `value`, and their slopes in c² to `bend`, at c² = (y0 + y1)/2.

    J/Δ is an average over v in [w, w + Δ] of exp g(v), g(v) = -½ log(v/w) + (c²/2)(1/w - 1/v) - (v - w)/8. The interval
    is divided into `parts` equal parts. Where c² >= v/2, g is concave and lies over its chord on each part. Elsewhere
    the average of exp g is at least exp of the average of g, which is bounded below, since 1/v lies under its chord
    and log v under its tangent. Either way the bound is an average of exponentials of functions affine in c².

    There is a row per width Δ and a column per cell.
    """
    y = 0.5 * (y0 + y1)
    v = w + widths[:, None] * np.arange(parts + 1) / parts
    constant, slope = -0.5 * logarithm(v / w) - (v - w) / 8.0, 0.5 * (v - w) / (w * v)
    middle = 0.5 * (v[:, 1:] + v[:, :-1])
    mean_constant = -0.5 * logarithm(middle / w) - (middle - w) / 8.0
    mean_slope = 0.5 * (slope[:, 1:] + slope[:, :-1])
    if parts == 1:
        value[:], bend[:] = mean_constant + mean_slope * y - 1e-12, mean_slope
        return
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
    concave = np.minimum(y0, y1) >= 0.5 * v[:, -1:]
    whole = np.where(concave, total, mean_total)
    value[:] = np.where(concave, top, mean_top) + logarithm(whole * (1.0 / parts)) - 1e-9
    bend[:] = np.where(concave, tilt, mean_tilt) / whole


def chords(t: Array, values: Array, c: Array, moments: Array, largest: Array) -> None:
    """Returns chords of logarithms between the thresholds c: their values at c = 0, and below these their slopes.

    Those of R, the `values`, a row per distance t; and those of the largest R/t² between distances, where R lies under
    its chord. They are not numbers where R is no normal positive number.
    """

    def write(numbers: Array, out: Array) -> None:
        tiny, huge = np.finfo(np.float64).tiny, np.finfo(np.float64).max
        safe = (numbers >= tiny) & (numbers <= huge)
        logs = np.where(safe, logarithm(np.where(safe, numbers, 1.0)), np.nan)
        rise = np.diff(logs, axis=1) / np.diff(c)
        out[:] = np.concatenate([logs[:, :-1] - rise * c[:-1], rise])

    write(values, moments)
    # (a + b t)/t² is largest at an end or at 1/t = -b/(2a).
    b = np.diff(values, axis=0) / np.diff(t)[:, None]
    a = values[:-1] - b * t[:-1, None]
    near, far = 1.0 / t[:-1, None], 1.0 / t[1:, None]
    with np.errstate(over="ignore"):
        vertex = np.clip(-0.5 * b / np.minimum(a, -1e-300), far, near)
    most = np.maximum(np.maximum((a * near + b) * near, (a * far + b) * far), (a * vertex + b) * vertex)
    write(most * (1.0 + 1e-11), largest)


def gaps(
    w: float,
    rate: float,
    narrow: float,
    t: Array,
    average: Array,
    bend: Array,
    smallest: Array,
    largest: Array,
    moments: Array,
    c0: Array,
    c1: Array,
    found: Array,
) -> None:
    """Returns upper bounds on log R - log J: up to the first of the distances t, and from each to the next.

    `cpsgd.privacy.smoothed._Test` says why. J/Δ of a distance is over its `average`, a tangent in c² with the slope
    `bend`. The chords of log R between the thresholds c0 and c1, values at c = 0 and then slopes, are those up to the
    smallest distance, of the largest R/t² between two distances, and of R, the `moments`. Where Δ (c/w)² is at most
    `narrow`, J/Δ is flat, and the second comparison is the sharper one.
    """
    y, squares, widths = 0.5 * (c0 * c0 + c1 * c1), np.minimum(c0 * c0, c1 * c1), rate * t * t
    log_rate = logarithm(np.array(rate))
    average = average + log_rate
    found[:] = -np.inf

    def worst(rows: slice, chords: Array, value: Array, by: Array, where: NDArray[np.bool_] | bool = True) -> None:
        """Raises bounds to the largest log R - log J; the tangent `value` with slope `by` bounds log J from below."""
        start, rise = chords
        # Concave in c, hence largest where its slope is zero, or at the end that is nearest to that.
        with np.errstate(over="ignore"):
            c = np.clip(rise / (2.0 * np.maximum(by, 1e-300)), c0, c1)
        here = (start - value + by * y) + (rise - by * c) * c
        found[rows] = np.maximum(found[rows], np.max(np.where(where, here, -np.inf), axis=1))

    # Up to the smallest distance J/Δ is 1 at Δ = 0 or what it is at that distance, if less.
    smallest, largest, moments = (chords.reshape(2, -1, len(c0)) for chords in (smallest, largest, moments))
    worst(slice(1), smallest, np.minimum(average[:1], log_rate), 0.0 * bend[:1])
    worst(slice(1), smallest, average[:1], bend[:1])
    steep = c1[-1] / w * (c1[-1] / w)
    first = int(np.searchsorted(widths[1:] * steep, narrow, side="right"))
    if first:
        for part in (slice(0, first), slice(1, first + 1)):
            worst(slice(1, first + 1), largest[:, :first], average[part], bend[part])
    if first == len(t) - 1:
        found += 1e-8
        return
    # J + (t' - t) ∂J/∂t, ∂J/∂t = 2 κ t exp g(v)
    near, here, ahead = widths[first:-1], slice(first, -1), slice(first + 1, None)
    value, v = average[here] + 2.0 * logarithm(t[here])[:, None], w + near
    slope = (0.5 * near / (w * v))[:, None]
    density = -0.5 * logarithm(v / w) - near / 8.0 + logarithm(2.0 * rate * t[here] * np.diff(t[first:]))
    density = density[:, None] + slope * y
    apart = density - value
    less = exponential(-np.abs(apart))
    share = np.where(apart > 0.0, 1.0, less) / (1.0 + less)
    both = np.where(apart > 0.0, density, value) + logarithm(1.0 + less)
    wider = widths[ahead, None]
    convex = (squares >= (w + wider) * (1.0 + 0.25 * (w + wider))) | (wider <= w / (1.0 + 0.25 * w))
    worst(ahead, moments[:, here], value, bend[here], convex)
    worst(ahead, moments[:, ahead], both, bend[here] + share * (slope - bend[here]), convex)
    for part in (here, ahead):
        worst(ahead, largest[:, first:], average[part], bend[part], ~convex)
    found += 1e-8


def bessel_ratios(variance: float, start: int, ratio: float, error: float, ratios: Array, errors: Array) -> None:
    """Returns I_{j+1}(v)/I_j(v) from j = 0 on, by recurrence downwards from `start`, and bounds on their errors."""
    for j in range(start, 0, -1):
        below = 1.0 / (2.0 * j / variance + ratio)
        error = 4.0 + 1.000001 * ratio * below * error
        ratio = below
        if j <= ratios.size:
            ratios[j - 1], errors[j - 1] = ratio, 1.01 * error
