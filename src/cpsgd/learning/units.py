"""A layer with trainable parameters, and its examples' gradients from one backward pass: norms, and a weighted sum.

Each trainable layer is a *unit*. It runs with parameters that need no gradients, and a hook hands the unit the layer's
inputs and the gradients of its outputs. So autograd computes gradients by inputs only. A unit keeps a gradient per
example, or less where the norms follow from less (`cpsgd.learning.factors`).

Rounding: norms are upper bounds of those of the float32 numbers that are kept, up to a factor `NORM_ROUNDING`, and
weighted sums are taken in float64, so that what one example adds to a sum has a norm that is proved (`MARGIN`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.pieces import Piece, Row

Tensor = torch.Tensor

MARGIN = 2.0**-10
"""Share of the clip norm that is left for rounding.

One half is for the sum of a batch. The other is for kernels that compute an example a little otherwise in a batch of
another size: then all other examples' gradients move, too, where one is drawn (docs/proofs/private-loop.md).
"""

NORM_ROUNDING = 1.0 + 2.0**-29
"""Float64 norms of up to 2^22 terms, and products of two such, are below the exact ones by less than this factor."""

MOST_CANCELLED = 2.0**-8
"""An example's norm counts as at least this share of Σ_t |a_t| |b_t|: where terms cancel further, rounding is felt."""


class Unit(ABC):
    """A layer with trainable parameters, and the per-example gradients of one backward pass.

    Attributes:
        name: Name of the module in the model.
        parameters: Its trainable parameters, by name.
        count: Examples of the pass; None before its first call.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        """Keeps a reference to the module and leaves it unchanged."""
        self.name = name
        self.module: Any = module
        self.parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
        self.count: int | None = None
        # Each example's gradient, one row each, by the name of the parameter.
        self.rows: dict[str, Tensor] = {}

    @abstractmethod
    def call(self, *arguments: Any, **options: Any) -> Any:
        """Runs the module so that its backward pass calls the unit."""

    def pieces(self) -> list[Piece]:
        """Returns rows and factors that the pass left."""
        return [Row(row, key) for key, row in self.rows.items()]

    def rest_norm(self) -> Tensor | None:
        """Returns the norms, in float64, of the gradients that the pieces do not cover; None if there are none."""
        return None

    def add_rest(  # noqa: B027  # most units have no rest
        self, weights: Tensor, finite: Tensor | None, sums: Mapping[str, Tensor]
    ) -> None:
        """Adds the weighted sum of the gradients outside the pieces to `sums`, as `Row.add` does."""

    @property
    def positions(self) -> int:
        """Largest number of products that a pass adds up for one example."""
        return 1

    def forget(self) -> None:
        """Drops the gradients and tensors kept from the last pass."""
        self.rows, self.count = {}, None

    def add_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Adds each example's gradient of one call, [examples, ...] by the name of the parameter."""
        for key, row in rows.items():
            flat = row if row.dim() == 2 else row.flatten(1)
            self.check(flat.shape[0])
            self.rows[key] = self.rows[key] + flat if key in self.rows else flat

    def check(self, count: int) -> None:
        """Raises `ParameterError` if two calls in one pass had other numbers of examples."""
        if self.count not in (None, count):
            raise ParameterError(
                f"The layer {self.name} got {count:,} rows, and {self.count:,} before: its inputs' first dimension "
                "must be the examples."
            )
        self.count = count


class Layer(Unit):
    """A unit with one input, whose gradients follow from tensors kept in the forward pass and the output's gradient."""

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Runs the module, and has autograd hand over the gradient of its output."""
        (x,) = (*arguments, *options.values())
        if not x.requires_grad:
            return _First.apply(self, x, next(iter(self.parameters.values())))  # type: ignore[no-untyped-call]
        output, kept = self.run(x)
        output.register_hook(_Call(self, kept))  # type: ignore[no-untyped-call]
        return output

    @abstractmethod
    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the module's output and the tensors for `add_call`; parameters need no gradients here."""

    @abstractmethod
    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Computes and keeps the parameters' per-example gradients of one call, or their factors."""


class _Call:
    """Backward hook of one call: gets the gradient of a unit's output once, then frees the kept tensors."""

    __slots__ = ("_kept", "_unit", "_version")

    def __init__(self, unit: Layer, kept: tuple[Tensor, ...]) -> None:
        self._unit = unit
        self._kept: tuple[Tensor, ...] | None = kept
        self._version = kept[0]._version

    def __call__(self, gradient: Tensor) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            raise ParameterError("backward() came to one pass of the model twice: add up the losses, and call it once.")
        if self._version != kept[0]._version:
            raise ParameterError(f"The inputs of the layer {self._unit.name} were changed in place after its pass.")
        self._unit.add_call(gradient.detach() if gradient.requires_grad else gradient, *kept)


class _First(torch.autograd.Function):
    """Runs a unit whose input needs no gradient. A parameter is an input, so that the output has one; it gets none."""

    @staticmethod
    def forward(ctx: Any, unit: Layer, x: Tensor, parameter: Tensor) -> Any:
        """Runs the module."""
        output, kept = unit.run(x)
        ctx.call = _Call(unit, kept)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hands the output's gradient to the unit."""
        ctx.call(gradients[0])
        return None, None, None


def rounding_share(examples: int, positions: int) -> float:
    """Returns a bound, in clip norms, on how far rounding moves two neighbours' sums apart.

    A float64 sum of n = examples × positions products is off by at most 2 n 2^-53 Σ|terms|, and Σ|terms| is at most
    `examples` clip norms over the least share that may be left of cancelling terms. Neighbours are off by as much each.
    """
    return 4.0 * examples * examples * positions * 2.0**-53 / MOST_CANCELLED
