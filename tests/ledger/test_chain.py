"""The chain of hashes: every change, removal, insertion and exchange of records is found."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd._plain import canonical
from cpsgd.errors import LedgerChainError, LedgerError, LedgerFormatError
from cpsgd.ledger import Budget, RoundEvent
from cpsgd.ledger.chain import Head, Remembered, link
from cpsgd.ledger.state import State
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=8)
EVENT = RoundEvent(PROTOCOL, survivors=900, run="r", round=1)
NOW = "2026-01-01T00:00:00.000+00:00"
BODIES: list[dict[str, Any]] = [
    {"kind": "ledger", "format": 1, "id": "00"},
    {"kind": "budget", "budget": Budget(population="people", epsilon=1.0, delta=1e-6).to_dict()},
    {"kind": "reserve", "population": "people", "event": EVENT.to_dict(), "spent": 0.5, "method": "m"},
    {"kind": "release", "entry": 2, "survivors": 950},
]


def rows(bodies: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Records as a writer would make them, whatever they say."""
    found: list[tuple[int, str, str]] = []
    previous = Head().hash
    for number, body in enumerate(bodies):
        text = canonical({"number": number, "time": NOW, **body})
        previous = link(previous, text)
        found.append((number, text, previous))
    return found


def replay(records: list[tuple[Any, Any, Any]]) -> State:
    state = State()
    for record in records:
        state.apply(*record)
    return state


def remembered(state: State) -> Remembered:
    assert isinstance(state.entries, Remembered)
    return state.entries


GOOD = rows(BODIES)


def test_records_become_a_state() -> None:
    state = replay(GOOD)
    (entry,) = remembered(state).all("people")
    assert (entry.number, entry.survivors, entry.released) == (2, 950, True)
    assert remembered(state).find("people", "r", 1) is entry
    assert state.head == Head(3, GOOD[3][2])
    assert str(state.head) == f"3:{GOOD[3][2]}"


def test_the_hash_is_the_documented_one() -> None:
    text = GOOD[0][1]
    assert text == '{"format":1,"id":"00","kind":"ledger","number":0,"time":"2026-01-01T00:00:00.000+00:00"}'
    assert GOOD[0][2] == hashlib.sha256(b"cpsgd ledger 1\n" + bytes(32) + text.encode()).hexdigest()
    assert GOOD[0][2] == "8542e7b714dacb83b3a497fabbe871bc30626e8314976636e800a7075a86279b"


@pytest.mark.parametrize("number", range(4))
def test_any_changed_character_is_found(number: int) -> None:
    count, text, digest = GOOD[number]
    for place in range(len(text)):
        changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        with pytest.raises(LedgerChainError, match=f"broken at record {number}"):
            replay([*GOOD[:number], (count, changed, digest), *GOOD[number + 1 :]])


def test_removed_inserted_and_exchanged_records_are_found() -> None:
    for number in range(3):
        with pytest.raises(LedgerChainError):
            replay(GOOD[:number] + GOOD[number + 1 :])
        with pytest.raises(LedgerChainError):
            replay([*GOOD[: number + 1], *GOOD[number:]])
    with pytest.raises(LedgerChainError):
        replay([GOOD[0], GOOD[2], GOOD[1], GOOD[3]])
    # Also if the numbers are made to fit.
    with pytest.raises(LedgerChainError, match="broken at record 2"):
        replay([*GOOD[:2], (2, GOOD[3][1], GOOD[3][2])])
    assert replay(GOOD[:3]).head.number == 2  # a cut end is a chain, which is why heads are kept elsewhere


def broken(index: int, **changes: Any) -> list[dict[str, Any]]:
    bodies = [dict(body) for body in BODIES]
    bodies[index].update(changes)
    return bodies


@pytest.mark.parametrize(
    "bodies",
    [
        BODIES[1:],
        [BODIES[0], BODIES[0]],
        broken(0, format=2),
        broken(0, extra=1),
        broken(1, budget=None),
        [*BODIES, BODIES[1]],
        broken(2, population="nobody"),
        broken(2, population=["people"]),
        broken(2, spent=-1.0),
        broken(2, spent="0.5"),
        broken(2, method=""),
        broken(2, event={**EVENT.to_dict(), "survivors": 0}),
        broken(2, event={**EVENT.to_dict(), "examples": 3}),
        [*BODIES, BODIES[2]],  # a run's round twice
        broken(3, entry=1),
        broken(3, entry=True),
        broken(3, survivors=899),
        [*BODIES, BODIES[3]],
        broken(3, kind="refund"),
        broken(3, kind=["release"]),
        broken(3, time=""),
        broken(3, number=True),
    ],
)
def test_records_that_no_ledger_writes_are_refused(bodies: list[dict[str, Any]]) -> None:
    with pytest.raises(LedgerFormatError, match="not valid"):
        replay(rows(bodies))


def test_a_refused_record_changes_nothing() -> None:
    state = replay(GOOD[:3])
    before = json.dumps([entry.to_dict() for entry in remembered(state).all()]), state.head
    with pytest.raises(LedgerFormatError):
        state.apply(*rows(broken(3, survivors=1))[3])
    assert (json.dumps([entry.to_dict() for entry in remembered(state).all()]), state.head) == before
    state.apply(*GOOD[3])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"a":1,"a":1}',
        "[" * 5_000 + "]" * 5_000,
        "é",
        "x" * 100_000,
        '{"number": 0}',
        b"{}",
        3,
        None,
        '{"number":1e999}',
        '{"number":' + "9" * 5_000 + "}",
    ],
)
def test_texts_that_are_no_records(text: Any) -> None:
    digest = link(Head().hash, text) if isinstance(text, str) and text.isascii() else "0" * 64
    with pytest.raises(LedgerError):
        State().apply(0, text, digest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.integers(0, 3), st.data())
def test_hostile_records_with_good_hashes_raise_errors_of_our_own(number: int, data: st.DataObject) -> None:
    bodies = [dict(body) for body in BODIES]
    name = data.draw(st.sampled_from([*sorted(bodies[number]), "number", "time", "kind"]) | st.text(max_size=4))
    bodies[number][name] = data.draw(JSON)
    try:
        state = replay(rows(bodies))
    except LedgerError:
        return
    assert state.head.number == 3


@given(
    st.lists(st.tuples(st.integers() | st.none(), st.text(max_size=50) | st.binary(max_size=5), st.text(max_size=64)))
)
def test_garbage_raises_errors_of_our_own(records: list[tuple[Any, Any, Any]]) -> None:
    if not records:
        return
    with pytest.raises(LedgerError):
        replay(records)
