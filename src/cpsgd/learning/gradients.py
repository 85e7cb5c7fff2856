"""Clients' updates: one gradient each, or the change made by a few local SGD steps.

All clients of a chunk are computed together (`torch.func.vmap` over `torch.func.grad`) if PyTorch can do that with the
model, and otherwise one after the other. A limit on memory sets the size of chunks, so that a cohort may have any size.
It also sets the size of the parts in which a client with many examples is computed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.learning.architecture import ModelTraits, check_memory, count_activations, repeats
from cpsgd.learning.coordinate_scales import CoordinateScales
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.dense import dense_factors, dense_layers, scaling, write_dense_gradients
from cpsgd.learning.models import Loss, check_model, trainable
from cpsgd.learning.option_groups import ClientOptions
from cpsgd.learning.recorded_updates import RecordedUpdates, places
from cpsgd.simulation.device_kernels import current
from cpsgd.simulation.products import Layout, Products

Gradient = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""From parameters, features and labels to the gradient of the mean loss."""

Parameters = dict[str, torch.Tensor]
Parts = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Yields the features and labels of a client's examples, some at a time."""

# On a CPU: chunks with more bytes of updates are no faster, and leave the processor's caches.
_CHUNK_BYTES = 1 << 24
# Rows on a GPU begin at multiples of this many numbers.
_ALIGNED = 32
# Recordings have room for a multiple of this many clients.
_RECORDED = 64


class ClientUpdates:
    """Clients' updates to a model's trainable parameters, as rows of float32.

    Attributes:
        dim: Number of trainable parameters, d.
        scales: Divisors of each coordinate of the rows; `products` include them. None if rows are sent as they are.
    """

    scales: CoordinateScales | None = None

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
        """Yields updates as `chunks` does, for examples on the model's device; the rows stay there."""
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
        """Returns all updates, divided by the scales, as factors of outer products.

        Returns None if the model is not dense, or if counts differ from 1.
        """
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
        if self.scales is not None:
            factors.mul_(self.scales.inverse_factors)
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


def gradient_of(model: torch.nn.Module, loss: Loss) -> Gradient:
    """Returns the gradient of the loss as a function of the trainable parameters."""

    def mean_loss(own: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(torch.func.functional_call(model, own, (x,)), y)

    found: Gradient = torch.func.grad(mean_loss)
    return found


def rehearse(model: torch.nn.Module, loss: Loss, features: torch.Tensor, labels: torch.Tensor) -> ModelTraits:
    """Tries a copy of the model with zeros of these examples' shape; PyTorch's generators stay as they were.

    Raises whatever the model or the loss raise, and `ParameterError` if a layer stores something of its input.
    """
    # A copy, because a layer might store its input. Layers such as dropout behave as in training.
    model = copy.deepcopy(model).train()
    zero, label = torch.zeros_like(features[:1]), torch.zeros_like(labels[:1])
    on_gpu = [zero.device] if zero.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), math_attention():
        activations = count_activations(model, zero)
        check_memory(model, zero)
        deterministic = repeats(model, zero)
        parameters = {name: p.detach() for name, p in trainable(model).items()}
        gradient = gradient_of(model, loss)
        gradient(parameters, zero, label)
        together = True
        try:
            with warnings.catch_warnings():
                # For some layers PyTorch falls back to a slow loop over clients, with this warning.
                warnings.filterwarnings("error", message=".*performance drop")
                each = torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="different")
                each(parameters, torch.stack([zero, zero]), torch.stack([label, label]))
        except Exception:  # PyTorch raises many kinds of errors here; one client alone could be computed
            together = False
    return ModelTraits(activations, together, deterministic)


def math_attention() -> Any:
    """Makes PyTorch compute attention by its formula within the context; `vmap` cannot batch the faster kernels."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
