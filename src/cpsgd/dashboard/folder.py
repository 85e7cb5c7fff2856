"""The folder that is shown: files are found by name and read within bounds.

The author of the folder may be hostile. No symbolic link in it is followed, so nothing outside of it is ever read; only
regular files of a bounded size are read at all; and a name that comes with a request must be one that was found here.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsgd.errors import DataError
from cpsgd.ledger.replica import BEGINS
from cpsgd.ledger.sqlite_files import APPLICATION_ID, MAGIC

# Runs lie in FOLDER/NAME or FOLDER/runs/NAME.
_DEPTH = 2
# Entries of a directory that are looked at, and things of a kind that are shown.
_MOST_ENTRIES, _MOST_FOUND = 2_000, 500
LARGEST_FILE = 64 << 20
"""Bytes of the largest file that is read."""
_LARGEST_AUDIT = 4 << 20
_LARGEST_LEDGER = 512 << 20

CONFIG, SUMMARY, METRICS, CHARGES, BASELINES = (
    "config.json",
    "summary.json",
    "metrics.jsonl",
    "charges.jsonl",
    "baselines",
)
"""What lies in the folder of a run (docs/training.md)."""
_NO_AUDITS = frozenset({CONFIG, SUMMARY, "model-card.json"})
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HEADER = 100
# Where a database, as ledgers of earlier releases are, says that it is a ledger with a rollback journal. One with a
# write-ahead log would be written to when it is read.
_APPLICATION, _JOURNAL = slice(68, 72), slice(18, 20)


@dataclass(frozen=True)
class Folder:
    """A folder with runs, ledgers and audits; names are paths relative to it, with slashes."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Opens a folder; the folder itself may be a link, which is followed once.

        Raises:
            DataError: It is no folder.
        """
        root = path.resolve()
        if not root.is_dir():
            raise DataError(f"There is no folder {path}. Name one that holds runs, ledgers or audits.")
        return cls(root)

    def runs(self) -> list[str]:
        """Returns the names of runs, the latest first."""
        found = [name for name in self._folders() if self._is_run(self.root / name)]
        return sorted(found, key=lambda name: self._changed(name, CONFIG), reverse=True)[:_MOST_FOUND]

    def ledgers(self) -> list[str]:
        """Returns the names of ledgers, sorted."""
        return sorted(name for name in self._files() if _is_ledger(self.root / name))[:_MOST_FOUND]

    def reports(self) -> list[str]:
        """Returns the names of JSON files that may be reports of audits, the latest first."""
        found = [name for name in self._files() if name.endswith(".json") and Path(name).name not in _NO_AUDITS]
        small = [name for name in found if (size := _size(self.root / name)) is not None and size <= _LARGEST_AUDIT]
        return sorted(small, key=self._changed, reverse=True)[:_MOST_FOUND]

    def path(self, name: str, known: list[str]) -> Path:
        """Returns the path of a known name.

        Raises:
            DataError: No file of that name was found.
        """
        if name not in known:
            raise DataError("There is nothing of that name in the folder.")
        return self.root / name

    def _is_run(self, folder: Path) -> bool:
        begun = any(_size(folder / name) is not None for name in (METRICS, CHARGES))
        return begun and _size(folder / CONFIG) is not None

    def _changed(self, *parts: str) -> float:
        try:
            return self.root.joinpath(*parts).lstat().st_mtime
        except OSError:
            return 0.0

    def _folders(self) -> Iterator[str]:
        """Yields the names of the folder and of those inside it, level by level, down to `_DEPTH`."""
        yield "."
        level = [""]
        for _ in range(_DEPTH):
            level = [
                f"{above}{entry.name}"
                for above in (f"{name}/" if name else "" for name in level)
                for entry in _entries(self.root / above)
                if entry.is_dir(follow_symlinks=False) and entry.name != BASELINES
            ]
            yield from level

    def _files(self) -> Iterator[str]:
        for folder in self._folders():
            for entry in _entries(self.root / folder):
                if entry.is_file(follow_symlinks=False):
                    yield entry.name if folder == "." else f"{folder}/{entry.name}"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Returns entries of a folder, without hidden ones and those with unprintable names."""
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.name.isprintable():
                    found.append(entry)
                if len(found) == _MOST_ENTRIES:
                    break
    except OSError:
        return []
    return sorted(found, key=lambda entry: entry.name)


def _size(path: Path) -> int | None:
    """Returns the size of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _is_ledger(path: Path) -> bool:
    size = _size(path)
    if size is None or not _HEADER <= size <= _LARGEST_LEDGER:
        return False
    try:
        header = read_bytes(path, _LARGEST_LEDGER, first=_HEADER)
    except DataError:
        return False
    ours = header[_APPLICATION] == APPLICATION_ID.to_bytes(4, "big") and header[_JOURNAL] == bytes((1, 1))
    return header.startswith(BEGINS) or (header.startswith(MAGIC) and ours)


def subfolders(folder: Path) -> list[str]:
    """Returns the names of folders in a folder; none if it is a link or missing."""
    if folder.is_symlink():
        return []
    return [entry.name for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def signature(path: Path) -> tuple[int, int] | None:
    """Returns a file's time and size, to detect changes; None if it is missing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def read_bytes(path: Path, limit: int = LARGEST_FILE, *, first: int | None = None) -> bytes:
    """Reads a regular file, or its `first` bytes.

    Raises:
        DataError: It is something else (a link or a pipe, say), too large, or cannot be read.
    """
    try:
        # A pipe would otherwise be waited for.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if path.is_symlink():
            raise DataError(f"{path.name} is a link, and links are not followed.")
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path.name} is not a regular file.")
            if status.st_size > limit:
                raise DataError(f"{path.name} has {status.st_size:,} bytes; files of up to {limit:,} are read.")
            return file.read(limit if first is None else first)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}.") from None


def parse(data: bytes) -> Any:
    r"""Parses JSON in UTF-8; replaces lone surrogates ("\ud800"), which no page can show, by "?".

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
    """
    found = json.loads(data.decode("utf-8-sig"))  # from bytes, `json` would let raw surrogates pass
    return _whole_characters(found) if _SURROGATE.search(data) else found


def _whole_characters(found: Any) -> Any:
    if isinstance(found, str):
        return found.encode("utf-8", "replace").decode("utf-8")
    if isinstance(found, list):
        return [_whole_characters(each) for each in found]
    if isinstance(found, dict):
        return {_whole_characters(key): _whole_characters(each) for key, each in found.items()}
    return found


def read_object(path: Path, limit: int = LARGEST_FILE) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        DataError: It holds something else, or cannot be read.
    """
    try:
        found = parse(read_bytes(path, limit))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path.name} is not JSON.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path.name} does not hold a JSON object.")
    return found
