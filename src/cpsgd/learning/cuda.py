"""Samples of infinite data sets and gradients of dense layers in CUDA C++ (`device_samples.cu`), each written once.

Equal to `cpsgd.learning.datasets.device_data` and `cpsgd.learning.gradients` bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cpsgd._torch import torch
from cpsgd.simulation import device_kernels as kernels

# Threads of a block, and coordinates of an outer product that it writes.
_THREADS, _BLOCK = 256, 4096


def samples(
    images: torch.Tensor,
    classes: torch.Tensor,
    fields: torch.Tensor,
    moves: torch.Tensor,
    numbers: torch.Tensor,
    test: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes deformed and moved images, shades divided by 255, one flat row per sample; and their labels.

    `classes` are those of the training `images`, `fields` are halved for central differences, and the first `test`
    numbers belong to test images.
    """
    side, count = images.shape[-1], len(numbers)
    features = torch.empty((count, side * side), device=images.device)
    labels = torch.empty(count, dtype=torch.int64, device=images.device)
    arguments = [images, classes, fields, moves, numbers, test, len(images), features, labels]
    if count:
        _kernel(images.device, "samples", SIDE=side)(grid=(count, 1, 1), block=(_THREADS, 1, 1), args=arguments)
    return features, labels


def layer_gradients(back: torch.Tensor, incoming: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a layer's gradients to the rows of `out`: `back` times `incoming` for the weights, `back` for the bias."""
    width, depth = back.shape[1], incoming.shape[1]
    grid = len(back) * -(-(width * depth + width) // _BLOCK), 1, 1
    kernel = _kernel(back.device, "outer", WIDTH=width, DEPTH=depth, BLOCK=_BLOCK)
    if len(back):
        kernel(grid=grid, block=(_THREADS, 1, 1), args=[back.contiguous(), incoming.contiguous(), out, out.stride(0)])


@cache
def _kernel(device: torch.device, kernel: str, **names: int) -> Any:
    return kernels.compiled(device, kernel, ("learning/device_samples.cu",), names)
