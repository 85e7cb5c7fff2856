"""Noise of a lineage on a grid that is 2^27 times finer: what messages that are rounded at random need.

A draw of 44 bytes, as elsewhere, is refined four times: it is shifted to the left by a few bits, and uniform numbers of
so many bits are added. Each time fewer will do, since there are more points per standard deviation. All together are a
Gaussian to which uniform numbers are added, up to `FINE_VARIATION` (docs/proofs/rounded-correlated.md, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import FineGaussian
from cpsgd.correlated.draws import Lineages, Points, derived_key
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL, DRAW_BYTES
from cpsgd.randomness import Keystream

PURPOSE = b"cpsgd fine lineage noise v1"
"""Names the expansion of a seed; another expansion would need another name."""

REFINEMENTS = ((10, 8), (6, 8), (4, 8), (4, 3))
"""How many uniform numbers each refinement adds, a byte of keystream each, and of how many bits."""

FINE_BITS = sum(bits for _, bits in REFINEMENTS)
"""Bits by which all refinements together make a draw finer."""

# Coordinates per key, which is far below what GCM encrypts under one.
_SEGMENT = 1 << 24


def aliasing(root: float, uniforms: int) -> float:
    """Returns a bound on the total variation of a refinement of a Gaussian of this many points per deviation."""
    return 0.5 * math.sqrt(10.4 * math.gamma(uniforms + 0.5)) * (2.0 * root) ** -uniforms


def _variation() -> float:
    root, found = fine_gaussian.LEAST_RATIO * CELL, 0.0
    for uniforms, bits in REFINEMENTS:
        found += aliasing(root, uniforms)
        root *= 2.0**bits
    return found * (1.0 + 1e-9)


FINE_VARIATION = _variation()
"""Total variation of the refinements of a draw from a Gaussian and uniform numbers: less than 2^-108."""


@dataclass(frozen=True)
class FineLineages(Lineages):
    """The noise of lineages on the fine grid."""

    draw_bytes: ClassVar[int] = DRAW_BYTES + sum(uniforms for uniforms, _ in REFINEMENTS)

    def add(self, seed: bytes, round: int, weight: int, total: Points) -> None:
        """Adds the weight times z of one round to `total`: a draw per coordinate, by keys from seed and round."""
        for number, start in enumerate(range(0, total.size, _SEGMENT)):
            stream = Keystream.in_gcm(derived_key(PURPOSE, seed, round, number))
            self._add_stream(stream, weight, total[start : start + _SEGMENT])

    def _add_draws(self, keystream: NDArray[np.uint8], weight: int, total: Points) -> None:
        _kernel(self.ratio).add(keystream, weight, total)


@lru_cache(maxsize=16)
def _kernel(ratio: float) -> FineGaussian:
    table = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
    uniforms, bits = np.array(REFINEMENTS, dtype=np.uint8).T.copy()
    return FineGaussian(table.high, table.low, uniforms, bits)
