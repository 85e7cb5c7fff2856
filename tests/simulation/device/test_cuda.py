"""The CUDA kernels against the plain ones, bit for bit: on a GPU, or by the emulator where there is none."""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import VectorError
from cpsgd.learning import dense, gradients
from cpsgd.learning.models import mlp
from cpsgd.mechanisms import Binomial, Mechanism, RoundedGaussian
from cpsgd.mechanisms.interface import Rounding
from cpsgd.protocol import Protocol
from cpsgd.simulation import device_cuda as cuda
from cpsgd.simulation import device_kernels as kernels
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.device import DeviceRound
from cpsgd.simulation.products import Layout, Products, chunk_tables

from .emulator import forget
from .roundings import (
    COIN,
    DRAWN,
    FIFTEEN,
    HALF,
    KEY,
    SMALL,
    exact_coins,
    goodness_of_fit,
    keys_of,
    options_of,
    rounding_to,
    rows_of,
    signs_of,
    sums_by,
    sums_of,
    zeros,
)

PAPER = Layout(((60, 784), (60, 60), (10, 60)))
# Lengths of one warp's rows and of several, whole powers of two and others.
SHORT = [*(pytest.param(dim, marks=pytest.mark.slow) for dim in (1, 5, 33, 100, 1_024, 5_000)), 31, 1_000, 1_500]


def large(*sizes: Any) -> list[Any]:
    """Sizes that only a GPU computes in a test's time."""
    return [pytest.param(*(size if isinstance(size, tuple) else (size,)), marks=pytest.mark.gpu) for size in sizes]


def some(roundings: dict[str, Rounding], *names: str) -> list[Any]:
    """All of these, slow but for some: the emulator compiles a kernel for each."""
    marks = {name: () if name in names or torch.cuda.is_available() else pytest.mark.slow for name in roundings}
    return [pytest.param(rounding, id=name, marks=marks[name]) for name, rounding in roundings.items()]


@pytest.mark.parametrize("dim", [*SHORT, *large(20_000, 51_370, 65_535)])
def test_scaling_and_rotation(dim: int, cuda_device: torch.device) -> None:
    rows = rows_of(3 if dim < 10_000 else 300, dim, cuda_device)
    rows[0] *= 0.01
    rows[1, dim // 2] = float("nan")
    found, expected, signs = rows.clone(), rows.clone(), signs_of(dim, cuda_device)
    bound = 0.5 * dim**0.5
    cuda.scale_and_rotate(found, signs, bound, 1234.567)
    plain.scale(expected, bound, 1234.567)
    plain.rotate(expected, signs)
    # The norms of rows are summed in another order, which may move the last digit of a clipped row's factor.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-3)
    assert torch.equal(found[0], expected[0])
    assert bool((found[1] == 0.0).all())


@pytest.mark.parametrize(
    "dim", [*SHORT, pytest.param(10_000, marks=pytest.mark.slow), *large(20_000, 32_768, 33_000, 51_370, 65_535)]
)
def test_rotation_back(dim: int, cuda_device: torch.device) -> None:
    found = rows_of(1, dim, cuda_device)[0].clone()
    expected = found.clone()
    cuda.rotate_back(found, signs_of(dim, cuda_device))
    plain.rotate_back(expected, signs_of(dim, cuda_device))
    assert torch.equal(found, expected)


EVERY = {
    **COIN,
    "levels": rounding_to(3),
    "fine levels": rounding_to(2**17),
    "finest levels": rounding_to(2**24),
    "grid points": Rounding(37, 37, 0),
    "many grid points": Rounding(2**24, 2**24, 0),
    "64 coins": Rounding(500, HALF, 16, coins=64),
    "255 coins": Rounding(500, HALF, 16, coins=255),
}


@pytest.mark.parametrize("rounding", some(EVERY, "levels", "finest levels", "three", "many"))
@pytest.mark.parametrize(("dim", "count"), [(5, 3), (600, 130), (9_000, 2), *large((51_370, 1_000))])
def test_rounding(rounding: Rounding, dim: int, count: int, cuda_device: torch.device) -> None:
    # Some coordinates are out of range, and some half-way between two points of the grid.
    rows = rows_of(count, dim, cuda_device) * float(rounding.limit)
    rows[:, :3] = torch.tensor([0.5, 1.5, -2.5], device=cuda_device)
    found = zeros(dim, cuda_device)
    cuda.round_and_sum(rows, found, **options_of(rounding, cuda_device, 7))
    assert torch.equal(found, sums_of(rows, rounding, 7))


@pytest.mark.gpu
def test_4095_coins(cuda_device: torch.device) -> None:
    test_rounding(Rounding(500, HALF, 16, coins=4095), 3_000, 130, cuda_device)


@pytest.mark.parametrize("trials", [1, 31, 32, 129, 500, *large(8_192, 130_000)])
def test_coins_of_the_sum(trials: int, cuda_device: torch.device) -> None:
    found, expected = zeros(300, cuda_device), zeros(300, cuda_device)
    cuda.add_coins(found, keys=keys_of(cuda_device), trials=trials)
    plain.add_coins(expected, keys=keys_of(cuda_device), trials=trials)
    assert torch.equal(found, expected)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the fused kernel add all rows that it takes."""
    monkeypatch.setattr(cuda, "is_fused_faster", lambda rounding: True)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("rounding", some(SMALL, "three", "three coins", "grid points"))
@pytest.mark.parametrize(
    ("dim", "count"),
    [(9_001, 5), *large((8_192, 999), (51_370, 1_500), (32_768, 200), (65_535, 133), (33_000, 1), (10_000, 5_000))],
)
def test_rows(rounding: Rounding, dim: int, count: int, cuda_device: torch.device) -> None:
    assert cuda.takes(cuda_device, dim, rounding)
    rows = rows_of(count, dim, cuda_device)
    rows[0, 7] = float("nan")
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    assert torch.equal(sums_by(cuda, rows, bound, unit, rounding, 7), sums_by(plain, rows, bound, unit, rounding, 7))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    "dim", [51_370, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (8_192, 20_000, 65_535))]
)
def test_rows_of_other_lengths(dim: int, cuda_device: torch.device) -> None:
    test_rows(SMALL["three"], dim, 3, cuda_device)


@pytest.mark.parametrize(("dim", "count"), [(1_500, 3), *large((300, 999), (9_001, 500), (20_000, 700), (51_370, 300))])
@pytest.mark.parametrize("rounding", [SMALL["three"], SMALL["grid points"]], ids=["levels", "wide"])
def test_rows_step_by_step(rounding: Rounding, dim: int, count: int, cuda_device: torch.device) -> None:
    assert not (cuda.takes(cuda_device, dim, rounding) and cuda.is_fused_faster(rounding))
    rows = rows_of(count, dim, cuda_device)
    rows[0, 7] = float("nan")
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    assert torch.equal(sums_by(cuda, rows, bound, unit, rounding, 7), sums_by(plain, rows, bound, unit, rounding, 7))


@pytest.mark.parametrize("rounding", [SMALL["three"], COIN["many"]], ids=["levels", "many coins"])
def test_rows_that_are_not_rotated(rounding: Rounding, cuda_device: torch.device) -> None:
    rows = rows_of(5, 300, cuda_device)
    encoding = plain.Encoding(None, 1e3, 0.4 * rounding.limit, keys_of(cuda_device), rounding)
    found, expected = zeros(300, cuda_device), zeros(300, cuda_device)
    cuda.add_rows(rows.clone(), found, encoding, 0)
    plain.add_rows(rows.clone(), expected, encoding, 0)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("rounding", [SMALL["grid points"], SMALL["hundred"]], ids=["grid points", "hundred"])
@pytest.mark.parametrize(("dim", "count"), [(9_001, 17), *large((51_370, 1_500))])
def test_sums_that_are_full(
    rounding: Rounding, dim: int, count: int, cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide sums are added to the others' in the midst, too, which takes many more clients than a test has."""
    rows = rows_of(count, dim, cuda_device)
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    usual = kernels.definitions
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "definitions", lambda *arguments: {**usual(*arguments), "FLUSH": 3})
        cuda._fused.cache_clear()
        found = sums_by(cuda, rows, bound, unit, rounding, 7)
    cuda._fused.cache_clear()
    assert torch.equal(found, sums_by(plain, rows, bound, unit, rounding, 7))


@pytest.mark.parametrize(
    ("dim", "rounding", "layers"),
    [
        (65_535, Rounding(4_095, HALF, 16, coins=8), None),
        (63_010, Rounding(2_000, HALF, 16, coins=15), ((3_000, 10), (10, 3_000))),
        (60_010, Rounding(36_447, 36_447, 0), ((1, 30_000), (1, 30_008))),
    ],
    ids=["table", "factors", "many factors"],
)
def test_what_has_no_room_in_a_multiprocessor_is_left_to_others(
    dim: int, rounding: Rounding, layers: tuple[tuple[int, int], ...] | None, cuda_device: torch.device
) -> None:
    layout = None if layers is None else Layout(layers)
    assert layout is None or layout.dim == dim
    assert cuda.takes(cuda_device, 51_370, rounding)
    assert cuda.takes(cuda_device, dim, rounding) == (layout is not None)
    assert layout is None or not cuda.takes(cuda_device, dim, rounding, layout)


def test_what_the_fused_kernel_does_not_take(cuda_device: torch.device) -> None:
    assert not cuda.takes(cuda_device, 8_191, SMALL["three"])
    assert not cuda.takes(cuda_device, 1 << 16, SMALL["three"])
    assert not cuda.takes(cuda_device, 51_370, COIN["many"])
    assert not cuda.takes(cuda_device, 51_370, Rounding(1 << 22, 1 << 22, 0))


@pytest.mark.gpu
def test_rows_that_are_clipped(cuda_device: torch.device) -> None:
    # The last digit of a factor may be another, which moves few points of so coarse a grid, and those by one.
    rounding = SMALL["three"]
    for dim, count in ((51_370, 300), (10_000, 1_500)):
        rows = rows_of(count, dim, cuda_device)
        unit, bound = 0.4 * rounding.limit, 0.5 * dim**0.5
        apart = (sums_by(cuda, rows, bound, unit, rounding) - sums_by(plain, rows, bound, unit, rounding)).abs()
        assert int(apart.max()) <= 2
        assert int(apart.sum()) < 1_000  # of 15 million


@pytest.fixture(params=[(784, 1_500), (100, 20)] if torch.cuda.is_available() else [(100, 4)], ids=str)
def products(request: pytest.FixtureRequest, cuda_device: torch.device) -> tuple[torch.Tensor, Products]:
    """Gradients of some examples, written out and not: of the paper's network, and of one with 10,330 parameters."""
    features, count = request.param
    model = mlp(features, 10, seed=1).to(cuda_device)
    layers = dense.dense_layers(model, torch.nn.functional.cross_entropy)
    assert layers is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, features, generator=generator).to(cuda_device)
    y = torch.randint(0, 10, (count,), generator=generator).to(cuda_device)
    updates = gradients.ClientUpdates(model, torch.nn.functional.cross_entropy)
    updates._layers = layers  # also on the emulator's CPU
    found = updates.products(x, y, np.ones(count, dtype=int))
    assert found is not None
    rows = torch.empty(count, found.layout.dim, device=cuda_device)
    dense.write_dense_gradients(layers, x, y, rows)
    left, right = found.layout.pairs().T
    written = found.factors[:, left] * found.factors[:, right]
    # Matrices are multiplied in another order where they lie otherwise.
    torch.testing.assert_close(written, rows, rtol=1e-4, atol=1e-6)
    return written, found


@pytest.mark.parametrize("rounding", some(SMALL | DRAWN, "three", "fifteen coins"))
def test_products(rounding: Rounding, products: tuple[torch.Tensor, Products]) -> None:
    rows, factors = products
    found = sums_by(cuda, factors, 1e3, 20.0 * rounding.limit, rounding, 3)
    # Rows whose coins are drawn by inversion are tested below.
    expected = sums_by(cuda if kernels.is_drawn(rounding) else plain, rows, 1e3, 20.0 * rounding.limit, rounding, 3)
    assert torch.equal(found, expected)


def test_products_that_are_clipped_or_broken(products: tuple[torch.Tensor, Products]) -> None:
    rounding = SMALL["three"]
    rows, factors = products
    broken = factors.factors.clone()
    broken[1, 3] = float("inf")
    broken[2, 80] = float("nan")
    rows = rows.clone()
    rows[1:3] = 0.0
    unit = 30.0 * rounding.limit
    found = sums_by(cuda, Products(factors.layout, broken), 0.5, unit, rounding)
    apart = (found - sums_by(plain, rows, 0.5, unit, rounding)).abs()
    assert int(apart.max()) <= 3
    assert int(apart.sum()) < rows.numel() * 1e-4


def heads_by_inversion(points: np.ndarray, negative: np.ndarray, clients: np.ndarray, rounding: Rounding) -> np.ndarray:
    """What the kernel must draw for grid points [clients, dim], found with integers of any size."""
    coins, limit = rounding.coins or 0, rounding.limit
    words = plain._words(KEY, torch.from_numpy(clients)[:, None], points.shape[1], plain.TOSSES).numpy()
    first = (words & 0xFF) | (words >> 16 & 0x7F) << 8
    sizes = np.abs(points)
    terms = [[math.comb(coins, j) * a**j * (2**15 - a) ** (coins - j) for j in range(coins)] for a in range(limit + 1)]
    bounds = [list(itertools.accumulate(row)) for row in terms]  # over 2^(15 coins)
    short = np.array([[bound >> 15 * (coins - 1) for bound in row] for row in bounds])
    forced = np.zeros_like(sizes)
    unsure = np.zeros(sizes.shape, dtype=bool)
    for k in range(coins):
        forced += first > short[sizes, k]
        unsure |= first == short[sizes, k]
    for row, place in np.argwhere(unsure):
        numbers = torch.tensor([place]), torch.tensor([clients[row]])
        more = [int(word) for j in (1, 2) for word in plain.philox(KEY, *numbers, plain.TOSSES + j)][:7]
        uniform = functools.reduce(lambda value, word: value << 32 | word, more, int(first[row, place]))
        forced[row, place] = sum(uniform >= bound << (239 - 15 * coins) for bound in bounds[sizes[row, place]])
    usual = [15, 31, 14, 30]
    others = [bit for bit in range(32) if kernels.coin_bits(coins) >> bit & 1 and bit not in usual]
    masks = np.cumsum([0, *[1 << bit for bit in usual + others]])
    shown = (words & kernels.coin_bits(coins)) | masks[forced]
    heads = np.bitwise_count(shown.astype(np.uint64)).astype(np.int64)
    return np.where(negative, coins - heads, heads)


@pytest.mark.parametrize("rounding", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize(("dim", "count"), [(9_001, 3), *large((51_370, 140), (32_768, 3))])
def test_coins_that_are_drawn(rounding: Rounding, dim: int, count: int, cuda_device: torch.device) -> None:
    rows = rows_of(count, dim, cuda_device)
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    found = sums_by(cuda, rows, bound, unit, rounding, 7)
    rotated = rows.clone()
    plain.scale(rotated, bound, unit)
    plain.rotate(rotated, signs_of(dim, cuda_device))
    points = rotated.clamp(-rounding.limit, rounding.limit).round().to(torch.int64).cpu().numpy()
    expected = heads_by_inversion(points, torch.signbit(rotated).cpu().numpy(), np.arange(7, 7 + count), rounding)
    np.testing.assert_array_equal(found.cpu().numpy(), expected.sum(axis=0))


@pytest.mark.parametrize("point", [0, 1_000, -2_548])
def test_law_of_coins_that_are_drawn(point: int, cuda_device: torch.device) -> None:
    # A vector with one coordinate becomes one whose coordinates are all of one size, half of them negative.
    dim = 32_768
    rows = torch.zeros(2, dim, device=cuda_device)
    rows[:, 1] = 1.0
    unit = abs(point) * dim**0.5 if point else 1.0
    rotated = rows.clone()
    plain.scale(rotated, 1e3, unit)
    plain.rotate(rotated, signs_of(dim, cuda_device))
    assert point == 0 or bool((rotated.round().abs() == abs(point)).all())
    found = sums_by(cuda, rows, 1e3, unit, FIFTEEN).cpu().numpy()
    for sign in (-1, 1) if point else (1,):
        side = (torch.sign(rotated[0]) == sign).cpu().numpy() if point else np.ones(dim, dtype=bool)
        assert goodness_of_fit(found[side], exact_coins(FIFTEEN, [sign * abs(point)] * 2)) > 1e-6


def test_inversion_has_the_law_of_coins() -> None:
    for point in (0, 700, -2_548):
        points = np.full((2, 20_000), point)
        heads = heads_by_inversion(points, points < 0, np.arange(2), FIFTEEN).sum(axis=0)
        assert goodness_of_fit(heads, exact_coins(FIFTEEN, [point] * 2)) > 1e-6


def test_quantiles_are_exact() -> None:
    found = kernels.quantiles(15, 40).view(np.uint32)
    for size, k in [(0, 0), (1, 0), (40, 3), (39, 14)]:
        chance = sum(
            math.comb(15, j) * Fraction(size, 2**15) ** j * (1 - Fraction(size, 2**15)) ** (15 - j)
            for j in range(k + 1)
        )
        value = functools.reduce(lambda left, right: left << 32 | right, map(int, found[size, k]))
        assert Fraction(value, 2**239) == chance


@pytest.mark.parametrize("coins", range(4, 16))
def test_bits_of_coins(coins: int) -> None:
    bits = kernels.coin_bits(coins)
    assert bits.bit_count() == coins
    assert bits & ~0xFF00FF00 == 0
    assert bits & 0xC000C000 == 0xC000C000


@pytest.mark.gpu
def test_the_same_sums_every_time(products: tuple[torch.Tensor, Products], cuda_device: torch.device) -> None:
    """A race would show itself now and then."""
    for rounding in (SMALL["one coin"], FIFTEEN, COIN["many"]):
        for vectors in (rows_of(500, 51_370, cuda_device), rows_of(2_000, 10_000, cuda_device), products[1]):
            if isinstance(vectors, Products) and rounding is COIN["many"]:
                continue
            expected = sums_by(cuda, vectors, 1.0, 5e5, rounding)
            for _ in range(50):
                assert torch.equal(sums_by(cuda, vectors, 1.0, 5e5, rounding), expected)


@pytest.mark.parametrize(
    "mechanism",
    [
        Binomial(levels=3, trials=13, coordinate_range=50.0),
        RoundedGaussian(noise_deviation=90.0, step=0.004, window=2048, coordinate_range=1.0),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_a_round_takes_products(
    mechanism: Mechanism, products: tuple[torch.Tensor, Products], cuda_device: torch.device
) -> None:
    rows, factors = products
    protocol = Protocol(clients=len(rows), dim=rows.shape[1], clip_norm=50.0, mechanism=mechanism)
    ours, others = (DeviceRound(protocol, 0, seed=1, device=cuda_device, kernels=kind) for kind in (cuda, plain))
    ours.add(factors)
    others.add(rows.clone())
    with pytest.raises(VectorError):
        others.add(factors)
    assert torch.equal(ours.mean(), others.mean())


def test_a_round_on_the_cpu_takes_none() -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=51_370, clip_norm=1.0, levels=3, trials=13)
    round_ = DeviceRound(protocol, 0, seed=1, device="cpu")
    assert not cuda.runs_on(torch.device("cpu"))
    assert not round_.takes(PAPER)
    with pytest.raises(VectorError, match="write them out"):
        round_.add(Products(PAPER, torch.zeros(2, PAPER.factors)))


@pytest.mark.parametrize("layers", [PAPER.layers, ((50, 1000),), ((7, 5000), (3, 7))])
def test_tables_of_products(layers: tuple[tuple[int, int], ...]) -> None:
    """The tables, read as the kernel does, give back each layer's outer product and bias."""
    layout = Layout(layers)
    rng = np.random.default_rng(0)
    sides = [(rng.normal(size=width), rng.normal(size=depth)) for width, depth in layers]
    expected = np.concatenate([part for back, x in sides for part in (np.outer(back, x).ravel(), back)])
    factors = np.concatenate([*[part for back, x in sides for part in (x, back)], [1.0]])
    assert layout.dim == expected.size
    assert layout.factors == factors.size
    number = np.arange(factors.size)
    memory = np.full(factors.size * 36 // 32 + 32, np.nan)
    memory[number + number // 32 * 4] = factors
    chunks, pairs = (table.view(np.uint32) for table in chunk_tables(layout))
    found = np.full((4096, 16), np.nan)
    for chunk, both in enumerate(chunks):
        if both < 0xFFFFFFFE:
            assert (both >> 16) % 4 == 0
            found[chunk] = memory[both & 0xFFFF] * memory[(both >> 16) + np.arange(16)]
        elif both == 0xFFFFFFFE:
            own = pairs[:, chunk]
            there = own != 0xFFFFFFFF
            found[chunk, there] = memory[own[there] & 0xFFFF] * memory[own[there] >> 16]
    np.testing.assert_array_equal(found.ravel()[: layout.dim], expected)
    assert np.isnan(found.ravel()[layout.dim :]).all()


@pytest.mark.parametrize("capability", ["sm_80", pytest.param("sm_90", marks=pytest.mark.thorough)])
def test_all_kernels_compile(capability: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As machine code, instructions included, for which a CUDA compiler needs no GPU; in half the time unoptimised."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("There is no nvcc here.")
    from cpsgd.learning import cuda as learning
    from cpsgd.simulation import device_long as long

    made: list[str] = []
    effort = [] if capability == "sm_90" else ["-Xcicc", "-O0", "-Xptxas", "-O0"]

    class Kernel:
        def set_shared_memory_config(self, memory: int) -> None:
            assert memory <= 227 << 10

    def compile_(source: str, kernel: str) -> Kernel:
        path = tmp_path / f"{len(made)}.cu"
        path.write_text(source)
        command = [compiler, *effort, "-cubin", f"-arch={capability}", "-o", str(path.with_suffix(".cubin")), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        made.append(kernel)
        return Kernel()

    monkeypatch.setattr(kernels, "_compile", compile_)
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 227 << 10)
    cpu = torch.device("cpu")
    forget()
    cuda._lengths(cpu, 51_370, PAPER)
    for rounding in (SMALL["three"], SMALL["one coin"], FIFTEEN, SMALL["grid points"]):
        cuda._fused(cpu, 51_370, rounding, PAPER)
        cuda._fused(cpu, 10_000, rounding, None)
        long._last_kernel(cpu, 17, rounding)
    for rounding in (SMALL["three"], SMALL["three coins"], COIN["many"]):
        cuda._summer(cpu, rounding)
    cuda._player(cpu, 30_000)
    for log in (3, 8, 14):
        cuda._step(cpu, "rotate", log, log > 3)
        cuda._step(cpu, "back", log)
    cuda._tosser(cpu)
    long._pass(cpu, 17, "low", FORWARD=1, LAST=0)
    long._pass(cpu, 25, "high", FIRST=13, BITS=6, FORWARD=0, ALONE=0, EXCHANGE=1)
    long._pass(cpu, 17, "scales")
    learning._kernel.cache_clear()
    learning._kernel(cpu, "samples", SIDE=28)
    learning._kernel(cpu, "outer", WIDTH=60, DEPTH=784, BLOCK=4096)
    expected = "encode lengths finish sum messages rotate back toss low high scales samples outer"
    assert set(made) == set(expected.split())
