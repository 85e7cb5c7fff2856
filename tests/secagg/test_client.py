"""The client's order of stages, its saved state, and that its secrets stay inside."""

from __future__ import annotations

import copy
import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from cpsgd.codec.wire import checksum
from cpsgd.errors import (
    InvitationError,
    MessageError,
    ParameterError,
    SecureAggregationError,
    SecureVersionError,
    StageError,
)
from cpsgd.secagg import SecureClient, Stage, masks, packets
from cpsgd.secagg.keys import SHARES_BYTES
from cpsgd.secagg.participant import ClientState

from .rounds import IDENTITIES, ROSTER, Round, new_round, parameters

ORDER = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]


def secrets_of(client: SecureClient) -> list[bytes]:
    state = client._state
    assert state is not None
    found = [state.channel_private, state.mask_private, state.signing_private, state.seed, state.own_share]
    found += state.received.values()
    return [secret for secret in found if secret]


def call(current: Round, client: SecureClient, stage: Stage, message: bytes) -> bytes:
    extra = [current.values[0]] if stage is Stage.MASK else []
    return bytes(getattr(client, stage.value)(message, *extra))


@pytest.mark.parametrize("signed", [False, True])
def test_every_call_out_of_order_is_refused_and_changes_nothing(signed: bool) -> None:
    current = new_round(parameters(3), signed=signed)
    seen: dict[Stage, bytes] = {}
    while current.server.stage is not Stage.DONE:
        stage = current.server.stage
        seen[stage] = current.waiting[0]
        assert current.clients[0].stage is stage
        for wrong in ORDER:
            if wrong is stage:
                continue
            for message in seen.values():
                with pytest.raises(StageError):
                    call(current, current.clients[0], wrong, message)
        for earlier, message in seen.items():
            if earlier is not stage:
                with pytest.raises(SecureAggregationError):
                    call(current, current.clients[0], stage, message)
        current.step()
    assert current.clients[0].stage is Stage.DONE
    for finished, message in seen.items():
        with pytest.raises(StageError):
            call(current, current.clients[0], finished, message)
    found = current.server.result()
    np.testing.assert_array_equal(found.sums, current.expected((0, 1, 2)))


@pytest.mark.parametrize("signed", [False, True])
def test_a_client_that_is_saved_and_restored_before_every_message_goes_on(signed: bool) -> None:
    current = new_round(parameters(4), signed=signed)
    while current.server.stage is not Stage.DONE:
        for number, client in enumerate(current.clients):
            again = {"index": number, "identity": IDENTITIES[number], "roster": ROSTER} if signed else {}
            current.clients[number] = SecureClient.restore(client.export_state(), **again)
            with pytest.raises(StageError, match="moved out"):
                client.unmask(b"")
            with pytest.raises(StageError, match="moved out"):
                client.export_state()
        current.step(frozenset({2}) if current.server.stage is Stage.MASK else frozenset())
    found = current.server.result()
    assert found.survivors == (0, 1, 3)
    np.testing.assert_array_equal(found.sums, current.expected((0, 1, 3)))


def test_a_restored_client_needs_its_roster_again() -> None:
    current = new_round(parameters(3), signed=True).until(Stage.SHARE)
    with pytest.raises(InvitationError, match="roster"):
        SecureClient.restore(current.clients[0].export_state())


def test_without_fixed_numbers_a_roster_is_of_those_who_take_part_and_nobody_else() -> None:
    current = new_round(parameters(4), signed=True)
    with pytest.raises(InvitationError, match="8 are on the roster"):
        SecureClient(expected=None, identity=IDENTITIES[0], roster=ROSTER).advertise(current.waiting[0])
    current = new_round(parameters(8), signed=True)
    for number in (5, 6):
        client = SecureClient(expected=None, identity=IDENTITIES[0], roster=ROSTER)
        current.server.receive(number, client.advertise(current.waiting[number]))
        current.server._public.clear()


def test_identity_and_roster_come_together() -> None:
    with pytest.raises(ParameterError, match="both"):
        SecureClient(expected=None, identity=IDENTITIES[0])
    with pytest.raises(ParameterError, match="both"):
        SecureClient(expected=None, roster=ROSTER)
    others = ROSTER - {IDENTITIES[0].public_key().public_bytes_raw()}
    with pytest.raises(ParameterError, match="on the roster"):
        SecureClient(expected=None, identity=IDENTITIES[0], roster=others)
    with pytest.raises(ParameterError, match="32 bytes"):
        SecureClient(expected=None, identity=IDENTITIES[0], roster=[b"short"])


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, np.uint32), np.zeros((1, 5), np.uint32), np.zeros(5, np.int64), [0] * 5, np.full(5, 256, np.uint32)],
)
def test_values_of_the_wrong_kind_are_refused_and_the_client_can_try_again(values: object) -> None:
    current = new_round(parameters(3)).until(Stage.MASK)
    with pytest.raises(ParameterError):
        current.clients[0].mask(current.waiting[0], values)
    np.testing.assert_array_equal(current.finish().sums, current.expected((0, 1, 2)))


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.MASK, Stage.UNMASK])
def test_secrets_are_not_printed_copied_or_pickled(stage: Stage) -> None:
    client = new_round(parameters(3)).until(stage).clients[0]
    assert secrets_of(client)
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            refused(client)
    for shown in (repr(client), str(client), repr(client._state), f"{client}"):
        for secret in secrets_of(client):
            assert secret.hex() not in shown
            assert repr(secret)[2:-1] not in shown
    assert repr(client) == f"SecureClient(index=0, stage={stage.name})"


def test_secrets_are_not_in_exceptions() -> None:
    current = new_round(parameters(3)).until(Stage.MASK)
    message = current.waiting[0]
    errors = []
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        fields, body = bytes(changed[: packets.HEADER_BYTES - 4]), bytes(changed[packets.HEADER_BYTES :])
        for tried in (bytes(changed), fields + packets._CHECKSUM.pack(checksum(fields, body)) + body):
            try:
                copied = current.copied()
                copied.answer(0, tried)
            except SecureAggregationError as error:
                errors.append(f"{error} {error.__cause__}")
    assert len(errors) > 100
    for secret in [*secrets_of(current.clients[0]), *(value.tobytes() for value in current.values)]:
        assert not any(secret.hex() in error or repr(secret)[2:-1] in error for error in errors)


def test_the_saved_state_forgets_what_is_no_longer_needed() -> None:
    current = new_round(parameters(3)).until(Stage.MASK)
    before = current.clients[0]._state
    assert before is not None
    old = [before.channel_private, before.mask_private, before.signing_private, before.seed]
    assert all(old)
    current.until(Stage.UNMASK)
    saved = current.clients[0].export_state()
    assert not any(secret in saved for secret in old)


# ---------------------------------------------------------------------- the upload


@pytest.mark.usefixtures("fixed_seed")
@pytest.mark.parametrize(
    ("modulus", "dim"),
    [
        *((2, 80_000), (2**4, 80_000), (2**8, 80_000), (2**11, 120_000), (2**16, 1_000_000)),
        *((3, 80_000), (90, 80_000), (2999, 120_000)),
    ],
)
def test_uploads_of_equal_inputs_are_uniform(modulus: int, dim: int) -> None:
    """Chi-square over all values, for each upload and their difference: six tests of eight cases, 1e-6 in all."""
    current = new_round(parameters(3, modulus=modulus, dim=dim)).until(Stage.MASK)
    current.values[:] = 1
    words = {}
    for client in range(3):
        upload = current.answer(client)
        words[client] = masks.Masks(modulus).from_bytes(upload[packets.HEADER_BYTES :], dim).astype(np.int64)
    limit = chi2.isf(1e-6 / 48, modulus - 1)
    for tested in (*words.values(), words[0] - words[1], words[1] - words[2], words[2] - words[0]):
        counts = np.bincount(tested % modulus, minlength=modulus)
        assert float(np.sum((counts - dim / modulus) ** 2) / (dim / modulus)) < limit
    # The masks do not simply cancel before the seeds are known, and the integers are not uniform without them.
    total = sum(words.values()) % modulus
    assert np.count_nonzero(total == 3 % modulus) < 0.6 * dim


# ---------------------------------------------------------------------- saved states as bytes


def test_a_damaged_state_is_refused() -> None:
    saved = new_round(parameters(3)).until(Stage.UNMASK).clients[0].export_state()
    for position in range(0, len(saved), 3):
        damaged = bytearray(saved)
        damaged[position] ^= 4
        with pytest.raises(MessageError):
            SecureClient.restore(bytes(damaged))
    for wrong in (saved[:-1], saved + b"\0", b"", saved[:40]):
        with pytest.raises(MessageError):
            SecureClient.restore(wrong)
    foreign = b"cpsx" + saved[4:-32]
    with pytest.raises(MessageError, match="first four bytes"):
        SecureClient.restore(foreign + hashlib.sha256(foreign).digest())
    for version in (1, 2, 4):
        other = saved[:4] + bytes([version]) + saved[5:]
        with pytest.raises(SecureVersionError, match="take part in the next"):
            SecureClient.restore(other)


def test_a_state_has_an_invitation_just_where_its_stage_has_one() -> None:
    state = new_round(parameters(3)).until(Stage.MASK).clients[0]._state
    assert state is not None
    for wrong in (replace(state, stage=Stage.ADVERTISE), replace(state, invitation=None, adverts={}, received={})):
        with pytest.raises(MessageError, match="contradicts itself"):
            ClientState.from_bytes(wrong.to_bytes())
    for wrong in (replace(state, seed=bytes(31)), replace(state, own_share=bytes(32))):
        with pytest.raises(MessageError, match="wrong length"):
            ClientState.from_bytes(wrong.to_bytes())
    assert ClientState.from_bytes(state.to_bytes()) == state
    entry = next(iter(state.adverts.values()))
    for name, one in (("adverts", entry), ("received", bytes(SHARES_BYTES))):
        for count in (3, 4):  # there are three clients
            longer = replace(state, **{name: dict.fromkeys(range(count), one)})
            if count == 3:
                assert len(getattr(ClientState.from_bytes(longer.to_bytes()), name)) == 3
            else:
                with pytest.raises(MessageError, match="at most 3 entries"):
                    ClientState.from_bytes(longer.to_bytes())


SAVED = [new_round(parameters(3)).until(stage).clients[0].export_state() for stage in (Stage.ADVERTISE, Stage.UNMASK)]


@given(st.data())
def test_states_that_were_changed_on_purpose_meet_typed_errors_only(data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(SAVED))[:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for tried in (bytes(body), bytes(body[:cut])):
        try:
            ClientState.from_bytes(tried + hashlib.sha256(tried).digest())
        except SecureAggregationError:
            continue
