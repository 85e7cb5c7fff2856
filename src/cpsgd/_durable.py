"""Files that survive a crash: written as a whole or appended to, on the disk when a call returns; and their locks.

Everything that writes a file which a crash may interrupt does it here:

* `write_file` replaces a file at once: a reader sees all of the old content or all of the new.
* `create_file` makes a new file, and refuses one that exists.
* `append` adds to an open file, and takes back what a full disk left unfinished.
* `seal` and `unseal` put a digest before a file's content, so that damage is noticed.
* `locked` is a lock for a file that is replaced, on a file of its own; `hold` is one on an open file itself.

`cpsgd._record_log` keeps records in a file that only grows.

Why our own: atomicwrites is abandoned, and the standard library has no such writer. filelock makes the locks of files
that are replaced; for a file that must stay as it is, it is no use, for it empties the file that it locks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock

from cpsgd.errors import DamagedFileError

_BINARY = getattr(os, "O_BINARY", 0)
# A draft that is older was left by a writer that was killed.
_ABANDONED_SECONDS = 3600.0
_SEAL = b"cpsgd sealed 1 "


def write_file(path: Path, data: bytes | Callable[[IO[bytes]], object], *, mode: int = 0o666) -> None:
    """Replaces a file: writes a draft beside it, waits for the disk, and moves the draft into place.

    A symbolic link stays, and the file it points to is replaced. A pipe or a device is written to.

    Args:
        path: The file.
        data: The content, or a function that writes it.
        mode: Permissions of the file, less the umask.

    Raises:
        OSError: It cannot be written; the error names the file. What was there before is still there.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                _fill(file, data)
            return
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        _sweep(target)
        create_file(draft, data, mode=mode)
        try:
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        if error.filename is not None:
            raise
        # A full disk is reported without the name of the file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def create_file(path: Path, data: bytes | Callable[[IO[bytes]], object], *, mode: int = 0o666) -> None:
    """Creates a new file, and removes it if writing fails.

    Raises:
        FileExistsError: There is one of that name.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode), "wb") as file:
        try:
            _fill(file, data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _fill(file: IO[bytes], data: bytes | Callable[[IO[bytes]], object]) -> None:
    if isinstance(data, bytes):
        file.write(data)
    else:
        data(file)


def _sweep(target: Path) -> None:
    """Removes drafts of the target that killed writers left, if the folder is readable."""
    with suppress(OSError):
        for entry in os.scandir(target.parent):
            draft = entry.name.startswith(f".{target.name}.") and entry.name.endswith(".tmp")
            if draft and time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                os.unlink(entry.path)


def append(file: IO[bytes], data: bytes) -> None:
    """Adds bytes at the end of an open file and waits for the disk. If that fails, the file is as long as before.

    Past the file's buffer: what a full disk did not take would stay in it, and be written when the file is closed.
    """
    size, left = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[os.write(file.fileno(), left) :]
        os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise
    finally:
        file.seek(0, os.SEEK_END)


def sync_folder(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk.

    Windows keeps a name with its file. In a folder that may be written and not read, there is no way to wait.
    """
    if os.name == "nt" or not os.access(folder, os.R_OK):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ digests


def seal(kind: str, body: bytes) -> bytes:
    """Returns a file's content with its kind and digest before it."""
    return _SEAL + kind.encode("ascii") + b" " + _digest(kind, body) + b"\n" + body


def unseal(kind: str, data: bytes) -> bytes:
    """Checks a sealed content and returns the body that `seal` was given.

    Raises:
        DamagedFileError: The content is of another kind, is not sealed, or was changed.

    Example:
        >>> unseal("seeds", seal("seeds", b"content"))
        b'content'
    """
    head, _, body = data.partition(b"\n")
    begins = _SEAL + kind.encode("ascii") + b" "
    if not head.startswith(begins):
        raise DamagedFileError(f"The file does not begin as one with {kind} does.")
    if head != begins + _digest(kind, body):
        raise DamagedFileError(f"The file with {kind} is damaged: its digest is another.")
    return body


def is_sealed(data: bytes) -> bool:
    """Returns whether `seal` made this; files of earlier releases have no seal."""
    return data.startswith(_SEAL)


def _digest(kind: str, body: bytes) -> bytes:
    return hashlib.sha256(_SEAL + kind.encode("ascii") + b"\n" + body).hexdigest().encode()


# ------------------------------------------------------------------ locks


def lock_of(path: Path) -> FileLock:
    """Returns the lock for a path, which uses a separate file since `path` may be replaced meanwhile.

    The system releases it with the process, too.
    """
    return FileLock(path.with_name(path.name + ".lock"), mode=0o600)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a path: others that lock it wait, so that a read and a later write lose no changes.

    Raises:
        OSError: There is no such folder (filelock would make it), or nothing may be written there.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    with lock_of(path):
        yield


def hold(file: IO[bytes], timeout: float | None = None, *, shared: bool = False) -> None:
    """Locks an open file until it is closed; other processes and threads wait, whatever name they open it by.

    Args:
        file: The file.
        timeout: Seconds to wait for others; None for as long as it takes.
        shared: Whether others may hold it as well, if they share it, too. Windows has no such locks.

    Raises:
        TimeoutError: Others have held it for that long.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not _try_lock(file.fileno(), shared):
        if until is not None and time.monotonic() >= until:
            raise TimeoutError(errno.ETIMEDOUT, "another process has it locked")
        time.sleep(0.005)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int, shared: bool) -> bool:
        os.lseek(descriptor, 1 << 62, os.SEEK_SET)  # far beyond the content, which stays readable
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int, shared: bool) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
