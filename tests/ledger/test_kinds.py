"""Kinds of rounds: what a round's cost is computed from, and the text that a snapshot keeps of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cpsgd.errors import ParameterError
from cpsgd.ledger import RoundEvent
from cpsgd.ledger.entries import TableUnit
from cpsgd.ledger.kinds import LAST_OCTAVE, Account, EntryKind, kind_of, octave_of, weaker_unit
from cpsgd.neighbours import Participation, SeenSampling
from cpsgd.privacy.one_example import most_drawn, overflow
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1.0)
EVENT = RoundEvent(PROTOCOL, survivors=900)
SAMPLED = replace(EVENT, participation="poisson:0.01")


@pytest.mark.parametrize(
    ("survivors", "every", "sampled"),
    [(63, 63, 63), (64, 64, 64), (65, 65, 64), (1_023, 1_023, 1_008), (1_025, 1_024, 1_024), (4_099, 4_096, 4_096)],
)
def test_sizes_keep_ten_binary_digits_and_six_where_clients_are_sampled(
    survivors: int, every: int, sampled: int
) -> None:
    """Rounded down: fewer messages have less noise."""
    assert kind_of(replace(EVENT, survivors=1), survivors).honest == every
    assert kind_of(replace(SAMPLED, survivors=1), survivors).honest == sampled
    # What was reserved for is never rounded.
    assert kind_of(replace(EVENT, survivors=survivors), survivors).honest == survivors


def test_noise_of_colluding_clients_does_not_count() -> None:
    kind = kind_of(replace(EVENT, colluding=30), 950, octave=0)
    assert (kind.honest, kind.reserved, kind.at_least.honest) == (920, 870, 870)
    assert kind.participation == Participation.every()


def test_everybody_is_sampled_at_rate_1() -> None:
    whole = replace(EVENT, participation="poisson:1.0")
    assert kind_of(whole, 900) is kind_of(EVENT, 900) is not kind_of(SAMPLED, 900)


def test_a_client_that_draws_too_many_examples_is_paid_for() -> None:
    drawn = replace(EVENT, examples=2_000, participation="poisson:0.01")
    lost = overflow(2_000, drawn.taking_part)
    assert 0.0 < lost < 1e-9
    assert most_drawn(2_000, drawn.taking_part) < 2_000
    assert kind_of(drawn, 900).overflow == lost
    assert kind_of(replace(drawn, participation="every", overflow=1e-9), 900).overflow == 1e-9
    assert kind_of(replace(drawn, overflow=2 * lost), 900).overflow == 3 * lost


@pytest.mark.parametrize(
    "event",
    [
        EVENT,
        SAMPLED,
        replace(EVENT, survivors=1),
        replace(EVENT, examples=1),
        replace(EVENT, participation="fixed-size:0.1", colluding=3),
    ],
)
@pytest.mark.parametrize("octave", [None, 0, LAST_OCTAVE])
def test_a_kind_survives_its_text(event: RoundEvent, octave: int | None) -> None:
    kind = kind_of(event, event.survivors, octave)
    assert EntryKind.from_dict(json.loads(json.dumps(kind.to_dict()))) is kind


@pytest.mark.parametrize(
    "changes",
    [
        {"honest": 0},
        {"examples": 0},
        {"octave": -1},
        {"octave": LAST_OCTAVE + 1},
        {"reserved": 0},
        {"reserved": 901},
        {"overflow": 1.0},
        {"overflow": -1e-9},
        {"more": 1},
    ],
)
def test_texts_of_no_kind_are_refused(changes: dict[str, object]) -> None:
    good = json.loads(json.dumps(kind_of(EVENT, 900, 0).to_dict()))
    with pytest.raises(ParameterError):
        EntryKind.from_dict({**good, **changes})


def test_octaves_double() -> None:
    assert [octave_of(before) for before in (0, 1, 2, 3, 6, 7, 14, 15)] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_an_account_counts_what_is_open() -> None:
    account = Account()
    account.reserve(EVENT)
    account.reserve(EVENT)
    account.release(EVENT, 950)
    account.abandon(EVENT)
    assert (account.rounds, account.unreleased, account.reserved) == (1, 0, 2)
    with pytest.raises(ParameterError, match="open"):
        account.release(EVENT, 950)
    assert account.at_the_last_reservation().items() == [("", kind_of(EVENT, 900), 2)]
    assert account.tally.items() == [("", kind_of(EVENT, 950), 1)]
    with pytest.raises(ParameterError, match="no such round"):
        account.tally.add(kind_of(EVENT, 950), "", -2)


def test_copies_of_adaptive_rounds_have_the_octaves_that_are_due() -> None:
    first, second = Account(), Account()
    for account, rounds in ((first, 2), (second, 3)):
        for number in range(rounds):
            account.reserve(EVENT, octave=octave_of(number))
    first.add_copies(second)
    assert (first.rounds, first.reserved, second.rounds) == (5, 5, 3)
    counted = {kind.octave: count for _, kind, count in first.tally.items()}
    assert counted == {0: 1, 1: 2, 2: 2}  # of the rounds 0, 1 and 2, 3 and 4
    planned = Account()
    planned.reserve(EVENT)
    planned.release(EVENT, 950)
    planned.add_copies(planned_copy := Account())
    planned_copy.add_copies(planned)
    assert planned_copy.tally.items() == planned.tally.items() == [("", kind_of(EVENT, 950), 1)]


@pytest.mark.parametrize(
    ("units", "weaker"), [("", ""), (("user", ""), "user"), (("", "row"), "row"), (("user", "row"), "row")]
)
def test_rows_protect_less_than_users(units: Sequence[TableUnit], weaker: str) -> None:
    first, *others = accounts = [Account() for _ in units] or [Account()]
    for account, unit in zip(accounts, units, strict=False):
        account.reserve(replace(EVENT, table_unit=unit))
        kinds = list(account.kinds())
        places = {kind: place for place, kind in enumerate(kinds)}
        assert Account.from_dict(account.to_dict(places), kinds).table_unit == unit
    assert weaker_unit(accounts) == weaker
    for other in others:
        first.add_copies(other)
    assert first.table_unit == weaker


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 2},
        {"rounds": -1},
        {"unreleased": 4},
        {"unreleased": -1},
        {"reserved": 2},
        {"tally": [["", 0, 0], ["", 1, 3]]},
        {"since": [["", 1, -1]]},  # a release of more messages that nobody made
        {"since": [["", 0, 1], ["", 1, -2]]},
        {"since": [["", 0, -1], ["", 1, 1]]},  # of fewer messages than were reserved for
        {"table_unit": ""},
        {"table_unit": "household"},
        {"rounds": 1, "reserved": 1, "unreleased": 0, "tally": [["", 0, 1]]},  # a release that leaves no round
        {"room": {"kind": 0, "rounds": -1, "epsilon": 1.0, "method": "m"}},
        {"room": {"kind": 0, "rounds": 0, "epsilon": 0.0, "method": "m"}},
        {"room": {"kind": 0, "rounds": 0, "epsilon": 1.0, "method": ""}},
    ],
)
def test_texts_of_no_account_are_refused(changes: dict[str, object]) -> None:
    kinds = [kind_of(EVENT, size) for size in (900, 950)]
    good = {
        "rounds": 3,
        "unreleased": 2,
        "reserved": 3,
        "room": {"kind": 0, "rounds": 1, "epsilon": 0.5, "method": "m"},
        "tally": [["", 0, 2], ["", 1, 1]],
        "since": [["", 0, 1], ["", 1, -1]],
    }
    for room in (good["room"], None, {"kind": 1, "rounds": 0, "epsilon": 0.5, "method": "m"}):
        same = {**good, "room": room}
        assert Account.from_dict(same, kinds).to_dict({kind: place for place, kind in enumerate(kinds)}) == same
    with pytest.raises(ParameterError):
        Account.from_dict({**good, **changes}, kinds)


def test_what_is_copied_was_reserved_with_what_is_there() -> None:
    account, other = Account(), Account()
    for each in (account, other):
        each.reserve(EVENT)
    account.release(EVENT, 950)
    account.add_copies(other)
    assert sorted(count for _, _, count in account.at_the_last_reservation().items()) == [1, 1]
    assert account.at_the_last_reservation() is account.tally


def test_further_rounds_of_a_partition_are_met_in_place_of_those_in_it() -> None:
    few, many, other = kind_of(EVENT, 900), kind_of(EVENT, 990), kind_of(replace(EVENT, overflow=1e-9), 900)
    account = Account()
    account.tally.add(many, "p")
    assert account.tally.groups() == {(frozenset([many]), 1)}
    assert account.tally.groups([("p", few, 1)]) == {(frozenset([few]), 1)}
    assert account.tally.groups([("p", other, 1), ("q", few, 2)]) == {
        (frozenset([many, other]), 1),
        (frozenset([few]), 1),
    }
    assert account.tally.groups([("", many, 2)]) == {(frozenset([many]), 3)}


def test_a_cohort_has_the_most_messages_that_may_be_in_it() -> None:
    """Colluding clients see how many were drawn beside them: of 1,000 invited ones, or as many as came."""
    event = replace(EVENT, participation="fixed-size:0.01", colluding=10)
    for survivors in (900, 1_000, 1_200):
        participation = kind_of(event, survivors).participation
        assert isinstance(participation, SeenSampling)
        assert participation.most == max(1_000, survivors)
