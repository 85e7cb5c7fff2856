"""Messages as bytes: `Request` and `Pair`; and a model's arrays as one vector.

A request is laid out like this:

| bytes | field |
|---|---|
| 4 | magic, `cpsf` |
| 1 | version |
| 1 | stage, by its place in `STAGES` |
| 8 each | round, rounds, surviving, examples |
| 4 | length of the protocol |
| 4 | CRC-32C of everything else |
| | the protocol as JSON in UTF-8, then the stage's message of secure aggregation up to the end |

Integers are unsigned, least significant byte first. An answer needs no frame of its own: it is the client's message of
secure aggregation, or without it the protocol's message, which both name their version, protocol and round.

A request or answer of the round that runs travels together with one of the next round, which is prepared meanwhile:

| bytes | field |
|---|---|
| 4 | magic, `cpsp` |
| 1 | version, 1 |
| 1 | 1 if the second is the reason for having no answer, else 0 |
| 4 | length of the first |
| | the request or answer of the round that runs, then that of the next round |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec import wire
from cpsgd.errors import (
    ChecksumError,
    MagicError,
    ParameterError,
    StageError,
    TrailingBytesError,
    TruncatedError,
    VectorError,
    VersionError,
    WireError,
)
from cpsgd.protocol import Protocol
from cpsgd.secagg import Stage

MAGIC = b"cpsf"
VERSION = 2
"""Version 1 were Flower's records of release 0.1.0."""

STAGES = (Stage.UPLOAD, Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)
"""The stages of a client's part in a round."""

OPENING = (Stage.UPLOAD, Stage.ADVERTISE)
"""The stages that begin a client's part in a round; their requests carry the protocol."""

TRAINING = (Stage.UPLOAD, Stage.MASK)
"""The stages in which a client trains; the engine sends the model along."""

REVEALING = (Stage.UPLOAD, Stage.UNMASK)
"""The stages whose answers reveal the sum."""

AHEAD = {Stage.CONFIRM: Stage.ADVERTISE, Stage.UNMASK: Stage.SHARE}
"""By a stage of the round that runs: the stage of the next round that may come with it."""

Arrays = Mapping[str, NDArray[Any]]
"""A model: its arrays by name, in an order that all sides keep."""

MAX_PROTOCOL_BYTES = 1 << 16
MAX_REQUEST_BYTES = 1 << 28
_FIELDS = struct.Struct("<4sBBQQQQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_LARGEST = 2**64 - 1


@dataclass(frozen=True)
class Request:
    """A server's request to a client.

    Attributes:
        stage: The stage, one of `STAGES`.
        round: Number of the round.
        rounds: Rounds that the server means to run in all.
        surviving: The fewest uploads of which the server will release a mean.
        protocol: The protocol as JSON, in the requests that begin a client's part in a round.
        payload: The stage's message of secure aggregation, empty without.
        examples: The most examples of a client's sum where single examples are protected, 0 where whole clients are.

    Example:
        >>> request = Request(Stage.SHARE, round=3, rounds=30, surviving=9, payload=b"keys")
        >>> Request.from_bytes(request.to_bytes()) == request
        True
    """

    stage: Stage
    round: int
    rounds: int
    surviving: int
    protocol: str = ""
    payload: bytes = b""
    examples: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise StageError(f"No client is asked for stage {self.stage!r}.")
        _validate.integer("round", self.round, low=0, high=wire.MAX_ROUND)
        for name in ("rounds", "surviving", "examples"):
            _validate.integer(name, getattr(self, name), low=0, high=_LARGEST)

    def to_bytes(self) -> bytes:
        """Returns the request as one message."""
        protocol = self.protocol.encode()
        if len(protocol) > MAX_PROTOCOL_BYTES:
            raise ParameterError(f"Expected a protocol of at most {MAX_PROTOCOL_BYTES} bytes, got {len(protocol)}.")
        numbers = self.round, self.rounds, self.surviving, self.examples
        fields = _FIELDS.pack(MAGIC, VERSION, STAGES.index(self.stage), *numbers, len(protocol))
        checksum = _CHECKSUM.pack(wire.checksum(fields, protocol, self.payload))
        return b"".join((fields, checksum, protocol, self.payload))

    @classmethod
    def from_bytes(cls, data: bytes) -> Request:
        """Reads what `to_bytes` wrote.

        Raises:
            VersionError: The server speaks another version.
            StageError: There is no such stage.
            WireError: The bytes are damaged, or no request.
        """
        if not isinstance(data, bytes):
            raise WireError(f"Expected a request as bytes, got {type(data).__name__}.")
        if len(data) > MAX_REQUEST_BYTES:
            raise TrailingBytesError(f"A request has at most {MAX_REQUEST_BYTES} bytes, got {len(data)}.")
        if not data.startswith(MAGIC):
            raise MagicError("Not a request: the first four bytes are not 'cpsf'.")
        if len(data) > len(MAGIC) and data[len(MAGIC)] != VERSION:
            raise VersionError(
                f"The server speaks version {data[len(MAGIC)]} of the requests, and this client version {VERSION}: "
                "install the same release on both."
            )
        if len(data) < HEADER_BYTES:
            raise TruncatedError(f"A request has at least {HEADER_BYTES} bytes, got {len(data)}.")
        _, _, stage, round, rounds, surviving, examples, length = _FIELDS.unpack_from(data)
        body = memoryview(data)[HEADER_BYTES:]
        if length > min(len(body), MAX_PROTOCOL_BYTES):
            raise TruncatedError(f"The request announces a protocol of {length} bytes, and {len(body)} are there.")
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != wire.checksum(data[: _FIELDS.size], body):
            raise ChecksumError("The checksum does not match: the request was damaged on the way.")
        if stage >= len(STAGES):
            raise StageError(f"There is no stage of number {stage}.")
        try:
            protocol = str(body[:length], "utf-8")
        except UnicodeDecodeError:
            raise WireError("The request's protocol is not a text in UTF-8.") from None
        return cls(STAGES[stage], round, rounds, surviving, protocol, bytes(body[length:]), examples)


@lru_cache(maxsize=16)
def read_protocol(text: str) -> Protocol:
    """Returns the protocol of a request, which is the same in all rounds of a run."""
    return Protocol.from_json(text)


PAIR_MAGIC = b"cpsp"
PAIR_VERSION = 1
MAX_REASON_BYTES = 1 << 10
_PAIR = struct.Struct("<4sBBI")


@dataclass(frozen=True)
class Pair:
    """Two requests to a client, or its two answers: for the running round and for the next one.

    Attributes:
        first: Of the round that runs.
        second: Of the next round; in an answer it may instead be the reason for a refusal.
        refused: Whether `second` is such a reason.

    Example:
        >>> Pair.from_bytes(Pair(b"one", b"two").to_bytes())
        Pair(first=b'one', second=b'two', refused=False)
    """

    first: bytes
    second: bytes
    refused: bool = False

    @staticmethod
    def begins(data: object) -> bool:
        """Returns whether these bytes begin like a pair."""
        return isinstance(data, bytes) and data.startswith(PAIR_MAGIC)

    @classmethod
    def without(cls, first: bytes, reason: str) -> Pair:
        """Returns the answer for the running round, paired with the reason for having none for the next."""
        return cls(first, reason.encode()[:MAX_REASON_BYTES], refused=True)

    @property
    def reason(self) -> str:
        """The reason for having no second answer."""
        return self.second[:MAX_REASON_BYTES].decode(errors="replace")

    def to_bytes(self) -> bytes:
        """Returns both as one message."""
        return _PAIR.pack(PAIR_MAGIC, PAIR_VERSION, self.refused, len(self.first)) + self.first + self.second

    @classmethod
    def from_bytes(cls, data: bytes) -> Pair:
        """Reads what `to_bytes` wrote. Neither part is read.

        Raises:
            VersionError: The other side speaks another version.
            WireError: The bytes are no pair.
        """
        if not cls.begins(data):
            raise MagicError("Not a pair: the first four bytes are not 'cpsp'.")
        if len(data) > 2 * MAX_REQUEST_BYTES:
            raise TrailingBytesError(f"A pair has at most {2 * MAX_REQUEST_BYTES} bytes, got {len(data)}.")
        if len(data) < _PAIR.size:
            raise TruncatedError(f"A pair has at least {_PAIR.size} bytes, got {len(data)}.")
        _, version, refused, length = _PAIR.unpack_from(data)
        if version != PAIR_VERSION:
            raise VersionError(
                f"The other side speaks version {version} of pairs, and this one version {PAIR_VERSION}: install the "
                "same release on both."
            )
        if refused > 1 or length > len(data) - _PAIR.size:
            raise WireError("The pair contradicts itself.")
        end = _PAIR.size + length
        return cls(data[_PAIR.size : end], data[end:], bool(refused))


# ---------------------------------------------------------------------- models


def flatten(arrays: Arrays, dim: int) -> NDArray[np.float32]:
    """Returns all arrays one after the other as one vector.

    Raises:
        ParameterError: They are not float arrays of `dim` coordinates in all, or none.
    """
    if not arrays:
        raise ParameterError("The model has no arrays.")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise ParameterError(
                f"The model's array {name!r} is of type {array.dtype}, and only floats can be averaged. Leave counters "
                "and the like out of the arrays that travel."
            )
    size = sum(array.size for array in arrays.values())
    if size != dim:
        raise ParameterError(f"The model has {size} coordinates and the plan {dim}; plan with dim={size}.")
    return np.concatenate([array.ravel() for array in arrays.values()]).astype(np.float32)


def unflatten(vector: NDArray[np.float32], like: Arrays) -> dict[str, NDArray[Any]]:
    """Returns the vector as arrays with the names, shapes and types of `like`."""
    arrays, start = {}, 0
    for name, array in like.items():
        arrays[name] = vector[start : start + array.size].reshape(array.shape).astype(array.dtype)
        start += array.size
    return arrays


def check_alike(found: Arrays, sent: Arrays) -> None:
    """Refuses a train function's result if its arrays differ in name or shape from those sent.

    Raises:
        VectorError: Their names, order or shapes differ.
    """
    one, other = ([(name, array.shape) for name, array in arrays.items()] for arrays in (found, sent))
    if one != other:
        raise VectorError("The train function returned other arrays (names, order or shapes) than it was sent.")
