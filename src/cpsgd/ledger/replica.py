"""`Replica`: what one process knows of a ledger's file, brought up to date before anything is said or written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from sqlite3 import Connection

from cpsgd import _validate
from cpsgd.errors import LedgerChainError, WitnessError
from cpsgd.ledger import snapshots, storage
from cpsgd.ledger.chain import Head, Remembered, State
from cpsgd.ledger.drafts import Draft
from cpsgd.ledger.storage import Index
from cpsgd.ledger.witness import Line, Witness


class Replica:
    """The state that follows from a ledger's records, and the end of the chain when it was last looked at.

    Threads may share one. Nothing stays open between calls.

    Attributes:
        path: The ledger's file.
    """

    def __init__(self, path: Path, timeout: float, witness: Witness | None) -> None:
        """Reads the file, if there is one.

        Raises:
            WitnessError: The file does not contain what the witness has seen.
        """
        self.path = path
        self._witness = witness
        self._store = storage.Store(self.path, _validate.non_negative("timeout", timeout))
        self._state = State()
        # Entries, where the file has no index, or none that fits its records.
        self._memory: Remembered | None = None
        self._lock = threading.RLock()
        if self.path.exists() and self.path.stat().st_size > 0:
            with self._latest():
                pass
        elif self._witness is not None and self._witness.path.exists():
            raise WitnessError(
                f"There is no ledger at {self.path}, but {self._witness.path} has seen one. Restore it from a copy."
            )

    @contextmanager
    def _latest(self) -> Iterator[State]:
        """The state with the records that were added since the last time."""
        with self._lock:
            with self._store.reading() as connection:
                self._read(connection)
            yield self._state

    @contextmanager
    def _looking(self) -> Iterator[Index | Remembered]:
        """The entries of the latest state."""
        with self._lock, self._store.reading() as connection:
            self._read(connection)
            yield self._entries(connection)

    @contextmanager
    def _appending(self, *, create: bool = False, whole: bool = False) -> Iterator[Draft]:
        """What to write: on the disk, and only then known, when the block ends; forgotten if it raises."""
        with self._lock:
            with self._store.writing(create=create) as connection:
                self._read(connection, whole=whole)
                draft = Draft(self._entries(connection), now(self._state))
                yield draft
                rows = draft.write(connection, self._state, self._memory)
            self._memory = None
            for row in rows:
                self._state.apply(*row, entries=draft.looked_up)
            if self._witness is not None and rows:
                self._witness.append(Line(self._state.head, draft.time))

    def _entries(self, connection: Connection) -> Index | Remembered:
        """Those of the file's index, where it has one that fits."""
        return Index(connection) if self._memory is None else self._memory

    def _read(self, connection: Connection, *, whole: bool = False) -> None:
        last = self._state.head
        if last.number < 0:
            self._state, self._memory = snapshots.read(connection, whole=whole)
            if self._witness is not None and self._state.head.number >= 0:
                self._check_seen(connection, self._witness)
            return
        rows = storage.rows_after(connection, last.number)
        if [row[2] for row in islice(rows, 1)] != [last.hash]:
            raise went_back(self.path)
        entries = self._entries(connection)
        for row in rows:
            self._state.apply(*row, entries=entries)

    def _check_seen(self, connection: Connection, witness: Witness) -> None:
        """Refuses a ledger that does not contain the newest head that the witness has seen."""
        seen = witness.newest()
        rows = list(storage.rows_between(connection, seen.number, seen.number))
        if [row[2] for row in rows] != [seen.hash]:
            raise not_contained(self.path, seen, witness)


def now(state: State) -> str:
    """The time, but never before that of the last record: a period does not come back."""
    found = datetime.now(UTC).isoformat(timespec="milliseconds")
    return max(found, state.time) if len(found) == len(state.time) else found


def went_back(path: Path) -> LedgerChainError:
    """The error where a ledger's file lacks records that were read from it before."""
    return LedgerChainError(
        f"{path} no longer continues what was read from it before: records that were there are gone."
    )


def not_contained(path: Path, seen: Head, witness: Witness) -> WitnessError:
    """The error where a ledger's file lacks a head that a witness has seen."""
    return WitnessError(
        f"{path} does not contain the head {seen.number}:{seen.hash[:16]}… that {witness.path} has seen: its end was "
        "cut off, it was replaced by an older copy, or it was written anew. What was spent is not known; find the "
        "newest copy."
    )
