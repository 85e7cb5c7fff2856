"""Rounds in process, for the tests: who drops out when, who tampers with what, and copies of the parties."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from cpsgd.errors import SecureAggregationError
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, SecureSum, Stage, packets
from cpsgd.secagg.cohort import Advert, Cohort
from cpsgd.secagg.packets import Kind, Session
from cpsgd.secagg.parameters import smallest_threshold
from cpsgd.secagg.participant import ClientState

FINGERPRINT = bytes(range(16))
IDENTITIES = [Ed25519PrivateKey.from_private_bytes(bytes([i + 1]) * 32) for i in range(8)]
ROSTER = frozenset(identity.public_key().public_bytes_raw() for identity in IDENTITIES)


def parameters(clients: int, **changes: int) -> SecureParameters:
    """A round on a complete graph with the smallest threshold, unless told otherwise."""
    bits = (changes["modulus"] - 1).bit_length() if "modulus" in changes else 8
    fields = {"dim": 5, "bits": bits, "neighbours": clients - 1, "round": 7, "surviving": 2, **changes}
    fields.setdefault("threshold", smallest_threshold(clients, fields["neighbours"]))
    return SecureParameters(clients=clients, fingerprint=FINGERPRINT, **fields)


@dataclass
class Round:
    """All parties of a round, and the messages that wait for the clients."""

    server: SecureServer
    clients: list[SecureClient]
    values: NDArray[np.uint32]
    waiting: dict[int, bytes]
    signed: bool = False
    signers: dict[int, Ed25519PrivateKey] = field(default_factory=dict)

    def copied(self) -> Round:
        """The same once more: clients refuse to be copied, so their states are."""
        clients = []
        for number, client in enumerate(self.clients):
            twin = new_client(number, self.server.parameters, self.signed)
            twin._state = copy.deepcopy(client._state, _shared(client._state))
            clients.append(twin)
        server = copy.deepcopy(self.server, _shared(self.server))
        return Round(server, clients, self.values, dict(self.waiting), self.signed, self.signers)

    def answer(self, client: int, message: bytes | None = None) -> bytes:
        """What a client answers to its waiting message (or another one) in the stage the server is in."""
        message = self.waiting[client] if message is None else message
        method = getattr(self.clients[client], self.server.stage.value)
        if self.server.stage is Stage.MASK:
            return bytes(method(message, self.values[client]))
        return bytes(method(message))

    def collect(self, silent: frozenset[int] = frozenset()) -> None:
        """One stage: all but the silent answer; who meets an error falls silent."""
        for client in self.waiting.keys() - silent:
            try:
                self.server.receive(client, self.answer(client))
            except SecureAggregationError:
                continue

    def step(self, silent: frozenset[int] = frozenset()) -> None:
        """One stage from the waiting messages to the next ones."""
        self.collect(silent)
        for number, client in enumerate(self.clients):
            # Kept for tests of what would be, had a client signed something else.
            if client._state is not None and client._state.signing_private:
                self.signers[number] = Ed25519PrivateKey.from_private_bytes(client._state.signing_private)
        self.waiting = self.server.advance()

    def until(self, stage: Stage) -> Round:
        """Goes on without dropouts up to a stage."""
        while self.server.stage is not stage:
            self.step()
        return self

    def finish(self) -> SecureSum:
        """Goes on without further dropouts to the end."""
        return self.until(Stage.DONE).server.result()

    def expected(self, survivors: tuple[int, ...]) -> NDArray[np.uint32]:
        """The sum that a round with these survivors must have."""
        total = self.values[list(survivors)].astype(np.uint64).sum(axis=0)
        return (total % np.uint64(self.server.parameters.masks.modulus)).astype(np.uint32)


def _shared(party: object) -> dict[int, object]:
    """A memo for deepcopy: what is frozen need not be copied."""
    if isinstance(party, SecureServer):
        frozen = [party.parameters, party._session, party._neighbours, party._cohort, *party._adverts.values()]
    else:
        assert isinstance(party, ClientState)
        frozen = [party.stage, party.invitation, *party.adverts.values()]
    return {id(value): value for value in frozen}


def keys_message(session: Session, client: int, own: Advert, adverts: Mapping[int, Advert]) -> bytes:
    """A client's second message, from a server that says that only these take part."""
    everybody = Cohort.of(session.parameters.clients, {**adverts, client: own}).to_bytes()
    listed = packets.write_entries({other: advert.to_bytes() for other, advert in adverts.items()})
    return session.write(Kind.KEYS, client, everybody, listed)


def new_client(number: int, agreed: SecureParameters, signed: bool) -> SecureClient:
    if signed:
        return SecureClient(number, expected=agreed, identity=IDENTITIES[number], roster=ROSTER)
    return SecureClient(number, expected=agreed)


def new_round(
    agreed: SecureParameters, *, signed: bool = False, seed: int = 0, session: bytes | None = bytes(16)
) -> Round:
    """A round whose clients have been invited, with values that wrap around."""
    server = SecureServer(agreed, roster=ROSTER if signed else None, session=session)
    clients = [new_client(number, agreed, signed) for number in range(agreed.clients)]
    random = np.random.default_rng(seed)
    values = random.integers(0, agreed.masks.modulus, size=(agreed.clients, agreed.dim), dtype=np.uint32)
    return Round(server, clients, values, server.invite(), signed)


def play(started: Round, dropouts: Mapping[Stage, frozenset[int]]) -> SecureSum:
    """The whole round with these clients falling silent at these stages."""
    while started.server.stage is not Stage.DONE:
        started.step(dropouts.get(started.server.stage, frozenset()))
    return started.server.result()
