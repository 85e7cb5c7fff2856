"""The grid that coordinates are put on before they are rounded at random.

The k levels lie s = 2 X^max/(k-1) apart, from -X^max to X^max. A finer grid, 2^F points per level, carries the
coordinates: the vector is first put on the grid (to the nearest point, at most 2^-(F+1) levels away), and then rounded
from there to one of its two neighbouring levels with exactly the right probability, a multiple of 2^-F, by F random
bits. So the mechanism that is analysed, which starts from a point of the grid within the norm bound, is the one that
runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels

MAX_LEVELS = 2**24
Rounder = kernels.Rounder
"""The kernel that rounds grid points at random to levels, and adds noise."""

# Coordinates worked on at a time, so that wide temporaries stay in the cache.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Grid:
    """Where coordinates lie before they are rounded.

    Attributes:
        unit: Grid points per unit of the vector, 2^F / s.
        limit: X^max in grid points, an integer.
        fraction_bits: F.
    """

    unit: float
    limit: float
    fraction_bits: int

    @classmethod
    def of_levels(cls, levels: int, coordinate_range: float) -> Grid:
        """The grid under k levels in [-X^max, X^max]: F is 16, or as many bits as leave room for k in 32.

        Example:
            >>> Grid.of_levels(3, 1.0)
            Grid(unit=65536.0, limit=65536.0, fraction_bits=16)
        """
        bits = min(16, 32 - (levels - 1).bit_length())
        unit = 2.0**bits * (levels - 1) / (2.0 * coordinate_range)
        return cls(unit, float((levels - 1) << (bits - 1)), bits)

    def fraction_variance(self, points: NDArray[np.float32]) -> float:
        """Σ f(1-f) over the fractional parts f, in levels, of a vector of grid points within the limit."""
        one, offset = np.uint32(1 << self.fraction_bits), np.uint32(self.limit)
        total = 0
        for start in range(0, points.size, _BLOCK):
            # In 32-bit integers, hence exactly: grid points are below 2^31 and f(1-f) in units of 4^-F at most 2^30.
            parts = points[start : start + _BLOCK].astype(np.int32).view(np.uint32)
            parts += offset
            parts &= one - np.uint32(1)
            total += int(np.sum(parts * (one - parts), dtype=np.uint64))
        return total * 2.0 ** (-2 * self.fraction_bits)
