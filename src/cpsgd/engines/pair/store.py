"""`ReportStore`: what a server keeps on disk, in SQLite or PostgreSQL: sums, counts, ids; and reports on their way.

A report's id is burnt when it is first evaluated, whatever comes of it: it is never evaluated again, and whoever sends
the same bytes again hears the same verdict. Verdicts and sums change in one transaction, so that after a crash each
report is in the sum if its verdict is on record, and not otherwise.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from cpsgd.errors import StoreError
from cpsgd.secagg.pair.extension import Elements

_TABLES = (
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, state TEXT NOT NULL, accepted INTEGER NOT NULL, "
    "refused INTEGER NOT NULL, sums {blob} NOT NULL, answer {blob})",
    "CREATE TABLE IF NOT EXISTS reports (id {blob} PRIMARY KEY, round INTEGER NOT NULL, sender {blob}, "
    "digest {blob} NOT NULL, verdict INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX IF NOT EXISTS one_report_per_sender ON reports (round, sender)",
    "CREATE TABLE IF NOT EXISTS pending (id {blob} PRIMARY KEY, round INTEGER NOT NULL, upload {blob} NOT NULL)",
)


class Verdict(IntEnum):
    """What became of a report."""

    ACCEPTED = 1
    OUT_OF_RANGE = 2
    """The proof failed: a value is out of range, or somebody changed a part."""
    UNREADABLE = 3
    """A sealed part did not open, or held no shares."""
    NOT_ADMITTED = 4
    """The signature or token is wrong."""
    SENT_BEFORE = 5
    """The sender has another report in this round."""
    ROUND_CLOSED = 6
    """The round takes no more reports."""
    REUSED_ID = 7
    """Another report had this id."""


@dataclass(frozen=True)
class Decided:
    """A report's verdict, as it is put on record."""

    id: bytes
    sender: bytes | None
    digest: bytes
    verdict: Verdict


@dataclass(frozen=True)
class RoundState:
    """A round as a server sees it."""

    round: int
    state: str
    accepted: int
    refused: int


class Connection(Protocol):
    """The part of Python's database interface that is used."""

    def execute(self, sql: str, parameters: Sequence[Any] = ...) -> Any:
        """Runs one statement."""
        ...


class ReportStore:
    """A server's database; belongs to one task and one role for ever. Safe to use from several threads."""

    def __init__(self, url: str, *, task: bytes, role: str, dim: int) -> None:
        """Opens or makes a store.

        Args:
            url: A file's path for SQLite, or "postgresql://...".
            task: The task's id.
            role: "leader" or "helper".
            dim: Numbers in a sum.

        Raises:
            StoreError: The store is of another task or role, or cannot be opened.
        """
        self._lock = threading.RLock()
        self._dim = dim
        self._postgres = url.startswith(("postgresql://", "postgres://"))
        try:
            self._connection = self._connect(url)
            with self._transaction() as run:
                for table in _TABLES:
                    run(table.format(blob="BYTEA" if self._postgres else "BLOB"))
                for name, value in (("format", "cpsgd pair store 1"), ("task", task.hex()), ("role", role)):
                    run("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value))
                    if (found := run("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]) != value:
                        raise StoreError(f"The store has {name} {found!r}, not {value!r}: give each server its own.")
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"The store cannot be opened: {error}.") from None

    def _connect(self, url: str) -> Any:
        if self._postgres:
            import psycopg

            try:
                return psycopg.connect(url, autocommit=True)
            except psycopg.Error as error:
                raise StoreError(f"PostgreSQL does not answer: {type(error).__name__}.") from None
        connection = sqlite3.connect(url, check_same_thread=False, isolation_level=None, timeout=10.0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Everything in it happens, or nothing."""
        with self._lock:
            cursor = self._connection.cursor()

            def run(sql: str, parameters: Sequence[Any] = ()) -> Any:
                cursor.execute(sql.replace("?", "%s") if self._postgres else sql, parameters)
                return cursor

            cursor.execute("BEGIN" if self._postgres else "BEGIN IMMEDIATE")
            try:
                yield run
                cursor.execute("COMMIT")
            except BaseException:
                cursor.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._connection.close()

    # ------------------------------------------------------------------ rounds

    def round(self, number: int) -> RoundState:
        """Returns a round's state, "open" where nothing is known of it."""
        with self._transaction() as run:
            row = run("SELECT state, accepted, refused FROM rounds WHERE round = ?", (number,)).fetchone()
        return RoundState(number, *row) if row else RoundState(number, "open", 0, 0)

    def current(self) -> int:
        """Returns the number of the first round that is not closed."""
        with self._transaction() as run:
            row = run("SELECT MAX(round) FROM rounds WHERE state <> 'open'").fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def close_round(self, number: int) -> None:
        """Lets no further reports into a round."""
        with self._transaction() as run:
            self._begin(run, number)
            run("UPDATE rounds SET state = 'closed' WHERE round = ? AND state = 'open'", (number,))

    def reveal(self, number: int, answer: bytes) -> bytes:
        """Puts a round's answer on record and returns it; the one that was given before, if there is one."""
        with self._transaction() as run:
            found = run("SELECT answer FROM rounds WHERE round = ?", (number,)).fetchone()
            if found[0] is None:
                run("UPDATE rounds SET state = 'revealed', answer = ? WHERE round = ?", (answer, number))
                return answer
            return bytes(found[0])

    def answer(self, number: int) -> bytes | None:
        """Returns the answer that was given for a round; None if none was."""
        with self._transaction() as run:
            row = run("SELECT answer FROM rounds WHERE round = ?", (number,)).fetchone()
        return None if row is None or row[0] is None else bytes(row[0])

    def sums(self, number: int) -> tuple[Elements, int, bytes]:
        """Returns a round's sums, the number of its reports, and the SHA-256 of their sorted ids."""
        with self._transaction() as run:
            row = run("SELECT sums, accepted FROM rounds WHERE round = ?", (number,)).fetchone()
            ids = run(
                "SELECT id FROM reports WHERE round = ? AND verdict = ? ORDER BY id", (number, int(Verdict.ACCEPTED))
            ).fetchall()
        if row is None:
            return np.zeros(self._dim, dtype=np.uint32), 0, hashlib.sha256().digest()
        digest = hashlib.sha256(b"".join(sorted(bytes(each[0]) for each in ids))).digest()
        return np.frombuffer(bytes(row[0]), dtype=np.uint32), int(row[1]), digest

    # ------------------------------------------------------------------ reports

    def known(self, ids: Iterable[bytes]) -> dict[bytes, tuple[bytes, Verdict]]:
        """Returns the digests and verdicts of those reports that have one."""
        found = {}
        with self._transaction() as run:
            for each in ids:
                row = run("SELECT digest, verdict FROM reports WHERE id = ?", (each,)).fetchone()
                if row:
                    found[each] = (bytes(row[0]), Verdict(row[1]))
        return found

    def senders(self, number: int, senders: Iterable[bytes]) -> set[bytes]:
        """Returns those senders who have a report in a round."""
        with self._transaction() as run:
            return {
                each
                for each in senders
                if run("SELECT 1 FROM reports WHERE round = ? AND sender = ?", (number, each)).fetchone()
            }

    def settle(self, number: int, decided: Sequence[Decided], sums: Elements) -> None:
        """Puts verdicts on record and replaces the round's sums, at once; reports on their way are then not any more.

        Raises:
            StoreError: A report has a verdict already, or its sender another report: nothing is changed.
        """
        accepted = sum(each.verdict is Verdict.ACCEPTED for each in decided)
        with self._transaction() as run:
            self._begin(run, number)
            for each in decided:
                try:
                    run(
                        "INSERT INTO reports VALUES (?, ?, ?, ?, ?)",
                        (each.id, number, each.sender, each.digest, int(each.verdict)),
                    )
                except Exception as error:
                    if "unique" in str(error).lower():
                        raise StoreError("A report was decided on twice.") from None
                    raise
                run("DELETE FROM pending WHERE id = ?", (each.id,))
            run(
                "UPDATE rounds SET accepted = accepted + ?, refused = refused + ?, sums = ? WHERE round = ?",
                (accepted, len(decided) - accepted, sums.tobytes(), number),
            )

    def _begin(self, run: Any, number: int) -> None:
        empty = np.zeros(self._dim, dtype=np.uint32).tobytes()
        run("INSERT INTO rounds VALUES (?, 'open', 0, 0, ?, NULL) ON CONFLICT (round) DO NOTHING", (number, empty))

    # ------------------------------------------------------------------ reports on their way (the leader's)

    def keep(self, number: int, uploads: Sequence[tuple[bytes, bytes]]) -> None:
        """Keeps uploads, by id, until they are settled."""
        with self._transaction() as run:
            for each, upload in uploads:
                run("INSERT INTO pending VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING", (each, number, upload))

    def kept(self) -> list[tuple[int, bytes]]:
        """Returns the round and the bytes of all uploads that were kept and not settled."""
        with self._transaction() as run:
            return [(int(row[0]), bytes(row[1])) for row in run("SELECT round, upload FROM pending").fetchall()]
