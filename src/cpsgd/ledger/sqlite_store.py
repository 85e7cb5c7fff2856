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

**Absence.** A row of the index that damage has hidden would make a round that was released look as if it never was. So
rows are in `buckets` by population, run and round. Each has a sum of hashes over its rows, and the head has the sum of
all. Whoever looks for a round reads its bucket as a whole and adds up. The index of the second schema, of 0.2.0, has no
such sums: all records are read instead, and it is made anew with the first record that is added.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerError, LedgerFormatError, LedgerStorageError
from cpsgd.ledger.chain import LONGEST_RECORD, Head, closed, index_hash, read_record, read_reservation, refusing
from cpsgd.ledger.entries import Entry

APPLICATION_ID = 0x63704C67
SCHEMA_VERSION = 3
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
_CACHE_2 = (
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, population TEXT NOT NULL, run TEXT NOT NULL, "
    "round INTEGER NOT NULL, closed INTEGER)",
    "CREATE INDEX entries_by_run ON entries (population, run, round)",
    "CREATE TABLE snapshot (part INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL, hash TEXT NOT NULL, "
    "snapshot INTEGER NOT NULL)",
)
_CACHE = (
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, population TEXT NOT NULL, run TEXT NOT NULL, "
    "round INTEGER NOT NULL, closed INTEGER, bucket INTEGER NOT NULL)",
    "CREATE INDEX entries_by_bucket ON entries (bucket)",
    "CREATE TABLE buckets (bucket INTEGER PRIMARY KEY, digest TEXT NOT NULL)",
    "CREATE TABLE snapshot (part INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL, hash TEXT NOT NULL, "
    "snapshot INTEGER NOT NULL, digest TEXT NOT NULL)",
)
_SCHEMAS = {1: set(_RECORDS), 2: {*_RECORDS, *_CACHE_2}, 3: {*_RECORDS, *_CACHE}}
_TABLES = {2: ("entries", "snapshot", "head"), 3: ("entries", "buckets", "snapshot", "head")}
# With a million entries a bucket has some 500 of them. Those without entries have no row.
_BUCKETS = 1 << 11
_MODULUS = 1 << 128
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

    def check_one_name(self) -> None:
        """Refuses a file with a second name: a hard link, or a mount of the file itself.

        The journal of a transaction lies beside the name by which the file was opened. Whoever opens it by another name
        does not find the journal of a writer that was killed, and takes half of a transaction for the whole.

        Raises:
            LedgerAccessError: The file has a second name.
        """
        try:
            found = self.path.stat()
            mounted = _is_mounted(self.path.resolve(), found)
        except OSError:
            return  # opening it says what is wrong
        if found.st_nlink > 1 or mounted:
            second = "is a mount of a single file" if mounted else f"has {found.st_nlink} names (hard links)"
            raise LedgerAccessError(
                f"{self.path} {second}. A ledger with two names can lose released entries, for its journal belongs to "
                "one of them. Remove the other links, or mount the folder that the file is in. Nothing was recorded."
            )

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
        self.check_one_name()
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


def schema_of(connection: sqlite3.Connection) -> int:
    """Returns the version of the file's schema."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def has_cache(connection: sqlite3.Connection) -> bool:
    """Returns whether the file has the tables beside the records, in the form of this release."""
    return schema_of(connection) >= SCHEMA_VERSION


def has_head(connection: sqlite3.Connection) -> bool:
    """Returns whether the file has a second copy of the head, as those of 0.2.0 have."""
    return schema_of(connection) >= 2


def read_head(connection: sqlite3.Connection) -> Row | None:
    """Returns number and hash of the last record and the number of the last snapshot, as the cache has them."""
    found: Row | None = connection.execute("SELECT number, hash, snapshot FROM head").fetchone()
    return found


def write_head(connection: sqlite3.Connection, number: int, digest: str, snapshot: int, index: int) -> None:
    """Writes the last record's number and hash, the number of the last snapshot, and the sum over the index."""
    connection.execute(
        "INSERT OR REPLACE INTO head VALUES (0, ?, ?, ?, ?)", (number, digest, snapshot, f"{index % _MODULUS:032x}")
    )


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
    """Makes the tables beside the records, or makes them anew."""
    for table in _TABLES.get(schema_of(connection), ()):
        connection.execute(f"DROP TABLE {table}")
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
        self._sums: dict[int, int] | None = None  # of the buckets, once they are read

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
        """Yields the entries of a round. All of them: the bucket must have the sum that it had."""
        bucket = _bucket(population, run, round)
        if self._sums is None:
            self._sums = read_sums(self._connection)
        rows = self._connection.execute(f"SELECT {_ROW} FROM entries WHERE bucket = ?", (bucket,)).fetchall()
        if sum(index_hash(*row) for row in rows) % _MODULUS != self._sums.get(bucket, 0):
            raise LedgerFormatError(_INCOMPLETE)
        for number in sorted(row[0] for row in rows if row[1:4] == (population, run, round)):
            yield from self._entries("e.number = ?", (number,), before)

    def of_run(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run."""
        found = set()
        for _, _, _, round, by in self._rows(lambda row: row[1:3] == (population, run)):
            asked = self._connection.execute("SELECT body FROM records WHERE number = ?", (by,)).fetchone()
            if by is None or '"kind":"abandon"' not in str(asked):
                found.add(round)
        return frozenset(found)

    def all(self, population: str, last: int | None = None) -> list[Entry]:
        """Returns a population's entries, in order; with `last`, this many from the end, and the others not checked."""
        if last is None:
            numbers = sorted(row[0] for row in self._rows(lambda row: row[1] == population))
            return [entry for number in numbers for entry in self._entries("e.number = ?", (number,))]
        newest = "e.number IN (SELECT number FROM entries WHERE population = ? ORDER BY number DESC LIMIT ?)"
        return list(self._entries(newest, (population, last)))

    def _rows(self, chosen: Callable[[tuple[Any, ...]], bool]) -> list[tuple[Any, ...]]:
        """Returns rows of the index; refuses one that lacks a row, or has another."""
        digest, found = 0, []
        for row in self._connection.execute(f"SELECT {_ROW} FROM entries"):
            digest += index_hash(*row)
            if chosen(row):
                found.append(row)
        if digest % _MODULUS != read_index(self._connection):
            raise LedgerFormatError(_INCOMPLETE)
        return found

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


_INCOMPLETE = "The ledger's index is damaged: rows are missing. Make it anew with `cpsgd budget repair`."
_REMEDY = "The ledger's index does not fit record {number}. Make it anew with `cpsgd budget repair`."


def _hash(value: object) -> str:
    """Returns a hash as it is in the file; where it is none, one that no record follows."""
    whole = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    return str(value) if whole else Head().hash


_ROW = "number, population, run, round, closed"


def _bucket(population: str, run: str, round: int) -> int:
    return index_hash(0, population, run, round, None) % _BUCKETS


def row_of(entry: Entry) -> tuple[int, str, str, int, int | None]:
    """Returns the row of the index for an entry."""
    return entry.number, entry.population, entry.event.run, entry.event.round, entry.closed_as


def _number(digest: object) -> int:
    """Returns a sum that was written as text; one that damage made of it is not that of any rows."""
    return int(digest, 16) if isinstance(digest, str) and set(digest) <= set("0123456789abcdef") and digest else -1


def read_index(connection: sqlite3.Connection) -> int:
    """Returns the sum over all rows of the index, as the head has it."""
    found = connection.execute("SELECT digest FROM head").fetchone()
    return -1 if found is None else _number(found[0])


def read_sums(connection: sqlite3.Connection) -> dict[int, int]:
    """Returns the sum of each bucket that has rows; refuses them where their sum is not the one that the head has."""
    sums = {bucket: _number(digest) for bucket, digest in connection.execute("SELECT bucket, digest FROM buckets")}
    if sum(sums.values()) % _MODULUS != read_index(connection):
        raise LedgerFormatError(_INCOMPLETE)
    return sums


def make_index(connection: sqlite3.Connection, rows: Iterable[tuple[int, str, str, int, int | None]]) -> int:
    """Fills an empty index; returns the sum over its rows."""
    sums: Counter[int] = Counter()
    for row in rows:
        bucket = _bucket(*row[1:4])
        sums[bucket] += index_hash(*row)
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", (*row, bucket))
    for bucket, digest in sums.items():
        connection.execute("INSERT INTO buckets VALUES (?, ?)", (bucket, f"{digest % _MODULUS:032x}"))
    return sums.total() % _MODULUS


def index_entry(connection: sqlite3.Connection, entry: Entry) -> int:
    """Writes an entry that is new or was closed to the index; returns by how much its sum grows.

    Sums are changed, and not computed anew: damage to a row must not become part of them.
    """
    row = row_of(entry)
    bucket, change = _bucket(*row[1:4]), index_hash(*row)
    if entry.closed_as is not None:
        change -= index_hash(*row[:4], None)
    found = connection.execute("SELECT digest FROM buckets WHERE bucket = ?", (bucket,)).fetchone()
    before = 0 if found is None else _number(found[0])
    connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", (*row, bucket))
    connection.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?)", (bucket, f"{(before + change) % _MODULUS:032x}"))
    return change


def index_digest(connection: sqlite3.Connection) -> int:
    """Returns the sum of `index_hash` over the rows of the index, modulo 2^128."""
    return sum(index_hash(*row) for row in connection.execute(f"SELECT {_ROW} FROM entries")) % _MODULUS
