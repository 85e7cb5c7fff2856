"""Handing a lineage on: what the server asks a client that leaves, and one that comes in its place.

Three small requests before a round. The client that comes is asked for a *key*; the one that leaves is told the key and
asked to *give* its seeds, sealed; and the one that comes is asked to *take* them. The server carries bytes that it
cannot read. Who stays from round to round is asked for nothing: it keeps its own seeds.

| bytes | field |
|---|---|
| 4 | magic, `cpsh` |
| 1 | version |
| 1 | 0 for key, 1 for give, 2 for take |
| 8 | round |
| 4 each | lineage, bands |
| 16 | the protocol's fingerprint |
| 4 | CRC-32C of everything else |
| | give: the other's public key of 32 bytes; take: the baton |

An answer has the magic, the version and the kind, and then the public key, the baton, or nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from cpsgd.codec import wire
from cpsgd.errors import BatonError, RoundRefusedError, VersionError
from cpsgd.federation.batons import Place
from cpsgd.federation.settings import Memory, Signing
from cpsgd.secagg import keys

MAGIC = b"cpsh"
VERSION = 1
_FIELDS = struct.Struct("<4sBBQII16s")
_CHECKSUM = struct.Struct("<I")
_ANSWER = struct.Struct("<4sBB")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Step(IntEnum):
    """What is asked for."""

    KEY = 0
    GIVE = 1
    TAKE = 2


@dataclass(frozen=True)
class Handover:
    """A request.

    Attributes:
        step: What is asked for.
        place: The federation, round and lineage it is about; the run is not sent, for the client knows it.
        body: The public key or the baton.
    """

    step: Step
    place: Place
    body: bytes = b""

    @staticmethod
    def begins(data: object) -> bool:
        """Whether these bytes are meant to be such a request."""
        return isinstance(data, bytes) and data.startswith(MAGIC)

    def to_bytes(self) -> bytes:
        """The request as one message."""
        place = self.place
        numbers = self.step, place.round, place.lineage, place.bands
        fields = _FIELDS.pack(MAGIC, VERSION, *numbers, place.fingerprint)
        return fields + _CHECKSUM.pack(wire.checksum(fields, self.body)) + self.body

    @classmethod
    def from_bytes(cls, data: bytes, run: str) -> Handover:
        """What `to_bytes` wrote, for this run.

        Raises:
            VersionError: The server speaks another version.
            BatonError: The bytes are damaged, too many, or no such request.
        """
        if not cls.begins(data):
            raise BatonError("Not a request about a lineage: the first four bytes are not 'cpsh'.")
        _check_version(data, "server")
        if len(data) < HEADER_BYTES:
            raise BatonError(f"A request about a lineage has at least {HEADER_BYTES} bytes, got {len(data)}.")
        _, _, step, round, lineage, bands, fingerprint = _FIELDS.unpack_from(data)
        body = data[HEADER_BYTES:]
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != wire.checksum(data[: _FIELDS.size], body):
            raise BatonError("The checksum does not match: the request about a lineage was damaged on the way.")
        try:
            asked, place = Step(step), Place(run, fingerprint, bands, round, lineage)
        except ValueError:
            raise BatonError("The request about a lineage has numbers that no server sends.") from None
        if len(body) != {Step.KEY: 0, Step.GIVE: keys.KEY_BYTES, Step.TAKE: place.baton_bytes}[asked]:
            raise BatonError(f"The request about a lineage to {asked.name.lower()} has {len(body)} bytes of content.")
        return cls(asked, place, body)


def answer(request: bytes, run: str, memory: Memory | None, signing: Signing) -> bytes:
    """A client's answer, from what it holds beside its memory.

    Raises:
        RoundRefusedError: This client has a roster and hands nothing on, or has nowhere to keep it.
        BatonError: The request cannot be met; nothing was changed.
    """
    asked = Handover.from_bytes(request, run)
    if signing.roster is not None:
        raise RoundRefusedError("This client keeps its noise to itself: it hands no lineage on and takes none over.")
    if memory is None:
        raise RoundRefusedError("This client has no cpsgd-memory, and without one it holds no lineage.")
    lineages, body = memory.lineages, b""
    if asked.step is Step.KEY:
        body = lineages.key(asked.place)
    elif asked.step is Step.GIVE:
        body = lineages.give(asked.place, asked.body)
    else:
        lineages.take(asked.place, asked.body)
    return _ANSWER.pack(MAGIC, VERSION, asked.step) + body


def read_answer(reply: bytes, asked: Handover) -> bytes:
    """The public key or the baton in a client's answer.

    Raises:
        VersionError: The client speaks another version.
        BatonError: It is no answer to this request.
    """
    length = {Step.KEY: keys.KEY_BYTES, Step.GIVE: asked.place.baton_bytes, Step.TAKE: 0}[asked.step]
    if not Handover.begins(reply) or len(reply) < _ANSWER.size:
        raise BatonError("Not an answer about a lineage.")
    _check_version(reply, "client")
    if reply[: _ANSWER.size] != _ANSWER.pack(MAGIC, VERSION, asked.step) or len(reply) != _ANSWER.size + length:
        raise BatonError(f"Not an answer to the request to {asked.step.name.lower()}.")
    return reply[_ANSWER.size :]


def _check_version(data: bytes, other: str) -> None:
    if len(data) > len(MAGIC) and data[len(MAGIC)] != VERSION:
        raise VersionError(
            f"The {other} speaks version {data[len(MAGIC)]} of requests about lineages, and this side version "
            f"{VERSION}: install the same release on both."
        )
