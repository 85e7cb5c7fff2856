"""What a server that does not follow the protocol may try, and how it is refused."""

from __future__ import annotations

from itertools import product

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.codec.wire import checksum
from cpsgd.errors import (
    InvitationError,
    MessageError,
    SecureFingerprintError,
    SecureRoundError,
    SenderError,
    ShareError,
    SignatureError,
    StageError,
    ThresholdError,
)
from cpsgd.secagg import SecureClient, SecureParameters, Stage, packets, shamir
from cpsgd.secagg.cohort import Advert, Statement
from cpsgd.secagg.keys import BOX_BYTES
from cpsgd.secagg.packets import Kind

from .rounds import FINGERPRINT, IDENTITIES, ROSTER, Round, keys_message, new_round, parameters
from .test_dropouts import subsets

ME = 0


def announce(current: Round, survivors: set[int], client: int = ME) -> bytes:
    """A request to confirm a set of survivors of the server's own choice."""
    body = packets.write_set(survivors, current.server.parameters.clients)
    return current.server._session.write(Kind.SURVIVORS, client, body)


def signed(current: Round, survivors: set[int], signers: set[int] | None = None) -> dict[int, bytes]:
    """Signatures of clients (all survivors, unless told otherwise), as if they had been told that these survived.

    Honest clients sign one set only; the keys of other states of theirs are taken for this, or their identities.
    """
    statement = Statement(current.server._session, current.server._cohort, frozenset(survivors))
    found = {}
    for client in survivors if signers is None else signers:
        private = IDENTITIES[client] if current.signed else current.signers[client]
        found[client] = statement.sign(private)
    return found


def request(current: Round, survivors: set[int], client: int = ME, signers: set[int] | None = None) -> bytes:
    """A request to unmask with a set of survivors of the server's own choice, under signatures of whoever it takes."""
    body = packets.write_set(survivors, current.server.parameters.clients)
    body += packets.write_entries(signed(current, survivors, signers))
    return current.server._session.write(Kind.REQUEST, client, body)


def unmasked(current: Round, survivors: set[int], client: int = ME) -> bytes:
    """What a client that is to confirm reveals with survivors of the server's own choice."""
    current.clients[client].confirm(announce(current, survivors, client))
    return current.clients[client].unmask(request(current, survivors, client))


def listing(current: Round, adverts: dict[int, Advert]) -> bytes:
    """What says that these take part, and nobody else but this client."""
    return keys_message(current.server._session, ME, current.server._adverts[ME], adverts)


def entries(current: Round, kind: Kind, listed: dict[int, bytes]) -> bytes:
    return current.server._session.write(kind, ME, packets.write_entries(listed))


def test_a_client_answers_one_request_only() -> None:
    current = new_round(parameters(4)).until(Stage.CONFIRM)
    unmasked(current, {0, 1, 2})
    for again in ({0, 1, 2}, {0, 1, 3}, {0, 2, 3}):
        with pytest.raises(StageError):
            current.clients[ME].unmask(request(current, again))


def test_shares_of_one_neighbour_too_few_end_it_before_the_upload_and_before_the_signature() -> None:
    agreed = parameters(6, threshold=5, surviving=2)
    current = new_round(agreed).until(Stage.MASK)
    sealed = {other: current.server._sealed[other][ME] for other in current.server._delivered[ME]}
    fewer, enough = ({other: sealed[other] for other in list(sealed)[:count]} for count in (3, 4))
    with pytest.raises(ThresholdError, match="3 neighbours are left, too few for threshold 5"):
        current.clients[ME].mask(entries(current, Kind.DELIVERY, fewer), current.values[ME])
    current.clients[ME].check_delivery(entries(current, Kind.DELIVERY, enough))
    current.until(Stage.CONFIRM)
    with pytest.raises(ThresholdError, match="Fewer than 5 of this client's neighbourhood"):
        current.clients[ME].confirm(announce(current, {0, 1, 2, 3}))
    current.clients[ME].confirm(announce(current, {0, 1, 2, 3, 4}))


def test_what_was_revealed_is_followed_by_nothing_in_the_saved_state() -> None:
    current = new_round(parameters(4)).until(Stage.UNMASK)
    state = current.clients[ME]._state
    assert state is not None
    shares = [pair[:33] for pair in state.received.values()] + [pair[33:] for pair in state.received.values()]
    client = SecureClient.restore(current.clients[ME].export_state())
    client.unmask(request(current, {0, 1, 2, 3}))
    saved = client.export_state()
    assert not any(share in saved for share in shares)
    with pytest.raises(StageError):
        SecureClient.restore(saved).unmask(request(current, {0, 1, 2}))


@pytest.mark.parametrize(
    ("neighbours", "threshold", "colluding"), [(3, 3, frozenset[int]()), (3, 4, frozenset({1})), (4, 4, frozenset({3}))]
)
def test_no_split_of_the_survivors_gives_both_secrets_of_a_client(
    neighbours: int, threshold: int, colluding: frozenset[int]
) -> None:
    clients = 4 if neighbours == 3 else 6
    current = new_round(parameters(clients, neighbours=neighbours, threshold=threshold)).until(Stage.CONFIRM)
    answers: dict[int, list[frozenset[int]]] = {}
    for client in sorted(set(range(clients)) - colluding):
        answers[client] = []
        for survivors in subsets(frozenset(range(clients))):
            try:
                unmasked(current.copied(), set(survivors), client)
            except (SenderError, ThresholdError):
                continue
            answers[client].append(frozenset(survivors))
    for owner in answers:
        holders = {*current.server._delivered[owner], owner}
        views = [sorted({owner in seen for seen in answers[h]}) for h in sorted(holders - colluding)]
        for told_alive in product(*views):
            seeds = sum(told_alive) + len(holders & colluding)
            private_keys = len(told_alive) - sum(told_alive) + len(holders & colluding)
            assert seeds < threshold or private_keys < threshold


def test_shares_of_both_kinds_never_come_together_and_one_kind_alone_is_not_enough() -> None:
    current = new_round(parameters(4)).until(Stage.MASK)
    secrets = current.clients[1]._state
    assert secrets is not None
    seed, private = secrets.seed, secrets.mask_private
    current.until(Stage.CONFIRM)
    shares: dict[bool, dict[int, bytes]] = {True: {}, False: {}}
    for client, alive in ((0, False), (2, False), (3, True), (1, True)):
        survivors = {0, 1, 2, 3} if alive else {0, 2, 3}
        body = unmasked(current, survivors, client)[packets.HEADER_BYTES :]
        shares[alive][client] = body[33:66]  # the second of four owners
    for kept in shares.values():
        assert shamir.combine(kept) not in (seed, private)


def test_too_few_survivors_are_not_unmasked() -> None:
    current = new_round(parameters(5, surviving=4)).until(Stage.CONFIRM)
    with pytest.raises(ThresholdError, match="fewer than 4 stays hidden"):
        current.clients[ME].confirm(announce(current, {0, 1, 2}))
    sparse = new_round(parameters(6, neighbours=4, threshold=4)).until(Stage.CONFIRM)
    near = sparse.server._neighbours[ME]
    with pytest.raises(ThresholdError, match="neighbourhood"):
        sparse.clients[ME].confirm(announce(sparse, {0, 1, 2, 3, 4, 5} - set(near[:2])))


def test_an_upload_without_the_masks_of_withheld_clients_is_refused() -> None:
    """Clients 6, 7, 8 see only each other and 0, 1. Clients 0 to 5 see everybody and would unmask seven or more; they
    could be told that 0 and 1 dropped out, and would reveal what it takes for the sum of 6, 7 and 8 alone."""
    agreed = parameters(9, threshold=5, surviving=7)
    current = new_round(agreed).until(Stage.MASK)
    sealed = {other: current.server._sealed[other][8] for other in (0, 1, 6, 7)}
    withheld = current.server._session.write(Kind.DELIVERY, 8, packets.write_entries(sealed))
    with pytest.raises(ThresholdError, match="sum of 7"):
        current.clients[8].mask(withheld, current.values[8])
    current.finish()
    hidden = new_round(agreed).until(Stage.SHARE)
    adverts = {other: hidden.server._adverts[other] for other in (1, 6, 7, 8)}
    with pytest.raises(ThresholdError, match="sum of 7"):
        hidden.clients[ME].share(listing(hidden, adverts))
    hidden.finish()


@pytest.mark.parametrize("withheld", [2, 3])
def test_as_many_clients_may_be_withheld_as_the_sum_can_spare(withheld: int) -> None:
    current = new_round(parameters(9, threshold=5, surviving=7)).until(Stage.MASK)
    sealed = {other: current.server._sealed[other][ME] for other in range(1, 9 - withheld)}
    message = entries(current, Kind.DELIVERY, sealed)
    if withheld == 2:
        current.clients[ME].mask(message, current.values[ME])
        return
    with pytest.raises(ThresholdError, match="sum of 7"):
        current.clients[ME].mask(message, current.values[ME])


def test_survivors_that_contradict_what_the_client_has_seen_are_refused() -> None:
    current = new_round(parameters(5)).until(Stage.SHARE)
    current.step(frozenset({4}))
    current.until(Stage.CONFIRM)
    with pytest.raises(ShareError, match="did not deliver"):
        current.clients[ME].confirm(announce(current, {0, 1, 2, 3, 4}))
    with pytest.raises(SenderError, match="counts this client as dropped"):
        current.clients[ME].confirm(announce(current, {1, 2, 3}))
    current.finish()


def test_survivors_that_take_no_part_are_refused() -> None:
    current = new_round(parameters(6))
    current.step(frozenset({3}))
    current.until(Stage.CONFIRM)
    with pytest.raises(SenderError, match="takes no part"):
        current.clients[ME].confirm(announce(current, {0, 1, 2, 3, 4, 5}))
    current.finish()


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK])
def test_messages_of_another_round_attempt_or_protocol_are_refused(stage: Stage) -> None:
    current = new_round(parameters(3)).until(stage)
    others = {
        "an old round": (new_round(parameters(3, round=6)), SecureRoundError),
        "another attempt": (new_round(parameters(3), session=bytes([1]) * 16), SecureRoundError),
    }
    for other, error in others.values():
        with pytest.raises(error):
            current.answer(ME, other.until(stage).waiting[ME])
    header = current.waiting[ME]
    foreign = header[:6] + bytes(16) + header[22:]
    fields, body = foreign[: packets.HEADER_BYTES - 4], foreign[packets.HEADER_BYTES :]
    with pytest.raises(SecureFingerprintError):
        current.answer(ME, fields + packets._CHECKSUM.pack(checksum(fields, body)) + body)
    with pytest.raises(SenderError):
        current.answer(ME, current.waiting[1])
    current.finish()


def test_only_what_was_agreed_is_accepted() -> None:
    agreed = parameters(4)
    for changes in ({"bits": 9}, {"modulus": 200}, {"dim": 6}, {"round": 8}, {"surviving": 3}, {"threshold": 4}):
        started = new_round(parameters(4, **changes))
        with pytest.raises(InvitationError, match=next(iter(changes))):
            SecureClient(expected=agreed).advertise(started.waiting[ME])
    with pytest.raises(InvitationError, match="number 1"):
        SecureClient(2, expected=None).advertise(new_round(agreed).waiting[1])
    with pytest.raises(InvitationError, match="roster"):
        SecureClient(expected=agreed).advertise(new_round(agreed, signed=True).waiting[ME])
    with pytest.raises(InvitationError, match="roster"):
        SecureClient(expected=agreed, identity=IDENTITIES[0], roster=ROSTER).advertise(new_round(agreed).waiting[ME])
    other = SecureParameters(
        **{**{f: getattr(agreed, f) for f in agreed.__dataclass_fields__}, "fingerprint": bytes(16)}
    )
    with pytest.raises(InvitationError) as caught:
        SecureClient(expected=other).advertise(new_round(agreed).waiting[ME])
    assert FINGERPRINT.hex() not in str(caught.value)


def test_keys_of_strangers_and_repeated_keys_are_refused() -> None:
    current = new_round(parameters(6, neighbours=4, threshold=4)).until(Stage.SHARE)
    adverts = current.server._adverts
    near = current.server._neighbours[ME]
    stranger = next(iter(set(range(1, 6)) - set(near)))

    def shown(listed: dict[int, Advert]) -> bytes:
        """These keys, with the true list of all clients."""
        entries = packets.write_entries({other: advert.to_bytes() for other, advert in listed.items()})
        return current.server._session.write(Kind.KEYS, ME, current.server._cohort.to_bytes(), entries)

    client = current.clients[ME]
    listed = {other: adverts[other] for other in near}
    with pytest.raises(SenderError, match="no neighbour"):
        client.share(shown({stranger: adverts[stranger], **dict(list(listed.items())[:3])}))
    with pytest.raises(MessageError, match="twice"):
        client.share(shown({**listed, near[0]: adverts[near[1]]}))
    with pytest.raises(MessageError, match="twice"):
        client.share(shown({**listed, near[0]: adverts[ME]}))
    with pytest.raises(SenderError):
        client.share(shown({**dict(list(listed.items())[:3]), ME: adverts[ME]}))
    with pytest.raises(ThresholdError):
        client.share(shown({near[0]: adverts[near[0]]}))
    with pytest.raises(MessageError, match="keys are missing"):
        client.share(shown(dict(list(listed.items())[:3])))
    session = current.server._session
    other = Advert.make(session, near[0], adverts[near[0]].keys[::-1], current.signers[near[0]], None)
    with pytest.raises(MessageError, match="not in the list"):
        client.share(shown({**listed, near[0]: other}))
    repeated = packets.write_entries({near[0]: adverts[near[0]].to_bytes()}) * 2
    with pytest.raises(MessageError, match="increasing"):
        client.share(session.write(Kind.KEYS, ME, current.server._cohort.to_bytes(), repeated))
    current.finish()


def test_keys_that_agree_on_nothing_are_refused() -> None:
    current = new_round(parameters(4)).until(Stage.SHARE)
    adverts = {client: current.server._adverts[client] for client in (1, 2, 3)}
    weak = Advert.make(current.server._session, 1, bytes(32) + adverts[1].keys[32:], current.signers[1], None)
    with pytest.raises(MessageError, match="honest"):
        current.clients[ME].share(listing(current, {**adverts, 1: weak}))
    current.finish()


def test_shares_that_are_repeated_exchanged_or_invented_are_refused() -> None:
    current = new_round(parameters(4)).until(Stage.MASK)
    sealed = {other: current.server._sealed[other][ME] for other in (1, 2, 3)}
    client, values = current.clients[ME], current.values[ME]
    with pytest.raises(ShareError, match="is not signed"):
        client.mask(entries(current, Kind.DELIVERY, {**sealed, 1: sealed[2], 2: sealed[1]}), values)
    with pytest.raises(ShareError, match="is not signed"):
        client.mask(entries(current, Kind.DELIVERY, {**sealed, 1: current.server._sealed[1][2]}), values)
    with pytest.raises(SenderError):
        client.mask(entries(current, Kind.DELIVERY, {ME: bytes(BOX_BYTES), 1: sealed[1], 2: sealed[2]}), values)
    with pytest.raises(ThresholdError):
        client.mask(entries(current, Kind.DELIVERY, {1: sealed[1]}), values)
    with pytest.raises(MessageError):
        client.mask(entries(current, Kind.DELIVERY, {**sealed, 9: sealed[1]}), values)
    current.finish()


def test_a_client_that_was_not_announced_has_no_shares() -> None:
    current = new_round(parameters(4)).until(Stage.ADVERTISE)
    current.step(frozenset({3}))
    current.until(Stage.MASK)
    sealed = {other: current.server._sealed[other][ME] for other in (1, 2)}
    with pytest.raises(SenderError, match="Client 3"):
        current.clients[ME].mask(entries(current, Kind.DELIVERY, {**sealed, 3: sealed[1]}), current.values[ME])


# ---------------------------------------------------------------------- with a roster


def test_a_server_cannot_put_its_own_keys_in_place_of_a_clients() -> None:
    current = new_round(parameters(3), signed=True).until(Stage.SHARE)
    adverts = current.server._adverts
    own = b"".join(X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(2))
    forged = Advert(own, adverts[1].identity, adverts[1].signature)
    with pytest.raises(SignatureError, match="client 1"):
        current.clients[ME].share(listing(current, {1: forged, 2: adverts[2]}))
    with pytest.raises(SignatureError, match="client 1"):  # signed for another number
        current.clients[ME].share(listing(current, {1: adverts[2]}))


def test_nobody_joins_who_is_not_on_the_roster_and_nobody_twice() -> None:
    agreed = parameters(3)
    current = new_round(agreed, signed=True)
    stranger = Ed25519PrivateKey.generate()
    own_roster = [stranger.public_key().public_bytes_raw()]
    message = SecureClient(1, expected=agreed, identity=stranger, roster=own_roster).advertise(current.waiting[1])
    with pytest.raises(SignatureError, match="nobody on the roster"):
        current.server.receive(1, message)
    current.server.receive(0, current.answer(0))
    twin = SecureClient(1, expected=agreed, identity=IDENTITIES[0], roster=ROSTER)
    with pytest.raises(SenderError, match="repeats"):
        current.server.receive(1, twin.advertise(current.waiting[1]))
    # The same seen by a client, if the server looks away.
    current.server._public.clear()
    twin = SecureClient(1, expected=agreed, identity=IDENTITIES[0], roster=ROSTER)
    current.server.receive(1, twin.advertise(current.waiting[1]))
    current.server.receive(2, current.answer(2))
    keys = current.server.advance()
    with pytest.raises(SignatureError, match="same person"):
        current.clients[2].share(keys[2])


def test_an_advert_of_another_attempt_is_refused_even_in_the_same_round() -> None:
    old = new_round(parameters(3), signed=True, session=b"another attempt!").until(Stage.SHARE)
    current = new_round(parameters(3), signed=True).until(Stage.SHARE)
    adverts = {1: old.server._adverts[1], 2: current.server._adverts[2]}
    with pytest.raises(SignatureError, match="client 1"):
        current.clients[ME].share(listing(current, adverts))


def test_clients_with_different_rosters_refuse_each_other() -> None:
    """Also where both are on both: those who go on together know the same people."""
    agreed = parameters(3)
    longer = ROSTER | {Ed25519PrivateKey.generate().public_key().public_bytes_raw()}
    current = new_round(agreed, signed=True)
    other = SecureClient(1, expected=agreed, identity=IDENTITIES[1], roster=longer)
    message = other.advertise(current.waiting[1])
    with pytest.raises(SignatureError, match="roster is not the same"):
        current.server.receive(1, message)
    for client in (0, 2):
        current.server.receive(client, current.answer(client))
    # The same seen by clients, if the server does not care.
    adverts = {**current.server._adverts, 1: Advert.from_bytes(message[packets.HEADER_BYTES :])}
    with pytest.raises(SignatureError, match="client 1"):
        current.clients[ME].share(listing(current, {1: adverts[1], 2: adverts[2]}))
    keys = keys_message(current.server._session, 1, adverts[1], {0: adverts[0], 2: adverts[2]})
    with pytest.raises(SignatureError, match="client 0"):
        other.share(keys)


@pytest.mark.parametrize("with_roster", [False, True])
def test_clients_that_were_told_different_survivors_reveal_nothing(with_roster: bool) -> None:
    current = new_round(parameters(4), signed=with_roster).until(Stage.CONFIRM)
    session = current.server._session
    views = {0: {0, 1, 2}, 1: {0, 1, 2, 3}, 2: {0, 1, 2}, 3: {0, 1, 2, 3}}
    signatures = {}
    for client, view in views.items():
        announced = announce(current, view, client)
        signatures[client] = current.clients[client].confirm(announced)[packets.HEADER_BYTES :]
    for client, view in views.items():
        everybody = {other: signatures[other] for other in view}
        body = packets.write_set(view, 4) + packets.write_entries(everybody)
        with pytest.raises(SignatureError):
            current.clients[client].unmask(session.write(Kind.REQUEST, client, body))
        agreeing = {other: signatures[other] for other in view if views[other] == view}
        body = packets.write_set(view, 4) + packets.write_entries(agreeing)
        with pytest.raises(ThresholdError):
            current.clients[client].unmask(session.write(Kind.REQUEST, client, body))
        other_view = {0, 1, 2, 3} if len(view) == 3 else {0, 1, 2} | {client}
        if other_view != view:
            body = packets.write_set(other_view, 4) + packets.write_entries(everybody)
            with pytest.raises(SignatureError, match="not those that this client signed"):
                current.clients[client].unmask(session.write(Kind.REQUEST, client, body))


def test_a_confirmation_by_somebody_else_does_not_count() -> None:
    current = new_round(parameters(4), signed=True).until(Stage.UNMASK)
    session, announced = current.server._session, packets.write_set({0, 1, 2, 3}, 4)
    own = current.server._signatures
    for wrong in ({0: own[0], 1: own[2], 2: own[1]}, {0: own[0], 1: own[0], 2: own[0]}):
        body = announced + packets.write_entries(wrong)
        with pytest.raises(SignatureError):
            current.clients[ME].unmask(session.write(Kind.REQUEST, ME, body))
    current.finish()


def test_confirmations_of_an_earlier_attempt_do_not_count_even_under_the_same_session() -> None:
    agreed, announced = parameters(4), packets.write_set({0, 1, 2, 3}, 4)
    earlier = new_round(agreed, signed=True).until(Stage.UNMASK)
    current = new_round(agreed, signed=True).until(Stage.CONFIRM)
    assert current.server._session == earlier.server._session
    own = current.answer(ME)[packets.HEADER_BYTES :]
    session, old = current.server._session, earlier.server._signatures
    body = announced + packets.write_entries({ME: own, 1: old[1], 2: old[2]})
    with pytest.raises(SignatureError, match="client 1"):
        current.clients[ME].unmask(session.write(Kind.REQUEST, ME, body))
    with pytest.raises(SignatureError, match="client 1"):
        current.server.receive(1, session.write(Kind.CONFIRMATION, 1, old[1]))


def test_who_is_not_among_the_survivors_cannot_confirm_them() -> None:
    current = new_round(parameters(5), signed=True).until(Stage.CONFIRM)
    session, announced = current.server._session, packets.write_set({0, 1, 2}, 5)
    current.clients[ME].confirm(session.write(Kind.SURVIVORS, ME, announced))
    signatures = signed(current, {0, 1, 2}, {0, 1, 2, 3})
    body = announced + packets.write_entries(signatures)
    with pytest.raises(SenderError, match="Client 3"):
        current.clients[ME].unmask(session.write(Kind.REQUEST, ME, body))
    del signatures[3]
    current.clients[ME].unmask(session.write(Kind.REQUEST, ME, announced + packets.write_entries(signatures)))
