"""Single stages of the codec, which the pipeline only runs fused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import clip
from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Grid, Vector
from cpsgd.mechanisms import Binomial


def clipped(vector: Vector, clip_norm: float, unit: float = 1.0) -> NDArray[np.float32]:
    """The vector scaled down to norm `clip_norm` where it is longer, times `unit`."""
    out = np.empty(vector.size, np.float32)
    kernels.scale(vector, clip.factor(vector, clip_norm) * unit, out)
    return out


def rounder(levels: int, trials: int = 0, p: float = 0.5) -> kernels.Rounder:
    """The kernel that rounds to k levels and adds Binomial(m, p)."""
    return Binomial(levels=levels, trials=trials, p=p, coordinate_range=1.0).kernel()


def keystream_bytes(trials: int, p: float) -> int:
    """Keystream bytes per coordinate, rounding included."""
    return Binomial(levels=2, trials=trials, p=p, coordinate_range=1.0).keystream_bytes


def rounded(grid: NDArray[np.float32], levels: int, keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Grid points rounded to levels 0, ..., k - 1, without noise."""
    values = np.empty(grid.size, np.uint32)
    rounder(levels).values(grid, keystream, values)
    return values


def to_grid_units(levels_: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """From levels (or means of them) back to grid units."""
    return (levels_ - (levels - 1) / 2) * 2.0 ** Grid.of_levels(levels, 1.0).fraction_bits


def lowest(count: int) -> NDArray[np.float32]:
    """Grid points on the lowest of two levels: what comes out of the rounding kernel is the noise alone."""
    return np.full(count, -Grid.of_levels(2, 1.0).limit, np.float32)


def noise(trials: int, p: float, count: int, keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Binomial(m, p) from this keystream, of which each coordinate's first word is left for rounding."""
    values = np.empty(count, np.uint32)
    rounder(2, trials, p).values(lowest(count), keystream, values)
    return values
