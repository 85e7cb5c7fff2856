"""All stages in one go: vector to message, and sums of messages back to a mean.

The public path. It needs one scratch vector of float32 and one block of keystream beside its output; the integers
between rounding and packing never leave the processor's first-level cache. What happens to a coordinate is for the
protocol's mechanism to say; everything here is the same for all of them.
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
from cpsgd.codec import clip, wire
from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Vector
from cpsgd.codec.formats import Chosen, Format, Sums
from cpsgd.errors import VectorError
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# Keystream is drawn in blocks of a quarter of the (float32) input's bytes, within these bounds: large enough to hide
# the cost of a call, small enough for the second-level cache and for the memory it takes beside the input's.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 18
# float32 factors outside this interval would lose digits on their own; such vectors take the float64 kernels.
_FLOAT32_FACTORS = (1e-30, 1e30)


@dataclass(frozen=True, eq=False)
class _Stages:
    """What the stages of a protocol need, worked out once."""

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
    mechanism, form = protocol.mechanism, protocol.format
    block_bytes = min(max(protocol.dim, _SMALLEST_BLOCK), _LARGEST_BLOCK)

    def block(width: int) -> int:
        return max(1, block_bytes // width // form.step) * form.step

    packer, packer_bytes = mechanism.packer()
    return _Stages(
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
    dtype = np.float32 if array.dtype in (np.float32, np.float16) else np.float64
    # The kernels need native, contiguous and aligned numbers; only a vector that is not is copied.
    return np.require(array, dtype, ["C", "ALIGNED"])


def to_grid(protocol: Protocol, vector: Vector, round: int) -> NDArray[np.float32]:
    """Clips and rotates: the vector in grid units, with its norm and coordinates within the protocol's bounds."""
    grid = protocol.mechanism.grid
    protocol.mechanism.rotation_round(round)  # refuses rounds that a run does not have, rotated or not
    factor = clip.factor(vector, protocol.clip_norm) * (1.0 if grid is None else grid.unit)
    low, high = _FLOAT32_FACTORS
    if not low < factor < high:
        vector = vector.astype(np.float64)
    points = np.empty(protocol.dim, dtype=np.float32)
    if protocol.rotate:
        kernels.rotate_forward(vector, factor, protocol.rotation_signs(round), points)
    else:
        kernels.scale(vector, factor, points)
    if grid is not None:
        # Rounded down, so that the norm is within D also for the exact quotient.
        norm_limit = protocol.clip_norm * grid.unit * (1.0 - 2.0**-48)
        clip.enforce(points, norm_limit=norm_limit, coordinate_limit=grid.limit)
    return points


Seeds = Sequence[bytes | None] | None
"""Those of a client's lineage, the newest first, where noise is correlated; None where it begins one."""


def encode(
    protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> bytes:
    """One client's message. `keystream` is for tests; without it, fresh noise from the operating system's generator."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    checked = as_vector(vector, protocol.dim)
    inherited = None if seeds is None else protocol.mechanism.continued(seeds, round, protocol.dim)
    stages = _stages(protocol)
    stream = Keystream() if keystream is None else keystream
    message_id = os.urandom(16)
    chosen = stages.format.chosen(message_id, protocol.dim)
    held = protocol.dim if chosen is None else chosen.size
    message = np.empty(wire.HEADER_BYTES + stages.format.payload_bytes(held), dtype=np.uint8)
    _write_payload(protocol, checked, round, stream, chosen, inherited, message[wire.HEADER_BYTES :])
    wire.write_header(
        message,
        radix=stages.format.radix,
        fingerprint=stages.fingerprint,
        round=round,
        message_id=message_id,
        dim=protocol.dim,
        version=stages.format.version,
    )
    return message.tobytes()


def _write_payload(
    protocol: Protocol,
    vector: Vector,
    round: int,
    stream: Keystream,
    chosen: Chosen,
    inherited: NDArray[np.int64] | None,
    payload: NDArray[np.uint8],
) -> None:
    """Block by block. Apart, so that the scratch vector is gone when the message is copied."""
    points = to_grid(protocol, vector, round)
    if chosen is not None:
        points = points[chosen]
    stages = _stages(protocol)
    width, block = stages.packer_bytes, stages.packer_block
    buffer = stream.buffer(min(block, points.size) * width)
    block_bytes = stages.format.payload_bytes(block)
    for number, start in enumerate(range(0, points.size, block)):
        part = points[start : start + block]
        words = stream.fill(buffer, part.size * width)
        packer = stages.packer if inherited is None else stages.packer.after(inherited[start : start + block])
        stages.format.write(packer, part, words, payload[number * block_bytes : (number + 1) * block_bytes])


def integers(
    protocol: Protocol, vector: ArrayLike, round: int, keystream: Keystream | None = None, seeds: Seeds = None
) -> NDArray[np.uint32]:
    """One client's integers, unpacked, for transports that add them up themselves.

    `keystream` is for tests; the same one yields the integers that `encode` packs.
    """
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    points = to_grid(protocol, as_vector(vector, protocol.dim), round)
    inherited = None if seeds is None else protocol.mechanism.continued(seeds, round, protocol.dim)
    stages = _stages(protocol)
    stream = Keystream() if keystream is None else keystream
    buffer = stream.buffer(min(stages.block, points.size) * stages.keystream_bytes)
    values = np.empty(protocol.dim, dtype=np.uint32)
    for start in range(0, points.size, stages.block):
        part = points[start : start + stages.block]
        words = stream.fill(buffer, part.size * stages.keystream_bytes)
        kernel = stages.kernel if inherited is None else stages.kernel.after(inherited[start : start + stages.block])
        kernel.values(part, words, values[start : start + stages.block])
    return values


def decode(protocol: Protocol, sums: Sums, count: int, round: int) -> NDArray[np.float32]:
    """The mean of `count` clients' vectors from the sums of their messages (modulo the modulus, where there is one)."""
    protocol.mechanism.check_messages(count, protocol.clients)
    middle, factor = count * protocol.mechanism.centre, protocol.mechanism.scale / count
    if protocol.modulus is not None:
        # The sum is the representative nearest to where it is expected.
        lowest = math.ceil(middle - 0.5 * protocol.modulus)
        sums = np.mod(sums.astype(np.int64) - lowest, protocol.modulus).astype(np.uint64)
        middle -= lowest
    if sums.dtype.kind == "f":
        mean = ((sums - middle) * factor).astype(np.float32)
    else:
        mean = np.empty(protocol.dim, dtype=np.float32)
        kernels.centre(sums, middle, factor, mean)
    if protocol.rotate:
        kernels.rotate_backward(mean, protocol.rotation_signs(round))
    return mean
