"""Between vectors and the lattice, computed apart from the code under audit: plain NumPy, in float64.

A released mean is taken back to the integers whose sum it is: that is where the protocol's law is known exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard

from cpsgd.codec import rotate
from cpsgd.codec.clip import Vector
from cpsgd.codec.rounding import Grid

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.float64]

# What float32 may do to a coordinate on its way through the codec, relative to the range of the levels.
_FLOAT32 = 4e-6


class RoundLattice:
    """A protocol's rotation and levels in one round."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        """Works out the rotation as a matrix."""
        self.protocol = protocol
        self._grid: Grid = protocol.mechanism.grid  # type: ignore[assignment]  # only integers are audited
        self._rotation = np.eye(protocol.dim)
        if protocol.rotate:
            self._rotation = _rotation(protocol.dim, rotate.signs(protocol.dim, protocol.rotation_seed, round))

    def unrotated(self, vector: Array) -> Array:
        """The vector that the protocol rotates to this one."""
        return self._rotation @ vector

    def points(self, vector: Vector) -> Array:
        """Where a client's vector lies between the levels: clipped, rotated, clipped to the range; 0 to k - 1."""
        exact = vector.astype(np.float64)
        norm = float(np.linalg.norm(exact))
        clipped = exact * min(1.0, self.protocol.clip_norm / norm) if norm else exact
        reach = self._grid.limit / self._grid.unit
        return (np.clip(clipped @ self._rotation, -reach, reach) + reach) / self.protocol.scale

    def sums(self, means: NDArray[np.float32], count: int) -> Array:
        """The sums of `count` clients' integers behind released means, a row each; integers but for float32."""
        mechanism = self.protocol.mechanism
        return means.astype(np.float64) @ self._rotation * (count / mechanism.scale) + count * mechanism.centre

    def slack(self, count: int) -> float:
        """How far the codec's grid and float32 may move the expected sum of `count` clients, in levels."""
        return count * (math.ldexp(1.0, -self._grid.fraction_bits) + _FLOAT32 * self.protocol.mechanism.levels)


def _rotation(dim: int, signs: NDArray[np.uint8]) -> Array:
    """The rotation of `cpsgd.codec.rotate` as a matrix that rows are multiplied by, from its definition."""
    size = 1 << (dim.bit_length() - 1)
    rest = dim - size
    values = 1.0 - 2.0 * np.unpackbits(signs, bitorder="little")
    transform = hadamard(size) / math.sqrt(size)

    def block(first: int) -> Array:
        matrix = np.eye(dim)
        matrix[:size, :size] = values[first : first + size, None] * transform
        return matrix

    if rest == 0:
        return block(0)
    exchange = np.eye(dim)
    exchange[:, [*range(rest), *range(size, dim)]] = exchange[:, [*range(size, dim), *range(rest)]]
    return block(0) @ exchange @ block(max(16, size))
