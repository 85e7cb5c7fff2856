"""A ledger of release 0.1.0 is read, verified, counted the same, and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cpsgd.errors import BudgetExceededError, EntryError
from cpsgd.ledger import Ledger, RoundEvent

from .recorded import DATA, better, no_larger, read, same

RECORDED: dict[str, Any] = read("ledger.json")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    shutil.copyfile(DATA / "budgets.ledger", tmp_path / "budgets.ledger")
    return Ledger(tmp_path / "budgets.ledger")


def test_the_chain_holds_and_the_totals_are_the_same_or_smaller(ledger: Ledger) -> None:
    found = ledger.verify(RECORDED["head"])
    assert (str(found.head), found.records) == (RECORDED["head"], RECORDED["records"])
    assert found.overspent == ()
    assert len(found.totals) == len(RECORDED["totals"])
    for total, recorded in zip(found.totals, RECORDED["totals"], strict=True):
        assert same(total.delta, recorded["delta"]), recorded
        for name in ("population", "limit", "unit", "adjacency", "rounds", "unreleased"):
            assert getattr(total, name) == recorded[name], (name, recorded)
        if better(total.epsilon, recorded["epsilon"]):  # tighter certificates since
            assert total.tail < total.delta, recorded
            continue
        assert same(total.epsilon, recorded["epsilon"]), recorded
        assert no_larger(total.tail, recorded["tail"]), recorded
        assert total.method == recorded["method"], recorded


def test_budgets_and_entries_are_the_same(ledger: Ledger) -> None:
    # What is new in this release says nothing of budgets that did not have it.
    new = {"accounting": "planned", "group_of": "", "expires": "", "renews": 0}
    assert [budget.to_dict() for budget in ledger.budgets()] == [{**budget, **new} for budget in RECORDED["budgets"]]
    for population, entries in RECORDED["entries"].items():
        for entry, recorded in zip(ledger.events(population), entries, strict=True):
            found = entry.to_dict()
            assert {name: found.pop(name) for name in recorded} == recorded
            assert not any(found.values()), found  # what is new says nothing of old entries


def test_rounds_are_charged_on_top_of_the_old_ones(ledger: Ledger) -> None:
    old = ledger.find("patients-2026", run="spring", round=2)
    assert old is not None
    assert not old.released
    before = ledger.total("patients-2026")
    with pytest.raises(EntryError):
        ledger.reserve("patients-2026", RoundEvent(old.event.protocol, survivors=950, round=0, run="spring"))
    with pytest.raises(EntryError):
        ledger.release(old, survivors=949)
    ledger.release(old, survivors=960)
    entry = ledger.reserve("patients-2026", RoundEvent(old.event.protocol, survivors=950, round=3, run="spring"))
    ledger.release(entry, survivors=950)
    after = ledger.total("patients-2026")
    assert (after.rounds, after.unreleased) == (before.rounds + 1, before.unreleased - 1)
    assert after.epsilon > before.epsilon
    assert ledger.verify(RECORDED["head"]).records == RECORDED["records"] + 3
    floats = ledger.events("floats, größer")[0].event.protocol
    with pytest.raises(BudgetExceededError):
        ledger.reserve("untouched", RoundEvent(floats, survivors=500))
