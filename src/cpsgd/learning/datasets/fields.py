"""Smooth random displacement fields: how far each pixel of a deformed image is moved, along one axis.

The construction, in exact arithmetic so that every machine makes the same fields for ever:

1. For field j of images of `side`×`side` pixels, independent integers uniform on −32768..32767 on a grid that is wider
   than the image by the smoothing kernel's radius on all sides. They are the public bytes
   `public_bits("infinite-fields", side, j, ...)`, two a number, least significant first.
2. Smoothing along rows and columns with integer weights round(8192·exp(−x²/(2σ²))), cut off at radius ⌈4σ⌉. All
   intermediate sums are integers below 2^53, so float64 holds them exactly in whatever order they are added.
3. Division by the standard deviation of the result, known exactly from the weights, times the displacement wished for:
   every pixel of every field has that standard deviation, at the border as in the middle.

Uniform noise smoothed with a Gaussian of σ = 4 px on 28×28 images, scaled to a standard deviation of 1 px, is what the
infinite MNIST needs in place of the original's fields, which are a separate download.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cpsgd.randomness import public_bits

_UNIT = 1 << 13
_NOISE = 1 << 16
# Fields smoothed at a time, to keep the noise of all of them out of memory.
_BLOCK = 128


def smooth_fields(count: int, side: int, *, smoothing: float, displacement: float) -> NDArray[np.float32]:
    """`count` fields of side×side pixels, as an array [count, side, side].

    Args:
        count: How many fields; the first ones do not depend on it.
        side: Pixels a side.
        smoothing: σ of the smoothing Gaussian, in pixels.
        displacement: Standard deviation of a pixel's displacement, in pixels.

    >>> smooth_fields(2, 8, smoothing=1.5, displacement=1.0)[1, 0, :3]
    array([-1.5897619 , -0.7146024 ,  0.17997856], dtype=float32)
    """
    radius = math.ceil(4 * smoothing)
    offsets = range(-radius, radius + 1)
    weights = np.array([round(_UNIT * math.exp(-(x**2) / (2 * smoothing**2))) for x in offsets], dtype=np.float64)
    wide = side + 2 * radius
    smooth = np.zeros((side, wide))
    for row in range(side):
        smooth[row, row : row + weights.size] = weights
    # The integers −2^15..2^15−1 have variance (2^32 − 1)/12; a pixel is their sum weighted by products of two weights.
    deviation = math.sqrt((_NOISE**2 - 1) / 12) * float(weights @ weights)

    fields = np.empty((count, side, side), dtype=np.float32)
    for start in range(0, count, _BLOCK):
        block = range(start, min(start + _BLOCK, count))
        noise = np.stack([_noise(side, number, wide) for number in block])
        fields[start : block.stop] = smooth @ noise @ smooth.T * (displacement / deviation)
    return fields


def _noise(side: int, number: int, wide: int) -> NDArray[np.float64]:
    raw = public_bits("infinite-fields", side, number, 2 * wide * wide)
    return raw.view("<i2").reshape(wide, wide).astype(np.float64)
