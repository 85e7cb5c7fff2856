"""`SecureClient`: a client's half of a round of secure aggregation."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from cpsgd.errors import (
    InvitationError,
    MessageError,
    ParameterError,
    SecureVersionError,
    SenderError,
    ShareError,
    SignatureError,
    StageError,
    ThresholdError,
)
from cpsgd.secagg import keys, packets, shamir
from cpsgd.secagg.cohort import ADVERT_BYTES, Advert, Cohort, Statement
from cpsgd.secagg.keys import BOX_BYTES, SHARES_BYTES, ChannelKey, Route
from cpsgd.secagg.packets import Invitation, Kind, Session, Stage
from cpsgd.secagg.parameters import SecureParameters

_MAGIC = b"cpsk"
_VERSION = 3
_HEAD = struct.Struct("<4sBB")
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_STAGES = tuple(stage for stage in Stage if stage is not Stage.UPLOAD)
_SECTIONS = 10


class SecureClient:
    """Takes part in one round: each method answers one message of the server, once and in order.

    The order is `advertise`, `share`, `mask`, `confirm`, `unmask`; `stage` names the next. A message that is refused
    raises a `SecureAggregationError` and changes nothing. The client signs one set of survivors, and reveals only what
    a quorum has signed with it: for any other client at most one secret's share, whatever it is asked. Secrets are
    never printed, copied or pickled; `export_state` is the only way out, for engines whose client process ends between
    messages.

    Example:
        >>> import numpy as np
        >>> from cpsgd.secagg import SecureClient, SecureParameters, SecureServer
        >>> parameters = SecureParameters.choose(3, 4, 8, fingerprint=bytes(16), round=0)
        >>> server = SecureServer(parameters)
        >>> clients = [SecureClient(expected=parameters) for _ in range(3)]
        >>> values = np.array([1, 2, 3, 250], np.uint32)
        >>> for i, message in server.invite().items():
        ...     server.receive(i, clients[i].advertise(message))
        >>> for i, message in server.advance().items():
        ...     server.receive(i, clients[i].share(message))
        >>> for i, message in server.advance().items():
        ...     server.receive(i, clients[i].mask(message, values))
        >>> for i, message in server.advance().items():
        ...     server.receive(i, clients[i].confirm(message))
        >>> for i, message in server.advance().items():
        ...     server.receive(i, clients[i].unmask(message))
        >>> server.advance()
        {}
        >>> server.result().sums
        array([  3,   6,   9, 238], dtype=uint32)
    """

    __slots__ = ("_expected", "_identity", "_index", "_roster", "_state")

    def __init__(
        self,
        index: int | None = None,
        *,
        expected: SecureParameters | None,
        identity: Ed25519PrivateKey | None = None,
        roster: Iterable[bytes] | None = None,
    ) -> None:
        """Waits for an invitation.

        Args:
            index: The number the client must have in the round; None to take what the server gives.
            expected: The parameters it agrees to; any others are refused. None trusts the server with the choice.
            identity: The key the client signs with; together with `roster`. Without, it makes one for the round.
            roster: Raw Ed25519 public keys (32 bytes) of all who may take part, the same for all of them. An active
                server can then not invent clients. Without `index` it must hold exactly as many keys as the round has
                clients; with it, colluding members who have no number of their own count twice.
        """
        self._index = index
        self._expected = expected
        self._identity, self._roster = _signing(identity, roster)
        self._state: ClientState | None = ClientState()

    @property
    def stage(self) -> Stage:
        """The client's next stage."""
        return Stage.DONE if self._state is None else self._state.stage

    @property
    def index(self) -> int | None:
        """The client's number in the round, once it is known."""
        invitation = None if self._state is None else self._state.invitation
        return self._index if invitation is None else invitation.client

    @property
    def counters(self) -> dict[int, tuple[bytes, int]]:
        """Identity and counter of each neighbour, by number, while the client waits for their shares."""
        adverts = {} if self._state is None else self._state.adverts
        return {client: (each.identity, each.counter) for client, each in adverts.items() if client != self.index}

    # ------------------------------------------------------------------ stages

    def advertise(self, invitation: bytes, counter: Callable[[], int] = lambda: 0) -> bytes:
        """Stage 0: accepts an invitation and announces fresh public keys.

        Args:
            invitation: The server's message.
            counter: Called when all is accepted and before anything is signed; returns the advert's counter.

        Raises:
            InvitationError: It is for other parameters, another client, or the server and this client do not agree
                whether there is a roster.
        """
        state = self._in(Stage.ADVERTISE)
        found = Invitation.read(invitation)
        if self._expected is not None and found.session.parameters != self._expected:
            raise InvitationError(f"The server proposes other parameters: {_difference(found, self._expected)}.")
        if self._index is not None and found.client != self._index:
            raise InvitationError(f"The server takes this client for number {found.client}, it is {self._index}.")
        if found.session.signed != (self._roster is not None):
            raise InvitationError(
                "The server and this client do not agree whether there is a roster: both need one, or neither."
            )
        if self._roster is not None and self._index is None and len(self._roster) != found.session.parameters.clients:
            raise InvitationError(
                f"The round is for {found.session.parameters.clients} clients and {len(self._roster)} are on the "
                "roster: a server could give one number to two of them. They must be as many, or index fixed."
            )
        seed, mask = os.urandom(keys.KEY_BYTES), X25519PrivateKey.from_private_bytes(os.urandom(keys.KEY_BYTES))
        public = ChannelKey(seed).public + mask.public_key().public_bytes_raw()
        signer = self._identity or Ed25519PrivateKey.from_private_bytes(os.urandom(keys.KEY_BYTES))
        advert = Advert.make(found.session, found.client, public, signer, self._roster, counter())
        state.invitation = found
        state.signing_private = b"" if self._identity else signer.private_bytes_raw()
        state.channel_private, state.mask_private = seed, mask.private_bytes_raw()
        state.adverts = {found.client: advert}
        state.stage = Stage.SHARE
        return found.session.write(Kind.ADVERTISEMENT, found.client, advert.to_bytes())

    def share(self, keys_message: bytes) -> bytes:
        """Stage 1: learns who takes part, and its neighbours' keys; deals out shares of its mask key and a fresh seed.

        Raises:
            SecureAggregationError: The keys are not of neighbours, repeat, are too few, are not signed as they must, or
                are not those in the list of all who take part.
        """
        state = self._in(Stage.SHARE)
        session, me = _joined(state)
        parameters = session.parameters
        cohort, body = Cohort.read(session.read(keys_message, Kind.KEYS, me), parameters.clients)
        entries = packets.read_entries(body, ADVERT_BYTES, parameters.neighbours)
        adverts = {client: Advert.from_bytes(entry) for client, entry in entries.items()}
        self._check_adverts(cohort, adverts)

        seed = os.urandom(shamir.SECRET_BYTES)
        holders = [*adverts, me]
        seed_shares = shamir.split(seed, parameters.threshold, holders)
        key_shares = shamir.split(state.mask_private, parameters.threshold, holders)
        channel, own = ChannelKey(state.channel_private), state.adverts[me]
        boxes = [
            channel.seal(
                Route(session.context, me, client, own.keys, advert.keys), seed_shares[client] + key_shares[client]
            )
            for client, advert in adverts.items()
        ]
        state.seed, state.own_share = seed, seed_shares[me]
        state.adverts, state.cohort = {**adverts, me: own}, cohort.to_bytes()
        state.stage = Stage.MASK
        return session.write(Kind.SHARES, me, keys.commitment(seed, session.context, me) + b"".join(boxes))

    def mask(self, delivery: bytes, values: NDArray[np.uint32]) -> bytes:
        """Stage 2: takes the neighbours' shares; uploads the integers under all masks.

        Args:
            delivery: The server's message.
            values: `dim` integers of type uint32 below the modulus.

        Raises:
            ShareError: A neighbour's shares cannot be opened. Its text is a complaint, with a proof for the server.
            SecureAggregationError: The shares are too few.
            ParameterError: The values are not what they should be.
        """
        state = self._in(Stage.MASK)
        session, me = _joined(state)
        received, masks = self._opened(delivery), session.parameters.masks
        words = masks.to_words(values, session.parameters.dim)
        mask = X25519PrivateKey.from_private_bytes(state.mask_private)
        applied = [(keys.self_mask_key(state.seed, session.context, me), 1)]
        for client in received:
            key = keys.pair_mask_key(mask, state.adverts[client].mask_key, session.context, me, client)
            applied.append((key, 1 if me < client else -1))
        masks.apply(words, applied)

        state.received, state.adverts = received, {}
        state.channel_private = state.mask_private = state.seed = b""
        state.stage = Stage.CONFIRM
        return session.write(Kind.UPLOAD, me, *masks.to_bytes(words))

    def check_delivery(self, delivery: bytes) -> None:
        """Makes the checks of `mask` on the server's message, before anything is computed from data."""
        self._opened(delivery)

    def confirm(self, survivors: bytes) -> bytes:
        """Stage 3: signs the set of survivors the server announces, together with who takes part. There is no second.

        Raises:
            SecureAggregationError: The survivors are too few, or contradict what this client has seen.
        """
        state = self._in(Stage.CONFIRM)
        session, me = _joined(state)
        body = bytes(session.read(survivors, Kind.SURVIVORS, me))
        statement = self._checked(packets.read_set(body, session.parameters.clients))
        signature = statement.sign(self._identity or Ed25519PrivateKey.from_private_bytes(state.signing_private))
        state.survivors, state.signing_private = body, b""
        state.stage = Stage.UNMASK
        return session.write(Kind.CONFIRMATION, me, signature)

    def unmask(self, request: bytes) -> bytes:
        """Stage 4: reveals of each neighbour one share: of a survivor's seed, or of a dropped client's mask key.

        Raises:
            SecureAggregationError: The survivors are not those that this client and a quorum have signed. Nothing is
                revealed.
        """
        state = self._in(Stage.UNMASK)
        session, me = _joined(state)
        body = session.read(request, Kind.REQUEST, me)
        size = packets.set_bytes(session.parameters.clients)
        survivors = packets.read_set(body[:size], session.parameters.clients)
        if body[:size] != state.survivors:
            raise SignatureError("The survivors are not those that this client signed.")
        signatures = packets.read_entries(body[size:], keys.SIGNATURE_BYTES, session.parameters.clients)
        self._checked(survivors).check(signatures)
        shares = {me: state.own_share}
        for client, pair in state.received.items():
            alive = client in survivors
            shares[client] = pair[: shamir.SHARE_BYTES] if alive else pair[shamir.SHARE_BYTES :]
        # Forgotten before anything leaves: what was revealed once cannot be followed by the other secret.
        self._state = ClientState(stage=Stage.DONE, invitation=state.invitation)
        return session.write(Kind.REVELATION, me, b"".join(shares[client] for client in sorted(shares)))

    # ------------------------------------------------------------------ between messages

    def export_state(self) -> bytes:
        """Returns the client's state, secrets included, for `restore`; this object can do nothing more.

        Keep the bytes as private as the vectors, keep only the newest, and replace what is stored *before* the answer
        is sent: a client that is set back to an older state could be made to answer twice.
        """
        if self._state is None:
            raise StageError("The state was moved out of this client before.")
        data, self._state = self._state.to_bytes(), None
        return data

    @classmethod
    def restore(
        cls,
        data: bytes,
        *,
        index: int | None = None,
        expected: SecureParameters | None = None,
        identity: Ed25519PrivateKey | None = None,
        roster: Iterable[bytes] | None = None,
    ) -> Self:
        """Returns the client that `export_state` wrote. Its identity and roster are not in the state: give them again.

        `index` and `expected` matter only for a client that was not invited yet.

        Raises:
            SecureAggregationError: The bytes are damaged, or the client took part in a round set up otherwise.
        """
        client = cls(index, expected=expected, identity=identity, roster=roster)
        state = ClientState.from_bytes(data)
        if state.invitation is not None and state.invitation.session.signed != (client._roster is not None):
            raise InvitationError("The saved client had a roster and this one has not, or the other way round.")
        client._state = state
        return client

    def __repr__(self) -> str:
        return f"SecureClient(index={self.index}, stage={self.stage.name})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A client of secure aggregation cannot be copied or pickled; see export_state.")

    # ------------------------------------------------------------------ checks

    def _in(self, stage: Stage) -> ClientState:
        """Returns the state of a client in this stage; raises `StageError` in any other stage."""
        if self._state is None:
            raise StageError("The state was moved out of this client; restore it and go on with that one.")
        if self._state.stage is not stage:
            raise StageError(f"This client is to {self._state.stage.value} next, not to {stage.value}.")
        return self._state

    def _opened(self, delivery: bytes) -> dict[int, bytes]:
        """Returns the shares that neighbours sealed for this client."""
        state = self._in(Stage.MASK)
        session, me = _joined(state)
        body = session.read(delivery, Kind.DELIVERY, me)
        entries = packets.read_entries(body, BOX_BYTES, session.parameters.neighbours)
        _check_left(session.parameters, len(entries))
        channel, own = ChannelKey(state.channel_private), state.adverts[me]
        received: dict[int, bytes] = {}
        for client, box in entries.items():
            advert = state.adverts.get(client)
            if advert is None or client == me:
                raise SenderError(f"Client {client} is no neighbour that advertised its keys.")
            received[client] = channel.open(Route(session.context, client, me, advert.keys, own.keys), box)
        return received

    def _check_adverts(self, cohort: Cohort, adverts: dict[int, Advert]) -> None:
        """Checks that the server's list of keys is complete, and holds neighbours only."""
        state = self._in(Stage.SHARE)
        session, me = _joined(state)
        parameters = session.parameters
        allowed = cohort.neighbours(session, me)
        strangers = adverts.keys() - set(allowed)
        if strangers:
            raise SenderError(f"Client {min(strangers)} is no neighbour of client {me}.")
        _check_left(parameters, len(adverts))
        everybody = {**adverts, me: state.adverts[me]}
        public = [key for advert in everybody.values() for key in (advert.channel_key, advert.mask_key)]
        if len(set(public)) != len(public):
            raise MessageError("A public key appears twice.")
        cohort.check(session, me, everybody, self._roster)
        hidden = cohort.members.keys() & set(allowed) - adverts.keys()
        if hidden:
            raise MessageError(f"Client {min(hidden)} takes part, and its keys are missing.")

    def _checked(self, survivors: frozenset[int]) -> Statement:
        """Returns the statement to sign about these survivors, if they fit what this client has seen."""
        assert self._state is not None
        session, me = _joined(self._state)
        parameters = session.parameters
        cohort, _ = Cohort.read(self._state.cohort, parameters.clients)
        allowed = cohort.neighbours(session, me)
        if me not in survivors:
            raise SenderError("The server counts this client as dropped, and asks it all the same.")
        if not survivors <= cohort.members.keys():
            raise SenderError("The server counts a client as surviving that takes no part.")
        if not survivors.isdisjoint(set(allowed) - self._state.received.keys()):
            raise ShareError("The server counts a neighbour as surviving whose shares it did not deliver.")
        if len(survivors) < parameters.surviving:
            raise ThresholdError(
                f"{len(survivors)} contributions are left; the sum of fewer than {parameters.surviving} stays hidden."
            )
        if len(survivors.intersection(allowed)) + 1 < parameters.threshold:
            raise ThresholdError(f"Fewer than {parameters.threshold} of this client's neighbourhood are left.")
        return Statement(session, cohort, survivors)


def _check_left(parameters: SecureParameters, left: int) -> None:
    """Raises an error if too few neighbours are left for this client ever to agree to unmask.

    Other clients, to whom the server showed more neighbours, might agree. The upload, which lacks the masks of withheld
    neighbours, could then be unmasked in a smaller sum than any client agreed to.
    """
    if left + 1 < parameters.threshold:
        raise ThresholdError(f"{left} neighbours are left, too few for threshold {parameters.threshold}.")
    if parameters.clients - (parameters.neighbours - left) < parameters.surviving:
        raise ThresholdError(f"{left} neighbours are left, too few for a sum of {parameters.surviving} clients.")


def _joined(state: ClientState) -> tuple[Session, int]:
    """Returns the session a client has joined, and its number there."""
    assert state.invitation is not None
    return state.invitation.session, state.invitation.client


def _signing(
    signer: Ed25519PrivateKey | None, roster: Iterable[bytes] | None
) -> tuple[Ed25519PrivateKey | None, frozenset[bytes] | None]:
    """Returns the identity and the roster, which must be given together."""
    if roster is None and signer is None:
        return None, None
    if roster is None or signer is None:
        raise ParameterError("Give both identity and roster, or neither.")
    known = keys.as_roster(roster)
    if keys.public_bytes(signer) not in known:
        raise ParameterError("Expected identity to be on the roster.")
    return signer, known


def _difference(found: Invitation, expected: SecureParameters) -> str:
    proposed = found.session.parameters
    names = [f for f in SecureParameters.__dataclass_fields__ if getattr(proposed, f) != getattr(expected, f)]
    return "; ".join(
        name if name == "fingerprint" else f"{name}={getattr(proposed, name)}, not {getattr(expected, name)}"
        for name in names
    )


# ---------------------------------------------------------------------- the state between messages


@dataclass(repr=False)
class ClientState:
    """Everything a client must remember. Secrets are forgotten as soon as no later stage needs them.

    Attributes:
        stage: The client's next stage.
        invitation: The invitation it agreed to; None before.
        channel_private: Seed of the channel key, until the shares are delivered.
        mask_private: X25519 private key of the masks, until the upload.
        signing_private: Ed25519 private key that was made for the round, until the survivors are signed; with a roster
            there is none.
        seed: Of its own mask, until the upload.
        own_share: Its share of its own seed.
        adverts: Of itself and of the neighbours announced to it, until the upload.
        cohort: All who take part, as bytes.
        received: Of each neighbour: a share of its seed, then a share of its mask key.
        survivors: The set of survivors it signed, as bytes.
    """

    stage: Stage = Stage.ADVERTISE
    invitation: Invitation | None = None
    channel_private: bytes = b""
    mask_private: bytes = b""
    signing_private: bytes = b""
    seed: bytes = b""
    own_share: bytes = b""
    adverts: dict[int, Advert] = field(default_factory=dict)
    cohort: bytes = b""
    received: dict[int, bytes] = field(default_factory=dict)
    survivors: bytes = b""

    def to_bytes(self) -> bytes:
        """Returns the state, not encrypted."""
        sections = [
            self.invitation.write() if self.invitation else b"",
            *(self.channel_private, self.mask_private, self.signing_private, self.seed, self.own_share),
            packets.write_entries({client: advert.to_bytes() for client, advert in self.adverts.items()}),
            self.cohort,
            packets.write_entries(self.received),
            self.survivors,
        ]
        body = _HEAD.pack(_MAGIC, _VERSION, _STAGES.index(self.stage))
        body += b"".join(_LENGTH.pack(len(section)) + section for section in sections)
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """Reads what `to_bytes` wrote.

        Raises:
            SecureAggregationError: The bytes are damaged.
        """
        sections, stage = _sections(data)
        invited, channel, mask, signing, seed, own_share, listed, cohort, received, survivors = sections
        invitation = Invitation.read(invited) if invited else None
        if (invitation is None) != (stage is Stage.ADVERTISE):
            raise MessageError("The saved state contradicts itself.")
        if any(len(secret) not in (0, keys.KEY_BYTES) for secret in (channel, mask, signing, seed)):
            raise MessageError("The saved state holds a key of the wrong length.")
        if len(own_share) not in (0, shamir.SHARE_BYTES):
            raise MessageError("The saved state holds a share of the wrong length.")
        most = invitation.session.parameters.neighbours + 1 if invitation else 0
        entries = packets.read_entries(listed, ADVERT_BYTES, most)
        adverts = {client: Advert.from_bytes(entry) for client, entry in entries.items()}
        shares = packets.read_entries(received, SHARES_BYTES, most)
        return cls(stage, invitation, channel, mask, signing, seed, own_share, adverts, cohort, shares, survivors)


def _sections(data: bytes) -> tuple[list[bytes], Stage]:
    """Returns the sections of a saved state, and its stage."""
    if not isinstance(data, bytes) or len(data) < _HEAD.size + _DIGEST_BYTES:
        raise MessageError("Not the saved state of a client: too short.")
    magic, version, stage = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise MessageError("Not the saved state of a client: the first four bytes are not 'cpsk'.")
    if version != _VERSION:
        raise SecureVersionError(
            f"The saved state has version {version}; this release reads {_VERSION}. A round is ended with the release "
            "it was begun with: leave this one, and take part in the next."
        )
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise MessageError("The digest does not match: the saved state was damaged.")
    sections: list[bytes] = []
    start = _HEAD.size
    while start + _LENGTH.size <= len(body):
        (length,) = _LENGTH.unpack_from(body, start)
        sections.append(bytes(body[start + _LENGTH.size : start + _LENGTH.size + length]))
        start += _LENGTH.size + length
    if start != len(body) or len(sections) != _SECTIONS or not 0 < stage < len(_STAGES):
        raise MessageError("The saved state is malformed.")
    return sections, _STAGES[stage]
