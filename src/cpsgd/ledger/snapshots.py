"""Opening a ledger from its last snapshot.

Reading a record takes some 50 µs, so a ledger of a million entries is not read as a whole each time. Every
`SNAPSHOT_EVERY` records one more record is written that holds the hash of a text with all that follows from the records
before it (`State.to_text`). The text itself is kept beside the records. Whoever opens the ledger

* takes the text if its hash is the one in the snapshot's record, and that record follows the one before it,
* reads and checks all records from there on, and
* compares the last of them with a copy of the head that is kept on another page of the file.

Where one of these does not fit, or there is no snapshot yet, all records are read and SQLite's pages checked.

**What this still promises.** The text's hash is in a record, so the text is part of the chain. Damage to records before
the snapshot is not noticed on opening, nor does it change what counts as spent. Whoever changes the text has to write
the chain anew from the snapshot's record on, which a head kept elsewhere reveals. `Ledger.verify` reads everything and
computes every snapshot anew.
"""

from __future__ import annotations

import sqlite3
from sqlite3 import Connection

from cpsgd.errors import LedgerChainError, LedgerError, ParameterError
from cpsgd.ledger import sqlite_store
from cpsgd.ledger.chain import Head, Remembered, read_record
from cpsgd.ledger.sqlite_store import Index
from cpsgd.ledger.state import STATE_VERSION, State, digest_of

SNAPSHOT_EVERY = 128
"""Records after which a new snapshot is made."""


class _NotUsableError(Exception):
    """There is no snapshot to begin with."""


_UNUSABLE = (_NotUsableError, LedgerError, sqlite3.Error)


def read(connection: Connection, *, whole: bool = False) -> tuple[State, Remembered | None]:
    """Returns the state of a ledger, and its entries where the file has no index that fits.

    Args:
        connection: A transaction.
        whole: Whether to read all records, and treat the index as damaged.
    """
    cached = sqlite_store.has_cache(connection)
    if cached and not whole:
        try:
            return _read_from_snapshot(connection), None
        except _UNUSABLE:
            pass  # Reading all says what is wrong, if it is more than the snapshot.
    sqlite_store.check_pages(connection)
    entries = Remembered()
    state = State(entries=entries)
    for row in sqlite_store.rows_between(connection, 0):
        state.apply(*row)
    if sqlite_store.has_head(connection):
        _check_end(connection, state)
        if cached and not whole and fits(connection, state, entries):
            state.entries = Remembered()
            return state, None
    return state, entries


def fits(connection: Connection, state: State, entries: Remembered) -> bool:
    """Returns whether index, snapshot and head, which are kept beside the records, follow from them."""
    try:
        if sqlite_store.read_head(connection) != (state.head.number, state.head.hash, state.snapshot):
            return False
        if state.snapshot >= 0:
            _text(connection, state.snapshot)
        if sqlite_store.has_cache(connection):
            sqlite_store.read_sums(connection)
            if sqlite_store.read_index(connection) != entries.digest:
                return False
        return sqlite_store.index_digest(connection) == entries.digest
    except _UNUSABLE:
        return False


def _read_from_snapshot(connection: Connection) -> State:
    """Returns the state from the last snapshot and the records after it."""
    head = sqlite_store.read_head(connection)
    if head is None or not isinstance(head[2], int) or head[2] < 1:
        raise _NotUsableError
    state = _snapshot(connection, head[2])
    index = Index(connection)
    for row in sqlite_store.rows_between(connection, state.head.number + 1):
        state.apply(*row, entries=index)
    if head[:2] != (state.head.number, state.head.hash):
        raise _NotUsableError
    return state


def _snapshot(connection: Connection, number: int) -> State:
    """Returns the state after the record of this number, which is a snapshot."""
    text, version, digest = _text(connection, number)
    if version != STATE_VERSION:
        raise _NotUsableError
    try:
        return State.from_text(text, Head(number, digest))
    except ParameterError:
        raise _NotUsableError from None


def _text(connection: Connection, number: int) -> tuple[str, object, str]:
    """Returns the text whose hash is in the record of this number, its version, and the record's hash."""
    rows = list(sqlite_store.rows_between(connection, number - 1, number))
    text = sqlite_store.read_snapshot(connection)
    if len(rows) != 2 or not isinstance(rows[0][2], str) or not text.isascii():
        raise _NotUsableError
    try:
        body = read_record(number, rows[0][2], *rows[1])
    except ValueError:
        raise _NotUsableError from None
    if body.get("kind") != "snapshot" or body.get("digest") != digest_of(text):
        raise _NotUsableError
    return text, body.get("version"), str(rows[1][2])


def _check_end(connection: Connection, state: State) -> None:
    """Refuses a file whose last records are not there any more."""
    head = sqlite_store.read_head(connection)
    if head is not None and head[:2] != (state.head.number, state.head.hash):
        raise LedgerChainError(
            "The end of the ledger is missing, or damaged: its last record is not the one that was written last. "
            "What was spent is not known; restore the file from a copy."
        )
