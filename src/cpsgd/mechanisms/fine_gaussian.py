"""A discrete Gaussian with thousands of points per standard deviation, in constant time and few random bytes.

A table of all its outcomes would be far too long. So the noise is Z = a H + U_1 + ... + U_m - mean, with a = 2^8, U_i
uniform on 0, ..., a - 1, and H drawn from a short table. The sum of the U_i has the characteristic function D^m,

    D(ω) = sin(πaω) / (a sin(πω)),

and H gets the law that makes up for it: its characteristic function is e^(-2π²r²t²) / D(t/a)^m for |t| <= 1/2. Then Z
has the characteristic function of the discrete Gaussian N_Z(0, a²r²) at |ω| <= 1/(2a). Elsewhere, at ω = (k + t)/a, it
should vanish and is

    e^(-2π²r²t²) (sin(πt/a) / sin(π(k+t)/a))^m :

D has zeros of order m where H's characteristic function repeats itself. docs/proofs/rounded-gaussian.md bounds the
total variation that follows (`SMOOTHING`).
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import lru_cache

from cpsgd.codec.rounding import CELL_BITS, KEYSTREAM_BYTES, UNIFORMS, WORKING_BITS, Table

CELL = 1 << CELL_BITS
"""The number a of points in a cell; H counts cells."""

LEAST_RATIO = 8.0
"""The standard deviation, in cells, is at least this and less than twice as much."""

DRAW_BYTES = KEYSTREAM_BYTES + UNIFORMS
"""Keystream bytes per draw: 128 bits for H, and the uniform numbers."""

SMOOTHING = 2.0**-100
"""An upper bound on the total variation of Z from the discrete Gaussian, all but the table's resolution.

It holds for 28 uniform numbers and ratios from 8 to 16, and for 15 and from 64 to 128.
"""

GRID_VARIANCE = 5.0
"""N_Z(0, v) is a randomized rounding of N(0, v - this), in squared points, up to `GRID_VARIATION`."""

GRID_VARIATION = 2.2 * math.exp(-2.0 * math.pi**2 * GRID_VARIANCE)
# Masses of H further out than this many standard deviations are below 2^-130 together.
_FARTHEST = 13.5
# The characteristic function is summed up at multiples of one over 36 to 72 deviations; aliases are that far away.
_PERIOD = 36
# It is below 2^-420 of its largest where r |t| exceeds this, the growth of 1/D^m included: |t| is ½ there, or less.
_VANISHED = 4
_DIGITS = 140
_SHIFT = 420


@lru_cache(maxsize=16)
def table(ratio: float, limit: int) -> Table:
    """Returns thresholds of the outcomes 0, ..., 2 limit, which mean H = -limit, ..., limit; the ends take the tails.

    `ratio` is r, the standard deviation of Z in cells. `limit` is at most `farthest(ratio)`.
    """
    weights = _weights(ratio, UNIFORMS)
    kept = [*weights[:limit], sum(weights[limit:])]
    return Table.of_weights(0, kept[:0:-1] + kept)


@lru_cache(maxsize=16)
def magnitudes(ratio: float, uniforms: int) -> Table:
    """Returns thresholds of |H| = 0, 1, ..., `farthest(ratio)`, where Z has so many uniform numbers."""
    first, *others = _weights(ratio, uniforms)
    return Table.of_weights(0, [first, *(2 * weight for weight in others)])


def farthest(ratio: float) -> int:
    """Returns the largest |H| that is ever drawn."""
    return math.ceil(_FARTHEST * ratio)


@lru_cache(maxsize=16)
def _weights(ratio: float, uniforms: int) -> tuple[int, ...]:
    """Returns P(H = h) for h = 0, 1, ... in units of 2^-320, rounded down: the inverse Fourier transform, a finite sum.

    The characteristic function is even and of period 1, and a sum over multiples of 1/N gives the masses up to those N
    cells away, which are far below the unit.
    """
    period = _PERIOD << math.frexp(ratio)[1]
    with localcontext() as context:
        context.prec = _DIGITS
        pi = _pi()
        one = Decimal(2) ** _SHIFT
        spectrum = [1 << _SHIFT]
        for j in range(1, math.ceil(period * _VANISHED / ratio)):
            t = Decimal(j) / period
            grown = (CELL * _sine(pi * t / CELL) / _sine(pi * t)) ** uniforms
            spectrum.append(int(2 * one * grown * (-2 * (pi * Decimal(ratio) * t) ** 2).exp()))
        turns = [int(one * value) for value in _cosines(2 * pi / period, period)]
    found = []
    for h in range(farthest(ratio) + 1):
        mass = sum(value * turns[h * j % period] for j, value in enumerate(spectrum))
        found.append(max(0, (mass // period) >> (2 * _SHIFT - WORKING_BITS)))
    return tuple(found)


def _pi() -> Decimal:
    """Returns π by Machin's formula."""

    def arctangent(inverse: int) -> Decimal:
        power = total = Decimal(1) / inverse
        k = 1
        while abs(power) > Decimal(10) ** -(_DIGITS + 5):
            power /= -inverse * inverse
            k += 2
            total += power / k
        return total

    return 16 * arctangent(5) - 4 * arctangent(239)


def _sine(x: Decimal) -> Decimal:
    """Returns sin(x) by Taylor's series, for x of up to 2."""
    term = total = x
    k = 1
    while abs(term) > Decimal(10) ** -(_DIGITS + 5):
        term *= -x * x / ((k + 1) * (k + 2))
        k += 2
        total += term
    return total


def _cosines(step: Decimal, count: int) -> list[Decimal]:
    """Returns cos(0), cos(step), ... once around, by rotating a point on the circle."""
    sine = _sine(step)
    cosine = (1 - sine * sine).sqrt()
    x, y, found = Decimal(1), Decimal(0), []
    for _ in range(count):
        found.append(x)
        x, y = x * cosine - y * sine, x * sine + y * cosine
    return found
