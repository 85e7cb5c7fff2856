"""Frames from outside: every refusal, by name. What the aggregator adds to this is in tests/test_aggregator.py."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pack, wire
from cpsgd.codec._kernels import kernels
from cpsgd.errors import (
    ChecksumError,
    DimensionError,
    MagicError,
    TrailingBytesError,
    TruncatedError,
    ValueRangeError,
    VersionError,
    WireError,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "wire-format.json").read_text())

VARIABLE = json.loads((Path(__file__).parents[1] / "data" / "wire-format-2.json").read_text())


def frame(radix: int = 16, dim: int = 5, payload: bytes | None = None) -> bytes:
    body = bytes(pack.payload_bytes(dim, radix)) if payload is None else payload
    buffer = np.frombuffer(bytes(wire.HEADER_BYTES) + body, np.uint8).copy()
    wire.write_header(buffer, radix=radix, fingerprint=b"f" * 16, round=3, message_id=b"i" * 16, dim=dim)
    return buffer.tobytes()


def variable_frame(payload: bytes = b"abc", dim: int = 40) -> bytes:
    """A frame of version 2."""
    buffer = np.frombuffer(bytes(wire.HEADER_BYTES) + payload, np.uint8).copy()
    header: dict[str, Any] = {"radix": 2, "fingerprint": b"f" * 16, "round": 3, "message_id": b"i" * 16, "dim": dim}
    wire.write_header(buffer, **header, version=wire.VARIABLE)
    return buffer.tobytes()


def resealed(message: bytes) -> bytes:
    """The message with its checksum put right, as a hostile client would."""
    data = np.frombuffer(message, np.uint8)
    checksum = kernels.crc32c(data[64:], kernels.crc32c(data[:60]))
    return message[:60] + struct.pack("<I", checksum) + message[64:]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_committed_vectors(vector: dict[str, object]) -> None:
    message = bytes.fromhex(str(vector["message"]))
    parsed = wire.read(message)
    protocol = Protocol.from_dict(vector["protocol"])
    assert parsed.fingerprint == protocol.fingerprint
    assert parsed.fingerprint.hex() == vector["fingerprint"]
    assert (parsed.radix, parsed.dim, parsed.round) == (protocol.radix, protocol.dim, vector["round"])
    assert parsed.message_id.hex() == vector["message_id"]
    if protocol.mechanism.grid is not None:
        assert pack.backward(parsed.payload, parsed.dim, parsed.radix).tolist() == vector["values"]
    else:
        assert np.frombuffer(parsed.payload, "<f4").tolist() == vector["values"]
    rebuilt = np.frombuffer(message, np.uint8).copy()
    rebuilt[:64] = 0
    wire.write_header(
        rebuilt,
        radix=parsed.radix,
        fingerprint=parsed.fingerprint,
        round=parsed.round,
        message_id=parsed.message_id,
        dim=parsed.dim,
    )
    assert rebuilt.tobytes() == message


@pytest.mark.parametrize("vector", VARIABLE, ids=lambda v: v["name"])
def test_committed_vectors_of_version_2(vector: dict[str, Any]) -> None:
    message = bytes.fromhex(vector["message"])
    parsed = wire.read(message)
    protocol = Protocol.from_dict(vector["protocol"])
    assert parsed.fingerprint == protocol.fingerprint
    assert parsed.fingerprint.hex() == vector["fingerprint"]
    assert (parsed.version, parsed.radix, parsed.dim, parsed.round) == (2, 2, protocol.dim, vector["round"])
    assert parsed.message_id.hex() == vector["message_id"]
    chosen = protocol.format.chosen(parsed.message_id, protocol.dim)
    assert chosen is not None
    assert chosen.tolist() == vector["positions"]
    assert pack.backward(parsed.payload, chosen.size, 2).tolist() == vector["values"]
    aggregator = Aggregator(protocol, parsed.round)
    aggregator.add(message)
    sums = np.ones(protocol.dim, np.int64)
    sums[vector["positions"]] += 2 * np.array(vector["values"]) - 1
    np.testing.assert_array_equal(aggregator.sums, sums)
    rebuilt = np.frombuffer(message, np.uint8).copy()
    rebuilt[:64] = 0
    wire.write_header(
        rebuilt,
        radix=parsed.radix,
        fingerprint=parsed.fingerprint,
        round=parsed.round,
        message_id=parsed.message_id,
        dim=parsed.dim,
        version=parsed.version,
    )
    assert rebuilt.tobytes() == message


def test_the_positions_of_a_committed_vector_from_their_definition() -> None:
    (vector,) = VARIABLE
    key = hashlib.sha256(b"cpsgd sampled coordinates v1" + bytes.fromhex(vector["message_id"])).digest()[:16]
    dim = vector["protocol"]["dim"]
    stream = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * dim))
    words = struct.unpack(f"<{dim}H", stream)
    assert [j for j, word in enumerate(words) if word < vector["protocol"]["rate"] * 2**16] == vector["positions"]


def test_header_is_64_bytes() -> None:
    assert wire.HEADER_BYTES == 64


@pytest.mark.parametrize("size", [0, 1, 63, 64, 66])
def test_truncated(size: int) -> None:
    with pytest.raises(TruncatedError):
        wire.read(frame()[:size])


def test_trailing_bytes() -> None:
    with pytest.raises(TrailingBytesError):
        wire.read(frame() + b"\0")


def test_magic() -> None:
    with pytest.raises(MagicError):
        wire.read(b"CPSG" + frame()[4:])


@pytest.mark.parametrize("position", [4, 5, 6, 7])
def test_version(position: int) -> None:
    message = bytearray(frame())
    message[position] ^= 2
    with pytest.raises(VersionError):
        wire.read(resealed(bytes(message)))


@pytest.mark.parametrize("payload", [b"", b"a", b"abc"])
def test_a_frame_of_version_2_says_its_length(payload: bytes) -> None:
    message = variable_frame(payload)
    parsed = wire.read(message)
    assert (parsed.version, parsed.radix, parsed.payload.tobytes()) == (2, 2, payload)
    assert message[8:12] == struct.pack("<I", len(payload))
    with pytest.raises(TruncatedError):
        wire.read(message[:-1])
    with pytest.raises(TrailingBytesError):
        wire.read(message + b"\0")
    with pytest.raises(TruncatedError):
        wire.read(resealed(message[:8] + struct.pack("<I", 2**32 - 1) + message[12:]))


def test_a_reader_may_ask_for_a_version() -> None:
    assert wire.read(frame(), version=1).version == 1
    assert wire.read(variable_frame(), version=2).version == 2
    with pytest.raises(VersionError, match=r"has version 2, .* have version 1: .* Encode it with the same protocol"):
        wire.read(variable_frame(), version=1)
    with pytest.raises(VersionError, match=r"has version 1, .* have version 2"):
        wire.read(frame(), version=2)


@pytest.mark.parametrize("dim", [0, 101, 2**40, 2**64 - 1])
def test_dimension_is_checked_before_anything_is_allocated(dim: int) -> None:
    message = bytearray(frame())
    message[52:60] = struct.pack("<Q", dim)
    tracemalloc.start()
    try:
        with pytest.raises(DimensionError):
            wire.read(resealed(bytes(message)), max_dim=100)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_radix_one() -> None:
    message = bytearray(frame())
    message[8:12] = struct.pack("<I", 1)
    with pytest.raises(ValueRangeError):
        wire.read(resealed(bytes(message)))


@pytest.mark.parametrize("message", [frame(dim=40), variable_frame()], ids=["fixed", "variable"])
def test_every_flipped_bit_is_noticed(message: bytes) -> None:
    for bit in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.read(bytes(damaged))


def test_checksum() -> None:
    message = bytearray(frame())
    message[-1] ^= 1
    with pytest.raises(ChecksumError):
        wire.read(bytes(message))


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read(data)


@settings(max_examples=500, deadline=None)
@given(tail=st.binary(max_size=200), version=st.sampled_from([b"\x01", b"\x02"]))
def test_arbitrary_bytes_behind_a_good_start_raise_only_wire_errors(tail: bytes, version: bytes) -> None:
    with pytest.raises(WireError):
        wire.read(b"cpsg" + version + b"\x00\x00\x00" + tail)
