"""Gaussian noise for a sum that one machine holds: exact integers from a cryptographic stream.

The sum is rounded to a grid and gets noise on the grid, so that floating point plays no part in the noise's law:
floats' own Gaussians have gaps that tell (Mironov, "On Significance of the Least Significant Bits for Differential
Privacy", CCS 2012). On a GPU a draw is 2^9 X + Y, both discrete Gaussians of thousands of points, and Y has a deviation
of four points of X's grid. Together they are N_Z(0, v) with a million points per deviation. On a CPU one discrete
Gaussian is refined: 2^9 Z + U, U a sum of uniform numbers. That is N_Z(0, v) + U. Both hold up to a total variation of
`VARIATION` (docs/proofs/private-loop.md), and N_Z(0, v) is a rounding of N(0, v - 5).

Rounding moves each of two neighbours' sums by up to half a point per coordinate, and the float division before it by
2^-13 points: together (1 + 2^-12) √d points. So a vector within D of another is within D/step + (1 + 2^-12) √d points,
and the mechanism is Gaussian with μ = 1/z + (1 + 2^-12) √d/σ for a noise multiplier z, σ points to a deviation.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.codec.rounding import FINER_DRAW_BYTES, FinerGaussian
from cpsgd.codec.rounding import kernels as native
from cpsgd.correlated.draws import FINER_BITS
from cpsgd.errors import ParameterError
from cpsgd.learning import device_noise
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL, GRID_VARIANCE, GRID_VARIATION, LEAST_RATIO, SMOOTHING
from cpsgd.randomness import Keystream
from cpsgd.simulation import device_kernels as kernels

# X's deviation in cells: the more, the finer the grid; and Z's, so that both draws have the same v.
_RATIO = 15.0
_REFINED_RATIO = math.hypot(_RATIO, LEAST_RATIO / 2.0**FINER_BITS)
# Coordinates whose random bytes a thread holds at a time.
_BLOCK = 1 << 14
_THREADS = 16
# The largest sum in points, and what the division by a point may add to the rounding of two of them, 2 · 2^-53 · 2^40.
_MOST, _DIVISION = 2.0**40, 2.0**-12
# While this is held nobody forks: a child finds it free.
_LOCK = Lock()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)

POINTS = math.sqrt(((_RATIO * CELL) * 2.0**FINER_BITS) ** 2 + (LEAST_RATIO * CELL) ** 2 - GRID_VARIANCE) * (1 - 1e-12)
"""Grid points to a standard deviation of the Gaussian that the noise is a rounding of, rounded down."""

VARIATION = 2.0 * (SMOOTHING + 4.0 * (fine_gaussian.farthest(_RATIO) + 1) * 2.0**-128 + GRID_VARIATION + 1e-100)
"""Upper bound on the total variation of one coordinate's noise from its law."""


def gaussian_mu(noise_multiplier: float, dim: int) -> float:
    """Returns μ of the mechanism for vectors of `dim` coordinates, rounded up: neighbours are one clip norm apart.

    Example:
        >>> round(gaussian_mu(1.0, 1_000_000), 5)
        1.00051
    """
    return (1.0 / noise_multiplier + (1.0 + _DIVISION) * math.sqrt(dim) / POINTS) * (1.0 + 1e-12)


class SumNoise:
    """The noise of sums of one length; every draw is used once.

    A GPU draws it where its kernels run (`cpsgd.learning.device_noise`). Elsewhere threads of the CPU draw it before it
    is asked for.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        """Prepares noise for sums of `dim` coordinates on a device."""
        self.dim = dim
        self._device = torch.device(device)
        self._on_device = kernels.compiles(self._device)
        self._begin()

    def _begin(self) -> None:
        """Starts the threads that draw noise in this process, and their first draw."""
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        if not self._on_device:
            self._threads = min(_THREADS, os.cpu_count() or 1, -(-self.dim // _BLOCK))
            self._pool = ThreadPoolExecutor(self._threads)
            _kernel()  # once, before threads ask for it
        self._next = self._start()

    def added(self, sums: torch.Tensor, deviation: float, divisor: float = 1.0) -> torch.Tensor:
        """Returns the sums, rounded to the grid, with noise of this standard deviation, over a divisor, in float32.

        The grid's distance is the deviation over `POINTS`. Sums beyond 2^40 points, half a million deviations, are
        cut off there, which moves no two of them further apart. The noisy sum is an exact integer in float64.

        Raises:
            ParameterError: A CUDA graph is being recorded, which would repeat the noise.
        """
        if sums.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ParameterError("A private step in a CUDA graph would repeat its noise: take steps outside of graphs.")
        step = deviation / POINTS
        if self._on_device:
            return device_noise.noisy_mean(sums, step, divisor, ratios=(_RATIO, LEAST_RATIO), most=_MOST)
        with _LOCK:  # two threads never have the same noise
            if os.getpid() != self._process:  # a forked child: its parent will use what was drawn
                self._begin()
            (noise, parts), self._next = self._next, self._start()
        for part in parts:
            part.result()
        found = torch.empty(self.dim, dtype=torch.float32)
        native.noisy_mean(sums.cpu().numpy(), noise, step, divisor, _MOST, found.numpy())
        return found.to(self._device)

    def _start(self) -> tuple[NDArray[np.int32], list[Future[None]]]:
        if self._pool is None:
            return np.empty(0, dtype=np.int32), []
        drawn, size = np.empty(self.dim, dtype=np.int32), -(-self.dim // self._threads)
        parts = (drawn[start : start + size] for start in range(0, self.dim, size))
        return drawn, [self._pool.submit(_draw, part) for part in parts]


def _draw(out: NDArray[np.int32]) -> None:
    """Writes noise, which is below 2^25, to `out`."""
    stream, kernel = Keystream(), _kernel()
    buffer = stream.buffer(min(_BLOCK, out.size) * FINER_DRAW_BYTES)
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        kernel.draw(stream.fill(buffer, part.size * FINER_DRAW_BYTES), part)


@lru_cache(maxsize=1)
def _kernel() -> FinerGaussian:
    table = fine_gaussian.table(_REFINED_RATIO, fine_gaussian.farthest(_REFINED_RATIO))
    return FinerGaussian(table.high, table.low)
