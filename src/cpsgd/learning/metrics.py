"""What is known after a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
