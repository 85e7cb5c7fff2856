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
    out = torch.empty(len(sums), dtype=torch.float32, device=sums.device)
    tables = [_table(ratio, sums.device) for ratio in ratios]
    kernel = _kernel(sums.device, max(len(table) for table in tables) // 2, most)
    words = struct.unpack("<8i", key or os.urandom(32))
    arguments = [sums, out, len(sums), float(step), float(divisor)]
    for table in tables:
        arguments += [table, len(table) // 2]
    with kernels.current(sums.device):
        kernel(grid=(-(-len(sums) // _THREADS), 1, 1), block=(_THREADS, 1, 1), args=[*arguments, *words])
    return out


@cache
def _table(ratio: float, device: torch.device) -> torch.Tensor:
    """Returns the thresholds of a draw: high halves, then low ones."""
    found = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
    return torch.from_numpy(np.concatenate([found.high, found.low]).view(np.int64)).to(device)


@cache
def _kernel(device: torch.device, longest: int, most: float) -> Any:
    first = 1 << (longest.bit_length() - 1)
    names = {"FIRST_STEP": first, "UNIFORMS": UNIFORMS, "FINER_BITS": FINER_BITS, "MOST": repr(most)}
    return kernels.compiled(device, "noisy", ("learning/device_noise.cu",), names)
