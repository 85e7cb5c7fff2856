"""Files that appear whole or not at all, and the protocol file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cpsgd.protocol import Protocol

# A protocol is a dozen short fields; whatever is longer is another file given by mistake.
_LONGEST_PROTOCOL = 1 << 16
_VECTOR_SUFFIXES = (".npy", ".csv")


def write(path: Path, body: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file by what `body` writes, at once: whoever opens it sees all of the old or all of the new."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        # A pipe or a device is written to, not replaced.
        with target.open("wb") as file:
            body(file)
        return
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            body(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file by these bytes."""
    write(path, lambda file: file.write(data))


def check_output(path: Path, *inputs: Path) -> None:
    """Refuses, before any work is done, a place that cannot be written to or one of the inputs.

    Raises:
        ParameterError: The folder does not exist, or the file is one of `inputs`.
    """
    if not path.resolve().parent.is_dir():
        raise ParameterError(f"Cannot write {path}: the folder does not exist.")
    if path.is_dir():
        raise ParameterError(f"Cannot write {path}: it is a folder.")
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise ParameterError(f"Writing {path} would overwrite the input of the same name; choose another --out.")


def check_vector_output(path: Path, *inputs: Path) -> None:
    """`check_output` for a vector, whose suffix says the format."""
    if path.suffix.lower() not in _VECTOR_SUFFIXES:
        raise ParameterError(f"Expected --out to end in .npy or .csv, got {path.name}.")
    check_output(path, *inputs)


def write_vector(path: Path, vector: NDArray[np.float32]) -> None:
    """Writes a vector as .npy, or as the single line of a .csv; a table as so many lines."""
    import numpy as np

    if path.suffix.lower() == ".csv":
        # Nine digits tell all float32 numbers apart.
        write(path, lambda file: np.savetxt(file, np.atleast_2d(vector), fmt="%.9g", delimiter=","))
    else:
        write(path, lambda file: np.save(file, vector))


def read_protocol(path: Path) -> Protocol:
    """The protocol in a JSON file.

    Raises:
        ParameterError: The file does not hold one.
    """
    from cpsgd.protocol import Protocol

    with path.open("rb") as file:
        text = file.read(_LONGEST_PROTOCOL + 1)
    if len(text) > _LONGEST_PROTOCOL:
        raise ParameterError(f"{path} is too long to be a protocol file.")
    try:
        return Protocol.from_json(text)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps others that lock the same path waiting, so that a file read here and written back loses nothing."""
    import fcntl

    # The lock is on a file of its own: `path` itself is replaced while the lock is held.
    with path.with_name(path.name + ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
