"""Budgets and rounds: what is accepted, and that JSON gives back what it was given."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import ConditionError, CpsgdError, ParameterError
from cpsgd.ledger import Budget, RoundEvent
from cpsgd.neighbours import Participation
from cpsgd.privacy.filters import best_order
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.rotated_binomial(clients=1_000, dim=100, clip_norm=1.0, levels=2, trials=14)
EVENT = RoundEvent(PROTOCOL, survivors=900, participation="once", run="r", round=3, partition="p", label="été")
BUDGET = Budget(population="people", epsilon=2, delta=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"population": ""}, "text of 1 to 200"),
        ({"population": "a\nb"}, "printable"),
        ({"population": "a" * 201}, "200"),
        ({"population": 3}, "population"),
        *(({"group_of": wrong}, "group_of") for wrong in ("a\nb", "a" * 201, 5)),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 500.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"delta": -1e-9}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"adjacency": "add-remove"}, "adjacency"),
        ({"unit": "household"}, "unit"),
        ({"renews": 36_501}, "renews"),
        ({"renews": -1}, "renews"),
        ({"accounting": "adaptive-renyi:2.5"}, "whole order"),
        ({"accounting": "adaptive", "delta": 0.0}, "delta above 0"),
    ],
)
def test_bad_budgets(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        replace(BUDGET, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "p"}, "protocol"),
        ({"survivors": 0}, "survivors"),
        ({"survivors": 2.0}, "survivors"),
        ({"survivors": 2**40}, "survivors"),
        ({"colluding": -1}, "colluding"),
        ({"round": -1}, "round"),
        ({"participation": "sometimes"}, "participation"),
        ({"participation": "every"}, "partition"),
        ({"run": "a\x00"}, "run"),
        ({"label": "x" * 300}, "label"),
        ({"overflow": 1.0}, "overflow"),
        ({"overflow": -1e-9}, "overflow"),
        ({"examples": 0}, "examples"),
        ({"table_unit": "household"}, "table_unit"),
        ({"examples": 3, "participation": "fixed-size:0.1", "partition": ""}, "Example-level"),
    ],
)
def test_bad_events(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        replace(EVENT, **changes)


def test_numbers_of_numpy_become_pythons() -> None:
    event = replace(EVENT, survivors=np.int64(900), round=np.int64(3))
    assert event == EVENT
    assert type(event.survivors) is type(event.round) is int


def test_the_largest_that_is_accepted() -> None:
    longest = "a" * 200
    assert replace(BUDGET, population=longest, renews=36_500).population == longest
    assert replace(EVENT, label=longest, run=longest, overflow=0.0, examples=1).label == longest
    assert replace(BUDGET, accounting="adaptive-renyi").accounting == f"adaptive-renyi:{best_order(2.0, 1e-6)}"


def test_the_most_messages_that_a_cohort_is_accounted_with() -> None:
    assert EVENT.most_messages == 1_000
    assert replace(EVENT, survivors=1_100).most_messages == 1_100


def test_colluding_clients_protect_nobody() -> None:
    with pytest.raises(ConditionError, match="nobody"):
        replace(EVENT, survivors=5, colluding=5)


EVENTS = st.builds(
    RoundEvent,
    protocol=st.sampled_from([PROTOCOL, Protocol.gaussian(clients=3, dim=7, clip_norm=0.1, sigma=1 / 3)]),
    survivors=st.integers(11, 2**32 - 1),
    participation=st.one_of(
        st.sampled_from(["every", "once"]),
        st.builds(Participation, st.sampled_from(["poisson", "fixed-size"]), st.floats(1.001e-7, 1.0)),
    ),
    colluding=st.integers(0, 10),
    round=st.integers(0, 2**32 - 1),
    run=st.text(max_size=20).filter(str.isprintable),
    overflow=st.floats(0.0, 1.0, exclude_max=True),
    label=st.text(max_size=20).filter(str.isprintable),
    table_unit=st.sampled_from(["", "user", "row"]),
)


@given(EVENTS)
def test_events_survive_json(event: RoundEvent) -> None:
    assert RoundEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_what_no_table_says_is_left_out() -> None:
    assert "table_unit" not in EVENT.to_dict()
    assert replace(EVENT, table_unit="row").to_dict()["table_unit"] == "row"


def test_budgets_survive_json() -> None:
    assert Budget.from_dict(json.loads(json.dumps(BUDGET.to_dict()))) == BUDGET


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_damaged_events_and_budgets_raise_errors_of_our_own(data: st.DataObject) -> None:
    for kind, good in ((RoundEvent, EVENT.to_dict()), (Budget, BUDGET.to_dict())):
        values: Any = json.loads(json.dumps(good))
        target = values
        if kind is RoundEvent and data.draw(st.booleans()):
            target = values[data.draw(st.sampled_from(["protocol", "participation"]))]
        name = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=5))
        if data.draw(st.booleans()):
            target.pop(name, None)
        else:
            target[name] = data.draw(JSON)
        try:
            found = kind.from_dict(values)
        except CpsgdError:
            continue
        assert kind.from_dict(found.to_dict()) == found
    for kind in (RoundEvent, Budget):
        with pytest.raises(CpsgdError):
            kind.from_dict(data.draw(JSON))


def test_times_without_a_zone_are_utc() -> None:
    budget = Budget(population="people", epsilon=1.0, delta=1e-6, expires="2026-03-01")
    assert not budget.expired("2026-02-28T23:59:59")
    assert budget.expired("2026-03-01")
    assert budget.expired("2026-03-01T00:00:00+00:00")
    renewing = Budget(population="people", epsilon=1.0, delta=1e-6, renews=7)
    created = "2026-03-01T00:00:00+00:00"
    assert [renewing.period(created, time) for time in ("2026-03-08", "2026-03-07T23:59:59+00:00")] == [1, 0]
    assert renewing.period(created, "2026-03-08T01:00:00+02:00") == 0


def test_one_message_is_a_round() -> None:
    assert RoundEvent(Protocol.gaussian(clients=1, dim=1, clip_norm=1.0, sigma=1.0), survivors=1).survivors == 1


def test_the_fingerprint_belongs_to_the_protocol() -> None:
    values = EVENT.to_dict()
    values["protocol"]["trials"] += 1
    with pytest.raises(ParameterError, match="fingerprint"):
        RoundEvent.from_dict(values)
