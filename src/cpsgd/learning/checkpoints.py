"""The folder of a run: an atomic checkpoint after a round, and a log of charges that is written before a release.

A run is resumed by one process at a time, with the settings and data it was started with and with all of its charges.
Its folder, a `RunFolder`, holds

* `checkpoint.bin`: the last complete round (magic, SHA-256 of the rest, then PyTorch's archive of tensors and plain
  values). It is replaced atomically. Its size does not grow with the rounds: it has lengths and hashes of the others.
* `charges.jsonl`: one line per round, `{"round": 7, "survivors": 9990}` and a checksum, on disk before the round's mean
  is used. So a crash can lose a round's work but not its cost. The process that runs the run locks this file.
* `metrics.jsonl`: one line per complete round (`cpsgd.learning.metrics`), on disk before the checkpoint that needs it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import weakref
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from cpsgd import _validate
from cpsgd._durable import append, lock_of, sync_folder, write_file
from cpsgd._torch import torch
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.populations import Dataset
from cpsgd.learning.devices import enough_memory
from cpsgd.learning.metrics import MetricsFile, RoundMetrics, disk_errors
from cpsgd.protocol import Protocol

# Version 1 held the whole history. It can be read; the next checkpoint has version 2.
_KIND, _VERSION, _KNOWN = b"cpsgd checkpoint ", b"2\n", (b"1\n", b"2\n")
_MAGIC = _KIND + _VERSION
_DIGEST_BYTES = 32
_CHARGE = b'{"round": '
"""A log of charges begins like this."""
CHECKPOINT, CHARGES, METRICS = "checkpoint.bin", "charges.jsonl", "metrics.jsonl"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint of tensors and plain values, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    body = buffer.getvalue()
    write_file(path, _MAGIC + hashlib.sha256(body).digest() + body)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; raises `CheckpointError` if it is damaged or something else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror}.") from None
    if not data.startswith(_KIND):
        raise CheckpointError(f"{path} is not a checkpoint.")
    if data[len(_KIND) : len(_MAGIC)] not in _KNOWN:
        raise CheckpointError(f"{path} is not a checkpoint of this release: resume the run with the one it is of.")
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
    """Returns the content of PyTorch's archive, or None. It may be hostile: a checksum is no signature."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            # PyTorch stores without compressing; a compressed archive could unpack to any size.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return None
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception:  # zipfile and PyTorch let all kinds of errors through from a damaged archive
        return None


def begun_protocol(folder: Path) -> Protocol | None:
    """Returns the protocol of the run in a folder; None if there is no run, or it sends floats."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        fields = load(path)["config"]["mechanism"].get("protocol")
        return None if fields is None else Protocol.from_dict(fields)
    except (KeyError, TypeError, AttributeError, ParameterError):
        raise CheckpointError(f"{path} does not hold the state of a run of this kind.") from None


class _Lock:
    """Locks a file against other processes while this object lives; the lock ends with the process, too."""

    def __init__(self, path: Path) -> None:
        lock = lock_of(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise CheckpointError(
                f"Another process is at work on the run in {path.parent}. Wait for it, stop it, or use another folder."
            ) from None
        weakref.finalize(self, lock.release, force=True)


# A process may open its own run again, to continue after an interruption. A fork is another process.
_locks: weakref.WeakValueDictionary[tuple[int, Path], _Lock] = weakref.WeakValueDictionary()


class ChargeLog:
    """The rounds charged so far, in a file that only grows and that other processes cannot open meanwhile."""

    def __init__(self, path: Path) -> None:
        """Opens the log, or starts one, and removes a line that a crash left unfinished.

        Raises `CheckpointError` if a line is damaged, or another process has the log open.
        """
        if not path.exists():
            # The folder's entry must be on the disk before a charge in the file counts.
            path.touch()
            sync_folder(path.parent)
        own = os.getpid(), path.resolve()
        self._lock = _locks.get(own) or _locks.setdefault(own, _Lock(path))
        self.path = path
        self.survivors: dict[int, int] = {}
        data = path.read_bytes()
        complete = data.rfind(b"\n") + 1
        self._hash = hashlib.sha256(data[:complete])
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
        self._last = max(self.survivors, default=-1)
        if complete < len(data):
            if not self.survivors and not data.startswith(_CHARGE[: len(data)]):
                raise CheckpointError(f"{path} is no log of charges: choose another directory.")
            os.truncate(path, complete)
        self._size = complete

    def append(self, round: int, survivors: int) -> None:
        """Writes a charge and waits until it is on the disk; raises `CheckpointError` if others write, too."""
        text = json.dumps({"round": round, "survivors": survivors}).encode()
        line = text + b" %08x\n" % zlib.crc32(text)
        with self.path.open("ab") as file:
            if file.tell() != self._size:
                raise CheckpointError(f"{self.path} has changed since it was read: does the run go on twice at once?")
            append(file, line)
            self._size = file.tell()
        self._hash.update(line)
        self.survivors[round] = survivors
        self._last = max(self._last, round)

    def extent(self, before: int) -> dict[str, Any]:
        """Returns the number of charged rounds before `before`, and the SHA-256 of their lines."""
        if self._last < before:
            return {"rounds": len(self.survivors), "sha256": self._hash.hexdigest()}
        # After a crash there is a charge for a round that is not complete.
        lines = self.path.read_bytes()[: self._size].splitlines(keepends=True)
        earlier = [line for line, number in zip(lines, self.survivors, strict=True) if number < before]
        return {"rounds": len(earlier), "sha256": hashlib.sha256(b"".join(earlier)).hexdigest()}


@dataclass(frozen=True)
class Progress:
    """State of a run apart from its model and optimizer: the next round, and the run's name on a ledger, if any."""

    round: int
    history: list[RoundMetrics]
    cohorts: Cohorts
    run: str | None


class RunFolder:
    """A run's folder, locked against other processes while this object lives.

    Attributes:
        charged: Number of messages of each round that was charged, complete or not.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], dataset: Dataset, *, resume: bool) -> None:
        """Makes the folder, or with `resume` opens that of a run with the same settings and data.

        Raises `CheckpointError` if it is damaged, in use, or holds a run that is not to be resumed.
        """
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._path, self._history = folder / CHECKPOINT, MetricsFile(folder / METRICS)
        self._config = config
        # Kept apart from the settings, which may be shown: it is computed from clients' data without noise.
        self._data = getattr(dataset, "fingerprint", None)
        # From here on no other process can open the run.
        with disk_errors(folder / CHARGES):
            self._log = ChargeLog(folder / CHARGES)
        self.charged: Mapping[int, int] = self._log.survivors
        begun = self._path.exists()
        if not resume and (begun or self.charged):
            raise CheckpointError(f"{folder} holds a run already; resume it, or choose another directory.")
        if not begun:
            self._history.begin()
        if not begun and self.charged:
            raise CheckpointError(f"{folder} has charges but no checkpoint: the run cannot be continued.")

    def restore(self, model: torch.nn.Module, parts: Mapping[str, Any]) -> Progress | None:
        """Restores the model and other parts, by name, from the checkpoint; returns None if there is no run yet.

        Raises `CheckpointError` if the checkpoint is damaged or another run's, or the log lacks charges.
        """
        if not self._path.exists():
            return None
        state = load(self._path)
        try:
            self._check(state)
            progress = Progress(
                round=int(state["round"]),
                history=self._rows(state["history"]),
                cohorts=Cohorts(**state["cohorts"]),
                run=state["run"],
            )
            with enough_memory("the model and its optimizer", "use a smaller model."):
                model.load_state_dict(state["model"])
                for name, part in parts.items():
                    part.load_state_dict(state[name])
        except (KeyError, TypeError, json.JSONDecodeError, AttributeError, RuntimeError):
            raise CheckpointError(f"{self._path} does not hold the state of a run of this kind.") from None
        return progress

    def charge(self, number: int, survivors: int) -> None:
        """Writes a round's charge to the disk, unless it was written before an interruption.

        Raises:
            CheckpointError: It was written with another number of messages, or it cannot be written.
        """
        known = self.charged.get(number)
        if known is None:
            with disk_errors(self._log.path, f"Round {number} was not computed; make room, and resume the run."):
                self._log.append(number, survivors)
        elif known != survivors:
            raise CheckpointError(f"Round {number} was charged with {known} messages and has {survivors} now.")

    def save(self, progress: Progress, model: torch.nn.Module, parts: Mapping[str, Any]) -> None:
        """Writes new metrics, and then a checkpoint; if that fails, the last checkpoint is as it was."""
        with disk_errors(self._path, f"{progress.round:,} rounds are complete: make room and save again, or go on."):
            save(
                self._path,
                {
                    "config": self._config,
                    "data": self._data,
                    "run": progress.run,
                    "round": progress.round,
                    "history": self._history.append(progress.history),
                    "model": model.state_dict(),
                    **{name: part.state_dict() for name, part in parts.items()},
                    "cohorts": vars(progress.cohorts),
                    "charged": self._log.extent(progress.round),
                },
            )

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for the checkpoint of another run, or one with charges that the log lacks."""
        ours, theirs = self._config, state["config"]
        different = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if state["data"] != self._data:
            different.append("content of the data set")
        if different:
            raise CheckpointError(
                f"The run was started with another {', '.join(different)}; resume it with the same settings."
            )
        if not self._holds(state["charged"], state["round"]):
            raise CheckpointError(
                "The log of charges does not hold all that the checkpoint has spent: restore it from a copy."
            )

    # Before version 2 a checkpoint held all rounds: as lists and dictionaries in 0.1, later as text and a tensor.

    def _holds(self, charged: Any, before: int) -> bool:
        """Returns whether the log has all charges of a checkpoint."""
        if isinstance(charged, dict) and "sha256" in charged:
            return bool(self._log.extent(before) == charged)
        pairs = charged.items() if isinstance(charged, dict) else charged.tolist()
        return all(self.charged.get(number) == survivors for number, survivors in pairs)

    def _rows(self, history: Any) -> list[RoundMetrics]:
        if isinstance(history, dict):
            return self._history.restore(history)
        rows = map(json.loads, history.splitlines()) if isinstance(history, str) else history
        return [RoundMetrics(**row) for row in rows]
