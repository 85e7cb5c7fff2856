"""Files that survive a crash, and what is said where a disk does not take them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpsgd.errors import CheckpointError


def write_file(path: Path, data: bytes) -> None:
    """Writes a file beside, waits for the disk, and moves it into place."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def kept(path: Path, consequence: str = "") -> Iterator[None]:
    """What the system says of a disk that is full, or that may not be written, becomes a `CheckpointError`.

    Args:
        path: What is written, where the system does not name it.
        consequence: What has become of the round, and what to do.

    Example:
        >>> with kept(Path("runs/a/checkpoint.bin"), "Make room."):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        cpsgd.errors.CheckpointError: runs/a/checkpoint.bin: No space left on device. Make room.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{error.filename or path}: {reason}. {consequence}".rstrip()) from error
