"""The integers of correlated noise: fine Gaussian draws, a lineage's noise from its seeds, and the client's kernel.

Everything is an integer on one grid of 2^-F steps: the vector (2^10 points per step), the noise z of a lineage (2^G
points per step) times its weights, which are multiples of 2^-14, F = G + 14, and the client's own noise. So a message
is exactly linear in all of them before it is rounded, and so is a sum of messages.

A client's own noise must fill so fine a grid. It is a sum of draws, each 2^9 times as fine as the one before, whose
deviation is at least four points of the coarser grid. Together they are a discrete Gaussian on the finest grid, up to a
factor within 1 ± 10^-130 (docs/proofs/correlated-gaussian.md).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import UNIFORMS, GaussianRounder, PythonKernel
from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL, DRAW_BYTES
from cpsgd.randomness import Keystream

Points = NDArray[np.int64]

SEED_BYTES = 16
"""Length of the seed that one round's noise of a lineage follows from."""

OWN_DEVIATION = 2.0
"""Standard deviation, in steps, of the noise that a client adds to its message and hands to nobody."""

OWN_BITS = 10
"""The vector, and the coarsest draw of that noise, have 2^OWN_BITS points per step: 2048 per standard deviation."""

FINER_BITS = 9
"""Each draw of it is this many bits finer than the one before."""

PURPOSE = b"cpsgd lineage noise v1"
"""Names the expansion of a seed; another expansion would need another name."""

# Coordinates that a seed is expanded to at a time: part of the expansion's definition.
_BLOCK = 1 << 12
# Wide enough for every draw.
_WINDOW = 1 << 17
_FINE_RATIO = fine_gaussian.LEAST_RATIO


@lru_cache(maxsize=16)
def _rounder(ratio: float) -> GaussianRounder:
    table = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
    return GaussianRounder(1, _WINDOW, 0, table.high, table.low)


def farthest_point(ratio: float) -> int:
    """Returns the largest |n| that `draw` returns."""
    return fine_gaussian.farthest(ratio) * CELL + UNIFORMS * (CELL - 1) // 2


def draw(ratio: float, keystream: NDArray[np.uint8], count: int) -> Points:
    """Draws `count` discrete Gaussians with a deviation of `ratio` cells, from DRAW_BYTES of keystream each."""
    values = np.empty(count, dtype=np.uint32)
    _rounder(ratio).values(np.zeros(count, dtype=np.float32), keystream[: DRAW_BYTES * count], values)
    return values.astype(np.int64) - _WINDOW // 2


def own_shifts(fraction_bits: int) -> tuple[int, ...]:
    """Returns the left shifts of the draws of a client's own noise on the grid of 2^-F steps, coarsest first."""
    shifts = [fraction_bits - OWN_BITS]
    while shifts[-1] > 0:
        shifts.append(max(0, shifts[-1] - FINER_BITS))
    return tuple(shifts)


def wide_parts(deviation: float) -> list[tuple[float, int]]:
    """Returns draws, as ratios and left shifts, whose sum is a discrete Gaussian of any deviation from 2048 points on.

    A draw on a coarse grid and finer ones, each 2^9 times as fine as the one before, down to the integers: together
    they are what one draw of all their variance would be, within 1e-130 (docs/proofs/correlated-gaussian.md).
    """
    least, coarse = _FINE_RATIO * CELL, 0
    while deviation**2 - sum(4.0**shift for shift in _finer(coarse + 1)) * least**2 >= 4.0 ** (coarse + 1) * least**2:
        coarse += 1
    finer = _finer(coarse)
    rest = deviation**2 / 4.0**coarse - sum(4.0 ** (shift - coarse) for shift in finer) * least**2
    return [(math.sqrt(rest) / CELL, coarse), *((_FINE_RATIO, shift) for shift in finer)]


def _finer(coarse: int) -> list[int]:
    """Returns the left shifts of the refinement draws, coarsest first."""
    found = []
    while coarse > 0:
        coarse = max(0, coarse - FINER_BITS)
        found.append(coarse)
    return found


def derived_key(purpose: bytes, seed: bytes, *numbers: int) -> bytes:
    """Returns the key of one expansion of a seed."""
    return hashlib.sha256(purpose + struct.pack(f"<{len(numbers)}Q", *numbers) + seed).digest()[:16]


@dataclass(frozen=True)
class Lineages:
    """The noise of lineages: clients, one per round, whose noise follows from common seeds.

    Attributes:
        correlation: The weights.
        ratio: The deviation of a draw of z, in cells.
        limit: The largest |noise| of earlier rounds in a message, in points; more is cut off. None for all of it.
    """

    draw_bytes: ClassVar[int] = DRAW_BYTES
    """Keystream bytes per coordinate of fresh noise."""

    correlation: Correlation
    ratio: float
    limit: int | None = None

    def fresh(self, keystream: NDArray[np.uint8], count: int) -> Points:
        """Draws the noise of a lineage that begins with this round and that nobody will continue."""
        return self.correlation.weights[0] * draw(self.ratio, keystream, count)

    def noise(self, seeds: Sequence[bytes | None], round: int, dim: int) -> Points:
        """Returns Σ_k g_k z_(round-k), each z expanded from its seed; earlier rounds are clipped to the limit.

        Args:
            seeds: Those of a lineage, the newest first: of this round, of the last, and so on, up to b of them; None
                where the lineage has no seed of a round.
            round: Number of the round that the first is for.
            dim: d.

        Raises:
            ParameterError: There are more seeds than bands, none for this round, one of a round before the first, one
                that is not 16 bytes long, or one twice.
        """
        total = np.zeros(dim, dtype=np.int64)
        own, *earlier = self._checked(seeds, round)
        assert own is not None
        weights = self.correlation.weights
        told = [(seed, round - age, weights[age]) for age, seed in enumerate(earlier, start=1) if seed is not None]
        self.add_each([each for each in told if each[2]], total)
        if self.limit is not None:
            np.clip(total, -self.limit, self.limit, out=total)
        self.add(own, round, weights[0], total)
        return total

    def add_each(self, draws: Sequence[tuple[bytes, int, int]], total: Points) -> None:
        """Adds the weights times z of several seeds and rounds to `total`."""
        for seed, round, weight in draws:
            self.add(seed, round, weight, total)

    def add(self, seed: bytes, round: int, weight: int, total: Points) -> None:
        """Adds the weight times z of one round to `total`: a draw per coordinate, by a key from seed and round."""
        stream = Keystream(derived_key(PURPOSE, seed, round))
        buffer = stream.buffer(min(_BLOCK, total.size) * self.draw_bytes)
        for start in range(0, total.size, _BLOCK):
            part = total[start : start + _BLOCK]
            part += weight * draw(self.ratio, stream.fill(buffer, part.size * self.draw_bytes), part.size)

    def _checked(self, seeds: Sequence[bytes | None], round: int) -> Sequence[bytes | None]:
        """Returns the seeds if a client may hold them in this round; else raises `ParameterError`."""
        bands = self.correlation.bands
        if not 1 <= len(seeds) <= bands or seeds[0] is None:
            raise ParameterError(
                f"Expected the seed of this round and of at most {bands - 1} rounds before it, got {len(seeds)} seeds; "
                "draw 16 fresh bytes for the round, and leave older seeds out."
            )
        known = [seed for seed in seeds if seed is not None]
        if any(not isinstance(seed, bytes) or len(seed) != SEED_BYTES for seed in known):
            raise ParameterError(f"Expected seeds of {SEED_BYTES} bytes each; begin a new lineage with one of them.")
        if len(set(known)) < len(known):
            raise ParameterError("A seed stands there twice: no honest client hands that on. Begin a new lineage.")
        if any(seed is not None for seed in islice(seeds, round + 1, None)):
            raise ParameterError(f"Round {round} has no seeds of rounds before round 0; begin a new lineage.")
        return seeds


class LineageKernel(PythonKernel):
    """Adds a lineage's noise and the client's own to grid points, and rounds to the nearest integer of a window.

    Own noise comes from the first part of the keystream. The rest is for the noise of a lineage that begins here; it is
    left aside where `inherited` is given.
    """

    def __init__(
        self, lineages: Lineages, *, limit: int, window: int, fraction_bits: int, inherited: Points | None = None
    ) -> None:
        """Fixes the parameters; `inherited` is the lineage's noise of the coordinates that will be asked for."""
        self._lineages, self._inherited = lineages, inherited
        self._limit, self._window, self._bits = limit, window, fraction_bits
        self._shifts = own_shifts(fraction_bits)

    def after(self, inherited: Points) -> LineageKernel:
        """Returns the kernel that adds this noise of earlier rounds, for the coordinates that will be asked for."""
        return LineageKernel(
            self._lineages,
            limit=self._limit,
            window=self._window,
            fraction_bits=self._bits,
            inherited=inherited,
        )

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the message's integers to `values`: the vector's `grid` with all noise, rounded and cut off."""
        width = DRAW_BYTES * grid.size
        points = np.rint(np.clip(grid, -self._limit, self._limit)).astype(np.int64) << self._shifts[0]
        for number, shift in enumerate(self._shifts):
            points += draw(_FINE_RATIO, keystream[number * width :], grid.size) << shift
        if self._inherited is None:
            points += self._lineages.fresh(keystream[len(self._shifts) * width :], grid.size)
        else:
            points += self._inherited
        points += self._window << (self._bits - 1)
        values[:] = np.clip(points >> self._bits, 0, self._window - 1)
