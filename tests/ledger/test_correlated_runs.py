"""What runs of correlated noise cost on a ledger: each is paid for once, and two are two."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpsgd.adjacency import Adjacency
from cpsgd.errors import BudgetExceededError, ConditionError, RoundRefusedError
from cpsgd.federation.limits import Limits
from cpsgd.federation.spending import RoundKind, check_affordable
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.mechanisms import CorrelatedGaussian
from cpsgd.mechanisms.law import Normal
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.guarantees import guarantee
from cpsgd.protocol import Protocol

CLIENTS, DELTA = 4000, 1e-6


def protocol_with(**changes: Any) -> Protocol:
    fields: dict[str, Any] = {"bands": 4, "run_length": 10, "separation": 1, **changes}
    mechanism = CorrelatedGaussian.with_room(noise_deviation=64.0, step=0.01, coordinate_range=1.0, cut=1e-40, **fields)
    return Protocol(clients=CLIENTS, dim=16, clip_norm=1.0, mechanism=mechanism)


def spend(ledger: Ledger, event: RoundEvent) -> float:
    ledger.release(ledger.reserve("people", event), event.survivors)
    return ledger.total("people").epsilon


def mu_of(protocol: Protocol) -> float:
    law = protocol.mechanism.law(CLIENTS)
    assert isinstance(law, Normal)
    return protocol.sensitivity(Adjacency.REPLACE_ONE) / law.deviation


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "book.ledger")
    ledger.create(Budget(population="people", epsilon=20.0, delta=DELTA))
    return ledger


@pytest.mark.parametrize("separation", [1, 5, None])
def test_runs_of_one_protocol_add_up_and_rounds_of_a_run_do_not(ledger: Ledger, separation: int | None) -> None:
    protocol = protocol_with(separation=separation)
    one = guarantee(protocol, DELTA).epsilon
    for number in range(1, 4):
        for round in range(5):
            found = spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run=f"run {number}", round=round))
            true = gdp_epsilon(math.sqrt(number) * mu_of(protocol), DELTA)
            assert true * (1 - 1e-9) <= found <= (one if number == 1 else 1.2 * true) * (1 + 1e-9)


def test_runs_in_partitions_of_their_own_add_up(ledger: Ledger) -> None:
    event = RoundEvent(protocol_with(), survivors=CLIENTS, participation="once", partition="first", run="a")
    spend(ledger, event)
    found = spend(ledger, replace(event, partition="second", run="b"))
    assert found >= gdp_epsilon(math.sqrt(2) * mu_of(event.protocol), DELTA) * (1 - 1e-9)


def test_a_second_run_is_refused_where_only_one_is_left(tmp_path: Path) -> None:
    protocol = protocol_with()
    with Ledger(tmp_path / "book.ledger") as ledger:
        one = guarantee(protocol, DELTA).epsilon
        ledger.create(Budget(population="people", epsilon=1.1 * one, delta=DELTA))
        for round in range(10):
            spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run="a", round=round))
        with pytest.raises(BudgetExceededError):
            ledger.reserve("people", RoundEvent(protocol, survivors=CLIENTS, run="b"))
        with pytest.raises(BudgetExceededError):
            ledger.reserve("people", RoundEvent(protocol, survivors=CLIENTS))  # of no run: one by itself


def test_the_round_with_the_fewest_messages_is_what_a_run_costs(ledger: Ledger) -> None:
    protocol = protocol_with()
    spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run="a"))
    found = spend(ledger, RoundEvent(protocol, survivors=2500, run="a", round=1))
    assert found == pytest.approx(guarantee(protocol, DELTA, surviving=2500).epsilon, rel=1e-2)
    assert found >= gdp_epsilon(mu_of(protocol) * math.sqrt(CLIENTS / 2500), DELTA) * (1 - 1e-9)


def test_an_adaptive_budget_charges_a_run_once(tmp_path: Path) -> None:
    protocol = protocol_with()
    with Ledger(tmp_path / "book.ledger") as ledger:
        ledger.create(Budget(population="people", epsilon=4.0, delta=DELTA, accounting="adaptive"))
        first = spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run="a"))
        assert spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run="a", round=1)) == first
        assert spend(ledger, RoundEvent(protocol, survivors=CLIENTS, run="b")) > first


def test_more_colluding_clients_than_may_hold_seeds_are_refused() -> None:
    protocol = protocol_with(separation=None, untrusted_holders=1)
    assert RoundEvent(protocol, survivors=CLIENTS, colluding=1).colluding == 1
    with pytest.raises(ConditionError, match="untrusted_holders=1"):
        RoundEvent(protocol, survivors=CLIENTS, colluding=2)
    with pytest.raises(ConditionError, match="at least half"):
        RoundEvent(protocol, survivors=CLIENTS // 2 - 1)


def test_a_client_that_paid_for_a_run_pays_for_the_next_one() -> None:
    protocol = protocol_with()
    one = guarantee(protocol, DELTA, colluding=1).epsilon
    limits = Limits(epsilon=1.1 * one, delta=DELTA, colluding=1)
    kind = RoundKind.of(limits, protocol, CLIENTS)
    check_affordable(limits, {}, kind, 1)
    with pytest.raises(RoundRefusedError, match="one more would bring"):
        check_affordable(limits, {kind: 1}, kind, 1)
