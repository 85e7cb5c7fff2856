from __future__ import annotations

import numpy as np
import pytest

from cpsgd.codec.clip import MAX_LEVELS, Grid
from cpsgd.randomness import Keystream

from . import stages


@pytest.mark.parametrize("levels", [2, 3, 4, 17, 65_536, 65_537, MAX_LEVELS])
def test_the_grid_fits_32_bits_and_is_fine(levels: int) -> None:
    grid = Grid.of_levels(levels, 2.0)
    assert 8 <= grid.fraction_bits <= 16
    assert (levels - 1) << grid.fraction_bits < 2**32
    assert float(np.float32(grid.limit)) == grid.limit
    assert grid.unit * 2.0 == pytest.approx(grid.limit)


@pytest.mark.parametrize("levels", [2, 3, 10, 65_537])
def test_rounding_is_exactly_unbiased(levels: int) -> None:
    # Over all 2^16 keystream words, the mean of the rounded values is the grid point itself, with no error at all.
    grid = Grid.of_levels(levels, 1.0)
    bits, limit = grid.fraction_bits, grid.limit
    words = np.arange(2**16, dtype="<u4").view(np.uint8)
    for point in np.linspace(-limit, limit, 23):
        point = np.rint(point)
        values = stages.rounded(np.full(2**16, point, np.float32), levels, words).astype(np.float64)
        assert float(stages.to_grid_units(values, levels).mean()) == pytest.approx(float(np.float32(point)), abs=1e-6)
        low = np.floor((float(np.float32(point)) + limit) / 2**bits)
        assert set(values) <= {low, low + 1}


def test_levels_stay_and_ends_are_reached() -> None:
    words = Keystream(bytes(16)).take(4 * 1000)
    for value, expected in ((-1.0, 0), (1.0, 4), (-0.5, 1), (0.0, 2), (7.0, 4), (-7.0, 0)):
        grid = np.full(1000, value * Grid.of_levels(5, 1.0).unit, np.float32)
        assert set(stages.rounded(grid, 5, words).tolist()) == {expected}


def test_variance_is_f_times_one_minus_f() -> None:
    count, fraction = 200_000, 0.3
    words = Keystream(bytes(16)).take(4 * count)
    values = stages.rounded(np.full(count, (fraction - 0.5) * 2**16, np.float32), 2, words)
    # A mean of 200,000 draws of Bernoulli(0.3): within 5.4 standard errors but for one seed in 10^7.
    assert abs(float(values.mean()) - fraction) < 5.4 * (fraction * (1 - fraction) / count) ** 0.5


@pytest.mark.parametrize("levels", [2, 3, 65_536, 70_001, 2**24])
def test_fractions_are_exact_at_every_number_of_levels(levels: int) -> None:
    grid = Grid.of_levels(levels, 1.0)
    limit = grid.limit
    points = np.rint(np.random.default_rng(levels).uniform(-limit, limit, size=100_000)).astype(np.float32)
    points[:2] = -limit, limit
    one = 1 << grid.fraction_bits
    parts = [(int(point) + int(limit)) % one for point in points]
    assert grid.fraction_variance(points) == sum(part * (one - part) for part in parts) / one**2
