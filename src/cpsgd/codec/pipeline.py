"""All stages in one go: vector to message, and sums of messages back to a mean.

The public path. It needs one vector of float32 and one block of keystream beside its output; the integers between
rounding and packing never leave the processor's first-level cache. The protocol's mechanism brings what is particular
to it; everything here is the same for all.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.codec import clip, wire
from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Grid, Vector
from cpsgd.codec.pack import Format, Sums
from cpsgd.errors import VectorError
from cpsgd.randomness import SLACK, Keystream

# Bytes of keystream that are drawn at a time: few enough for the cache, and enough to hide what happens between calls,
# above all that threads wait for each other there.
_BLOCK_BYTES = 3 << 19
LARGEST_KEPT = 1 << 24
"""The most numbers of a type that a thread keeps; longer vectors take new memory in each call."""

_LINE = 64
_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
# float32 factors outside this interval would lose digits on their own; such vectors take the float64 kernels.
_FLOAT32_FACTORS = (1e-30, 1e30)


class Parameters(Protocol):
    """The parameters of a round that encoding and decoding need: a `cpsgd.protocol.Protocol`."""

    def __hash__(self) -> int: ...

    @property
    def clients(self) -> int:
        """Messages that a round is planned for."""

    @property
    def dim(self) -> int:
        """Coordinates of a vector."""

    @property
    def clip_norm(self) -> float:
        """Bound on a vector's norm."""

    @property
    def rotate(self) -> bool:
        """Whether vectors are rotated."""

    @property
    def modulus(self) -> int | None:
        """Modulus of sums, or None."""

    @property
    def mechanism(self) -> Any:
        """The mechanism, which rounds coordinates and adds noise."""

    @property
    def format(self) -> Format:
        """The layout of messages."""

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that identify all parameters."""

    def rotation_signs(self, round: int) -> NDArray[np.uint8]:
        """Returns the public signs of a round's rotation."""


@dataclass(frozen=True, eq=False)
class _Stages:
    """The parts of a protocol that encoding and decoding need, computed once."""

    grid: Grid | None
    norm_limit: float
    format: Format
    kernel: Any
    keystream_bytes: int
    inheriting_bytes: int
    block: int
    packer: Any
    packer_bytes: int
    packer_block: int
    fingerprint: bytes


@lru_cache(maxsize=64)
def _stages(protocol: Parameters) -> _Stages:
    """Returns the cached parts of the pipeline, the same for all vectors of a protocol."""
    mechanism, form, grid = protocol.mechanism, protocol.format, protocol.mechanism.grid

    def block(width: int) -> int:
        return max(1, _BLOCK_BYTES // width // form.step) * form.step

    packer, packer_bytes = mechanism.packer()
    return _Stages(
        grid=grid,
        norm_limit=mechanism.norm_limit(protocol.clip_norm),
        format=form,
        kernel=mechanism.kernel(),
        keystream_bytes=mechanism.keystream_bytes,
        inheriting_bytes=mechanism.inheriting_bytes,
        block=block(mechanism.keystream_bytes),
        packer=packer,
        packer_bytes=packer_bytes,
        packer_block=block(packer_bytes),
        fingerprint=protocol.fingerprint,
    )


def as_vector(vector: ArrayLike, dim: int) -> Vector:
    """Returns the vector as a contiguous array of float32 or float64.

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


def to_grid(protocol: Parameters, vector: Vector, round: int) -> NDArray[np.float32]:
    """Clips and rotates: returns the vector in grid units, with its norm within the protocol's bound."""
    return _to_grid(protocol, _stages(protocol), vector, round, floats(protocol.dim))


def _to_grid(
    protocol: Parameters, stages: _Stages, vector: Vector, round: int, points: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Writes the vector in grid units to `points`."""
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


Seeds = Any
"""A client's state of noise (`NoiseMemory.update`), such as seeds, newest first; None for fresh noise."""


def encode(
    protocol: Parameters, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> bytes:
    """Returns one client's message. `keystream` is for tests; by default it comes from the operating system."""
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
    points = take(protocol.dim)
    try:
        _to_grid(protocol, stages, checked, round, points)
        held_points = points if chosen is None else points[chosen]
        _write_payload(stages, held_points, stream, inherited, message[wire.HEADER_BYTES :])
    finally:
        give_back(points)
    protocol.mechanism.memory.encoded(seeds, round)
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
    """Writes the payload, block by block."""
    width = stages.packer_bytes if inherited is None else stages.inheriting_bytes
    block = stages.packer_block
    buffer = take(min(block, points.size) * width + SLACK, _BYTE)
    block_bytes = stages.format.payload_bytes(block)
    try:
        for number, start in enumerate(range(0, points.size, block)):
            part = points[start : start + block]
            words = stream.fill(buffer, part.size * width)
            packer = stages.packer if inherited is None else stages.packer.after(inherited[start : start + block])
            stages.format.write(packer, part, words, payload[number * block_bytes : (number + 1) * block_bytes])
    finally:
        give_back(buffer)


def integers(
    protocol: Parameters, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> NDArray[np.uint32]:
    """Returns one client's integers, unpacked, for transports that add them up themselves.

    `keystream` is for tests; the same one yields the integers that `encode` packs.
    """
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    checked = as_vector(vector, protocol.dim)
    inherited = protocol.mechanism.memory.inherited(seeds, round, protocol.dim)
    stages = _stages(protocol)
    stream = Keystream() if keystream is None else keystream
    values = np.empty(protocol.dim, dtype=np.uint32)
    points = take(protocol.dim)
    width = stages.keystream_bytes if inherited is None else stages.inheriting_bytes
    buffer = take(min(stages.block, protocol.dim) * width + SLACK, _BYTE)
    try:
        _to_grid(protocol, stages, checked, round, points)
        for start in range(0, points.size, stages.block):
            part = points[start : start + stages.block]
            words = stream.fill(buffer, part.size * width)
            end = start + stages.block
            kernel = stages.kernel if inherited is None else stages.kernel.after(inherited[start:end])
            kernel.values(part, words, values[start:end])
    finally:
        give_back(buffer)
        give_back(points)
    protocol.mechanism.memory.encoded(seeds, round)
    return values


def decode(protocol: Parameters, sums: Sums, count: int, round: int) -> NDArray[np.float32]:
    """Returns the mean of `count` clients' vectors from the sums of their messages, modulo the modulus if any."""
    protocol.mechanism.memory.check_messages(count, protocol.clients)
    middle: float = count * protocol.mechanism.centre
    factor: float = protocol.mechanism.scale / count
    if protocol.modulus is not None:
        # The sum is the representative nearest to where it is expected.
        lowest = math.ceil(middle - 0.5 * protocol.modulus)
        sums = np.mod(sums.astype(np.int64) - lowest, protocol.modulus).astype(np.uint64)
        middle -= lowest
    if sums.dtype.kind == "f":
        return ((sums - middle) * factor).astype(np.float32)
    mean = floats(protocol.dim)
    if protocol.rotate:
        kernels.centre_and_rotate(sums, middle, factor, protocol.rotation_signs(round), mean)
    else:
        kernels.centre(sums, middle, factor, mean)
    return mean


# ---------------------------------------------------------------------- memory that a thread keeps from call to call
#
# Rows of the transform begin on a cache line, so that none is read or written twice. Large arrays are fresh pages of
# the operating system each time, which costs as much as a pass of the transform. So each thread keeps one array per
# type: the vector's numbers, and the keystream that makes noise of them.


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[np.dtype[Any], NDArray[Any]] = {}


_kept = _Kept()


def floats(size: int) -> NDArray[np.float32]:
    """Returns `size` uninitialised float32 numbers that begin on a cache line."""
    return _aligned(size, _FLOAT)


def _aligned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an uninitialised array that begins on a cache line."""
    memory = np.empty(size + _LINE // dtype.itemsize, dtype=dtype)
    start = -memory.ctypes.data % _LINE // dtype.itemsize
    return memory[start : start + size]


def take(size: int, dtype: np.dtype[Any] = _FLOAT) -> NDArray[Any]:
    """Returns an uninitialised aligned array of the calling thread; `give_back` it at the end of the call."""
    # Taken, not shared: a call inside the call, by a signal's handler for one, finds none and gets its own.
    kept = _kept.arrays.pop(dtype, None)
    return kept if kept is not None and kept.size == size else _aligned(size, dtype)


def give_back(taken: NDArray[Any]) -> None:
    """Stores an array from `take` for the thread's next call."""
    if taken.size <= LARGEST_KEPT:
        _kept.arrays[taken.dtype] = taken
