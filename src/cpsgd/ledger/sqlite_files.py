"""Ledgers of 0.1.0 and 0.2.0, which were SQLite databases: how they are read, and how they become logs.

Their records have the same texts and the same hashes. Reading makes a log of them that nobody else sees. The first
writer takes the file over: while nobody else may write to the database, it writes the log beside it, marks the database
as one of a newer release, and puts the log in its place. If it is killed before that, the next writer does the same. An
earlier release that waited for the database meanwhile finds the mark, and refuses it.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

from cpsgd._durable import create_file, sync_folder
from cpsgd._record_log import End, RecordLog, record_line
from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerChainError, LedgerFormatError
from cpsgd.ledger.chain import DOMAIN

MAGIC = b"SQLite format 3\0"
"""A database begins like this."""
APPLICATION_ID = 0x63704C67
_TAKEN_OVER = 4
"""Version of the schema of a database that became a log; those of releases are 1 and 2."""
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
_HEAD = (
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL, hash TEXT NOT NULL, "
    "snapshot INTEGER NOT NULL)"
)
# Of a file from elsewhere no longer value is read.
_LONGEST = 1 << 18


def is_database(path: Path) -> bool:
    """Returns whether a file is a database, as ledgers of earlier releases are."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@contextmanager
def as_log(path: Path, timeout: float) -> Iterator[IO[bytes]]:
    """Yields the log that such a ledger becomes, in a file without a name.

    Raises:
        LedgerError: It is not a ledger, is damaged, or another process has it locked for this many seconds.
    """
    with tempfile.TemporaryFile() as file:
        with _opened(path, timeout) as connection:
            connection.execute("BEGIN")
            _write(path, connection, file)
        yield file


def take_over(path: Path, timeout: float) -> None:
    """Puts the log in the place of the database; does nothing if another process has done it.

    Raises:
        LedgerError: As for `as_log`.
        OSError: The log cannot be written. The database is as it was.
    """
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Its lock keeps others from doing the same. It stays open to the end: closing it would end SQLite's own locks.
    with RecordLog(target, DOMAIN, timeout=timeout).opened(), target.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        try:
            with _opened(target, timeout) as connection:
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute("BEGIN IMMEDIATE")
                create_file(draft, lambda file: _write(path, connection, file), mode=target.stat().st_mode & 0o777)
                connection.execute(f"PRAGMA user_version = {_TAKEN_OVER}")
                connection.execute("COMMIT")
                os.replace(draft, target)
            sync_folder(target.parent)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, timeout: float) -> Iterator[sqlite3.Connection]:
    """Yields a connection, with guards against a file that somebody else made; errors are the ledger's own."""
    _check_one_name(path)
    name = quote(os.fsencode(path.absolute()))
    try:
        with closing(
            sqlite3.connect(f"file:{name}?mode=rw", uri=True, timeout=timeout, isolation_level=None)
        ) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            yield connection
    except sqlite3.Error as error:
        # The low byte is the kind of error, the others say more.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerBusyError(f"{path}: another process has held it for {timeout:g} s; try again.") from None
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            raise LedgerAccessError(
                f"{path}: {error}. The file and its folder must be writable; nothing was recorded."
            ) from None
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise OSError(0, str(error)) from None
        raise LedgerFormatError(
            f"{path}: {error}. It is not a ledger, or is damaged; restore it from a copy."
        ) from None
    except UnicodeDecodeError:
        # Raised by sqlite3 where SQLite's own message quotes damaged text.
        raise LedgerFormatError(f"{path} is damaged: its text is not text. Restore it from a copy.") from None


def _write(path: Path, connection: sqlite3.Connection, file: IO[bytes]) -> None:
    """Writes the lines of the log; refuses records whose hashes are not right, and an end that is missing."""
    schema = _check_schema(path, connection)
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise LedgerFormatError(f"{path} is damaged; restore it from a copy.")
    end = End()
    for number, text, digest in connection.execute("SELECT number, body, hash FROM records ORDER BY number"):
        if number != end.records or not isinstance(text, str) or not text.isprintable() or not text.isascii():
            raise LedgerChainError(f"Record {end.records} of {path} is missing, or is not text.")
        line, end = record_line(DOMAIN, text, end)
        if end.hash != digest:
            raise LedgerChainError(
                f"The chain is broken at record {number}: it, or one before it, was changed after it was written. "
                "What was spent is not known; restore the file from a copy."
            )
        file.write(line)
    if _HEAD in schema and connection.execute("SELECT number, hash FROM head").fetchall() not in (
        [],
        [(end.records - 1, end.hash)],
    ):
        raise LedgerChainError(
            f"The end of {path} is missing, or damaged: its last record is not the one that was written last. What was "
            "spent is not known; restore the file from a copy."
        )


def _check_schema(path: Path, connection: sqlite3.Connection) -> set[str]:
    """Returns the SQL statements of the database's schema.

    Raises:
        LedgerFormatError: The database is not a ledger.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
    if application != APPLICATION_ID or not 1 <= version <= _TAKEN_OVER or not found >= set(_RECORDS):
        raise LedgerFormatError(f"{path} is a database, but not a ledger, or its tables were changed.")
    return found


def _check_one_name(path: Path) -> None:
    """Refuses a database with a second name: a hard link, or a mount of the file itself.

    Its journal lies beside the name by which it was opened. By another name, what a killed writer left is taken for the
    whole; and only one of the names would get the log.
    """
    found = path.stat()
    mounted = _is_mounted(path.resolve(), found)
    if found.st_nlink > 1 or mounted:
        second = "is a mount of a single file" if mounted else f"has {found.st_nlink} names (hard links)"
        raise LedgerAccessError(
            f"{path} {second}, and is a database of an earlier release, whose journal belongs to one name. Use it once "
            "by its only name, in its own folder: with the first charge it becomes a log, which may have several names."
        )


def _is_mounted(path: Path, found: os.stat_result) -> bool:
    """Returns whether a file is a mount point: by Linux's list of mounts, elsewhere by the device of its folder.

    In Linux the device does not tell: a mount may be of the same one, and layers of a container are several.
    """
    if os.name == "nt":
        return False
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return found.st_dev != path.parent.stat().st_dev
    # The fifth word is the mount point, with spaces and the like as octal numbers.
    name = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in os.fsencode(path))
    return any(name in line.split(b" ")[4:5] for line in mounts.splitlines())
