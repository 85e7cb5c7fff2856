"""`RunFolder`: where a run lives, is found again after a crash, and nobody else may write; and each round's figures.

What the files are is said in `cpsgd.learning.checkpoints`. Here is when they are written, and who may take up a run: a
process that has it to itself, with the settings and the data it was started with, and with all of its charges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import CheckpointError
from cpsgd.learning import checkpoints
from cpsgd.learning.checkpoints import ChargeLog
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.base import Dataset
from cpsgd.learning.devices import enough_memory


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """How far a run has come, apart from its model and optimizer.

    Attributes:
        round: Number of the next round.
        history: What is known of each round so far.
        cohorts: Who takes part, with the key that the draws follow from.
        run: The run's name on a ledger; None without one.
    """

    round: int
    history: list[RoundMetrics]
    cohorts: Cohorts
    run: str | None


class RunFolder:
    """A run's folder; other processes are kept out of it while this object lives.

    Attributes:
        charged: How many messages each round had that was ever charged, whether or not it was completed.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], dataset: Dataset, *, resume: bool) -> None:
        """Makes the folder, or opens that of a run.

        Args:
            folder: The folder.
            config: The run's settings, as they were and must be when it is resumed.
            dataset: The run's data set, likewise.
            resume: Whether there may be a run in it.

        Raises:
            CheckpointError: The folder is damaged, in use by another process, or holds a run that is not to be resumed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        # Kept apart from the settings, which may be shown: it follows from everybody's data without noise.
        self._data = getattr(dataset, "fingerprint", None)
        # From here on no other process can open the run.
        self._log = ChargeLog(folder / checkpoints.CHARGES)
        self.charged: Mapping[int, int] = self._log.survivors
        begun = self._path.exists()
        if not resume and (begun or self.charged):
            raise CheckpointError(f"{folder} holds a run already; resume it, or choose another directory.")
        if not begun and self.charged:
            raise CheckpointError(f"{folder} has charges but no checkpoint: the run cannot be continued.")

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
        """Brings model and optimizer to where the last complete round left them; None if there is no run yet.

        Raises:
            CheckpointError: The checkpoint is damaged or another run's, or charges are missing from the log.
        """
        if not self._path.exists():
            return None
        state = checkpoints.load(self._path)
        try:
            self._check(state)
            progress = Progress(
                round=int(state["round"]),
                history=[RoundMetrics(**row) for row in state["history"]],
                cohorts=Cohorts(**state["cohorts"]),
                run=state["run"],
            )
            with enough_memory("the model and its optimizer", "use a smaller model."):
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        except (KeyError, TypeError, AttributeError, RuntimeError):
            raise CheckpointError(f"{self._path} does not hold the state of a run of this kind.") from None
        return progress

    def charge(self, number: int, survivors: int) -> None:
        """Writes a round's charge to the disk, unless that was done before the run was interrupted.

        Raises:
            CheckpointError: The round was charged with another number of messages.
        """
        known = self.charged.get(number)
        if known is None:
            self._log.append(number, survivors)
        elif known != survivors:
            raise CheckpointError(f"Round {number} was charged with {known} messages and has {survivors} now.")

    def save(self, progress: Progress, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes a checkpoint, and the metrics for people and plots."""
        rows = [metrics.to_dict() for metrics in progress.history]
        checkpoints.save(
            self._path,
            {
                "config": self._config,
                "data": self._data,
                "run": progress.run,
                "round": progress.round,
                "history": rows,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "cohorts": vars(progress.cohorts),
                "charged": {number: size for number, size in self.charged.items() if number < progress.round},
            },
        )
        checkpoints.write_lines(self._folder / checkpoints.METRICS, rows)

    @property
    def _path(self) -> Path:
        return self._folder / checkpoints.CHECKPOINT

    def _check(self, state: Mapping[str, Any]) -> None:
        """Refuses the checkpoint of another run, and one that has spent what the log does not know of."""
        different = sorted(name for name, value in self._config.items() if state["config"].get(name) != value)
        if state["data"] != self._data:
            different.append("content of the data set")
        if different:
            raise CheckpointError(
                f"The run was started with another {', '.join(different)}; resume it with the same settings."
            )
        if any(self.charged.get(number) != survivors for number, survivors in state["charged"].items()):
            raise CheckpointError(
                "The log of charges does not hold all that the checkpoint has spent: restore it from a copy."
            )
