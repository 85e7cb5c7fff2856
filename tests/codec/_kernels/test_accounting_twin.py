"""The kernels of the accounting against their NumPy twin, value for value, and both against mpmath.

`test_levels.py` runs this file again at every other level the processor has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd.codec._kernels import _native, accounting_twin, numpy_twin

MODULES = (_native, numpy_twin)
# Around every boundary of the blocking: curves side by side, sums at a time, cells of a tile.
SHAPES = [(1, 2, 1), (3, 5, 3), (7, 64, 15), (8, 65, 17), (9, 300, 37), (17, 290, 61), (40, 33, 129)]


def curves(rows: int, points: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Places that rise, and numbers over them that rise and fall."""
    source = np.random.default_rng([rows, points, seed])
    x = np.cumsum(source.uniform(0.0, 8.0 / points, (rows, points)), axis=1) - 4.0
    return x, source.uniform(0.0, 1.0, (rows, points)) * np.exp(-x * x)


@pytest.mark.parametrize("w", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_masses_of_cells_are_the_same(shape: tuple[int, int, int], w: float) -> None:
    x, e = curves(*shape[:2])
    found = []
    for module in MODULES:
        mass = np.full_like(x, np.nan)
        found.append((module.cell_masses(x, e, w, 0.1, mass), mass))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert np.all(found[0][1] >= 0.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_tilted_sums_are_the_same(shape: tuple[int, int, int]) -> None:
    rows, points, thresholds = shape
    x, mass = curves(rows, points)
    found = []
    for module in MODULES:
        sums = np.full((rows, thresholds), np.nan)
        module.tilted_sums(mass, x, 0.37, sums)
        found.append(sums)
    np.testing.assert_array_equal(*found)
    k = np.arange(thresholds) - thresholds // 2
    exact = np.sum(mass[:, :, None] * np.exp(0.37 * x[:, :, None] * k), axis=1)
    np.testing.assert_allclose(found[0], exact, rtol=1e-12)


@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("cells", [1, 7, 64, 65, 130])
def test_averages_are_the_same(cells: int, parts: int) -> None:
    source, rows = np.random.default_rng([cells, parts]), 11
    constant, slope = np.cumsum(source.uniform(-0.3, 0.3, (2, rows, parts + 1)), axis=2)
    # Also exponents that hardly rise.
    constant[:3] *= 1e-3
    slope[:3] *= 1e-3
    means = source.uniform(-1.0, 1.0, (2, rows, parts))
    y = np.linspace(0.0, 9.0, cells)
    enough = source.uniform(0.0, 9.0, rows)
    found = []
    for module in MODULES:
        value, bend = np.full((2, rows, cells), np.nan)
        module.log_averages(constant, slope, means[0], means[1], y, y, enough, value, bend)
        found.append((value, bend))
    np.testing.assert_array_equal(*[value for value, _ in found])
    np.testing.assert_array_equal(*[bend for _, bend in found])
    value, bend = found[0]
    place = np.linspace(0.0, 1.0, 2001)
    for i in range(rows):
        for j in range(0, cells, 13):
            if y[j] >= enough[i]:
                ends = constant[i] + slope[i] * y[j]
                g = np.concatenate([a + place * (b - a) for a, b in itertools.pairwise(ends)])
                by = [a + place * (b - a) for a, b in itertools.pairwise(slope[i])]
                weights = np.tile(np.r_[0.5, np.ones(1999), 0.5] / 2000.0, parts) / parts * np.exp(g)
                tilt = np.concatenate(by)
            else:
                weights, tilt = np.exp(means[0, i] + means[1, i] * y[j]) / parts, means[1, i]
            assert value[i, j] == pytest.approx(math.log(weights.sum()), abs=1e-6)
            assert bend[i, j] == pytest.approx(float(weights @ tilt / weights.sum()), abs=1e-6)


def test_logarithms_of_sums_are_the_same() -> None:
    source = np.random.default_rng(5)
    a, b = source.uniform(-50.0, 50.0, (2, 13, 29))
    found = []
    for module in MODULES:
        sums, shares = np.full((2, *a.shape), np.nan)
        module.log_sums(a, b, sums, shares)
        found.append((sums, shares))
    np.testing.assert_array_equal(*[sums for sums, _ in found])
    np.testing.assert_array_equal(*[shares for _, shares in found])
    np.testing.assert_allclose(found[0][0], np.logaddexp(a, b), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(found[0][1], np.exp(b - np.logaddexp(a, b)), rtol=1e-13)


@pytest.mark.parametrize("cells", [1, 8, 37])
def test_the_largest_excess_is_the_same(cells: int) -> None:
    source = np.random.default_rng(cells)
    start, rise, value = source.standard_normal((3, 21, cells))
    bend = source.uniform(0.0, 2.0, (21, cells))
    bend[:4] = 0.0
    wanted = source.uniform(size=bend.shape) < 0.7
    ends = np.linspace(-3.0, 3.0, cells + 1)
    c0, c1 = ends[:-1].copy(), ends[1:].copy()
    y = 0.5 * (c0 * c0 + c1 * c1)
    known = source.standard_normal(21)
    known[5] = -math.inf

    def raised(module: ModuleType, where: NDArray[np.bool_]) -> NDArray[np.float64]:
        found = known.copy()
        module.raise_to_excess(start, rise, value, bend, where, y, c0, c1, found)
        return found

    first, second = (raised(module, wanted) for module in MODULES)
    np.testing.assert_array_equal(first, second)
    inside = np.linspace(c0, c1, 1001)[:, None, :]
    exact = np.max(start - value + bend * y + rise * inside - bend * inside**2, axis=0)
    rows = np.maximum(known, np.max(np.where(wanted, exact, -math.inf), axis=1))
    np.testing.assert_allclose(first, rows, atol=1e-3)
    row = np.argwhere(wanted)[3 % wanted.sum()][0]
    start[row] = np.nan
    for module in MODULES:
        assert np.flatnonzero(np.isnan(raised(module, wanted))).tolist() == [row]
        np.testing.assert_array_equal(raised(module, np.zeros_like(wanted)), known)


@pytest.mark.parametrize(("variance", "count"), [(0.3, 1), (20.0, 50), (1234.5, 400)])
def test_ratios_of_bessel_functions_are_the_same(variance: float, count: int) -> None:
    found = []
    for module in MODULES:
        ratios, errors = np.full((2, count), np.nan)
        module.bessel_ratios(variance, count + 200, 0.01, 1e6, ratios, errors)
        found.append((ratios, errors))
    np.testing.assert_array_equal(*[ratios for ratios, _ in found])
    np.testing.assert_array_equal(*[errors for _, errors in found])
    exact = mpmath.besseli(1, variance) / mpmath.besseli(0, variance)
    assert float(abs(found[0][0][0] / exact - 1)) < 1e-14


def test_exponentials_and_logarithms_are_within_a_few_roundings() -> None:
    x = np.concatenate([np.linspace(-699.0, 699.0, 301), np.linspace(-0.4, 0.4, 101)])
    for at, value in zip(x, accounting_twin.exponential(x), strict=True):
        assert abs(value / mpmath.exp(float(at)) - 1) < 2e-15
    assert accounting_twin.exponential(np.array([-1e9]))[0] == accounting_twin.exponential(np.array([-700.0]))[0] > 0.0
    x = np.concatenate([np.exp(np.linspace(-600.0, 600.0, 301)), np.linspace(0.7, 1.5, 101)])
    for at, value in zip(x, accounting_twin.logarithm(x), strict=True):
        assert abs(value - mpmath.log(float(at))) <= 4e-16 * abs(mpmath.log(float(at))) + 4e-16


SQUARE, EMPTY = np.ones((3, 4)), np.ones((3, 5))
ROW = np.ones(4)


def _raised(wanted: NDArray[np.bool_], c1: NDArray[np.float64], found: NDArray[np.float64]) -> None:
    _native.raise_to_excess(SQUARE, SQUARE, SQUARE, SQUARE, wanted, ROW, ROW, c1, found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.cell_masses(SQUARE, EMPTY, 1.0, 0.1, SQUARE.copy()),
        lambda: _native.cell_masses(np.ones((3, 1)), np.ones((3, 1)), 1.0, 0.1, np.ones((3, 1))),
        lambda: _native.tilted_sums(SQUARE, EMPTY, 1.0, np.ones((3, 7))),
        lambda: _native.tilted_sums(SQUARE, SQUARE, 1.0, np.ones((3, 6))),
        lambda: _native.tilted_sums(SQUARE, SQUARE, 1.0, np.ones((2, 7))),
        lambda: _native.log_averages(SQUARE, SQUARE, SQUARE, SQUARE, ROW, ROW, ROW[:3], SQUARE.copy(), SQUARE.copy()),
        lambda: _native.log_sums(SQUARE, EMPTY, SQUARE.copy(), SQUARE.copy()),
        lambda: _raised(np.ones((3, 5), bool), ROW, np.ones(3)),
        lambda: _raised(np.ones((3, 4), bool), ROW[:3], np.ones(3)),
        lambda: _raised(np.ones((3, 4), bool), ROW, np.ones(4)),
        lambda: _native.bessel_ratios(1.0, 2, 0.1, 1.0, np.ones(3), np.ones(3)),
        lambda: _native.bessel_ratios(1.0, 9, 0.1, 1.0, np.ones(3), np.ones(4)),
    ],
)
def test_wrong_shapes_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()
