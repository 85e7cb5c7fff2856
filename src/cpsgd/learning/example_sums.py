"""Clients' sums of clipped gradients, for the privacy of single examples.

`cpsgd.privacy.one_example` has the definition and the proof, and `cpsgd.planner.examples` makes plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.codec import clip
from cpsgd.errors import NonFiniteError
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.gradients import ClientUpdates, Parts
from cpsgd.privacy.one_example import example_norm
from cpsgd.simulation.device_plain import clip_factors

# On a CPU: clients whose sums of examples are held at a time.
_CLIENTS = 64
# On a GPU: 32-bit numbers held per coordinate: sums, a gradient, its copies in 32 and 64 bits, and the result.
_SUM_NUMBERS = 7


class ExampleSums:
    """Clients' sums of clipped gradients, one per example, as rows of float32: the unit of privacy is one example.

    Sums are computed in float64 and rounded once. If a client has more than `examples` examples, the first ones count.
    A gradient with NaN or infinity counts as zero: whatever an example is, it moves the sum by at most its clip norm.
    """

    def __init__(self, gradients: ClientUpdates, clip_norm: float, examples: int) -> None:
        """Takes gradients of single examples from `gradients`; `clip_norm` bounds the norm of a client's sum."""
        self.dim = gradients.dim
        self._gradients = gradients
        self._examples = examples
        self._bound = example_norm(clip_norm, examples)

    def chunks(self, batch: Batch) -> Iterator[NDArray[np.float32]]:
        """Yields the sums of the batch's clients in their order, some rows at a time."""
        counts = np.minimum(batch.counts, self._examples)
        # An example's position among those of its client.
        places = np.arange(len(batch.labels)) - np.repeat(np.cumsum(batch.counts) - batch.counts, batch.counts)
        kept = np.flatnonzero(places < self._examples)
        singles = Batch(batch.features[kept], batch.labels[kept], np.ones(len(kept), dtype=np.int64))
        gradients = itertools.chain.from_iterable(self._gradients.chunks(singles))
        size = max(1, min(_CLIENTS, self._gradients.memory_limit // (16 * self.dim)))
        for start in range(0, len(counts), size):
            part = counts[start : start + size]
            sums = np.zeros((len(part), self.dim))
            for client, count in enumerate(part):
                self._add(itertools.islice(gradients, int(count)), sums[client])
            yield sums.astype(np.float32)

    def of_client(
        self, features: NDArray[np.float32], labels: NDArray[np.int64], counted: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Returns the sum of one client's clipped gradients where `counted`; all gradients are computed."""
        singles = Batch(features, labels, np.ones(len(labels), dtype=np.int64))
        totals = np.zeros((2, self.dim))
        for gradient, own in zip(itertools.chain.from_iterable(self._gradients.chunks(singles)), counted, strict=True):
            self._add([gradient], totals[int(own)])
        found: NDArray[np.float32] = totals[1].astype(np.float32)
        return found

    def tensors(
        self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]
    ) -> Iterator[torch.Tensor]:
        """Yields sums as `chunks` does, for examples on the model's device and with clients in another order."""
        starts, counts = np.cumsum(counts) - counts, np.minimum(counts, self._examples)
        # Clients with many examples first, so that those with another example left are always the first rows.
        order = np.argsort(-counts, kind="stable")
        size = max(1, self._gradients.memory_limit // (4 * _SUM_NUMBERS * self.dim))
        for start in range(0, len(order), size):
            own = order[start : start + size]
            sums = torch.zeros((len(own), self.dim), dtype=torch.float64, device=features.device)
            for place in range(int(counts[own[0]])):
                chosen = torch.from_numpy(starts[own[counts[own] > place]] + place).to(features.device)
                singles = features[chosen], labels[chosen], np.ones(len(chosen), dtype=np.int64)
                row = 0
                for gradients in self._gradients.tensors(*singles):
                    sums[row : row + len(gradients)] += self._clipped(gradients)
                    row += len(gradients)
            yield sums.to(torch.float32)

    def large(self, parts: Parts, count: int) -> torch.Tensor:
        """Returns the sum of one client with more examples than fit in memory; see `ClientUpdates.large`."""
        total, left = torch.zeros(self.dim, dtype=torch.float64), min(count, self._examples)
        for x, y in parts():
            total, kept = total.to(x.device), min(left, len(x))
            for gradients in self._gradients.tensors(x[:kept], y[:kept], np.ones(kept, dtype=np.int64)):
                if x.device.type == "cpu":
                    self._add(gradients.numpy(), total.numpy())
                else:
                    total += self._clipped(gradients).sum(dim=0)
            left -= kept
            if left == 0:
                break
        return total.to(torch.float32)[None]

    def _clipped(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradients, each clipped, in float64."""
        return gradients * clip_factors(gradients, self._bound * (1.0 - clip.MARGIN))[:, None]

    def _add(self, gradients: Iterable[NDArray[np.float32]], total: NDArray[np.float64]) -> None:
        """Adds clipped gradients to `total`."""
        for gradient in gradients:
            try:
                factor = clip.factor(gradient, self._bound)
            except NonFiniteError:
                continue
            total += gradient * np.float64(factor)
