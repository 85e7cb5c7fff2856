"""Examples' gradients as a backward pass leaves them: rows, and factors of dense layers; norms and weighted sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from cpsgd._torch import torch

Tensor = torch.Tensor

# Bytes of temporary matrices, on a CPU (the size of its caches) and on a GPU.
_CPU_BYTES, _GPU_BYTES = 1 << 23, 1 << 28


@dataclass(frozen=True)
class Row:
    """Gradients of one parameter, a row for each example.

    Attributes:
        rows: [examples, numbers].
        key: Name of the parameter.
    """

    rows: Tensor
    key: str

    def norm(self) -> Tensor:
        """Returns the norms of the examples' parts of the gradient, in float64."""
        return length(self.rows)

    def add(self, weights: Tensor, finite: Tensor | None, sums: Mapping[str, Tensor]) -> None:
        """Adds Σ_i weights_i g_i to the `sums` of the layer's parameters, in float64.

        Examples that are not `finite` count as zeros; None means that all are.
        """
        total = sums[self.key].view(-1)
        for part, weight, good in portions(self.rows.shape[1] * 8, self.rows, weights, finite):
            total.addmv_(cleaned(part, good).t(), weight)


@dataclass(frozen=True)
class OuterProduct:
    """Gradients of a dense layer's weights for each example, as factors b and a of b ⊗ a.

    Attributes:
        back: b, [examples, outputs].
        inputs: a, [examples, inputs].
        bias: Whether b is the gradient by the bias, too.
    """

    back: Tensor
    inputs: Tensor
    bias: bool

    def norm(self) -> Tensor:
        """Returns |b| |a|, or |b| √(|a|² + 1) with a bias."""
        a = length(self.inputs)
        return length(self.back) * (torch.hypot(a, torch.ones_like(a)) if self.bias else a)

    def add(self, weights: Tensor, finite: Tensor | None, sums: Mapping[str, Tensor]) -> None:
        """Adds the weighted sums by one product of matrices."""
        size = 8 * (self.back.shape[1] + self.inputs.shape[1])
        for b, a, weight, good in portions(size, self.back, self.inputs, weights, finite):
            back = weighed(b, weight, good).t()
            sums["weight"].view(len(back), -1).addmm_(back, cleaned(a, good))
            if self.bias:
                sums["bias"].add_(back.sum(1))


Piece = Row | OuterProduct


def length(rows: Tensor) -> Tensor:
    """Returns the norms of the last dimension, in float64."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return found


def cleaned(tensor: Tensor, finite: Tensor | None) -> Tensor:
    """Returns the tensor in float64, with zeros for the examples that are not `finite`; None means that all are."""
    if finite is None:
        return tensor.double()
    return torch.where(finite.view(-1, *[1] * (tensor.dim() - 1)), tensor, _zero(tensor.device))


def weighed(tensor: Tensor, weights: Tensor, finite: Tensor | None) -> Tensor:
    """Returns the examples times their weights, in float64, with zeros for those that are not `finite`."""
    found = tensor * weights.view(-1, *[1] * (tensor.dim() - 1))
    return found if finite is None else cleaned(found, finite)


@cache
def _zero(device: torch.device) -> Tensor:
    """Returns a one-dimensional float64 zero; adding it to other numbers makes them float64."""
    return torch.zeros(1, dtype=torch.float64, device=device)


def portions(size: int, *tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors in parts of some megabytes, given `size` bytes per example; None stays None."""
    (first, *_) = tensors
    assert first is not None
    step = max(1, (_CPU_BYTES if first.device.type == "cpu" else _GPU_BYTES) // max(1, size))
    if len(first) <= step:
        yield tensors  # type: ignore[misc]
        return
    for start in range(0, len(first), step):
        yield tuple(None if each is None else each[start : start + step] for each in tensors)  # type: ignore[misc]
