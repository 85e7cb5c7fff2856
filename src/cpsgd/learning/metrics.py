"""The metrics of a run's rounds, their file, and functions that a `Trainer` calls with them after every round.

The file has one line per complete round. A checkpoint holds its length and SHA-256, so that the checkpoint's size does
not grow with the rounds. Lines written after the last checkpoint do not count; a resumed run overwrites them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd._durable import append, sync_folder
from cpsgd.errors import CheckpointError, ParameterError

if TYPE_CHECKING:
    from cpsgd.learning.trainer import Trainer

_ROUND = b'{"round": 0, "released": '
"""A file of metrics begins like this."""
_FIGURES = ("loss", "accuracy", "r_squared", "epsilon", "noise_to_signal", "clip_norm", "survivors")


@dataclass(frozen=True)
class RoundMetrics:
    """Metrics of one round. None of them is computed from clients' data except through the released model.

    Attributes:
        round: Number of the round, from 0.
        released: Whether a mean was released and a step taken. A round is abandoned if too few messages arrived for the
            budget, and lost if the run was killed after its charge.
        survivors: Messages in the sum.
        loss: Mean loss on the test set, if it was evaluated.
        accuracy: Share of the test set classified correctly, if it was evaluated.
        epsilon: ε spent by all rounds so far; None without privacy. With sampling it takes a second to compute, and is
            None in rounds without an evaluation.
        delta: δ of the same guarantee; None without privacy.
        method: Name of the method that proved ε.
        bytes_per_client: Bytes of one message.
        bytes_total: Bytes sent by all clients in all rounds so far.
        noise_to_signal: √E‖noise‖² of the mean over the norm of the released mean; None if nothing was released.
        seconds: Duration of the round on this machine, with evaluation. Not compared.
        r_squared: R² on the test set for labels that are numbers, if it was evaluated; there is then no accuracy.
        clip_norm: The norm that updates were clipped to, if it adapts.
    """

    round: int
    released: bool
    survivors: int
    loss: float | None
    accuracy: float | None
    epsilon: float | None
    delta: float | None
    method: str | None
    bytes_per_client: int
    bytes_total: int
    noise_to_signal: float | None
    seconds: float = field(compare=False)
    r_squared: float | None = None
    clip_norm: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return dict(vars(self))


Callback = Callable[["Trainer", RoundMetrics], object]
"""Called with the trainer and a round's metrics when the round is complete."""


def tensorboard(folder: Path | str) -> Callback:
    """Returns a callback that writes the rounds' metrics for TensorBoard, which must be installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ParameterError("Writing for TensorBoard needs it: pip install tensorboard.") from None
    writer: Any = SummaryWriter(str(folder))

    def write(trainer: Trainer, metrics: RoundMetrics) -> None:
        for name in _FIGURES:
            value = getattr(metrics, name)
            if value is not None:
                writer.add_scalar(name, value, metrics.round + 1)
        writer.flush()

    return write


@contextmanager
def disk_errors(path: Path, consequence: str = "") -> Iterator[None]:
    """Turns an `OSError`, such as of a full disk, into a `CheckpointError` with its consequence and a remedy.

    Example:
        >>> with disk_errors(Path("runs/a/checkpoint.bin"), "Make room."):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        cpsgd.errors.CheckpointError: runs/a/checkpoint.bin: No space left on device. Make room.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{error.filename or path}: {reason}. {consequence}".rstrip()) from error


class MetricsFile:
    """The file of a run's metrics, for people and plots, and for the run itself when it is resumed."""

    def __init__(self, path: Path) -> None:
        """Starts a new file: the first round overwrites an old one."""
        self._path = path
        self._rounds = self._size = 0
        self._hash = hashlib.sha256()

    def begin(self) -> None:
        """Raises `CheckpointError` if there is a file that no run has written: a new run would overwrite it."""
        if self._path.exists():
            with disk_errors(self._path), self._path.open("rb") as file:
                if not _ROUND.startswith(file.read(len(_ROUND))):
                    raise CheckpointError(f"{self._path} holds no metrics of a run: choose another directory.")

    def restore(self, extent: Mapping[str, Any]) -> list[RoundMetrics]:
        """Returns the rounds before a checkpoint; `extent` is what `append` returned for it."""
        size = extent["bytes"]
        if not isinstance(size, int) or size < 0:
            raise CheckpointError(f"The checkpoint does not say how much of {self._path} it is after.")
        with (
            disk_errors(self._path, "Without it the run cannot go on: restore it from a copy."),
            self._path.open("rb") as file,
        ):
            data = file.read(size)
        found = hashlib.sha256(data)
        if len(data) != size or found.hexdigest() != extent["sha256"]:
            raise CheckpointError(
                f"{self._path} does not hold the rounds that the checkpoint is after: it was changed or cut short. "
                "Restore it from a copy."
            )
        rows = [RoundMetrics(**json.loads(line)) for line in data.splitlines()]
        self._rounds, self._size, self._hash = len(rows), size, found
        return rows

    def append(self, history: Sequence[RoundMetrics]) -> dict[str, Any]:
        """Writes rounds added since the last call; returns the file's length and SHA-256, which `restore` takes."""
        new = "".join(json.dumps(metrics.to_dict()) + "\n" for metrics in history[self._rounds :]).encode()
        if not self._path.exists():
            self._path.touch()
            sync_folder(self._path.parent)
        with self._path.open("r+b") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                raise CheckpointError(f"{self._path} was cut short while the run went on: who else writes to it?")
            file.truncate(self._size)
            append(file, new)
        self._hash.update(new)
        self._rounds, self._size = len(history), self._size + len(new)
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}
