r"""The chain: records in canonical JSON, each with the SHA-256 of itself and all before it.

    hash_n = SHA-256("cpsgd ledger 1\n" + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

`text_n` is JSON with sorted names, no spaces, ASCII only and no NaN, and holds its own number. So any change, removal,
insertion or exchange of records breaks the chain at that point, unless every later hash is computed anew. Against that,
and against cutting off the end, keep a head (number and hash of the last record) where the writer of the file cannot
reach it: a chain that ends differently or is too short does not contain it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cpsgd import _plain, _validate
from cpsgd.errors import CpsgdError, LedgerChainError, LedgerFormatError, ParameterError
from cpsgd.ledger.entries import Entry, RoundEvent, name
from cpsgd.ledger.kinds import LAST_OCTAVE
from cpsgd.protocol import MAX_CLIENTS

VERSION = 1
LONGEST_RECORD = 1 << 16
_DOMAIN = b"cpsgd ledger 1\n"
_START = bytes(32)


@dataclass(frozen=True)
class Head:
    """The last record: its number, from 0, and its hash. With a copy kept elsewhere, a missing end is noticed."""

    number: int = -1
    hash: str = _START.hex()

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


def link(previous: str, text: str) -> str:
    """Returns the hash of a record, given the hash of the one before."""
    return hashlib.sha256(_DOMAIN + bytes.fromhex(previous) + text.encode("ascii")).hexdigest()


# ------------------------------------------------------------------ records


def read_record(expected: int, previous: str, number: object, text: object, digest: object) -> dict[str, Any]:
    """Returns the body of the record that follows one with the hash `previous`."""
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
        if not isinstance(body, dict) or _plain.canonical(body) != text:
            raise ParameterError("it is not in canonical form")
        _validate.integer("number", body.get("number"), low=expected, high=expected)
    return body


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Turns whatever a record that is not valid raises into a `LedgerFormatError` with its number."""
    try:
        yield
    except (CpsgdError, ValueError, RecursionError, OverflowError, TypeError) as error:
        raise LedgerFormatError(f"Record {number} of the ledger is not valid: {str(error)[:500]}") from None


def read_reservation(body: dict[str, Any]) -> Entry:
    """Returns the entry that the record of a reservation makes."""
    # A proof that covers no further rounds has no `covers`, and a planned round no octave.
    optional = [field for field in ("covers", "octave") if field in body]
    check_fields(body, "population", "event", "spent", "method", "time", *optional)
    population = body["population"]
    if body["kind"] != "reserve" or not isinstance(population, str):
        raise ParameterError("it is no reservation of a population")
    event = RoundEvent.from_dict(body["event"])
    spent = _validate.non_negative("spent", body["spent"])
    method = name("method", body["method"], empty=False)
    octave = _validate.integer("octave", body["octave"], low=0, high=LAST_OCTAVE) if "octave" in body else None
    return Entry(body["number"], population, event, body["time"], spent, method, octave=octave)


def read_release(body: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of the entry that a record releases, and the messages in its sum."""
    check_fields(body, "entry", "survivors", "time")
    if body["kind"] != "release":
        raise ParameterError("it is no release")
    survivors = _validate.integer("survivors", body["survivors"], low=1, high=MAX_CLIENTS)
    return _validate.integer("entry", body["entry"], low=0), survivors


def read_abandon(body: dict[str, Any]) -> int:
    """Returns the number of the entry that a record gives up."""
    check_fields(body, "entry", "reason", "time")
    if body["kind"] != "abandon":
        raise ParameterError("it gives up nothing")
    name("reason", body["reason"], empty=False)
    return _validate.integer("entry", body["entry"], low=0)


def closed(entry: Entry, body: dict[str, Any]) -> Entry:
    """Returns an entry as it is after the record by which it was released or given up."""
    number, time = body["number"], body["time"]
    if body["kind"] == "abandon":
        about, after = read_abandon(body), replace(entry, abandoned_as=number)
    else:
        about, survivors = read_release(body)
        after = replace(entry, released_at=time, released_survivors=survivors, released_as=number)
    if about != entry.number:
        raise ParameterError("it is about another entry")
    return after


def check_fields(body: dict[str, Any], *expected: str) -> None:
    """Raises `ParameterError` unless a record has these fields beside its kind and number, and a time."""
    if set(body) != {"kind", "number", *expected}:
        raise ParameterError(f"expected the fields {sorted(expected)}")
    name("time", body["time"], empty=False)


# ------------------------------------------------------------------ entries


class Entries(Protocol):
    """Entries as they were before a record (`before`): those in the file's index, or those in a reader's memory."""

    def get(self, number: int, before: int | None = None) -> Entry | None:
        """Returns the entry that was reserved by the record of this number."""

    def taken(self, population: str, run: str, round: int, before: int) -> bool:
        """Returns whether a run's round was reserved, and not given up."""

    def put(self, entry: Entry) -> None:
        """Stores an entry that is new or has changed."""


def index_hash(number: object, population: object, run: object, round: object, closed: object) -> int:
    """Returns a number for a row of the index. Equal sums of these tell that two indexes are the same.

    That holds against damage, not against somebody who looks for two indexes with one sum.
    """
    row = repr((number, population, run, round, closed)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(row, digest_size=16).digest())


def _index_hash(entry: Entry) -> int:
    return index_hash(entry.number, entry.population, entry.event.run, entry.event.round, entry.closed_as)


class Remembered:
    """Entries in memory. A reader that `forgets` does not keep those that are released or given up.

    Attributes:
        digest: The sum of `index_hash` over all entries, forgotten ones included, modulo 2^128.
    """

    def __init__(self, *, forgets: bool = False) -> None:
        """Has no entries."""
        self.digest = 0
        self._forgets = forgets
        self._entries: dict[int, Entry] = {}
        self._runs: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)

    def get(self, number: int, before: int | None = None) -> Entry | None:
        """Returns the entry of this number."""
        return self._entries.get(number)

    def taken(self, population: str, run: str, round: int, before: int) -> bool:
        """Returns whether a run's round was reserved and not given up; forgotten ones count."""
        return round in self._runs.get((population, run), ())

    def put(self, entry: Entry) -> None:
        """Stores an entry that is new or has changed."""
        if (known := self._entries.get(entry.number)) is not None:
            self.digest -= _index_hash(known)
        self.digest = (self.digest + _index_hash(entry)) % (1 << 128)
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
        """Returns the entry of a run's round."""
        number = self._runs.get((population, run), {}).get(round)
        return None if number is None else self._entries[number]

    def of_run(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run."""
        return frozenset(self._runs.get((population, run), ()))

    def all(self, population: str | None = None, last: int | None = None) -> list[Entry]:
        """Returns all entries, or those of a population, in order; with `last`, this many from the end."""
        found = [entry for entry in self._entries.values() if population in (None, entry.population)]
        return found if last is None else found[max(0, len(found) - last) :]
