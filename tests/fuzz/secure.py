"""Secure aggregation under the fuzzer: every message of a round, to a client and to the server, and a client's state.

The first byte of an input says which stage it is for; the rest is the message.
"""

from __future__ import annotations

import copy
import hashlib
from functools import cache

from cpsgd.errors import CpsgdError
from cpsgd.secagg import SecureClient, SecureServer, Stage, wire

from ..secagg.rounds import IDENTITIES, ROSTER, Round, _shared, new_client, new_round, parameters  # noqa: TID252

AGREED = parameters(4)
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)


@cache
def rounds() -> list[Round]:
    """A signed round in each of its stages."""
    started = new_round(AGREED, signed=True)
    return [started.until(stage).copied() for stage in STAGES]


@cache
def servers() -> list[SecureServer]:
    """The servers of these rounds when all clients but client 0 have answered."""
    found = []
    for started in rounds():
        ahead = started.copied()
        ahead.collect(silent=frozenset({0}))
        found.append(ahead.server)
    return found


def to_client(data: bytes) -> None:
    """A message to client 0, which must leave no trace if it is refused."""
    number = (data[0] if data else 0) % len(STAGES)
    started = rounds()[number]
    before = started.clients[0]._state
    assert before is not None
    client = new_client(0, AGREED, signed=True)
    client._state = copy.deepcopy(before, _shared(before))
    method = getattr(client, STAGES[number].value)
    arguments = [started.values[0]] if STAGES[number] is Stage.MASK else []
    try:
        method(data[1:], *arguments)
    except CpsgdError:
        if client._state is None or client._state.to_bytes() != before.to_bytes():
            raise AssertionError("a refused message changed the client") from None
        raise


def to_server(data: bytes) -> None:
    """An answer of client 0, the last one that is missing, and what the server then does."""
    number = (data[0] if data else 0) % len(STAGES)
    server = copy.deepcopy(servers()[number], _shared(servers()[number]))
    try:
        server.receive(0, data[1:])
    except CpsgdError:
        if server.missing != {0}:
            raise AssertionError("a refused message was counted") from None
        raise
    server.advance()


def client_seeds() -> list[bytes]:
    """What the server says to client 0."""
    return [bytes([number]) + started.waiting[0] for number, started in enumerate(rounds())]


def server_seeds() -> list[bytes]:
    """What client 0 answers."""
    return [bytes([number]) + started.copied().answer(0) for number, started in enumerate(rounds())]


def seal(data: bytes) -> bytes:
    """The message with the right checksum."""
    message = data[1:]
    if len(message) < wire.HEADER_BYTES:
        return data
    fields, body = message[: wire._FIELDS.size], message[wire.HEADER_BYTES :]
    return data[:1] + fields + wire._CHECKSUM.pack(wire._checksum(fields, body)) + body


def restore(data: bytes) -> None:
    """A client's saved state."""
    SecureClient.restore(data, index=0, expected=AGREED, identity=IDENTITIES[0], roster=ROSTER)


def state_seeds() -> list[bytes]:
    """Client 0's state in every stage but the first, which has none."""
    return [started.copied().clients[0].export_state() for started in rounds()[1:]]


def seal_state(data: bytes) -> bytes:
    """The state with the right digest."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()
