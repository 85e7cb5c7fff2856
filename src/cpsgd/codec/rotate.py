"""A public random rotation that spreads every vector over all coordinates, for any dimension.

Let 2^j be the largest power of two that is at most d, r = d - 2^j, H the normalised Walsh–Hadamard matrix of size 2^j
and A, B diagonal matrices of random signs. The rotation is

    1. apply H A to the first 2^j coordinates;
    if r > 0:
    2. exchange the first r coordinates with the last r;
    3. apply H B to the first 2^j coordinates.

For d a power of two this is the paper's R = HA. Otherwise two overlapping transforms touch every coordinate and nothing
is padded, so that a message has d coordinates and not 2^(j+1). Each step is orthogonal, hence so is the rotation.

Why it spreads. A coordinate of the result is a sum of signed entries, ±2^(-j/2) z_b with independent signs, of a vector
z of norm at most ‖x‖. By Hoeffding it exceeds t with probability at most 2 exp(-t² 2^j / (2‖x‖²)), and 2^j > d/2. So
the bound of the paper's theorem for Rot, with its X^max, holds for every d. A unit vector e_i becomes exactly ±2^(-j/2)
on the first 2^j coordinates after step 1. Because step 2 leaves the others in place, step 3 turns it into entries w(a
xor i) of one vector w that depends on B alone: all such e_i have the same largest coordinate, so spread is checked for
all of them at once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Vector
from cpsgd.randomness import public_bits

# Names the construction of the signs; another construction would need another name.
PURPOSE = "cpsgd rotation v1"


@lru_cache(maxsize=4)
def signs(dim: int, seed: int, round: int) -> NDArray[np.uint8]:
    """Returns the signs of A and then of B as bits, least significant first in each byte; 1 means minus.

    Those of B begin at bit max(16, 2^j).
    """
    bits = public_bits(PURPOSE, seed, round, kernels.sign_bytes(dim))
    bits.flags.writeable = False
    return bits


def forward(vector: Vector, signs: NDArray[np.uint8], factor: float = 1.0) -> NDArray[np.float32]:
    """Returns the rotated vector, multiplied by `factor` beforehand."""
    out = np.empty(vector.size, dtype=np.float32)
    kernels.rotate_forward(vector, factor, signs, out)
    return out


def backward(vector: NDArray[np.float32], signs: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Inverts `forward`: returns the vector before the rotation."""
    out = vector.copy()
    kernels.rotate_backward(out, signs)
    return out
