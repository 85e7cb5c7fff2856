"""All stages in one go: vector to message, and sums of messages back to a mean.

The public path. It needs one scratch vector of float32 and one block of keystream beside its output; the integers
between rounding and packing never leave the processor's first-level cache.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.codec import clip, noise, pack, quantize, rotate, wire
from cpsgd.codec._kernels import _native
from cpsgd.codec.clip import Vector
from cpsgd.errors import ParameterError, VectorError
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# Keystream is drawn in blocks of a quarter of the (float32) input's bytes, within these bounds: large enough to hide
# the cost of a call, small enough for the second-level cache and for the memory it takes beside the input's.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 18
# Floats of the Gaussian protocol worked on at a time.
_FLOAT_BLOCK = 1 << 12
# float32 factors outside this interval would lose digits on their own; such vectors take the float64 kernels.
_FLOAT32_FACTORS = (1e-30, 1e30)


@dataclass(frozen=True, eq=False)
class _Stages:
    """What the stages of a protocol need, worked out once."""

    unit: float
    norm_limit: float
    coordinate_limit: float
    fraction_bits: int
    rounder: _native.Rounder
    keystream_bytes: int
    grouping: pack.Grouping
    last_bits: int
    block: int


@lru_cache(maxsize=64)
def _stages(protocol: Protocol) -> _Stages:
    unit = quantize.unit(protocol.coordinate_range, protocol.levels)
    groups = pack.grouping(protocol.radix)
    keystream_bytes = noise.keystream_bytes(protocol.trials, protocol.p)
    # Blocks begin on a byte and on a group of digits.
    step = 8 * groups.digits
    block_bytes = min(max(protocol.dim, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    return _Stages(
        unit=unit,
        # Rounded down, so that the norm is within D also for the exact quotient.
        norm_limit=protocol.clip_norm * unit * (1.0 - 2.0**-48),
        coordinate_limit=quantize.coordinate_limit(protocol.levels),
        fraction_bits=quantize.fraction_bits(protocol.levels),
        rounder=noise.rounder(protocol.levels, protocol.trials, protocol.p),
        keystream_bytes=keystream_bytes,
        grouping=groups,
        last_bits=groups.last_bits(protocol.dim),
        block=max(1, block_bytes // keystream_bytes // step) * step,
    )


@lru_cache(maxsize=64)
def _fingerprint(protocol: Protocol) -> bytes:
    return protocol.fingerprint


def as_vector(vector: ArrayLike, dim: int) -> Vector:
    """The vector as a contiguous array of float32 or float64.

    Raises:
        VectorError: It does not have `dim` real coordinates.
    """
    try:
        array = np.asanyarray(vector)
    except ValueError:
        raise VectorError(f"Expected a vector of {dim} coordinates, got rows of different lengths.") from None
    if isinstance(array, np.ma.MaskedArray):
        raise VectorError("A masked array has no numbers where it is masked; fill it first.")
    if array.shape != (dim,):
        raise VectorError(f"Expected a vector of {dim} coordinates, got an array of shape {array.shape}.")
    if array.dtype.kind not in "fiub":
        raise VectorError(f"Expected real numbers, got an array of {array.dtype}.")
    dtype = np.float32 if array.dtype in (np.float32, np.float16) else np.float64
    # The kernels need native, contiguous and aligned numbers; only a vector that is not is copied.
    return np.require(array, dtype, ["C", "ALIGNED"])


def to_grid(protocol: Protocol, vector: Vector, round: int) -> NDArray[np.float32]:
    """Clips and rotates: the vector in grid units, with its norm and coordinates within the protocol's bounds."""
    stages = _stages(protocol)
    factor = clip.factor(vector, protocol.clip_norm) * stages.unit
    low, high = _FLOAT32_FACTORS
    if not low < factor < high:
        vector = vector.astype(np.float64)
    grid = np.empty(protocol.dim, dtype=np.float32)
    if protocol.rotate:
        _native.rotate_forward(vector, factor, rotate.signs(protocol.dim, protocol.rotation_seed, round), grid)
    else:
        _native.scale(vector, factor, grid)
    clip.enforce(grid, norm_limit=stages.norm_limit, coordinate_limit=stages.coordinate_limit)
    return grid


def encode(protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None) -> bytes:
    """One client's message. `keystream` is for tests; without it, fresh noise from the operating system's generator."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    checked = as_vector(vector, protocol.dim)
    stream = Keystream() if keystream is None else keystream
    message = np.empty(protocol.message_bytes, dtype=np.uint8)
    payload = message[wire.HEADER_BYTES :]
    if protocol.sigma is None:
        _encode_integers(protocol, checked, round, stream, payload)
    else:
        _encode_floats(protocol, checked, stream, payload)
    wire.write_header(
        message,
        radix=protocol.radix,
        fingerprint=_fingerprint(protocol),
        round=round,
        message_id=os.urandom(16),
        dim=protocol.dim,
    )
    return message.tobytes()


def _encode_integers(
    protocol: Protocol, vector: Vector, round: int, stream: Keystream, payload: NDArray[np.uint8]
) -> None:
    stages = _stages(protocol)
    grid = to_grid(protocol, vector, round)
    groups = stages.grouping
    buffer = stream.buffer(min(stages.block, grid.size) * stages.keystream_bytes)
    block_bytes = stages.block // groups.digits * groups.bits // 8
    for number, start in enumerate(range(0, grid.size, stages.block)):
        part = grid[start : start + stages.block]
        words = stream.fill(buffer, part.size * stages.keystream_bytes)
        packed = payload[number * block_bytes : (number + 1) * block_bytes]
        stages.rounder.packed(part, words, groups.radix, groups.digits, groups.bits, stages.last_bits, packed)


def integers(
    protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None
) -> NDArray[np.uint32]:
    """One client's integers 0..k+m-1, unpacked, for carriers that add them up themselves.

    `keystream` is for tests; the same one yields the integers that `encode` packs.
    """
    if protocol.sigma is not None:
        raise ParameterError("The Gaussian protocol sends floats: it has no integers to add up.")
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    stages = _stages(protocol)
    grid = to_grid(protocol, as_vector(vector, protocol.dim), round)
    stream = Keystream() if keystream is None else keystream
    buffer = stream.buffer(min(stages.block, grid.size) * stages.keystream_bytes)
    values = np.empty(protocol.dim, dtype=np.uint32)
    for start in range(0, grid.size, stages.block):
        part = grid[start : start + stages.block]
        words = stream.fill(buffer, part.size * stages.keystream_bytes)
        stages.rounder.values(part, words, values[start : start + stages.block])
    return values


def _encode_floats(protocol: Protocol, vector: Vector, stream: Keystream, payload: NDArray[np.uint8]) -> None:
    """The Gaussian protocol: clipped floats plus N(0, σ²).

    Box and Muller's transform of keystream. A baseline: unlike the integers of the other protocols, floating-point
    noise is only close to the law that is analysed.
    """
    assert protocol.sigma is not None
    factor = clip.factor(vector, protocol.clip_norm)
    floats = payload.view("<f4")
    for start in range(0, protocol.dim, _FLOAT_BLOCK):
        part = vector[start : start + _FLOAT_BLOCK].astype(np.float64)
        words = stream.take(16 * part.size).view(np.uint64) >> np.uint64(11)
        # Uniform in (0, 1], so that the logarithm is finite.
        radius = np.sqrt(-2.0 * np.log((words[: part.size] + np.uint64(1)) * 2.0**-53))
        angle = words[part.size :] * (2.0**-52 * math.pi)
        floats[start : start + part.size] = part * factor + protocol.sigma * radius * np.cos(angle)


def decode(
    protocol: Protocol, sums: NDArray[np.uint32] | NDArray[np.uint64], count: int, round: int
) -> NDArray[np.float32]:
    """The mean of `count` clients' vectors from the sums of their integers (modulo the modulus, where there is one)."""
    stages = _stages(protocol)
    middle = count * (protocol.trials * protocol.p + (protocol.levels - 1) / 2)
    if protocol.modulus is not None:
        # The sum is the representative nearest to where it is expected.
        lowest = math.floor(middle) - protocol.modulus // 2
        sums = np.mod(sums.astype(np.int64) - lowest, protocol.modulus).astype(np.uint64)
        middle -= lowest
    mean = np.empty(protocol.dim, dtype=np.float32)
    _native.centre(sums, middle, 2.0**stages.fraction_bits / stages.unit / count, mean)
    if protocol.rotate:
        _native.rotate_backward(mean, rotate.signs(protocol.dim, protocol.rotation_seed, round))
    return mean
