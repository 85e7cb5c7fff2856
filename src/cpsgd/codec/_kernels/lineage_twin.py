"""The noise of a lineage in plain NumPy: the twin of lineage.h, value for value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNIFORMS = 28
"""Uniform bytes in a draw of a table in cells."""


def inverted(high: NDArray[np.uint64], low: NDArray[np.uint64], keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns the number of thresholds that each 128-bit number reaches."""
    lows, highs = keystream.copy().view("<u8").reshape(-1, 2).T
    reached = np.searchsorted(high, highs, side="left")
    # Thresholds whose high half is the number's own: only the low halves tell.
    ends = np.searchsorted(high, highs, side="right")
    for i in np.flatnonzero(ends > reached):
        reached[i] += np.searchsorted(low[reached[i] : ends[i]], lows[i], side="right")
    return reached.astype(np.uint32)


class FineGaussian:
    """Gaussian draws in cells of 2^8 points, refined by sums of uniform numbers of a few bits each.

    A draw's 128 bits come first, then planes of bytes: its uniform numbers, and those of each refinement.
    """

    def __init__(
        self, high: NDArray[np.uint64], low: NDArray[np.uint64], uniforms: NDArray[np.uint8], bits: NDArray[np.uint8]
    ) -> None:
        """Fixes the parameters: the thresholds of a symmetric H, and each refinement's numbers and their bits."""
        self._high, self._low = high, low
        self._refinements = list(zip(uniforms.tolist(), bits.tolist(), strict=True))

    def add(self, keystream: NDArray[np.uint8], weight: int, total: NDArray[np.int64]) -> None:
        """Adds the weight times a draw to each number of `total`."""
        size = total.size
        found = inverted(self._high, self._low, keystream[: 16 * size]).astype(np.int64) - self._high.size // 2
        read = 16 * size
        for uniforms, bits in [(UNIFORMS, 8), *self._refinements]:
            planes = keystream[read : read + uniforms * size].reshape(uniforms, size)
            found <<= bits
            found += (planes >> np.uint8(8 - bits)).sum(axis=0, dtype=np.int64) - uniforms * ((1 << bits) - 1) // 2
            read += uniforms * size
        total += weight * found
