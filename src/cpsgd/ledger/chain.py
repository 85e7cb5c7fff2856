r"""The chain: records in canonical JSON, each with the SHA-256 of itself and all before it.

    hash_n = SHA-256("cpsgd ledger 1\n" + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

`text_n` is JSON with sorted names, no spaces, ASCII only and no NaN, and holds its own number. So any change, removal,
insertion or exchange of records breaks the chain at that point, unless every later hash is computed anew. Against that,
and against cutting off the end, one needs a head (number and hash of the last record) kept where the writer of the file
cannot reach: a chain that ends differently or is too short does not contain it.

Everything a ledger knows is computed from its records (`State.apply`), which are checked one by one: a record that no
ledger would have written is refused like a broken hash.

**Snapshots.** Now and then a record holds the hash of a text that says all that follows from the records before it
(`State.to_text`). Who has the text need not read these records: they, and the text, have one head.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from cpsgd import _validate
from cpsgd.errors import CpsgdError, LedgerChainError, LedgerFormatError, ParameterError
from cpsgd.ledger.events import Budget, Entry, RoundEvent, name
from cpsgd.ledger.kinds import LAST_OCTAVE, Account, EntryKind, Room, kind_of, octave_of
from cpsgd.ledger.totals import most_covered
from cpsgd.protocol import MAX_CLIENTS

VERSION = 1
LONGEST_RECORD = 1 << 16
STATE_VERSION = 1
"""Of the text of snapshots. One of another version is not used."""
_DOMAIN = b"cpsgd ledger 1\n"
_SNAPSHOT_DOMAIN = b"cpsgd ledger snapshot 1\n"
_START = bytes(32)


@dataclass(frozen=True)
class Head:
    """The last record: its number, from 0, and its hash. Keep a copy elsewhere, and cutting off the end is found."""

    number: int = -1
    hash: str = _START.hex()

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


def canonical(body: Mapping[str, Any]) -> str:
    """A record as the text that is hashed."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def link(previous: str, text: str) -> str:
    """The hash of a record, given the hash of the one before."""
    return hashlib.sha256(_DOMAIN + bytes.fromhex(previous) + text.encode("ascii")).hexdigest()


class Entries(Protocol):
    """Where entries are looked up, as they were before a record: those of the file, or those of a reader."""

    def get(self, number: int, before: int | None = None) -> Entry | None:
        """The entry that was reserved by the record of this number."""

    def taken(self, population: str, run: str, round: int, before: int) -> bool:
        """Whether a run's round was reserved, and not given up."""

    def put(self, entry: Entry) -> None:
        """Takes an entry that is new or has changed."""


def index_hash(number: object, population: object, run: object, round: object, closed: object) -> int:
    """A number for a row of the index; their sum tells whether two indexes are the same, but for ill will."""
    row = repr((number, population, run, round, closed)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(row, digest_size=16).digest())


def _index_hash(entry: Entry) -> int:
    return index_hash(entry.number, entry.population, entry.event.run, entry.event.round, entry.closed_as)


class Remembered:
    """Entries in memory. A reader that `forgets` does not keep those that are released or given up.

    Attributes:
        digest: The sum of `index_hash` over all entries, forgotten ones included.
    """

    def __init__(self, entries: Iterable[Entry] = (), *, forgets: bool = False) -> None:
        """These entries."""
        self.digest = 0
        self._forgets = forgets
        self._entries: dict[int, Entry] = {}
        self._runs: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for entry in entries:
            self.put(entry)

    def get(self, number: int, before: int | None = None) -> Entry | None:
        """The entry of this number."""
        return self._entries.get(number)

    def taken(self, population: str, run: str, round: int, before: int) -> bool:
        """Whether a run's round was reserved, forgotten or not."""
        return round in self._runs.get((population, run), ())

    def put(self, entry: Entry) -> None:
        """Takes an entry that is new or has changed."""
        if (known := self._entries.get(entry.number)) is not None:
            self.digest -= _index_hash(known)
        self.digest += _index_hash(entry)
        if entry.event.run:
            rounds = self._runs[entry.population, entry.event.run]
            if not entry.abandoned:
                rounds[entry.event.round] = entry.number
            elif rounds.get(entry.event.round) == entry.number:
                del rounds[entry.event.round]
        if entry.closed_as is not None and self._forgets:
            self._entries.pop(entry.number, None)
        else:
            self._entries[entry.number] = entry

    def find(self, population: str, run: str, round: int) -> Entry | None:
        """The entry of a run's round."""
        number = self._runs.get((population, run), {}).get(round)
        return None if number is None else self._entries[number]

    def of_run(self, population: str, run: str) -> frozenset[int]:
        """The rounds of a run."""
        return frozenset(self._runs.get((population, run), ()))

    def all(self, population: str | None = None, last: int | None = None) -> list[Entry]:
        """All entries, or those of a population, in order; or the last so many."""
        found = [entry for entry in self._entries.values() if population in (None, entry.population)]
        return found if last is None else found[max(0, len(found) - last) :]


@dataclass
class State:
    """What follows from the records read so far. Its size does not grow with the number of entries.

    Attributes:
        head: The last of them.
        time: Its time.
        budgets: By population, in the order of their creation.
        created: When that was.
        accounts: The rounds of each population, in each of its periods; see `account`.
        entries: Where single entries are looked up.
        snapshot: Number of the last record that is a snapshot; -1 where there is none.
    """

    head: Head = field(default_factory=Head)
    time: str = ""
    budgets: dict[str, Budget] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    accounts: dict[tuple[str, int], Account] = field(default_factory=dict)
    entries: Entries = field(default_factory=Remembered)
    snapshot: int = -1

    def account(self, population: str, time: str) -> Account:
        """A population's rounds in the period that this time is in."""
        period = self.budgets[population].period(self.created[population], time)
        return self.accounts.get((population, period), Account())

    def accounts_of(self, population: str) -> list[Account]:
        """A population's rounds in all periods, its own and those of the population that it is a group of."""
        names = (population, self.budgets[population].group_of)
        return [account for (name, _), account in self.accounts.items() if name in names]

    def purses(self, population: str, time: str) -> list[tuple[Budget, list[Account]]]:
        """Budgets that a round of the population is charged to, and whose rounds count towards each of them.

        The first of its accounts is the one that the round is added to.
        """
        budget, account = self.budgets[population], self.account(population, time)
        if budget.group_of:
            return [(budget, [account, self.account(budget.group_of, time)])]
        groups = [each for each in self.budgets.values() if each.group_of == population]
        within = [(each, [account, self.account(each.population, time)]) for each in groups]
        return [(budget, [account]), *within]

    def purses_over_time(self) -> Iterator[tuple[Budget, list[Account]]]:
        """Every budget in each of its periods, and whose rounds count towards it."""
        for population, budget in self.budgets.items():
            if budget.group_of:
                yield budget, [self.accounts[population, 0], self.accounts[budget.group_of, 0]]
            else:
                yield from ((budget, [account]) for (name, _), account in self.accounts.items() if name == population)

    def reserved(self, population: str, time: str) -> int:
        """How many rounds were reserved before one that is now, of those that count together with it."""
        return max(sum(account.reserved for account in accounts) for _, accounts in self.purses(population, time))

    def apply(self, number: object, text: object, digest: object, entries: Entries | None = None) -> None:
        """Takes one more record, or raises and changes nothing.

        `entries` is where it looks up those that the record is about, if not in its own.

        Raises:
            LedgerChainError: It does not follow the records before it.
            LedgerFormatError: No ledger would have written it.
        """
        expected = self.head.number + 1
        body = read_record(expected, self.head.hash, number, text, digest)
        assert isinstance(digest, str)
        with refusing(expected):
            self._read(body, self.entries if entries is None else entries)()
        self.head, self.time = Head(expected, digest), body["time"]

    def _read(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        """Checks a record; returns what makes its change."""
        kind, number = body.get("kind"), body["number"]
        if (kind == "ledger") != (number == 0):
            raise ParameterError("the first record, and no other, begins a ledger")
        if kind == "ledger":
            _fields(body, "format", "id", "time")
            if body["format"] != VERSION:
                raise ParameterError(f"its format is {body['format']!r} and this release reads {VERSION}")
            return lambda: None
        if kind == "budget":
            return self._read_budget(body)
        if kind == "reserve":
            return self._read_reserve(body, entries)
        if kind == "release":
            return self._read_release(body, entries)
        if kind == "abandon":
            return self._read_abandon(body, entries)
        if kind == "snapshot":
            return self._read_snapshot(body)
        raise ParameterError("its kind is unknown")

    def _read_budget(self, body: dict[str, Any]) -> Callable[[], None]:
        _fields(body, "budget", "time")
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
        entry = read_reservation(body)
        population, event = entry.population, entry.event
        if population not in self.budgets:
            raise ParameterError("its population has no budget")
        # Later charges rest on this, so a forged one must not be worth more than the rounds of 1 %.
        most = most_covered(self.account(population, entry.reserved_at).reserved)
        covers = _validate.integer("covers", body.get("covers", 0), low=0, high=most)
        room = Room(kind_of(event, event.survivors), covers, entry.spent, entry.method) if covers else None
        check_event(self.budgets[population], event)
        if event.run and entries.taken(population, event.run, event.round, entry.number):
            raise ParameterError("its round was reserved before")

        budget = self.budgets[population]
        if budget.expired(entry.reserved_at):
            raise ParameterError("its budget had expired")
        octave = None if budget.filter is None else octave_of(self.reserved(population, entry.reserved_at))
        if entry.octave != octave:
            raise ParameterError("its share of δ is not the one that is due")
        key = (population, budget.period(self.created[population], entry.reserved_at))

        def commit() -> None:
            self.accounts.setdefault(key, Account()).reserve(event, room, entry.octave)
            entries.put(entry)

        return commit

    def _read_release(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        number, survivors = read_release(body)
        entry = entries.get(number, body["number"])
        if entry is None or entry.closed_as is not None or survivors < entry.event.survivors:
            raise ParameterError("it releases what was not reserved")

        def commit() -> None:
            self.account(entry.population, entry.reserved_at).release(entry.event, survivors, entry.octave)
            entries.put(closed(entry, body))

        return commit

    def _read_abandon(self, body: dict[str, Any], entries: Entries) -> Callable[[], None]:
        entry = entries.get(read_abandon(body), body["number"])
        if entry is None or entry.closed_as is not None:
            raise ParameterError("it gives up what was not reserved")

        def commit() -> None:
            self.account(entry.population, entry.reserved_at).abandon(entry.event, entry.octave)
            entries.put(closed(entry, body))

        return commit

    def _read_snapshot(self, body: dict[str, Any]) -> Callable[[], None]:
        _fields(body, "version", "digest", "time")
        name("digest", body["digest"], empty=False)
        # Those of other releases are not ours to judge: they are not used.
        if body["version"] == STATE_VERSION and body["digest"] != digest_of(self.to_text()):
            raise ParameterError("it is a snapshot of something else than the records before it")

        def commit() -> None:
            self.snapshot = body["number"]

        return commit

    # ------------------------------------------------------------------ snapshots

    def to_text(self) -> str:
        """All but the head and single entries, as the text that a snapshot's record has the hash of."""
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
        """What `to_text` gave, after the snapshot's own record.

        Raises:
            ParameterError: It is not what this release writes.
        """
        try:
            data = json.loads(text)
            if data["version"] != STATE_VERSION:
                raise ParameterError("it was written by another release")
            protocols = data["protocols"]
            kinds = [EntryKind.from_dict({**kind, "protocol": protocols[kind["protocol"]]}) for kind in data["kinds"]]
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
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ParameterError(f"it is damaged: {type(error).__name__}") from None
        return found

    def _check(self) -> None:
        """Refuses what no records lead to, as far as it would be computed with."""
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
                if (kind.examples is None) != (budget.unit == "client") or (kind.octave is None) != (
                    budget.filter is None
                ):
                    raise ParameterError("a kind of round is not one of the budget's")


def digest_of(text: str) -> str:
    """What a snapshot's record says of its text."""
    return hashlib.sha256(_SNAPSHOT_DOMAIN + text.encode("ascii")).hexdigest()


# ------------------------------------------------------------------ single records


def read_record(expected: int, previous: str, number: object, text: object, digest: object) -> dict[str, Any]:
    """The body of the record that follows one with the hash `previous`.

    Raises:
        LedgerChainError: It does not follow.
        LedgerFormatError: It is no record.
    """
    if number != expected or isinstance(number, bool):
        raise LedgerChainError(f"Record {expected} of the ledger is missing: records were removed or inserted.")
    if not isinstance(text, str) or len(text) > LONGEST_RECORD or not text.isascii():
        raise LedgerFormatError(f"Record {expected} of the ledger is not text of a record's length.")
    if not isinstance(digest, str) or link(previous, text) != digest:
        raise LedgerChainError(
            f"The chain is broken at record {expected}: it, or one before it, was changed after it was written. "
            "What was spent is not known; restore the file from a copy."
        )
    with refusing(expected):
        body = json.loads(text)
        if not isinstance(body, dict) or canonical(body) != text:
            raise ParameterError("it is not in canonical form")
        _validate.integer("number", body.get("number"), low=expected, high=expected)
    return body


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Names the record that is not valid."""
    try:
        yield
    except (CpsgdError, ValueError, RecursionError, OverflowError, TypeError) as error:
        raise LedgerFormatError(f"Record {number} of the ledger is not valid: {str(error)[:500]}") from None


def read_reservation(body: dict[str, Any]) -> Entry:
    """The entry that a record makes, by itself."""
    # A proof that covers nothing more need not say so, and planned rounds have no octave.
    optional = [field for field in ("covers", "octave") if field in body]
    _fields(body, "population", "event", "spent", "method", "time", *optional)
    population = body["population"]
    if body["kind"] != "reserve" or not isinstance(population, str):
        raise ParameterError("it is no reservation of a population")
    event = RoundEvent.from_dict(body["event"])
    spent = _validate.non_negative("spent", body["spent"])
    method = name("method", body["method"], empty=False)
    octave = _validate.integer("octave", body["octave"], low=0, high=LAST_OCTAVE) if "octave" in body else None
    return Entry(body["number"], population, event, body["time"], spent, method, octave=octave)


def read_release(body: dict[str, Any]) -> tuple[int, int]:
    """The entry that a record releases, and the messages in its sum."""
    _fields(body, "entry", "survivors", "time")
    if body["kind"] != "release":
        raise ParameterError("it is no release")
    survivors = _validate.integer("survivors", body["survivors"], low=1, high=MAX_CLIENTS)
    return _validate.integer("entry", body["entry"], low=0), survivors


def read_abandon(body: dict[str, Any]) -> int:
    """The entry that a record gives up."""
    _fields(body, "entry", "reason", "time")
    if body["kind"] != "abandon":
        raise ParameterError("it gives up nothing")
    name("reason", body["reason"], empty=False)
    return _validate.integer("entry", body["entry"], low=0)


def closed(entry: Entry, body: dict[str, Any]) -> Entry:
    """An entry after the record by which it was released or given up.

    Raises:
        ParameterError: The record is about another one.
    """
    number, time = body["number"], body["time"]
    if body["kind"] == "abandon":
        about, after = read_abandon(body), replace(entry, abandoned_as=number)
    else:
        about, survivors = read_release(body)
        after = replace(entry, released_at=time, released_survivors=survivors, released_as=number)
    if about != entry.number:
        raise ParameterError("it is about another entry")
    return after


def check_group(budget: Budget, budgets: Mapping[str, Budget]) -> None:
    """Raises `ParameterError` where a budget is that of a group which cannot be one."""
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


def check_event(budget: Budget, event: RoundEvent) -> None:
    """Raises `ParameterError` where the event is about other neighbours than the budget."""
    if event.unit != budget.unit:
        raise ParameterError(
            f"The budget of {budget.population!r} protects one {budget.unit}; this round is accounted for one "
            f"{event.unit}. (RoundEvent.examples makes it the latter.)"
        )
    event.taking_part.check(budget.adjacency)


def _fields(body: dict[str, Any], *expected: str) -> None:
    if set(body) != {"kind", "number", *expected}:
        raise ParameterError(f"expected the fields {sorted(expected)}")
    name("time", body["time"], empty=False)
