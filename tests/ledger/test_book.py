"""Reserve, release, totals and refusals of a ledger that is one file on the disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from cpsgd.errors import (
    BudgetExceededError,
    ConditionError,
    EntryError,
    LedgerAccessError,
    LedgerChainError,
    LedgerFormatError,
    ParameterError,
    PopulationError,
)
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.ledger.entries import TableUnit
from cpsgd.privacy.guarantees import guarantee, guarantee_over_rounds
from cpsgd.protocol import Protocol

from .damage import index_of

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=0.6)
EVENT = RoundEvent(PROTOCOL, survivors=900)


def cost(rounds: int, surviving: int = 900) -> float:
    return guarantee_over_rounds(PROTOCOL, 1e-6, rounds=rounds, surviving=surviving).epsilon


def test_a_round_is_spent_when_it_is_reserved_and_cheaper_with_more_survivors(ledger: Ledger) -> None:
    assert ledger.total("people").epsilon == 0.0
    entry = ledger.reserve("people", EVENT)
    assert (entry.released, entry.survivors, entry.spent) == (False, 900, cost(1))
    assert entry.method == guarantee(PROTOCOL, 1e-6, surviving=900).method
    total = ledger.total("people")
    assert (total.epsilon, total.rounds, total.unreleased) == (cost(1), 1, 1)
    released = ledger.release(entry, survivors=960)
    assert (released.released, released.survivors) == (True, 960)
    total = ledger.total("people")
    assert (total.epsilon, total.unreleased) == (cost(1, 960), 0)
    assert total.left == 1.0 - total.epsilon


def test_what_was_written_is_there_for_others_and_after_reopening(ledger: Ledger) -> None:
    other = Ledger(ledger.path)
    entry = ledger.reserve("people", EVENT)
    assert other.events("people") == (entry,)
    other.release(entry.number, 1_000)
    again = Ledger(ledger.path)
    assert again.events("people") == ledger.events("people") == other.events("people")
    assert again.total("people") == ledger.total("people")
    assert again.budgets() == (Budget(population="people", epsilon=1.0, delta=1e-6),)
    assert again.budget("people").epsilon == 1.0


def test_a_round_too_many_is_refused_before_anything_is_written(ledger: Ledger) -> None:
    affordable = next(n for n in range(1, 100) if cost(n + 1) > 1.0)
    assert affordable >= 2
    for _ in range(affordable):
        ledger.reserve("people", EVENT)
    head = ledger.head
    with pytest.raises(BudgetExceededError, match=r"ε=.* is spent, .* is left; this would bring it to ε=") as error:
        ledger.reserve("people", EVENT)
    assert error.value.spent == cost(affordable)
    assert error.value.total == cost(affordable + 1) > error.value.limit == 1.0
    assert ledger.head == head
    # One with more noise still fits.
    rich = Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=1_000_000)
    ledger.reserve("people", RoundEvent(rich, survivors=1_000))
    assert ledger.total("people").epsilon <= 1.0


def test_a_quote_charges_nothing(ledger: Ledger) -> None:
    head = ledger.head
    assert ledger.quote("people", [EVENT, EVENT]).epsilon == cost(2)
    with pytest.raises(BudgetExceededError):
        ledger.quote("people", [EVENT] * 50)
    assert ledger.head == head


def test_populations_are_apart(ledger: Ledger) -> None:
    ledger.create(Budget(population="others", epsilon=0.9, delta=1e-5))
    ledger.reserve("others", EVENT)
    assert ledger.total("people").epsilon == 0.0
    assert ledger.total("others").epsilon == guarantee(PROTOCOL, 1e-5, surviving=900).epsilon
    with pytest.raises(PopulationError, match="already"):
        ledger.create(Budget(population="others", epsilon=10.0, delta=1e-5))
    for ask in (ledger.total, ledger.budget, ledger.events):
        with pytest.raises(PopulationError, match="'people', 'others'"):
            ask("nobody")
    with pytest.raises(PopulationError):
        ledger.reserve("nobody", EVENT)
    with pytest.raises(PopulationError):
        ledger.find("nobody", run="r", round=0)


def test_one_message_is_released(ledger: Ledger) -> None:
    alone = Protocol.gaussian(clients=1, dim=10, clip_norm=1.0, sigma=100.0)
    entry = ledger.reserve("people", RoundEvent(alone, survivors=1))
    assert ledger.release(entry, 1).survivors == 1


def test_a_release_checks_the_cohort_that_was_accounted_for(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ledger.reserve("people", EVENT)
    with monkeypatch.context() as patch:
        patch.setattr("cpsgd.ledger.book.check_cohort", refuse := mock.Mock(side_effect=ParameterError("too many")))
        with pytest.raises(ParameterError, match="too many"):
            ledger.release(entry, 950)
    refuse.assert_called_once_with(EVENT.taking_part, 950, EVENT.colluding, EVENT.most_messages)
    assert ledger.release(entry, 950).survivors == 950


def test_the_last_entries_are_told(ledger: Ledger) -> None:
    ledger.create(Budget(population="others", epsilon=1.0, delta=1e-6))
    entries = [ledger.reserve("people", EVENT) for _ in range(2)]
    other = ledger.reserve("others", EVENT)
    entries[0] = ledger.release(entries[0], 950)
    assert ledger.events("people", last=0) == ()
    assert ledger.events("people", last=1) == (entries[1],)
    assert ledger.events("people", last=2) == ledger.events("people", last=9) == tuple(entries)
    assert ledger.events("others", last=2) == ledger.events("others") == (other,)


def test_a_group_pays_the_price_of_its_own_budget(ledger: Ledger) -> None:
    ledger.create(Budget(population="young", epsilon=1.0, delta=1e-5, group_of="people"))
    entry = ledger.reserve("people", EVENT)
    assert entry.spent == ledger.total("people").epsilon == cost(1)
    assert ledger.total("young").epsilon == guarantee(PROTOCOL, 1e-5, surviving=900).epsilon < cost(1)
    own = ledger.reserve("young", EVENT)
    assert own.spent == ledger.total("young").epsilon > ledger.total("people").epsilon


def test_what_is_no_budget_and_what_is_no_group(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new.ledger")
    with pytest.raises(ParameterError, match="budget"):
        ledger.create("people")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="no budget"):
        ledger.create(Budget(population="young", epsilon=1.0, delta=1e-5, group_of="people"))
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_of_its_first_record_alone(ledger: Ledger, tmp_path: Path) -> None:
    """A crash may leave the first of the two records that `create` writes."""
    first, *_ = ledger.path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "torn.ledger"
    path.write_bytes(first)
    torn = Ledger(path)
    assert (torn.head.number, torn.budgets(), torn.verify().records) == (0, (), 1)
    with pytest.raises(PopulationError, match="it has none"):
        torn.total("people")
    torn.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    assert torn.verify().records == 2
    assert Ledger(path).reserve("people", EVENT).number == 2
    # Another file is not what was read before.
    path.write_bytes(first)
    index_of(path).unlink()
    torn = Ledger(path)
    assert torn.repair().number == 0
    path.write_bytes(b"")
    with pytest.raises(LedgerChainError, match="are gone"):
        torn.repair()


def test_releases_that_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    entry = ledger.reserve("people", EVENT)
    head = ledger.head
    with pytest.raises(EntryError, match="at least 900 survivors and has 899"):
        ledger.release(entry, 899)
    with pytest.raises(EntryError, match="no such entry"):
        ledger.release(entry.number + 1, 900)
    with pytest.raises(EntryError, match="no such entry"):
        ledger.release(1, 900)  # the record of the budget
    with pytest.raises(ParameterError, match="survivors"):
        ledger.release(entry, 0)
    with pytest.raises(ParameterError, match="survivors"):
        ledger.release(entry, 1e9)
    elsewhere = Ledger(tmp_path / "elsewhere.ledger")
    elsewhere.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    foreign = elsewhere.reserve("people", RoundEvent(PROTOCOL, survivors=800))
    with pytest.raises(EntryError, match="in another"):
        ledger.release(foreign, 900)
    assert ledger.head == head
    ledger.release(entry, 900)
    with pytest.raises(EntryError, match="released before"):
        ledger.release(entry, 900)


def test_other_units_and_adjacencies_are_refused(ledger: Ledger) -> None:
    ledger.create(Budget(population="examples", epsilon=1.0, delta=1e-6, unit="example"))
    ledger.create(Budget(population="zero", epsilon=1.0, delta=1e-6, adjacency="zero-out"))
    of_examples = RoundEvent(PROTOCOL, survivors=900, examples=5)
    head = ledger.head
    with pytest.raises(ParameterError, match="protects one client"):
        ledger.reserve("people", of_examples)
    with pytest.raises(ParameterError, match="protects one example"):
        ledger.reserve("examples", EVENT)
    with pytest.raises(ParameterError, match="zero-out"):
        ledger.reserve("people", RoundEvent(PROTOCOL, survivors=900, participation="poisson:0.1"))
    with pytest.raises(ParameterError, match="replace-one"):
        ledger.reserve("zero", RoundEvent(PROTOCOL, survivors=900, participation="fixed-size:0.1"))
    assert ledger.head == head


@pytest.mark.parametrize(("first", "then"), [("user", "row"), ("row", "user")])
def test_a_budget_pays_for_users_or_for_rows(tmp_path: Path, first: TableUnit, then: TableUnit) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    ledger.create(Budget(population="group", epsilon=1.0, delta=1e-6, group_of="people"))
    ledger.create(Budget(population="others", epsilon=1.0, delta=1e-6))
    ledger.reserve("people", EVENT)  # a round between clients says neither
    ledger.reserve("people", replace(EVENT, table_unit=first))
    ledger.reserve("people", EVENT)
    other = replace(EVENT, table_unit=then)
    for book in (ledger, Ledger(ledger.path)):
        for population in ("people", "group"):
            with pytest.raises(
                ParameterError, match=f"has paid for statistics per {first}, and this one is per {then}"
            ):
                book.reserve(population, other)
            with pytest.raises(ParameterError, match="do not add up"):
                book.quote(population, [other])
    assert {total.unit for total in map(ledger.total, ("people", "group"))} == {"row" if first == "row" else "client"}
    ledger.reserve("others", other)
    ledger.verify()


def test_rows_of_a_group_are_rows_of_the_population(ledger: Ledger) -> None:
    ledger.create(Budget(population="group", epsilon=1.0, delta=1e-6, group_of="people"))
    ledger.reserve("group", replace(EVENT, table_unit="row"))
    with pytest.raises(ParameterError, match="budget of 'group' has paid for statistics per row"):
        ledger.reserve("people", replace(EVENT, table_unit="user"))


def test_a_record_of_another_unit_is_one_that_no_ledger_writes(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.reserve("people", replace(EVENT, table_unit="user"))
    with monkeypatch.context() as patch:
        patch.setattr("cpsgd.ledger.book.check_event", lambda *_: None)
        patch.setattr("cpsgd.ledger.state.check_event", lambda *_: None)
        ledger.reserve("people", replace(EVENT, table_unit="row"))
    index_of(ledger.path).unlink()
    with pytest.raises(LedgerFormatError, match="do not add up"):
        Ledger(ledger.path)


def test_a_round_that_nothing_is_proved_about_is_not_reserved(ledger: Ledger) -> None:
    silent = Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=0)
    head = ledger.head
    with pytest.raises(ConditionError, match="no noise"):
        ledger.reserve("people", RoundEvent(silent, survivors=900))
    assert ledger.head == head


def test_a_runs_round_is_charged_once_and_can_be_found(ledger: Ledger) -> None:
    event = RoundEvent(PROTOCOL, survivors=900, run="night", round=4)
    assert ledger.find("people", run="night", round=4) is None
    entry = ledger.reserve("people", event)
    with pytest.raises(EntryError, match="reserved before, as entry 2"):
        ledger.reserve("people", event)
    assert Ledger(ledger.path).find("people", run="night", round=4) == entry
    ledger.create(Budget(population="others", epsilon=1.0, delta=1e-6))
    ledger.reserve("others", event)  # another population's affair
    ledger.reserve("people", RoundEvent(PROTOCOL, survivors=900, run="night", round=5))
    ledger.reserve("people", EVENT)  # without a run, rounds are never the same
    ledger.reserve("people", EVENT)
    assert ledger.total("people").rounds == 4


def test_export_holds_everything_and_its_hashes(ledger: Ledger) -> None:
    ledger.release(ledger.reserve("people", EVENT), 950)
    data = json.loads(json.dumps(ledger.export()))
    assert data["head"] == str(ledger.head)
    assert [record["number"] for record in data["records"]] == [0, 1, 2, 3]
    assert data["populations"][0]["total"]["epsilon"] == ledger.total("people").epsilon
    (entry,) = data["populations"][0]["entries"]
    assert entry["event"]["fingerprint"] == PROTOCOL.fingerprint.hex()
    assert (entry["released"], entry["released_survivors"]) == (True, 950)


def test_where_there_is_no_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "none.ledger")
    with pytest.raises(LedgerAccessError, match="budget create"):
        ledger.total("people")
    with pytest.raises(LedgerAccessError, match="budget create"):
        ledger.reserve("people", EVENT)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(LedgerFormatError, match="not a ledger"):
        Ledger(tmp_path / "other")
    (tmp_path / "other").unlink()
    (tmp_path / "empty.ledger").touch()
    with pytest.raises(LedgerAccessError, match="empty"):
        Ledger(tmp_path / "empty.ledger").seen()
    with pytest.raises(LedgerAccessError, match="empty"):
        Ledger(tmp_path / "empty.ledger").verify()
    with pytest.raises(LedgerAccessError, match="empty"):
        Ledger(tmp_path / "empty.ledger").abandon(2, "none")
    with pytest.raises(LedgerAccessError, match="empty"):
        Ledger(tmp_path / "empty.ledger").release(2, 900)
    with pytest.raises(LedgerAccessError, match="No such file"):
        Ledger(tmp_path / "no" / "such" / "folder").create(Budget(population="people", epsilon=1.0, delta=1e-6))


def test_what_somebody_else_spends_between_the_price_and_the_lock_counts(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    affordable = next(n for n in range(1, 20) if cost(n + 1) > 1.0)
    for _ in range(affordable - 1):
        ledger.reserve("people", EVENT)
    other = Ledger(ledger.path)
    real = Ledger._price
    prices = 0

    def price(self: Ledger, population: str, event: RoundEvent, time: str) -> object:
        nonlocal prices
        found = real(self, population, event, time)
        if self is ledger:
            prices += 1
            other.reserve("people", EVENT)  # takes the last round
        return found

    monkeypatch.setattr(Ledger, "_price", price)
    with pytest.raises(BudgetExceededError):
        ledger.reserve("people", EVENT)
    assert prices == 1
    assert ledger.total("people").rounds == affordable


def test_a_release_does_not_bring_a_spent_budget_over_its_limit(tmp_path: Path) -> None:
    little, much = (
        Protocol.rotated_binomial(clients=30, dim=1, clip_norm=1.0, levels=2, trials=trials, coordinate_range=1.0)
        for trials in (1, 40)
    )
    events = [RoundEvent(protocol, survivors=30) for protocol in (little, little, little, much)]
    ledger = Ledger(tmp_path / "tight.ledger")
    ledger.create(Budget(population="few", epsilon=100.0, delta=0.01))
    limit = ledger.quote("few", events).epsilon
    ledger.create(Budget(population="people", epsilon=limit, delta=0.01))
    entries = [ledger.reserve("people", event) for event in events]
    ledger.release(entries[0], survivors=31)
    assert ledger.total("people").epsilon == limit
    assert ledger.verify().overspent == ()


def test_a_population_without_a_budget_is_refused_whatever_is_asked(ledger: Ledger) -> None:
    for ask in (
        lambda: ledger.quote("nobody", [EVENT]),
        lambda: ledger.reserve("nobody", EVENT),
        lambda: ledger.total("nobody"),
        lambda: ledger.lifetime("nobody"),
        lambda: ledger.budget("nobody"),
        lambda: ledger.events("nobody"),
        lambda: ledger.events("nobody", last=1),
        lambda: ledger.find("nobody", run="r", round=0),
        lambda: ledger.rounds("nobody", "r"),
    ):
        with pytest.raises(PopulationError, match="no budget for 'nobody'; it has 'people'"):
            ask()


def test_a_budget_may_be_spent_to_its_end(ledger: Ledger) -> None:
    needed = ledger.quote("people", [EVENT]).epsilon
    ledger.create(Budget(population="just", epsilon=needed, delta=1e-6))
    ledger.create(Budget(population="short", epsilon=needed * (1.0 - 1e-12), delta=1e-6, renews=1))
    assert ledger.quote("just", [EVENT]).left == 0.0
    ledger.reserve("just", EVENT)
    with pytest.raises(BudgetExceededError) as refused:
        ledger.quote("short", [EVENT])
    assert "future" not in str(refused.value)  # it renews, and no record is dated in the future


def test_what_is_no_round_and_what_is_no_entry(ledger: Ledger) -> None:
    with pytest.raises(ParameterError, match="event"):
        ledger.reserve("people", "a round")  # type: ignore[arg-type]
    for number in (0, 1, 7):
        with pytest.raises(EntryError, match=f"no such entry {number}"):
            ledger.release(number, 900)
    with pytest.raises(ParameterError, match="entry"):
        ledger.release(-1, 900)
