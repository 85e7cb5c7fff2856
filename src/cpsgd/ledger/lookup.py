"""`Lookup`: single entries of a ledger, found by its index and read from its log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cpsgd._record_log import End, OpenLog
from cpsgd.errors import DamagedFileError
from cpsgd.ledger.chain import closed, read_record, read_reservation, refusing
from cpsgd.ledger.entries import Entry
from cpsgd.ledger.index import Index

_MARKS = ('"kind":"reserve"', '"kind":"release"', '"kind":"abandon"')


class Lookup:
    """Finds single entries, in their state after the last indexed record.

    What the index says is checked against the records, and these by their hashes.
    """

    def __init__(self, log: OpenLog, index: Index) -> None:
        """Stores the log and the index; reads nothing yet."""
        self._log, self._index = log, index

    def end(self, number: int) -> End:
        """Returns the place after the record of this number; the beginning of the log for -1."""
        if number < 0:
            return End()
        place = self._index.place(number)
        if not (digest := self._log.hash_before(place)):
            raise DamagedFileError(f"Record {number} is damaged: it has no hash.")
        return End(number + 1, place, digest, written=True)

    def body(self, number: int) -> dict[str, Any]:
        """Returns the body of a record."""
        text, _ = self._log.record(self.end(number - 1), self._index.place(number))
        return read_record(number, text)

    def get(self, number: int) -> Entry | None:
        """Returns the entry that was reserved by the record of this number."""
        if not self._index.is_reservation(number):
            return None
        body = self.body(number)
        with refusing(number):
            entry = read_reservation(body)
        if (by := self._index.closing(number)) is not None:
            body = self.body(by)
            with refusing(by):
                entry = closed(entry, body)
        return entry

    def find(self, population: str, run: str, round: int) -> Entry | None:
        """Returns the entry of a run's round that was not given up."""
        for number in reversed(self._index.reservations(population, run, round) if run else []):
            entry = self.get(number)
            if entry is None or (entry.population, entry.event.run, entry.event.round) != (population, run, round):
                continue
            if not entry.abandoned:
                return entry
        return None

    def rounds(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run that were reserved and not given up."""
        return self._index.rounds(population, run) if run else frozenset()

    def all(self, population: str) -> list[Entry]:
        """Returns a population's entries, in order, from all records."""
        found: dict[int, Entry] = {}
        for text, end in self._log.read():
            if any(mark in text for mark in _MARKS):
                _note(found, population, read_record(end.records - 1, text))
        return list(found.values())

    def last(self, population: str, count: int) -> list[Entry]:
        """Returns a population's last entries, in order, from the last records."""
        later: list[dict[str, Any]] = []
        found: dict[int, Entry] = {}
        for body in self._backwards():
            if len(found) >= count:
                break
            if body["kind"] != "reserve":
                later.append(body)
            elif body["population"] == population:
                _note(found, population, body)
        for body in later:
            _note(found, population, body)
        return list(reversed(found.values()))

    def _backwards(self) -> Iterator[dict[str, Any]]:
        """Yields the bodies of records about entries, the last one first."""
        number = len(self._index)
        for text, _, _ in self._log.backwards():
            number -= 1
            if any(mark in text for mark in _MARKS):
                yield read_record(number, text)


def _note(found: dict[int, Entry], population: str, body: dict[str, Any]) -> None:
    """Updates `found` with a record of the population: adds a reserved entry, or marks one released or given up."""
    with refusing(body["number"]):
        if body["kind"] == "reserve" and body["population"] == population:
            entry = read_reservation(body)
            found[entry.number] = entry
        elif body["kind"] in ("release", "abandon") and (known := found.get(body["entry"])) is not None:
            found[known.number] = closed(known, body)


def written(log: OpenLog, after: End | None = None) -> Iterator[tuple[str, End]]:
    """Yields texts and places of a ledger's records, from a place on; each must have its hash."""
    for text, end in log.read(after):
        if not end.written:
            raise DamagedFileError(f"Record {end.records - 1} is damaged: it has no hash.")
        yield text, end


def catch_up(index: Index, log: OpenLog, count: int) -> None:
    """Adds rows to an index until it has this many, from the records themselves."""
    if len(index) < count:
        for text, end in written(log, Lookup(log, index).end(len(index) - 1)):
            with refusing(end.records - 1):
                index.add(json.loads(text), end)
            if len(index) == count:
                return
