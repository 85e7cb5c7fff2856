"""Gradients of dense layers as products of two factors per coordinate, which kernels multiply on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch

# Number and size of the chunks of coordinates in the kernel's tables; marks of empty chunks, and of chunks whose
# coordinates have their own factors.
_CHUNKS, _CHUNK = 4096, 16
_NOTHING, _MIXED = 0xFFFFFFFF, 0xFFFFFFFE


@dataclass(frozen=True)
class Layout:
    """The layout of a vector of products: layers' weights, each row by row, followed by their biases.

    Attributes:
        layers: Width and depth of each layer.
    """

    layers: tuple[tuple[int, int], ...]

    @property
    def dim(self) -> int:
        """Number of coordinates of a vector."""
        return sum(width * depth + width for width, depth in self.layers)

    @property
    def ends(self) -> list[int]:
        """Ends of the groups of factors: for each layer its inputs, then its gradients."""
        return list(accumulate(size for width, depth in self.layers for size in (depth, width)))

    @property
    def factors(self) -> int:
        """Number of factors of a vector; the last is 1, for biases."""
        return self.ends[-1] + 1

    def pairs(self) -> NDArray[np.int64]:
        """Returns the numbers of the two factors of each coordinate, [dim, 2]: a gradient and an input."""
        parts = []
        one = self.factors - 1
        for (width, depth), middle in zip(self.layers, self.ends[::2], strict=True):
            back, incoming = middle + np.arange(width), middle - depth + np.arange(depth)
            parts.append(np.stack(np.meshgrid(back, incoming, indexing="ij"), axis=-1).reshape(-1, 2))
            parts.append(np.stack([back, np.full(width, one)], axis=-1))
        return np.concatenate(parts)


@dataclass(frozen=True)
class Products:
    """Vectors as products of factors, one row [factors] of float32 per client."""

    layout: Layout
    factors: torch.Tensor


def chunk_tables(layout: Layout) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns places of factors in shared memory, left + 2^16 · right, of chunks [4096] and coordinates [16, 4096].

    For a chunk whose coordinates are one factor times 16 neighbours, the places of the first coordinate are enough.
    Four places after each 32 factors are left free, so that threads that read different chunks read different banks.
    """
    factors = layout.pairs()
    places = factors + factors // 32 * 4
    every = np.full((_CHUNKS, _CHUNK), _NOTHING, dtype=np.int64)
    every.reshape(-1)[: layout.dim] = places[:, 0] + (places[:, 1] << 16)
    inside = (every != _NOTHING).all(axis=1)
    first = every[:, 0] >> 16
    neighbours = (every - every[:, :1] == np.arange(_CHUNK) << 16).all(axis=1) & (first % 4 == 0)
    chunks = np.where(inside & neighbours, every[:, 0], _MIXED)
    chunks[(every == _NOTHING).all(axis=1)] = _NOTHING
    return chunks.astype(np.uint32).view(np.int32), np.ascontiguousarray(every.T).astype(np.uint32).view(np.int32)
