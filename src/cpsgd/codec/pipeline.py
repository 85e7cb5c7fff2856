"""All stages in one go: vector to message, and sums of messages back to a mean.

The public path. It needs one vector of float32 and one block of keystream beside its output; the integers between
rounding and packing never leave the processor's first-level cache. What happens to a coordinate is for the protocol's
mechanism to say; everything here is the same for all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.codec import clip, scratch, wire
from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Vector
from cpsgd.codec.formats import Format, Sums
from cpsgd.codec.rounding import Grid
from cpsgd.errors import VectorError
from cpsgd.randomness import SLACK, Keystream

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# Bytes of keystream that are drawn at a time: few enough for the cache, and enough to hide what happens between calls,
# above all that threads wait for each other there.
_BLOCK_BYTES = 3 << 19
_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
# float32 factors outside this interval would lose digits on their own; such vectors take the float64 kernels.
_FLOAT32_FACTORS = (1e-30, 1e30)


@dataclass(frozen=True, eq=False)
class _Stages:
    """What the stages of a protocol need, worked out once."""

    grid: Grid | None
    norm_limit: float
    format: Format
    kernel: Any
    keystream_bytes: int
    block: int
    packer: Any
    packer_bytes: int
    packer_block: int
    fingerprint: bytes


@lru_cache(maxsize=64)
def _stages(protocol: Protocol) -> _Stages:
    mechanism, form, grid = protocol.mechanism, protocol.format, protocol.mechanism.grid

    def block(width: int) -> int:
        return max(1, _BLOCK_BYTES // width // form.step) * form.step

    packer, packer_bytes = mechanism.packer()
    return _Stages(
        grid=grid,
        # Rounded down, so that the norm is within D also for the exact quotient.
        norm_limit=math.inf if grid is None else protocol.clip_norm * grid.unit * (1.0 - 2.0**-48),
        format=form,
        kernel=mechanism.kernel(),
        keystream_bytes=mechanism.keystream_bytes,
        block=block(mechanism.keystream_bytes),
        packer=packer,
        packer_bytes=packer_bytes,
        packer_block=block(packer_bytes),
        fingerprint=protocol.fingerprint,
    )


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
    # The kernels need native, contiguous and aligned numbers; only a vector that is not is copied.
    if type(array) is np.ndarray and array.dtype == _FLOAT and array.flags.carray:
        return array
    dtype = np.float32 if array.dtype in (np.float32, np.float16) else np.float64
    return np.require(array, dtype, ["C", "ALIGNED"])


def to_grid(protocol: Protocol, vector: Vector, round: int) -> NDArray[np.float32]:
    """Clips and rotates: the vector in grid units, with its norm and coordinates within the protocol's bounds."""
    return _to_grid(protocol, _stages(protocol), vector, round, scratch.floats(protocol.dim))


def _to_grid(
    protocol: Protocol, stages: _Stages, vector: Vector, round: int, points: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The same, written to `points`."""
    grid = stages.grid
    protocol.mechanism.memory.rotation_round(round)  # refuses rounds that a run does not have, rotated or not
    factor = clip.factor(vector, protocol.clip_norm) * (1.0 if grid is None else grid.unit)
    low, high = _FLOAT32_FACTORS
    if not low < factor < high:
        vector = vector.astype(np.float64)
    squared = None
    if grid is not None and protocol.rotate:
        squared = kernels.rotate_to_grid(vector, factor, protocol.rotation_signs(round), grid.limit, points)
    else:
        kernels.scale(vector, factor, points)  # floats are never rotated
    if grid is not None:
        clip.enforce(points, norm_limit=stages.norm_limit, coordinate_limit=grid.limit, squared=squared)
    return points


Seeds = Sequence[bytes | None] | None
"""Those of a client's lineage, the newest first, where noise is correlated; None where it begins one."""


def encode(
    protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> bytes:
    """One client's message. `keystream` is for tests; without it, fresh noise from the operating system's generator."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    checked = as_vector(vector, protocol.dim)
    inherited = protocol.mechanism.memory.inherited(seeds, round, protocol.dim)
    stages = _stages(protocol)
    stream = Keystream() if keystream is None else keystream
    message_id = os.urandom(16)
    chosen = stages.format.chosen(message_id, protocol.dim)
    held = protocol.dim if chosen is None else chosen.size
    buffer = kernels.MessageBuffer(wire.HEADER_BYTES + stages.format.payload_bytes(held))
    message = buffer.array()
    points = scratch.take(protocol.dim)
    try:
        _to_grid(protocol, stages, checked, round, points)
        held_points = points if chosen is None else points[chosen]
        _write_payload(stages, held_points, stream, inherited, message[wire.HEADER_BYTES :])
    finally:
        scratch.give_back(points)
    wire.write_header(
        message,
        radix=stages.format.radix,
        fingerprint=stages.fingerprint,
        round=round,
        message_id=message_id,
        dim=protocol.dim,
        version=stages.format.version,
    )
    return buffer.finished()


def _write_payload(
    stages: _Stages,
    points: NDArray[np.float32],
    stream: Keystream,
    inherited: NDArray[np.int64] | None,
    payload: NDArray[np.uint8],
) -> None:
    """Block by block."""
    width, block = stages.packer_bytes, stages.packer_block
    buffer = scratch.take(min(block, points.size) * width + SLACK, _BYTE)
    block_bytes = stages.format.payload_bytes(block)
    try:
        for number, start in enumerate(range(0, points.size, block)):
            part = points[start : start + block]
            words = stream.fill(buffer, part.size * width)
            packer = stages.packer if inherited is None else stages.packer.after(inherited[start : start + block])
            stages.format.write(packer, part, words, payload[number * block_bytes : (number + 1) * block_bytes])
    finally:
        scratch.give_back(buffer)


def integers(
    protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> NDArray[np.uint32]:
    """One client's integers, unpacked, for transports that add them up themselves.

    `keystream` is for tests; the same one yields the integers that `encode` packs.
    """
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    checked = as_vector(vector, protocol.dim)
    inherited = protocol.mechanism.memory.inherited(seeds, round, protocol.dim)
    stages = _stages(protocol)
    stream = Keystream() if keystream is None else keystream
    values = np.empty(protocol.dim, dtype=np.uint32)
    points = scratch.take(protocol.dim)
    buffer = scratch.take(min(stages.block, protocol.dim) * stages.keystream_bytes + SLACK, _BYTE)
    try:
        _to_grid(protocol, stages, checked, round, points)
        for start in range(0, points.size, stages.block):
            part = points[start : start + stages.block]
            words = stream.fill(buffer, part.size * stages.keystream_bytes)
            end = start + stages.block
            kernel = stages.kernel if inherited is None else stages.kernel.after(inherited[start:end])
            kernel.values(part, words, values[start:end])
    finally:
        scratch.give_back(buffer)
        scratch.give_back(points)
    return values


def decode(protocol: Protocol, sums: Sums, count: int, round: int) -> NDArray[np.float32]:
    """The mean of `count` clients' vectors from the sums of their messages (modulo the modulus, where there is one)."""
    protocol.mechanism.memory.check_messages(count, protocol.clients)
    middle, factor = count * protocol.mechanism.centre, protocol.mechanism.scale / count
    if protocol.modulus is not None:
        # The sum is the representative nearest to where it is expected.
        lowest = math.ceil(middle - 0.5 * protocol.modulus)
        sums = np.mod(sums.astype(np.int64) - lowest, protocol.modulus).astype(np.uint64)
        middle -= lowest
    if sums.dtype.kind == "f":
        return ((sums - middle) * factor).astype(np.float32)
    mean = scratch.floats(protocol.dim)
    if protocol.rotate:
        kernels.centre_and_rotate(sums, middle, factor, protocol.rotation_signs(round), mean)
    else:
        kernels.centre(sums, middle, factor, mean)
    return mean
