"""Clients' updates on a GPU recorded as a CUDA graph: one launch instead of hundreds by `torch.func`.

It is only for models whose forward pass is deterministic (`ModelTraits.repeats`). A recording reads the parameters at
their addresses, and is valid as long as these do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpsgd._torch import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes the updates of clients, [clients, examples, ...] and their labels, to rows."""


class RecordedUpdates:
    """The updates of at most `capacity` clients with equally many examples.

    Attributes:
        capacity: Number of clients that are computed each time, requested or not.
    """

    def __init__(self, write: Write, features: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> None:
        """Records `write` for one client per row of `rows`, with these shapes of features and labels.

        Raises whatever `write` raises, and `RuntimeError` if it cannot be recorded.
        """
        self.capacity = len(rows)
        self._rows = rows
        self._features = torch.zeros((len(rows), *features.shape[1:]), dtype=features.dtype, device=features.device)
        self._labels = torch.zeros((len(rows), *labels.shape[1:]), dtype=labels.dtype, device=labels.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rows.device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            write(self._features, self._labels, rows)

    def fits(self, features: torch.Tensor, labels: torch.Tensor) -> bool:
        """Returns whether the recording fits these clients."""
        pairs = (features, self._features), (labels, self._labels)
        alike = all(new.shape[1:] == own.shape[1:] and new.dtype == own.dtype for new, own in pairs)
        return alike and len(features) <= self.capacity

    def of(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the updates of these clients, one row each; the next call overwrites them."""
        self._features[: len(features)].copy_(features)
        self._labels[: len(labels)].copy_(labels)
        self._graph.replay()
        return self._rows[: len(features)]


def places(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Returns the tensors' addresses."""
    return tuple(tensor.data_ptr() for tensor in tensors)
