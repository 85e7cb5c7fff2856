"""The list of all who take part, and what its members sign."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import MessageError, SenderError, SignatureError, ThresholdError
from cpsgd.secagg.cohort import Advert, Cohort, Statement, check_counter
from cpsgd.secagg.packets import Session

from .rounds import IDENTITIES, ROSTER, parameters

SESSION = Session(parameters(5), bytes(16), False)


def adverts(session: Session = SESSION, fill: int = 0) -> dict[int, Advert]:
    """Of all clients, each with keys of its own."""
    roster = ROSTER if session.signed else None
    return {
        i: Advert.make(session, i, bytes([fill + i]) * 64, IDENTITIES[i % len(IDENTITIES)], roster)
        for i in range(session.parameters.clients)
    }


COHORT = Cohort.of(5, adverts())
STATEMENT = Statement(SESSION, COHORT, frozenset({0, 1, 2, 4}))


@given(st.integers(2, 40), st.data())
def test_to_bytes_and_back(clients: int, data: st.DataObject) -> None:
    listed = data.draw(st.frozensets(st.integers(0, clients - 1)))
    members = {client: data.draw(st.binary(min_size=64, max_size=64)) for client in sorted(listed)}
    after = data.draw(st.binary(max_size=20))
    found, rest = Cohort.read(Cohort(clients, members).to_bytes() + after, clients)
    assert (found, bytes(rest)) == (Cohort(clients, members), after)


@given(st.binary(max_size=200), st.integers(2, 20))
def test_any_bytes_begin_with_a_list_or_are_refused(data: bytes, clients: int) -> None:
    try:
        found, rest = Cohort.read(data, clients)
    except MessageError:
        return
    assert found.to_bytes() + bytes(rest) == data


def test_the_graph_is_not_known_when_numbers_are_given_out() -> None:
    """It is another one with other keys of a single client, in another session, and with somebody less."""
    session = Session(parameters(40, neighbours=6), bytes(16), False)
    everybody = {i: Advert(bytes([i]) * 64, bytes([i]) * 32, bytes(64)) for i in range(40)}
    cohort = Cohort.of(40, everybody)
    others = [
        (session, Cohort.of(40, {**everybody, 39: replace(everybody[39], keys=bytes(64))})),
        (session, Cohort.of(40, {**everybody, 39: replace(everybody[39], identity=b"x" * 32)})),
        (session, Cohort.of(40, {i: everybody[i] for i in range(39)})),
        (replace(session, identifier=b"1" * 16), cohort),
        (replace(session, parameters=replace(session.parameters, round=8)), cohort),
    ]
    graphs = {
        tuple(cohort.neighbours(session, i) for i in range(40)) for session, cohort in [(session, cohort), *others]
    }
    assert len(graphs) == 1 + len(others)


def test_a_list_must_fit_what_was_announced() -> None:
    known = adverts()
    COHORT.check(SESSION, 0, known, None)
    for wrong in (known[1], replace(known[0], keys=b"x" * 64), replace(known[0], identity=bytes(32))):
        members = {**COHORT.members, 0: Cohort.of(5, {0: wrong}).members[0]}
        with pytest.raises(MessageError, match="Client 0 is not in the list"):
            Cohort(5, members).check(SESSION, 0, {0: known[0]}, None)
    with pytest.raises(MessageError, match="Client 0 is not in the list"):
        Cohort.of(5, {i: known[i] for i in range(1, 5)}).check(SESSION, 0, {0: known[0]}, None)


def test_a_list_is_of_different_people_on_the_roster_and_of_enough() -> None:
    known = adverts()
    twice = {**known, 4: replace(known[4], identity=known[3].identity)}
    with pytest.raises(SignatureError, match="same person"):
        Cohort.of(5, twice).check(SESSION, 0, {0: known[0]}, None)
    signed = Session(parameters(5), bytes(16), True)
    stranger = {**adverts(signed), 4: replace(known[4], identity=bytes(32))}
    with pytest.raises(SignatureError, match="not on the roster"):
        Cohort.of(5, stranger).check(signed, 0, {0: stranger[0]}, ROSTER)
    with pytest.raises(ThresholdError, match="2 clients take part, and the round needs 3"):
        Cohort.of(5, {i: known[i] for i in (0, 1)}).check(SESSION, 0, {0: known[0]}, None)


def test_a_statement_stands_for_all_that_is_in_it() -> None:
    others = [
        replace(STATEMENT, survivors=frozenset({0, 1, 2, 3})),
        replace(STATEMENT, cohort=Cohort.of(5, adverts(fill=1))),
        replace(STATEMENT, cohort=Cohort.of(5, {i: advert for i, advert in adverts().items() if i != 3})),
        replace(STATEMENT, session=replace(SESSION, identifier=b"1" * 16)),
        replace(STATEMENT, session=replace(SESSION, signed=True)),
        replace(STATEMENT, session=replace(SESSION, parameters=parameters(5, round=8))),
        replace(STATEMENT, session=replace(SESSION, parameters=parameters(5, quorum=4))),
        replace(STATEMENT, session=replace(SESSION, parameters=parameters(5, surviving=3))),
    ]
    assert len({statement.to_bytes() for statement in (STATEMENT, *others)}) == 1 + len(others)
    for other in others:
        with pytest.raises(SignatureError):
            STATEMENT.check({i: other.sign(IDENTITIES[i]) for i in (0, 1, 2)})


def test_a_quorum_of_survivors_must_have_signed() -> None:
    signatures = {i: STATEMENT.sign(IDENTITIES[i]) for i in (0, 1, 2)}
    STATEMENT.check(signatures)
    with pytest.raises(ThresholdError, match="2 clients confirmed the survivors, fewer than the quorum of 3"):
        STATEMENT.check({i: signatures[i] for i in (0, 1)})
    with pytest.raises(SenderError, match="Client 3"):
        STATEMENT.check({**signatures, 3: STATEMENT.sign(IDENTITIES[3])})
    fewer = Cohort.of(5, {i: advert for i, advert in adverts().items() if i != 2})
    with pytest.raises(SenderError, match="Client 2"):
        replace(STATEMENT, cohort=fewer).check({2: signatures[2]})
    with pytest.raises(SignatureError, match="client 2"):
        STATEMENT.check({**signatures, 2: signatures[1]})


def test_a_counter_is_larger_than_all_before() -> None:
    for before, counter in ((None, 0), (0, 0), (3, 4), (1, 2)):  # a client without a memory always signs 0
        check_counter(7, counter, before)
    for before, counter in ((3, 3), (3, 2), (1, 1), (1, 0)):
        with pytest.raises(SignatureError, match=f"Client 7 .* its counter is {counter}, and was {before} before"):
            check_counter(7, counter, before)
