"""Stage 4: Binomial(m, p) noise from cryptographic randomness.

Two samplers, whose instructions and addresses are the same whatever the outcome:

* **coins**, for p = ½ and m up to 256: the number of ones among m keystream bits. Exact.
* **inversion**, for everything else: a 128-bit uniform number is compared with the cumulative probabilities, each
  rounded to 128 bits. The law differs from Binomial(m, p) by at most `total_variation(m, p)`, below 1e-32 for all m
  here, which the accounting adds to δ. Every draw reads the whole table, so that its time grows with √(m p (1-p)).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import quantize
from cpsgd.codec._kernels import _native

MAX_TRIALS = 2**31
MAX_COINS = 256
# The thresholds are computed with this many bits, far more than the 128 kept.
_WORKING_BITS = 320
# Outcomes rarer than 2^-_WINDOW_BITS times the likeliest are left out of the table.
_WINDOW_BITS = 160


@dataclass(frozen=True, eq=False)
class Table:
    """Cumulative probabilities times 2^128, as high and low 64-bit halves; outcome 0 of the table means `base`."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    base: int


_COINS = Table(np.empty(0, np.uint64), np.empty(0, np.uint64), 0)


def uses_coins(trials: int, p: float) -> bool:
    """Whether the noise is drawn by counting coins, hence exactly."""
    return (p == 0.5 and trials <= MAX_COINS) or trials == 0


def keystream_bytes(trials: int, p: float) -> int:
    """Keystream bytes a coordinate needs, rounding included."""
    if uses_coins(trials, p):
        return 4 * (1 + -(-max(0, trials - 16) // 32))
    return 4 + 16


def total_variation(trials: int, p: float) -> float:
    """An upper bound on the total-variation distance of one draw from Binomial(m, p); 0.0 where it is exact.

    Rounding each of c thresholds to 128 bits moves at most c 2^-128 of mass. The outcomes left out of the window, at
    most m, each have less than 2^-160 of the likeliest one's mass. The weights, integers of which the likeliest is
    2^320, are each off by at most c (ratios below 1 shrink earlier errors), together c² 2^-320 of the mass; the factor
    2 covers that.
    """
    if uses_coins(trials, p):
        return 0.0
    count = table(trials, p).high.size
    return 2.0 * (count + 1) * 2.0**-128 + trials * 2.0**-159


@lru_cache(maxsize=16)
def table(trials: int, p: float) -> Table:
    """The thresholds for inversion; empty where coins are counted instead."""
    if uses_coins(trials, p):
        return _COINS
    base, weights = _weights(trials, p)
    total = sum(weights)
    high, low, cumulative = [], [], 0
    # The last cumulative probability is 1 and needs no threshold. There are at least two outcomes, hence at least one
    # threshold: the kernels take an empty table for coins.
    for weight in weights[:-1]:
        cumulative += weight
        threshold = min((cumulative << 128) // total, 2**128 - 1)
        high.append(threshold >> 64)
        low.append(threshold & (2**64 - 1))
    return Table(np.array(high, np.uint64), np.array(low, np.uint64), base)


def _weights(trials: int, p: float) -> tuple[int, list[int]]:
    """The first outcome kept, and integers proportional to the probabilities of the outcomes from there on.

    The mode's neighbours are kept however rare they are.

    Uses P(j+1)/P(j) = (m-j) p / ((j+1) (1-p)) from the mode outwards, with p as the exact fraction that the float is.
    """
    success = Fraction(p)
    odds, failure = success.numerator, success.denominator - success.numerator
    mode = min(trials, int((trials + 1) * success))
    start, smallest = 1 << _WORKING_BITS, 1 << (_WORKING_BITS - _WINDOW_BITS)

    upper = [start]
    for j in range(mode, trials):
        weight = upper[-1] * (trials - j) * odds // ((j + 1) * failure)
        if weight < smallest and len(upper) > 1:
            break
        upper.append(weight)
    lower = [start]
    for j in range(mode, 0, -1):
        weight = lower[-1] * j * failure // ((trials - j + 1) * odds)
        if weight < smallest and len(lower) > 1:
            break
        lower.append(weight)
    return mode - len(lower) + 1, lower[:0:-1] + upper


def rounder(levels: int, trials: int, p: float) -> _native.Rounder:
    """The kernel that rounds to k levels and adds this noise."""
    thresholds = table(trials, p)
    bits = quantize.fraction_bits(levels)
    return _native.Rounder(levels, bits, trials, thresholds.high, thresholds.low, thresholds.base)


def forward(values: NDArray[np.uint32], trials: int, p: float, keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Adds Binomial(m, p) to each value, from the keystream whose first words `quantize` used half of."""
    # A grid point on the lowest level rounds to 0, so that what comes out of the rounding kernel is the noise alone.
    lowest = np.full(values.size, -quantize.coordinate_limit(2), dtype=np.float32)
    noise = np.empty(values.size, dtype=np.uint32)
    rounder(2, trials, p).values(lowest, keystream, noise)
    return values + noise


def backward(means: NDArray[np.float64], trials: int, p: float) -> NDArray[np.float64]:
    """Subtracts the mean of the noise, m p."""
    return means - trials * p
