"""Exact samplers of discrete Laplace and discrete Gaussian noise: integers and rational probabilities, no floats.

After Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Algorithms 1 to 3,
for many draws at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsgd.randomness import Keystream

Integers = NDArray[np.int64]

GAUSSIAN_BITS = 24
"""Discrete Gaussian noise has the standard deviation 2^24 (before it is rounded to integers)."""
# Proposals of 2^31 and more, 128 standard deviations, are refused without a toss: (|y| - 2^24)² must fit 63 bits.
_FARTHEST = 1 << 31


def below(bounds: Integers, keystream: Keystream) -> Integers:
    """Draws integers uniform below each of these bounds, which are less than 2^62, by rejection from 62-bit words."""
    found = np.empty(len(bounds), dtype=np.int64)
    waiting = np.arange(len(bounds))
    while waiting.size:
        words = keystream.take(8 * waiting.size).view(np.uint64).astype(np.int64) & ((1 << 62) - 1)
        limits = (1 << 62) // bounds[waiting] * bounds[waiting]
        good = words < limits
        found[waiting[good]] = words[good] % bounds[waiting[good]]
        waiting = waiting[~good]
    return found


def heads(numerators: Integers, denominators: Integers, keystream: Keystream) -> NDArray[np.bool_]:
    """Tosses coins with exactly these probabilities."""
    found: NDArray[np.bool_] = below(denominators, keystream) < numerators
    return found


def survives(numerators: Integers, denominator: int, keystream: Keystream) -> NDArray[np.bool_]:
    """Returns tosses of coins that show heads with probability e^(-u/t), 0 <= u <= t (the paper's Algorithm 1).

    Tosses until the first tail, with probability u/(t j) of heads at toss j. The number of heads is even with
    probability e^(-u/t).
    """
    count = len(numerators)
    even = np.ones(count, dtype=np.bool_)
    waiting, j = np.arange(count), 1
    while waiting.size:
        tossed = heads(numerators[waiting], np.full(waiting.size, denominator * j, dtype=np.int64), keystream)
        waiting = waiting[tossed]
        even[waiting] = ~even[waiting]
        j += 1
    return even


def survives_far(numerators: Integers, denominator: int, keystream: Keystream) -> NDArray[np.bool_]:
    """Tosses coins with probabilities e^(-u/t), u >= 0: a coin for the fraction of u/t, and one for each whole."""
    whole = numerators // denominator
    good = survives(numerators - whole * denominator, denominator, keystream)
    tossing = np.flatnonzero(good & (whole > 0))
    while tossing.size:
        kept = survives(np.ones(tossing.size, dtype=np.int64), 1, keystream)
        good[tossing[~kept]] = False
        whole[tossing] -= 1
        tossing = tossing[kept & (whole[tossing] > 0)]
    return good


def geometric(spread: int, count: int, keystream: Keystream) -> Integers:
    """Draws G with P(G = g) = (1 - α) α^g, α = e^(-1/t): U + t V (Algorithm 2)."""
    low = np.zeros(count, dtype=np.int64)
    waiting = np.arange(count)
    while waiting.size:
        tried = below(np.full(waiting.size, spread, dtype=np.int64), keystream)
        good = survives(tried, spread, keystream)
        low[waiting[good]] = tried[good]
        waiting = waiting[~good]
    high = np.zeros(count, dtype=np.int64)
    waiting = np.arange(count)
    while waiting.size:
        waiting = waiting[survives(np.ones(waiting.size, dtype=np.int64), 1, keystream)]
        high[waiting] += 1
    return low + spread * high


def discrete_laplace(numerator: int, denominator: int, count: int, keystream: Keystream) -> Integers:
    """Draws Z with P(Z = z) proportional to e^(-|z| s/t), s the numerator and t the denominator.

    ⌊G/s⌋ of a geometric variable G with α = e^(-1/t) is geometric with α^s, and the difference of two such is Z.
    """
    first, second = (geometric(denominator, count, keystream) // numerator for _ in range(2))
    return first - second


def discrete_gaussian(count: int, keystream: Keystream) -> Integers:
    """Draws Z with P(Z = z) proportional to e^(-z²/2σ²), σ = 2^24 (Algorithm 3 with t = σ).

    A discrete Laplace variable Y of spread σ is kept with the probability e^(-(|Y| - σ)²/2σ²). Values beyond 128 σ are
    never drawn; their probability is below e^-8000.
    """
    found = np.zeros(count, dtype=np.int64)
    waiting = np.arange(count)
    while waiting.size:
        tried = discrete_laplace(1, 1 << GAUSSIAN_BITS, waiting.size, keystream)
        good = np.abs(tried) < _FARTHEST
        square = (np.where(good, np.abs(tried), 0) - (1 << GAUSSIAN_BITS)) ** 2
        good &= survives_far(square, 1 << (2 * GAUSSIAN_BITS + 1), keystream)
        found[waiting[good]] = tried[good]
        waiting = waiting[~good]
    return found
