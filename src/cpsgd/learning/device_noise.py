"""The noise of a sum, drawn on the GPU that holds it (`device_noise.cu`), by the law of `cpsgd.learning.sum_noise`.

Random bytes are ChaCha20's under a key that the operating system draws for one sum and that is kept nowhere. So no
restart, copy or fork can repeat it. (A launch that a CUDA graph records would be repeated with its key: `SumNoise`
refuses that.)
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.codec.rounding import UNIFORMS
from cpsgd.correlated.draws import FINER_BITS
from cpsgd.mechanisms import fine_gaussian
from cpsgd.simulation import device_kernels as kernels

_THREADS = 128


def noisy_mean(
    sums: torch.Tensor, step: float, divisor: float, *, ratios: tuple[float, float], most: float, key: bytes = b""
) -> torch.Tensor:
    """Returns (sums rounded to multiples of `step`, with noise) / divisor, in float32.

    Args:
        sums: Float64 numbers on a GPU.
        step: The grid's distance.
        divisor: What the noisy sum is divided by.
        ratios: Deviations of the coarse and the fine part of the noise, in cells.
        most: Sums are cut off at this many points.
        key: 32 bytes, for tests only; drawn anew if not given.
    """
    count, device = sums.shape[0], sums.device
    out = torch.empty(count, dtype=torch.float32, device=device)
    kernel, tables = _prepared(device, ratios, most)
    words = struct.unpack("<8i", key or os.urandom(32))
    arguments = [sums, out, count, float(step), float(divisor), *tables, *words]
    with kernels.current(device):
        kernel(grid=(-(-count // _THREADS), 1, 1), block=(_THREADS, 1, 1), args=arguments)
    return out


@cache
def _prepared(device: torch.device, ratios: tuple[float, float], most: float) -> tuple[Any, list[Any]]:
    """Returns the kernel, and the thresholds of each draw (high halves, then low ones) with their number."""
    tables: list[Any] = []
    longest = 0
    for ratio in ratios:
        found = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
        halves = np.concatenate([found.high, found.low]).view(np.int64)
        tables += [torch.from_numpy(halves).to(device), found.high.size]
        longest = max(longest, found.high.size)
    first = 1 << (longest.bit_length() - 1)
    names = {"FIRST_STEP": first, "UNIFORMS": UNIFORMS, "FINER_BITS": FINER_BITS, "MOST": repr(most)}
    return kernels.compiled(device, "noisy", ("learning/device_noise.cu",), names), tables
