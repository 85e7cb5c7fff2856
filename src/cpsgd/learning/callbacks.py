"""Functions that a `Trainer` calls after every round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd.errors import ParameterError
from cpsgd.learning.history import RoundMetrics

if TYPE_CHECKING:
    from cpsgd.learning.trainer import Trainer

Callback = Callable[["Trainer", RoundMetrics], object]
"""Called with the trainer and a round's metrics when the round is complete."""

_FIGURES = ("loss", "accuracy", "r_squared", "epsilon", "noise_to_signal", "clip_norm", "survivors")


def tensorboard(folder: Path | str) -> Callback:
    """Writes the rounds' metrics for TensorBoard.

    Raises:
        ParameterError: TensorBoard is not installed.
    """
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
