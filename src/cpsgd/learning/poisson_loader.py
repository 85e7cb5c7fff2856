"""Batches in which each example is with the same probability, independently: what amplification by sampling needs.

The draws come from a cryptographic stream, because ε rests on nobody knowing them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.randomness import Keystream

_WORD = 2.0**64
# Examples whose coins are tossed at a time.
_COINS = 1 << 20


@dataclass(frozen=True)
class MicroBatch:
    """Part of a batch.

    Attributes:
        count: Examples that count, the first ones; where none was drawn there is one that does not.
        last: Whether it ends the batch, so that the optimizer takes a step.
    """

    count: int
    last: bool


class PoissonLoader:
    """Loads batches of a `DataLoader`'s data set: each example with probability batch size / examples.

    Attributes:
        rate: The probability, rounded up to a multiple of 2^-64.
        steps: Batches per epoch, as many as the loader has.
        expected: Mean number of examples in a batch.
        current: The micro-batch that was yielded last.
    """

    def __init__(self, loader: Any, *, micro_batch: int | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Takes data set, batch size, workers and collation from a loader.

        Args:
            loader: A `torch.utils.data.DataLoader` of a data set that has a length.
            micro_batch: The most examples that are yielded at a time; a batch may come in several.
            share: Rank and number of processes that share the examples.
        """
        _validate.instance("data_loader", loader, torch.utils.data.DataLoader)
        dataset: Any = loader.dataset
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise ParameterError("A batch is drawn from all examples: use a data set with a length and an index.")
        if loader.batch_size is None:
            raise ParameterError("The data loader has no batch_size, which is the mean size of the batches to draw.")
        size = len(dataset)
        if not size:
            raise ParameterError("The data loader has no examples.")
        if not 1 <= loader.batch_size <= size:
            raise ParameterError(f"Expected a batch size of 1 to {size:,}, the number of examples.")
        self.examples, self.expected = size, float(loader.batch_size)
        self._threshold = math.ceil(loader.batch_size / size * _WORD)
        self.rate = min(1.0, self._threshold / _WORD * (1.0 + 1e-15))
        self.steps: int = math.ceil(size / loader.batch_size)
        self.current: MicroBatch | None = None
        self._micro = micro_batch
        self._rank, self._processes = share
        self._drawn: deque[MicroBatch] = deque()
        options = {
            name: getattr(loader, name) for name in ("num_workers", "collate_fn", "pin_memory", "worker_init_fn")
        }
        self._loader: Any = torch.utils.data.DataLoader(dataset, batch_sampler=_Batches(self), **options)
        if _are_tensors(loader):
            self._loader = _Tensors(dataset.tensors, self)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        self._drawn.clear()
        for batch in self._loader:
            self.current = self._drawn.popleft()
            yield batch
        self.current = None

    def batches(self) -> Iterator[list[int]]:
        """Yields the examples of an epoch's micro-batches, and describes each in `current`."""
        for _ in range(self.steps):
            drawn = self._draw()
            size = self._micro or max(1, len(drawn))
            parts = [drawn[start : start + size] for start in range(0, len(drawn), size)] or [drawn]
            for number, part in enumerate(parts):
                self._drawn.append(MicroBatch(len(part), number + 1 == len(parts)))
                # The place of an example that does not count is taken by any: models need not know empty batches.
                yield part.tolist() or [0]

    def _draw(self) -> NDArray[np.int64]:
        own = range(self._rank, self.examples, self._processes)
        if self._threshold >= 1 << 64:
            return np.asarray(own)
        stream, found = Keystream(), []
        for start in range(0, len(own), _COINS):
            count = min(_COINS, len(own) - start)
            words = stream.take(8 * count).view("<u8")
            found.append(np.flatnonzero(words < np.uint64(self._threshold)) + start)
        return own.start + own.step * np.concatenate(found)


def _are_tensors(loader: Any) -> bool:
    """Returns whether a loader only stacks examples of a `TensorDataset`."""
    plain = loader.collate_fn is torch.utils.data.default_collate and not loader.num_workers and not loader.pin_memory
    return plain and type(loader.dataset) is torch.utils.data.TensorDataset


class _Tensors:
    """Batches of tensors, picked at once instead of one example after the other, on the tensors' device."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], of: PoissonLoader) -> None:
        self._tensors, self._of = tensors, of

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for numbers in self._of.batches():
            chosen = torch.tensor(numbers)
            yield [tensor[chosen.to(tensor.device)] for tensor in self._tensors]


class _Batches:
    """The batch sampler of the inner loader."""

    def __init__(self, of: PoissonLoader) -> None:
        self._of = of

    def __iter__(self) -> Iterator[list[int]]:
        return self._of.batches()

    def __len__(self) -> int:
        return self._of.steps
