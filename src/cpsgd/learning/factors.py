"""Units whose gradients are products of the layer's inputs and its outputs' gradients: dense layers and their kind.

An example's gradient by a linear layer's weights is a sum of outer products, Σ_t b_t ⊗ a_t: a_t are the layer's inputs
at position t, b_t the gradients of its outputs. So its norm follows from a and b alone ("ghost norms", Goodfellow 2015;
Li, Tramèr, Liang, Hashimoto, ICLR 2022), and so does the sum over examples, each with a weight (Bu, Wang, Zha, Karypis,
ICML 2023). No gradient of a single example is stored where a and b are smaller, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cpsgd._torch import torch
from cpsgd.learning.pieces import OuterProduct, Piece, cleaned, length, portions, weighed
from cpsgd.learning.units import MOST_CANCELLED, Layer, Tensor

functional = torch.nn.functional


class FactorUnit(Layer):
    """A unit whose weights have gradients Σ_t b_t ⊗ a_t. It keeps rows where they are smaller than a and b."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        # b and a of a pass with one call and one position.
        self._single: tuple[Tensor, Tensor] | None = None
        # Otherwise pairs of what `inputs_of` turns into a, and b [examples, positions, outputs].
        self._factors: list[tuple[Tensor, Tensor]] = []
        # The length of an a_t.
        self._inputs: int = math.prod(self.module.weight.shape[1:])

    def inputs_of(self, kept: Tensor) -> Tensor:
        """Returns the inputs a, [examples, positions, inputs], from the tensors kept for some examples."""
        return kept

    def record(self, kept: Tensor, across: Tensor) -> None:
        """Keeps one call: b [examples, outputs, positions], and the tensors from which a is computed."""
        if self._single is not None:  # the first call, now one of several
            (first, a), self._single = self._single, None
            self.record(a[:, None], first[:, :, None])
        count, outputs, positions = across.shape
        self.check(count)
        inputs = self._inputs
        if "bias" in self.parameters:
            self.add_rows({"bias": across.sum(2)})
        if "weight" not in self.parameters:
            return
        smaller = positions > 1 and inputs * outputs <= positions * (inputs + outputs)
        if "weight" in self.rows or (smaller and not self._factors):
            parts = [
                torch.bmm(b, self.inputs_of(a)) for a, b in portions(4 * positions * (inputs + outputs), kept, across)
            ]
            self.add_rows({"weight": torch.cat(parts) if len(parts) != 1 else parts[0]})
        else:
            self._factors.append((kept, across.transpose(1, 2)))

    def pieces(self) -> list[Piece]:
        """Returns the kept rows, and the factors if there was one call with one position."""
        found = super().pieces()
        if self._single is not None:
            found.append(OuterProduct(*self._single, "bias" in self.parameters))
        return found

    def rest_norm(self) -> Tensor | None:
        """Returns gradient norms computed from a and b, for calls with several positions."""
        return self.ghost() if self._factors else None

    def ghost(self) -> Tensor:
        """Returns √Σ_{t,t'} <a_t, a_t'> <b_t, b_t'>, and a bound on its rounding error."""
        positions = sum(b.shape[1] for _, b in self._factors)
        width = max(self._factors[0][1].shape[2], self._inputs)
        size = 8 * positions * (positions + width)
        found = []
        for parts in zip(*(portions(size, a, b) for a, b in self._factors), strict=True):
            a, b = _joined([self.inputs_of(a) for a, _ in parts]), _joined([b for _, b in parts])
            a_lengths, b_lengths = self.lengths(a), length(b)
            # Products of vectors of length 1: those of the vectors themselves could be too small for float32.
            with full_precision():
                alike, products = self.similarity(a, a_lengths), products_of(b, b_lengths)
            lengths = a_lengths * b_lengths
            most = lengths.sum(1).square()
            # Each of the two products is off by (terms + 2) 2^-24, their own product by 2^-24.
            lost = (a.shape[2] + b.shape[2] + 8) * 2.0**-24
            cosines = (alike * products).double()
            squares = (torch.bmm(cosines, lengths[:, :, None])[:, :, 0] * lengths).sum(1).add_(most, alpha=lost)
            found.append(torch.maximum(squares, most * MOST_CANCELLED**2).sqrt_())
        return torch.cat(found) if len(found) != 1 else found[0]

    @property
    def positions(self) -> int:
        """Largest number of products that a pass adds up for one example."""
        return sum((back.shape[1] for _, back in self._factors), 1)

    def similarity(self, a: Tensor, lengths: Tensor) -> Tensor:
        """Returns <a_t, a_t'> / |a_t| |a_t'| of all positions."""
        return products_of(a, lengths)

    def lengths(self, a: Tensor) -> Tensor:
        """Returns the norm |a_t| at each position t."""
        return length(a)

    def add_rest(self, weights: Tensor, finite: Tensor | None, sums: Mapping[str, Tensor]) -> None:
        """Adds the weighted sum of the products b ⊗ a to `sums["weight"]`, by one matrix product per portion."""
        for kept, back in self._factors:
            for a, b, weight, good in portions(self.bytes_of(kept, back), kept, back, weights, finite):
                self.add_product(sums["weight"], a, weighed(b, weight, good).flatten(0, 1), good)

    def add_product(self, total: Tensor, kept: Tensor, back: Tensor, finite: Tensor | None) -> None:
        """Adds Σ b_t ⊗ a_t over all examples and positions to `total`."""
        flat = total.view(back.shape[1], -1)
        flat.addmm_(back.t(), self.inputs_of(cleaned(kept, finite)).flatten(0, 1))

    def bytes_of(self, kept: Tensor, back: Tensor) -> int:
        """Returns the bytes that one example takes in a weighted sum."""
        return 8 * back.shape[1] * back.shape[2] + 8 * kept[0].numel()

    def forget(self) -> None:
        """Drops the kept rows, a and b."""
        super().forget()
        self._single, self._factors = None, []


class Linear(FactorUnit):
    """A `torch.nn.Linear` on inputs [examples, ..., features]."""

    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns x Wᵀ + b, and the tensors to keep for the backward pass: x."""
        return functional.linear(x, *constants(self.module)), (x,)

    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Keeps x and the gradient."""
        (x,) = kept
        if self.count is None and x.dim() == 2 and "weight" in self.parameters:
            self.check(len(x))
            self._single = gradient, x
        else:
            back = gradient.reshape(len(x), -1, gradient.shape[-1])
            self.record(x.reshape(len(x), -1, x.shape[-1]), back.transpose(1, 2))


class Convolution(FactorUnit):
    """A `torch.nn.Conv1d` or `Conv2d` of one group with padding by zeros."""

    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        """Returns whether the module is a convolution of one group with zero padding."""
        if type(module) not in (torch.nn.Conv1d, torch.nn.Conv2d):
            return False
        of: Any = module
        return of.groups == 1 and of.padding_mode == "zeros" and not isinstance(of.padding, str)

    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the convolution."""
        module = self.module
        kind: Any = functional.conv1d if isinstance(module, torch.nn.Conv1d) else functional.conv2d
        return kind(x, *constants(module), module.stride, module.padding, module.dilation), (x,)

    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Keeps x and the gradient; the windows of x are made when they are needed."""
        (x,) = kept
        self.record(x, gradient.flatten(2))

    def inputs_of(self, kept: Tensor) -> Tensor:
        """Returns the windows of the inputs, one per position of the output."""
        module = self.module
        if any(module.padding):
            kept = functional.pad(kept, [pad for pad in reversed(module.padding) for _ in range(2)])
        count, *lengths = kept.shape
        shape, strides, places = _windows(
            tuple(lengths), kept.stride(), module.kernel_size, module.stride, module.dilation
        )
        return kept.as_strided((count, *shape), strides).reshape(count, self._inputs, places).transpose(1, 2)

    def bytes_of(self, kept: Tensor, back: Tensor) -> int:
        """Returns the bytes of an example's windows and gradients."""
        return 8 * back.shape[1] * (back.shape[2] + self._inputs)


class Embedding(FactorUnit):
    """A `torch.nn.Embedding`: a_t is one at the number of a row, and zero elsewhere."""

    def run(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the embedding's rows for the input numbers."""
        return functional.embedding(x, self.module.weight.detach()), (x,)

    def add_call(self, gradient: Tensor, *kept: Tensor) -> None:
        """Keeps the numbers and the gradient."""
        (x,) = kept
        numbers, back = x.reshape(len(x), -1), gradient.reshape(len(x), -1, gradient.shape[-1])
        if self.module.padding_idx is not None:
            back = back * (numbers != self.module.padding_idx)[:, :, None]
        self.check(len(back))
        self._factors.append((numbers[:, :, None], back))

    def similarity(self, a: Tensor, lengths: Tensor) -> Tensor:
        """Returns 1 where two positions have the same number."""
        return (a == a.transpose(1, 2)).float()

    def lengths(self, a: Tensor) -> Tensor:
        """Returns 1 for each position: a one-hot vector has norm 1."""
        return torch.ones(a.shape[:2], dtype=torch.float64, device=a.device)

    def add_product(self, total: Tensor, kept: Tensor, back: Tensor, finite: Tensor | None) -> None:
        """Adds b_t to the row of its number."""
        total.index_add_(0, kept.reshape(-1), back)


@lru_cache(maxsize=256)
def _windows(
    lengths: tuple[int, ...],
    strides: tuple[int, ...],
    kernel: tuple[int, ...],
    steps: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns shape (without examples) and strides of windows of inputs [examples, channels, ...], and their number.

    Computed once for many batches: it would take Python longer than a GPU takes for a small layer.
    """
    channels, *sizes = lengths
    by_example, by_channel, *by_place = strides
    places = tuple(
        (size - spread * (width - 1) - 1) // step + 1
        for size, spread, width, step in zip(sizes, dilation, kernel, steps, strict=True)
    )
    inside = (jump * spread for jump, spread in zip(by_place, dilation, strict=True))
    between = (jump * step for jump, step in zip(by_place, steps, strict=True))
    return (channels, *kernel, *places), (by_example, by_channel, *inside, *between), math.prod(places)


def constants(module: Any) -> tuple[Tensor, Tensor | None]:
    """Returns a layer's weight and bias, as tensors whose gradients nobody computes."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if not torch.is_grad_enabled():
        return weight, bias
    return weight.detach(), None if bias is None else bias.detach()


def products_of(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Returns the products of an example's vectors, each divided by its length; zero for vectors of zeros."""
    units = (vectors / lengths.clamp(min=2.0**-200)[:, :, None]).float()  # divided in float64
    return torch.bmm(units, units.transpose(1, 2))


def _joined(tensors: list[Tensor]) -> Tensor:
    """Concatenates the tensors of several calls along their positions."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)


_backends: Any = torch.backends
# Where PyTorch keeps how float32 products are rounded, from 2.9 on.
_PRECISIONS: list[Any] = [
    place
    for place in (_backends.cuda.matmul, getattr(_backends.mkldnn, "matmul", None))
    if hasattr(place, "fp32_precision")
]


class full_precision:  # noqa: N801  # a context like torch.no_grad
    """Keeps products of float32 matrices from being rounded to TF32 or bfloat16 within the context."""

    def __enter__(self) -> None:
        self._all = None if _PRECISIONS else torch.get_float32_matmul_precision()
        self._before = [place.fp32_precision for place in _PRECISIONS]
        self._set(["ieee"] * len(_PRECISIONS), self._all and "highest")

    def __exit__(self, *error: object) -> None:
        self._set(self._before, self._all)

    @staticmethod
    def _set(each: list[str], together: str | None) -> None:
        for place, value in zip(_PRECISIONS, each, strict=True):
            place.fp32_precision = value
        if together is not None:
            torch.set_float32_matmul_precision(together)
