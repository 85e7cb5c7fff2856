"""Signed reports: verified without the ledger, and not to be changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.errors import ReportError
from cpsgd.ledger import Budget, Ledger, RoundEvent, check_report, signed_reports
from cpsgd.protocol import Protocol

from .damage import KEY, OTHER_PUBLIC, PUBLIC

GAUSSIAN = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=10.0)
OTHERWISE = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=20.0)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=2.0, delta=1e-6))
    ledger.create(Budget(population="young", epsilon=3.0, delta=1e-6, group_of="people"))
    ledger.create(Budget(population="others", epsilon=2.0, delta=1e-6, accounting="adaptive"))
    for population in ("people", "young", "others"):
        for number, protocol in enumerate((GAUSSIAN, OTHERWISE)):
            event = RoundEvent(protocol, survivors=900, run="secret-run", round=number, label="secret label")
            entry = ledger.reserve(population, event)
            if number:
                ledger.release(entry, 950)
    return ledger


@pytest.fixture
def report(ledger: Ledger) -> dict[str, Any]:
    """As it comes out of a file."""
    found: dict[str, Any] = json.loads(json.dumps(ledger.report(KEY)))
    return found


def test_an_auditor_finds_what_the_ledger_says(ledger: Ledger, report: dict[str, Any]) -> None:
    found = check_report(report, [PUBLIC])
    assert found.totals == tuple(ledger.total(name) for name in ("people", "young", "others"))
    assert (found.head, found.key) == (ledger.head, PUBLIC)
    assert check_report(report).totals == found.totals
    # The head ties it to the ledger.
    assert ledger.verify(found.head).records == found.head.number + 1


def test_an_auditor_learns_that_rows_were_paid_for(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=2.0, delta=1e-6))
    ledger.create(Budget(population="young", epsilon=3.0, delta=1e-6, group_of="people"))
    ledger.reserve("people", RoundEvent(GAUSSIAN, survivors=900, table_unit="row"))
    report = ledger.report(KEY)
    assert [total.unit for total in check_report(report).totals] == ["row", "row"]
    (young,) = (account for name, _, account in report["state"]["accounts"] if name == "young")
    young["table_unit"] = "user"
    with pytest.raises(ReportError, match="per user and per row"):
        check_report(signed_again(report))


def test_runs_and_labels_are_not_in_it(report: dict[str, Any]) -> None:
    assert "secret" not in json.dumps(report)


def test_another_signer(report: dict[str, Any]) -> None:
    with pytest.raises(ReportError, match="not by a key"):
        check_report(report, [OTHER_PUBLIC])
    with pytest.raises(ReportError, match="not by a key"):
        check_report(report, [])


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values are."""
    if isinstance(data, dict):
        return [place for name, value in data.items() for place in paths(value, (*at, name))]
    if isinstance(data, list):
        return [place for index, value in enumerate(data) for place in paths(value, (*at, index))]
    return [at]


def test_no_value_can_be_changed(report: dict[str, Any]) -> None:
    for place in paths(report):
        changed = json.loads(json.dumps(report))
        target = changed
        for step in place[:-1]:
            target = target[step]
        value = target[place[-1]]
        target[place[-1]] = value + 1 if isinstance(value, int | float) else f"{value}x"
        with pytest.raises(ReportError):
            check_report(changed, [PUBLIC])


def signed_again(report: dict[str, Any]) -> dict[str, Any]:
    """By somebody who has the key, and lies."""
    body = {name: value for name, value in report.items() if name != "signature"}
    return {**body, "signature": base64.b64encode(KEY.sign(signed_reports._signed(body))).decode()}


def test_a_signer_cannot_claim_less_than_the_rounds_cost(report: dict[str, Any]) -> None:
    check_report(signed_again(report), [PUBLIC])
    for change in (
        {"epsilon": 0.01},
        {"rounds": 1},
        {"delta": 1e-9},
        {"population": "x"},
        {"epsilon": "0"},
        {"limit": 9},
    ):
        lie = json.loads(json.dumps(report))
        lie["totals"][0].update(change)
        with pytest.raises(ReportError, match=r"claims|does not follow"):
            check_report(signed_again(lie), [PUBLIC])
    lie = json.loads(json.dumps(report))
    lie["totals"].pop()
    with pytest.raises(ReportError, match="not those of its budgets"):
        check_report(signed_again(lie))


def test_a_report_of_0_2_0_is_read_and_its_readings_stated_as_they_are_proved(report: dict[str, Any]) -> None:
    old = json.loads(json.dumps(report))
    old["state"]["version"] = 1
    for total in old["totals"]:
        total["delta"] = total.pop("limit_delta")
    old["totals"][2]["epsilon"] = 0.125  # in sixteenths of the limit, then
    found = check_report(signed_again(old), [PUBLIC])
    assert [total.delta for total in found.totals] == [1e-6, 1e-6, pytest.approx(3e-6)]
    # Of sampled rounds it does not say how many of their clients collude.
    old["state"]["kinds"][0]["participation"] = {"scheme": "fixed-size", "rate": 0.01}
    with pytest.raises(ReportError, match="not one that this release reads"):
        check_report(signed_again(old), [PUBLIC])


@pytest.mark.parametrize("data", [None, [], {}, {"format": "cpsgd budget report 1"}, "x", 3])
def test_what_is_no_report(data: object) -> None:
    with pytest.raises(ReportError):
        check_report(data)


def test_hostile_states_with_good_signatures(report: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [
        {"version": 99},
        {"kinds": []},
        {"protocols": [None]},
        {"accounts": [["people", 0, {}]]},
        {"accounts": []},
        {"budgets": 5},
        {"budgets": [[{}, "now"]]},
    ]
    for change in changes:
        lie = json.loads(json.dumps(report))
        lie["state"].update(change)
        with pytest.raises(ReportError):
            check_report(signed_again(lie))
    values: tuple[Any, ...] = (None, -1, "x", [], {}, 1e308, 10**30)
    for place in paths(report["state"]):
        for value in values:
            lie = json.loads(json.dumps(report))
            target = lie["state"]
            for step in place[:-1]:
                target = target[step]
            target[place[-1]] = value
            try:
                check_report(signed_again(lie))
            except ReportError:
                continue


def test_a_report_does_not_change_the_ledger(ledger: Ledger, tmp_path: Path) -> None:
    before = ledger.path.read_bytes()
    ledger.report(KEY)
    assert ledger.path.read_bytes() == before


def forged(report: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The report after a change, signed again; all its claims as low as the reader will find."""
    lie = json.loads(json.dumps(report))
    change(lie["state"])
    for total in lie["totals"]:
        total["epsilon"] = 0.0
    return signed_again(lie)


def take_all_back(state: dict[str, Any]) -> None:
    """Releases that never were take rounds away."""
    for _, _, account in state["accounts"]:
        account["since"] = [[partition, place, -count] for partition, place, count in account["tally"]]


def many_before(state: dict[str, Any]) -> None:
    """Releases that never were add messages."""
    place, account = state["accounts"][0][2]["tally"][0][1], state["accounts"][0][2]
    state["kinds"].append({**state["kinds"][place], "honest": 1_000_000})
    account["since"] = [["", len(state["kinds"]) - 1, 1], ["", place, -1]]


def reserved_for_more(state: dict[str, Any]) -> None:
    """Rounds have fewer messages than they were reserved for."""
    for kind in state["kinds"]:
        if kind["reserved"] is not None:
            kind["reserved"] = 1_000_000


@pytest.mark.parametrize("change", [take_all_back, many_before, reserved_for_more])
def test_states_that_no_records_lead_to(report: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ReportError, match="state is not one"):
        check_report(forged(report, change))


@pytest.mark.parametrize(
    "head", ["{number}:{digest}00", "0{number}:{digest}", "{number}:{short}", " {number}:{digest}"]
)
def test_a_head_that_no_ledger_has_is_refused(report: dict[str, Any], head: str) -> None:
    number, _, digest = report["head"].partition(":")
    lie = {**report, "head": head.format(number=number, digest=digest, short=digest[:-2])}
    with pytest.raises(ReportError, match="no head of a ledger"):
        check_report(signed_again(lie))
