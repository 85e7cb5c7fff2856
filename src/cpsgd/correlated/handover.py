"""Handing a lineage on: requests to a client that leaves, and to one that comes in its place.

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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from cpsgd.codec import wire
from cpsgd.correlated.batons import KEY_BYTES, Place
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import BatonError, RoundRefusedError, VersionError

Node = TypeVar("Node", bound=Hashable)

MAGIC = b"cpsh"
VERSION = 1
_FIELDS = struct.Struct("<4sBBQII16s")
_CHECKSUM = struct.Struct("<I")
_ANSWER = struct.Struct("<4sBB")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class HandoverStep(IntEnum):
    """The three steps of a handover."""

    KEY = 0
    GIVE = 1
    TAKE = 2


@dataclass(frozen=True)
class Handover:
    """A request of a handover, from the server to a client.

    Attributes:
        step: The step that is asked for.
        place: The federation, round and lineage it is about; the run is not sent, for the client knows it.
        body: The public key or the baton.
    """

    step: HandoverStep
    place: Place
    body: bytes = b""

    @staticmethod
    def begins(data: object) -> bool:
        """Returns whether these bytes begin like a handover request."""
        return isinstance(data, bytes) and data.startswith(MAGIC)

    def to_bytes(self) -> bytes:
        """Returns the request as one message."""
        place = self.place
        numbers = self.step, place.round, place.lineage, place.bands
        fields = _FIELDS.pack(MAGIC, VERSION, *numbers, place.fingerprint)
        return fields + _CHECKSUM.pack(wire.checksum(fields, self.body)) + self.body

    @classmethod
    def from_bytes(cls, data: bytes, run: str) -> Handover:
        """Reads what `to_bytes` wrote, for this run.

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
            asked, place = HandoverStep(step), Place(run, fingerprint, bands, round, lineage)
        except ValueError:
            raise BatonError("The request about a lineage has numbers that no server sends.") from None
        if (
            len(body)
            != {HandoverStep.KEY: 0, HandoverStep.GIVE: KEY_BYTES, HandoverStep.TAKE: place.baton_bytes}[asked]
        ):
            raise BatonError(f"The request about a lineage to {asked.name.lower()} has {len(body)} bytes of content.")
        return cls(asked, place, body)


def answer(request: bytes, run: str, seeds: SeedFile | None, *, signed: bool) -> bytes:
    """Carries out a step of handing seeds on, and returns the client's answer: its key, sealed seeds, or nothing.

    Args:
        request: The server's request.
        run: The engine's name of the run.
        seeds: The client's file of seeds, if it has one.
        signed: Whether the client has a roster.

    Raises:
        RoundRefusedError: This client has a roster and hands nothing on, or has nowhere to keep seeds.
        BatonError: The request cannot be met; nothing was changed.
    """
    asked = Handover.from_bytes(request, run)
    if signed:
        raise RoundRefusedError("This client keeps its noise to itself: it hands no lineage on and takes none over.")
    if seeds is None:
        raise RoundRefusedError("This client has no cpsgd-memory, and without one it holds no lineage.")
    body = b""
    if asked.step is HandoverStep.KEY:
        body = seeds.key(asked.place)
    elif asked.step is HandoverStep.GIVE:
        body = seeds.give(asked.place, asked.body)
    else:
        seeds.take(asked.place, asked.body)
    return _ANSWER.pack(MAGIC, VERSION, asked.step) + body


def read_answer(reply: bytes, asked: Handover) -> bytes:
    """Returns the public key or the baton in a client's answer; nothing for the step that takes a baton over.

    Raises:
        VersionError: The client speaks another version.
        BatonError: It is no answer to this request.
    """
    length = {HandoverStep.KEY: KEY_BYTES, HandoverStep.GIVE: asked.place.baton_bytes, HandoverStep.TAKE: 0}[asked.step]
    if not Handover.begins(reply):
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


# ---------------------------------------------------------------------- the server's part


class Handing(Generic[Node]):
    """The nodes that may hold a lineage, and the exchanges by which those that leave hand it to those that come."""

    def __init__(self, run: str, fingerprint: bytes, bands: int) -> None:
        """Starts without lineages."""
        self._run, self._fingerprint, self._bands = run, fingerprint, bands
        self._held: dict[Node, int] = {}  # the last round in which a node may have trained

    def before(self, round: int, present: Iterable[Node], nodes: Sequence[Node]) -> list[HandoverExchange[Node]]:
        """Returns the exchanges before a round of `nodes`; none unless one node leaves and another joins."""
        reach, staying = round - self._bands, set(nodes)
        leave = [node for node in present if self._held.get(node, reach) > reach and node not in staying]
        come = [node for node in nodes if self._held.get(node, reach) <= reach]
        pairs = {
            new: (old, Place(self._run, self._fingerprint, self._bands, round, lineage))
            for lineage, (old, new) in enumerate(zip(leave, come, strict=False))
        }
        bodies: dict[Node, bytes] = dict.fromkeys(pairs, b"")
        return [HandoverExchange(step, pairs, bodies, self._held) for step in HandoverStep] if pairs else []

    def trained(self, nodes: Iterable[Node], round: int) -> None:
        """Notes that these nodes may have drawn noise in a round."""
        self._held.update(dict.fromkeys(nodes, round))


class HandoverExchange(Generic[Node]):
    """One of the three exchanges of a handover.

    If a node fails, only a lineage is lost: its successor begins a new one.

    Attributes:
        stage: "relay", for all three.
        needed: One answer shows how long it takes.
        binding: False: a node that hands nothing on is not out of the round for it.
    """

    stage, needed, binding = "relay", 1, False

    def __init__(
        self,
        step: HandoverStep,
        pairs: Mapping[Node, tuple[Node, Place]],
        bodies: dict[Node, bytes],
        held: dict[Node, int],
    ) -> None:
        """Creates one of three exchanges, which share everything but the step.

        Args:
            step: The step that is asked for.
            pairs: Of each node that comes: the node that leaves, and the place of their lineage.
            bodies: Content of the last step's answers, by the node that comes; nodes that are missing are left out.
            held: Nodes that may hold a lineage. One that may have handed it on does not.
        """
        self._step, self._pairs, self._bodies, self._held = step, pairs, bodies, held
        self._answers: dict[Node, bytes] = {}

    def _asked(self) -> dict[Node, tuple[Node, Handover]]:
        """Maps each node asked in this step to (receiving node, request)."""
        found = {}
        for new, body in self._bodies.items():
            old, place = self._pairs[new]
            found[old if self._step is HandoverStep.GIVE else new] = new, Handover(self._step, place, body)
        return found

    def requests(self) -> Mapping[Node, bytes]:
        """Returns the step's request to each node."""
        asked = self._asked()
        if self._step is HandoverStep.GIVE:
            for node in asked:
                self._held.pop(node, None)
        return {node: request.to_bytes() for node, (_, request) in asked.items()}

    def receive(self, node: Node, answer: bytes) -> None:
        """Takes an answer."""
        new, request = self._asked()[node]
        self._answers[new] = read_answer(answer, request)

    def close(self) -> Mapping[Node, str]:
        """Ends the step; nodes that have not answered are left out of the next one."""
        self._bodies.clear()
        self._bodies.update(self._answers)
        return {}
