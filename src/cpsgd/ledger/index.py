"""`Index`: the place of each record of a ledger, and the entry that it is about. A cache beside the log.

Row n is about record n and has five integers of 64 bits:

| column | content |
|---|---|
| place | bytes of the log up to the end of the record |
| hash | the first 64 bits of the record's hash |
| kind | a hash of population and run for a reservation, or a small number for every other record |
| value | the round that is reserved, or the number of the entry that is released or given up |
| check | a hash of the row and its number |

There is a row for every record, and each row has its check. So a row that is missing or damaged is noticed, and a round
that is in no row was never reserved. The file (`LEDGER.index`) is never waited for and never needed: rows that do not
fit are thrown away and made anew from the log. One thing the file tells that the log cannot: that the end of the log,
which was there when the row was written, is gone.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsgd._durable import write_file
from cpsgd._record_log import End, OpenLog
from cpsgd.errors import LedgerChainError

_COLUMNS = 5
_ROW = 8 * _COLUMNS
_PLACE, _HASH, _KIND, _VALUE, _CHECK = range(_COLUMNS)
# Kinds of records. Those of reservations with a run are hashes, which are larger.
_OTHER, _RELEASE, _ABANDON, _NO_RUN = range(4)
_LARGE = 1 << 26
_BLOCK = 1 << 14
_CLOSINGS: Final = {"release": _RELEASE, "abandon": _ABANDON}
# The folder may be somebody else's: a pipe would be waited for, and a link followed.
_AS_IT_IS: Final[int] = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))

Rows = NDArray[np.uint64]


class Index:
    """An index of the log's records up to some place: one row per record."""

    def __init__(self, ledger: Path) -> None:
        """Has no rows, and does not look at the file yet.

        Args:
            ledger: The ledger's file, beside which the index lies.
        """
        self._ledger = ledger
        target = ledger.resolve()
        self.path = target.with_name(target.name + ".index")
        self._stored: Rows = np.empty((0, _COLUMNS), np.uint64)
        self._sound = False  # whether the file's rows are ours
        self._clear()

    def _clear(self) -> None:
        """Forgets the rows that were added since the file was read."""
        # Columns of the rows from the file, and hashes of kind and value; made when they are first asked for.
        self._columns: tuple[Rows, Rows, Rows] | None = None
        self._added = array("Q")
        self._rounds: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._closed: dict[int, tuple[int, int]] = {}

    def _searched(self) -> tuple[Rows, Rows, Rows]:
        """Returns kinds, values, and hashes of both, of the rows from the file."""
        if self._columns is None:
            kinds, values = (np.ascontiguousarray(self._stored[:, column]) for column in (_KIND, _VALUE))
            self._columns = kinds, values, _mixed(kinds, values)
        return self._columns

    def __len__(self) -> int:
        """Returns the number of rows, one per record."""
        return len(self._stored) + len(self._added) // _COLUMNS

    # ------------------------------------------------------------------ asking

    def place(self, number: int) -> int:
        """Returns the place in the log where the record of this number ends."""
        if number < len(self._stored):
            return int(self._stored[number, _PLACE])
        return self._added[(number - len(self._stored)) * _COLUMNS]

    def is_reservation(self, number: int) -> bool:
        """Returns whether the record of this number reserves a round."""
        if number >= len(self):
            return False
        if number < len(self._stored):
            return int(self._stored[number, _KIND]) >= _NO_RUN
        return self._added[(number - len(self._stored)) * _COLUMNS + _KIND] >= _NO_RUN

    def reservations(self, population: str, run: str, round: int) -> list[int]:
        """Returns the numbers of the records that reserve a run's round, given up or not.

        Others may be among them, by chance, once in 2^64 times: compare the records.
        """
        kind = _hash_of(population, run)
        key = _mixed(np.array([kind], np.uint64), np.array([round], np.uint64))[0]
        return [*map(int, np.flatnonzero(self._searched()[2] == key)), *self._rounds.get((kind, round), ())]

    def closing(self, number: int) -> int | None:
        """Returns the number of the record by which an entry was released or given up; None while it is open."""
        if (found := self._closed.get(number)) is not None:
            return found[0]
        kinds, values = (column[number:] for column in self._searched()[:2])
        closes = (kinds == np.uint64(_RELEASE)) | (kinds == np.uint64(_ABANDON))
        rows = np.flatnonzero((values == np.uint64(number)) & closes)
        return number + int(rows[0]) if len(rows) else None

    def rounds(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run that were reserved and not given up."""
        kind = _hash_of(population, run)
        kinds, values, _ = self._searched()
        numbers = np.flatnonzero(kinds == np.uint64(kind))
        given_up = {*map(int, values[kinds == np.uint64(_ABANDON)])}
        given_up |= {entry for entry, (_, how) in self._closed.items() if how == _ABANDON}
        stored = zip(map(int, numbers), map(int, values[numbers]), strict=True)
        added = ((number, round) for (of, round), all in self._rounds.items() if of == kind for number in all)
        return frozenset(round for number, round in (*stored, *added) if number not in given_up)

    # ------------------------------------------------------------------ records

    def add(self, body: Mapping[str, Any], end: End) -> None:
        """Adds the row of the next record, which ends here."""
        number, kind, value = len(self), _OTHER, 0
        if body["kind"] == "reserve":
            run, value = body["event"]["run"], body["event"]["round"]
            kind = _hash_of(body["population"], run) if run else _NO_RUN
            if run:
                self._rounds[kind, value].append(number)
        elif body["kind"] in _CLOSINGS:
            kind, value = _CLOSINGS[body["kind"]], body["entry"]
            self._closed[value] = (number, kind)
        self._added.extend((end.size, int(end.hash[:16], 16), kind, value, 0))

    # ------------------------------------------------------------------ the file

    def load(self, log: OpenLog) -> bool:
        """Reads the rows of the file that are about this log, up to the first that is damaged.

        Returns:
            False if the file is damaged, about another log, or made by somebody who may not write to this one.

        Raises:
            LedgerChainError: Records that the file has rows for are no longer in the log.
        """
        self._stored, self._sound, exists = np.empty((0, _COLUMNS), np.uint64), False, False
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | _AS_IT_IS)
            exists = True
            with os.fdopen(descriptor, "rb") as file:
                if self._is_trusted(descriptor):
                    data = file.read()
                    rows = np.frombuffer(data[: len(data) // _ROW * _ROW], "<u8").reshape(-1, _COLUMNS)
                    wrong = np.flatnonzero(_checks(rows, 0) != rows[:, _CHECK])
                    self._stored = rows[: wrong[0]] if len(wrong) else rows
                    self._sound = not len(wrong)
        if len(self._stored) and not self._has(log, 0):
            self._stored, self._sound = self._stored[:0], False
        if len(self._stored) and not self._has(log, -1):
            raise LedgerChainError(
                "The end of the ledger is missing, or another copy is in its place: records that were written to it "
                "are gone. What was spent is not known; restore the newest copy. If nothing was released since this "
                f"one, remove {self.path} to go on."
            )
        self._clear()
        return self._sound or not exists

    def _is_trusted(self, descriptor: int) -> bool:
        """Returns whether the file has a possible size, and an owner who may write to the ledger as well."""
        found, ledger = os.fstat(descriptor), self._ledger.stat()
        known = {ledger.st_uid, *([os.geteuid(), 0] if hasattr(os, "geteuid") else [])}
        # A record is longer than its row, but its end may have been cut off.
        return stat.S_ISREG(found.st_mode) and found.st_size <= max(ledger.st_size, _LARGE) and found.st_uid in known

    def _has(self, log: OpenLog, row: int) -> bool:
        place, digest = (int(self._stored[row, column]) for column in (_PLACE, _HASH))
        return log.hash_before(place)[:16] == f"{digest:016x}"

    def cut(self, count: int) -> None:
        """Forgets all rows but the first ones."""
        self._stored = self._stored[:count]
        self._clear()

    def agrees(self, other: Index) -> bool:
        """Returns whether two indexes have equal rows, as far as both reach."""
        count = min(len(self), len(other))
        return bool(np.array_equal(self._all(0)[:count, :_CHECK], other._all(0)[:count, :_CHECK]))

    def save(self) -> None:
        """Updates the index file, if it is writable. Call it while the log is locked for writing."""
        with suppress(OSError):
            if not self._append() and not self._is_another_file():
                write_file(self.path, self._all(0).tobytes(), mode=self._ledger.stat().st_mode & 0o666)
                self._sound = True

    def _is_another_file(self) -> bool:
        """Returns whether a link, a pipe or a ledger has the name of the index. Such a file stays as it is."""
        try:
            if not stat.S_ISREG(self.path.lstat().st_mode):
                return True
            with self.path.open("rb") as file:
                return file.read(16).startswith((b'{"format":', b"SQLite format 3"))
        except FileNotFoundError:
            return False

    def _append(self) -> bool:
        """Adds the missing rows to the file; returns False if the whole file must be rewritten.

        The file may have been replaced since it was read, by a fork's or by a link to another file. It must end as our
        rows do: its last row has the hash of all records up to it. Rows after those of another ledger would be believed
        together with them. Nothing of a file that ends otherwise is changed.
        """
        if not self._sound:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | _AS_IT_IS)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            if not self._is_trusted(descriptor):
                return False
            first = max(os.fstat(descriptor).st_size // _ROW - 1, 0)
            file.seek(first * _ROW)
            end, ours = file.read(2 * _ROW), self._all(first).tobytes()
            if not ours.startswith(end):
                return False
            file.write(ours[len(end) :])  # the rest of a row, too, whose writer was killed
        return True

    def _all(self, first: int) -> Rows:
        """Returns all rows from row `first` on, with their checks."""
        added = np.array(self._added, "<u8").reshape(-1, _COLUMNS)
        stored = len(self._stored)
        found = added[first - stored :] if first >= stored else np.concatenate([self._stored[first:], added])
        found = found.astype("<u8")
        found[:, _CHECK] = _checks(found, first)
        return found


def _hash_of(population: str, run: str) -> int:
    """Returns a hash of a population and a run, which is larger than other kinds of records."""
    text = repr((population, run)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) | 1 << 8


def _checks(rows: Rows, first: int) -> Rows:
    """Returns a hash of each row and its number."""
    numbers = np.arange(first, first + len(rows), dtype=np.uint64) + np.uint64(1)
    return _mixed(numbers, *(rows[:, column] for column in range(_CHECK)))


def _mixed(first: Rows, *others: Rows) -> Rows:
    """Returns a hash of numbers that stand in the same place. Each step can be undone, so no single change is lost."""
    found = first.copy()
    for start in range(0, len(found), _BLOCK):  # rows that fit into the processor's cache
        mixed = found[start : start + _BLOCK]
        for other in others:
            mixed ^= other[start : start + _BLOCK]
            mixed *= np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return found
