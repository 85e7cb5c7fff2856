"""`State`: all that follows from a ledger's records, computed from them one by one.

A record that no ledger would have written is refused like a broken hash.

**Snapshots.** Now and then a record holds all that follows from the records before it (`State.to_text`). Who opens a
long ledger begins with the last of them, and reads the records since. Damage to records before it is not noticed then,
nor does it change what counts as spent. Whoever changes the snapshot has to write the chain anew from there on, which a
head kept elsewhere reveals. `Ledger.verify` reads everything and computes every snapshot anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from cpsgd import _validate
from cpsgd._plain import canonical
from cpsgd.errors import ParameterError
from cpsgd.ledger.chain import (
    VERSION,
    Head,
    check_fields,
    read_abandon,
    read_record,
    read_release,
    read_reservation,
    refusing,
)
from cpsgd.ledger.charging import most_covered
from cpsgd.ledger.entries import Budget, Entry, RoundEvent, name
from cpsgd.ledger.kinds import Account, EntryKind, Room, kind_of, octave_of

STATE_VERSION = 3
"""Version of the text of snapshots. A ledger does not use a text of another version."""


class Entries(Protocol):
    """Single entries, as they are after the records read so far."""

    def get(self, number: int) -> Entry | None:
        """Returns the entry that was reserved by the record of this number."""

    def find(self, population: str, run: str, round: int) -> Entry | None:
        """Returns the entry of a run's round that was not given up."""


@dataclass
class State:
    """All that follows from the records read so far. Its size does not grow with the number of entries.

    Attributes:
        head: The last record.
        time: Time of the last record.
        budgets: Budgets by population, in the order of their creation.
        created: Time of each budget's creation.
        accounts: Rounds by population and period.
        snapshot: Number of the last record that is a snapshot of this release's; -1 where there is none.
    """

    head: Head = field(default_factory=Head)
    time: str = ""
    budgets: dict[str, Budget] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    accounts: dict[tuple[str, int], Account] = field(default_factory=dict)
    snapshot: int = -1

    def account(self, population: str, time: str) -> Account:
        """Returns a population's rounds in the period that this time is in."""
        period = self.budgets[population].period(self.created[population], time)
        return self.accounts.get((population, period), Account())

    def accounts_of(self, population: str) -> list[Account]:
        """Returns a population's rounds in all periods, with those of its parent population if it is a group."""
        names = (population, self.budgets[population].group_of)
        return [account for (name, _), account in self.accounts.items() if name in names]

    def purses(self, population: str, time: str) -> list[tuple[Budget, list[Account]]]:
        """Returns the budgets that a round of the population is charged to, each with its relevant accounts.

        The round is added to the first of these accounts.
        """
        budget, account = self.budgets[population], self.account(population, time)
        if budget.group_of:
            return [(budget, [account, self.account(budget.group_of, time)])]
        groups = [each for each in self.budgets.values() if each.group_of == population]
        within = [(each, [account, self.account(each.population, time)]) for each in groups]
        return [(budget, [account]), *within]

    def purses_over_time(self) -> Iterator[tuple[Budget, list[Account]]]:
        """Yields every budget in each of its periods, with the relevant accounts."""
        for population, budget in self.budgets.items():
            if budget.group_of:
                yield budget, [self.accounts[population, 0], self.accounts[budget.group_of, 0]]
            else:
                yield from ((budget, [account]) for (name, _), account in self.accounts.items() if name == population)

    def reserved(self, population: str, time: str) -> int:
        """Returns the number of rounds reserved so far, of those that count together with one at this time."""
        return max(sum(account.reserved for account in accounts) for _, accounts in self.purses(population, time))

    def apply(self, text: str, digest: str, entries: Entries) -> dict[str, Any]:
        """Takes the next record, or raises and changes nothing.

        Args:
            text: The record's text.
            digest: The record's hash, which the log has checked.
            entries: Entries of the records before it.

        Returns:
            The record's body.
        """
        number = self.head.number + 1
        body = read_record(number, text)
        with refusing(number):
            self._read(body, entries)()
        self.head, self.time = Head(number, digest), body["time"]
        return body

    def _read(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        """Checks a record; returns the function that makes its change."""
        kind = body.get("kind")
        if (kind == "ledger") != (body["number"] == 0):
            raise ParameterError("the first record, and no other, begins a ledger")
        match kind:
            case "ledger":
                check_fields(body, "format", "id", "time")
                if body["format"] != VERSION:
                    raise ParameterError(f"its format is {body['format']!r} and this release reads {VERSION}")
                return lambda: None
            case "budget":
                return self._read_budget(body)
            case "reserve":
                return self._read_reserve(body, entries)
            case "release" | "abandon":
                return self._read_closing(body, entries)
            case "clock":
                return self._read_clock(body)
            case "snapshot":
                return self._read_snapshot(body)
        raise ParameterError("its kind is unknown")

    def _read_budget(self, body: dict[str, Any]) -> Callable[[], None]:
        """Checks a new budget, and returns the function that applies it."""
        check_fields(body, "budget", "time")
        budget = Budget.from_dict(body["budget"])
        if budget.population in self.budgets:
            raise ParameterError("the population has a budget already")
        check_group(budget, self.budgets)

        def commit() -> None:
            self.budgets[budget.population] = budget
            self.created[budget.population] = body["time"]
            self.accounts[budget.population, 0] = Account()

        return commit

    def _read_reserve(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        """Checks a reservation, and returns the function that applies it."""
        entry = read_reservation(body)
        population, event = entry.population, entry.event
        if (budget := self.budgets.get(population)) is None:
            raise ParameterError("its population has no budget")
        # Later charges rest on this, so a forged one must not be worth more than the rounds of 1 %.
        most = most_covered(self.account(population, entry.reserved_at).reserved)
        covers = _validate.integer("covers", body.get("covers", 0), low=0, high=most)
        room = Room(kind_of(event, event.survivors), covers, entry.spent, entry.method) if covers else None
        for each, accounts in self.purses(population, entry.reserved_at) if event.table_unit else [(budget, [])]:
            check_event(each, accounts, event)
        if event.run and entries.find(population, event.run, event.round) is not None:
            raise ParameterError("its round was reserved before")
        if budget.expired(entry.reserved_at):
            raise ParameterError("its budget had expired")
        octave = None if budget.filter is None else octave_of(self.reserved(population, entry.reserved_at))
        if entry.octave != octave:
            raise ParameterError("its share of δ is not the one that is due")
        key = (population, budget.period(self.created[population], entry.reserved_at))

        return lambda: self.accounts.setdefault(key, Account()).reserve(event, room, entry.octave)

    def _read_closing(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        """Checks a release or a round given up, and returns the function that applies it."""
        number, survivors = read_release(body) if body["kind"] == "release" else (read_abandon(body), None)
        entry = entries.get(number)
        if entry is None or entry.closed_as is not None:
            raise ParameterError("it releases or gives up what was not reserved")
        if survivors is not None and survivors < entry.event.survivors:
            raise ParameterError("it releases a sum of fewer messages than was reserved")

        def commit() -> None:
            account = self.account(entry.population, entry.reserved_at)
            if survivors is None:
                account.abandon(entry.event, entry.octave)
            else:
                account.release(entry.event, survivors, entry.octave)

        return commit

    def _read_clock(self, body: dict[str, Any]) -> Callable[[], None]:
        check_fields(body, "reason", "time")
        name("reason", body["reason"], empty=False)
        if not body["time"] < self.time:
            raise ParameterError("it sets the time back to one that is not before the last record's")
        return lambda: self.set_back(body["time"])

    def set_back(self, time: str) -> None:
        """Sets the time back. Rounds of periods that are to come count in the present one as well.

        They were charged while a clock ran ahead, and are about today's data, or would be if the clock is wrong now.
        So no rounds are gained, whichever clock was wrong.
        """
        for population, budget in self.budgets.items():
            present = budget.period(self.created[population], time)
            later = [
                each for (owner, period), each in self.accounts.items() if owner == population and period > present
            ]
            for account in later:
                self.accounts.setdefault((population, present), Account()).add_copies(account)
        self.time = time

    def _read_snapshot(self, body: dict[str, Any]) -> Callable[[], None]:
        """Checks a snapshot, and returns the function that applies it.

        Those of 0.2.0 hold the hash of a text that is not in the log, and are not used.
        """
        if "state" not in body:
            check_fields(body, "version", "digest", "time")
            return lambda: None
        check_fields(body, "state", "time")
        # One of another version cannot be compared.
        if snapshot_version(body) == STATE_VERSION and canonical(body["state"]) != self.to_text():
            raise ParameterError("it is a snapshot of something else than the records before it")

        def commit() -> None:
            self.snapshot = body["number"]

        return commit

    # ------------------------------------------------------------------ snapshots

    def to_text(self) -> str:
        """Returns the state as the text of a snapshot, without the head and single entries."""
        kinds = {kind: canonical(kind.to_dict()) for account in self.accounts.values() for kind in account.kinds()}
        places = {kind: place for place, kind in enumerate(sorted(kinds, key=kinds.__getitem__))}
        protocols = sorted({canonical(kind.base.to_dict()) for kind in kinds})
        where = {text: place for place, text in enumerate(protocols)}
        return canonical(
            {
                "version": STATE_VERSION,
                "time": self.time,
                "budgets": [[budget.to_dict(), self.created[name]] for name, budget in self.budgets.items()],
                "accounts": [[*key, account.to_dict(places)] for key, account in self.accounts.items()],
                "kinds": [{**kind.to_dict(), "protocol": where[canonical(kind.base.to_dict())]} for kind in places],
                "protocols": [json.loads(text) for text in protocols],
            }
        )

    @classmethod
    def from_text(cls, text: str, head: Head) -> Self:
        """Returns the state that `to_text` wrote, after the snapshot's own record."""
        try:
            data = json.loads(text)
            if data["version"] not in (1, 2, STATE_VERSION):
                raise ParameterError("it was written by another release")
            protocols = data["protocols"]
            kinds = [EntryKind.from_dict({**kind, "protocol": protocols[kind["protocol"]]}) for kind in data["kinds"]]
            if data["version"] < STATE_VERSION and any(kind.participation.sampled for kind in kinds):
                raise ParameterError("an earlier release wrote it, which counted sampled rounds in another way")
            budgets = [(Budget.from_dict(budget), time) for budget, time in data["budgets"]]
            accounts = {
                (population, _validate.integer("period", period, low=0)): Account.from_dict(each, kinds)
                for population, period, each in data["accounts"]
            }
            found = cls(
                head=head,
                time=name("time", data["time"], empty=False),
                budgets={budget.population: budget for budget, _ in budgets},
                created={budget.population: name("time", time, empty=False) for budget, time in budgets},
                accounts=accounts,
                snapshot=head.number,
            )
            found._check()
        except ParameterError:
            raise  # says what is wrong
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ParameterError(f"it is damaged: {type(error).__name__}") from None
        return found

    def _check(self) -> None:
        """Refuses a snapshot's state whose budgets, accounts and kinds contradict each other; sums are not verified."""
        for budget in self.budgets.values():
            check_group(budget, self.budgets)
        if {population for population, _ in self.accounts} != set(self.budgets):
            raise ParameterError("its accounts are not those of its budgets")
        for (population, _), account in self.accounts.items():
            budget = self.budgets[population]
            if (population, 0) not in self.accounts:
                raise ParameterError("a first period is missing")
            for kind in account.kinds():
                kind.participation.check(budget.adjacency)
                # A kind has examples just where the budget protects one, and an octave just where it is adaptive.
                if (kind.examples is None) != (budget.unit == "client") or (kind.octave is None) != (
                    budget.filter is None
                ):
                    raise ParameterError("a kind of round is not one of the budget's")
        for _, accounts in self.purses_over_time():
            if {"user", "row"} <= {account.table_unit for account in accounts}:
                raise ParameterError("a budget has paid for statistics per user and per row")


def snapshot_version(body: Mapping[str, Any]) -> object:
    """Returns the version of the state in a snapshot's record; None where it has none."""
    state = body.get("state")
    return state.get("version") if isinstance(state, dict) else None


def check_group(budget: Budget, budgets: Mapping[str, Budget]) -> None:
    """Raises `ParameterError` if a budget is for a group of a population that cannot have groups."""
    if not budget.group_of:
        return
    whole = budgets.get(budget.group_of)
    if whole is None or whole.group_of or whole.renews:
        raise ParameterError(
            f"{budget.group_of!r} has no budget, is a group itself, or renews; a group is one of a whole population."
        )
    for what in ("adjacency", "unit", "accounting"):
        if getattr(budget, what).split(":")[0] != getattr(whole, what).split(":")[0]:
            raise ParameterError(f"The group's {what} is not that of {budget.group_of!r}; rounds are charged to both.")


def check_event(budget: Budget, accounts: Iterable[Account], event: RoundEvent) -> None:
    """Raises `ParameterError` where the event is about other neighbours than the budget, or the accounts that count."""
    if event.unit != budget.unit:
        raise ParameterError(
            f"The budget of {budget.population!r} protects one {budget.unit}; this round is accounted for one "
            f"{event.unit}. (RoundEvent.examples makes it the latter.)"
        )
    if event.table_unit and (known := {account.table_unit for account in accounts} - {"", event.table_unit}):
        raise ParameterError(
            f"The budget of {budget.population!r} has paid for statistics per {known.pop()}, and this one is per "
            f"{event.table_unit}: their ε do not add up, since a user may have many rows. "
            + (
                "Name the column of users, as before."
                if event.table_unit == "row"
                else "Users need a budget of their own, from which all statistics about them are paid."
            )
        )
    event.taking_part.check(budget.adjacency)
