"""Secure aggregation under the fuzzer: every message of a round, to a client and to the server, and a client's state.

The first byte of an input says which stage it is for; the rest is the message.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from cpsgd.codec.wire import checksum
from cpsgd.errors import CpsgdError
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage, packets

CLIENTS = 4
AGREED = SecureParameters(
    clients=CLIENTS, dim=5, bits=8, neighbours=3, threshold=3, round=7, surviving=2, fingerprint=bytes(range(16))
)
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)
IDENTITIES = [Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32) for number in range(CLIENTS)]
ROSTER = frozenset(identity.public_key().public_bytes_raw() for identity in IDENTITIES)
VALUES: NDArray[np.uint32] = np.arange(5, dtype=np.uint32)


@dataclass(frozen=True)
class Moment:
    """A signed round at one stage, when all clients but client 0 have answered.

    Attributes:
        server: The server, to be copied.
        state: What client 0 remembers; None before it was invited.
        message: What the server says to client 0.
        answer: What client 0 answers.
    """

    server: SecureServer
    state: bytes | None
    message: bytes
    answer: bytes


def client(state: bytes | None, number: int = 0) -> SecureClient:
    """A client that remembers this."""
    if state is None:
        return SecureClient(number, expected=AGREED, identity=IDENTITIES[number], roster=ROSTER)
    return SecureClient.restore(state, identity=IDENTITIES[number], roster=ROSTER)


def answer(who: SecureClient, stage: Stage, message: bytes) -> bytes:
    """What a client answers to a message."""
    arguments = [VALUES] if stage is Stage.MASK else []
    return bytes(getattr(who, stage.value)(message, *arguments))


@cache
def moments() -> list[Moment]:
    """All stages of a round."""
    server = SecureServer(AGREED, roster=ROSTER, session=bytes(16))
    waiting = server.invite()
    states: list[bytes | None] = [None] * CLIENTS
    found = []
    for stage in STAGES:
        state, clients = states[0], [client(state, number) for number, state in enumerate(states)]
        answers = [answer(who, stage, waiting[number]) for number, who in enumerate(clients)]
        for number in range(1, CLIENTS):
            server.receive(number, answers[number])
        found.append(Moment(copy.deepcopy(server), state, waiting[0], answers[0]))
        server.receive(0, answers[0])
        waiting = server.advance()
        states = [who.export_state() for who in clients]
    return found


def to_client(data: bytes) -> None:
    """A message to client 0, which must leave no trace if it is refused."""
    number = (data[0] if data else 0) % len(STAGES)
    who = client(moments()[number].state)
    try:
        answer(who, STAGES[number], data[1:])
    except CpsgdError:
        if moments()[number].state not in (None, who.export_state()):
            raise AssertionError("a refused message changed the client") from None
        raise


def to_server(data: bytes) -> None:
    """An answer of client 0, the last one that is missing, and what the server then does."""
    number = (data[0] if data else 0) % len(STAGES)
    server = copy.deepcopy(moments()[number].server)
    try:
        server.receive(0, data[1:])
    except CpsgdError:
        if server.missing != {0}:
            raise AssertionError("a refused message was counted") from None
        raise
    server.advance()


def client_seeds() -> list[bytes]:
    """What the server says to client 0."""
    return [bytes([number]) + moment.message for number, moment in enumerate(moments())]


def server_seeds() -> list[bytes]:
    """What client 0 answers."""
    return [bytes([number]) + moment.answer for number, moment in enumerate(moments())]


def seal(data: bytes) -> bytes:
    """The message with the right checksum."""
    message = data[1:]
    if len(message) < packets.HEADER_BYTES:
        return data
    fields, body = message[: packets._FIELDS.size], message[packets.HEADER_BYTES :]
    return data[:1] + fields + packets._CHECKSUM.pack(checksum(fields, body)) + body


def restore(data: bytes) -> None:
    """A client's saved state."""
    SecureClient.restore(data, index=0, expected=AGREED, identity=IDENTITIES[0], roster=ROSTER)


def state_seeds() -> list[bytes]:
    """Client 0's state in every stage but the first, which has none."""
    return [moment.state for moment in moments() if moment.state is not None]


def seal_state(data: bytes) -> bytes:
    """The state with the right digest."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()
