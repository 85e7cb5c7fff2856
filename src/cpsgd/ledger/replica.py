"""`Replica`: one process's view of a ledger's file, brought up to date before anything is said or written."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from cpsgd import _validate
from cpsgd._plain import canonical
from cpsgd.errors import LedgerChainError, LedgerError, WitnessError
from cpsgd.ledger import snapshots, sqlite_store
from cpsgd.ledger.chain import LONGEST_RECORD, Head, Remembered, closed, link, read_reservation
from cpsgd.ledger.entries import Entry
from cpsgd.ledger.sqlite_store import Index
from cpsgd.ledger.state import STATE_VERSION, State, digest_of
from cpsgd.ledger.witness import Line, Witness

# Of records that a witness has not seen, no more are looked at.
_MOST_UNSEEN = 64


@dataclass
class Draft:
    """Records to be written in one transaction, and the entries they are about.

    Attributes:
        entries: Entries of the ledger.
        time: Time of the records.
        records: The records, without number and time.
        looked_up: Entries that the records are about.
        changed: Entries that were made or changed, once the records are written.
        unseen: Records on the ledger that the witness has not seen.
    """

    entries: Index | Remembered
    time: str
    records: list[Mapping[str, Any]] = field(default_factory=list)
    looked_up: Remembered = field(default_factory=Remembered)
    changed: list[Entry] = field(default_factory=list)
    unseen: list[dict[str, Any]] = field(default_factory=list)

    def known(self, number: int) -> Entry | None:
        """Returns the entry of this number, or None, and keeps it for the records that are about it."""
        entry = self.entries.get(number)
        if entry is not None:
            self.looked_up.put(entry)
        return entry

    def write(self, connection: Connection, state: State, memory: Remembered | None) -> list[tuple[int, str, str]]:
        """Writes all records in the open transaction, after the state's head.

        Args:
            connection: The transaction.
            state: What the file holds so far.
            memory: The file's entries where it has no index that fits; it gets one.

        Returns:
            The rows: numbers, texts and hashes.
        """
        rows: list[tuple[int, str, str]] = []
        head, snapshot = state.head, state.snapshot

        def append(record: Mapping[str, Any]) -> None:
            nonlocal head
            number = head.number + 1
            text = canonical({"time": self.time, **record, "number": number})
            if len(text) > LONGEST_RECORD:
                raise LedgerError("The record is too long for a ledger.")
            head = Head(number, link(head.hash, text))
            rows.append((number, text, head.hash))
            sqlite_store.append(connection, *rows[-1])

        if memory is not None:
            sqlite_store.clear_cache(connection)
            index = sqlite_store.make_index(connection, map(sqlite_store.row_of, memory.all()))
        else:
            index = sqlite_store.read_index(connection)
        # With the index the snapshot went, if there was one.
        lost = memory is not None and (snapshot >= 0 or not self.records)
        if lost or head.number - snapshot >= snapshots.SNAPSHOT_EVERY:
            text = state.to_text()
            append({"kind": "snapshot", "version": STATE_VERSION, "digest": digest_of(text)})
            sqlite_store.write_snapshot(connection, text)
            snapshot = head.number
        for record in self.records:
            append(record)
            self._note(json.loads(rows[-1][1]))
        for entry in self.changed:
            index += sqlite_store.index_entry(connection, entry)
        sqlite_store.write_head(connection, head.number, head.hash, snapshot, index)
        return rows

    def _note(self, body: dict[str, Any]) -> None:
        if body["kind"] == "reserve":
            self.changed.append(read_reservation(body))
        elif body["kind"] in ("release", "abandon"):
            entry = self.looked_up.get(body["entry"])
            assert entry is not None
            self.changed.append(closed(entry, body))


class Replica:
    """The state that follows from a ledger's records, and the end of the chain when it was last read.

    Threads may share one. Nothing stays open between calls.

    Attributes:
        path: The ledger's file.
        state: The state when the file was last read.
        witness: The witness that gets every head; None without.
        lock: Held while the state is used.
        store: The file.
    """

    def __init__(self, path: Path, timeout: float, witness: Witness | None) -> None:
        """Reads the file, if there is one."""
        self.path = path
        self.witness = witness
        self.store = sqlite_store.Store(self.path, _validate.non_negative("timeout", timeout))
        self.state = State()
        # Entries, where the file has no index, or none that fits its records.
        self._memory: Remembered | None = None
        self.lock = threading.RLock()
        # The newest head that the witness has seen, the last ones, and calls that failed when it could not be written.
        self._seen = Head()
        self._contained: set[Head] = set()
        self._unreported: list[tuple[tuple[object, ...], Entry | None]] = []
        if self.path.exists() and self.path.stat().st_size > 0:
            with self.latest():
                pass
        elif witness is not None and witness.path.exists():
            raise WitnessError(
                f"There is no ledger at {self.path}, but {witness.path} has seen one. Restore it from a copy."
            )

    @contextmanager
    def latest(self) -> Iterator[State]:
        """Yields the state with the records that were added since the last time."""
        with self.lock:
            with self.store.reading() as connection:
                self.read(connection)
            yield self.state

    @contextmanager
    def looking(self) -> Iterator[tuple[Connection, Index | Remembered]]:
        """Yields a transaction, and the entries of the latest state."""
        with self.lock, self.store.reading() as connection:
            self.read(connection)
            yield connection, self._entries(connection)

    @contextmanager
    def appending(self, *call: object, create: bool = False, whole: bool = False) -> Iterator[Draft]:
        """Yields a draft of new records.

        When the block ends they are written to the disk, and then added to the state. If it raises, they are dropped.
        The ledger must contain what the witness has seen. Nobody else appends to the witness meanwhile, so that of two
        copies of a ledger only one goes on.

        Args:
            call: What the caller was asked for; `repeated` knows it if the witness cannot be written.
            create: Whether to make the file where there is none.
            whole: Whether to read all records.
        """
        with self.lock, self._witness_held():
            with self.store.writing(create=create) as connection:
                fresh = self.state.head.number < 0
                self.read(connection, whole=whole)
                watched = self.witness is not None and (self._seen.number >= 0 or self.witness.path.exists())
                if self.witness is not None and watched and not fresh:
                    self._check_seen(connection, self.witness)
                draft = Draft(self._entries(connection), now(self.state), unseen=self._unseen(connection))
                yield draft
                rows = draft.write(connection, self.state, self._memory)
            self._memory = None
            for row in rows:
                self.state.apply(*row, entries=draft.looked_up)
            if self.witness is not None and self._seen.number < self.state.head.number:
                try:
                    self.witness.append(Line(self.state.head, draft.time))
                except LedgerError:
                    if call:
                        self._unreported.append((call, draft.changed[-1] if draft.changed else None))
                    raise
                self._seen = self.state.head

    def repeated(self, *call: object) -> tuple[bool, Entry | None]:
        """Returns whether such a call has failed after its record was written, and the entry that it had made.

        Only the witness had not seen the record then; it has when this returns.
        """
        with self.lock:
            for place, (known, entry) in enumerate(self._unreported):
                if known == call:
                    with self.appending():
                        pass
                    del self._unreported[place]
                    return True, entry
            return False, None

    def _unseen(self, connection: Connection) -> list[dict[str, Any]]:
        """Returns the last records that the witness has not seen; their writers were told of an error, or killed."""
        if self.witness is None:
            return []
        first = max(self._seen.number + 1, self.state.head.number - _MOST_UNSEEN)
        return [json.loads(str(row[1])) for row in sqlite_store.rows_between(connection, first)]

    @contextmanager
    def _witness_held(self) -> Iterator[None]:
        if self.witness is None or not self.witness.path.exists():
            yield
        else:
            with self.witness.held(self.store.timeout):
                yield

    def _entries(self, connection: Connection) -> Index | Remembered:
        """Returns the entries of the file's index, or those in memory where the index does not fit."""
        return Index(connection) if self._memory is None else self._memory

    def read(self, connection: Connection, *, whole: bool = False) -> None:
        """Brings the state up to date; with `whole` from all records, if nothing was read yet."""
        last = self.state.head
        if last.number < 0:
            self.state, self._memory = snapshots.read(connection, whole=whole)
            if self.witness is not None and self.state.head.number >= 0:
                self._check_seen(connection, self.witness)
            return
        rows = sqlite_store.rows_between(connection, last.number)
        if [row[2] for row in islice(rows, 1)] != [last.hash]:
            raise went_back(self.path)
        entries = self._entries(connection)
        for row in rows:
            self.state.apply(*row, entries=entries)

    def _check_seen(self, connection: Connection, witness: Witness) -> None:
        """Refuses a ledger that does not contain the last heads that the witness has seen."""
        heads = {line.head for line in witness.lines(last=True)}
        for seen in sorted(heads - self._contained, key=lambda head: head.number):
            if [row[2] for row in sqlite_store.rows_between(connection, seen.number, seen.number)] != [seen.hash]:
                raise not_contained(self.path, seen, witness)
        self._contained = heads
        self._seen = max(heads, key=lambda head: head.number)


def clock() -> str:
    """Returns the time of this machine's clock (UTC), as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def now(state: State) -> str:
    """Returns the time, but never one before the last record's: a period does not come back."""
    found = clock()
    return max(found, state.time) if len(found) == len(state.time) else found


def ahead(state: State) -> str:
    """Returns the last record's time if it is later than this machine's clock by more than an hour; otherwise ""."""
    latest = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="milliseconds")
    return state.time if len(state.time) == len(latest) and state.time > latest else ""


def went_back(path: Path) -> LedgerChainError:
    """Returns the error for a ledger's file that lacks records which were read from it before."""
    return LedgerChainError(
        f"{path} no longer continues what was read from it before: records that were there are gone."
    )


def not_contained(path: Path, seen: Head, witness: Witness) -> WitnessError:
    """Returns the error for a ledger's file that lacks a head which a witness has seen."""
    return WitnessError(
        f"{path} does not contain the head {seen.number}:{seen.hash[:16]}… that {witness.path} has seen: its end was "
        "cut off, it was replaced by an older copy, it was written anew, or two copies went on apart. What was spent "
        "is not known; find the newest copy. If two copies went on, charge the rounds of one to the other, and begin a "
        "new witness with `cpsgd budget witness`."
    )
