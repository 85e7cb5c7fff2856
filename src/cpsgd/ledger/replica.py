"""`Replica`: one process's view of a ledger's file, brought up to date before anything is said or written.

The file is a log of records (`cpsgd._record_log`) and the only authority. Writers lock it before they read what is left
of a budget until after they have spent it, so no two spend the same rest. The lock is on the file itself and holds by
whichever name (a hard link, a mount). A record is on the disk when `appending` ends.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cpsgd import _validate
from cpsgd._plain import canonical
from cpsgd._record_log import End, OpenLog, RecordLog
from cpsgd.errors import (
    DamagedFileError,
    LedgerAccessError,
    LedgerBusyError,
    LedgerChainError,
    LedgerError,
    LedgerFormatError,
    LedgerStorageError,
    ParameterError,
    WitnessError,
)
from cpsgd.ledger import sqlite_files
from cpsgd.ledger.chain import DOMAIN, VERSION, Head, read_record
from cpsgd.ledger.entries import Entry
from cpsgd.ledger.index import Index
from cpsgd.ledger.lookup import Lookup, catch_up, written
from cpsgd.ledger.state import STATE_VERSION, State, snapshot_version
from cpsgd.ledger.witness import Line, Witness

SNAPSHOT_EVERY = 128
"""Records after which a new snapshot is made; more if the last snapshot was long."""
LONGEST_RECORD = 1 << 16
"""Characters of the longest record that is not a snapshot."""
BEGINS = b'{"format":'
"""A ledger begins like this."""
# The first line of every ledger but for digits.
_FIRST = b'%s0,"id":"%032d","kind":"ledger","number":0,"time":"0000-00-00T00:00:00.000+00:00"} #%064d\n' % (
    BEGINS,
    0,
    0,
)
# Since the last snapshot there is at least this much more text than it has, so snapshots are a small part of the file.
_MORE_THAN_SNAPSHOT = 4
# Of records that a witness has not seen, no more are looked at.
_MOST_UNSEEN = 64
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@dataclass
class Draft:
    """Records to be written together, and the entries they are about.

    Attributes:
        entries: Entries of the ledger.
        time: Time of the records.
        records: The records, without number and time.
        changed: Entries that were made or changed, once the records are written.
        unseen: Records on the ledger that the witness has not seen.
    """

    entries: Lookup
    time: str
    records: list[Mapping[str, Any]] = field(default_factory=list)
    changed: list[Entry] = field(default_factory=list)
    unseen: list[dict[str, Any]] = field(default_factory=list)


class Replica:
    """The state that follows from a ledger's records, and the end of the log when it was last read.

    Threads may share one. Nothing stays open between calls.

    Attributes:
        path: The ledger's file.
        timeout: Seconds to wait for other processes that have it locked.
        state: The state when the file was last read.
        end: The end of the log at that time.
        index: Places of the records up to there.
        witness: The witness that gets every head; None without.
        lock: Held while the state is used.
    """

    def __init__(self, path: Path, timeout: float, witness: Witness | None) -> None:
        """Reads the file, if there is one."""
        self.path = path
        self.timeout = _validate.non_negative("timeout", timeout)
        self.witness = witness
        self.forget()
        self.lock = threading.RLock()
        # The newest head that the witness has seen, the last ones, and calls that failed when it could not be written.
        self._seen = Head()
        self._contained: set[Head] = set()
        self._unreported: list[tuple[tuple[object, ...], Entry | None]] = []
        if self.path.exists():
            with self._opened() as log:
                self._read(log)
        if self.state.head.number < 0 and witness is not None and witness.path.exists():
            raise WitnessError(
                f"There is no ledger at {self.path}, but {witness.path} has seen one. Restore it from a copy."
            )

    def forget(self) -> None:
        """Forgets all that was read."""
        self.state, self.end, self.index = State(), End(), Index(self.path)
        # Place and length of the last snapshot.
        self._snapshot = (0, 0)

    # ------------------------------------------------------------------ asking and writing

    @contextmanager
    def latest(self) -> Iterator[State]:
        """Yields the state with the records that were added since the last time."""
        with self.lock:
            with self.looking():
                pass
            yield self.state  # others may write meanwhile

    @contextmanager
    def looking(self) -> Iterator[tuple[OpenLog, Lookup]]:
        """Brings the state up to date; yields the log and the entries."""
        with self.lock, self._opened() as log:
            self._read(log)
            self._check_not_empty()
            yield log, Lookup(log, self.index)

    @contextmanager
    def appending(self, *call: object, create: bool = False, whole: bool = False) -> Iterator[Draft]:
        """Yields a draft of new records.

        When the block ends they are written to the disk, and then added to the state. If it raises, they are dropped.
        The ledger must contain what the witness has seen. Nobody else appends to the witness meanwhile, so that of two
        copies of a ledger only one goes on.

        Args:
            call: What the caller was asked for; `repeated` knows it if the witness cannot be written.
            create: Whether to make the file where there is none.
            whole: Whether to read all records, if nothing was read yet, and to make the index anew.
        """
        with self.lock, self._witness_held():
            with self._opened(writing=True, create=create) as log:
                fresh = self.state.head.number < 0
                self._read(log, whole=whole)
                if not create:
                    self._check_not_empty()
                watched = self.witness is not None and (self._seen.number >= 0 or self.witness.path.exists())
                if self.witness is not None and watched and not fresh:
                    self._check_seen(log, self.witness)
                draft = Draft(Lookup(log, self.index), now(self.state), unseen=self._unseen(log))
                yield draft
                self._write(log, draft)
            if self.witness is not None and self._seen.number < self.state.head.number:
                try:
                    self.witness.append(Line(self.state.head, draft.time))
                except LedgerError:
                    if call:
                        self._unreported.append((call, draft.changed[-1] if draft.changed else None))
                    raise
                self._seen = self.state.head

    def repeated(self, *call: object) -> tuple[bool, Entry | None]:
        """Returns whether an equal call failed after its record was written, and the entry that it had made.

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

    def _write(self, log: OpenLog, draft: Draft) -> None:
        """Writes the records of a draft, after a snapshot where one is due."""
        records = list(draft.records)
        if records and self._is_snapshot_due():
            records.insert(0, {"kind": "snapshot", "state": json.loads(self.state.to_text())})
        texts = []
        for number, record in enumerate(records, self.state.head.number + 1):
            texts.append(canonical({"time": draft.time, **record, "number": number}))
            if len(texts[-1]) > LONGEST_RECORD and record["kind"] != "snapshot":
                raise LedgerError("The record is too long for a ledger.")
        if texts:
            log.append(*texts)
        for text, end in written(log, self.end):
            body = self._apply(text, end, draft.entries)
            about = {"reserve": "number", "release": "entry", "abandon": "entry"}.get(body["kind"])
            if about is not None and (entry := draft.entries.get(body[about])) is not None:
                draft.changed.append(entry)
        self.index.save()

    def _is_snapshot_due(self) -> bool:
        place, length = self._snapshot
        since = self.state.head.number - self.state.snapshot
        return since >= SNAPSHOT_EVERY and self.end.size - place >= _MORE_THAN_SNAPSHOT * length

    # ------------------------------------------------------------------ reading

    def _read(self, log: OpenLog, *, whole: bool = False) -> None:
        """Brings the state up to date; with `whole` from all records, if nothing was read yet."""
        if new := self.state.head.number < 0:
            self.forget()
            self.index.load(log)
            if whole:
                self.index = Index(self.path)
            else:
                self._begin_with_snapshot(log)
        if not log.continues(self.end):
            raise went_back(self.path)
        entries = Lookup(log, self.index)
        for text, end in written(log, self.end):
            self._apply(text, end, entries)
        if new and self.witness is not None and self.state.head.number >= 0:
            self._check_seen(log, self.witness)

    def _apply(self, text: str, end: End, entries: Lookup) -> dict[str, Any]:
        """Adds a record to the state and the index."""
        body = self.state.apply(text, end.hash, entries)
        self.index.add(body, end)
        if self.state.snapshot == self.state.head.number:
            self._snapshot = (end.size, end.size - self.end.size)
        self.end = end
        return body

    def _begin_with_snapshot(self, log: OpenLog) -> None:
        """Loads the last snapshot that this release can read, if there is one."""
        for text, place, digest in log.backwards():
            if '"kind":"snapshot"' not in text:
                continue
            try:
                body = read_record(json.loads(text)["number"], text)
                if snapshot_version(body) != STATE_VERSION:
                    continue
                head = Head(body["number"], digest)
                self.state = State.from_text(canonical(body["state"]), head)
            except (ParameterError, LedgerFormatError, LookupError, TypeError, ValueError):
                continue
            self.end = End(head.number + 1, place, digest, written=True)
            self._snapshot = (place, len(text))
            break
        self.index.cut(self.end.records)
        catch_up(self.index, log, self.end.records)
        if len(self.index) != self.end.records or Lookup(log, self.index).end(len(self.index) - 1) != self.end:
            raise LedgerChainError(f"The records of {self.path} are not as many as its last snapshot says.")

    def _unseen(self, log: OpenLog) -> list[dict[str, Any]]:
        """Returns the last records that the witness has not seen; their writers were told of an error, or killed."""
        if self.witness is None:
            return []
        first = max(self._seen.number + 1, self.state.head.number - _MOST_UNSEEN)
        entries = Lookup(log, self.index)
        return [entries.body(number) for number in range(first, self.state.head.number + 1)]

    def _check_seen(self, log: OpenLog, witness: Witness) -> None:
        """Refuses a ledger that does not contain the last heads that the witness has seen."""
        heads = {line.head for line in witness.lines(last=True)}
        entries = Lookup(log, self.index)
        for seen in sorted(heads - self._contained, key=lambda head: head.number):
            if seen.number > self.state.head.number or entries.end(seen.number).hash != seen.hash:
                raise not_contained(self.path, seen, witness)
        self._contained = heads
        self._seen = max(heads, key=lambda head: head.number)

    # ------------------------------------------------------------------ files

    @contextmanager
    def _opened(self, *, writing: bool = False, create: bool = False) -> Iterator[OpenLog]:
        """Yields the log, locked; one of an earlier release is taken over by its first writer."""
        log = RecordLog(self.path, DOMAIN, first=_FIRST, mode=0o666, timeout=self.timeout)
        with self._translated():
            if not create and not self.path.exists():
                raise LedgerAccessError(f"There is no ledger at {self.path}; `cpsgd budget create` makes one.")
            if self.path.exists() and sqlite_files.is_database(self.path):
                if not writing:
                    with sqlite_files.as_log(self.path, self.timeout) as file:
                        yield OpenLog(file, DOMAIN)
                    return
                sqlite_files.take_over(self.path, self.timeout)
            with log.opened(reading=not writing) as opened:
                self._check_beginning(opened)
                yield opened

    def _check_beginning(self, log: OpenLog) -> None:
        """Refuses a file that does not begin as a ledger does; half of a first record is no ledger yet."""
        begins = log.beginning(len(BEGINS) + 8)
        if not begins.startswith(BEGINS[: len(begins)]):
            raise LedgerFormatError(f"{self.path} is not a ledger, or is damaged; restore it from a copy.")
        version = begins[len(BEGINS) :].split(b",")[0]
        if version.isdigit() and int(version) > VERSION:
            raise LedgerFormatError(
                f"{self.path} was written by a newer release (format {int(version)}; this one knows {VERSION}). "
                "Upgrade cpsgd."
            )

    def _check_not_empty(self) -> None:
        if self.state.head.number < 0:
            raise LedgerAccessError(f"{self.path} is empty: it holds no ledger yet. Create a budget first.")

    @contextmanager
    def _witness_held(self) -> Iterator[None]:
        if self.witness is None or not self.witness.path.exists():
            yield
        else:
            with self.witness.held(self.timeout):
                yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns errors of files into the ledger's own."""
        try:
            yield
        except DamagedFileError as error:
            raise LedgerChainError(
                f"{self.path} is damaged: {str(error)[0].lower()}{str(error)[1:]} What was spent is not known; restore "
                "the file from a copy."
            ) from None
        except TimeoutError:
            raise LedgerBusyError(
                f"{self.path}: another process has held it for {self.timeout:g} s; try again."
            ) from None
        except OSError as error:
            reason = f"{self.path}: {error.strerror or error}"
            if error.errno in _NO_ACCESS:
                raise LedgerAccessError(f"{reason}. The file must be writable; nothing was recorded.") from None
            raise LedgerStorageError(
                f"{reason}. Nothing may be released; make room or repair the disk, and ask again."
            ) from None


def clock() -> str:
    """Returns the time of this machine's clock (UTC), as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def now(state: State) -> str:
    """Returns the clock's time, or the last record's if that is later: time never goes back."""
    found = clock()
    return max(found, state.time) if len(found) == len(state.time) else found


def ahead(state: State) -> str:
    """Returns the last record's time if it is over an hour later than this machine's clock, else ""."""
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
