"""Noise drawn by a GPU: each number equal to the draws of the CPU from the bytes of an independent ChaCha20."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from cpsgd.codec.rounding import UNIFORMS
from cpsgd.correlated.draws import draw
from cpsgd.errors import ParameterError
from cpsgd.learning import device_noise
from cpsgd.learning.device_noise import noisy_mean
from cpsgd.learning.sum_noise import POINTS, SumNoise
from tests.simulation.device.emulator import emulate

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
KEY = bytes(range(7, 39))
RATIOS, MOST = (15.0, 8.0), 2.0**52

# On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU the kernel is emulated."""
    if DEVICE.type == "cpu":
        device_noise._prepared.cache_clear()
        emulate(monkeypatch)


def drawn(key: bytes, part: int, ratio: float, count: int) -> NDArray[np.int64]:
    """Returns the draws of the CPU from the first 44 bytes of each ChaCha20 block."""
    nonce = struct.pack("<4I", 0, part, 0, 0)  # the counter, and then the nonce
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(64 * count))
    blocks = np.frombuffer(stream, np.uint8).reshape(count, 64)
    planes = blocks[:, 16 : 16 + UNIFORMS].T
    return draw(ratio, np.concatenate([blocks[:, :16].ravel(), planes.ravel()]), count)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dim", [1, 127, 128, 3001])
def test_noise_equals_the_draws_of_the_processor(dim: int) -> None:
    sums = torch.linspace(-3.0, 5.0, dim, dtype=torch.float64)
    step, divisor = 0.7 / POINTS, 256
    noise = (drawn(KEY, 0, RATIOS[0], dim) << 9) + drawn(KEY, 1, RATIOS[1], dim)
    expected = ((sums / step).round() + torch.from_numpy(noise)) * step / divisor
    found = noisy_mean(sums.to(DEVICE), step, divisor, ratios=RATIOS, most=MOST, key=KEY).cpu()
    assert torch.equal(found, expected.float())


@pytest.mark.gpu
def test_a_million_draws_equal_those_of_the_processor() -> None:
    dim = 1_000_003
    noise = (drawn(KEY, 0, RATIOS[0], dim) << 9) + drawn(KEY, 1, RATIOS[1], dim)
    zero = torch.zeros(dim, dtype=torch.float64, device=DEVICE)
    found = noisy_mean(zero, 1.0, 1.0, ratios=RATIOS, most=MOST, key=KEY).cpu()
    assert torch.equal(found, torch.from_numpy(noise).float())


@pytest.mark.usefixtures("kernels")
def test_sums_that_are_not_finite_or_far_too_large_are_cut_off() -> None:
    sums = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300], dtype=torch.float64, device=DEVICE)
    found = noisy_mean(sums, 1.0, 1.0, ratios=RATIOS, most=MOST, key=KEY).cpu().double()
    assert float(found[0].abs()) < 2.0**25
    assert [round(float(x) / MOST, 6) for x in found[1:]] == [1.0, -1.0, 1.0]


@pytest.mark.usefixtures("kernels")
def test_keys_are_drawn_anew_for_every_sum() -> None:
    noise = SumNoise(64, DEVICE)
    assert noise._pool is None  # nothing is drawn on the CPU
    zero = torch.zeros(64, dtype=torch.float64, device=DEVICE)
    first, second = noise.added(zero, 1.0), noise.added(zero, 1.0)
    assert not torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_noise_in_a_cuda_graph_is_refused() -> None:
    noise, zero = SumNoise(64, DEVICE), torch.zeros(64, dtype=torch.float64, device=DEVICE)
    noise.added(zero, 1.0)
    with pytest.raises(ParameterError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        noise.added(zero, 1.0)
