"""The noise of a lineage in plain NumPy: the twin of lineage.h, value for value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNIFORMS = 28
"""Uniform bytes in a draw of a table in cells."""

_PREFIX_BYTES, _REFINEMENTS, _RESTS, _GROUP = 3, (15, 8, 5, 4), 64, 64


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
    """Fine Gaussian draws: |H| and its sign, four times refined by eight bits.

    A block's bytes are 64 numbers of 128 bits, then for every 64 draws planes of a byte per draw, in the order 0, 32,
    1, 33, ... The first three planes are the first bytes of a draw's number, the most significant first; the lowest
    bit is the sign. Where a threshold has the same 23 bits, the rest of the number is the next of the 64.
    """

    def __init__(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None:
        """Fixes the thresholds of |H|."""
        self._high, self._low = high, low

    @staticmethod
    def ciphers() -> bool:
        """Returns whether `expand` is there: it is not."""
        return False

    def expand(self, keys: NDArray[np.uint8], weights: NDArray[np.int64], total: NDArray[np.int64]) -> None:
        """Raises ValueError: keystream comes from elsewhere."""
        raise ValueError("there are no instructions for AES")

    def add(self, keystream: NDArray[np.uint8], weight: int, total: NDArray[np.int64]) -> None:
        """Adds the weight times a draw to each number of `total`, a block."""
        width, read = -(-total.size // _GROUP) * _GROUP, 16 * _RESTS
        rows = _PREFIX_BYTES + sum(_REFINEMENTS)
        groups = keystream[read : read + rows * width].reshape(-1, rows, _GROUP)
        planes = groups.swapaxes(0, 1).reshape(rows, width)
        first, second, third = planes[:_PREFIX_BYTES].astype(np.uint32)
        sign, numbers = third & 1, first << 16 | second << 8 | third & 254
        found = self._magnitudes(numbers, keystream[:read].reshape(_RESTS, 16))
        found *= 1 - 2 * sign.astype(np.int64)
        planes, mean = planes[_PREFIX_BYTES:], 0
        for uniforms in _REFINEMENTS:
            found <<= 8
            found += planes[:uniforms].sum(axis=0, dtype=np.int64)
            planes, mean = planes[uniforms:], (mean << 8) + uniforms * 255
        found -= mean // 2
        total += weight * found.reshape(-1, _GROUP // 2, 2).swapaxes(1, 2).ravel()[: total.size]

    def _magnitudes(self, numbers: NDArray[np.uint32], rests: NDArray[np.uint8]) -> NDArray[np.int64]:
        prefixes = (self._high >> np.uint64(40)).astype(np.uint32) & np.uint32(0xFFFFFE)
        found = np.searchsorted(prefixes, numbers, side="right")
        untold = np.flatnonzero(found > np.searchsorted(prefixes, numbers, side="left"))
        draws = rests[np.arange(untold.size) % _RESTS].copy()
        draws[:, 13] &= 1
        draws[:, 13] |= (numbers[untold] & 255).astype(np.uint8)
        draws[:, 14], draws[:, 15] = numbers[untold] >> 8 & 255, numbers[untold] >> 16
        found[untold] = inverted(self._high, self._low, draws.ravel())
        return found.astype(np.int64)
