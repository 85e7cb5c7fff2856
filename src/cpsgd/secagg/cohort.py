"""`Cohort`: who takes part in a round and with which keys, as one client was told; and what its members sign.

Clients see the keys of their neighbours only, and yet all must mean the same people and the same survivors before one
of them unmasks. So everybody gets a list of everybody: who signs as which number, and a digest of the keys that it has
announced. A member signs one statement in a round: the session with its parameters, this list, and the survivors.
A client with a quorum of signatures under the same statement knows that no other statement can have one
(docs/secure-aggregation.md).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cpsgd.errors import MessageError, SenderError, SignatureError, ThresholdError
from cpsgd.secagg import keys, packets
from cpsgd.secagg.packets import Session

_MEMBER_BYTES = keys.PUBLIC_BYTES + 32
_KEYS_BYTES = 2 * keys.KEY_BYTES
_COUNTER = struct.Struct("<Q")
ADVERT_BYTES = _KEYS_BYTES + keys.PUBLIC_BYTES + keys.SIGNATURE_BYTES + _COUNTER.size


@dataclass(frozen=True)
class Advert:
    """The public keys of a client in one round.

    Attributes:
        keys: 32 bytes for the boxes to its neighbours (`cpsgd.secagg.keys`), 32 for its masks (X25519).
        identity: The Ed25519 public key it signs with: of who the client is, with a roster; else made for the round.
        signature: By that identity, over all of this, the client's number, the session and the roster.
        counter: Number of adverts that the client's memory knows of, this one included. Others who remember a larger
            one know that the memory was set back. 0 without a memory.
    """

    keys: bytes
    identity: bytes
    signature: bytes
    counter: int = 0

    @property
    def channel_key(self) -> bytes:
        """The public key shares are sealed for."""
        return self.keys[: keys.KEY_BYTES]

    @property
    def mask_key(self) -> bytes:
        """The public key masks are agreed on with."""
        return self.keys[keys.KEY_BYTES :]

    def to_bytes(self) -> bytes:
        """Returns the advert as 168 bytes."""
        return self.keys + self.identity + self.signature + _COUNTER.pack(self.counter)

    @classmethod
    def from_bytes(cls, data: bytes) -> Advert:
        """Reads what `to_bytes` wrote; checks only its length.

        Raises:
            MessageError: The length is wrong.
        """
        if len(data) != ADVERT_BYTES:
            raise MessageError(f"An advert takes {ADVERT_BYTES} bytes, got {len(data)}.")
        end, last = _KEYS_BYTES + keys.PUBLIC_BYTES, ADVERT_BYTES - _COUNTER.size
        return cls(data[:_KEYS_BYTES], data[_KEYS_BYTES:end], data[end:last], *_COUNTER.unpack(data[last:]))

    @classmethod
    def make(
        cls,
        session: Session,
        client: int,
        public_keys: bytes,
        signer: Ed25519PrivateKey,
        roster: frozenset[bytes] | None,
        counter: int = 0,
    ) -> Advert:
        """Returns the advert of a client, signed."""
        signature = signer.sign(_signed(session, client, public_keys, roster, counter))
        return cls(public_keys, keys.public_bytes(signer), signature, counter)

    def check(self, session: Session, client: int, roster: frozenset[bytes] | None) -> None:
        """Checks that the advert is signed by the identity it names, and that the roster, if any, lists it.

        Raises:
            SignatureError: It is not, or the signer has another roster.
        """
        if roster is not None and self.identity not in roster:
            raise SignatureError(f"Client {client} is nobody on the roster.")
        try:
            keys.verify(
                self.identity, self.signature, _signed(session, client, self.keys, roster, self.counter), client
            )
        except SignatureError:
            raise SignatureError(
                f"The signature of client {client} is wrong, or its roster is not the same as here."
            ) from None


def check_counter(client: int, counter: int, before: int | None) -> None:
    """Refuses a counter that is not larger than one its owner signed before.

    Raises:
        SignatureError: The client's memory was set back, to a backup for instance: it has forgotten what it answered.
    """
    if before is not None and counter <= before and before:
        raise SignatureError(
            f"Client {client} has a memory that was set back: its counter is {counter}, and was {before} before."
        )


def _signed(session: Session, client: int, public_keys: bytes, roster: frozenset[bytes] | None, counter: int) -> bytes:
    """Returns the bytes that an advert signs. The roster is in them: all who accept each other have the same one."""
    known = keys.roster_digest(roster or frozenset())
    parts = packets.INDEX.pack(client), public_keys, known, _COUNTER.pack(counter)
    return keys.digest(b"advert", session.context, *parts)


@dataclass(frozen=True)
class Cohort:
    """All who take part in a round.

    Attributes:
        clients: The clients that were invited, n.
        members: Of each that takes part: the key it signs with, and a digest of its other keys; 32 bytes each.
    """

    clients: int
    members: Mapping[int, bytes]

    @classmethod
    def of(cls, clients: int, adverts: Mapping[int, Advert]) -> Cohort:
        """Returns the cohort of the clients that sent these adverts."""
        return cls(clients, {client: _member(adverts[client]) for client in sorted(adverts)})

    @classmethod
    def read(cls, body: memoryview | bytes, clients: int) -> tuple[Cohort, memoryview]:
        """Reads what `to_bytes` wrote, and what follows it.

        Raises:
            MessageError: It is cut off.
        """
        body = memoryview(body)
        start = packets.set_bytes(clients)
        listed = sorted(packets.read_set(body[:start], clients))
        end = start + _MEMBER_BYTES * len(listed)
        members = packets.split_entries(body[start:end], _MEMBER_BYTES, len(listed))
        return cls(clients, dict(zip(listed, members, strict=True))), body[end:]

    def to_bytes(self) -> bytes:
        """Returns one bit for each client that was invited, then 64 bytes for each that takes part, in order."""
        return packets.write_set(frozenset(self.members), self.clients) + b"".join(self.members.values())

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that identify the list."""
        return keys.digest(b"cohort", self.to_bytes())

    def graph_seed(self, session: Session) -> bytes:
        """Returns the graph's seed: a digest of everybody's fresh keys, which are made after numbers are assigned."""
        return keys.digest(b"graph", session.context, self.digest)

    def neighbours(self, session: Session, client: int) -> tuple[int, ...]:
        """Returns the neighbours of a client, including those that take no part."""
        degree = session.parameters.neighbours
        return neighbours(self.clients, degree, self.graph_seed(session), client)

    def identity(self, client: int) -> bytes:
        """Returns the key that a member signs with."""
        return self.members[client][: keys.PUBLIC_BYTES]

    def check(self, session: Session, me: int, adverts: Mapping[int, Advert], roster: frozenset[bytes] | None) -> None:
        """Refuses a list that is not of different people, or does not fit the adverts of `me` and its neighbours.

        Raises:
            SecureAggregationError: One of its subclasses, for the first thing that is wrong.
        """
        for client, advert in adverts.items():
            if client != me:
                advert.check(session, client, roster)
            if self.members.get(client) != _member(advert):
                raise MessageError(f"Client {client} is not in the list of all clients with the keys it announced.")
        everybody = [self.identity(client) for client in self.members]
        if len(set(everybody)) != len(everybody):
            raise SignatureError("Two clients are the same person.")
        if roster is not None and not roster.issuperset(everybody):
            raise SignatureError("The list of all clients names somebody who is not on the roster.")
        needed = max(session.parameters.surviving, session.parameters.quorum)
        if len(everybody) < needed:
            raise ThresholdError(f"{len(everybody)} clients take part, and the round needs {needed}.")


@dataclass(frozen=True)
class Statement:
    """The statement that each member signs once in a round: session, cohort and survivors.

    Attributes:
        session: With its parameters.
        cohort: All who take part.
        survivors: Those whose contributions are to be summed.
    """

    session: Session
    cohort: Cohort
    survivors: frozenset[int]

    def to_bytes(self) -> bytes:
        """32 bytes that identify it."""
        announced = packets.write_set(self.survivors, self.cohort.clients)
        return keys.digest(b"survivors", self.session.context, self.cohort.digest, announced)

    def sign(self, signer: Ed25519PrivateKey) -> bytes:
        """Returns a member's signature."""
        return signer.sign(self.to_bytes())

    def check(self, signatures: Mapping[int, bytes]) -> None:
        """Refuses signatures that are not by a quorum of the survivors.

        Raises:
            SenderError: One is not by a survivor.
            SignatureError: One is wrong, or under another statement.
            ThresholdError: There are too few.
        """
        signed = self.to_bytes()
        for client, signature in signatures.items():
            if client not in self.survivors or client not in self.cohort.members:
                raise SenderError(f"Client {client} cannot have confirmed the survivors.")
            keys.verify(self.cohort.identity(client), signature, signed, client)
        quorum = self.session.parameters.quorum
        if len(signatures) < quorum:
            raise ThresholdError(
                f"{len(signatures)} clients confirmed the survivors, fewer than the quorum of {quorum}."
            )


def _member(advert: Advert) -> bytes:
    return advert.identity + keys.digest(b"keys", advert.keys)


def neighbours(clients: int, degree: int, session: bytes, index: int) -> tuple[int, ...]:
    """Returns the neighbours of client `index` on the graph of `cpsgd.secagg.parameters`, in increasing order.

    Example:
        >>> neighbours(4, 3, bytes(16), 2)
        (0, 1, 3)
        >>> all(5 in neighbours(100, 10, bytes(16), j) for j in neighbours(100, 10, bytes(16), 5))
        True
    """
    if degree == clients - 1:
        return tuple(other for other in range(clients) if other != index)
    order, position = _circle(clients, session)
    steps = np.arange(1, degree // 2 + 1)
    places = int(position[index]) + np.concatenate([-steps, steps])
    return tuple(sorted(order[places % clients].tolist()))


@lru_cache(maxsize=4)
def _circle(clients: int, session: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the clients in the order of 64-bit numbers from an AES-256 keystream, and each client's place in it."""
    key = hashlib.sha256(b"cpsgd secagg 1 graph" + session).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * clients))
    # A stable sort, so that all agree even if two numbers were equal.
    order = np.argsort(np.frombuffer(stream, "<u8"), kind="stable")
    position = np.empty(clients, dtype=np.int64)
    position[order] = np.arange(clients)
    return order, position
