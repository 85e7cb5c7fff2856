"""Stochastic rounding to k levels plus independent integer noise: shared by the paper's mechanism and its rivals.

A coordinate is clipped to ±X, rounded without bias to one of k levels that lie s = 2X/(k-1) apart, and noise with a
log-concave law on the integers is added. A subclass brings the noise (`IntegerNoise`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.clip import MAX_LEVELS, Grid
from cpsgd.codec.rounding import KEYSTREAM_BYTES, Rounder, Table
from cpsgd.mechanisms.clipping import gaussian_rounding, worst_rounding
from cpsgd.mechanisms.interface import RANGES, Extent, Mechanism, Search
from cpsgd.mechanisms.noise import Noise
from cpsgd.paper import bounds
from cpsgd.randomness import Keystream

# Draws of noise at a time, where it is drawn for many clients.
_BLOCK = 1 << 20


class IntegerNoise(Noise):
    """Noise on the integers 0, ..., `largest`, drawn from a table or by counting fair coins."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest noise that is added; the smallest is 0."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """The mean of the noise that is added."""

    @abstractmethod
    def table(self) -> Table:
        """Returns the cumulative probabilities of the noise; empty where `largest` fair coins are counted."""

    @property
    def keystream_bytes(self) -> int:
        """Keystream bytes per draw."""
        return KEYSTREAM_BYTES

    def of_clients(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Draws many clients' noise at a time."""
        noise = np.zeros(dim, dtype=np.int64)
        table, largest = self.table(), self.largest
        rows = max(1, _BLOCK // dim)
        for start in range(0, count, rows):
            here = min(rows, count - start)
            noise += draw(table, largest, here * dim, keystream).reshape(here, dim).sum(axis=0, dtype=np.int64)
        return noise


@dataclass(frozen=True, kw_only=True)
class Lattice(Mechanism):
    """Rounding to k levels and integer noise.

    Attributes:
        levels: k, levels that a coordinate is rounded to.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.
    """

    levels: int = field()  # without a default, also where the base class has a value
    coordinate_range: float = field()

    def __post_init__(self) -> None:
        low, high = RANGES
        levels = _validate.integer("levels", self.levels, low=2, high=MAX_LEVELS)
        object.__setattr__(self, "levels", levels)
        reach = _validate.positive("coordinate_range", self.coordinate_range, low=low, high=high)
        object.__setattr__(self, "coordinate_range", reach)

    @property
    @abstractmethod
    def noise(self) -> IntegerNoise:
        """The noise of a client."""

    @classmethod
    @abstractmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """Returns the mechanism with this many levels and as much noise as fits the search; None if none fits."""

    @property
    def grid(self) -> Grid:
        """2^F points per level."""
        return Grid.of_levels(self.levels, self.coordinate_range)

    @property
    def keystream_bytes(self) -> int:
        """Four bytes for rounding, and those of the noise."""
        return 4 + self.noise.keystream_bytes

    def kernel(self) -> Rounder:
        """Returns the kernel that rounds, and adds noise by counting coins or by inversion."""
        noise = self.noise
        table = noise.table()
        return Rounder(self.levels, self.grid.fraction_bits, noise.largest, table.high, table.low, table.base)

    @property
    def values(self) -> int:
        """Number of values of a message: k plus the noise's largest value."""
        return self.levels + self.noise.largest

    @property
    def centre(self) -> float:
        """The middle level and the mean of the noise."""
        return self.noise.mean + (self.levels - 1) / 2

    @property
    def scale(self) -> float:
        """s = 2 X / (k - 1), the distance of two levels."""
        return 2.0 * self.coordinate_range / (self.levels - 1)

    @property
    def extent(self) -> Extent:
        """The extent of the range in levels: (k - 1)/2 on either side of zero."""
        return Extent(self.scale, self.widest_range)

    def expected_rounding(self, *, dim: int, clip_norm: float, rotate: bool) -> float:
        """Returns the mean of f(1 - f), f the fractional part of a coordinate in units of s."""
        if rotate:
            return gaussian_rounding(self.scale / (clip_norm / math.sqrt(dim)), self.levels)
        return worst_rounding(clip_norm / self.scale / math.sqrt(dim), self.levels)

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns two levels, and the range X^max of the paper."""
        reach = bounds.coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)
        return {"levels": 2, "coordinate_range": reach if rotate else clip_norm}

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields all small numbers of levels and a geometric ladder of odd ones, with the most noise each."""
        for levels in _ladder(search.values):
            candidate = cls.loudest(levels, search)
            if candidate is None:
                continue
            yield candidate
            # More levels only widen the range, and this one is wide enough already.
            if levels % 2 and levels > 3:
                _, widest = candidate.useful_scales(dim=search.dim, clip_norm=search.clip_norm, rotate=search.rotate)
                if search.rough_scale(candidate) >= widest:
                    return

    def with_scale(self, scale: float) -> Self:
        """Returns a copy with X = s (k - 1)/2."""
        return replace(self, coordinate_range=self.widest_range * scale)

    @property
    def widest_range(self) -> float:
        """The range X for a step of 1: (k - 1)/2."""
        return 0.5 * (self.levels - 1)


def _ladder(values: int) -> list[int]:
    """Returns the numbers of levels worth trying, in increasing order.

    All up to 9; then odd ones, each about a seventh larger than the last; and the mirror image of these, for where
    levels are needed so badly that only few values are left for noise.
    """
    steps = [*range(1, 10)]
    while steps[-1] < values:
        steps.append((round(steps[-1] * 1.15) + 1) | 1)
    levels = {step for step in steps if 2 <= step < values}
    levels |= {values - step for step in steps if values - step >= 2}
    return sorted(k for k in levels if k <= MAX_LEVELS)


def draw(table: Table, largest: int, count: int, keystream: Keystream) -> NDArray[np.uint32]:
    """Draws noise alone, from a kernel that starts on the lowest level: by inversion, or by counting coins."""
    points = Grid.of_levels(2, 1.0)
    rounder = Rounder(2, points.fraction_bits, largest, table.high, table.low, table.base)
    width = KEYSTREAM_BYTES if table.high.size else coin_bytes(largest)
    noise = np.empty(count, dtype=np.uint32)
    rounder.values(np.full(count, -points.limit, dtype=np.float32), keystream.take(count * (4 + width)), noise)
    return noise


def coin_bytes(trials: int) -> int:
    """Returns the keystream bytes for this many fair coins: sixteen share the word that rounding uses half of."""
    return 4 * -(-max(0, trials - 16) // 32)
