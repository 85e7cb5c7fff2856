"""The CUDA kernel against the plain ones, bit for bit; and what it is told of products, which needs no GPU."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from cpsgd.codec import rotate
from cpsgd.errors import VectorError
from cpsgd.learning import dense, gradients
from cpsgd.learning.models import mlp
from cpsgd.mechanisms import Binomial, Mechanism, RoundedGaussian
from cpsgd.mechanisms.base import Rounding
from cpsgd.protocol import Protocol
from cpsgd.simulation import device_cuda as cuda
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.device import DeviceRound

from .roundings import COIN, HALF, exact_coins, goodness_of_fit, rounding_to

ROUNDINGS = {
    "two": rounding_to(2),
    "three": rounding_to(3),
    "thirty": rounding_to(30),
    "hundred": rounding_to(100),
    "grid points": Rounding(36_447, 36_447, 0),
    "one coin": COIN["one"],
    "three coins": COIN["three"],
    "sampled": COIN["sampled"],
}
FIFTEEN = Rounding(2_548, HALF, 16, coins=15)
DRAWN = {"four coins": Rounding(4_000, HALF, 16, coins=4), "fifteen coins": FIFTEEN}
KEY = 2**62 + 12345


def rows_of(count: int, dim: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(dim)
    return torch.randn(count, dim + 22, generator=generator, device="cuda")[:, :dim]


def sums_by_plain(rows: torch.Tensor, bound: float, unit: float, rounding: Rounding, first: int) -> torch.Tensor:
    sums = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
    columns = plain.scale_and_rotate(rows.clone(), signs_of(rows.shape[1]), bound, unit)
    plain.round_and_sum(columns, sums, key=KEY, first=first, rounding=rounding)
    return sums


def signs_of(dim: int) -> torch.Tensor:
    return torch.from_numpy(rotate.signs(dim, 3, 4).copy()).cuda()


def on_device(key: int) -> torch.Tensor:
    return torch.tensor([key & 0xFFFFFFFF, key >> 32]).to(torch.int32).cuda()


def sums_by_kernel(
    vectors: torch.Tensor | cuda.Products, dim: int, bound: float, unit: float, rounding: Rounding, first: int
) -> torch.Tensor:
    sums = torch.zeros(dim, dtype=torch.int64, device="cuda")
    options = {"bound": bound, "unit": unit, "keys": on_device(KEY), "first": first, "rounding": rounding}
    add = cuda.add_rows if isinstance(vectors, torch.Tensor) else cuda.add_products
    add(vectors, sums, signs_of(dim), **options)
    return sums


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
@pytest.mark.parametrize(("dim", "count"), [(51_370, 1_500), (32_768, 200), (65_535, 133), (33_000, 1)])
def test_rows(rounding: Rounding, dim: int, count: int) -> None:
    rows = rows_of(count, dim)
    rows[0, 7] = float("nan")
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    found = sums_by_kernel(rows, dim, bound, unit, rounding, first=7)
    assert torch.equal(found, sums_by_plain(rows, bound, unit, rounding, first=7))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", [ROUNDINGS["grid points"], ROUNDINGS["hundred"]], ids=["grid points", "hundred"])
def test_sums_that_are_full(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide sums are added to the others' in the midst, too, which takes many more clients than a test has."""
    rows = rows_of(1_500, 51_370)
    unit, bound = 0.4 * rounding.limit, 2.0 * 51_370**0.5
    expected = sums_by_plain(rows, bound, unit, rounding, first=7)
    usual = cuda.definitions
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "definitions", lambda *dims, **options: {**usual(*dims, **options), "FLUSH": 3})
        cuda._kernel.cache_clear()
        found = sums_by_kernel(rows, 51_370, bound, unit, rounding, first=7)
    cuda._kernel.cache_clear()
    assert torch.equal(found, expected)


@pytest.mark.gpu
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
    dim: int, rounding: Rounding, layers: tuple[tuple[int, int], ...] | None
) -> None:
    device, layout = torch.device("cuda", 0), None if layers is None else cuda.Layout(layers)
    assert layout is None or layout.dim == dim
    assert cuda.supports(device, 51_370, rounding)
    assert cuda.supports(device, dim, rounding) == (layout is not None)
    assert layout is None or not cuda.fits(device, dim, rounding, layout)


@pytest.mark.gpu
def test_rows_that_are_clipped() -> None:
    # The last digit of a factor may be another, which moves few points of so coarse a grid, and those by one.
    rounding = ROUNDINGS["three"]
    rows = rows_of(300, 51_370)
    unit, bound = 0.4 * rounding.limit, 0.5 * 51_370**0.5
    found = sums_by_kernel(rows, 51_370, bound, unit, rounding, first=0)
    apart = (found - sums_by_plain(rows, bound, unit, rounding, first=0)).abs()
    assert int(apart.max()) <= 2
    assert int(apart.sum()) < 1_000  # of 15 million


@pytest.fixture(scope="module")
def products() -> tuple[torch.Tensor, cuda.Products]:
    """Gradients of some examples, written out and not."""
    model = mlp(784, 10, seed=1).cuda()
    layers = dense.dense_layers(model, torch.nn.functional.cross_entropy)
    assert layers is not None
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.rand(1_500, 784, generator=generator, device="cuda")
    y = torch.randint(0, 10, (1_500,), generator=generator, device="cuda")
    rows = torch.empty(1_500, 51_370, device="cuda")
    dense.write_dense_gradients(layers, x, y, rows)
    found = gradients.ClientUpdates(model, torch.nn.functional.cross_entropy).products(x, y, np.ones(1_500, dtype=int))
    assert found is not None
    left, right = found.layout.pairs().T
    written = found.factors[:, left] * found.factors[:, right]
    # Matrices are multiplied in another order where they lie otherwise.
    torch.testing.assert_close(written, rows, rtol=1e-4, atol=1e-6)
    return written, found


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
def test_products(rounding: Rounding, products: tuple[torch.Tensor, cuda.Products]) -> None:
    rows, factors = products
    unit, bound = 20.0 * rounding.limit, 1e3
    found = sums_by_kernel(factors, 51_370, bound, unit, rounding, first=3)
    assert torch.equal(found, sums_by_plain(rows, bound, unit, rounding, first=3))


def heads_by_inversion(points: np.ndarray, negative: np.ndarray, clients: np.ndarray, rounding: Rounding) -> np.ndarray:
    """What the kernel must draw for grid points [clients, dim], found with integers of any size."""
    coins, limit = rounding.coins or 0, rounding.limit
    words = plain._words(KEY, torch.from_numpy(clients)[:, None], 0, points.shape[1], plain.TOSSES).numpy()
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
    order = [
        15,
        31,
        14,
        30,
        *[bit for bit in range(32) if cuda.coin_bits(coins) >> bit & 1 and bit not in (14, 15, 30, 31)],
    ]
    masks = np.cumsum([0, *[1 << bit for bit in order]])
    shown = (words & cuda.coin_bits(coins)) | masks[forced]
    heads = np.bitwise_count(shown.astype(np.uint64)).astype(np.int64)
    return np.where(negative, coins - heads, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize(("dim", "count"), [(51_370, 140), (32_768, 3)])
def test_coins_that_are_drawn(rounding: Rounding, dim: int, count: int) -> None:
    rows = rows_of(count, dim)
    unit, bound = 0.4 * rounding.limit, 2.0 * dim**0.5
    found = sums_by_kernel(rows, dim, bound, unit, rounding, first=7)
    ((_, rotated),) = plain.scale_and_rotate(rows.clone(), signs_of(dim), bound, unit)
    points = rotated.clamp(-rounding.limit, rounding.limit).round().to(torch.int64).cpu().numpy()
    expected = heads_by_inversion(points, torch.signbit(rotated).cpu().numpy(), np.arange(7, 7 + count), rounding)
    np.testing.assert_array_equal(found.cpu().numpy(), expected.sum(axis=0))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", DRAWN.values(), ids=DRAWN)
def test_products_with_coins_that_are_drawn(rounding: Rounding, products: tuple[torch.Tensor, cuda.Products]) -> None:
    rows, factors = products
    found = sums_by_kernel(factors, 51_370, 1e3, 20.0 * rounding.limit, rounding, first=3)
    assert torch.equal(found, sums_by_kernel(rows, 51_370, 1e3, 20.0 * rounding.limit, rounding, first=3))


@pytest.mark.gpu
@pytest.mark.parametrize("point", [0, 1_000, -2_548])
def test_law_of_coins_that_are_drawn(point: int) -> None:
    # A vector with one coordinate becomes one whose coordinates are all of one size, half of them negative.
    rows = torch.zeros(2, 32_768, device="cuda")
    rows[:, 1] = 1.0
    unit = point * 32_768**0.5 if point else 1.0
    ((_, rotated),) = plain.scale_and_rotate(rows.clone(), signs_of(32_768), 1e3, abs(unit))
    seen = rotated.round().abs()
    assert point == 0 or bool((seen == abs(point)).all())
    found = sums_by_kernel(rows, 32_768, 1e3, abs(unit), FIFTEEN, first=0).cpu().numpy()
    for sign in (-1, 1) if point else (1,):
        side = (torch.sign(rotated[0]) == sign).cpu().numpy() if point else np.ones(32_768, dtype=bool)
        assert goodness_of_fit(found[side], exact_coins(FIFTEEN, [sign * abs(point)] * 2)) > 1e-6


def test_inversion_has_the_law_of_coins() -> None:
    for point in (0, 700, -2_548):
        points = np.full((2, 20_000), point)
        heads = heads_by_inversion(points, points < 0, np.arange(2), FIFTEEN).sum(axis=0)
        assert goodness_of_fit(heads, exact_coins(FIFTEEN, [point] * 2)) > 1e-6


def test_quantiles_are_exact() -> None:
    found = cuda.quantiles(15, 40).view(np.uint32)
    for size, k in [(0, 0), (1, 0), (40, 3), (39, 14)]:
        chance = sum(
            math.comb(15, j) * Fraction(size, 2**15) ** j * (1 - Fraction(size, 2**15)) ** (15 - j)
            for j in range(k + 1)
        )
        value = functools.reduce(lambda left, right: left << 32 | right, map(int, found[size, k]))
        assert Fraction(value, 2**239) == chance


@pytest.mark.parametrize("coins", range(4, 16))
def test_bits_of_coins(coins: int) -> None:
    bits = cuda.coin_bits(coins)
    assert bits.bit_count() == coins
    assert bits & ~0xFF00FF00 == 0
    assert bits & 0xC000C000 == 0xC000C000


@pytest.mark.gpu
def test_products_that_are_clipped_or_broken(products: tuple[torch.Tensor, cuda.Products]) -> None:
    rounding = ROUNDINGS["three"]
    rows, factors = products
    broken = factors.factors.clone()
    broken[5, 3] = float("inf")
    broken[6, 800] = float("nan")
    rows = rows.clone()
    rows[5:7] = 0.0
    unit = 30.0 * rounding.limit
    found = sums_by_kernel(cuda.Products(factors.layout, broken), 51_370, 0.5, unit, rounding, first=0)
    apart = (found - sums_by_plain(rows, 0.5, unit, rounding, first=0)).abs()
    assert int(apart.max()) <= 3
    assert int(apart.sum()) < 5_000  # of 77 million


@pytest.mark.gpu
def test_the_same_sums_every_time(products: tuple[torch.Tensor, cuda.Products]) -> None:
    """A race would show itself now and then."""
    rows = rows_of(500, 51_370)
    for rounding in (ROUNDINGS["one coin"], FIFTEEN):
        expected = sums_by_kernel(products[1], 51_370, 1.0, 5e5, rounding, first=0)
        expected_rows = sums_by_kernel(rows, 51_370, 1.0, 5e5, rounding, first=0)
        for _ in range(100):
            assert torch.equal(sums_by_kernel(products[1], 51_370, 1.0, 5e5, rounding, first=0), expected)
            assert torch.equal(sums_by_kernel(rows, 51_370, 1.0, 5e5, rounding, first=0), expected_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("trials", [1, 31, 32, 129, 8_192, 130_000])
def test_coins_of_the_sum(trials: int) -> None:
    found = torch.zeros(51_370, dtype=torch.int64, device="cuda")
    expected = torch.zeros_like(found)
    cuda.add_coins(found, keys=on_device(KEY), trials=trials)
    plain.add_coins(expected, key=KEY, trials=trials)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32_768, 33_000, 51_370, 65_535])
def test_rotation_back(dim: int) -> None:
    found = rows_of(1, dim)[0].clone()
    expected = found.clone()
    cuda.rotate_back(found, signs_of(dim))
    plain.rotate_back(expected, signs_of(dim))
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mechanism",
    [
        Binomial(levels=3, trials=13, coordinate_range=50.0),
        RoundedGaussian(noise_deviation=90.0, step=0.004, window=2048, coordinate_range=1.0),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_a_round_takes_products(mechanism: Mechanism, products: tuple[torch.Tensor, cuda.Products]) -> None:
    protocol = Protocol(clients=1_500, dim=51_370, clip_norm=50.0, mechanism=mechanism)
    rounds = [
        DeviceRound(protocol, 0, seed=1, device="cuda"),
        DeviceRound(protocol, 0, seed=1, device="cuda", kernels=plain),
    ]
    assert rounds[0].takes_products
    rounds[0].add(products[1])
    rounds[1].add(products[0].clone())
    with pytest.raises(VectorError):
        rounds[1].add(products[1])
    assert torch.equal(rounds[0].mean(), rounds[1].mean())


def test_a_round_on_the_cpu_takes_none() -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=51_370, clip_norm=1.0, levels=3, trials=13)
    round_ = DeviceRound(protocol, 0, seed=1, device="cpu")
    assert not round_.takes_products
    layout = cuda.Layout(((60, 784), (60, 60), (10, 60)))
    with pytest.raises(VectorError, match="write them out"):
        round_.add(cuda.Products(layout, torch.zeros(2, layout.factors)))


@pytest.mark.parametrize("layers", [((60, 784), (60, 60), (10, 60)), ((50, 1000),), ((7, 5000), (3, 7))])
def test_tables_of_products(layers: tuple[tuple[int, int], ...]) -> None:
    """The tables, read as the kernel does, give back each layer's outer product and bias."""
    layout = cuda.Layout(layers)
    rng = np.random.default_rng(0)
    sides = [(rng.normal(size=width), rng.normal(size=depth)) for width, depth in layers]
    expected = np.concatenate([part for back, x in sides for part in (np.outer(back, x).ravel(), back)])
    factors = np.concatenate([*[part for back, x in sides for part in (x, back)], [1.0]])
    assert layout.dim == expected.size
    assert layout.factors == factors.size
    number = np.arange(factors.size)
    memory = np.full(factors.size * 36 // 32 + 32, np.nan)
    memory[number + number // 32 * 4] = factors
    chunks, pairs = (table.view(np.uint32) for table in cuda.chunk_tables(layout))
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
