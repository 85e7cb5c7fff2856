"""Weighted sums of examples' gradients on a GPU in two launches, where units keep rows and factors of dense layers.

A step of a small model takes a GPU less time than it takes Python to start its operations. So one kernel
(`device_weights.cu`) finds all norms and weights, and a second one all weighted sums, in float64 and without copies.
Examples that are not finite count as zeros there, which takes no question to the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cpsgd._torch import torch
from cpsgd.learning.pieces import Piece, Row
from cpsgd.simulation import device_kernels as kernels

MOST_PIECES = 64
"""The most pieces of a launch: each has up to two addresses, and a kernel has little room for parameters."""

TILE = 32
"""A block of the second kernel adds up this many rows and columns of a matrix, or twice as many numbers of a row."""

SLICE = 256
"""The most examples that a block of the second kernel adds up."""

_THREADS, _ADDING_THREADS = 256, 64
# Infinity, as CUDA C++ has no name for it without its headers.
_INFINITY = "(1e300 * 1e300)"


def add_weighted(
    pieces: Sequence[tuple[Piece, Mapping[str, torch.Tensor]]],
    rest: Sequence[torch.Tensor],
    total: torch.Tensor,
    *,
    count: int,
    most: float,
    scale: float,
) -> torch.Tensor:
    """Adds Σ_i w_i g_i to sums, w_i = min(most / norm of g_i, scale), and returns the norms and w, [2, examples].

    An example whose norm is not finite has no weight.

    Args:
        pieces: What examples' gradients consist of, each with the sums of its layer's parameters.
        rest: Norms of what the gradients consist of besides.
        total: All sums, in float64; those of the pieces are views of it.
        count: The first examples that count; the others have no weight.
        most: The longest that a weighted gradient may be.
        scale: The largest weight.
    """
    sources: list[torch.Tensor] = []
    layout: list[tuple[int, Any, Any]] = []  # kind, and the places of weight and bias in `total`
    for piece, sums in pieces:
        if isinstance(piece, Row):
            sources.append(piece.rows.contiguous())
            layout.append((ROW, sums[piece.key].storage_offset(), 0))
        else:
            sources += [piece.back.contiguous(), piece.inputs.contiguous()]
            bias = sums["bias"].storage_offset() if piece.bias else 0
            layout += [(BACK_BIAS if piece.bias else BACK, sums["weight"].storage_offset(), bias), (INPUT, 0, 0)]
    examples = len(sources[0])
    found = torch.empty((2, examples), dtype=torch.float64, device=total.device)
    beside = torch.linalg.vector_norm(torch.stack([*rest]), dim=0) if rest else found
    widths = tuple(source.shape[1] for source in sources)
    weigh, add, blocks = _kernels(total.device, widths, tuple(layout))
    with kernels.current(total.device):
        arguments = [*sources, beside, int(bool(rest)), found, examples, count, float(most), float(scale)]
        weigh(grid=(examples, 1, 1), block=(_THREADS, 1, 1), args=arguments)
        grid = blocks, -(-examples // SLICE), 1
        add(grid=grid, block=(_ADDING_THREADS, 1, 1), args=[*sources, found, examples, total])
    return found


# What a tensor is, as in `device_weights.cu`.
ROW, BACK, BACK_BIAS, INPUT = range(4)


@cache
def _kernels(
    device: torch.device, widths: tuple[int, ...], layout: tuple[tuple[int, int, int], ...]
) -> tuple[Any, Any, int]:
    """Returns the two kernels for tensors of these widths, and the number of the second one's blocks."""
    kinds, weight_places, bias_places = zip(*layout, strict=True)
    starts = [0]
    for k, (kind, width) in enumerate(zip(kinds, widths, strict=True)):
        if kind in (ROW, INPUT):
            tiles = -(-width // (2 * TILE))
        else:  # tiles of the matrix b ⊗ (a, 1)
            tiles = -(-width // TILE) * -(-(widths[k + 1] + (kind == BACK_BIAS)) // TILE)
        starts.append(starts[-1] + (0 if kind == INPUT else tiles))
    numbers = range(len(widths))
    names = {
        "COUNT": len(widths),
        "PARAMETERS": ", ".join(f"const float* s{k}" for k in numbers),
        "SOURCES": ", ".join(f"s{k}" for k in numbers),
        "INFINITY_BITS": _INFINITY,
        "TILE": TILE,
        "SLICE": SLICE,
    }
    lists = {"WIDTHS": widths, "KINDS": kinds, "STARTS": starts, "PLACES": weight_places, "BIAS_PLACES": bias_places}
    names |= {key: ", ".join(map(str, values)) for key, values in lists.items()}
    files = ("learning/device_weights.cu",)
    return *(kernels.compiled(device, kernel, files, names) for kernel in ("weigh", "add_up")), starts[-1]
