"""Between vectors and the lattice, computed apart from the code under audit: plain NumPy, in float64.

A released mean is taken back to the integers whose sum it is: that is where the protocol's law is known exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import quantize, rotate
from cpsgd.codec._kernels import reference
from cpsgd.codec.clip import Vector

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.float64]

# What float32 may do to a coordinate on its way through the codec, relative to the range of the levels.
_FLOAT32 = 4e-6


class Lattice:
    """A protocol's rotation and levels in one round."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        """Works out the rotation as a matrix."""
        self.protocol = protocol
        self._rotation = np.eye(protocol.dim)
        if protocol.rotate:
            signs = rotate.signs(protocol.dim, protocol.rotation_seed, round)
            rows = [reference.rotate_forward(unit, 1.0, signs) for unit in np.eye(protocol.dim)]
            self._rotation = np.array(rows, dtype=np.float64)

    def unrotated(self, vector: Array) -> Array:
        """The vector that the protocol rotates to this one."""
        return self._rotation @ vector

    def points(self, vector: Vector) -> Array:
        """Where a client's vector lies between the levels: clipped, rotated, clipped to the range; 0 to k - 1."""
        exact = vector.astype(np.float64)
        norm = float(np.linalg.norm(exact))
        clipped = exact * min(1.0, self.protocol.clip_norm / norm) if norm else exact
        reach = self.protocol.coordinate_range
        return (np.clip(clipped @ self._rotation, -reach, reach) + reach) / self.protocol.scale

    def sums(self, means: NDArray[np.float32], count: int) -> Array:
        """The sums of `count` clients' integers behind released means, a row each; integers but for float32."""
        protocol = self.protocol
        middle = count * (protocol.trials * protocol.p + 0.5 * (protocol.levels - 1))
        return means.astype(np.float64) @ self._rotation * (count / protocol.scale) + middle

    def slack(self, count: int) -> float:
        """How far the codec's grid and float32 may move the expected sum of `count` clients, in levels."""
        levels = self.protocol.levels
        return count * (math.ldexp(1.0, -quantize.fraction_bits(levels)) + _FLOAT32 * levels)
