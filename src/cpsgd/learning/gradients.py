"""What clients compute: one gradient each, the change made by a few local SGD steps, or a sum over their examples.

All clients of a chunk are computed together (`torch.func.vmap` over `torch.func.grad`) where PyTorch can do that with
the model, and otherwise one after the other. Chunks are as large as a limit on memory allows, so that a cohort may have
any size; so are the parts of a client with many examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.codec import clip
from cpsgd.errors import NonFiniteError
from cpsgd.learning import cuda
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
from cpsgd.learning.models import Scaled
from cpsgd.learning.options import ClientOptions
from cpsgd.learning.recorded_updates import RecordedUpdates, places
from cpsgd.privacy.examples import example_norm
from cpsgd.simulation.device_kernels import compiles, current
from cpsgd.simulation.device_plain import clip_factors
from cpsgd.simulation.products import Layout, Products

Parameters = dict[str, torch.Tensor]
Parts = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Gives the features and labels of a client's examples, some at a time."""

# On a CPU: past this many bytes of updates a larger chunk is no faster, and leaves the processor's caches.
_CHUNK_BYTES = 1 << 24
# Rows on a GPU begin at multiples of this many numbers.
_ALIGNED = 32
# Recordings are for multiples of this many clients.
_RECORDED = 64
# Clients whose sums of examples are held at a time, on a CPU; on a GPU so many 32-bit numbers are held per coordinate:
# sums, a gradient, its copies in 32 and 64 bits, and the result.
_CLIENTS = 64
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
        self._scaling = scaling(model)
        self._recorded: RecordedUpdates | None = None
        self._recorded_at: tuple[int, ...] = ()
        self._recordable = True
        self._seen: tuple[int, ...] | None = None

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
        alike = bool((counts == counts[:1]).all())
        for count in counts[:1] if alike else np.unique(counts):
            members = np.flatnonzero(counts == count)
            if self._traits is None and len(features):
                self.rehearse(features, labels)
            size = min(self._chunk_size(features, int(count)), len(members))
            # Chunks of one size, as far as that is possible.
            size = -(-len(members) // -(-len(members) // size))
            rows: torch.Tensor | None = None
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                if count > 0:
                    examples = starts[chosen, None] + np.arange(count)
                    part, shape = slice(int(examples[0, 0]), int(examples[-1, -1]) + 1), examples.shape
                    if np.array_equal(examples.reshape(-1), np.arange(part.start, part.stop)):
                        # Neighbours in memory: no copy.
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
                    # Without examples an update is zero; otherwise every coordinate is written.
                    make = torch.zeros if count == 0 else torch.empty
                    rows = make((size, stride), device=features.device)[:, : self.dim]
                chunk = rows[: len(chosen)]
                if count > 0:
                    self._write(x, y, chunk)
                yield chunk

    def _recording(self, x: torch.Tensor, y: torch.Tensor, size: int, stride: int) -> RecordedUpdates | None:
        """A recording of the updates of such clients; None where there cannot be one, or such clients are new.

        What is recorded must have been computed before: then everything is compiled.
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
        # Cohorts that are sampled differ in size.
        capacity = min(-(-size // _RECORDED) * _RECORDED, max(size, self._chunk_size(x, x.shape[1])))
        # Memory of the old one, and of what was computed before, must be free for the new one.
        self._recorded = None
        torch.cuda.empty_cache()
        rows = torch.empty((capacity, stride), device=x.device)[:, : self.dim]
        try:
            self._recorded, self._recorded_at = RecordedUpdates(self._write, x, y, rows), own
        except RuntimeError:  # PyTorch has many ways to say that it cannot, a full GPU among them
            self._recordable = False
        return self._recorded

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

    @property
    def layout(self) -> Layout | None:
        """How `products` make up an update; None for other models than dense layers."""
        if self._layers is None:
            return None
        return Layout(tuple((layer.out_features, layer.in_features) for layer in self._layers))

    def products(self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]) -> Products | None:
        """All updates at once as products that are not written out; None where they are no such products."""
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
        if features.device.type == "cuda" and self._layers is None:
            # A GPU's library of matrices puts a layer's updates out in another order first, and a recording keeps one.
            vectors += 2
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

    def tensors(
        self, features: torch.Tensor, labels: torch.Tensor, counts: NDArray[np.int64]
    ) -> Iterator[torch.Tensor]:
        """As `chunks`, for examples on the model's device; the rows stay there. Clients come in another order."""
        starts, counts = np.cumsum(counts) - counts, np.minimum(counts, self._examples)
        # Clients with many examples first: those who have one more are always the first ones.
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
        """The sum of one client with more examples than are to be in memory at once; see `ClientUpdates.large`."""
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
        """Gradients on any device, each clipped, in float64."""
        return gradients * clip_factors(gradients, self._bound * (1.0 - clip.MARGIN))[:, None]

    def _add(self, gradients: Iterable[NDArray[np.float32]], total: NDArray[np.float64]) -> None:
        """Adds clipped gradients."""
        for gradient in gradients:
            try:
                factor = clip.factor(gradient, self._bound)
            except NonFiniteError:
                continue
            total += gradient * np.float64(factor)


def dense_layers(model: torch.nn.Module, loss: Loss) -> list[torch.nn.Linear] | None:
    """The layers of a model of linear layers with ReLUs between them and cross-entropy for a loss; None for others.

    `Scaled` may come first, which `scaling` finds.
    """
    if type(model) is not torch.nn.Sequential or loss is not torch.nn.functional.cross_entropy:
        return None
    modules = list(model)[scaling(model) is not None :]
    layers = [module for module in modules[::2] if type(module) is torch.nn.Linear]
    between = [module for module in modules[1::2] if type(module) is torch.nn.ReLU]
    if len(modules) % 2 == 0 or len(layers) + len(between) < len(modules) or any(m.inplace for m in between):
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    if any(p is None or not p.requires_grad for p in parameters) or len(set(map(id, parameters))) < len(parameters):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    return None if hooked else layers


def scaling(model: torch.nn.Module) -> Scaled | None:
    """The layer without parameters that a model of dense layers may begin with."""
    first = next(model.children(), None)
    return first if type(first) is Scaled else None


@torch.no_grad()
def write_dense_gradients(
    layers: list[torch.nn.Linear],
    features: torch.Tensor,
    labels: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes each example's gradient to a row of `out`, in the order of the model's parameters, in one pass.

    The gradient of one example with respect to a layer's weights is an outer product of what flows back into the
    layer's output and what came in. `torch.func` computes the same but stores it several times on the way. `layers`
    are those that `dense_layers` returns.
    """
    widths = [layer.out_features for layer in layers]
    inputs = [features.flatten(1), *(features.new_empty(len(out), width) for width in widths[:-1])]
    backs = [features.new_empty(len(out), width) for width in widths]
    dense_factors(layers, labels, inputs, backs)
    start = 0
    for back, incoming in zip(backs, inputs, strict=True):
        width, depth = back.shape[1], incoming.shape[1]
        own = out[:, start : start + width * depth + width]
        if compiles(out.device):
            cuda.layer_gradients(back, incoming, own)
        else:
            torch.mul(back[:, :, None], incoming[:, None, :], out=own[:, :-width].view(-1, width, depth))
            own[:, -width:] = back
        start += width * depth + width


@torch.no_grad()
def dense_factors(
    layers: list[torch.nn.Linear], labels: torch.Tensor, inputs: Sequence[torch.Tensor], backs: Sequence[torch.Tensor]
) -> None:
    """Writes for each layer what came in and what flows back into its output, one row per example.

    What comes into the first layer must be there.
    """
    for layer, incoming, following in zip(layers[:-1], inputs, inputs[1:], strict=False):
        torch.addmm(layer.bias, incoming, layer.weight.t(), out=following).relu_()
    outputs = torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.t())
    # The gradient of cross-entropy: probabilities less 1 at the label.
    torch.softmax(outputs, dim=1, out=backs[-1])
    backs[-1].scatter_add_(1, labels[:, None], torch.full_like(outputs[:, :1], -1.0))
    for number in range(len(layers) - 1, 0, -1):
        back = backs[number] @ layers[number].weight
        torch.mul(back, inputs[number] > 0, out=backs[number - 1])
