"""The ledger's file: SQLite, one table that only grows, and every failure as an error of our own.

**Why a rollback journal and synchronous=EXTRA.** A reservation must be on the disk before the round runs, and a
release before its result is handed out, also if power fails the moment after. With a rollback journal a transaction is
committed when its journal is deleted; EXTRA waits until that deletion itself is on the disk (FULL does not, so that the
journal could come back and undo the last transaction). A write-ahead log would be as durable and faster, but spreads
the ledger over three files, and who copies only the first loses the last entries. A ledger is one file.

**Who writes.** Writers begin with BEGIN IMMEDIATE: they hold the only write lock from before they read what is left of
a budget until after they have spent it, so two processes cannot spend the same rest. A connection lives for one
transaction; nothing is shared between threads or carried across a fork.

Triggers refuse UPDATE and DELETE, so that an accident with a database tool does not cost the history. They do not stop
a person who means to change it; the chain of hashes is for that.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerError, LedgerFormatError, LedgerStorageError
from cpsgd.ledger.chain import LONGEST_RECORD

APPLICATION_ID = 0x63704C67
SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE records (number INTEGER PRIMARY KEY, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE TRIGGER records_follow_each_other BEFORE INSERT ON records "
    "WHEN NEW.number IS NOT (SELECT coalesce(max(number), -1) + 1 FROM records) "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger follow each other'); END",
    "CREATE TRIGGER records_stay BEFORE DELETE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger are never deleted'); END",
    "CREATE TRIGGER records_stay_as_they_are BEFORE UPDATE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records of a ledger are never changed'); END",
)

Row = tuple[object, object, object]
"""Number, text and hash of a record, as found."""


class Store:
    """A ledger's file, which need not exist yet."""

    def __init__(self, path: Path, timeout: float) -> None:
        """Names the file; `timeout` is how many seconds to wait for others who have it locked."""
        self.path = path
        self._timeout = timeout

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the file."""
        with self._translated(), closing(self._connect("rw")) as connection:
            connection.execute("BEGIN")
            self._check_schema(connection)
            yield connection

    @contextmanager
    def writing(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction that nobody else can write in; on disk when the block ends, undone if it raises.

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
                    for statement in _SCHEMA:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                self._check_schema(connection)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        if mode == "rw" and not self.path.exists():
            raise LedgerAccessError(f"There is no ledger at {self.path}; `cpsgd budget create` makes one.")
        name = quote(os.fsencode(self.path.absolute()))
        connection = sqlite3.connect(f"file:{name}?mode={mode}", uri=True, timeout=self._timeout, isolation_level=None)
        try:
            # A file from elsewhere is data: nothing in its schema is run that could do more than SQL, and no value in
            # it is larger than a record.
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
        if application != APPLICATION_ID or version != SCHEMA_VERSION or found != set(_SCHEMA):
            raise LedgerFormatError(f"{self.path} is a database, but not a ledger or not as a ledger is made.")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explained(error) from None
        except UnicodeDecodeError:
            # What sqlite3 raises where SQLite's own message quotes damaged text.
            raise LedgerFormatError(f"{self.path} is damaged: its text is not text. Restore it from a copy.") from None

    def _explained(self, error: sqlite3.Error) -> LedgerError:
        # The low byte is the kind of error, the others say more.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        reason = f"{self.path}: {error}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerBusyError(f"{reason}. Another process has held it for {self._timeout:g} s; try again.")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return LedgerAccessError(f"{reason}. The file and its folder must be writable; nothing was recorded.")
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return LedgerStorageError(
                f"{reason}. Nothing may be released; make room or repair the disk, and ask again."
            )
        return LedgerFormatError(f"{reason}. It is not a ledger, or is damaged; restore it from a copy.")


def rows_after(connection: sqlite3.Connection, number: int) -> Iterator[Row]:
    """The records from `number` on (that one included), in order."""
    return connection.execute("SELECT number, body, hash FROM records WHERE number >= ? ORDER BY number", (number,))


def check_pages(connection: sqlite3.Connection) -> None:
    """Raises `LedgerFormatError` where the file's pages do not fit together, by which the last records could vanish."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise LedgerFormatError("The ledger's file is damaged; restore it from a copy.")


def append(connection: sqlite3.Connection, number: int, text: str, digest: str) -> None:
    """Adds a record."""
    connection.execute("INSERT INTO records (number, body, hash) VALUES (?, ?, ?)", (number, text, digest))
