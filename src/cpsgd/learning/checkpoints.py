"""What survives a crash: an atomic checkpoint after a round, and a log of charges that is written before a release.

A run directory holds

* `checkpoint.bin`: the last complete round (magic, SHA-256 of the rest, then PyTorch's archive of tensors and plain
  values). It is written beside and moved into place, so that a reader finds the old one or the new one whole.
* `charges.jsonl`: one line per round, `{"round": 7, "survivors": 9990}` and a checksum, on disk before the round's mean
  is used. So a crash can lose a round's work but not its cost. Whoever runs the run holds a lock on this file.
* `metrics.jsonl`: one line per complete round, for people and plots. Nothing is read back from it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import CheckpointError

_MAGIC = b"cpsgd checkpoint 1\n"
_DIGEST_BYTES = 32
CHECKPOINT, CHARGES, METRICS = "checkpoint.bin", "charges.jsonl", "metrics.jsonl"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint of tensors and plain values, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    body = buffer.getvalue()
    _replace(path, _MAGIC + hashlib.sha256(body).digest() + body)


def load(path: Path) -> dict[str, Any]:
    """Reads what `save` wrote.

    Raises:
        CheckpointError: It is damaged or something else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror}.") from None
    if not data.startswith(_MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this release.")
    start = len(_MAGIC) + _DIGEST_BYTES
    if hashlib.sha256(data[start:]).digest() != data[len(_MAGIC) : start]:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: its checksum does not match. Restore it from a copy, or start a new "
            "run; the cost of the old one stays spent."
        )
    state = _unpacked(data[start:])
    if not isinstance(state, dict):
        raise CheckpointError(f"The checkpoint {path} does not hold the state of a run.")
    return state


def _unpacked(body: bytes) -> Any:
    """What PyTorch's archive holds, or None. A checksum is no signature: the archive may be anybody's."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            # PyTorch stores without compressing; a compressed archive could unpack to any size.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return None
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception:  # zipfile and PyTorch let all kinds of errors through from a damaged archive
        return None


class _Lock:
    """Keeps other processes away from a file while this object lives. The system ends it with the process, too."""

    def __init__(self, path: Path) -> None:
        import fcntl

        descriptor = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another process is at work on the run in {path.parent}. Wait for it, stop it, or use another folder."
            ) from None


# A process may open its own run again, to go on after an interruption. A fork is another process.
_locks: weakref.WeakValueDictionary[tuple[int, Path], _Lock] = weakref.WeakValueDictionary()


class ChargeLog:
    """The rounds charged so far, in a file that only grows and that no other process may open meanwhile."""

    def __init__(self, path: Path) -> None:
        """Opens the log, or starts one, and cuts off a line that a crash left unfinished.

        Raises:
            CheckpointError: A line is damaged, or another process has the log open.
        """
        if not path.exists():
            # The file's own entry must be on the disk before anything that is written to it can count.
            path.touch()
            _sync_folder(path.parent)
        own = os.getpid(), path.resolve()
        self._lock = _locks.get(own) or _locks.setdefault(own, _Lock(path))
        self._path = path
        self.survivors: dict[int, int] = {}
        data = path.read_bytes()
        complete = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:complete].splitlines(), 1):
            try:
                text, checksum = line.rsplit(b" ", 1)
                if zlib.crc32(text) != int(checksum, 16):
                    raise ValueError("checksum")
                charge = json.loads(text)
                charged = _validate.integer("round", charge["round"], low=0)
                if charged in self.survivors:
                    raise ValueError("a round charged twice")
                self.survivors[charged] = _validate.integer("survivors", charge["survivors"], low=0)
            except (ValueError, KeyError, TypeError, RecursionError):
                raise CheckpointError(
                    f"Line {number} of {path} is damaged: what was spent is not known. Restore the file from a copy."
                ) from None
        if complete < len(data):
            os.truncate(path, complete)
        self._size = complete

    def append(self, round: int, survivors: int) -> None:
        """Writes a charge and waits until it is on the disk.

        Raises:
            CheckpointError: Someone else writes to the log, too. Nothing was written.
        """
        text = json.dumps({"round": round, "survivors": survivors}).encode()
        with self._path.open("ab") as file:
            if file.tell() != self._size:
                raise CheckpointError(f"{self._path} has changed since it was read: does the run go on twice at once?")
            file.write(text + b" %08x\n" % zlib.crc32(text))
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()
        self.survivors[round] = survivors


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON object per line, replacing the file as a whole."""
    _replace(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _replace(path: Path, data: bytes) -> None:
    """Writes a file beside, waits for the disk, and moves it into place."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
