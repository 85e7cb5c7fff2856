"""Samples of infinite data sets and gradients of dense layers in Triton, each written once and nothing else.

Equal to `cpsgd.learning.datasets.device` and `cpsgd.learning.gradients` bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpsgd._torch import torch

# Coordinates of an outer product that a program writes.
_BLOCK = 4096


@triton.jit
def _shade(image, row, column, inside, SIDE: tl.constexpr):
    inside &= (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE)
    return tl.load(image + row * SIDE + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def _samples(
    images, classes, fields, moves, numbers, test, train, features, labels, SIDE: tl.constexpr, SIZE: tl.constexpr
):
    # 64 bits: a few million samples have more pixels than 32 bits can number.
    sample = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + sample)
    # As `recipe` of the infinite data sets: 64 bits that wrap around still hold the product modulo 2^32.
    base = (number - test) % train
    first = ((number * 131071) & 0xFFFFFFFF) % 1521
    second = (first + 1 + 2 * number) % 1522
    tl.store(labels + sample, tl.load(classes + base))
    offsets = tl.arange(0, SIZE)
    inside = offsets < SIDE * SIDE
    # Where the pixel comes from, before the image was moved.
    row = offsets // SIDE - tl.load(moves + 2 * (first % 9)).to(tl.int32)
    column = offsets % SIDE - tl.load(moves + 2 * (first % 9) + 1).to(tl.int32)
    there = inside & (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE)
    image = images + base * (SIDE * SIDE)
    across = _shade(image, row, column + 1, there, SIDE) - _shade(image, row, column - 1, there, SIDE)
    along = _shade(image, row + 1, column, there, SIDE) - _shade(image, row - 1, column, there, SIDE)
    place = row * SIDE + column
    a = tl.load(fields + first * (SIDE * SIDE) + place, mask=there, other=0.0)
    b = tl.load(fields + second * (SIDE * SIDE) + place, mask=there, other=0.0)
    value = _shade(image, row, column, there, SIDE) - (across * a - along * b)
    value = tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32).to(tl.float32)
    tl.store(features + sample * (SIDE * SIDE) + offsets, tl.div_rn(value, 255.0), mask=inside)


@triton.jit
def _outer(back, incoming, out, stride, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights = offsets < WIDTH * DEPTH
    # After the weights' gradient follows the bias's: what flows back, as if 1 had come in.
    source = tl.where(weights, offsets // DEPTH, offsets - WIDTH * DEPTH)
    inside = offsets < WIDTH * DEPTH + WIDTH
    left = tl.load(back + row * WIDTH + source, mask=inside, other=0.0)
    right = tl.load(incoming + row * DEPTH + offsets % DEPTH, mask=weights, other=1.0)
    tl.store(out + row * stride + offsets, left * right, mask=inside)


def samples(
    images: torch.Tensor,
    classes: torch.Tensor,
    fields: torch.Tensor,
    moves: torch.Tensor,
    numbers: torch.Tensor,
    test: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Deformed and moved images, shades divided by 255, one flat row per sample; and their labels.

    `classes` are those of the training `images`, `fields` are halved for central differences, and the first `test`
    numbers belong to test images.
    """
    side = images.shape[-1]
    features = torch.empty((len(numbers), side * side), device=images.device)
    labels = torch.empty(len(numbers), dtype=torch.int64, device=images.device)
    arguments = images, classes, fields, moves, numbers, test, len(images), features, labels
    size = triton.next_power_of_2(side * side)
    _samples[(len(numbers),)](*arguments, side, size, num_warps=4, enable_fp_fusion=False)
    return features, labels


def layer_gradients(back: torch.Tensor, incoming: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a layer's gradients to the rows of `out`: `back` times `incoming` for the weights, `back` for the bias."""
    width, depth = back.shape[1], incoming.shape[1]
    grid = len(back), triton.cdiv(width * depth + width, _BLOCK)
    _outer[grid](back, incoming, out, out.stride(0), width, depth, _BLOCK, num_warps=4)
