"""The message formats: a header of 64 bytes, then the payload. Specified in docs/wire-format.md, with test vectors."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack
from cpsgd.codec._kernels import kernels
from cpsgd.codec.pack import VARIABLE as VARIABLE
from cpsgd.codec.pack import VERSION as VERSION
from cpsgd.errors import (
    ChecksumError,
    DimensionError,
    MagicError,
    TrailingBytesError,
    TruncatedError,
    ValueRangeError,
    VersionError,
)

MAGIC = b"cpsg"
# magic, version, reserved, radix or payload bytes, fingerprint, round, message id, dimension; then the checksum.
_FIELDS = struct.Struct("<4sHHI16sQ16sQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MAX_ROUND = 2**64 - 1
# A message may not announce more coordinates than this unless the receiver expects them.
DEFAULT_MAX_DIM = 2**28


@dataclass(frozen=True)
class Message:
    """A message whose frame is sound. The aggregator checks that it belongs to its protocol and round."""

    radix: int
    fingerprint: bytes
    round: int
    message_id: bytes
    dim: int
    payload: NDArray[np.uint8]
    version: int


def write_header(
    buffer: NDArray[np.uint8],
    *,
    radix: int,
    fingerprint: bytes,
    round: int,
    message_id: bytes,
    dim: int,
    version: int = VERSION,
) -> None:
    """Completes a message whose payload already stands in `buffer` behind room for the header."""
    third = radix if version == VERSION else buffer.size - HEADER_BYTES
    _FIELDS.pack_into(buffer.data, 0, MAGIC, version, 0, third, fingerprint, round, message_id, dim)
    head = kernels.crc32c(buffer[: _FIELDS.size])
    _CHECKSUM.pack_into(buffer.data, _FIELDS.size, kernels.crc32c(buffer[HEADER_BYTES:], head))


def read(
    data: bytes | bytearray | memoryview, *, max_dim: int = DEFAULT_MAX_DIM, version: int | None = None
) -> Message:
    """Checks the frame of a message from outside. Allocates nothing: the payload is a view of `data`.

    Args:
        data: The message.
        max_dim: The most coordinates that it may announce.
        version: The version that it must have; by default any that there is.

    Raises:
        WireError: One of its subclasses, for the first thing that is wrong.
    """
    buffer = np.frombuffer(data, dtype=np.uint8)
    if buffer.size < HEADER_BYTES:
        raise TruncatedError(f"A message has at least {HEADER_BYTES} bytes, got {buffer.size}.")
    magic, found, reserved, third, fingerprint, round, message_id, dim = _FIELDS.unpack_from(buffer.data)
    if magic != MAGIC:
        raise MagicError("Not a cpsgd message: the first four bytes are not 'cpsg'.")
    if found not in (VERSION, VARIABLE) or reserved != 0:
        raise VersionError(
            f"Message version {found}.{reserved} is not readable here; this release reads {VERSION}.0 and {VARIABLE}.0."
        )
    if version not in (None, found):
        raise VersionError(
            f"The message has version {found}, and this protocol's messages have version {version}: it was made with "
            "another protocol, or by a release that does not know this one. Encode it with the same protocol."
        )
    if not 1 <= dim <= max_dim:
        raise DimensionError(f"The message announces {dim} coordinates; between 1 and {max_dim} are accepted.")
    radix = third if found == VERSION else 2
    if radix == 1:
        raise ValueRangeError("A radix of 1 holds no information.")
    expected = HEADER_BYTES + (pack.payload_bytes(dim, radix) if found == VERSION else third)
    if buffer.size < expected:
        raise TruncatedError(f"The message should have {expected} bytes, got {buffer.size}.")
    if buffer.size > expected:
        raise TrailingBytesError(f"The message should have {expected} bytes, got {buffer.size}.")
    if _CHECKSUM.unpack_from(buffer.data, _FIELDS.size)[0] != checksum(buffer[: _FIELDS.size], buffer[HEADER_BYTES:]):
        raise ChecksumError("The checksum does not match: the message was damaged on the way. Ask for it again.")
    return Message(radix, fingerprint, round, message_id, dim, buffer[HEADER_BYTES:], found)


def checksum(*parts: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """Returns the CRC-32C of bytes that follow one another."""
    state = 0
    for part in parts:
        state = kernels.crc32c(np.frombuffer(part, dtype=np.uint8), state)
    return state
