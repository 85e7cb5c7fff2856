"""The ledger's file: an SQLite database with one table that only grows, and every failure as an error of our own.

**Why a rollback journal and synchronous=EXTRA.** A reservation must be on the disk before the round runs, and a release
before its result is handed out, also if power fails the moment after. With a rollback journal a transaction is
committed when its journal is deleted. EXTRA waits until that deletion is on the disk; with FULL the journal could come
back and undo the last transaction. A write-ahead log would spread the ledger over three files, and a copy of the first
would lack the last entries.

**Who writes.** Writers begin with BEGIN IMMEDIATE: they hold the only write lock from before they read what is left of
a budget until after they have spent it. A connection lives for one transaction; nothing is shared between threads or
carried across a fork. Triggers refuse UPDATE and DELETE, so that an accident with a database tool does not cost the
history.

**Beside the records** three tables follow from them, in the same transactions. `entries` is an index by number and run.
`snapshot` has the text whose hash is in the last record of that kind. `head` has the last record's hash on another
page, so that a missing end is noticed. They are a cache: what is read from them is checked against the records, and
they can be made anew at any time. Files of the first schema get them with the first record that is added.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerError, LedgerFormatError, LedgerStorageError
from cpsgd.ledger.chain import LONGEST_RECORD, Head, closed, index_hash, read_record, read_reservation, refusing
from cpsgd.ledger.entries import Entry

APPLICATION_ID = 0x63704C67
SCHEMA_VERSION = 2
_RECORDS = (
    "CREATE TABLE records (number INTEGER PRIMARY KEY, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE TRIGGER records_follow_each_other BEFORE INSERT ON records "
    "WHEN NEW.number IS NOT (SELECT coalesce(max(number), -1) + 1 FROM records) "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger follow each other'); END",
    "CREATE TRIGGER records_stay BEFORE DELETE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger are never deleted'); END",
    "CREATE TRIGGER records_stay_as_they_are BEFORE UPDATE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger are never changed'); END",
)
_CACHE = (
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, population TEXT NOT NULL, run TEXT NOT NULL, "
    "round INTEGER NOT NULL, closed INTEGER)",
    "CREATE INDEX entries_by_run ON entries (population, run, round)",
    "CREATE TABLE snapshot (part INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL, hash TEXT NOT NULL, "
    "snapshot INTEGER NOT NULL)",
)
_SCHEMAS = {1: set(_RECORDS), 2: {*_RECORDS, *_CACHE}}
# A snapshot is stored in pieces of this length.
_PART = 1 << 17
# Of a file from elsewhere no more pieces are read.
_MOST_PARTS = 1 << 10

Row = tuple[object, object, object]
"""Number, text and hash of a record, as they are in the file."""


class Store:
    """A ledger's file, which need not exist yet."""

    def __init__(self, path: Path, timeout: float) -> None:
        """Names the file. `timeout` is the number of seconds to wait for others who have it locked."""
        self.path = path
        self.timeout = timeout

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yields a transaction that sees one state of the file."""
        with self._translated(), closing(self._connect("rw")) as connection:
            connection.execute("BEGIN")
            self._check_schema(connection)
            yield connection

    @contextmanager
    def writing(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        """Yields a transaction that nobody else can write in; on disk when the block ends, undone if it raises.

        With `create` an empty ledger is made where there is none; otherwise that is an error.
        """
        with self._translated(), closing(self._connect("rwc" if create else "rw")) as connection:
            if connection.execute("PRAGMA journal_mode = DELETE").fetchone() != ("delete",):
                raise LedgerBusyError(f"{self.path} is open in another program in another journal mode; close it.")
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")
            connection.execute("BEGIN IMMEDIATE")
            try:
                if create and self._is_empty(connection):
                    for statement in _RECORDS:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.execute("PRAGMA user_version = 1")
                self._check_schema(connection)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        """Opens the file in SQLite's mode "rw" or "rwc", with guards against a file that somebody else made.

        The caller closes it.
        """
        if mode == "rw" and not self.path.exists():
            raise LedgerAccessError(f"There is no ledger at {self.path}; `cpsgd budget create` makes one.")
        name = quote(os.fsencode(self.path.absolute()))
        connection = sqlite3.connect(f"file:{name}?mode={mode}", uri=True, timeout=self.timeout, isolation_level=None)
        try:
            # A file from elsewhere is data: nothing in its schema may do more than SQL, and no value or row is much
            # longer than what we write: a record, or a snapshot's piece (`_PART`), as long as two records.
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * LONGEST_RECORD)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA mmap_size = 0")
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _is_empty(connection: sqlite3.Connection) -> bool:
        return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application == APPLICATION_ID and version > SCHEMA_VERSION:
            raise LedgerFormatError(
                f"{self.path} was written by a newer release (schema {version}; this one knows {SCHEMA_VERSION}). "
                "Upgrade cpsgd."
            )
        if self._is_empty(connection):
            raise LedgerAccessError(f"{self.path} is empty: it holds no ledger yet. Create a budget first.")
        found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
        if application != APPLICATION_ID or found != _SCHEMAS.get(version):
            raise LedgerFormatError(f"{self.path} is a database, but not a ledger or not as a ledger is made.")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns errors of SQLite into the ledger's own."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._explained(error) from None
        except UnicodeDecodeError:
            # Raised by sqlite3 where SQLite's own message quotes damaged text.
            raise LedgerFormatError(f"{self.path} is damaged: its text is not text. Restore it from a copy.") from None

    def _explained(self, error: sqlite3.Error) -> LedgerError:
        """Returns the ledger's error for one of SQLite."""
        # The low byte is the kind of error, the others say more.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        reason = f"{self.path}: {error}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerBusyError(f"{reason}. Another process has held it for {self.timeout:g} s; try again.")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return LedgerAccessError(f"{reason}. The file and its folder must be writable; nothing was recorded.")
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return LedgerStorageError(
                f"{reason}. Nothing may be released; make room or repair the disk, and ask again."
            )
        return LedgerFormatError(f"{reason}. It is not a ledger, or is damaged; restore it from a copy.")


# ------------------------------------------------------------------ records


def rows_between(connection: sqlite3.Connection, first: int, last: int = (1 << 63) - 1) -> Iterator[Row]:
    """Returns the records of these numbers, both included, in order; by default up to the end."""
    asked = "SELECT number, body, hash FROM records WHERE number BETWEEN ? AND ? ORDER BY number"
    return connection.execute(asked, (first, last))


def check_pages(connection: sqlite3.Connection) -> None:
    """Raises `LedgerFormatError` where the file's pages do not fit together, by which the last records could vanish."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise LedgerFormatError("The ledger's file is damaged; restore it from a copy.")


def append(connection: sqlite3.Connection, number: int, text: str, digest: str) -> None:
    """Adds a record."""
    connection.execute("INSERT INTO records (number, body, hash) VALUES (?, ?, ?)", (number, text, digest))


# ------------------------------------------------------------------ the tables beside them


def has_cache(connection: sqlite3.Connection) -> bool:
    """Returns whether the file has the tables beside the records."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return bool(version >= 2)


def read_head(connection: sqlite3.Connection) -> Row | None:
    """Returns number and hash of the last record and the number of the last snapshot, as the cache has them."""
    found: Row | None = connection.execute("SELECT number, hash, snapshot FROM head").fetchone()
    return found


def write_head(connection: sqlite3.Connection, number: int, digest: str, snapshot: int) -> None:
    """Writes the last record's number and hash, and the number of the last snapshot."""
    connection.execute("INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?)", (number, digest, snapshot))


def read_snapshot(connection: sqlite3.Connection) -> str:
    """Returns the text of the last snapshot."""
    asked = "SELECT body FROM snapshot ORDER BY part LIMIT ?"
    return "".join(str(body) for (body,) in connection.execute(asked, (_MOST_PARTS,)))


def write_snapshot(connection: sqlite3.Connection, text: str) -> None:
    """Replaces the text of the last snapshot."""
    connection.execute("DELETE FROM snapshot")
    for place in range(0, len(text), _PART):
        connection.execute("INSERT INTO snapshot VALUES (?, ?)", (place // _PART, text[place : place + _PART]))


def clear_cache(connection: sqlite3.Connection) -> None:
    """Makes the tables beside the records, or empties them."""
    if has_cache(connection):
        for table in ("entries", "snapshot", "head"):
            connection.execute(f"DELETE FROM {table}")
        return
    for statement in _CACHE:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


class Index:
    """Entries of the file, by number and by run, for one transaction.

    A row is believed only as far as the records it points to bear it out, each checked against the hash of the one
    before it.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Looks entries up in this transaction."""
        self._connection = connection

    def get(self, number: int, before: int | None = None) -> Entry | None:
        """Returns the entry that was reserved by the record of this number."""
        found = list(self._entries("e.number = ?", (number,), before))
        return found[0] if found else None

    def taken(self, population: str, run: str, round: int, before: int) -> bool:
        """Returns whether a run's round was reserved."""
        return any(not entry.abandoned for entry in self._of_round(population, run, round, before))

    def find(self, population: str, run: str, round: int) -> Entry | None:
        """Returns the entry of a run's round."""
        found = [entry for entry in self._of_round(population, run, round) if not entry.abandoned]
        return found[-1] if run and found else None

    def _of_round(self, population: str, run: str, round: int, before: int | None = None) -> Iterator[Entry]:
        return self._entries("e.population = ? AND e.run = ? AND e.round = ?", (population, run, round), before)

    def of_run(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run."""
        asked = (
            "SELECT e.round, e.closed, x.body FROM entries e LEFT JOIN records x ON x.number = e.closed "
            "WHERE e.population = ? AND e.run = ?"
        )
        rows = self._connection.execute(asked, (population, run))
        return frozenset(round for round, by, body in rows if by is None or '"kind":"abandon"' not in str(body))

    def all(self, population: str, last: int | None = None) -> list[Entry]:
        """Returns a population's entries, in order; with `last`, this many from the end."""
        if last is None:
            return list(self._entries("e.population = ?", (population,)))
        newest = "e.number IN (SELECT number FROM entries WHERE population = ? ORDER BY number DESC LIMIT ?)"
        return list(self._entries(newest, (population, last)))

    def put(self, entry: Entry) -> None:
        """Does nothing: the file has the entry since its record was written."""

    def _entries(self, where: str, values: tuple[object, ...], before: int | None = None) -> Iterator[Entry]:
        """Yields the entries that an SQL condition selects, each checked against the records it was made from."""
        asked = f"""
            SELECT e.number, p.hash, r.body, r.hash, e.population, e.run, e.round, e.closed, q.hash, x.body, x.hash
            FROM entries e
            LEFT JOIN records p ON p.number = e.number - 1 LEFT JOIN records r ON r.number = e.number
            LEFT JOIN records q ON q.number = e.closed - 1 LEFT JOIN records x ON x.number = e.closed
            WHERE {where} ORDER BY e.number"""
        for number, previous, text, digest, *stated, by, before_it, its_text, its_digest in self._connection.execute(
            asked, values
        ):
            if before is not None and number >= before:
                continue
            body = read_record(number, _hash(previous), number, text, digest)
            with refusing(number):
                entry = read_reservation(body)
            if stated != [entry.population, entry.event.run, entry.event.round]:
                raise LedgerFormatError(_REMEDY.format(number=number))
            if by is not None and (before is None or by < before):
                body = read_record(by, _hash(before_it), by, its_text, its_digest)
                with refusing(by):
                    entry = closed(entry, body)
            yield entry


_REMEDY = "The ledger's index does not fit record {number}. Make it anew with `cpsgd budget repair`."


def _hash(value: object) -> str:
    """Returns a hash as it is in the file; where it is none, one that no record follows."""
    whole = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    return str(value) if whole else Head().hash


def index_entry(connection: sqlite3.Connection, entry: Entry) -> None:
    """Writes an entry that is new or has changed to the index."""
    row = (entry.number, entry.population, entry.event.run, entry.event.round, entry.closed_as)
    connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)


def index_digest(connection: sqlite3.Connection) -> int:
    """Returns `Remembered.digest` of the entries of the index."""
    rows = connection.execute("SELECT number, population, run, round, closed FROM entries")
    return sum(index_hash(*row) for row in rows)
