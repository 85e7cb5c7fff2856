"""`ReportStore`: what a server keeps on disk, in SQLite or PostgreSQL: sums, counts, ids; and reports on their way.

A report's id is burnt when it is first evaluated, whatever comes of it: it is never evaluated again, and whoever sends
the same bytes again hears the same verdict. Verdicts and sums change in one transaction, so that after a crash each
report is in the sum if its verdict is on record, and not otherwise.

One process uses a store at a time: a SQLite file stays locked, PostgreSQL keeps a lock for as long as the connection
lasts. The open round's sums can therefore be kept in memory, too. They are read again after every failure, for a lost
connection leaves open whether its last transaction happened.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from cpsgd.errors import StoreError
from cpsgd.secagg.pair.extension import Elements

_TABLES = (
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, state TEXT NOT NULL, accepted INTEGER NOT NULL, "
    "refused INTEGER NOT NULL, sums {blob} NOT NULL, answer {blob})",
    "CREATE TABLE IF NOT EXISTS reports (id {blob} PRIMARY KEY, round INTEGER NOT NULL, sender {blob}, "
    "digest {blob} NOT NULL, verdict INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX IF NOT EXISTS one_report_per_sender ON reports (round, sender) WHERE sender IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS senders ON reports (sender) WHERE sender IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS pending (id {blob} PRIMARY KEY, round INTEGER NOT NULL, upload {blob} NOT NULL)",
)


# Seconds that a store is waited for, and pages (of 4 kB) that SQLite's journal may take: uploads on their way are
# deleted before most of them would be copied from there.
_PATIENCE, _JOURNAL_PAGES = 10.0, 8192


class Verdict(IntEnum):
    """The outcome of a report."""

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
    """A report's verdict, ready to be recorded."""

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


@dataclass(frozen=True)
class _Cached:
    """The state and sums of the round that was asked for last."""

    state: RoundState
    sums: Elements


Run = Callable[..., Any]
"""Executes one statement with its parameters and returns the cursor."""


class ReportStore:
    """Rounds, reports and uploads on their way, of one server and one task."""

    def __init__(self, url: str, *, task: bytes, role: str, dim: int) -> None:
        """Opens the store, or makes it.

        Args:
            url: A file of SQLite, or an address that begins with postgresql://.
            task: Id of the task.
            role: "leader" or "helper".
            dim: d.

        Raises:
            StoreError: It cannot be opened, another process uses it, or it is of another task or server.
        """
        self._url, self._postgres, self._dim = url, url.startswith(("postgresql://", "postgres://")), dim
        self._task, self._role = task, role
        self._lock = threading.RLock()
        self._connection: Any = None
        self._cache: _Cached | None = None
        if self._postgres:
            import psycopg

            self._failures: tuple[type[Exception], ...] = (psycopg.Error, OSError)
            try:
                psycopg.conninfo.conninfo_to_dict(url)
            except psycopg.Error:
                # The driver's own words quote the address, with the password.
                raise StoreError("The address of the database is malformed.") from None
        else:
            self._failures = (sqlite3.Error, OSError)
        try:
            with self._transaction() as run:
                self._prepare(run)
        except StoreError:
            self._disconnect()
            raise

    def _prepare(self, run: Run) -> None:
        """Creates the tables, and checks that they belong to this task and server."""
        for table in _TABLES:
            run(table.format(blob="BYTEA" if self._postgres else "BLOB"))
        for name, value in (("format", "cpsgd pair store 1"), ("task", self._task.hex()), ("role", self._role)):
            run("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value))
            if (found := run("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]) != value:
                raise StoreError(f"The store has {name} {found!r}, not {value!r}: give each server its own.")

    # ------------------------------------------------------------------ the connection

    def _connect(self) -> Any:
        """Returns a connection that locks the store against other processes."""
        if not self._postgres:
            # Whoever watches a server's sums change sees its share of each report: no other user may.
            os.close(os.open(self._url, os.O_CREAT | os.O_RDWR, 0o600))
            file = sqlite3.connect(self._url, check_same_thread=False, isolation_level=None, timeout=_PATIENCE)
            for setting in (
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "secure_delete = ON",
                f"wal_autocheckpoint = {_JOURNAL_PAGES}",
                "wal_checkpoint(TRUNCATE)",  # as `reveal` would have, if it was killed before
            ):
                file.execute(f"PRAGMA {setting}")
            return file
        import psycopg

        connection = psycopg.connect(self._url, autocommit=True, connect_timeout=int(_PATIENCE))
        key = int.from_bytes(hashlib.sha256(self._task + self._role.encode()).digest()[:8], "big", signed=True)
        deadline = time.monotonic() + _PATIENCE
        # A process that was killed holds its lock until the database notices.
        while connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone() != (True,):
            if time.monotonic() > deadline:
                connection.close()
                raise StoreError("Another process uses the store.")
            time.sleep(0.1)
        return connection

    def _statements(self) -> tuple[Any, Run]:
        """Returns a cursor and the function that executes statements; connects first if there is no connection."""
        if self._connection is None:
            self._cache = None
            self._connection = self._connect()
        cursor = self._connection.cursor()

        def run(sql: str, parameters: Sequence[Any] = (), *, each: bool = False) -> Any:
            statement = sql.replace("?", "%s") if self._postgres else sql
            (cursor.executemany if each else cursor.execute)(statement, parameters)
            return cursor

        return cursor, run

    @contextmanager
    def _reading(self) -> Iterator[Run]:
        """Yields a connection for statements that change nothing."""
        with self._lock, self._failing():
            yield self._statements()[1]

    @contextmanager
    def _transaction(self, *, lasting: bool = True) -> Iterator[Run]:
        """Yields a transaction: everything in the block happens, or nothing.

        One that is not lasting may be undone by a loss of power, until the next lasting one. PostgreSQL's all last: it
        may fail alone, and this process would not know what was undone.
        """
        with self._lock, self._failing():
            cursor, run = self._statements()
            if not self._postgres:
                cursor.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
            cursor.execute("BEGIN" if self._postgres else "BEGIN IMMEDIATE")
            try:
                yield run
                cursor.execute("COMMIT")
            except BaseException:
                self._cache = None
                with suppress(*self._failures):
                    cursor.execute("ROLLBACK")
                raise

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Translates a database's errors, and drops a broken connection: the next statement connects anew."""
        try:
            yield
        except self._failures as error:
            self._cache = None
            if self._postgres:
                self._disconnect()
            raise StoreError(f"The store failed: {type(error).__name__}: {error}") from None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self._failures):
                connection.close()

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._disconnect()

    # ------------------------------------------------------------------ rounds

    def round(self, number: int) -> RoundState:
        """Returns a round's state, "open" where nothing is known of it."""
        with self._lock:
            if self._cache is not None and self._cache.state.round == number:
                return self._cache.state
            with self._reading() as run:
                row = run("SELECT state, accepted, refused FROM rounds WHERE round = ?", (number,)).fetchone()
            return RoundState(number, *row) if row else RoundState(number, "open", 0, 0)

    def rounds(self, most: int) -> list[RoundState]:
        """Returns the last rounds that the store knows of, in order."""
        with self._reading() as run:
            rows = run("SELECT round, state, accepted, refused FROM rounds ORDER BY round DESC LIMIT ?", (most,))
            return [RoundState(*row) for row in reversed(rows.fetchall())]

    def current(self) -> int:
        """Returns the number of the first round that is not closed."""
        with self._reading() as run:
            row = run("SELECT MAX(round) FROM rounds WHERE state <> 'open'").fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def close_round(self, number: int) -> None:
        """Lets no further reports into a round, and forgets uploads that were kept for it and never settled."""
        with self._transaction() as run:
            self._cache = None
            self._begin(run, number)
            run("UPDATE rounds SET state = 'closed' WHERE round = ? AND state = 'open'", (number,))
            run("DELETE FROM pending WHERE round <= ?", (number,))

    def reveal(self, number: int, answer: bytes) -> bytes:
        """Records a round's answer, deletes its sums, and returns the answer that was recorded first."""
        with self._transaction() as run:
            self._cache = None
            found = run("SELECT answer FROM rounds WHERE round = ?", (number,)).fetchone()
            if found[0] is not None:
                return bytes(found[0])
            changed = "UPDATE rounds SET state = 'revealed', answer = ?, sums = ? WHERE round = ?"
            run(changed, (answer, b"", number))
        if not self._postgres:
            # The journal has all earlier sums, and their differences are shares of reports.
            with self._reading() as run:
                run("PRAGMA wal_checkpoint(TRUNCATE)")
        return answer

    def answer(self, number: int) -> bytes | None:
        """Returns the answer that was given for a round; None if none was."""
        with self._reading() as run:
            row = run("SELECT answer FROM rounds WHERE round = ?", (number,)).fetchone()
        return None if row is None or row[0] is None else bytes(row[0])

    def sums(self, number: int) -> Elements:
        """Returns a round's sums, which the caller does not change."""
        with self._lock:
            if self._cache is None or self._cache.state.round != number:
                state = self.round(number)
                with self._reading() as run:
                    row = run("SELECT sums FROM rounds WHERE round = ?", (number,)).fetchone()
                sums = np.zeros(self._dim, np.uint32) if row is None else np.frombuffer(bytes(row[0]), np.uint32)
                self._cache = _Cached(state, sums)
            return self._cache.sums

    def digest_of_ids(self, number: int) -> bytes:
        """Returns the SHA-256 of the sorted ids of a round's accepted reports."""
        with self._reading() as run:
            found = run("SELECT id FROM reports WHERE round = ? AND verdict = ?", (number, int(Verdict.ACCEPTED)))
            return hashlib.sha256(b"".join(sorted(bytes(row[0]) for row in found.fetchall()))).digest()

    # ------------------------------------------------------------------ reports

    def known(self, ids: Collection[bytes]) -> dict[bytes, tuple[bytes, Verdict]]:
        """Returns the digest and verdict of each of these reports that has a verdict."""
        with self._reading() as run:
            rows = run(f"SELECT id, digest, verdict FROM reports WHERE id IN ({_marks(ids)})", tuple(ids)).fetchall()
        return {bytes(row[0]): (bytes(row[1]), Verdict(row[2])) for row in rows}

    def senders(self, number: int | None, senders: Collection[bytes]) -> set[bytes]:
        """Returns those of the senders that have a report in a round, or in any round if `number` is None."""
        if not senders:
            return set()
        where, which = ("", ()) if number is None else ("round = ? AND ", (number,))
        with self._reading() as run:
            rows = run(
                f"SELECT sender FROM reports WHERE {where}sender IN ({_marks(senders)})", (*which, *senders)
            ).fetchall()
        return {bytes(row[0]) for row in rows}

    def settle(self, number: int, decided: Sequence[Decided], sums: Elements) -> None:
        """Records verdicts, replaces the round's sums and deletes the kept uploads, in one transaction.

        A leader's need not last: undone, the uploads are still kept, and the helper repeats its verdicts on them.

        Raises:
            StoreError: A report has a verdict already, its sender another report, or the sums were changed by another
                process (a pooler of connections may share a lock out to two): nothing is changed.
        """
        accepted = sum(each.verdict is Verdict.ACCEPTED for each in decided)
        with self._lock:
            before = self.round(number)
            with self._transaction(lasting=self._role != "leader") as run:
                self._begin(run, number)
                rows = [(each.id, number, each.sender, each.digest, int(each.verdict)) for each in decided]
                run("INSERT INTO reports VALUES (?, ?, ?, ?, ?)", rows, each=True)
                if self._role == "leader":
                    run("DELETE FROM pending WHERE id = ?", [(each.id,) for each in decided], each=True)
                counts = before.accepted + accepted, before.refused + len(decided) - accepted
                changed = (
                    "UPDATE rounds SET accepted = ?, refused = ?, sums = ? WHERE round = ? AND accepted + refused = ?"
                )
                values = (*counts, sums.tobytes(), number, before.accepted + before.refused)
                if run(changed, values).rowcount != 1:
                    raise StoreError("Another process uses the store.")
            self._cache = _Cached(RoundState(number, before.state, *counts), sums)

    def _begin(self, run: Run, number: int) -> None:
        empty = np.zeros(self._dim, dtype=np.uint32).tobytes()
        run("INSERT INTO rounds VALUES (?, 'open', 0, 0, ?, NULL) ON CONFLICT (round) DO NOTHING", (number, empty))

    # ------------------------------------------------------------------ reports on their way (the leader's)

    def keep(self, number: int, uploads: Sequence[tuple[bytes, bytes]], *, alone: bool = False) -> None:
        """Keeps uploads, by id, until they are settled; the helper is asked next about exactly the kept ones.

        With `alone`, deletes all other kept uploads, whose transaction seemed to fail.
        """
        with self._transaction() as run:
            if alone:
                run("DELETE FROM pending")
            rows = [(each, number, upload) for each, upload in uploads]
            run(
                "INSERT INTO pending VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET upload = excluded.upload",
                rows,
                each=True,
            )

    def kept(self) -> list[bytes]:
        """Returns the bytes of all uploads that were kept and not settled."""
        with self._reading() as run:
            return [bytes(row[0]) for row in run("SELECT upload FROM pending ORDER BY round").fetchall()]


def _marks(values: Collection[object]) -> str:
    """Returns a question mark for each value; one for NULL where there is none."""
    return ", ".join("?" * len(values)) or "NULL"
