"""Bounds on sums of independent coins: tails, and their law and its differences at the mean.

docs/proofs/rounded-correlated.md has the proofs. `cpsgd.privacy.rounded_runs` relies on them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpsgd.mechanisms.law import Array

UP = 1.0 + 1e-9
"""More than what rounding takes off a bound."""

# E|N|^j of a standard Gaussian.
_ABSOLUTE = tuple(2.0 ** (j / 2.0) * math.gamma((j + 1) / 2.0) / math.sqrt(math.pi) for j in range(10))


def central(j: int, order: int, variance: Array) -> Array:
    """Returns a bound on √(2πV) |D^j Q⁻(k)|, the j-th difference of a law at a mean.

    Q is the law of a sum of coins with mean k and variance V, and Q⁻ that of the sum without `order` of them.
    """
    less = variance - 0.25 * order
    if j % 2:
        first = (order - 0.5 * j) * _ABSOLUTE[j + 1] * less ** (-0.5 * (j + 2))
    else:
        first = _ABSOLUTE[j] * less ** (-0.5 * (j + 1))
    found: Array = np.sqrt(variance) * first + error(j, order, variance)
    return found


def error(j: int, order: int, variance: Array) -> Array:
    """Returns a bound on √(2πV) (1/2π) ∫ |2 sin(u/2)|^j |φ(u) - exp(-V⁻u²/2)| du, φ the transform of Q⁻."""
    less = variance - 0.25 * order
    x = less - 0.25
    found: Array = 21.0 * 2.0**j * np.exp(-0.5 * x)
    for share, i in ((1.149 / 6.0, j + 3), (1.203 / 32.0, j + 4)):
        found = found + share * x ** (-0.5 * (i + 1)) * (_ABSOLUTE[i] + _ABSOLUTE[i + 2] / (6.0 * x))
    return np.sqrt(variance) * less * found


def summed(cells: Array, step: int) -> Array:
    """Returns bounds on sums of functions over all outcomes, from 2 `step` times their bounds in cells of `step`.

    More coins widen cells, and outcomes no longer fill them evenly: an interval has at most one outcome more than its
    length, and where a function is over a level there are as many intervals as it rises through the level.
    """
    rises = np.maximum(np.diff(cells, axis=1, prepend=0.0), 0.0)
    found: Array = cells.sum(axis=1) + rises.sum(axis=1) / step
    return found


def bernstein(variance: Any, bound: float, log: float) -> Any:
    """Returns x with P(sum >= mean + x) <= e^-log."""
    linear = bound * log / 3.0
    found: Any = (linear + np.sqrt(linear * linear + 2.0 * log * variance)) * UP
    return found


def chernoff(probability: float, count: int, log: float) -> float:
    """Returns a share of `count` independent events; more than this share happen with probability at most e^-log."""

    def exponent(share: float) -> float:
        if share >= 1.0:
            return math.inf
        first = share * math.log(share / probability)
        return count * (first + (1.0 - share) * math.log((1.0 - share) / (1.0 - probability)))

    probability = max(probability, 1e-300)
    low, high = probability, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exponent(middle) < log else (low, middle)
    return high
