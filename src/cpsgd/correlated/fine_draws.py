"""Noise of a lineage on a grid that is 2^27 times finer: what messages that are rounded at random need.

A draw is one of `fine_gaussian` with 64 to 128 cells per deviation, whose 15 uniform numbers make it eight bits finer
than H. It is refined three times: shifted to the left by eight bits, and uniform numbers of so many bits are added.
Each time fewer will do, since there are more points per standard deviation. All together are a Gaussian to which
uniform numbers are added, up to `FINE_VARIATION` (docs/proofs/rounded-correlated.md, 1).

The first 23 bits of a draw's number tell |H|, but for one draw in ten thousand: those alone read the number's other
bits. How much is read and done does not depend on what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import FineGaussian
from cpsgd.correlated.draws import SEED_BYTES, Lineages, Points, derived_key
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL
from cpsgd.randomness import Keystream

PURPOSE = b"cpsgd fine lineage noise v2"
"""Names the expansion of a seed; another expansion would need another name."""

LEAST_RATIO = 64.0
"""The standard deviation, in cells, is at least this and less than twice as much."""

UNIFORMS = 15
"""Uniform bytes of a draw before it is refined."""

REFINEMENTS = ((8, 8), (5, 8), (4, 8))
"""How many uniform numbers each refinement adds, a byte of keystream each, and of how many bits."""

REFINED_BITS = sum(bits for _, bits in REFINEMENTS)
"""Bits by which all refinements together make a draw finer."""

FINE_BITS = REFINED_BITS + round(math.log2(LEAST_RATIO / fine_gaussian.LEAST_RATIO))
"""Bits by which the grid is finer than that of a draw with `fine_gaussian.LEAST_RATIO` cells per deviation."""

BLOCK = 1 << 12
"""Draws of a block: part of the expansion's definition."""

# Numbers in a block that are there as a whole, and draws that planes of bytes are filled up to.
_RESTS, _GROUP = 64, 64
_PLANES = 3 + UNIFORMS + sum(uniforms for uniforms, _ in REFINEMENTS)

# Coordinates per key, which is far below what GCM encrypts under one.
_SEGMENT = 1 << 24


def aliasing(root: float, uniforms: int) -> float:
    """Returns a bound on the total variation of a refinement of a Gaussian of this many points per deviation."""
    return 0.5 * math.sqrt(10.4 * math.gamma(uniforms + 0.5)) * (2.0 * root) ** -uniforms


def _variation() -> float:
    root, found = LEAST_RATIO * CELL, 0.0
    for uniforms, bits in REFINEMENTS:
        found += aliasing(root, uniforms)
        root *= 2.0**bits
    return found * (1.0 + 1e-9)


FINE_VARIATION = _variation()
"""Total variation of the refinements of a draw from a Gaussian and uniform numbers: less than 2^-110."""


@dataclass(frozen=True)
class FineLineages(Lineages):
    """The noise of lineages on the fine grid."""

    draw_bytes: ClassVar[int] = SEED_BYTES

    def fresh(self, keystream: NDArray[np.uint8], count: int) -> Points:
        """Draws the noise of a lineage that begins with this round and that nobody will continue, from a seed."""
        total = np.zeros(count, dtype=np.int64)
        self.add(keystream[:SEED_BYTES].tobytes(), 0, self.correlation.weights[0], total)
        return total

    def add(self, seed: bytes, round: int, weight: int, total: Points) -> None:
        """Adds the weight times z of one round to `total`: a draw per coordinate, by keys from seed and round."""
        self.add_each([(seed, round, weight)], total)

    def add_each(self, draws: Sequence[tuple[bytes, int, int]], total: Points) -> None:
        """Adds the weights times z of several seeds and rounds to `total`."""
        kernel, weights = _kernel(self.ratio), np.array([weight for _, _, weight in draws], dtype=np.int64)
        for number, start in enumerate(range(0, total.size, _SEGMENT)):
            keys = [derived_key(PURPOSE, seed, round, number) for seed, round, _ in draws]
            part = total[start : start + _SEGMENT]
            if kernel.ciphers():
                kernel.expand(np.frombuffer(b"".join(keys), dtype=np.uint8), weights, part)
            else:
                for key, weight in zip(keys, weights.tolist(), strict=True):
                    _expand(kernel, key, weight, part)


def block_bytes(count: int) -> int:
    """Returns the keystream bytes of a block of draws."""
    return 16 * _RESTS + _PLANES * (-(-count // _GROUP) * _GROUP)


def _expand(kernel: FineGaussian, key: bytes, weight: int, total: Points) -> None:
    """Adds draws in blocks, whose keystream is made by a library."""
    stream = Keystream.in_gcm(key)
    buffer = stream.buffer(block_bytes(min(BLOCK, total.size)))
    for start in range(0, total.size, BLOCK):
        part = total[start : start + BLOCK]
        kernel.add(stream.fill(buffer, block_bytes(part.size)), weight, part)


@lru_cache(maxsize=16)
def _kernel(ratio: float) -> FineGaussian:
    table = fine_gaussian.magnitudes(ratio, UNIFORMS)
    return FineGaussian(table.high, table.low)
