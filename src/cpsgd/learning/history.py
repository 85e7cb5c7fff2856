"""A run's history: one line per complete round, in a file that only grows.

A checkpoint says how long the file was and what its SHA-256 was, so that it has the same size however many rounds there
were. What was written after the last checkpoint does not count, and is overwritten when the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpsgd._durable import sync_folder
from cpsgd.errors import CheckpointError
from cpsgd.learning.durable import kept


@dataclass(frozen=True)
class RoundMetrics:
    """One round's figures. None of them is computed from clients' data except through the released model.

    Attributes:
        round: Number of the round, from 0.
        released: Whether a mean was released and a step taken. A round is abandoned if so few messages arrived that the
            budget would not hold, and lost if the run was killed after its charge.
        survivors: Messages in the sum.
        loss: Mean loss on the test set, where it was evaluated.
        accuracy: Share of the test set classified correctly, where it was evaluated.
        epsilon: ε spent by all rounds so far; None without privacy, and in rounds where it was not computed (with
            sampling it takes a second, and is computed only where the model is evaluated).
        delta: δ that goes with it; None without privacy.
        method: Name of the method that proved ε.
        bytes_per_client: Bytes of one message.
        bytes_total: Bytes sent by all clients in all rounds so far.
        noise_to_signal: √E‖noise‖² of the mean over the norm of the released mean; None where nothing was released.
        seconds: How long the round took on this machine, evaluation included. Not compared.
        r_squared: R² on the test set, where labels are numbers to predict and it was evaluated; there is no accuracy.
        clip_norm: The norm that updates were clipped to, where it adapts.
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
        """Plain JSON values."""
        return dict(vars(self))


class History:
    """The file of a run's metrics, for people and plots, and for the run itself when it is resumed."""

    def __init__(self, path: Path) -> None:
        """Starts anew: what a file of that name holds is overwritten by the first round."""
        self._path = path
        self._rounds = self._size = 0
        self._hash = hashlib.sha256()

    def restore(self, extent: Mapping[str, Any]) -> list[RoundMetrics]:
        """The rounds that a checkpoint counts on, as `append` described them.

        Raises:
            CheckpointError: The file is missing, or does not begin with them.
        """
        size = extent["bytes"]
        if not isinstance(size, int) or size < 0:
            raise CheckpointError(f"The checkpoint does not say how much of {self._path} it is after.")
        with (
            kept(self._path, "Without it the run cannot go on: restore it from a copy."),
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
        """Writes the rounds that are new since the last call, and waits until they are on the disk.

        Returns:
            How much of the file there is now, as plain values: what `restore` takes.

        Raises:
            CheckpointError: The file has become shorter: somebody else writes to it.
        """
        new = "".join(json.dumps(metrics.to_dict()) + "\n" for metrics in history[self._rounds :]).encode()
        if not self._path.exists():
            self._path.touch()
            sync_folder(self._path.parent)
        with self._path.open("r+b") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                raise CheckpointError(f"{self._path} was cut short while the run went on: who else writes to it?")
            file.seek(self._size)
            file.write(new)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._hash.update(new)
        self._rounds, self._size = len(history), self._size + len(new)
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}
