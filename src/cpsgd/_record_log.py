r"""`RecordLog`: records in a file that only grows, each with a hash of itself and all before it.

A record is one line: its text, and

    hash_n = SHA-256(domain + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

in hexadecimal after " #". A record that was changed, removed, inserted or moved breaks the chain and the file is
refused. Only the end can be missing without a trace; against that keep `End` elsewhere, as a ledger's witness does.

**Torn tails.** `append` returns when its records are on the disk. A crash, or a full disk, can leave part of a line
after the last whole one. No caller was told that such a record exists, so the next reader cuts it off. A last line that
lacks only its newline, or has another character there, is whole and stays. Whole lines are never cut off.

**Locks.** `opened` locks the file itself: processes that know it by another name (a hard link, a mount) wait as well.
There is no side file.

**Files of earlier releases** may begin with lines that have no hash. They are handed out like others, and the first
record that is added has them in its hash.

How to use it:

* *Clients' memory* (one line per answered stage): `RecordLog(path, b"cpsgd memory 1\n")`. Check and append in one
  `with log.opened()`: between `records()` and `append` nobody else writes. Lines of 0.1.0 and 0.2.0 are handed out
  as they are. `DamagedFileError` and `OSError` become the room's own refusal.
* *Clients' seeds* are secrets that must be forgotten, so their file is replaced and not appended to:
  `write_file(path, seal("seeds", body), mode=0o600)` of `cpsgd._durable` inside the memory's `opened()`, whose lock
  covers both. A file without a seal (`is_sealed`) is one of 0.2.0. How often seeds were handed on is a record of the
  memory, so an older copy of the seeds is noticed.
* *A ledger*: with the domain `b"cpsgd ledger 1\n"` the hashes are those of `cpsgd.ledger.chain`. `records(after=End)`
  reads only what is new, and `End` is the head.

Why our own: SQLite keeps its journal beside the file's name and so loses records of a file with two names. The logs
that libraries offer (LMDB, LevelDB) are folders with files of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cpsgd._durable import append, hold, sync_folder
from cpsgd.errors import DamagedFileError, ParameterError

_MARK = " #"
_DIGEST = 64
_SUFFIX = len(_MARK) + _DIGEST


@dataclass(frozen=True)
class End:
    """The end of a log, or a place in it.

    Attributes:
        records: Number of records up to here.
        size: Bytes of the file up to here.
        hash: Hash of the last record.
        written: Whether the last record has its hash in the file; those of earlier releases have not.
    """

    records: int = 0
    size: int = 0
    hash: str = bytes(32).hex()
    written: bool = False


class RecordLog:
    """A file of records, which need not exist yet."""

    def __init__(self, path: Path, domain: bytes, *, mode: int = 0o600, timeout: float | None = None) -> None:
        r"""Opens nothing yet.

        Args:
            path: The file.
            domain: Begins what is hashed, and so tells the kinds of logs apart: b"cpsgd memory 1\n".
            mode: Permissions of a new file.
            timeout: Seconds to wait for others that have it open; None for as long as it takes.
        """
        self.path, self.domain = path, domain
        self._mode, self._timeout = mode, timeout

    @contextmanager
    def opened(self) -> Iterator[OpenLog]:
        """Yields the log while nobody else has it open; a new one where there is no file.

        Raises:
            OSError: The file cannot be opened.
            TimeoutError: Others have had it open for too long.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(self.path, flags, self._mode), "r+b") as file:
            hold(file, self._timeout)
            if not os.fstat(file.fileno()).st_size:
                sync_folder(self.path.parent)
            yield OpenLog(file, self.domain)


class OpenLog:
    """A log that is locked.

    Attributes:
        end: The end of what was read or appended last; None before.
    """

    def __init__(self, file: IO[bytes], domain: bytes) -> None:
        """Reads nothing yet."""
        self._file, self._domain = file, domain
        self.end: End | None = None

    def records(self, after: End | None = None) -> list[str]:
        """Returns the texts of all records in order, or of those after a place; mends a torn tail.

        Raises:
            DamagedFileError: A record was changed, removed or inserted, or the file does not continue `after`.
        """
        end = End() if after is None else after
        self._check_continues(end)
        self._file.seek(end.size)
        *lines, tail = self._file.read().split(b"\n")
        found = []
        for line in lines:
            text, end = self._record(line, end)
            found.append(text)
        if tail:
            whole = next((line for line in (tail, tail[:-1]) if self._is_whole(line, end)), b"")
            os.ftruncate(self._file.fileno(), end.size + len(whole))
            if whole:
                append(self._file, b"\n")
                text, end = self._record(whole, end)
                found.append(text)
        self.end = end
        return found

    def append(self, *texts: str) -> End:
        """Adds records; they are on the disk when this returns. Returns the new end.

        A crash may leave the first few of several records. Order them so that these alone do no harm.

        Raises:
            ParameterError: A text is not one line of printable ASCII.
            OSError: The disk is full or fails. Nothing was added.
        """
        if self.end is None:
            self.records()
        end, lines = self.end or End(), []
        for text in texts:
            if not text or not text.isascii() or not text.isprintable():
                raise ParameterError("Expected a record to be one line of printable ASCII characters.")
            digest = self._hash(end.hash, text)
            lines.append(f"{text}{_MARK}{digest}\n".encode("ascii"))
            end = End(end.records + 1, end.size + len(lines[-1]), digest, written=True)
        append(self._file, b"".join(lines))
        self.end = end
        return end

    # ------------------------------------------------------------------ inside

    def _hash(self, previous: str, text: str) -> str:
        return hashlib.sha256(self._domain + bytes.fromhex(previous) + text.encode("ascii")).hexdigest()

    def _record(self, line: bytes, end: End) -> tuple[str, End]:
        """Returns the text of a whole line after this place, and the place after it."""
        number = end.records
        try:
            text = line.decode("ascii")
        except UnicodeDecodeError:
            raise DamagedFileError(f"Record {number} is damaged: it is not text.") from None
        written = text[-_SUFFIX:-_DIGEST] == _MARK
        stated = text[-_DIGEST:]
        if written:
            text = text[:-_SUFFIX]
        digest = self._hash(end.hash, text)
        if stated != digest if written else end.written:
            raise DamagedFileError(
                f"Record {number} does not follow the one before it: one of them was changed, removed or inserted."
            )
        return text, End(number + 1, end.size + len(line) + 1, digest, written)

    def _is_whole(self, line: bytes, end: End) -> bool:
        try:
            return self._record(line, end)[1].written
        except DamagedFileError:
            return False

    def _check_continues(self, end: End) -> None:
        """Refuses a file in which the record before a place is not the one that was there."""
        before = f"{end.hash}\n".encode() if end.written else b""
        self._file.seek(end.size - len(before))
        if self._file.read(len(before)) != before or self._file.seek(0, os.SEEK_END) < end.size:
            raise DamagedFileError("The file does not continue what was read from it before: records are gone.")
