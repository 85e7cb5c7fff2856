"""`SecureServer`: the server's half of a round of secure aggregation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import MessageError, ParameterError, SenderError, ShareError, StageError, ThresholdError
from cpsgd.secagg import keys, packets, shamir
from cpsgd.secagg.cohort import Advert, Cohort, Statement, check_counter
from cpsgd.secagg.packets import Invitation, Kind, Session, Stage
from cpsgd.secagg.parameters import SecureParameters
from cpsgd.secagg.shamir import Recovery

_COMMITMENT_BYTES = 32


@dataclass(frozen=True)
class SecureSum:
    """The result of a round.

    Attributes:
        sums: The sums of the survivors' integers modulo M, type uint32.
        survivors: Clients that contributed. Their number goes into `Protocol.decode_sum` and `guarantee`.
        disputed: Pairs of clients one of whom dealt, or the other revealed, a share that is wrong. The sum is right all
            the same. `offenders` says who must have.
    """

    sums: NDArray[np.uint32]
    survivors: tuple[int, ...]
    disputed: tuple[tuple[int, int], ...] = ()


class SecureServer:
    """Runs one round: `invite`, then for each stage `receive` the answers and `advance`, then `result`.

    `invite` and `advance` return the next message for each client that is still in; whoever has not answered when a
    stage is closed has dropped out of the round. A message that is refused raises a `SecureAggregationError` and
    changes nothing: the client may answer properly as long as the stage is open, or drop out like one who is silent.
    Below the threshold `advance` raises a `ThresholdError`, also changing nothing: more answers may still come.

    See `SecureClient` for a whole round.
    """

    def __init__(
        self,
        parameters: SecureParameters,
        *,
        roster: Iterable[bytes] | None = None,
        session: bytes | None = None,
        colluding: int = 1,
        counters: dict[bytes, int] | None = None,
    ) -> None:
        """Prepares a round.

        Args:
            parameters: Of the round.
            roster: Raw Ed25519 public keys of all who may take part; then all clients must have an identity on it.
            session: 16 public bytes for this attempt; by default random ones.
            colluding: Clients that may lie together. Nobody is blamed for what these could make up.
            counters: Largest counter of each identity so far, which those of this round are added to. A smaller one is
                of a memory that was set back, and refused.
        """
        identifier = os.urandom(packets.SESSION_BYTES) if session is None else session
        if len(identifier) != packets.SESSION_BYTES:
            raise ParameterError(f"Expected session to have {packets.SESSION_BYTES} bytes.")
        self.parameters, self._colluding = parameters, _validate.integer("colluding", colluding, low=1)
        self._roster = None if roster is None else keys.as_roster(roster)
        self._counters = {} if counters is None else counters
        self._session = Session(parameters, identifier, self._roster is not None)
        self._context = self._session.context
        self._stage = Stage.INVITE
        self._members = frozenset(range(parameters.clients))
        self._neighbours: dict[int, tuple[int, ...]] = {}  # of all who were announced
        self._answered: set[int] = set()
        self._adverts: dict[int, Advert] = {}
        self._public: set[bytes] = set()  # all keys that were announced
        self._cohort = Cohort(parameters.clients, {})  # all who were announced to everybody
        self._listed: dict[int, tuple[int, ...]] = {}  # neighbours announced to each client
        self._commitments: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}  # by sender and receiver
        self._delivered: dict[int, tuple[int, ...]] = {}  # neighbours whose shares each client holds
        self._masks = parameters.masks
        self._words: NDArray[Any] = np.zeros(parameters.dim, self._masks.word)
        self._survivors: frozenset[int] = frozenset()
        self._signed = b""  # what is signed about the survivors
        self._signatures: dict[int, bytes] = {}
        self._shares: dict[int, dict[int, bytes]] = {}  # by owner and holder
        self._result: SecureSum | None = None

    @property
    def stage(self) -> Stage:
        """The open stage, which names the clients' next step."""
        return self._stage

    @property
    def missing(self) -> frozenset[int]:
        """Clients whose answer the open stage is still waiting for."""
        return frozenset() if self._stage in (Stage.INVITE, Stage.DONE) else self._members - self._answered

    def invite(self) -> dict[int, bytes]:
        """Opens the round; returns an invitation for each client."""
        if self._stage is not Stage.INVITE:
            raise StageError("The clients were invited before.")
        self._stage = Stage.ADVERTISE
        return {client: Invitation(self._session, client).write() for client in sorted(self._members)}

    def receive(self, client: int, message: bytes) -> None:
        """Takes one client's answer; the transport must make sure that it is from `client`.

        Raises:
            SecureAggregationError: It is refused and nothing was changed. The subclass says why.
        """
        if self._stage not in _RECEIVERS:
            raise StageError("No answers are expected before the invitations and after the end.")
        if client not in self._members:
            raise SenderError(f"Client {client} has no part in this stage.")
        if client in self._answered:
            raise StageError(f"Client {client} has answered before.")
        kind, take = _RECEIVERS[self._stage]
        take(self, client, self._session.read(message, kind, client))
        self._answered.add(client)

    def advance(self) -> dict[int, bytes]:
        """Closes the stage, drops who has not answered, and returns the next message for each of the others.

        Raises:
            ThresholdError: Too few answers. Nothing was changed: more may come, or the round is given up.
            ShareError: The revealed shares do not give some secret, so there is no sum.
        """
        if self._stage not in _CLOSERS:
            raise StageError("There is no open stage to close.")
        messages = _CLOSERS[self._stage](self)
        self._members = frozenset(messages)
        self._answered = set()
        return messages

    def result(self) -> SecureSum:
        """Returns the sum over the survivors, after the last stage."""
        if self._result is None:
            raise StageError("There is no sum before the last stage is closed.")
        return self._result

    def judge(self, accuser: int, accused: int, proof: bytes) -> tuple[int, str] | None:
        """Returns the client that a complaint about a box proves to lie, with the reason; None if it proves nothing.

        Args:
            accuser: The client that cannot use what another one sealed for it.
            accused: That other one.
            proof: Of the secret that the two share (`cpsgd.secagg.keys`); may be empty.
        """
        if self._stage is not Stage.MASK or accused not in self._delivered.get(accuser, ()):
            return None
        box, (sender, receiver) = self._sealed[accused][accuser], (self._adverts[accused], self._adverts[accuser])
        route = keys.Route(self._context, accused, accuser, sender.keys, receiver.keys)
        if not route.is_signed(box):
            return accused, f"It did not sign what it sealed for client {accuser}."
        if not proof:
            return None
        try:
            route.read(route.proved_secret(proof), box)
        except ShareError:
            return accused, f"It signed what are no shares for client {accuser}: the box was opened."
        except MessageError:
            return accuser, f"Its proof against client {accused} is wrong."
        return accuser, f"It complained about client {accused} without a reason: the box was opened."

    def __repr__(self) -> str:
        return f"SecureServer(round={self.parameters.round}, stage={self._stage.name}, clients={len(self._members)})"

    # ------------------------------------------------------------------ answers

    def _take_advert(self, client: int, body: memoryview) -> None:
        """Takes a client's public keys."""
        advert = Advert.from_bytes(bytes(body))
        advert.check(self._session, client, self._roster)
        # A key that agrees on nothing would stop all neighbours; better to stop its owner.
        probe = X25519PrivateKey.generate()
        keys.agree_on_channel(probe, advert.channel_key)
        keys.agree(probe, advert.mask_key)
        announced = advert.channel_key, advert.mask_key, advert.identity
        if len(set(announced)) != len(announced) or not self._public.isdisjoint(announced):
            raise SenderError(f"Client {client} repeats a public key.")
        if self._roster is not None:
            check_counter(client, advert.counter, self._counters.get(advert.identity))
            self._counters[advert.identity] = advert.counter
        self._public.update(announced)
        self._adverts[client] = advert

    def _take_shares(self, client: int, body: memoryview) -> None:
        receivers = self._listed[client]
        sealed = packets.split_entries(body[_COMMITMENT_BYTES:], keys.BOX_BYTES, len(receivers))
        self._commitments[client] = bytes(body[:_COMMITMENT_BYTES])
        self._sealed[client] = dict(zip(receivers, sealed, strict=True))

    def _take_upload(self, client: int, body: memoryview) -> None:
        self._masks.add(self._words, self._masks.from_bytes(body, self.parameters.dim))

    def _take_confirmation(self, client: int, body: memoryview) -> None:
        (signature,) = packets.split_entries(body, keys.SIGNATURE_BYTES, 1)
        keys.verify(self._adverts[client].identity, signature, self._signed, client)
        self._signatures[client] = signature

    def _take_revelation(self, client: int, body: memoryview) -> None:
        """Keeps the shares that a client reveals: those that other clients sent to it, and its own."""
        owners = sorted((*self._delivered[client], client))
        shares = packets.split_entries(body, shamir.SHARE_BYTES, len(owners))
        for share in shares:
            shamir.check(share)
        for owner, share in zip(owners, shares, strict=True):
            self._shares.setdefault(owner, {})[client] = share

    # ------------------------------------------------------------------ ends of stages

    def _close_adverts(self) -> dict[int, bytes]:
        """Ends the advertisement of keys; returns each client's list of keys."""
        cohort = Cohort.of(self.parameters.clients, {client: self._adverts[client] for client in self._answered})
        neighbours = {client: cohort.neighbours(self._session, client) for client in cohort.members}
        members = self._viable(neighbours)
        self._cohort, self._neighbours = cohort, neighbours
        # Also of those who have too few neighbours to go on: the list says that they take part.
        self._listed = {client: self._within(client, frozenset(cohort.members)) for client in members}
        self._stage = Stage.SHARE
        everybody, messages = self._cohort.to_bytes(), {}
        for client, listed in sorted(self._listed.items()):
            adverts = packets.write_entries({other: self._adverts[other].to_bytes() for other in listed})
            messages[client] = self._session.write(Kind.KEYS, client, everybody, adverts)
        return messages

    def _close_shares(self) -> dict[int, bytes]:
        """Ends the sharing of secrets; returns each client's sealed shares."""
        members = self._viable(self._neighbours)
        self._delivered = {client: self._within(client, members) for client in members}
        self._stage = Stage.MASK
        return {
            client: self._session.write(
                Kind.DELIVERY,
                client,
                packets.write_entries({other: self._sealed[other][client] for other in delivered}),
            )
            for client, delivered in sorted(self._delivered.items())
        }

    def _close_uploads(self) -> dict[int, bytes]:
        """Ends the uploads; returns the list of survivors to be signed."""
        survivors = frozenset(self._answered)
        if len(survivors) < self.parameters.surviving:
            raise ThresholdError(
                f"{len(survivors)} clients contributed; the sum of fewer than {self.parameters.surviving} stays hidden."
            )
        self._check_quorum(survivors)
        self._check_holders(survivors)
        self._survivors = survivors
        self._signed = Statement(self._session, self._cohort, survivors).to_bytes()
        self._sealed.clear()
        self._stage = Stage.CONFIRM
        return {client: self._session.write(Kind.SURVIVORS, client, self._announced()) for client in sorted(survivors)}

    def _close_confirmations(self) -> dict[int, bytes]:
        """Ends the signing; returns the requests to reveal shares."""
        confirmed = frozenset(self._answered)
        self._check_quorum(confirmed)
        self._check_holders(confirmed)
        self._stage = Stage.UNMASK
        quorum = sorted(confirmed)[: self.parameters.quorum]
        body = self._announced() + packets.write_entries({client: self._signatures[client] for client in quorum})
        return {client: self._session.write(Kind.REQUEST, client, body) for client in sorted(confirmed)}

    def _close_revelations(self) -> dict[int, bytes]:
        """Removes all masks with the shares that were revealed, and stores the sum."""
        self._check_holders(frozenset(self._answered))
        words, recovery = self._words.copy(), Recovery(self.parameters.threshold, self._colluding)
        self._masks.apply(words, self._masks_to_remove(recovery))
        disputed = tuple(sorted(recovery.disputed))
        self._result = SecureSum(self._masks.integers(words), tuple(sorted(self._survivors)), disputed)
        self._shares.clear()
        self._stage = Stage.DONE
        return {}

    # ------------------------------------------------------------------ who is left

    def _within(self, client: int, members: frozenset[int]) -> tuple[int, ...]:
        return tuple(other for other in self._neighbours[client] if other in members)

    def _viable(self, neighbours: Mapping[int, tuple[int, ...]]) -> frozenset[int]:
        """Returns the clients that answered and have enough neighbours left that can go on, too."""
        members, fewest = frozenset(self._answered), self.parameters.threshold - 1
        while lonely := {client for client in members if len(members.intersection(neighbours[client])) < fewest}:
            members -= lonely
        needed = max(self.parameters.surviving, self.parameters.quorum)
        if len(members) < needed:
            raise ThresholdError(
                f"{len(self._answered)} clients answered, of whom {len(members)} have enough neighbours left; "
                f"the round needs {needed}."
            )
        return members

    def _check_quorum(self, left: frozenset[int]) -> None:
        if len(left) < self.parameters.quorum:
            raise ThresholdError(
                f"{len(left)} clients are left, and the survivors must be confirmed by {self.parameters.quorum}."
            )

    def _check_holders(self, holders: frozenset[int]) -> None:
        """Refuses to go on if the shares of a secret cannot be enough.

        The secret of a dropped client without surviving neighbours would not be needed. But between it and the
        survivors on the circle there is either a dropped client with survivors on one side only, at most k/2 and fewer
        than t, or a gap so wide that the graph is not connected. Both are reasons to stop.
        """
        for client, delivered in self._delivered.items():
            left = sum(other in holders for other in (*delivered, client))
            if left < self.parameters.threshold:
                raise ThresholdError(
                    f"Of the neighbourhood of client {client} only {left} are left, "
                    f"and its secret takes {self.parameters.threshold} shares."
                )

    # ------------------------------------------------------------------ secrets

    def _announced(self) -> bytes:
        return packets.write_set(self._survivors, self.parameters.clients)

    def _masks_to_remove(self, recovery: Recovery) -> Iterator[tuple[bytes, int]]:
        """Yields the keys of the survivors' own masks, and of those shared with dropped clients, with their signs."""
        for client in sorted(self._delivered):
            if client in self._survivors:
                seed = recovery.secret(client, self._shares[client], self._fits_commitment(client))
                yield keys.self_mask_key(seed, self._context, client), -1
                continue
            secret = recovery.secret(client, self._shares[client], self._fits_advert(client))
            private = X25519PrivateKey.from_private_bytes(secret)
            for other in self._within(client, self._survivors):
                key = keys.pair_mask_key(private, self._adverts[other].mask_key, self._context, client, other)
                # The survivor with the smaller number added the mask, the one with the larger subtracted it.
                yield key, -1 if other < client else 1

    def _fits_commitment(self, client: int) -> Callable[[bytes], bool]:
        expected = self._commitments[client]
        return lambda secret: keys.commitment(secret, self._context, client) == expected

    def _fits_advert(self, client: int) -> Callable[[bytes], bool]:
        public = self._adverts[client].mask_key
        return lambda secret: X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == public


_RECEIVERS: dict[Stage, tuple[Kind, Callable[[SecureServer, int, memoryview], None]]] = {
    Stage.ADVERTISE: (Kind.ADVERTISEMENT, SecureServer._take_advert),
    Stage.SHARE: (Kind.SHARES, SecureServer._take_shares),
    Stage.MASK: (Kind.UPLOAD, SecureServer._take_upload),
    Stage.CONFIRM: (Kind.CONFIRMATION, SecureServer._take_confirmation),
    Stage.UNMASK: (Kind.REVELATION, SecureServer._take_revelation),
}
_CLOSERS: dict[Stage, Callable[[SecureServer], dict[int, bytes]]] = {
    Stage.ADVERTISE: SecureServer._close_adverts,
    Stage.SHARE: SecureServer._close_shares,
    Stage.MASK: SecureServer._close_uploads,
    Stage.CONFIRM: SecureServer._close_confirmations,
    Stage.UNMASK: SecureServer._close_revelations,
}
