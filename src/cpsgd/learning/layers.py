"""The units of a model: which of them a layer is, and those of normalisations.

There are units for linear layers, convolutions, embeddings and normalisation. Every other module with parameters of its
own, and all that is below it, is one unit (`cpsgd.learning.whole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.factors import Convolution, Embedding, Linear, constants
from cpsgd.learning.units import Layer, Tensor, Unit
from cpsgd.learning.whole import Whole

functional = torch.nn.functional
# PyTorch gives it no name of its own.
_GROUP_NORM_BACKWARD: Any = torch.ops.aten.native_group_norm_backward.default

_WITHOUT_PARAMETERS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    torch.nn.LayerNorm: lambda of, x: functional.layer_norm(x, of.normalized_shape, None, None, of.eps),
    torch.nn.RMSNorm: lambda of, x: functional.rms_norm(x, of.normalized_shape, None, of.eps),
}


class Affine(Layer):
    """The weight and bias of a normalisation of the last dimensions: output = x w + b, coordinate by coordinate.

    The normalisation itself has no parameters and is left to autograd.
    """

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Normalises the input by PyTorch, then applies weight and bias as a unit."""
        (x,) = (*arguments, *options.values())
        return super().call(_WITHOUT_PARAMETERS[type(self.module)](self.module, x))

    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns x w + b."""
        weight, bias = self.module.weight.detach(), getattr(self.module, "bias", None)
        return (x * weight if bias is None else torch.addcmul(bias.detach(), x, weight)), (x,)

    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Adds each example's gradient of one call: Σ b x for the weight, Σ b for the bias, over its positions."""
        (x,) = kept
        others = list(range(1, x.dim() - self.module.weight.dim()))
        for key in self.parameters:
            rows = gradient * x if key == "weight" else gradient
            self.add_rows({key: rows.sum(others) if others else rows})


class Grouped(Layer):
    """A `torch.nn.GroupNorm` with weight and bias, by PyTorch's own kernels."""

    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the normalised inputs."""
        module, x = self.module, x.contiguous()
        count, channels, *lengths = x.shape
        weight, bias = constants(module)
        output, *moments = torch.native_group_norm(
            x, weight, bias, count, channels, math.prod(lengths), module.num_groups, module.eps
        )
        return output, (x, *moments)

    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Adds each example's gradient of one call: Σ b (x - mean)/deviation for the weight, Σ b for the bias.

        PyTorch's kernel sums over examples, too; so all examples' channels are passed as those of one example.
        """
        x, *moments = kept
        count, channels, *lengths = x.shape
        every, groups = count * channels, count * self.module.num_groups
        like = x.new_empty(count, channels)  # in place of the weights: only its shape counts
        _, *found = _GROUP_NORM_BACKWARD(
            gradient.contiguous(), x, *moments, like, 1, every, math.prod(lengths), groups, [False, True, True]
        )
        rows = dict(zip(("weight", "bias"), found, strict=True))
        self.add_rows({key: rows[key] for key in self.parameters})


def units_of(model: torch.nn.Module) -> Iterator[Unit]:
    """Yields the units of a model; together they hold all trainable parameters.

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


_KINDS: dict[type, type[Unit]] = {
    torch.nn.Linear: Linear,
    torch.nn.Embedding: Embedding,
    torch.nn.GroupNorm: Grouped,
    **dict.fromkeys(_WITHOUT_PARAMETERS, Affine),
}


def _known(name: str, module: Any) -> Unit | None:
    """Returns the special unit for a layer of a known kind, else None."""
    kind = _KINDS.get(type(module), Convolution if Convolution.takes(module) else None)
    if kind is Embedding and (module.max_norm is not None or module.scale_grad_by_freq):
        raise ParameterError(
            f"The embedding {name} has max_norm or scale_grad_by_freq, which mix examples: leave them out."
        )
    return None if kind is None else kind(name, module)
