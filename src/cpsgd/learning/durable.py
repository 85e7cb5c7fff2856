"""What is said where a disk does not take a run's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpsgd.errors import CheckpointError


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
