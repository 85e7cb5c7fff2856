"""Kernels that say what the integers of a message are; packing these is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class ByValues(ABC):
    """A kernel that turns grid points into integers first and packs them afterwards."""

    @abstractmethod
    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the integers of grid points, one per coordinate."""

    @staticmethod
    @abstractmethod
    def pack(
        values: NDArray[np.uint32], radix: int, digits: int, bits: int, last_bits: int, out: NDArray[np.uint8]
    ) -> None:
        """Packs integers into the bytes of a payload."""

    def packed(
        self,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        radix: int,
        digits: int,
        bits: int,
        last_bits: int,
        out: NDArray[np.uint8],
    ) -> None:
        """Writes the integers, packed."""
        values = np.empty(grid.size, dtype=np.uint32)
        self.values(grid, keystream, values)
        self.pack(values, radix, digits, bits, last_bits, out)
