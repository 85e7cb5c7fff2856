r"""`RecordLog`: records in a file that only grows, each with a hash of itself and all before it.

A record is one line: its text, and

    hash_n = SHA-256(domain + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

in hexadecimal after " #". A record that was changed, removed, inserted or moved breaks the chain and the file is
refused. Only the end can be missing without a trace; against that keep `End` elsewhere, as a ledger's witness does.

**Torn tails.** `append` returns when its records are on the disk. A crash, or a full disk, can leave part of a line
after the last whole one. No caller was told that such a record exists, so the next writer cuts it off, and readers skip
it. A last line that lacks only its newline, or has another character there, is whole and stays. Whole lines are never
cut off. A file without a whole line may be somebody else's: unless its bytes can begin a first record (`first`), it is
refused and stays as it is.

**Locks.** `opened` locks the file itself: processes that know it by another name (a hard link, a mount) wait as well.
There is no side file. Readers share the lock. Only `append` changes the file.

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
* *A ledger* has the domain `b"cpsgd ledger 1\n"`. `read(after=End)` reads only what is new, and `End` has the head.

Why our own: SQLite keeps its journal beside the file's name and so loses records of a file with two names. The logs
that libraries offer (LMDB, LevelDB) are folders with files of their own.
"""

from __future__ import annotations

import errno
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
_CHUNK = 1 << 20
_SAME_DIGITS = bytes.maketrans(b"123456789abcdef", b"0" * 15)
# Nobody writes longer lines; a file without newlines is not read as a whole.
_LONGEST_LINE = 1 << 28
# A file that is replaced while its lock is waited for is opened again, this often at most.
_MOST_REPLACED = 100


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

    def __init__(
        self, path: Path, domain: bytes, *, first: bytes = b"", mode: int = 0o600, timeout: float | None = None
    ) -> None:
        r"""Stores the settings; opens no file yet.

        Args:
            path: The file.
            domain: Begins what is hashed, and so tells the kinds of logs apart: b"cpsgd memory 1\n".
            first: An example of a first line, if all are equal but for digits: what is torn must begin as it does.
            mode: Permissions of a new file.
            timeout: Seconds to wait for others that have it open; None for as long as it takes.
        """
        self.path, self.domain, self._first = path, domain, first
        self._mode, self._timeout = mode, timeout

    @contextmanager
    def opened(self, *, reading: bool = False) -> Iterator[OpenLog]:
        """Yields the log while nobody else writes to it; a new one where there is no file.

        Args:
            reading: Whether others may read it meanwhile. Then nothing is written, and the file must exist.

        Raises:
            OSError: The file cannot be opened.
            TimeoutError: Others have had it open for too long.
        """
        flags = os.O_RDONLY if reading else os.O_RDWR | os.O_CREAT | os.O_APPEND
        for _ in range(_MOST_REPLACED):
            descriptor = os.open(self.path, flags | getattr(os, "O_BINARY", 0), self._mode)
            with os.fdopen(descriptor, "rb" if reading else "r+b") as file:
                hold(file, self._timeout, shared=reading)
                if not _is_at(file, self.path):
                    continue  # the file was replaced while this waited
                if not reading and not os.fstat(file.fileno()).st_size:
                    sync_folder(self.path.parent)
                yield OpenLog(file, self.domain, self._first)
                return
        raise TimeoutError(errno.ETIMEDOUT, "the file is replaced again and again", str(self.path))


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class OpenLog:
    """An open and locked log.

    Attributes:
        end: The end of what was read or appended last; None before.
    """

    def __init__(self, file: IO[bytes], domain: bytes, first: bytes = b"") -> None:
        """Takes a locked file, what is hashed first, and an example of a first line; reads nothing yet."""
        self._file, self._domain, self._first = file, domain, first
        self.end: End | None = None

    def records(self, after: End | None = None) -> list[str]:
        """Returns the texts of all records in order, or of those after a place; skips a torn tail.

        Raises:
            DamagedFileError: A record was changed, removed or inserted, the file does not continue `after`, or it is
                no log.
        """
        return [text for text, _ in self.read(after)]

    def read(self, after: End | None = None) -> Iterator[tuple[str, End]]:
        """Yields the text of each record and the place after it, from a place on. Skips a torn tail.

        Raises:
            DamagedFileError: As for `records`.
        """
        end = End() if after is None else after
        if not self.continues(end):
            raise DamagedFileError("The file does not continue what was read from it before: records are gone.")
        place, rest = end.size, b""
        while chunk := self._bytes(place, _CHUNK):
            place += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                raise DamagedFileError(f"Record {end.records} is damaged: it has no end.")
            for line in lines:
                text, end = self._record(line, end)
                yield text, end
        if rest:
            whole = next((line for line in (rest, rest[:-1]) if self._is_whole(line, end)), b"")
            if whole:
                text, end = self._record(whole, end)
                yield text, end
            elif not end.records and not _shape(self._first).startswith(_shape(rest)):
                raise DamagedFileError("The file holds no record, and begins as none does: is it another file?")
        self.end = end

    def backwards(self) -> Iterator[tuple[str, int, str]]:
        """Yields text, place of the end, and hash of each record, the last one first; skips a torn tail.

        Each is checked against the hash of the one before it, as that stands in the file.

        Raises:
            DamagedFileError: A record does not follow the one before it.
        """
        lines = self._lines_backwards()
        tail, ends = next(lines)
        waiting, torn = ([tail, tail[:-1]] if tail else []), True
        for line, next_ends in lines:
            found = self._following(waiting, _stated(line))
            if found is not None:
                yield found[0], ends + 1, found[1]
            elif not torn:
                raise DamagedFileError("A record does not follow the one before it: one of them was changed.")
            waiting, ends, torn = [line], next_ends, False
        if (found := self._following(waiting, End().hash)) is not None:
            yield found[0], ends + 1, found[1]
        elif not torn:
            raise DamagedFileError("The first record is damaged.")

    def _lines_backwards(self) -> Iterator[tuple[bytes, int]]:
        """Yields the text after the last newline, then the lines before it, each with the place of its end."""
        place = ends = self._file.seek(0, os.SEEK_END)
        rest = b""
        while place:
            start = max(0, place - _CHUNK)
            rest, *lines = (self._bytes(start, place - start) + rest).split(b"\n")
            place = start
            for line in reversed(lines):
                yield line, ends
                ends -= len(line) + 1
        yield rest, ends

    def _following(self, lines: list[bytes], before: str) -> tuple[str, str] | None:
        """Returns text and hash of the first line that is a valid record after one with this hash."""
        for line in lines:
            text, stated = line[:-_SUFFIX].decode("ascii", "replace"), _stated(line)
            if stated and before and text.isascii() and _hash(self._domain, before, text) == stated:
                return text, stated
        return None

    def beginning(self, count: int) -> bytes:
        """Returns the first bytes of the file, at most this many."""
        return self._bytes(0, count)

    def hash_before(self, place: int) -> str:
        """Returns the hash of the record that ends at this place, as it stands in the file; empty if none does."""
        return _stated(self._bytes(place - _SUFFIX - 1, _SUFFIX)) if place > _SUFFIX else ""

    def record(self, start: End, size: int) -> tuple[str, End]:
        """Returns the record between two places, and the second place.

        Raises:
            DamagedFileError: There is no such record.
        """
        return self._record(self._bytes(start.size, size - start.size - 1), start)

    def continues(self, end: End) -> bool:
        """Returns whether the record before a place is unchanged; its newline may be missing if it is the last."""
        size = self._file.seek(0, os.SEEK_END)
        if not end.written:
            return size >= end.size
        if self.hash_before(end.size) != end.hash:
            return False
        return size <= end.size or self._bytes(end.size - 1, 1) == b"\n"

    def append(self, *texts: str) -> End:
        """Adds records; they are on the disk when this returns. Returns the new end.

        What is torn is cut off before, and a newline that is missing is put back. A crash may leave the first few of
        several records. Order them so that these alone do no harm.

        Raises:
            ParameterError: A text is not one line of printable ASCII.
            OSError: The disk is full or fails. Nothing was added.
        """
        if self.end is None:
            self.records()
        start = end = self.end or End()
        lines = []
        for text in texts:
            if not text or not text.isascii() or not text.isprintable():
                raise ParameterError("Expected a record to be one line of printable ASCII characters.")
            line, end = record_line(self._domain, text, end)
            lines.append(line)
        unended = start.size > 0 and self._bytes(start.size - 1, 1) != b"\n"
        if self._file.seek(0, os.SEEK_END) != start.size - unended:
            os.ftruncate(self._file.fileno(), start.size - unended)
        append(self._file, b"\n" * unended + b"".join(lines))
        self.end = end
        return end

    # ------------------------------------------------------------------ inside

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
        digest = _hash(self._domain, end.hash, text)
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

    def _bytes(self, place: int, count: int) -> bytes:
        self._file.seek(place)
        return self._file.read(count)


def record_line(domain: bytes, text: str, after: End) -> tuple[bytes, End]:
    """Returns the line of a record that follows a place, and the place after it."""
    digest = _hash(domain, after.hash, text)
    line = f"{text}{_MARK}{digest}\n".encode("ascii")
    return line, End(after.records + 1, after.size + len(line), digest, written=True)


def _shape(line: bytes) -> bytes:
    """Returns a line with one digit in place of all digits, which may be hexadecimal."""
    return line.translate(_SAME_DIGITS)


def _hash(domain: bytes, previous: str, text: str) -> str:
    return hashlib.sha256(domain + bytes.fromhex(previous) + text.encode("ascii")).hexdigest()


def _stated(line: bytes) -> str:
    """Returns the hash that is written at the end of a line; empty if there is none."""
    digest = line[-_DIGEST:]
    whole = line[-_SUFFIX:-_DIGEST] == _MARK.encode() and set(digest) <= set(b"0123456789abcdef")
    return digest.decode("ascii") if whole else ""
