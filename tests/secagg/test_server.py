"""The server's order of stages, refused answers, and what goes on without the offender."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest

from cpsgd.errors import (
    MessageError,
    ParameterError,
    SecureAggregationError,
    SecureRoundError,
    SecureVersionError,
    SenderError,
    ShareError,
    SignatureError,
    StageError,
    ThresholdError,
)
from cpsgd.secagg import SecureClient, SecureServer, Stage, offenders, packets, shamir
from cpsgd.secagg.cohort import Advert
from cpsgd.secagg.packets import Kind

from .rounds import IDENTITIES, new_client, new_round, parameters

STAGES = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]


def test_calls_out_of_order_are_refused() -> None:
    server = SecureServer(parameters(3))
    for early in (lambda: server.receive(0, b""), server.advance, server.result):
        with pytest.raises(StageError):
            early()
    current = new_round(parameters(3))
    with pytest.raises(StageError, match="before"):
        current.server.invite()
    current.finish()
    for late in (lambda: current.server.receive(0, b""), current.server.advance, current.server.invite):
        with pytest.raises(StageError):
            late()
    assert repr(current.server) == "SecureServer(round=7, stage=DONE, clients=0)"


@pytest.mark.parametrize("stage", STAGES)
def test_answers_that_are_repeated_misdirected_or_of_the_wrong_kind_are_refused(stage: Stage) -> None:
    current = new_round(parameters(3)).until(stage)
    first, second = current.answer(0), current.answer(1)
    server = current.server
    with pytest.raises(SenderError, match="not client 1"):
        server.receive(1, first)
    with pytest.raises(SenderError, match="no part"):
        server.receive(3, first)
    server.receive(0, first)
    with pytest.raises(StageError, match="answered before"):
        server.receive(0, first)
    for kind in Kind:
        with pytest.raises(SecureAggregationError):
            server.receive(1, server._session.write(kind, 1, b"\x01" * 7))
    for wrong in (second[:-1], second + b"\0", b"", second[:20], b"x" + second[1:]):
        with pytest.raises(MessageError):
            server.receive(1, wrong)
    with pytest.raises(MessageError):
        server.receive(1, bytearray(second))
    with pytest.raises(SecureVersionError):
        server.receive(1, second[:4] + b"\x02" + second[5:])
    server.receive(1, second)
    current.waiting = {2: current.waiting[2]}
    found = current.finish()
    np.testing.assert_array_equal(found.sums, current.expected((0, 1, 2)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_of_another_attempt_is_refused_and_the_round_goes_on(stage: Stage) -> None:
    current = new_round(parameters(4)).until(stage)
    stale = new_round(parameters(4), session=bytes([9]) * 16).until(stage).answer(3)
    with pytest.raises(SecureRoundError, match="another attempt"):
        current.server.receive(3, stale)
    current.step(frozenset({3}))
    found = current.finish()
    assert found.survivors == ((0, 1, 2, 3) if stage in (Stage.CONFIRM, Stage.UNMASK) else (0, 1, 2))
    np.testing.assert_array_equal(found.sums, current.expected(found.survivors))


def test_keys_that_agree_on_nothing_are_refused_before_they_reach_anybody() -> None:
    current = new_round(parameters(3))
    keys, session = current.answer(0)[packets.HEADER_BYTES :][:64], current.server._session

    def advert(client: int, public: bytes) -> bytes:
        made = Advert.make(session, client, public, IDENTITIES[client], None)
        return session.write(Kind.ADVERTISEMENT, client, made.to_bytes())

    low_order = (bytes(32), (1).to_bytes(32, "little"))
    for public in [point + keys[32:] for point in low_order] + [keys[:32] + point for point in low_order]:
        with pytest.raises(MessageError, match="honest"):
            current.server.receive(0, advert(0, public))
    with pytest.raises(SenderError, match="repeats"):
        current.server.receive(0, advert(0, keys[:32] * 2))
    current.server.receive(0, advert(0, keys))
    with pytest.raises(SenderError, match="repeats"):
        current.server.receive(1, advert(1, keys))


def test_one_wrong_share_of_each_secret_does_no_harm_and_more_are_noticed() -> None:
    current = new_round(parameters(5)).until(Stage.MASK)
    current.step(frozenset({4}))
    current.until(Stage.UNMASK)
    honest = {client: current.answer(client) for client in range(4)}
    session = current.server._session

    def lie(client: int) -> bytes:
        body = honest[client][packets.HEADER_BYTES :]
        shares = [int.from_bytes(body[i : i + 33], "big") for i in range(0, len(body), 33)]
        wrong = b"".join(((share + 1) % shamir.PRIME).to_bytes(33, "big") for share in shares)
        return session.write(Kind.REVELATION, client, wrong)

    one, two = current.copied(), current.copied()
    for client in range(4):
        one.server.receive(client, lie(client) if client == 2 else honest[client])
        two.server.receive(client, lie(client) if client in (1, 2) else honest[client])
    one.server.advance()
    found = one.server.result()
    np.testing.assert_array_equal(found.sums, current.expected((0, 1, 2, 3)))
    # Client 4 dropped out, and three shares of its mask key were right.
    assert found.disputed == tuple((owner, 2) for owner in range(5))
    assert offenders(found.disputed, most=3) == {2}
    with pytest.raises(ShareError, match="do not give it"):
        two.server.advance()
    with pytest.raises(StageError):
        two.server.result()


def test_a_wrong_signature_of_the_survivors_is_refused_and_the_round_goes_on() -> None:
    current = new_round(parameters(4), signed=True).until(Stage.CONFIRM)
    other = current.copied().answer(1)[packets.HEADER_BYTES :]
    with pytest.raises(SignatureError, match="client 0"):
        current.server.receive(0, current.server._session.write(Kind.CONFIRMATION, 0, other))
    current.step(frozenset({0}))
    found = current.finish()
    assert found.survivors == (0, 1, 2, 3)
    np.testing.assert_array_equal(found.sums, current.expected(found.survivors))


def test_a_share_that_is_no_number_is_refused() -> None:
    current = new_round(parameters(3)).until(Stage.UNMASK)
    genuine = current.answer(0)[packets.HEADER_BYTES :]
    wrong = current.server._session.write(Kind.REVELATION, 0, b"\xff" * 33 + genuine[33:])
    with pytest.raises(ShareError):
        current.server.receive(0, wrong)


def test_a_client_sends_little_beside_its_integers() -> None:
    """What a round costs a client, and that up to 250 neighbours stay within 46 kB."""

    def overhead(neighbours: int) -> int:
        return 5 * packets.HEADER_BYTES + 168 + (32 + 146 * neighbours) + 64 + 33 * (neighbours + 1)

    current = new_round(parameters(6, dim=1000, bits=13))
    sent = 0
    while current.server.stage is not Stage.DONE:
        answers = {client: current.answer(client) for client in current.waiting}
        sent += len(answers[0])
        for client, answer in answers.items():
            current.server.receive(client, answer)
        current.waiting = current.server.advance()
    assert sent == 13 * 1000 // 8 + overhead(5)
    assert overhead(250) < 46_000


def test_a_session_has_sixteen_bytes() -> None:
    with pytest.raises(ParameterError, match="16 bytes"):
        SecureServer(parameters(3), session=b"short")
    one, other = (SecureServer(parameters(3))._session.identifier for _ in range(2))
    assert one != other


def test_a_round_needs_its_quorum_at_every_stage() -> None:
    """More than may be summed: what fewer have signed, a server could have had signed twice."""
    agreed = parameters(6, quorum=5, surviving=2, threshold=4)
    for stage in (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM):
        current = new_round(agreed).until(stage)
        with pytest.raises(ThresholdError, match=r"needs 5|confirmed by 5"):
            current.step(frozenset({4, 5}))
        current.collect(frozenset({5}))
        current.server.advance()
    # Nor are fewer than were agreed summed, with a quorum or without.
    current = new_round(parameters(6, quorum=4, surviving=5)).until(Stage.MASK)
    with pytest.raises(ThresholdError, match="fewer than 5 stays hidden"):
        current.step(frozenset({4, 5}))
    current = new_round(parameters(6, quorum=4, surviving=5))
    with pytest.raises(ThresholdError, match="needs 5"):
        current.step(frozenset({4, 5}))


def test_counters_are_kept_of_those_on_a_roster_and_of_nobody_else() -> None:
    counters: dict[bytes, int] = {}
    current = new_round(parameters(3), signed=True)
    current.server._counters = counters
    current.step()
    assert set(counters) == {key.public_key().public_bytes_raw() for key in IDENTITIES[:3]}
    unsigned = new_round(parameters(3))
    unsigned.step()
    assert unsigned.server._counters == {}


def test_a_client_whose_memory_was_set_back_is_refused_and_the_others_go_on() -> None:
    own = IDENTITIES[0].public_key().public_bytes_raw()
    current = new_round(parameters(3), signed=True)
    current.server._counters = {own: 5}
    for counter in (4, 5):
        restored = new_client(0, parameters(3), signed=True)
        with pytest.raises(SignatureError, match="memory that was set back"):
            current.server.receive(0, restored.advertise(current.waiting[0], counter=repeat(counter).__next__))
    assert current.server._counters == {own: 5}
    honest = new_client(0, parameters(3), signed=True)
    current.server.receive(0, honest.advertise(current.waiting[0], counter=lambda: 6))
    assert current.server._counters == {own: 6}


def test_a_server_forgets_shares_when_it_has_the_sum() -> None:
    current = new_round(parameters(3)).until(Stage.UNMASK)
    sealed = repr(current.server.__dict__)
    current.collect()
    shares = [share for held in current.server._shares.values() for share in held.values()]
    assert len(shares) == 9
    current.server.advance()
    left = repr(current.server.__dict__)
    assert not any(repr(share) in left for share in shares)
    assert "_sealed': {}" in sealed  # boxes went on to their receivers


def test_a_client_knows_its_number() -> None:
    current = new_round(parameters(3))
    for stage in STAGES:
        current.until(stage)
        assert [client.index for client in current.clients] == [0, 1, 2]
    current.finish()
    assert [client.index for client in current.clients] == [0, 1, 2]
    unnumbered = SecureClient(expected=parameters(3))
    assert unnumbered.index is None
    unnumbered.advertise(new_round(parameters(3)).waiting[2])
    assert unnumbered.index == 2
