"""Norms of single examples' gradients, and their weighted sum, layer by layer, from one backward pass.

An example's gradient by a linear layer's weights is a sum of outer products, Σ_t b_t ⊗ a_t: a_t are the layer's inputs
at position t, b_t the gradients of its outputs. So its norm follows from a and b alone ("ghost norms", Goodfellow 2015;
Li, Tramèr, Liang, Hashimoto, ICLR 2022), and so does the sum over examples, each with a weight (Bu, Wang, Zha, Karypis,
ICML 2023). No gradient of a single example is stored where a and b are smaller, and nothing is computed twice.

Each trainable layer is a *unit*. It runs in an autograd function of its own, which hands the unit a and b and computes
the gradient by the inputs only. Units know linear layers, convolutions, embeddings and normalisation; every other
module with parameters of its own, and all that is below it, is one unit whose gradients come from `torch.func.vmap`, or
from one example after the other.

Rounding: norms are upper bounds of those of the exact products of the float32 numbers a and b, and weighted sums are
taken in float64, so that what one example adds to a sum has a norm that is proved (`MARGIN`).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError

functional, pytree = torch.nn.functional, torch.utils._pytree
_nn: Any = torch.nn

MARGIN = 2.0**-10
"""Share of the clip norm that is left for rounding in the sum of a batch."""

# An example's norm counts as at least this share of Σ_t |a_t| |b_t|: where terms cancel further, rounding is felt.
_MOST_CANCELLED = 2.0**-8
# Bytes of temporary matrices, on a CPU (the size of its caches) and on a GPU.
_CPU_BYTES, _GPU_BYTES = 1 << 23, 1 << 28

Tensor = torch.Tensor
Rows = dict[str, Tensor]


class Unit(ABC):
    """A layer with trainable parameters, and what one backward pass left there.

    Attributes:
        name: Name of the module in the model.
        parameters: Its trainable parameters, by name.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        """Refers to the module, which stays as it is."""
        self.name = name
        self.module: Any = module
        self.parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
        # Examples of the pass; None before its first call.
        self.count: int | None = None

    @abstractmethod
    def forward(self, *inputs: Any) -> Any:
        """Returns the module's output, a tensor or a tuple; called without autograd."""

    @abstractmethod
    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Keeps what the pass says of the parameters, and returns the gradients by the inputs that are `needed`."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Returns an upper bound on each example's squared norm, in float64."""

    @abstractmethod
    def add_weighted(self, weights: Tensor, sums: dict[str, Tensor]) -> None:
        """Adds Σ_i weights_i g_i to the `sums` of the parameters, in float64."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """The most products of a pass that are added up for an example."""

    @abstractmethod
    def forget(self) -> None:
        """Drops what the last pass left."""

    @abstractmethod
    def keep_finite(self, finite: Tensor) -> None:
        """Sets to zero what belongs to examples that are not `finite`."""

    def check(self, count: int) -> None:
        """Raises `ParameterError` if two calls in one pass had other numbers of examples."""
        if self.count not in (None, count):
            raise ParameterError(
                f"The layer {self.name} got {count:,} rows, and {self.count:,} before: its inputs' first dimension "
                "must be the examples."
            )
        self.count = count


class _Pass(torch.autograd.Function):
    """Runs a unit. The parameters are inputs, so that the output has a gradient; they get none."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, count: int, *arguments: Any) -> Any:
        """Runs the module; `arguments` are `count` inputs and then the parameters."""
        ctx.unit, ctx.count, ctx.parameters = unit, count, len(arguments) - count
        inputs = arguments[:count]
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))
        ctx.others = [None if isinstance(each, Tensor) else (each,) for each in inputs]
        return unit.forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hands inputs and the output's gradient to the unit."""
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        with torch.no_grad():
            found = ctx.unit.backward(inputs, gradients, ctx.needs_input_grad[2 : 2 + ctx.count])
        return (None, None, *found, *[None] * ctx.parameters)


def run(unit: Unit, *inputs: Any) -> Any:
    """Runs a unit on inputs, in a way that autograd comes back to it."""
    return _Pass.apply(unit, len(inputs), *inputs, *unit.parameters.values())  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------ rows: one gradient per example


class RowUnit(Unit):
    """A unit that keeps a gradient per example, as it is for small layers."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        self._rows: Rows = {}

    def add_rows(self, rows: Rows) -> None:
        """Adds each example's gradient of one call, [examples, ...] by the name of the parameter."""
        for key, row in rows.items():
            flat = row.flatten(1)
            self.check(len(flat))
            self._rows[key] = self._rows[key] + flat if key in self._rows else flat

    def squared_norms(self) -> Tensor:
        """Returns the squared norms of the rows."""
        return sum_up(squared(row) for row in self._rows.values())

    def add_weighted(self, weights: Tensor, sums: dict[str, Tensor]) -> None:
        """Adds the rows' weighted sums."""
        for key, row in self._rows.items():
            total = sums[key].view(-1)
            for part, weight in zip(*split(row.shape[1] * 8, row, weights), strict=True):
                total += weight @ part.double()

    def keep_finite(self, finite: Tensor) -> None:
        """Sets the other rows to zero."""
        self._rows = {key: cleaned(row, finite) for key, row in self._rows.items()}

    @property
    def positions(self) -> int:
        """One: a row is a number per coordinate."""
        return 1

    def forget(self) -> None:
        """Drops the rows."""
        self._rows, self.count = {}, None


class Affine(RowUnit):
    """The weight and bias of a normalisation of the last dimensions: output = x w + b, coordinate by coordinate.

    The normalisation itself has no parameters and is left to autograd.
    """

    def forward(self, *inputs: Any) -> Tensor:
        """Returns x w + b."""
        (x,), bias = inputs, getattr(self.module, "bias", None)
        weight: Tensor = self.module.weight
        return x * weight if bias is None else torch.addcmul(bias, x, weight)

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Adds up an example's positions."""
        (x,), (gradient,) = inputs, gradients
        others = list(range(1, x.dim() - self.module.weight.dim()))
        by_name = {"weight": gradient * x, "bias": gradient}
        self.add_rows({key: by_name[key].sum(others) if others else by_name[key] for key in self.parameters})
        return [gradient * self.module.weight]


class Grouped(RowUnit):
    """A `torch.nn.GroupNorm` with weight and bias, by PyTorch's own kernels."""

    def forward(self, *inputs: Any) -> Tensor:
        """Returns the normalised inputs."""
        (x,), module = inputs, self.module
        return functional.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Adds up an example's positions: Σ b (x - mean)/deviation for the weights, Σ b for the bias."""
        (x,), (gradient,), module = inputs, gradients, self.module
        x, back = x.contiguous(), gradient.contiguous()
        count, channels = x.shape[:2]
        groups, positions = module.num_groups, x[0, 0].numel()
        sizes = (count, channels, positions, groups)
        _, mean, scale = torch.native_group_norm(x, module.weight, module.bias, *sizes, module.eps)
        shift = back.flatten(2).sum(2)
        products = torch.einsum("ncp,ncp->nc", back.flatten(2), x.flatten(2))
        means, scales = (each.repeat_interleave(channels // groups, 1) for each in (mean, scale))
        by_name = {"weight": (products - means * shift) * scales, "bias": shift}
        self.add_rows({key: by_name[key] for key in self.parameters})
        if not needed[0]:
            return [None]
        arguments = (back, x, mean, scale, module.weight, *sizes, [True, False, False])
        return [torch.ops.aten.native_group_norm_backward(*arguments)[0]]


class Whole(RowUnit):
    """Any module: its gradients by `torch.func`, for all examples at once or for one after the other.

    It is run a second time in the backward pass. Examples are the first dimension of every tensor that it is given or
    returns, but for the states of recurrent layers, where they are the second.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        self.original: Callable[..., Any] = module.forward
        self._together = True
        self._output: Any = None
        if getattr(module, "batch_first", True) is not True:
            raise ParameterError(f"The layer {name} has batch_first=False: examples must be the first dimension.")
        self._refuse_random()

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Runs the module as `run` does, with any arguments."""
        leaves, structure = pytree.tree_flatten((arguments, options))
        found = run(self, structure, *leaves)
        return pytree.tree_unflatten(list(found), self._output)

    def forward(self, *inputs: Any) -> Any:
        """Runs the module; the first input is the structure of the others."""
        structure, *leaves = inputs
        arguments, options = pytree.tree_unflatten(leaves, structure)
        found, self._output = pytree.tree_flatten(self.original(*arguments, **options))
        return tuple(found)

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Computes gradients by parameters and inputs."""
        structure, *leaves = inputs
        places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor)]
        wanted = [place for place in places if needed[place + 1]]
        backs = [place for place, each in enumerate(gradients) if isinstance(each, Tensor)]
        dims = [self._examples_in(place) for place in backs]
        parameters = {f"module.{key}": p.detach() for key, p in self.parameters.items()}
        original = _Original(self)

        def single(own: list[Tensor], back: list[Tensor]) -> tuple[Rows, Rows]:
            def output(weights: Rows, chosen: Rows) -> Tensor:
                given = list(leaves)
                for place, tensor in zip(places, own, strict=True):
                    given[place] = chosen.get(str(place), tensor)[None]
                arguments, options = pytree.tree_unflatten(given, structure)
                found = pytree.tree_leaves(torch.func.functional_call(original, weights, arguments, options))
                parts = [(found[k].squeeze(dim) * each).sum() for k, dim, each in zip(backs, dims, back, strict=True)]
                return sum_up(parts)

            chosen = {str(place): own[places.index(place)] for place in wanted}
            found: tuple[Rows, Rows] = torch.func.grad(output, argnums=(0, 1))(parameters, chosen)
            return found

        own = [leaves[place] for place in places]
        outputs = [gradients[place].movedim(dim, 0) for place, dim in zip(backs, dims, strict=True)]
        with torch.enable_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            rows, by_input = self._each(single, own, outputs)
        self.add_rows({key.removeprefix("module."): row for key, row in rows.items()})
        return [None, *(by_input.get(str(place)) for place in range(len(leaves)))]

    def _examples_in(self, place: int) -> int:
        """Returns the dimension of the examples in an output."""
        return 1 if isinstance(self.module, torch.nn.RNNBase) and place > 0 else 0

    def _each(self, single: Callable[..., Any], own: list[Tensor], outputs: list[Tensor]) -> Any:
        if self._together:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".*performance drop")
                    return torch.func.vmap(single)(own, outputs)
            except Exception:  # PyTorch raises many kinds of errors; one example alone may still be possible
                self._together = False
        count = len(outputs[0])
        found = [single([each[i] for each in own], [each[i] for each in outputs]) for i in range(count)]
        return tuple(
            {key: torch.stack([each[part][key] for each in found]) for key in found[0][part]} for part in (0, 1)
        )

    def _refuse_random(self) -> None:
        drawn = [
            key
            for key, module in self.module.named_modules()
            if (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0.0)
            or (isinstance(rate := getattr(module, "dropout", 0.0), float) and rate > 0.0)
        ]
        if drawn:
            raise ParameterError(
                f"The layer {self.name} of type {type(self.module).__name__} is run twice, and its dropout "
                f"({drawn[0] or 'its own'}) would differ: set it to 0 there, and use torch.nn.Dropout after the layer."
            )


class _Original(torch.nn.Module):
    """A unit's module with the forward that it came with."""

    def __init__(self, unit: Whole) -> None:
        super().__init__()
        self.module = unit.module
        self._original = unit.original

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Runs it."""
        return self._original(*arguments, **options)


# ------------------------------------------------------------------ factors: inputs and outputs' gradients


class FactorUnit(RowUnit):
    """A unit whose weights have gradients Σ_t b_t ⊗ a_t. It keeps rows where they are smaller than a and b."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        # Pairs of what `inputs_of` turns into a, and b [examples, positions, outputs].
        self._factors: list[tuple[Tensor, Tensor]] = []

    def inputs_of(self, kept: Tensor) -> Tensor:
        """Returns a [examples, positions, inputs] from what was kept of some examples."""
        return kept

    def record(self, kept: Tensor, back: Tensor, inputs: int) -> None:
        """Keeps one call: b, and what a follows from; `inputs` is the length of an a_t."""
        self.check(len(back))
        positions, outputs = back.shape[1:]
        if "bias" in self.parameters:
            self.add_rows({"bias": back.sum(1)})
        if "weight" not in self.parameters:
            return
        if not self._factors and positions > 1 and inputs * outputs <= positions * (inputs + outputs):
            parts = [
                torch.bmm(b.transpose(1, 2), self.inputs_of(a))
                for a, b in zip(*split(4 * positions * (inputs + outputs), kept, back), strict=True)
            ]
            self.add_rows({"weight": torch.cat(parts) if len(parts) != 1 else parts[0]})
        elif "weight" in self._rows:
            self.add_rows({"weight": torch.bmm(back.transpose(1, 2), self.inputs_of(kept))})
        else:
            self._factors.append((kept, back))

    def squared_norms(self) -> Tensor:
        """Returns the norms of rows, and those that follow from a and b."""
        rows = [squared(row) for row in self._rows.values()]
        if len(self._factors) == 1 and self._factors[0][1].shape[1] == 1:
            a, b = self._factors[0]
            return sum_up([*rows, squared(self.inputs_of(a).flatten(1)) * squared(b.flatten(1))])
        if self._factors:
            rows.append(self._ghost())
        return sum_up(rows)

    def _ghost(self) -> Tensor:
        """Returns Σ_{t,t'} <a_t, a_t'> <b_t, b_t'>, and what rounding may have taken away from it."""
        positions = sum(b.shape[1] for _, b in self._factors)
        size = 8 * positions * (positions + self._factors[0][1].shape[2])
        found = []
        for parts in zip(*(zip(*split(size, a, b), strict=True) for a, b in self._factors), strict=True):
            a = torch.cat([self.inputs_of(a) for a, _ in parts], 1)
            b = torch.cat([b for _, b in parts], 1)
            a_lengths, b_lengths = self.lengths(a), lengths_of(b)
            # Products of vectors of length 1: those of the vectors themselves could be too small for float32.
            with full_precision():
                alike, products = self.similarity(a, a_lengths), products_of(b, b_lengths)
            lengths = a_lengths * b_lengths
            most = lengths.sum(1)
            # Each of the two products is off by (terms + 2) 2^-24, their own product by 2^-24.
            lost = (a.shape[2] + b.shape[2] + 8) * 2.0**-24 * most.square()
            cosines = (alike * products).double()
            squares = torch.einsum("nst,ns,nt->n", cosines, lengths, lengths) + lost
            found.append(torch.maximum(squares, (most * _MOST_CANCELLED).square()))
        return torch.cat(found)

    @property
    def positions(self) -> int:
        """The most products of a pass that are added up for an example."""
        return sum((back.shape[1] for _, back in self._factors), 1)

    def similarity(self, a: Tensor, lengths: Tensor) -> Tensor:
        """Returns <a_t, a_t'> / |a_t| |a_t'| of all positions."""
        return products_of(a, lengths)

    def lengths(self, a: Tensor) -> Tensor:
        """Returns |a_t|."""
        return lengths_of(a)

    def add_weighted(self, weights: Tensor, sums: dict[str, Tensor]) -> None:
        """Adds the weighted sums, of a and b by one product of matrices."""
        super().add_weighted(weights, sums)
        for kept, back in self._factors:
            for a, b, weight in zip(*split(self._bytes(kept, back), kept, back, weights), strict=True):
                self.add_product(sums["weight"], a, b.double() * weight[:, None, None])

    def add_product(self, total: Tensor, kept: Tensor, back: Tensor) -> None:
        """Adds Σ b_t ⊗ a_t over all examples and positions to `total`."""
        outputs = back.flatten(0, 1)
        flat = total.view(outputs.shape[1], -1)
        flat.addmm_(outputs.t(), self.inputs_of(kept).flatten(0, 1).double())

    def _bytes(self, kept: Tensor, back: Tensor) -> int:
        return 8 * back.shape[1] * back.shape[2] + 8 * kept[0].numel()

    def keep_finite(self, finite: Tensor) -> None:
        """Sets a and b of the other examples to zero."""
        super().keep_finite(finite)
        self._factors = [(self.cleaned_inputs(a, finite), cleaned(b, finite)) for a, b in self._factors]

    def cleaned_inputs(self, kept: Tensor, finite: Tensor) -> Tensor:
        """Returns what is kept of the inputs, zero for examples that are not finite."""
        return cleaned(kept, finite)

    def forget(self) -> None:
        """Drops rows, a and b."""
        super().forget()
        self._factors = []


class Linear(FactorUnit):
    """A `torch.nn.Linear` on inputs [examples, ..., features]."""

    def forward(self, *inputs: Any) -> Tensor:
        """Returns x Wᵀ + b."""
        (x,) = inputs
        return functional.linear(x, self.module.weight, self.module.bias)

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Keeps x and the gradient."""
        (x,), (gradient,) = inputs, gradients
        self.record(x.reshape(len(x), -1, x.shape[-1]), gradient.reshape(len(x), -1, gradient.shape[-1]), x.shape[-1])
        return [gradient @ self.module.weight if needed[0] else None]


class Convolution(FactorUnit):
    """A `torch.nn.Conv1d` or `Conv2d` of one group with padding by zeros."""

    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        """Returns whether the module is such a convolution."""
        if not isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):
            return False
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)

    def forward(self, *inputs: Any) -> Tensor:
        """Returns the convolution."""
        (x,), module = inputs, self.module
        kind = functional.conv1d if isinstance(module, torch.nn.Conv1d) else functional.conv2d
        found: Tensor = kind(x, module.weight, module.bias, module.stride, module.padding, module.dilation)
        return found

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Keeps x and the gradient; the windows of x are made when they are needed."""
        (x,), (gradient,), module = inputs, gradients, self.module
        self.record(x, gradient.flatten(2).transpose(1, 2), math.prod(module.weight.shape[1:]))
        if not needed[0]:
            return [None]
        kind = _nn.grad.conv1d_input if isinstance(module, torch.nn.Conv1d) else _nn.grad.conv2d_input
        return [kind(x.shape, module.weight, gradient, module.stride, module.padding, module.dilation)]

    def inputs_of(self, kept: Tensor) -> Tensor:
        """Returns the windows of the inputs, one per position of the output."""
        module = self.module
        kernel, stride, padding, dilation = (
            getattr(module, key) for key in ("kernel_size", "stride", "padding", "dilation")
        )
        if isinstance(module, torch.nn.Conv1d):
            kept, kernel, stride, padding, dilation = (
                kept[:, :, None],
                (1, *kernel),
                (1, *stride),
                (0, *padding),
                (1, *dilation),
            )
        if any(padding):
            kept = functional.pad(kept, (padding[1], padding[1], padding[0], padding[0]))
        count, channels, *lengths = kept.shape
        places = [
            (length - spread * (size - 1) - 1) // step + 1
            for length, spread, size, step in zip(lengths, dilation, kernel, stride, strict=True)
        ]
        by_example, by_channel, *by_place = kept.stride()
        inside = [jump * spread for jump, spread in zip(by_place, dilation, strict=True)]
        between = [jump * step for jump, step in zip(by_place, stride, strict=True)]
        shape = (count, channels, *kernel, *places)
        windows = kept.as_strided(shape, (by_example, by_channel, *inside, *between), kept.storage_offset())
        return windows.reshape(count, channels * math.prod(kernel), math.prod(places)).transpose(1, 2)

    def _bytes(self, kept: Tensor, back: Tensor) -> int:
        return 8 * back.shape[1] * (back.shape[2] + int(math.prod(self.module.weight.shape[1:])))


class Embedding(FactorUnit):
    """A `torch.nn.Embedding`: a_t is one at the number of a row, and zero elsewhere."""

    def forward(self, *inputs: Any) -> Tensor:
        """Returns the rows."""
        (numbers,) = inputs
        return functional.embedding(numbers, self.module.weight)

    def backward(self, inputs: Sequence[Any], gradients: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        """Keeps the numbers and the gradient."""
        (numbers,), (gradient,) = inputs, gradients
        numbers, back = numbers.reshape(len(numbers), -1), gradient.reshape(len(numbers), -1, gradient.shape[-1])
        if self.module.padding_idx is not None:
            back = back * (numbers != self.module.padding_idx)[:, :, None]
        self.check(len(back))
        self._factors.append((numbers[:, :, None], back))
        return [None]

    def similarity(self, a: Tensor, lengths: Tensor) -> Tensor:
        """Returns 1 where two positions have the same number."""
        return (a == a.transpose(1, 2)).float()

    def lengths(self, a: Tensor) -> Tensor:
        """Returns 1."""
        return torch.ones(a.shape[:2], dtype=torch.float64, device=a.device)

    def squared_norms(self) -> Tensor:
        """Returns the norms: positions with the same number are added up first."""
        return self._ghost()

    def add_product(self, total: Tensor, kept: Tensor, back: Tensor) -> None:
        """Adds b_t to the row of its number."""
        total.index_add_(0, kept.reshape(-1), back.flatten(0, 1))

    def cleaned_inputs(self, kept: Tensor, finite: Tensor) -> Tensor:
        """Returns the numbers as they are."""
        return kept


# ------------------------------------------------------------------ the units of a model


def units_of(model: torch.nn.Module) -> Iterator[Unit]:
    """Yields the units of a model, together all its trainable parameters.

    Raises:
        ParameterError: A parameter belongs to two layers, or a layer cannot be trained by example.
    """
    owners: dict[int, str] = {}
    for unit in _units("", model):
        for key, p in unit.parameters.items():
            if id(p) in owners:
                raise ParameterError(
                    f"The layers {owners[id(p)]} and {unit.name} share the parameter {key}; how long an example's "
                    "gradient is then does not follow from each layer alone. Give each a parameter of its own."
                )
            owners[id(p)] = unit.name
        yield unit


def _units(name: str, module: torch.nn.Module) -> Iterator[Unit]:
    if not any(p.requires_grad for p in module.parameters()):
        return
    label = name or "(the model itself)"
    unit = _known(label, module)
    if unit is not None:
        yield unit
    elif any(p.requires_grad for p in module.parameters(recurse=False)):
        yield Whole(label, module)
    else:
        for key, child in module.named_children():
            yield from _units(f"{name}.{key}" if name else key, child)


def _known(name: str, module: Any) -> Unit | None:
    kind = type(module)
    if kind is torch.nn.Linear:
        return Linear(name, module)
    if kind in (torch.nn.Conv1d, torch.nn.Conv2d) and Convolution.takes(module):
        return Convolution(name, module)
    if isinstance(module, torch.nn.Embedding) and kind is torch.nn.Embedding:
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ParameterError(
                f"The embedding {name} has max_norm or scale_grad_by_freq, which mix examples: leave them out."
            )
        return Embedding(name, module)
    if kind is torch.nn.GroupNorm:
        return Grouped(name, module)
    if kind in NORMALISATIONS:
        return Affine(name, module)
    return None


NORMALISATIONS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    torch.nn.LayerNorm: lambda of, x: functional.layer_norm(x, of.normalized_shape, None, None, of.eps),
    torch.nn.RMSNorm: lambda of, x: functional.rms_norm(x, of.normalized_shape, None, of.eps),
}
"""From a normalisation's class to the part of it that has no parameters."""


# ------------------------------------------------------------------ arithmetic


def squared(rows: Tensor) -> Tensor:
    """Returns the squared norms of rows in float64, rounded up."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square() * (1.0 + 2.0**-30)
    return found


def lengths_of(vectors: Tensor) -> Tensor:
    """Returns the lengths of vectors [examples, positions, length] in float64."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=2, dtype=torch.float64)
    return found


def products_of(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Returns the products of an example's vectors, each divided by its length; zero for vectors of zeros."""
    units = (vectors.double() / lengths.clamp(min=2.0**-200)[:, :, None]).float()
    return torch.bmm(units, units.transpose(1, 2))


def sum_up(parts: Any) -> Tensor:
    """Returns the sum of tensors."""
    first, *others = parts
    for other in others:
        first = first + other
    total: Tensor = first
    return total


def cleaned(tensor: Tensor, finite: Tensor) -> Tensor:
    """Returns the tensor with zeros for the examples that are not `finite`."""
    return torch.where(finite.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0.0)


def split(size: int, *tensors: Tensor) -> list[Sequence[Tensor]]:
    """Returns each tensor in parts of as many examples as take some megabytes, `size` bytes each."""
    room = _CPU_BYTES if tensors[0].device.type == "cpu" else _GPU_BYTES
    return [torch.split(tensor, max(1, room // max(1, size))) for tensor in tensors]


def rounding_share(examples: int, positions: int) -> float:
    """Returns the most, in clip norms, that rounding moves two neighbours' sums of so many examples apart.

    A float64 sum of n = examples × positions products is off by at most 2 n 2^-53 Σ|terms|, and Σ|terms| is at most
    `examples` clip norms over the least share that may be left of cancelling terms. Neighbours are off by as much each.
    """
    return 4.0 * examples * examples * positions * 2.0**-53 / _MOST_CANCELLED


class full_precision:  # noqa: N801  # a context like torch.no_grad
    """Keeps matrix products from being rounded to TF32 within the context."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before
