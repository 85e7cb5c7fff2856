"""What clients compute: one gradient each, the change made by a few local SGD steps, or a sum over their examples.

All clients of a chunk are computed together (`torch.func.vmap` over `torch.func.grad`) where PyTorch can do that with
the model, and otherwise one after the other. Chunks are as large as a limit on memory allows, so that a cohort may have
any size; so are the parts of a client with many examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.codec import clip
from cpsgd.errors import NonFiniteError
from cpsgd.learning.architecture import (
    Loss,
    ModelTraits,
    check_model,
    gradient_of,
    one_formula_for_attention,
    rehearse,
    trainable,
)
from cpsgd.learning.datasets.base import Batch
from cpsgd.learning.datasets.device import fused_kernels
from cpsgd.learning.options import ClientOptions
from cpsgd.privacy.examples import example_norm
from cpsgd.simulation.device import current
from cpsgd.simulation.device_cuda import Layout, Products

Parameters = dict[str, torch.Tensor]
Parts = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Gives the features and labels of a client's examples, some at a time."""

# On a CPU: past this many bytes of updates a larger chunk is no faster, and leaves the processor's caches.
_CHUNK_BYTES = 1 << 24
# Rows on a GPU begin at multiples of this many numbers.
_ALIGNED = 32
# Clients whose sums of examples are held at a time.
_CLIENTS = 64


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
        """Looks at the model, which stays where it is: later changes of its parameters count.

        Args:
            model: Any module of float32 parameters on one device whose forward pass treats examples independently.
            loss: The loss of a batch, a mean over its examples.
            options: With one local step an update is the gradient of a client's loss. With τ steps it is w⁰ - w^τ,
                where a client takes τ SGD steps from the model w⁰ it was sent.
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
        # On a GPU the general way writes gradients several times; it is kept for all other models, and on the CPU.
        on_gpu = next(iter(self._parameters.values())).device.type == "cuda"
        self._layers = dense_layers(model, loss) if on_gpu and self.local_steps == 1 else None

    def rehearse(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Tries the model with zeros in the shape of these examples; raises whatever the model or the loss raise."""
        self._traits = rehearse(self._model, self._loss, features, labels)

    def chunks(self, batch: Batch) -> Iterator[NDArray[np.float32]]:
        """The updates of the batch's clients, some rows at a time.

        Clients are grouped by their number of examples, so rows may come in another order than clients. A client
        without examples has the zero vector for an update. A yielded chunk is overwritten by the next.
        """
        features, labels = torch.from_numpy(batch.features), torch.from_numpy(batch.labels)
        for chunk in self.tensors(features, labels, batch.counts):
            yield chunk.numpy()

    def tensors(
        self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]
    ) -> Iterator[torch.Tensor]:
        """As `chunks`, for examples on the model's device; the rows stay there."""
        starts = np.cumsum(counts) - counts
        # Rows begin at multiples of 128 bytes, which a GPU reads faster; on a CPU they follow each other.
        stride = self.dim if features.device.type == "cpu" else -(-self.dim // _ALIGNED) * _ALIGNED
        # NumPy's unique takes a while, and nearly always all clients have equally many.
        for count in counts[:1] if (counts == counts[:1]).all() else np.unique(counts):
            members = np.flatnonzero(counts == count)
            if self._traits is None and len(features):
                self.rehearse(features, labels)
            size = min(self._chunk_size(features, int(count)), len(members))
            # Without examples an update is zero; otherwise every coordinate is written.
            make = torch.zeros if count == 0 else torch.empty
            rows = make((size, stride), device=features.device)[:, : self.dim]
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                chunk = rows[: len(chosen)]
                if count > 0:
                    examples = starts[chosen, None] + np.arange(count)
                    part, shape = slice(int(examples[0, 0]), int(examples[-1, -1]) + 1), examples.shape
                    if np.array_equal(examples.reshape(-1), np.arange(part.start, part.stop)):
                        # Neighbours in memory: no copy.
                        x, y = features[part], labels[part]
                        self._write(x.reshape(*shape, *x.shape[1:]), y.reshape(*shape, *y.shape[1:]), chunk)
                    else:
                        index = torch.from_numpy(examples).to(features.device)
                        self._write(features[index], labels[index], chunk)
                yield chunk

    def large(self, parts: Parts, count: int) -> torch.Tensor:
        """The update of one client with more examples than are to be in memory at once, as a single row.

        Args:
            parts: Called for every local step; gives features and labels of some of the client's examples at a time.
            count: How many there are.
        """

        def smaller() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for x, y in parts():
                if self._traits is None:
                    self.rehearse(x, y)
                most = self._part_size()
                yield from zip(torch.split(x, most), torch.split(y, most), strict=True)

        with one_formula_for_attention():
            found = self._update(smaller, count)
        return torch.cat([part.reshape(-1) for part in found.values()])[None]

    @property
    def is_dense(self) -> bool:
        """Whether updates of clients with one example each are `products`; no layer of such a model draws anything."""
        return self._layers is not None

    def products(self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]) -> Products | None:
        """All updates at once as products that are not written out; None where they are no such products."""
        if self._layers is None or len(counts) == 0 or not (counts == 1).all():
            return None
        layout = Layout(tuple((layer.out_features, layer.in_features) for layer in self._layers))
        parts = [part for back, incoming in dense_factors(self._layers, features, labels) for part in (incoming, back)]
        return Products(layout, torch.cat([*parts, torch.ones_like(parts[0][:, :1])], dim=1))

    def _write(self, features: torch.Tensor, labels: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the updates of clients with equally many examples, [clients, examples, ...], to the rows of `out`."""
        if self._layers is not None and features.shape[1] == 1:
            with current(out.device):
                write_dense_gradients(self._layers, features[:, 0], labels[:, 0], out, fused_kernels(out.device))
            return
        most = self._part_size()

        def update(x: torch.Tensor, y: torch.Tensor) -> Parameters:
            return self._update(lambda: zip(torch.split(x, most), torch.split(y, most), strict=True), len(x))

        if self._traits is not None and not self._traits.together:
            for row, x, y in zip(out, features, labels, strict=True):
                torch.cat([part.reshape(-1) for part in update(x, y).values()], out=row)
            return
        with one_formula_for_attention():
            updates = torch.func.vmap(update, randomness="different")(features, labels)
        start = 0
        for name, p in self._parameters.items():
            out[:, start : start + p.numel()] = updates[name].reshape(len(out), -1)
            start += p.numel()

    def _update(self, parts: Parts, count: int) -> Parameters:
        """The update of a client with `count` examples, which come in parts, and again for each local step."""
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
        """How many clients with `count` examples each are computed together."""
        # An update and its copy to a row; with local steps the client's own model, its gradient and the next model.
        vectors = 2 if self.local_steps == 1 else 5
        # Layers' outputs, their gradients and one temporary, for each example.
        outputs = 3 * min(count, self._part_size()) * self._activations
        most = self.memory_limit // (4 * (vectors * self.dim + outputs))
        return max(1, min(most, _CHUNK_BYTES // (4 * self.dim)) if features.device.type == "cpu" else most)

    def _part_size(self) -> int:
        """How many examples of a client are computed together."""
        return max(1, self.memory_limit // (12 * max(1, self._activations)))

    @property
    def _activations(self) -> int:
        return 0 if self._traits is None else self._traits.activations


class ExampleSums:
    """Clients' sums of their examples' clipped gradients, as rows of float32: one example is what is protected.

    What that means is in `cpsgd.privacy.examples`; plans for it are in `cpsgd.planner.examples`. Sums are taken in
    float64 and rounded once. Of a client with more than `examples` examples the first ones count. A gradient with NaN
    or infinity counts as zero: whatever an example is, it moves the sum by at most D.
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
        singles = Batch(batch.features[kept], batch.labels[kept], np.ones(len(kept), dtype=np.int64))
        gradients = itertools.chain.from_iterable(self._gradients.chunks(singles))
        size = max(1, min(_CLIENTS, self._gradients.memory_limit // (16 * self.dim)))
        for start in range(0, len(counts), size):
            part = counts[start : start + size]
            sums = np.zeros((len(part), self.dim))
            for client, count in enumerate(part):
                self._add(itertools.islice(gradients, int(count)), sums[client])
            yield sums.astype(np.float32)

    def large(self, parts: Parts, count: int) -> torch.Tensor:
        """The sum of one client with more examples than are to be in memory at once; see `ClientUpdates.large`."""
        total, left = np.zeros(self.dim), min(count, self._examples)
        for x, y in parts():
            kept = min(left, len(x))
            singles = Batch(x[:kept].numpy(), y[:kept].numpy(), np.ones(kept, dtype=np.int64))
            self._add(itertools.chain.from_iterable(self._gradients.chunks(singles)), total)
            left -= kept
            if left == 0:
                break
        return torch.from_numpy(total.astype(np.float32))[None]

    def _add(self, gradients: Iterable[NDArray[np.float32]], total: NDArray[np.float64]) -> None:
        """Adds clipped gradients."""
        for gradient in gradients:
            try:
                factor = clip.factor(gradient, self._bound)
            except NonFiniteError:
                continue
            total += gradient * np.float64(factor)


def dense_layers(model: torch.nn.Module, loss: Loss) -> list[torch.nn.Linear] | None:
    """The layers of a model of linear layers with ReLUs between them and cross-entropy for a loss; None for others."""
    if type(model) is not torch.nn.Sequential or loss is not torch.nn.functional.cross_entropy:
        return None
    modules = list(model)
    layers = [module for module in modules[::2] if type(module) is torch.nn.Linear]
    between = [module for module in modules[1::2] if type(module) is torch.nn.ReLU]
    if len(modules) % 2 == 0 or len(layers) + len(between) < len(modules) or any(m.inplace for m in between):
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    if any(p is None or not p.requires_grad for p in parameters) or len(set(map(id, parameters))) < len(parameters):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (model, *modules))
    return None if hooked else layers


@torch.no_grad()
def write_dense_gradients(
    layers: list[torch.nn.Linear],
    features: torch.Tensor,
    labels: torch.Tensor,
    out: torch.Tensor,
    kernels: ModuleType | None = None,
) -> None:
    """Writes each example's gradient to a row of `out`, in the order of the model's parameters, in one pass.

    The gradient of one example with respect to a layer's weights is an outer product of what flows back into the
    layer's output and what came in. `torch.func` computes the same but stores it several times on the way. `layers`
    are what `dense_layers` found, and `kernels` is `cpsgd.learning.fused` where it runs.
    """
    start = 0
    for back, incoming in dense_factors(layers, features, labels):
        width, depth = back.shape[1], incoming.shape[1]
        own = out[:, start : start + width * depth + width]
        if kernels is not None:
            kernels.layer_gradients(back, incoming, own)
        else:
            torch.mul(back[:, :, None], incoming[:, None, :], out=own[:, :-width].view(-1, width, depth))
            own[:, -width:] = back
        start += width * depth + width


@torch.no_grad()
def dense_factors(
    layers: list[torch.nn.Linear], features: torch.Tensor, labels: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer what flows back into its output and what came in, one row per example."""
    inputs = [features.flatten(1)]
    for layer in layers[:-1]:
        inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.t()).relu_())
    outputs = torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.t())
    # The gradient of cross-entropy: probabilities less 1 at the label.
    backs = [torch.softmax(outputs, dim=1)]
    backs[0].scatter_add_(1, labels[:, None], torch.full_like(backs[0][:, :1], -1.0))
    for layer, incoming in zip(reversed(layers[1:]), reversed(inputs[1:]), strict=True):
        backs.append((backs[-1] @ layer.weight) * (incoming > 0))
    return list(zip(reversed(backs), inputs, strict=True))
