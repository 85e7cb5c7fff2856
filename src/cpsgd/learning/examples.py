"""Example-level privacy: a client sums its examples' clipped gradients, and one example is what is protected.

What that protects, and why, is in `cpsgd.privacy.examples`; plans for it are in `cpsgd.planner.examples`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import clip
from cpsgd.errors import NonFiniteError
from cpsgd.learning.datasets.base import Batch
from cpsgd.privacy.examples import example_norm

if TYPE_CHECKING:
    from cpsgd.learning.gradients import ClientUpdates

# Clients whose sums are held at a time.
_CLIENTS = 64


class ExampleSums:
    """Clients' sums of their examples' clipped gradients, as rows of float32.

    Sums are taken in float64 and rounded once. Of a client with more than `examples` examples the first ones count. A
    gradient with NaN or infinity counts as zero: whatever an example is, it moves the sum by at most D.
    """

    def __init__(self, gradients: ClientUpdates, clip_norm: float, examples: int) -> None:
        """Takes gradients of single examples from `gradients`; `clip_norm` is that of a client's sum."""
        self.dim = gradients.dim
        self._gradients = gradients
        self._examples = examples
        self._bound = example_norm(clip_norm, examples)

    def chunks(self, batch: Batch) -> Iterator[NDArray[np.float32]]:
        """The sums of the batch's clients in their order, some rows at a time."""
        counts = np.minimum(batch.counts, self._examples)
        # Places within clients, of which the first ones count.
        places = np.arange(len(batch.labels)) - np.repeat(np.cumsum(batch.counts) - batch.counts, batch.counts)
        kept = np.flatnonzero(places < self._examples)
        gradients = self._each(Batch(batch.features[kept], batch.labels[kept], np.ones(len(kept), dtype=np.int64)))
        size = max(1, min(_CLIENTS, self._gradients.memory_limit // (16 * self.dim)))
        for start in range(0, len(counts), size):
            part = counts[start : start + size]
            sums = np.zeros((len(part), self.dim))
            for client, count in enumerate(part):
                for gradient in itertools.islice(gradients, int(count)):
                    try:
                        factor = clip.factor(gradient, self._bound)
                    except NonFiniteError:
                        continue
                    sums[client] += gradient * np.float64(factor)
            yield sums.astype(np.float32)

    def _each(self, singles: Batch) -> Iterator[NDArray[np.float32]]:
        for chunk in self._gradients.chunks(singles):
            yield from chunk
