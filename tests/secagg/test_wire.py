from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import MessageError, SecureAggregationError, SecureVersionError, StageError
from cpsgd.secagg import Invitation, packets
from cpsgd.secagg.packets import Kind, Session

from .rounds import parameters

SESSION = Session(parameters(5), bytes(range(16)), False)


@given(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=100))
def test_a_message_is_read_as_it_was_written(kind: Kind, client: int, body: bytes) -> None:
    message = SESSION.write(kind, client, body)
    assert len(message) == 54 + len(body)
    assert bytes(SESSION.read(message, kind, client)) == body


def test_a_message_of_something_else_is_refused_by_its_first_bytes() -> None:
    message = SESSION.write(Kind.KEYS, 1, b"body")
    with pytest.raises(MessageError, match="not 'cpss'"):
        SESSION.read(b"cpsf" + message[4:], Kind.KEYS, 1)


def test_a_message_of_another_kind_is_refused_whatever_is_in_it() -> None:
    for kind in Kind:
        for other in set(Kind) - {kind}:
            with pytest.raises(StageError, match=f"of kind {kind.name}, got {other.name}"):
                SESSION.read(SESSION.write(other, 1, bytes(64)), kind, 1)


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.binary(min_size=3, max_size=3), max_size=9))
def test_entries_and_back(entries: dict[int, bytes]) -> None:
    assert packets.read_entries(packets.write_entries(entries), 3, 9) == entries


@given(st.binary(max_size=60), st.integers(1, 5), st.integers(0, 8))
def test_any_bytes_are_entries_or_refused(data: bytes, size: int, most: int) -> None:
    try:
        entries = packets.read_entries(data, size, most)
    except MessageError:
        return
    assert len(entries) <= most
    assert packets.write_entries(entries) == data


@given(st.integers(2, 70), st.data())
def test_sets_and_back(clients: int, data: st.DataObject) -> None:
    members = data.draw(st.frozensets(st.integers(0, clients - 1)))
    assert packets.read_set(packets.write_set(members, clients), clients) == members


@given(st.binary(max_size=4), st.integers(2, 30))
def test_any_bytes_are_a_set_or_refused(data: bytes, clients: int) -> None:
    try:
        members = packets.read_set(data, clients)
    except MessageError:
        return
    assert packets.write_set(members, clients) == data


@given(st.binary(max_size=120) | st.binary(max_size=60).map(lambda body: SESSION.write(Kind.INVITATION, 1, body)))
def test_any_bytes_are_an_invitation_or_refused(data: bytes) -> None:
    try:
        found = Invitation.read(data)
    except SecureAggregationError:
        return
    assert found.write() == data


ODD = Session(parameters(5, modulus=200), bytes(range(16)), False)


@given(st.binary(max_size=60).map(lambda body: ODD.write(Kind.INVITATION, 1, body)))
def test_any_bytes_of_the_second_version_are_an_invitation_or_refused(data: bytes) -> None:
    try:
        found = Invitation.read(data)
    except SecureAggregationError:
        return
    assert found.write() == data


def test_a_version_belongs_to_a_kind_of_modulus() -> None:
    assert SESSION.write(Kind.KEYS, 0)[4] == 5
    assert ODD.write(Kind.KEYS, 0)[4] == 6
    assert Invitation.read(Invitation(ODD, 4).write()) == Invitation(ODD, 4)
    for here, there in ((SESSION, ODD), (ODD, SESSION)):
        with pytest.raises(SecureVersionError, match="expected version"):
            here.read(there.write(Kind.KEYS, 0), Kind.KEYS, 0)
        with pytest.raises(MessageError, match="contradicts"):
            Invitation.read(here.write(Kind.INVITATION, 0, there.parameters.to_bytes() + b"\0"))


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 7, 255])
def test_messages_of_other_versions_are_refused_with_a_remedy(version: int) -> None:
    message = Invitation(SESSION, 4).write()
    message = message[:4] + bytes([version]) + message[5:]
    for read in (Invitation.read, lambda data: SESSION.read(data, Kind.INVITATION, 4)):
        with pytest.raises(SecureVersionError, match=rf"version {version}; expected .* Install the same release"):
            read(message)


def test_an_invitation_is_consistent() -> None:
    good = Invitation(SESSION, 4)
    assert Invitation.read(good.write()) == good
    with pytest.raises(MessageError, match="no client 5"):
        Invitation.read(Invitation(SESSION, 5).write())
    body = parameters(5, round=8).to_bytes() + b"\0"
    with pytest.raises(MessageError, match="contradicts"):
        Invitation.read(SESSION.write(Kind.INVITATION, 0, body))
    with pytest.raises(MessageError, match="malformed"):
        Invitation.read(SESSION.write(Kind.INVITATION, 0, SESSION.parameters.to_bytes() + b"\2"))
    with pytest.raises(StageError):
        Invitation.read(SESSION.write(Kind.KEYS, 0, b""))
