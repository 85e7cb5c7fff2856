"""The messages of secure aggregation: frame, session, invitation, advert and lists. See docs/secure-aggregation.md.

A header of 54 bytes (magic, version, kind, fingerprint, round, session, client, CRC-32C) and a body whose length
follows from the parameters and what was said before; lists are of entries of equal size in increasing order of clients.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from cpsgd.codec.wire import checksum
from cpsgd.errors import (
    MessageError,
    SecureFingerprintError,
    SecureRoundError,
    SecureVersionError,
    SenderError,
    StageError,
)
from cpsgd.secagg import keys
from cpsgd.secagg.parameters import SecureParameters

MAGIC = b"cpss"
VERSIONS = (5, 6)
"""The second is for sums modulo a number that is no power of two, which the first cannot name. Versions 1 and 2 are
refused: an active server could learn single inputs from them. In 3 and 4 no complaint could be proved."""
SESSION_BYTES = 16
# magic, version, kind, fingerprint, round, session, client; then the checksum of these and the body.
_FIELDS = struct.Struct("<4sBB16sQ16sI")
_CHECKSUM = struct.Struct("<I")
INDEX = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Stage(StrEnum):
    """The stages of a round. A value is the name of the client's method that answers the server's message.

    The last two are not of secure aggregation. `UPLOAD` is all there is to a round without it; in `RELAY`, before a
    round, clients that leave hand seeds of noise on to those that come.
    """

    INVITE = "invite"
    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"
    DONE = "done"
    UPLOAD = "upload"
    RELAY = "relay"


class Kind(IntEnum):
    """The kind of a message."""

    INVITATION = 0
    ADVERTISEMENT = 1
    KEYS = 2
    SHARES = 3
    DELIVERY = 4
    UPLOAD = 5
    SURVIVORS = 6
    CONFIRMATION = 7
    REQUEST = 8
    REVELATION = 9


@dataclass(frozen=True)
class Session:
    """One attempt at a round.

    Attributes:
        parameters: The parameters that the server proposed.
        identifier: 16 public random bytes, new in each attempt; the graph follows from them.
        signed: Whether those who sign keys and survivors are on a roster, or else known for this round only.
    """

    parameters: SecureParameters
    identifier: bytes
    signed: bool

    @cached_property
    def context(self) -> bytes:
        """32 bytes that identify all of this, bound into every key and signature."""
        return keys.digest(b"context", self.parameters.to_bytes(), self.identifier, bytes([self.signed]))

    def write(self, kind: Kind, client: int, *body: bytes | memoryview) -> bytes:
        """Returns a message from or to `client`; the parts of its body follow each other."""
        parameters = self.parameters
        fields = parameters.fingerprint, parameters.round, self.identifier, client
        header = _FIELDS.pack(MAGIC, parameters.version, kind, *fields)
        return b"".join((header, _CHECKSUM.pack(checksum(header, *body)), *body))

    def read(self, message: bytes, kind: Kind, client: int) -> memoryview:
        """Returns the body of a message, which must be of this kind and from or to `client`.

        Raises:
            SecureAggregationError: One of its subclasses, for the first thing that is wrong.
        """
        fields = _frame(message, (self.parameters.version,))
        if fields.fingerprint != self.parameters.fingerprint:
            raise SecureFingerprintError("The message was made for a protocol with other parameters.")
        if fields.round != self.parameters.round:
            raise SecureRoundError(f"The message was made for round {fields.round}, not {self.parameters.round}.")
        if fields.session != self.identifier:
            raise SecureRoundError("The message was made for another attempt at this round.")
        if fields.client != client:
            raise SenderError(f"The message is from or for client {fields.client}, not client {client}.")
        if fields.kind != kind:
            raise StageError(f"Expected a message of kind {kind.name}, got {fields.kind.name}.")
        return memoryview(message)[HEADER_BYTES:]


@dataclass(frozen=True)
class Invitation:
    """A server's proposal to one client.

    Attributes:
        session: The proposed session.
        client: The number the client has in the round.
    """

    session: Session
    client: int

    def write(self) -> bytes:
        """Returns the invitation as a message."""
        body = self.session.parameters.to_bytes() + bytes([self.session.signed])
        return self.session.write(Kind.INVITATION, self.client, body)

    @classmethod
    def read(cls, message: bytes) -> Invitation:
        """Returns the invitation that a message holds. Whether to follow it is for the client to say.

        Raises:
            SecureAggregationError: The message is damaged, or proposes what cannot be.
        """
        fields = _frame(message)
        if fields.kind != Kind.INVITATION:
            raise StageError(f"Expected an invitation, got a message of kind {fields.kind.name}.")
        body = message[HEADER_BYTES:]
        if not body or body[-1] > 1:
            raise MessageError("The invitation is malformed.")
        parameters = SecureParameters.from_bytes(body[:-1])
        stated = parameters.version, parameters.fingerprint, parameters.round
        if stated != (fields.version, fields.fingerprint, fields.round):
            raise MessageError("The invitation contradicts its own header.")
        if fields.client >= parameters.clients:
            raise MessageError(f"There is no client {fields.client} among {parameters.clients}.")
        return cls(Session(parameters, fields.session, bool(body[-1])), fields.client)


def write_entries(entries: Mapping[int, bytes]) -> bytes:
    """Returns the bytes of entries by client, in increasing order."""
    return b"".join(INDEX.pack(client) + entry for client, entry in sorted(entries.items()))


def read_entries(body: memoryview | bytes, size: int, most: int) -> dict[int, bytes]:
    """Returns at most `most` entries of `size` bytes by client, as `write_entries` wrote them.

    Raises:
        MessageError: The length is wrong, or the clients are not in increasing order.
    """
    step = INDEX.size + size
    if len(body) % step or len(body) > most * step:
        raise MessageError(f"Expected at most {most} entries of {step} bytes, got {len(body)} bytes.")
    entries: dict[int, bytes] = {}
    last = -1
    for start in range(0, len(body), step):
        (client,) = INDEX.unpack_from(body, start)
        if client <= last:
            raise MessageError("The entries of a list are not in increasing order of clients.")
        entries[client] = bytes(body[start + INDEX.size : start + step])
        last = client
    return entries


def split_entries(body: memoryview | bytes, size: int, count: int) -> list[bytes]:
    """Returns exactly `count` entries of `size` bytes, whose order both sides know.

    Raises:
        MessageError: The length is wrong.
    """
    if len(body) != count * size:
        raise MessageError(f"Expected {count} entries of {size} bytes, got {len(body)} bytes.")
    return [bytes(body[start : start + size]) for start in range(0, len(body), size)]


def write_set(members: set[int] | frozenset[int], clients: int) -> bytes:
    """Returns a set of clients, one bit each."""
    flags = np.zeros(clients, dtype=bool)
    flags[sorted(members)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def read_set(body: memoryview | bytes, clients: int) -> frozenset[int]:
    """Reads what `write_set` wrote.

    Raises:
        MessageError: The length is wrong, or a bit after the last client is set.
    """
    if len(body) != set_bytes(clients):
        raise MessageError(f"A set of {clients} clients takes {set_bytes(clients)} bytes, got {len(body)}.")
    flags = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
    if flags[clients:].any():
        raise MessageError("A set names a client that does not exist.")
    return frozenset(np.flatnonzero(flags).tolist())


def set_bytes(clients: int) -> int:
    """Returns the number of bytes of a set of clients."""
    return -(-clients // 8)


@dataclass(frozen=True)
class _Fields:
    version: int
    kind: Kind
    fingerprint: bytes
    round: int
    session: bytes
    client: int


def _frame(message: bytes, versions: tuple[int, ...] = VERSIONS) -> _Fields:
    """Checks the header and checksum of a message, and returns its fields."""
    if not isinstance(message, bytes):
        raise MessageError(f"Expected a message as bytes, got {type(message).__name__}.")
    if len(message) < HEADER_BYTES:
        raise MessageError(f"A message has at least {HEADER_BYTES} bytes, got {len(message)}.")
    magic, version, kind, fingerprint, round, session, client = _FIELDS.unpack_from(message)
    if magic != MAGIC:
        raise MessageError("Not a message of secure aggregation: the first four bytes are not 'cpss'.")
    if version not in versions:
        known = " or ".join(map(str, versions))
        raise SecureVersionError(
            f"The message has version {version}; expected version {known}. Install the same release of cpsgd on the "
            "server and all clients."
        )
    body = memoryview(message)[HEADER_BYTES:]
    if _CHECKSUM.unpack_from(message, _FIELDS.size)[0] != checksum(message[: _FIELDS.size], body):
        raise MessageError("The checksum does not match: the message was damaged on the way.")
    try:
        return _Fields(version, Kind(kind), fingerprint, round, session, client)
    except ValueError:
        raise MessageError(f"There is no message of kind {kind}.") from None
