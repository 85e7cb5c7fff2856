"""The kernels for long vectors against plain ones that take the same steps, bit for bit; and against the plain ones.

On a GPU, or by the emulator where there is none.
"""

from __future__ import annotations

import pytest
import torch

from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian
from cpsgd.mechanisms.interface import Rounding
from cpsgd.protocol import Protocol
from cpsgd.simulation import device_cuda as cuda
from cpsgd.simulation import device_kernels as kernels
from cpsgd.simulation import device_long as long
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.device import DeviceRound

from .roundings import (
    COIN,
    FIFTEEN,
    SMALL,
    exact_coins,
    goodness_of_fit,
    keys_of,
    rows_of,
    signs_of,
    sums_by,
    sums_of,
    zeros,
)

# Powers of two, little and much beyond one, and several numbers of bits that a pass takes: from 2^24 on two passes do.
SHORTEST = [1 << 14, 20_000, 51_370]
DIMS = [1 << 16, 100_000, (1 << 17) - 1, (1 << 18) + 1, 1_000_000, (1 << 20) + 8_191, 3_000_000, 5_000_000, 10_000_000]
LONGEST = [(1 << 24) + 1_000_003, 1 << 25]
GPU = torch.device("cuda", 0)


def transform(rows: torch.Tensor, bits: list[int]) -> None:
    """The transform of rows, stages in this order."""
    whole = rows.contiguous()
    for bit in bits:
        pairs = whole.view(len(whole), -1, 2, 1 << bit)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first += second
        second.copy_(difference)
    rows.copy_(whole)


def rotated(rows: torch.Tensor, bound: float, unit: float) -> torch.Tensor:
    """What the kernels must find for rows that are not clipped."""
    (size, rest, normalise), signs = plain.split(rows.shape[1]), signs_of(rows.shape[1], rows.device)
    once, again = long.stages(rows.shape[1])
    rows = rows * torch.tensor(1.0 / bound, dtype=torch.float32)
    head = rows[:, :size]
    head *= normalise * plain.sign_values(signs, 0, size)
    transform(head, once)
    if rest:
        plain._swap(rows, size, rest)
        head *= normalise * plain.sign_values(signs, size, size)
        transform(head, again)
    return rows * torch.tensor(bound * unit, dtype=torch.float32)


@pytest.mark.parametrize("dim", [*SHORTEST, *DIMS, *LONGEST, 1 << 30])
def test_every_bit_is_transformed_once(dim: int) -> None:
    once, again = long.stages(dim)
    bits = list(range(dim.bit_length() - 1))
    assert sorted(once) == bits
    assert sorted(again) == (bits if dim > 2 << bits[-1] else [])


@pytest.mark.parametrize(
    ("dim", "count"),
    [(20_000, 3), *(pytest.param(dim, 2, marks=pytest.mark.slow) for dim in (1 << 14, 51_370, 1 << 16, 100_000))]
    + [pytest.param(dim, max(2, 20_000_000 // dim), marks=pytest.mark.gpu) for dim in SHORTEST + DIMS],
)
def test_rows(dim: int, count: int, cuda_device: torch.device) -> None:
    rounding = SMALL["three"]
    rows = rows_of(count, dim, cuda_device)
    rows[0, 7], rows[1, dim - 1] = float("nan"), float("inf")
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    found = sums_by(long, rows, bound, unit, rounding, first=7)
    points = rotated(rows, bound, unit)
    points[:2] = 0.0
    assert torch.equal(found, sums_of(points, rounding, first=7))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", LONGEST)
def test_rows_of_four_passes(dim: int) -> None:
    rows = rows_of(2, dim, GPU)
    found = sums_by(long, rows, 1e6, 1e5, SMALL["three"])
    assert torch.equal(found, sums_of(rotated(rows, 1e6, 1e5), SMALL["three"], first=0))


@pytest.mark.parametrize("rounding", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(
    ("dim", "count"), [(20_000, 2), *(pytest.param(100_000, count, marks=pytest.mark.gpu) for count in (1, 300))]
)
def test_roundings(rounding: Rounding, dim: int, count: int, cuda_device: torch.device) -> None:
    rows = rows_of(count, dim, cuda_device)
    unit, bound = 0.4 * rounding.limit, 1e3
    found = sums_by(long, rows, bound, unit, rounding, first=2**31 - 100)
    assert torch.equal(found, sums_of(rotated(rows, bound, unit), rounding, first=2**31 - 100))


@pytest.mark.gpu
def test_sums_that_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide sums are added to the others' in the midst, too, which takes many more clients than a test has."""
    rounding, usual = SMALL["grid points"], kernels.definitions
    rows = rows_of(300, 100_000, GPU)
    unit, bound = 0.4 * rounding.limit, 1e3
    expected = sums_of(rotated(rows, bound, unit), rounding, first=0)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "definitions", lambda *arguments: {**usual(*arguments), "FLUSH": 3})
        long._last_kernel.cache_clear()
        found = sums_by(long, rows, bound, unit, rounding, first=0)
    long._last_kernel.cache_clear()
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_integers_too_large_for_the_kernels() -> None:
    rows = rows_of(20, 100_000, GPU)
    points = rotated(rows, 1e3, 1e6)
    own = torch.cat([rows, rows[:, :5]], dim=1)[:, :100_000]
    long.scale_and_rotate(own, signs_of(100_000, GPU), 1e3, 1e6)
    assert torch.equal(own, points)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [1 << 16, 100_000, 1_000_000])
def test_close_to_the_plain_kernels(dim: int) -> None:
    """Also where rows are clipped: the order of additions moves last digits, and with them few integers, by one."""
    rounding = SMALL["three"]
    rows = rows_of(30_000_000 // dim, dim, GPU)
    unit, bound = 0.4 * rounding.limit, 0.5 * dim**0.5
    found = sums_by(long, rows, bound, unit, rounding, first=0)
    apart = (found - sums_by(plain, rows, bound, unit, rounding)).abs()
    assert int(apart.max()) <= 2
    assert int(apart.sum()) < 3_000  # of 30 million


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [1 << 16, (1 << 16) + 30_000])
@pytest.mark.parametrize("rounding", [COIN["one"], FIFTEEN], ids=["one", "fifteen"])
def test_law_of_coins(rounding: Rounding, dim: int) -> None:
    """A vector with one coordinate becomes one with few different coordinates, and each has the exact law."""
    rows = torch.zeros(2, dim, device="cuda")
    rows[:, 1] = 1.0
    unit = 0.3 * rounding.limit * dim**0.5
    points = rotated(rows, 1e3, unit)[0].clamp(-rounding.limit, rounding.limit).round().long().cpu().numpy()
    found = sums_by(long, rows, 1e3, unit, rounding, first=0).cpu().numpy()
    values, numbers = torch.unique(torch.from_numpy(points), return_counts=True)
    common = [int(value) for value, number in zip(values, numbers, strict=True) if number > 10_000]
    assert common
    for point in common:
        assert goodness_of_fit(found[points == point], exact_coins(rounding, [point] * 2)) > 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", [SMALL["three"], FIFTEEN], ids=["three", "fifteen"])
def test_the_same_sums_every_time(rounding: Rounding) -> None:
    """A race would show itself now and then."""
    for dim in (100_000, 1_000_000):
        rows = rows_of(40_000_000 // dim, dim, GPU)
        expected = sums_by(long, rows, 1.0, 5e5, rounding, first=0)
        for _ in range(30):
            assert torch.equal(sums_by(long, rows, 1.0, 5e5, rounding, first=0), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [*DIMS, *LONGEST])
def test_rotation_back(dim: int) -> None:
    vector = rows_of(1, dim, GPU)[0].clone()
    rows = vector[None].clone()
    long.scale_and_rotate(rows, signs_of(dim, GPU), 1e6, 1.0)
    back = rows[0].clone()
    long.rotate_back(back, signs_of(dim, GPU))
    torch.testing.assert_close(back, vector, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(rows[0].norm(), vector.norm(), rtol=1e-4, atol=0.0)
    plain.rotate_back(rows[0], signs_of(dim, GPU))
    torch.testing.assert_close(rows[0], vector, rtol=0.0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mechanism",
    [
        Binomial(levels=3, trials=13, coordinate_range=1e3),
        Binomial(levels=100, trials=13, coordinate_range=1e3),
        Coins(coins=255, theta=0.0078, coordinate_range=12.0),
        RoundedGaussian(noise_deviation=90.0, step=0.1, window=2048, coordinate_range=20.0),
    ],
    ids=["small", "large", "many coins", "Gaussian"],
)
def test_a_round(mechanism: Mechanism) -> None:
    """Small integers, large ones, and such as the last pass leaves to another kernel."""
    dim = 100_000
    protocol = Protocol(clients=500, dim=dim, clip_norm=1e3, mechanism=mechanism)
    rows = rows_of(500, dim, GPU)
    rounds = [DeviceRound(protocol, 0, seed=1, device="cuda", kernels=kernels) for kernels in (None, plain)]
    for round_ in rounds:
        round_.add(rows.clone())
    means = [round_.mean() for round_ in rounds]
    # The same noise and random words: what differs is last digits, and few integers.
    apart = torch.linalg.vector_norm(means[0] - means[1]) / torch.linalg.vector_norm(means[1])
    assert float(apart) < 1e-2


@pytest.mark.gpu
def test_memory_beside_the_rows() -> None:
    rows = rows_of(200, 1_000_000, GPU)
    encoding = plain.Encoding(signs_of(1_000_000, GPU), 1e3, 1e5, keys_of(GPU), SMALL["three"])
    sums = zeros(1_000_000, GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    long.add_rows(rows, sums, encoding, 0)
    assert torch.cuda.max_memory_allocated() - before < rows.numel() * 4 // 100


def test_short_vectors_where_shared_memory_is_small(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of other GPUs cannot hold 2^15 numbers."""
    assert not cuda.is_long(cuda_device, 51_370)
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 99 << 10)
    assert cuda.is_long(cuda_device, 51_370)
    assert not cuda.is_long(cuda_device, 20_000)
    rows, rounding = rows_of(2, 51_370, cuda_device), SMALL["three"]
    assert torch.equal(sums_by(cuda, rows, 1e3, 1e5, rounding), sums_of(rotated(rows, 1e3, 1e5), rounding, first=0))
    back = rows[0].clone()
    cuda.scale_and_rotate(back[None], signs_of(51_370, cuda_device), 1e6, 1.0)
    cuda.rotate_back(back, signs_of(51_370, cuda_device))
    torch.testing.assert_close(back, rows[0], rtol=0.0, atol=1e-5)
