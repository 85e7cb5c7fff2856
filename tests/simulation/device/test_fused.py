"""Triton's kernels against the plain ones, bit for bit: on a GPU, or by Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cpsgd.codec import rotate
from cpsgd.mechanisms.base import Rounding
from cpsgd.simulation import device_plain as plain

from .roundings import COIN, HALF, rounding_to

fused = pytest.importorskip("cpsgd.simulation.device_fused", reason="Triton is for Linux")


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter goes through all that a program may take on: less of it, in more programs."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(fused, "_CLIENTS", 2)
        monkeypatch.setattr(fused, "_COUNTERS", 3)


def rows_of(count: int, dim: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(count, -(-dim // 32) * 32 + 32, generator=generator).to(device)
    return wide[:, :dim]


@pytest.mark.parametrize(
    ("dim", "count"),
    [(5, 2), (64, 2), (100, 3), (1000, 2), pytest.param(51_370, 300, marks=pytest.mark.gpu)]
    + [pytest.param(dim, 5, marks=pytest.mark.gpu) for dim in (32_768, 65_535, 65_536, 300_000, 10_000_000)],
)
def test_scaling_and_rotation(dim: int, count: int, device: torch.device) -> None:
    x = rows_of(count, dim, device)
    x[0] *= 0.01
    x[1, dim // 2] = float("nan")
    found, expected = x.clone(), x.clone()
    signs = torch.from_numpy(rotate.signs(dim, 3, 4).copy()).to(device)
    found = torch.cat([part for _, part in fused.scale_and_rotate(found, signs, 0.5 * dim**0.5, 1234.567)], dim=1)
    plain.scale_and_rotate(expected, signs, 0.5 * dim**0.5, 1234.567)
    # The norms of rows are summed in another order, which may move the last digit of a clipped row's factor.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-3)
    assert torch.equal(found[0], expected[0])
    assert bool((found[1] == 0.0).all())


@pytest.mark.parametrize(
    "dim", [5, 64, 100, 1000, *[pytest.param(dim, marks=pytest.mark.gpu) for dim in (51_370, 65_535, 300_000)]]
)
def test_rotation_back(dim: int, device: torch.device) -> None:
    found = rows_of(1, dim, device)[0].clone()
    expected = found.clone()
    signs = torch.from_numpy(rotate.signs(dim, 3, 4).copy()).to(device)
    fused.rotate_back(found, signs)
    plain.rotate_back(expected, signs)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [3, 6, 11, 16, pytest.param(20, marks=pytest.mark.gpu)])
def test_transform(stages: int, device: torch.device) -> None:
    x = rows_of(2, 1 << stages, device)
    found, expected = x.clone(), x.clone()
    fused.hadamard(found)
    plain.hadamard(expected)
    assert torch.equal(found, expected)


def test_launches_stay_within_cuda_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(fused, "_pass", Recorder())
    fused.hadamard(torch.empty(70_000, 64))
    assert [rows for _, rows in grids] == [65_535, 4_465]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [2, 3, 2**17, 2**24])
@pytest.mark.parametrize(("dim", "count"), [(5, 3), (600, 2), pytest.param(51_370, 1000, marks=pytest.mark.gpu)])
def test_rounding(levels: int, dim: int, count: int, device: torch.device) -> None:
    check_rounding(rounding_to(levels), dim, count, device)


def check_rounding(rounding: Rounding, dim: int, count: int, device: torch.device) -> None:
    # Some coordinates are out of range, and some half-way between two points of the grid.
    rows = rows_of(count, dim, device) * float(rounding.limit)
    rows[:, :3] = torch.tensor([0.5, 1.5, -2.5], device=device)
    found = torch.zeros(dim, dtype=torch.int64, device=device)
    expected = torch.zeros_like(found)
    for sums, kernels in ((found, fused), (expected, plain)):
        kernels.round_and_sum([(0, rows)], sums, key=2**62 + 12345, first=7, rounding=rounding)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 37, 2**24])
@pytest.mark.parametrize(("dim", "count"), [(5, 3), (600, 2)])
def test_grid_points_that_are_left_as_they_are(limit: int, dim: int, count: int, device: torch.device) -> None:
    check_rounding(Rounding(limit, limit, 0), dim, count, device)


@pytest.mark.parametrize("rounding", COIN.values(), ids=COIN)
@pytest.mark.parametrize(("dim", "count"), [(5, 3), (600, 3), pytest.param(51_370, 1000, marks=pytest.mark.gpu)])
def test_coins_of_clients(rounding: Rounding, dim: int, count: int, device: torch.device) -> None:
    check_rounding(rounding, dim, count, device)


@pytest.mark.gpu
@pytest.mark.parametrize("coins", [15, 64, 65, 255, 4095])
def test_more_coins_of_clients(coins: int, device: torch.device) -> None:
    check_rounding(Rounding(500, HALF, 16, coins=coins), 3_000, 130, device)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [rounding_to(3), *COIN.values()], ids=["levels", *COIN])
def test_rounding_of_columns_apart(rounding: Rounding, device: torch.device) -> None:
    rows = rows_of(5, 300, device) * 40_000.0
    found = torch.zeros(300, dtype=torch.int64, device=device)
    expected = torch.zeros_like(found)
    options = {"key": 3, "first": 0, "rounding": rounding}
    parts = [(0, rows[:, :64]), (64, rows[:, 64:])]
    fused.round_and_sum(parts, found, **options)
    plain.round_and_sum([(0, rows)], expected, **options)
    assert torch.equal(found, expected)
    plain.round_and_sum(parts, expected.zero_(), **options)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("trials", [1, 31, 33, 129, 500, pytest.param(130_000, marks=pytest.mark.gpu)])
def test_fair_coins(trials: int, device: torch.device) -> None:
    found = torch.zeros(300, dtype=torch.int64, device=device)
    expected = torch.zeros_like(found)
    fused.add_coins(found, key=99, trials=trials)
    plain.add_coins(expected, key=99, trials=trials)
    assert torch.equal(found, expected)
