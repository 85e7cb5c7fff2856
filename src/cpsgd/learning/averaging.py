"""`MovingAverage`: the model that is measured and comes out of a run, instead of the last one.

The rounds' noise moves the model to and fro; an average over the last rounds has less of it. It is computed from the
models alone and costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cpsgd._torch import torch
from cpsgd.learning.architecture import trainable

# In round t at most (t + 1)/(t + 10) is kept, so that the first weights are soon forgotten.
_WARM_UP = 10


class MovingAverage:
    """Of a model's trained parameters: after every round, decay × average + (1 − decay) × model."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        """Begins with the model as it is."""
        self._decay = decay
        self._own: list[torch.Tensor] = list(trainable(model).values())
        self._average = [p.detach().clone() for p in self._own]

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Takes the model after a round into the average."""
        keep = min(self._decay, (number + 1) / (number + _WARM_UP))
        torch._foreach_lerp_(self._average, self._own, 1.0 - keep)

    @torch.no_grad()
    def settle(self) -> None:
        """Makes the average the model."""
        torch._foreach_copy_(self._own, self._average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model is the average."""
        last = [p.detach().clone() for p in self._own]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._own, last)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        for own, saved in zip(self._average, state["average"], strict=True):
            own.copy_(saved)
