"""Weighted sums of examples' gradients on a GPU in few launches, where units keep rows and factors of dense layers.

A step of a small model takes a GPU less time than it takes Python to start its operations. So one kernel
(`device_weights.cu`) finds all norms and weights, and writes weighted copies in float64; products of matrices add these
up. Examples that are not finite become zeros there, which takes no question to the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cpsgd._torch import torch
from cpsgd.learning.pieces import Piece, Row
from cpsgd.simulation import device_kernels as kernels

MOST_PIECES = 64
"""The most pieces of a launch: each has up to four addresses, and a kernel has little room for parameters."""

_THREADS = 256
# Infinity, as CUDA C++ has no name for it without its headers.
_INFINITY = "(1e300 * 1e300)"


def add_weighted(
    pieces: Sequence[tuple[Piece, Mapping[str, torch.Tensor]]],
    rest: Sequence[torch.Tensor],
    *,
    count: int,
    most: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds Σ_i w_i g_i to sums, w_i = min(most / norm of g_i, scale), and returns the norms and w.

    An example whose norm is not finite has no weight.

    Args:
        pieces: What examples' gradients consist of, each with the sums, in float64, of its layer's parameters.
        rest: Norms of what the gradients consist of besides.
        count: The first examples that count; the others have no weight.
        most: The longest that a weighted gradient may be.
        scale: The largest weight.
    """
    sources, kinds = [], []
    for piece, _ in pieces:
        if isinstance(piece, Row):
            sources.append(piece.rows.contiguous())
            kinds.append(0)
        else:
            sources += [piece.back.contiguous(), piece.inputs.contiguous()]
            kinds += [2 if piece.bias else 1, 3]
    device, examples = sources[0].device, len(sources[0])
    targets = [torch.empty(source.shape, dtype=torch.float64, device=device) for source in sources]
    norms, weights = torch.empty((2, examples), dtype=torch.float64, device=device)
    beside = torch.linalg.vector_norm(torch.stack([*rest]), dim=0) if rest else norms
    kernel = _kernel(device, tuple(source.shape[1] for source in sources), tuple(kinds))
    with kernels.current(device):
        arguments = [*sources, *targets, beside, int(bool(rest)), norms, weights, count, float(most), float(scale)]
        kernel(grid=(examples, 1, 1), block=(_THREADS, 1, 1), args=arguments)
    ones, written = _ones(device, 1 << (examples - 1).bit_length())[:examples], iter(targets)
    for piece, sums in pieces:
        if isinstance(piece, Row):
            sums[piece.key].view(-1).addmv_(next(written).t(), ones)
            continue
        back = next(written).t()
        sums["weight"].view(len(back), -1).addmm_(back, next(written))
        if piece.bias:
            sums["bias"].addmv_(back, ones)
    return norms, weights


@cache
def _ones(device: torch.device, size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.float64, device=device)


@cache
def _kernel(device: torch.device, widths: tuple[int, ...], kinds: tuple[int, ...]) -> Any:
    numbers = range(len(widths))
    parameters = [f"const float* s{k}" for k in numbers] + [f"double* t{k}" for k in numbers]
    names = {
        "COUNT": len(widths),
        "PARAMETERS": ", ".join(parameters),
        "SOURCES": ", ".join(f"s{k}" for k in numbers),
        "TARGETS": ", ".join(f"t{k}" for k in numbers),
        "WIDTHS": ", ".join(map(str, widths)),
        "KINDS": ", ".join(map(str, kinds)),
        "INFINITY_BITS": _INFINITY,
    }
    return kernels.compiled(device, "weigh", ("learning/device_weights.cu",), names)
