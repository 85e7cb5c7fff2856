"""The kernels that round and add noise, and the table that noise is drawn from.

Noise is drawn by inversion: a 128-bit uniform number is compared with cumulative probabilities, each rounded to 128
bits. Every draw reads the whole table, so that instructions and addresses do not depend on what is drawn; its time
grows with the width of the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels as kernels
from cpsgd.codec._kernels.by_values import ByValues

Rounder = kernels.Rounder
"""The kernel that rounds grid points at random to levels, and adds noise."""

Flipper = kernels.Flipper
"""The kernel that flips biased coins for grid points: heads with probability ½ + g/2^16."""

FineGaussian = kernels.FineGaussian
"""The kernel that adds fine Gaussian draws, times a weight, to what is there."""

FinerGaussian = kernels.FinerGaussian
"""The kernel that draws Gaussians on a finer grid, for the noise of a sum."""

saturate = kernels.saturate
"""The kernel that adds a lineage's noise to grid points, and rounds them at random to the integers of a window."""

GaussianRounder = kernels.GaussianRounder
"""The kernel that adds a finely resolved Gaussian to grid points, and then rounds to the nearest level."""

CELL_BITS, UNIFORMS = 8, 28
"""Its noise counts cells of 2^CELL_BITS grid points, and adds this many uniform numbers below that."""


class PythonKernel(ByValues):
    """A rounding kernel in Python; subclasses compute the integers."""

    pack = staticmethod(kernels.pack)


WORKING_BITS = 320
"""Weights are integers of which the likeliest has this many bits, far more than the 128 kept."""

WINDOW_BITS = 160
"""Outcomes rarer than 2^-WINDOW_BITS times the likeliest are left out of a table."""

KEYSTREAM_BYTES = 16
"""Keystream bytes per draw."""

FINER_DRAW_BYTES = KEYSTREAM_BYTES + UNIFORMS + 11
"""Keystream bytes per draw of `FinerGaussian`."""


@dataclass(frozen=True, eq=False)
class Table:
    """Cumulative probabilities times 2^128, as high and low 64-bit halves; outcome 0 of the table means `base`."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    base: int

    @classmethod
    def of_weights(cls, base: int, weights: Sequence[int]) -> Table:
        """Returns the table of the outcomes base, base + 1, ... with probabilities proportional to these integers.

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
        """Upper bound on the mass moved by rounding.

        Rounding each of c thresholds to 128 bits moves at most c 2^-128. The weights, integers of which the likeliest
        is 2^320, are each off by at most c (ratios below 1 shrink earlier errors), together c² 2^-320 of the mass; the
        factor 2 covers that.
        """
        return 2.0 * (self.high.size + 1) * 2.0**-128


COINS = Table(np.empty(0, np.uint64), np.empty(0, np.uint64), 0)
"""No table: fair coins are counted instead."""
