"""The chain of hashes: every change, removal, insertion and exchange of records is found."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd._plain import canonical
from cpsgd.errors import DamagedFileError, LedgerError, LedgerFormatError, ParameterError
from cpsgd.ledger import Budget, RoundEvent
from cpsgd.ledger.chain import Head, closed, read_release, read_reservation
from cpsgd.ledger.state import State
from cpsgd.protocol import Protocol

from .damage import chained, replayed

PROTOCOL = Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=8)
EVENT = RoundEvent(PROTOCOL, survivors=900, run="r", round=1)
NOW = "2026-01-01T00:00:00.000+00:00"
BODIES: list[dict[str, Any]] = [
    {"kind": "ledger", "format": 1, "id": "00"},
    {"kind": "budget", "budget": Budget(population="people", epsilon=1.0, delta=1e-6).to_dict()},
    {"kind": "reserve", "population": "people", "event": EVENT.to_dict(), "spent": 0.5, "method": "m"},
    {"kind": "release", "entry": 2, "survivors": 950},
]


def texts(bodies: list[dict[str, Any]]) -> list[str]:
    return [canonical({"number": number, "time": NOW, **body}) for number, body in enumerate(bodies)]


GOOD = chained(texts(BODIES)).splitlines(keepends=True)
BEFORE = "2025-12-31T00:00:00.000+00:00"
ENDED = Budget(population="people", epsilon=1.0, delta=1e-6, expires="2026-01-01")
STATE = json.loads(replayed(b"".join(GOOD))[0].to_text())


def test_records_become_a_state() -> None:
    state, entries = replayed(b"".join(GOOD))
    (entry,) = entries["people"]
    assert (entry.number, entry.survivors, entry.released) == (2, 950, True)
    assert f"{state.head}\n".encode() == b"3:" + GOOD[3][-65:]


def test_the_hash_is_the_documented_one() -> None:
    text, _, digest = GOOD[0].decode().partition(" #")
    assert text == '{"format":1,"id":"00","kind":"ledger","number":0,"time":"2026-01-01T00:00:00.000+00:00"}'
    assert digest.strip() == hashlib.sha256(b"cpsgd ledger 1\n" + bytes(32) + text.encode()).hexdigest()
    assert digest == "8542e7b714dacb83b3a497fabbe871bc30626e8314976636e800a7075a86279b\n"


@pytest.mark.parametrize("number", range(4))
def test_any_changed_character_is_found(number: int) -> None:
    for place in range(len(GOOD[number]) - 1):
        line = bytearray(GOOD[number])
        line[place] ^= 1
        with pytest.raises(DamagedFileError, match=f"Record {number} "):
            replayed(b"".join([*GOOD[:number], line, *GOOD[number + 1 :]]))


def test_removed_inserted_and_exchanged_records_are_found() -> None:
    for number in range(3):
        with pytest.raises(DamagedFileError):
            replayed(b"".join(GOOD[:number] + GOOD[number + 1 :]))
        with pytest.raises(DamagedFileError):
            replayed(b"".join([*GOOD[: number + 1], *GOOD[number:]]))
    with pytest.raises(DamagedFileError):
        replayed(b"".join([GOOD[0], GOOD[2], GOOD[1], GOOD[3]]))
    # Also if the hashes are made to fit: a record has its number.
    with pytest.raises(LedgerFormatError, match="number"):
        replayed(chained([*texts(BODIES)[:2], texts(BODIES)[3]]))
    # A cut end is a chain, which is why heads are kept elsewhere.
    assert replayed(b"".join(GOOD[:3]))[0].head.number == 2


def test_a_sum_of_one_message_is_released() -> None:
    body = {"number": 3, "kind": "release", "entry": 0, "survivors": 1, "time": "2026-03-01"}
    assert read_release(body) == (0, 1)
    for wrong in ({"survivors": 0}, {"entry": -1}, {"kind": "abandon"}):
        with pytest.raises(ParameterError):
            read_release({**body, **wrong})


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_record_without_a_hash_is_refused(count: int) -> None:
    """Clients' memories of earlier releases have such lines; a ledger has not."""
    bare = b"".join(text.encode() + b"\n" for text in texts(BODIES)[:count])
    with pytest.raises(DamagedFileError, match=r"Record 0 .*has no hash"):
        replayed(bare)


def test_what_is_read_as_a_reservation_is_one() -> None:
    """Of a record that an index names by mistake, too."""
    body = {"number": 2, "time": NOW, **BODIES[2]}
    assert read_reservation(body).event == EVENT
    for wrong in (
        *({"kind": "release"}, {"population": ["people"]}, {"spent": -1.0}, {"octave": 63}, {"octave": -1}),
        *({"extra": 1}, {"method": ""}, {"time": ""}),
    ):
        with pytest.raises(ParameterError):
            read_reservation({**body, **wrong})
    for octave in (0, 62):
        assert read_reservation({**body, "octave": octave, "spent": 0.0}).octave == octave


def test_an_entry_is_closed_by_a_record_about_it() -> None:
    entry = read_reservation({"number": 2, "time": NOW, **BODIES[2]})
    for kind, field in (("release", {"survivors": 950}), ("abandon", {"reason": "none"})):
        body = {"number": 3, "time": NOW, "kind": kind, "entry": 2, **field}
        assert closed(entry, body).closed_as == 3
        with pytest.raises(ParameterError, match="another entry"):
            closed(entry, {**body, "entry": 1})


def test_a_state_without_a_first_period_is_refused() -> None:
    accounts = [[population, period + 1, account] for population, period, account in STATE["accounts"]]
    with pytest.raises(ParameterError, match="first period"):
        State.from_text(canonical({**STATE, "accounts": accounts}), Head())
    assert State.from_text(canonical(STATE), Head()).to_text() == canonical(STATE)


def test_records_about_time_and_state_that_a_ledger_writes() -> None:
    state, _ = replayed(chained(texts([*BODIES, {"kind": "clock", "reason": "it was ahead", "time": BEFORE}])))
    assert state.time == BEFORE
    state, _ = replayed(chained(texts([*BODIES, {"kind": "snapshot", "state": STATE}])))
    assert state.snapshot == 4


def test_rounds_of_later_periods_count_in_the_present_one_where_time_is_set_back() -> None:
    renewing = Budget(population="people", epsilon=1.0, delta=1e-6, renews=30)
    later, present = "2026-02-15T00:00:00.000+00:00", "2026-01-02T00:00:00.000+00:00"
    bodies = [
        BODIES[0],
        {"kind": "budget", "budget": renewing.to_dict()},
        BODIES[2],
        {**BODIES[2], "event": replace(EVENT, round=2).to_dict(), "time": later},
        {"kind": "clock", "reason": "it was ahead", "time": present},
    ]
    state, _ = replayed(chained(texts(bodies)))
    assert {key: account.rounds for key, account in state.accounts.items()} == {("people", 0): 2, ("people", 1): 1}


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
        broken(1, extra=1),
        [*BODIES, BODIES[1]],
        broken(2, population="nobody"),
        broken(2, population=["people"]),
        broken(2, extra=1),
        broken(2, octave=0),
        broken(2, spent=-1.0),
        broken(2, spent="0.5"),
        broken(2, method=""),
        broken(2, event={**EVENT.to_dict(), "survivors": 0}),
        broken(2, event={**EVENT.to_dict(), "examples": 3}),
        [*BODIES, BODIES[2]],  # a run's round twice
        [BODIES[0], {"kind": "budget", "budget": ENDED.to_dict()}, BODIES[2]],
        broken(3, extra=1),
        [*BODIES[:3], {"kind": "abandon", "entry": 2, "reason": ""}],
        [*BODIES[:3], {"kind": "abandon", "entry": 2, "reason": "none", "survivors": 900}],
        [*BODIES[:3], {"kind": "abandon", "entry": -1, "reason": "none"}],
        [*BODIES, {"kind": "clock", "reason": "not earlier", "time": NOW}],
        [*BODIES, {"kind": "clock", "reason": "later", "time": "2026-01-02T00:00:00.000+00:00"}],
        [*BODIES, {"kind": "clock", "reason": "", "time": BEFORE}],
        [*BODIES, {"kind": "clock", "reason": "earlier", "time": BEFORE, "extra": 1}],
        [*BODIES, {"kind": "snapshot", "state": STATE, "extra": 1}],
        [*BODIES, {"kind": "snapshot", "state": {**STATE, "time": BEFORE}}],
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
        replayed(chained(texts(bodies)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"a":1,"a":1}',
        "[" * 5_000 + "]" * 5_000,
        "x" * 100_000,
        '{"number": 0}',
        '{"number":1e999}',
        '{"number":' + "9" * 5_000 + "}",
    ],
)
def test_texts_that_are_no_records(text: str) -> None:
    with pytest.raises(LedgerError):
        replayed(chained([text]))


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
        state, _ = replayed(chained(texts(bodies)))
    except LedgerError:
        return
    assert state.head.number == 3


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_garbage_raises_errors_of_our_own(lines: list[bytes]) -> None:
    with suppress(LedgerError, DamagedFileError):
        assert replayed(b"\n".join(lines))[0].head == Head()  # half a line at the end is none
