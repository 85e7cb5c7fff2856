"""Stage 3: unbiased stochastic rounding to k levels (the paper's π_sk).

The k levels lie s = 2 X^max/(k-1) apart, from -X^max to X^max. A finer grid, 2^F points to a level, carries the
coordinates: the vector is first put on the grid (to the nearest point, at most 2^-(F+1) levels away), and then rounded
from there to one of its two neighbouring levels with exactly the right probability, a multiple of 2^-F, by F random
bits. So the mechanism that is analysed, which starts from a point of the grid within the norm bound, is the one that
runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import _native

MAX_LEVELS = 2**24


def fraction_bits(levels: int) -> int:
    """F: 16, or as many as leave room for `levels` in 32 bits."""
    return min(16, 32 - (levels - 1).bit_length())


def unit(coordinate_range: float, levels: int) -> float:
    """Grid points to 1: 2^F / s."""
    return 2.0 ** fraction_bits(levels) * (levels - 1) / (2.0 * coordinate_range)


def coordinate_limit(levels: int) -> float:
    """X^max in grid units: (k - 1) 2^F / 2, an integer."""
    return float((levels - 1) << (fraction_bits(levels) - 1))


def forward(grid: NDArray[np.float32], levels: int, keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Rounds a vector in grid units to integers 0 … k-1, with the first F bits of one keystream word a coordinate."""
    values = np.empty(grid.size, dtype=np.uint32)
    nothing = np.empty(0, dtype=np.uint64)
    _native.Rounder(levels, fraction_bits(levels), 0, nothing, nothing, 0).values(grid, keystream, values)
    return values


def backward(values: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """From levels (or means of them) back to grid units."""
    return (values - (levels - 1) / 2) * 2.0 ** fraction_bits(levels)
