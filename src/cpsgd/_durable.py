"""Files that are on the disk when a call returns, and locks that other processes wait for; on every system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Writes a file beside, waits for the disk, and moves it into place."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(beside, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk. Windows keeps a name with its file."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_of(path: Path) -> FileLock:
    """The lock that goes with a path, on a file of its own: `path` itself may be replaced while it is held.

    The system releases it with the process, too.
    """
    return FileLock(path.with_name(path.name + ".lock"), mode=0o600)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps others that lock the same path waiting, so that a file read here and written back loses nothing.

    Raises:
        OSError: There is no such folder (filelock would make it), or nothing may be written there.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    with lock_of(path):
        yield
