r"""The chain: records in canonical JSON, each with the SHA-256 of itself and all before it.

    hash_n = SHA-256("cpsgd ledger 1\n" + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

`text_n` is JSON with sorted names, no spaces, ASCII only and no NaN, and holds its own number. So any change, removal,
insertion or exchange of records breaks the chain at that point, unless every later hash is computed anew. Against that,
and against cutting off the end, one needs a head (number and hash of the last record) kept where the writer of the file
cannot reach: a chain that ends differently or is too short does not contain it.

Everything a ledger knows is computed from its records (`State.apply`), which are checked one by one: a record that no
ledger would have written is refused like a broken hash.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cpsgd import _validate
from cpsgd.errors import CpsgdError, LedgerChainError, LedgerFormatError, ParameterError
from cpsgd.ledger.events import Budget, Entry, RoundEvent, name
from cpsgd.protocol import MAX_CLIENTS

VERSION = 1
LONGEST_RECORD = 1 << 16
_DOMAIN = b"cpsgd ledger 1\n"
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


@dataclass
class State:
    """What follows from the records read so far.

    Attributes:
        head: The last of them.
        budgets: By population, in the order of their creation.
        entries: By the number of their reservation.
        hashes: Of all records, in order.
    """

    head: Head = field(default_factory=Head)
    budgets: dict[str, Budget] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    _of: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _runs: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def entries_of(self, population: str) -> list[Entry]:
        """The population's entries in order."""
        return [self.entries[number] for number in self._of.get(population, [])]

    def find(self, population: str, run: str, round: int) -> Entry | None:
        """The entry of a run's round, if there is one."""
        number = self._runs.get((population, run, round))
        return None if number is None else self.entries[number]

    def apply(self, number: object, text: object, digest: object) -> None:
        """Takes one more record, or raises and changes nothing.

        Raises:
            LedgerChainError: It does not follow the records before it.
            LedgerFormatError: No ledger would have written it.
        """
        expected = self.head.number + 1
        if number != expected or isinstance(number, bool):
            raise LedgerChainError(f"Record {expected} of the ledger is missing: records were removed or inserted.")
        if not isinstance(text, str) or len(text) > LONGEST_RECORD or not text.isascii():
            raise LedgerFormatError(f"Record {expected} of the ledger is not text of a record's length.")
        if not isinstance(digest, str) or link(self.head.hash, text) != digest:
            raise LedgerChainError(
                f"The chain is broken at record {expected}: it, or one before it, was changed after it was written. "
                "What was spent is not known; restore the file from a copy."
            )
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or canonical(body) != text:
                raise ParameterError("it is not in canonical form")
            _validate.integer("number", body.get("number"), low=expected, high=expected)
            commit = self._read(body)
        except (CpsgdError, ValueError, RecursionError, OverflowError, TypeError) as error:
            raise LedgerFormatError(f"Record {expected} of the ledger is not valid: {str(error)[:500]}") from None
        commit()
        self.head = Head(expected, digest)
        self.hashes.append(digest)

    def _read(self, body: dict[str, Any]) -> Callable[[], None]:
        """Checks a record; returns what makes its change."""
        kind = body.get("kind")
        if (kind == "ledger") != (body["number"] == 0):
            raise ParameterError("the first record, and no other, begins a ledger")
        if kind == "ledger":
            _fields(body, "format", "id", "time")
            if body["format"] != VERSION:
                raise ParameterError(f"its format is {body['format']!r} and this release reads {VERSION}")
            return lambda: None
        if kind == "budget":
            _fields(body, "budget", "time")
            budget = Budget.from_dict(body["budget"])
            if budget.population in self.budgets:
                raise ParameterError("the population has a budget already")
            return lambda: self.budgets.update({budget.population: budget})
        if kind == "reserve":
            return self._read_reserve(body)
        if kind == "release":
            _fields(body, "entry", "survivors", "time")
            number = _validate.integer("entry", body["entry"], low=0)
            entry = self.entries.get(number)
            survivors = _validate.integer("survivors", body["survivors"], low=1, high=MAX_CLIENTS)
            if entry is None or entry.released or survivors < entry.event.survivors:
                raise ParameterError("it releases what was not reserved")
            done = replace(entry, released_at=body["time"], released_survivors=survivors, released_as=body["number"])
            return lambda: self.entries.update({number: done})
        raise ParameterError("its kind is unknown")

    def _read_reserve(self, body: dict[str, Any]) -> Callable[[], None]:
        _fields(body, "population", "event", "spent", "method", "time")
        population, number = body["population"], body["number"]
        if not isinstance(population, str) or population not in self.budgets:
            raise ParameterError("its population has no budget")
        event = RoundEvent.from_dict(body["event"])
        check_event(self.budgets[population], event)
        if event.run and self.find(population, event.run, event.round) is not None:
            raise ParameterError("its round was reserved before")
        spent = _validate.non_negative("spent", body["spent"])
        method = name("method", body["method"], empty=False)
        entry = Entry(number, population, event, body["time"], spent, method)

        def commit() -> None:
            self.entries[number] = entry
            self._of[population].append(number)
            if event.run:
                self._runs[population, event.run, event.round] = number

        return commit


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
