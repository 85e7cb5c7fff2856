"""The kernels of the accounting against their NumPy twin, value for value, and both against mpmath.

`test_levels.py` runs this file again at every other level the processor has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd.codec._kernels import _native, accounting_twin, numpy_twin

Array = NDArray[np.float64]
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


def thresholds(w: float, cells: int) -> tuple[Array, Array]:
    """Ends of cells of c, as neighbours compare them."""
    ends = math.sqrt(w) * np.linspace(-7.0, 7.0, cells + 1)
    return ends[:-1].copy(), ends[1:].copy()


@pytest.mark.parametrize("w", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("cells", [1, 16, 33, 130])
def test_averages_are_the_same(cells: int, parts: int, w: float) -> None:
    c0, c1 = thresholds(w, cells)
    widths, value, bend = w * np.geomspace(1e-6, 5.0, 11), np.empty(0), np.empty(0)
    found = []
    for module in MODULES:
        value, bend = np.full((2, len(widths), cells), np.nan)
        module.log_averages(w, widths, c0 * c0, c1 * c1, parts, value, bend)
        found.append((value, bend))
    np.testing.assert_array_equal(*[value for value, _ in found])
    np.testing.assert_array_equal(*[bend for _, bend in found])
    assert np.all(bend > 0.0)
    # A lower bound; the nearer, the more parts. Quadrature of exp g(v) by midpoints.
    y = 0.5 * (c0 * c0 + c1 * c1)
    v = w + widths[:, None, None] * (np.arange(400) + 0.5) / 400
    g = 0.5 * (y[:, None] * (1.0 / w - 1.0 / v) - np.log(v / w)) - (v - w) / 8.0
    exact = np.log(np.mean(np.exp(g), axis=2))
    assert np.all(value <= exact + 1e-3)
    assert np.all(exact[:5] <= value[:5] + 0.05)


def test_chords_are_the_same() -> None:
    source = np.random.default_rng(3)
    for rows, cells in ((1, 1), (2, 16), (13, 37)):
        t, c = np.cumsum(source.uniform(0.05, 0.4, rows)), np.linspace(-3.0, 3.0, cells + 1)
        values = np.exp(source.uniform(-9.0, 9.0, (rows, cells + 1)))
        first, second = (_chords(module, t, values, c) for module in MODULES)
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
        for ends, of in ((c[:-1], values[:, :-1]), (c[1:], values[:, 1:])):
            np.testing.assert_allclose(first[0][:rows] + first[0][rows:] * ends, np.log(of), atol=1e-12)
        # The largest of the chord over t², between each two distances.
        share = np.linspace(0.0, 1.0, 2001)[:, None, None]
        between = t[:-1] + share[..., 0] * np.diff(t)
        chord = values[:-1] + share * np.diff(values, axis=0)
        largest = np.log(np.max(chord / between[..., None] ** 2, axis=0, initial=0.0))
        found = first[1][: rows - 1] + first[1][rows - 1 :] * c[:-1]
        np.testing.assert_allclose(found, largest[:, :-1], atol=1e-4)
        assert np.all(found >= largest[:, :-1])


def _chords(module: ModuleType, t: Array, values: Array, c: Array) -> tuple[Array, Array]:
    moments, largest = (np.full((2 * rows, len(c) - 1), np.inf) for rows in (len(t), len(t) - 1))
    module.chords(t, values, c, moments, largest)
    return moments, largest


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, 1e-310])
def test_chords_of_what_has_no_logarithm_are_not_numbers(wrong: float) -> None:
    t, c = np.array([1.0, 2.0, 3.0]), np.arange(5.0)
    values = np.ones((3, 5))
    values[1, 2] = wrong
    for module in MODULES:
        moments, largest = _chords(module, t, values, c)
        bad = np.isnan(moments)
        assert np.argwhere(bad).tolist() == [[1, 1], [1, 2], [4, 1], [4, 2]]
        # With next to nothing at one end the chord is a number still.
        assert np.all(np.isnan(largest[:2, 1:3])) == (not wrong < 1.0)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("w", [0.05, 1.0, 30.0])
@pytest.mark.parametrize(("rows", "cells"), [(1, 2), (2, 7), (9, 8), (17, 37)])
def test_gaps_are_the_same(rows: int, cells: int, w: float) -> None:
    source = np.random.default_rng([rows, cells])
    c0, c1 = thresholds(w, cells)
    t, rate = np.geomspace(0.02, 2.0, rows), 0.7 * w
    average, bend = source.uniform(-0.2, 0.1, (rows, cells)), source.uniform(0.0, 0.5 / w, (rows, cells))
    bend[0, :2] = 0.0
    chords = [source.uniform(-1.0, 1.0, (2 * count, cells)) for count in (1, rows - 1, rows)]

    def gaps(module: ModuleType) -> Array:
        found = np.full(rows, 99.0)
        module.gaps(w, rate, 0.05, t, average, bend, *chords, c0, c1, found)
        return found

    first, second = map(gaps, MODULES)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, _gaps(w, rate, t, average, bend, chords, c0, c1), atol=2e-3, rtol=2e-3)
    # What is not a number is not lost: from its distance to the next one it always counts.
    row = int(source.integers(max(1, rows - 1)))
    average[row, source.integers(cells)] = math.nan
    for module in MODULES:
        assert np.isnan(gaps(module)[min(row + 1, rows - 1)])


def _gaps(
    w: float, rate: float, t: Array, average: Array, bend: Array, chords: list[Array], c0: Array, c1: Array
) -> list[float]:
    """The same bounds, each by looking at many c of each cell."""
    c = c0 + np.linspace(0.0, 1.0, 801)[:, None] * (c1 - c0)
    squares, y = c * c, 0.5 * (c0 * c0 + c1 * c1)
    smallest, largest, moments = (each.reshape(2, -1, len(c0)) for each in chords)
    flat = [math.log(rate) + average[i] + bend[i] * (squares - y) for i in range(len(t))]

    def line(chords: Array, i: int) -> Array:
        return chords[0, i] + chords[1, i] * c

    least = np.minimum(flat[0], np.minimum(math.log(rate) + average[0], math.log(rate)))
    found = [float(np.max(line(smallest, 0) - least))]
    for i in range(len(t) - 1):
        width, wider = rate * t[i] ** 2, rate * t[i + 1] ** 2
        over = line(largest, i) - np.minimum(flat[i], flat[i + 1])
        convex = np.minimum(c0 * c0, c1 * c1) >= (w + wider) * (1.0 + 0.25 * (w + wider))
        convex = convex | (wider <= w / (1.0 + 0.25 * w))
        if wider * (c1[-1] / w) ** 2 > 0.05:
            v, value = w + width, average[i] + math.log(rate) + 2.0 * math.log(t[i])
            slope = 0.5 * width / (w * v)
            density = math.log(2.0 * rate * t[i] * (t[i + 1] - t[i])) - 0.5 * math.log(v / w) - width / 8.0
            share = 1.0 / (1.0 + np.exp(value - density - slope * y))
            ahead = np.logaddexp(value, density + slope * y)
            tilted = ahead + (bend[i] + share * (slope - bend[i])) * (squares - y)
            near = line(moments, i) - (flat[i] + 2.0 * math.log(t[i]))
            over = np.where(convex, np.maximum(near, line(moments, i + 1) - tilted), over)
        found.append(float(np.max(over)))
    return found


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
ROW, THREE = np.ones(4), np.ones(3)


def _compared(largest: int = 4, moments: int = 6, c1: Array = ROW, found: Array = THREE) -> None:
    chords = np.ones((2, 4)), np.ones((largest, 4)), np.ones((moments, 4))
    _native.gaps(1.0, 1.0, 0.05, THREE, SQUARE, SQUARE, *chords, ROW, c1, found.copy())


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.cell_masses(SQUARE, EMPTY, 1.0, 0.1, SQUARE.copy()),
        lambda: _native.cell_masses(np.ones((3, 1)), np.ones((3, 1)), 1.0, 0.1, np.ones((3, 1))),
        lambda: _native.tilted_sums(SQUARE, EMPTY, 1.0, np.ones((3, 7))),
        lambda: _native.tilted_sums(SQUARE, SQUARE, 1.0, np.ones((3, 6))),
        lambda: _native.tilted_sums(SQUARE, SQUARE, 1.0, np.ones((2, 7))),
        lambda: _native.log_averages(1.0, THREE, ROW, ROW[:3], 2, SQUARE.copy(), SQUARE.copy()),
        lambda: _native.log_averages(1.0, THREE, ROW, ROW, 0, SQUARE.copy(), SQUARE.copy()),
        lambda: _native.log_averages(1.0, ROW, ROW, ROW, 2, SQUARE.copy(), SQUARE.copy()),
        lambda: _native.chords(THREE, EMPTY, ROW, np.ones((6, 4)), np.ones((4, 4))),
        lambda: _native.chords(THREE, EMPTY, np.ones(5), np.ones((6, 4)), np.ones((6, 4))),
        lambda: _native.chords(THREE[:0], EMPTY[:0], np.ones(5), np.ones((0, 4)), np.ones((0, 4))),
        lambda: _compared(largest=6),
        lambda: _compared(moments=4),
        lambda: _compared(c1=ROW[:3]),
        lambda: _compared(found=ROW),
        lambda: _native.bessel_ratios(1.0, 2, 0.1, 1.0, np.ones(3), np.ones(3)),
        lambda: _native.bessel_ratios(1.0, 9, 0.1, 1.0, np.ones(3), np.ones(4)),
    ],
)
def test_wrong_shapes_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()
