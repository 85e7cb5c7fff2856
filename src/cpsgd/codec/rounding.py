"""What the kernel that rounds and adds noise works from: a grid, and a table of the noise.

**The grid.** The k levels lie s = 2 X^max/(k-1) apart, from -X^max to X^max. A finer grid, 2^F points per level,
carries the coordinates: the vector is first put on the grid (to the nearest point, at most 2^-(F+1) levels away), and
then rounded from there to one of its two neighbouring levels with exactly the right probability, a multiple of 2^-F, by
F random bits. So the mechanism that is analysed, which starts from a point of the grid within the norm bound, is the
one that runs.

**The table.** Noise is drawn by inversion: a 128-bit uniform number is compared with cumulative probabilities. Each
cumulative probability is rounded to 128 bits. Every draw reads the whole table, so that instructions and addresses do
not depend on what is drawn; its time grows with the width of the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels

MAX_LEVELS = 2**24
Rounder = kernels.Rounder
"""The kernel that rounds grid points at random to levels, and adds noise."""

Flipper = kernels.Flipper
"""The kernel that flips biased coins for grid points: heads with probability ½ + g/2^16."""

GaussianRounder = kernels.GaussianRounder
"""The kernel that adds a finely resolved Gaussian to grid points, and then rounds to the nearest level."""

CELL_BITS, UNIFORMS = 8, 28
"""Its noise counts cells of 2^CELL_BITS grid points, and adds so many uniform numbers below that."""

# Coordinates worked on at a time, so that wide temporaries stay in the cache.
_BLOCK = 1 << 16

WORKING_BITS = 320
"""Weights are integers of which the likeliest has this many bits, far more than the 128 kept."""

WINDOW_BITS = 160
"""Outcomes rarer than 2^-WINDOW_BITS times the likeliest are left out of a table."""

KEYSTREAM_BYTES = 16
"""Keystream bytes per draw."""


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


@dataclass(frozen=True, eq=False)
class Table:
    """Cumulative probabilities times 2^128, as high and low 64-bit halves; outcome 0 of the table means `base`."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    base: int

    @classmethod
    def of_weights(cls, base: int, weights: Sequence[int]) -> Table:
        """The table of the outcomes base, base + 1, ... with probabilities proportional to these integers.

        There are at least two outcomes, hence at least one threshold: the kernels take an empty table for coins.
        """
        total = sum(weights)
        high, low, cumulative = [], [], 0
        # The last cumulative probability is 1 and needs no threshold.
        for weight in weights[:-1]:
            cumulative += weight
            threshold = min((cumulative << 128) // total, 2**128 - 1)
            high.append(threshold >> 64)
            low.append(threshold & (2**64 - 1))
        return cls(np.array(high, np.uint64), np.array(low, np.uint64), base)

    @property
    def rounding(self) -> float:
        """An upper bound on the mass moved by rounding.

        Rounding each of c thresholds to 128 bits moves at most c 2^-128. The weights, integers of which the likeliest
        is 2^320, are each off by at most c (ratios below 1 shrink earlier errors), together c² 2^-320 of the mass; the
        factor 2 covers that.
        """
        return 2.0 * (self.high.size + 1) * 2.0**-128


COINS = Table(np.empty(0, np.uint64), np.empty(0, np.uint64), 0)
"""No table: fair coins are counted instead."""
