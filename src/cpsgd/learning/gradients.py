"""Clients' updates: one gradient each, the change made by a few local SGD steps, or a sum of clipped gradients.

All clients of a chunk are computed together (`torch.func.vmap` over `torch.func.grad`) if PyTorch can do that with the
model, and otherwise one after the other. A limit on memory sets the size of chunks, so that a cohort may have any size.
It also sets the size of the parts in which a client with many examples is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.codec import clip
from cpsgd.errors import NonFiniteError
from cpsgd.learning.architecture import ModelTraits, gradient_of, math_attention, rehearse
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.dense import dense_factors, dense_layers, scaling, write_dense_gradients
from cpsgd.learning.models import Loss, check_model, trainable
from cpsgd.learning.option_groups import ClientOptions
from cpsgd.learning.recorded_updates import RecordedUpdates, places
from cpsgd.privacy.one_example import example_norm
from cpsgd.simulation.device_kernels import current
from cpsgd.simulation.device_plain import clip_factors
from cpsgd.simulation.products import Layout, Products

Parameters = dict[str, torch.Tensor]
Parts = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Yields the features and labels of a client's examples, some at a time."""

# On a CPU: chunks with more bytes of updates are no faster, and leave the processor's caches.
_CHUNK_BYTES = 1 << 24
# Rows on a GPU begin at multiples of this many numbers.
_ALIGNED = 32
# Recordings have room for a multiple of this many clients.
_RECORDED = 64
# On a CPU: clients whose sums of examples are held at a time.
_CLIENTS = 64
# On a GPU: 32-bit numbers held per coordinate: sums, a gradient, its copies in 32 and 64 bits, and the result.
_SUM_NUMBERS = 7


class ClientUpdates:
    """Clients' updates to a model's trainable parameters, as rows of float32.

    Attributes:
        dim: Number of trainable parameters, d.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        options: ClientOptions = ClientOptions(),
        *,
        memory_limit: int = 1 << 30,
    ) -> None:
        """Checks the model. Updates are computed at the parameters it has at that time.

        Args:
            model: Any module of float32 parameters on one device whose forward pass treats examples independently.
            loss: The loss of a batch, a mean over its examples.
            options: With one local step an update is the gradient of a client's loss. With τ steps it is w⁰ - w^τ,
                where a client takes τ SGD steps from the model w⁰ that it received.
            memory_limit: Bytes that the clients computed together may take.

        Raises:
            ParameterError: The model has no trainable parameters, NaN in them, or layers that mix examples.
        """
        self.local_steps = options.local_steps
        self.memory_limit = _validate.integer("memory_limit", memory_limit, low=1)
        self._rate = options.local_lr
        self._model = model
        self._loss = loss
        check_model(model)
        self._parameters = trainable(model)
        self.dim = sum(p.numel() for p in self._parameters.values())
        self._traits: ModelTraits | None = None
        # On a GPU `torch.func` writes gradients several times. Models of dense layers have a faster way.
        on_gpu = next(iter(self._parameters.values())).device.type == "cuda"
        self._layers = dense_layers(model, loss) if on_gpu and self.local_steps == 1 else None
        self._scaling = scaling(model)
        self._recorded: RecordedUpdates | None = None
        self._recorded_at: tuple[int, ...] = ()
        self._recordable = True
        self._seen: tuple[int, ...] | None = None

    def rehearse(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Tries the model with zeros of these examples' shape; raises whatever the model or the loss raise."""
        self._traits = rehearse(self._model, self._loss, features, labels)

    def chunks(self, batch: Batch) -> Iterator[NDArray[np.float32]]:
        """Yields the updates of the batch's clients, some rows at a time. The next chunk overwrites the last.

        Clients are grouped by their number of examples, so rows may come in another order than clients. The update of
        a client without examples is the zero vector.
        """
        features, labels = torch.from_numpy(batch.features), torch.from_numpy(batch.labels)
        for chunk in self.tensors(features, labels, batch.counts):
            yield chunk.numpy()

    def tensors(
        self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]
    ) -> Iterator[torch.Tensor]:
        """Does the same as `chunks` for examples on the model's device; the rows stay there."""
        starts = np.cumsum(counts) - counts
        # Rows begin at multiples of 128 bytes, which a GPU reads faster; on a CPU they follow each other.
        stride = self.dim if features.device.type == "cpu" else -(-self.dim // _ALIGNED) * _ALIGNED
        # Nearly always all clients have equally many examples; np.unique would be slow.
        alike = bool((counts == counts[:1]).all())
        for count in counts[:1] if alike else np.unique(counts):
            members = np.flatnonzero(counts == count)
            if self._traits is None and len(features):
                self.rehearse(features, labels)
            size = min(self._chunk_size(features, int(count)), len(members))
            # Chunks of nearly equal size.
            size = -(-len(members) // -(-len(members) // size))
            rows: torch.Tensor | None = None
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                if count > 0:
                    examples = starts[chosen, None] + np.arange(count)
                    part, shape = slice(int(examples[0, 0]), int(examples[-1, -1]) + 1), examples.shape
                    if np.array_equal(examples.reshape(-1), np.arange(part.start, part.stop)):
                        # They are contiguous in memory: no copy.
                        x, y = features[part], labels[part]
                        x, y = x.reshape(*shape, *x.shape[1:]), y.reshape(*shape, *y.shape[1:])
                    else:
                        index = torch.from_numpy(examples).to(features.device)
                        x, y = features[index], labels[index]
                    recorded = self._recording(x, y, size, stride) if alike else None
                    if recorded is not None:
                        yield recorded.of(x, y)
                        continue
                if rows is None:
                    make = torch.zeros if count == 0 else torch.empty
                    rows = make((size, stride), device=features.device)[:, : self.dim]
                chunk = rows[: len(chosen)]
                if count > 0:
                    self._write(x, y, chunk)
                yield chunk

    def _recording(self, x: torch.Tensor, y: torch.Tensor, size: int, stride: int) -> RecordedUpdates | None:
        """Returns a recording (a CUDA graph) for clients of this shape; None if it is impossible or the shape is new.

        A shape is recorded when it comes for the second time: by then everything is compiled.
        """
        traits = self._traits
        if x.device.type != "cuda" or self._layers is not None or traits is None:
            return None
        if not (traits.together and traits.repeats and self._recordable):
            return None
        own = places([*self._model.parameters(), *self._model.buffers()])
        if self._recorded is not None and self._recorded_at == own and self._recorded.fits(x, y):
            return self._recorded
        shape = (*x.shape[1:], *y.shape[1:])
        if self._seen != shape:
            self._seen = shape
            return None
        # Sampled cohorts differ in size, so that there is room for a few clients more.
        capacity = min(-(-size // _RECORDED) * _RECORDED, max(size, self._chunk_size(x, x.shape[1])))
        # The new recording needs the memory of the old one.
        self._recorded = None
        torch.cuda.empty_cache()
        rows = torch.empty((capacity, stride), device=x.device)[:, : self.dim]
        try:
            self._recorded, self._recorded_at = RecordedUpdates(self._write, x, y, rows), own
        except RuntimeError:  # it cannot be recorded, for example because the GPU is full
            self._recordable = False
        return self._recorded

    def large(self, parts: Parts, count: int) -> torch.Tensor:
        """Returns the update of one client with more examples than fit in memory, as a single row.

        Args:
            parts: Called for every local step; yields features and labels of some of the client's examples at a time.
            count: Number of the client's examples.
        """

        def smaller() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for x, y in parts():
                if self._traits is None:
                    self.rehearse(x, y)
                most = self._part_size()
                yield from zip(torch.split(x, most), torch.split(y, most), strict=True)

        with math_attention():
            found = self._update(smaller, count)
        return torch.cat([part.reshape(-1) for part in found.values()])[None]

    @property
    def is_dense(self) -> bool:
        """Whether the model is made of dense layers on a GPU; then no layer draws random numbers."""
        return self._layers is not None

    @property
    def layout(self) -> Layout | None:
        """Layout of an update in terms of `products`; None for models that are not dense."""
        if self._layers is None:
            return None
        return Layout(tuple((layer.out_features, layer.in_features) for layer in self._layers))

    def products(self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]) -> Products | None:
        """Returns all updates as factors of outer products; None if the model is not dense or counts differ from 1."""
        layout = self.layout
        if self._layers is None or layout is None or len(counts) == 0 or not (counts == 1).all():
            return None
        factors = torch.empty(len(counts), layout.factors, device=features.device)
        *parts, ones = factors.tensor_split(layout.ends, dim=1)
        ones.fill_(1.0)
        if self._scaling is None:
            parts[0].copy_(features.flatten(1))
        else:
            self._scaling.write(features.flatten(1), parts[0])
        dense_factors(self._layers, labels, parts[::2], parts[1::2])
        return Products(layout, factors)

    def _write(self, features: torch.Tensor, labels: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the updates of clients with equally many examples, [clients, examples, ...], to the rows of `out`."""
        if self._layers is not None and features.shape[1] == 1:
            examples = features[:, 0] if self._scaling is None else self._scaling(features[:, 0])
            with current(out.device):
                write_dense_gradients(self._layers, examples, labels[:, 0], out)
            return
        most = self._part_size()

        def update(x: torch.Tensor, y: torch.Tensor) -> Parameters:
            return self._update(lambda: zip(torch.split(x, most), torch.split(y, most), strict=True), len(x))

        if self._traits is not None and not self._traits.together:
            for row, x, y in zip(out, features, labels, strict=True):
                torch.cat([part.reshape(-1) for part in update(x, y).values()], out=row)
            return
        with math_attention():
            updates = torch.func.vmap(update, randomness="different")(features, labels)
        start = 0
        for name, p in self._parameters.items():
            out[:, start : start + p.numel()] = updates[name].reshape(len(out), -1)
            start += p.numel()

    def _update(self, parts: Parts, count: int) -> Parameters:
        """Returns the update of a client with `count` examples; `parts` is called again for each local step."""
        parameters = {name: p.detach() for name, p in self._parameters.items()}
        of_part = gradient_of(self._model, self._loss)

        def gradient(own: Parameters) -> Parameters:
            total: Parameters | None = None
            # The loss is a mean over examples, and so is its gradient.
            for x, y in parts():
                slope = of_part(own, x, y)
                if len(x) < count:
                    slope = {name: len(x) / count * part for name, part in slope.items()}
                total = slope if total is None else {name: total[name] + slope[name] for name in total}
            assert total is not None
            return total

        if self._rate is None or self.local_steps == 1:
            return gradient(parameters)
        own = parameters
        for _ in range(self.local_steps):
            slope = gradient(own)
            own = {name: own[name] - self._rate * slope[name] for name in own}
        return {name: parameters[name] - own[name] for name in own}

    def _chunk_size(self, features: torch.Tensor, count: int) -> int:
        """Returns the number of clients, with `count` examples each, that are computed together."""
        # An update and its copy to a row; with local steps also the client's model, its gradient and the next model.
        vectors = 2 if self.local_steps == 1 else 5
        if features.device.type == "cuda" and self._layers is None:
            # The GPU's matrix library writes a layer's updates in another order first; a recording keeps a copy.
            vectors += 2
        # Layers' outputs, their gradients and one temporary, for each example.
        outputs = 3 * min(count, self._part_size()) * self._activations
        most = self.memory_limit // (4 * (vectors * self.dim + outputs))
        return max(1, min(most, _CHUNK_BYTES // (4 * self.dim)) if features.device.type == "cpu" else most)

    def _part_size(self) -> int:
        """Returns the number of a client's examples that are computed together."""
        return max(1, self.memory_limit // (12 * max(1, self._activations)))

    @property
    def _activations(self) -> int:
        return 0 if self._traits is None else self._traits.activations


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

    def tensors(
        self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]
    ) -> Iterator[torch.Tensor]:
        """Does the same as `chunks` for examples on the model's device, with clients in another order."""
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
