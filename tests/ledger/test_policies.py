"""Budgets for rounds chosen by results, for groups, with an end or a renewal, and rounds that are given up."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cpsgd._plain import canonical
from cpsgd.errors import (
    BudgetExceededError,
    BudgetExpiredError,
    ConditionError,
    EntryError,
    LedgerError,
    LedgerFormatError,
    ParameterError,
)
from cpsgd.ledger import Budget, Ledger, RoundEvent, charging, replica
from cpsgd.ledger.kinds import Account, octave_of
from cpsgd.ledger.state import State
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol

from .damage import chained, index_of, replayed

GAUSSIAN = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1.0)
BINOMIAL = Protocol.rotated_binomial(clients=1_000, dim=100, clip_norm=1.0, levels=8, trials=2_000)
MU = 2.0 / math.sqrt(1_000)


def event(protocol: Protocol = GAUSSIAN, survivors: int = 1_000, **options: object) -> RoundEvent:
    return RoundEvent(protocol, survivors=survivors, **options)


def spend(budget: Budget, one: RoundEvent, most: int = 10_000) -> Account:
    """As many such rounds as it allows."""
    account = Account()
    while account.rounds < most and charging.affordable(budget, [account], one) is not None:
        account.reserve(one, octave=None if budget.filter is None else octave_of(account.reserved))
    return account


def opened(tmp_path: Path, *budgets: Budget) -> Ledger:
    ledger = Ledger(tmp_path / "budgets.ledger")
    for budget in budgets:
        ledger.create(budget)
    return ledger


def exhaust(ledger: Ledger) -> None:
    for _ in range(100):
        ledger.reserve("people", event())


PEOPLE = Budget(population="people", epsilon=1.0, delta=1e-6)
ADAPTIVE = Budget(population="people", epsilon=1.0, delta=1e-6, accounting="adaptive")


# ------------------------------------------------------------------ adaptive


def test_an_adaptive_budget_allows_what_a_planned_one_does() -> None:
    planned = spend(Budget(population="people", epsilon=3.0, delta=1e-6), event()).rounds
    adaptive = spend(Budget(population="people", epsilon=3.0, delta=1e-6, accounting="adaptive"), event()).rounds
    assert planned > 50
    assert 0.98 * planned <= adaptive <= planned


def test_rounds_with_tails_are_paid_for_one_by_one() -> None:
    budget = Budget(population="people", epsilon=1.0, delta=1e-6, accounting="adaptive")
    account = spend(budget, event(BINOMIAL), most=12)
    found = charging.spent(budget, [account])
    assert account.rounds >= 4
    assert found.method == "gaussian-filter"
    assert 0.0 < found.tail < 0.011 * budget.delta
    assert found.epsilon >= guarantee_over_rounds(BINOMIAL, 1e-6, rounds=account.rounds).epsilon
    octaves = {kind.octave for kind in account.tally.kinds()}
    assert octaves == set(range(account.rounds.bit_length()))


def test_sampled_rounds_are_cheaper_by_renyi_filters() -> None:
    sampled = event(participation="poisson:0.02")
    options = {"population": "people", "epsilon": 1.0, "delta": 1e-6, "adjacency": "zero-out"}
    blind = spend(Budget(**options, accounting="adaptive"), sampled, most=300).rounds
    renyi = spend(Budget(**options, accounting="adaptive-renyi"), sampled, most=300).rounds
    assert blind < 60
    assert renyi == 300
    for wrong in ("adaptive-renyi:1", "adaptive-renyi:x", "adaptively", 5, "adaptive:3"):
        with pytest.raises((ParameterError, ConditionError)):
            Budget(**options, accounting=wrong)


def test_a_ledger_with_an_adaptive_budget(tmp_path: Path) -> None:
    ledger = opened(tmp_path, ADAPTIVE)
    costs: list[float] = []

    def work() -> None:
        for number in range(100):
            entry = ledger.reserve("people", event(survivors=900, run="r", round=number))
            assert entry.octave == octave_of(number)
            costs.append(ledger.total("people").epsilon)
            if number % 2:
                assert ledger.release(entry, 1_000).octave == entry.octave

    with pytest.raises(BudgetExceededError) as refused:
        work()
    assert refused.value.total > 1.0 >= refused.value.spent
    assert costs == sorted(costs)
    assert costs[-1] == 1.0  # an upper bound, in steps
    again = Ledger(ledger.path)
    assert again.total("people") == ledger.total("people")
    assert again.verify().overspent == ()
    planned = spend(PEOPLE, event(survivors=900)).rounds
    assert len(costs) >= planned - 1
    # Rounds with many messages cost less, and then there is room again.
    for entry in again.events("people"):
        if not entry.released:
            again.release(entry, 1_000)
    with pytest.raises(BudgetExceededError):
        again.reserve("people", event(survivors=500))


def test_a_reading_is_stated_with_its_sense_and_the_delta_it_is_proved_at(tmp_path: Path) -> None:
    ledger = opened(tmp_path, ADAPTIVE)
    assert ledger.total("people").claim == Claim(0.0, 1e-6, "filter")
    ledger.reserve("people", event(survivors=900, run="r", round=0))
    total = ledger.total("people")
    assert (total.claim.sense, total.delta, total.limit_delta) == ("ex post", pytest.approx(3e-6), 1e-6)
    assert {"sense": "ex post", "limit": 1.0, "limit_delta": 1e-6}.items() <= total.to_dict().items()
    planned = charging.priced(PEOPLE, [Account()], [event(survivors=900)]).epsilon
    assert planned < total.epsilon < 1.4 * planned


def test_a_release_never_costs_more_than_was_reserved() -> None:
    little = Protocol.rotated_binomial(clients=30, dim=1, clip_norm=1.0, levels=2, trials=40, coordinate_range=1.0)
    budget = Budget(population="people", epsilon=20.0, delta=0.01, accounting="adaptive")
    for survivors in range(30, 60):
        account = Account()
        account.reserve(event(little, 30), octave=0)
        before = charging.spent(budget, [account])
        account.release(event(little, 30), survivors, 0)
        after = charging.spent(budget, [account])
        assert after.epsilon <= before.epsilon
        assert after.tail <= before.tail


def test_a_quote_is_for_the_octaves_that_the_rounds_will_have(tmp_path: Path) -> None:
    ledger = opened(tmp_path, ADAPTIVE)
    quoted = ledger.quote("people", [event(BINOMIAL)] * 3)
    for _ in range(3):
        ledger.reserve("people", event(BINOMIAL))
    found = ledger.total("people")
    assert (found.epsilon, found.tail) == (quoted.epsilon, quoted.tail)


@pytest.mark.parametrize(
    ("budget", "forged", "said"),
    [
        (ADAPTIVE, {}, "share of δ"),
        (ADAPTIVE, {"octave": 1}, "share of δ"),
        (ADAPTIVE, {"octave": -1}, "octave"),
        (PEOPLE, {"covers": 1_000_000}, "covers"),
    ],
)
def test_forged_records_are_refused(tmp_path: Path, budget: Budget, forged: dict[str, int], said: str) -> None:
    ledger = opened(tmp_path, budget)
    state = ledger._replica.state
    record = {"kind": "reserve", "population": "people", "event": event().to_dict(), "spent": 0.1, "method": "m"}
    text = canonical({**record, **forged, "number": 2, "time": state.time})
    texts = [record["body"] for record in ledger.export()["records"]]
    ledger.path.write_bytes(chained([*texts, text]))
    index_of(ledger.path).unlink()
    with pytest.raises(LedgerFormatError, match=said):
        Ledger(ledger.path)


def test_disjoint_cohorts_of_an_adaptive_budget(tmp_path: Path) -> None:
    ledger = opened(tmp_path, ADAPTIVE)
    for number in range(5):
        ledger.reserve("people", event(participation="once", partition="spring", round=number))
    (tmp_path / "alone").mkdir()
    alone = opened(tmp_path / "alone", ADAPTIVE)
    alone.reserve("people", event())
    assert ledger.total("people").epsilon == alone.total("people").epsilon


def test_budgets_of_the_first_release_are_planned() -> None:
    old = {"population": "p", "epsilon": 1.0, "delta": 1e-6, "adjacency": "replace-one", "unit": "client"}
    budget = Budget.from_dict(old)
    assert (budget.accounting, budget.group_of, budget.expires, budget.renews) == ("planned", "", "", 0)
    assert Budget.from_dict(budget.to_dict()) == budget
    with pytest.raises(ParameterError):
        Budget.from_dict({**old, "renews": 3})


# ------------------------------------------------------------------ groups


@pytest.mark.parametrize("accounting", ["planned", "adaptive"])
def test_groups_pay_for_their_own_rounds_and_for_everybodys(tmp_path: Path, accounting: str) -> None:
    def budget(population: str, epsilon: float, group_of: str = "") -> Budget:
        return Budget(population=population, epsilon=epsilon, delta=1e-6, group_of=group_of, accounting=accounting)

    ledger = opened(tmp_path, budget("people", 2.0), budget("young", 1.2, "people"), budget("old", 1.9, "people"))
    ledger.reserve("young", event())
    assert ledger.total("people").rounds == ledger.total("old").rounds == 0
    ledger.reserve("people", event())
    assert [ledger.total(name).rounds for name in ("people", "young", "old")] == [1, 2, 1]
    assert ledger.total("young").epsilon > ledger.total("old").epsilon
    if accounting == "planned":
        assert ledger.total("old").epsilon == ledger.total("people").epsilon
    # The whole population stops where the first of its groups has nothing left.
    with pytest.raises(BudgetExceededError) as refused:
        exhaust(ledger)
    assert refused.value.population == "young"
    with pytest.raises(BudgetExceededError):
        ledger.quote("people", [event()])
    ledger.reserve("old", event())
    assert ledger.total("young").epsilon <= 1.2
    assert ledger.total("people").epsilon < 1.5
    found = Ledger(ledger.path).verify()
    assert found.overspent == ()
    assert found.totals == tuple(ledger.total(name) for name in ("people", "young", "old"))
    assert sum(len(ledger.events(name)) for name in ("people", "young", "old")) == ledger.total("old").rounds + 1


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    ledger = opened(tmp_path, PEOPLE)
    options = {"epsilon": 1.0, "delta": 1e-6}
    ledger.create(Budget(population="young", group_of="people", **options))
    for wrong in (
        Budget(population="a", group_of="nobody", **options),
        Budget(population="b", group_of="young", **options),
        Budget(population="c", group_of="people", adjacency="zero-out", **options),
        Budget(population="d", group_of="people", unit="example", **options),
        Budget(population="e", group_of="people", accounting="adaptive", **options),
    ):
        with pytest.raises(ParameterError):
            ledger.create(wrong)
    ledger.create(Budget(population="yearly", renews=365, **options))
    with pytest.raises(ParameterError, match="renews"):
        ledger.create(Budget(population="f", group_of="yearly", **options))
    with pytest.raises(ParameterError, match="itself"):
        Budget(population="x", group_of="x", **options)
    with pytest.raises(ParameterError, match="periods of its population"):
        Budget(population="x", group_of="people", renews=3, **options)


# ------------------------------------------------------------------ time


class Clock:
    """A clock that tests can set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2026, 3, 1, tzinfo=UTC)
        clock = self

        class Fake(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Fake:
                return cls.fromisoformat(clock.now.isoformat())

        monkeypatch.setattr(replica, "datetime", Fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_an_expired_budget_pays_for_nothing_more(tmp_path: Path, clock: Clock) -> None:
    ledger = opened(tmp_path, Budget(population="people", epsilon=1.0, delta=1e-6, expires="2026-03-03"))
    entry = ledger.reserve("people", event())
    clock.now = datetime(2026, 3, 2, 23, 59, tzinfo=UTC)
    ledger.reserve("people", event())
    clock.now = datetime(2026, 3, 3, tzinfo=UTC)
    for ask in (lambda: ledger.reserve("people", event()), lambda: ledger.quote("people", [event()])):
        with pytest.raises(BudgetExpiredError, match="2026-03-03"):
            ask()
    ledger.release(entry, 1_000)  # what was paid for may be shown
    assert ledger.verify().totals[0].rounds == 2
    # A clock that is set back does not help.
    clock.now = datetime(2026, 3, 1, tzinfo=UTC)
    with pytest.raises(BudgetExpiredError):
        ledger.reserve("people", event())
    for wrong in ("2026-13-01", "tomorrow", "2026-3-1T00", 5):
        with pytest.raises(ParameterError, match="expires"):
            Budget(population="people", epsilon=1.0, delta=1e-6, expires=wrong)


def test_periods_of_an_adaptive_budget_are_added_up(tmp_path: Path, clock: Clock) -> None:
    """No filter that is made afterwards, for what was spent, would hold: its size was chosen by results."""
    ledger = opened(tmp_path, Budget(population="people", epsilon=0.5, delta=1e-6, renews=30, accounting="adaptive"))
    reading = ledger.lifetime("people")
    assert (reading.epsilon, reading.delta) == (0.0, 1e-6)
    for periods in (1, 2, 3):
        while True:
            try:
                ledger.reserve("people", event())
            except BudgetExceededError:
                break
        over = ledger.lifetime("people")
        assert over.epsilon == pytest.approx(periods * 0.5, rel=0.13 if periods == 1 else 1e-12)
        assert over.delta == pytest.approx(periods * 1e-6)
        clock.now += timedelta(days=30)


def test_a_budget_that_renews(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 4)
    ledger = opened(tmp_path, Budget(population="people", epsilon=0.5, delta=1e-6, renews=30))

    def exhaust() -> int:
        for number in range(100):
            try:
                last.append(ledger.reserve("people", event()))
            except BudgetExceededError:
                return number
        raise AssertionError

    last: list[object] = []
    first = exhaust()
    assert first >= 1
    clock.now += timedelta(days=29, hours=23)
    assert exhaust() == 0
    clock.now += timedelta(hours=1)
    assert ledger.total("people").rounds == 0
    ledger.release(last[0], 1_000)  # type: ignore[arg-type] # of the period before
    assert ledger.total("people").rounds == 0
    assert exhaust() == first
    assert ledger.total("people").epsilon <= 0.5
    over = ledger.lifetime("people")
    assert over.rounds == 2 * first
    assert over.unreleased == 2 * first - 1
    assert over.epsilon == pytest.approx(guarantee_over_rounds(GAUSSIAN, 1e-6, rounds=2 * first).epsilon)
    fresh = Ledger(ledger.path)
    assert (fresh.total("people"), fresh.lifetime("people")) == (ledger.total("people"), over)
    found = fresh.verify()
    assert [total.rounds for total in found.totals] == [first, first]
    assert found.overspent == ()
    # A clock that is set back does not bring back a period, nor a new one with it.
    clock.now -= timedelta(days=300)
    assert exhaust() == 0


def exhausted(ledger: Ledger) -> int:
    """Number of rounds that were left."""
    for number in range(100):
        try:
            ledger.reserve("people", event())
        except BudgetExceededError:
            return number
    raise AssertionError


@pytest.mark.parametrize("accounting", ["planned", "adaptive"])
def test_a_record_dated_2099_can_be_repaired(
    tmp_path: Path, clock: Clock, accounting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 5)
    budget = Budget(population="people", epsilon=1.0, delta=1e-6, renews=30, accounting=accounting)
    for folder in ("reference", "ledger"):
        (tmp_path / folder).mkdir()
    reference = opened(tmp_path / "reference", budget)
    most, start = exhausted(reference), clock.now
    ledger = opened(tmp_path / "ledger", budget)
    ledger.reserve("people", event())
    clock.now = datetime(2099, 1, 1, tzinfo=UTC)
    late = ledger.reserve("people", event())
    clock.now = start + timedelta(days=60)
    assert ledger.verify().ahead == "2099-01-01T00:00:00.000+00:00"
    with pytest.raises(BudgetExceededError, match=r"dated 2099-01-01.*--forget-future"):
        ledger.quote("people", [event()] * 100)
    head = ledger.forget_future("the server's clock had a flat battery")
    assert head == ledger.verify().head
    assert ledger.verify().ahead == ""
    # The round of 2099 may have been about today's data: it counts today.
    assert ledger.total("people").rounds == 1
    ledger.release(late, 1_000)
    assert exhausted(ledger) == most - 1
    clock.now += timedelta(days=30)
    assert exhausted(ledger) == most
    # Nor is it gone from the period in which it was.
    clock.now = datetime(2099, 1, 2, tzinfo=UTC)
    assert exhausted(Ledger(ledger.path)) == most - 1
    assert ledger.verify().overspent == ()
    fresh = Ledger(ledger.path)
    whole, _ = replayed(ledger.path.read_bytes())
    assert whole.to_text() == fresh._replica.state.to_text()


def test_a_clock_that_is_an_hour_ahead_is_no_other_time(tmp_path: Path, clock: Clock) -> None:
    ledger = opened(tmp_path, PEOPLE)
    clock.now -= timedelta(minutes=59)
    assert ledger.verify().ahead == ""
    clock.now -= timedelta(minutes=2)
    assert ledger.verify().ahead == "2026-03-01T00:00:00.000+00:00"


def test_a_time_that_cannot_be_set_back_is_not_written(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path, PEOPLE)
    head = ledger.head
    clock.now -= timedelta(days=1)

    def fails(self: State, time: str) -> None:
        raise ParameterError("no such period")

    monkeypatch.setattr(State, "set_back", fails)
    with pytest.raises(ParameterError, match="no such period"):
        ledger.forget_future("the clock was ahead")
    assert Ledger(ledger.path).head == head


def test_nothing_is_gained_by_setting_a_right_clock_back(tmp_path: Path, clock: Clock) -> None:
    ledger = opened(tmp_path, Budget(population="people", epsilon=0.5, delta=1e-6, renews=30))
    exhausted(ledger)
    start = clock.now
    clock.now += timedelta(days=30)
    exhausted(ledger)
    for number in range(3):
        clock.now = start
        ledger.forget_future("not true")
        assert exhausted(ledger) == 0
        clock.now += timedelta(days=30)
        assert exhausted(ledger) == 0
        clock.now += timedelta(hours=1)
        ledger.create(Budget(population=f"others {number}", epsilon=0.5, delta=1e-6))


def test_a_budget_that_a_record_of_2099_has_ended(tmp_path: Path, clock: Clock) -> None:
    ledger = opened(tmp_path, Budget(population="people", epsilon=1.0, delta=1e-6, expires="2027-01-01"))
    with pytest.raises(LedgerError, match="no need"):
        ledger.forget_future("no reason")
    start, clock.now = clock.now, datetime(2099, 1, 1, tzinfo=UTC)
    ledger.create(Budget(population="others", epsilon=1.0, delta=1e-6))
    clock.now = start
    for ask in (lambda: ledger.reserve("people", event()), lambda: ledger.quote("people", [event()])):
        with pytest.raises(BudgetExpiredError, match=r"dated 2099-01-01.*--forget-future"):
            ask()
    with pytest.raises(ParameterError, match="reason"):
        ledger.forget_future("")
    ledger.forget_future("the server's clock had a flat battery")
    ledger.reserve("people", event())
    assert Ledger(ledger.path).verify().totals[0].rounds == 1


# ------------------------------------------------------------------ rounds that are given up


@pytest.mark.parametrize("accounting", ["planned", "adaptive"])
def test_a_round_that_is_given_up_costs_nothing(tmp_path: Path, accounting: str) -> None:
    ledger = opened(tmp_path, Budget(population="people", epsilon=1.0, delta=1e-6, accounting=accounting))
    ledger.reserve("people", event())
    before = ledger.total("people")
    entry = ledger.reserve("people", event(run="r", round=3))
    gone = ledger.abandon(entry, "nobody was asked")
    assert (gone.abandoned, gone.released) == (True, False)
    assert ledger.total("people") == before
    assert ledger.find("people", run="r", round=3) is None
    assert ledger.rounds("people", "r") == frozenset()
    with pytest.raises(EntryError, match="given up"):
        ledger.abandon(entry, "twice")
    with pytest.raises(EntryError, match="given up"):
        ledger.release(entry, 1_000)
    # Its run may have the round again.
    second = ledger.reserve("people", event(run="r", round=3))
    assert ledger.find("people", run="r", round=3) == second
    ledger.release(second, 1_000)
    with pytest.raises(EntryError, match="may have been seen"):
        ledger.abandon(second, "too late")
    with pytest.raises(EntryError, match="no such entry"):
        ledger.abandon(1_000, "none")
    with pytest.raises(ParameterError, match="reason"):
        ledger.abandon(entry, "")
    fresh = Ledger(ledger.path)
    assert fresh.events("people") == ledger.events("people")
    assert [entry.abandoned for entry in fresh.events("people")] == [False, True, False]
    assert fresh.verify().totals == (ledger.total("people"),)
    whole, entries = replayed(ledger.path.read_bytes())
    assert entries["people"] == fresh.events("people")
    assert State.from_text(whole.to_text(), whole.head).to_text() == fresh._replica.state.to_text()


def test_giving_up_frees_the_budget(tmp_path: Path) -> None:
    ledger = opened(tmp_path, PEOPLE)
    with pytest.raises(BudgetExceededError):
        exhaust(ledger)
    ledger.abandon(ledger.events("people")[0], "the server did not start")
    ledger.reserve("people", event())
    with pytest.raises(BudgetExceededError):
        ledger.reserve("people", event())
    assert ledger.verify().overspent == ()


def test_a_record_an_hour_ahead_is_not_from_the_future_and_one_later_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Noon:
            return cls(2026, 1, 1, 12, tzinfo=UTC)

    monkeypatch.setattr(replica, "datetime", Noon)
    for time, found in (
        ("2026-01-01T11:59:59.000+00:00", False),
        ("2026-01-01T13:00:00.000+00:00", False),
        ("2026-01-01T13:00:00.001+00:00", True),
        ("", False),
    ):
        assert replica.ahead(State(time=time)) == (time if found else "")
