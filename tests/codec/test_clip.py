from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.codec import clip
from cpsgd.codec._kernels import kernels, numpy_twin
from cpsgd.codec.clip import Grid
from cpsgd.errors import NonFiniteError, VectorError

from .stages import clipped


def test_a_short_vector_is_left_alone() -> None:
    x = np.array([0.3, -0.4], np.float32)
    np.testing.assert_array_equal(clipped(x, 1.0), x)


def test_a_long_vector_keeps_its_direction() -> None:
    x = np.array([3.0, -4.0])
    short = clipped(x, 1.0)
    np.testing.assert_allclose(short, [0.6, -0.8], rtol=2e-6)
    assert np.linalg.norm(short.astype(np.float64)) <= 1.0
    np.testing.assert_allclose(clipped(x, 1.0, 8.0) / np.float32(8.0), short)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 3, 99])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_bad_coordinate_is_named(bad: float, position: int, dtype: type[np.floating]) -> None:
    x = np.ones(100, dtype)
    x[position:] = bad
    with pytest.raises(NonFiniteError, match=f"coordinate {position};") as caught:
        clip.factor(x, 1.0)
    assert caught.value.coordinate == position


@pytest.mark.parametrize("size", [1e150, 1e200, 1e300, 1.7e308])
def test_squares_that_overflow_are_no_excuse(size: float) -> None:
    length, unit = clip._norm(np.full(4, size))
    assert length * unit == pytest.approx(2 * size)
    np.testing.assert_allclose(clipped(np.full(4, size), 1.0), 0.5, rtol=2e-6)


@settings(max_examples=300, deadline=None)
@given(
    dim=st.integers(1, 300),
    size=st.floats(0.999, 3.0),
    exponent=st.integers(0, 22),
    levels=st.sampled_from([2, 3, 17, 1000]),
    seed=st.integers(0, 2**32),
)
def test_after_enforcing_the_grid_point_is_within_the_norm(
    dim: int, size: float, exponent: int, levels: int, seed: int
) -> None:
    norm_limit = 2.0**exponent * 1.37
    x = np.random.default_rng(seed).standard_normal(dim)
    grid = (x * (size * norm_limit / np.linalg.norm(x))).astype(np.float32)
    limit = Grid.of_levels(levels, 1.0).limit
    clip.enforce(grid, norm_limit=norm_limit, coordinate_limit=limit)
    point = numpy_twin.grid_points(grid, limit)
    # Exact: Python integers against a limit rounded down to one.
    assert sum(int(v) ** 2 for v in point) <= norm_limit**2


@pytest.mark.parametrize("norm_limit", [0.4, 1.0, 64.0, 32768.0])
def test_enforcing_takes_few_passes(norm_limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # A coordinate that rounds to just above the limit again and again must not take thousands of tiny steps.
    passes: list[object] = []
    scale = kernels.scale
    monkeypatch.setattr(kernels, "scale", lambda *a: passes.append(scale(*a)))
    grid = np.array([norm_limit + 0.5], np.float32)
    clip.enforce(grid, norm_limit=norm_limit, coordinate_limit=32768.0 * 4)
    assert abs(np.rint(grid[0])) <= norm_limit
    assert len(passes) <= 24


def test_a_vector_that_becomes_nan_on_the_way_is_refused() -> None:
    with pytest.raises(VectorError, match="changed"):
        clip.enforce(np.array([np.nan, 1.0], np.float32), norm_limit=10.0, coordinate_limit=10.0)


def test_enforcing_changes_nothing_within_the_norm() -> None:
    grid = np.array([300.0, -400.0], np.float32)
    clip.enforce(grid, norm_limit=501.0, coordinate_limit=32768.0)
    np.testing.assert_array_equal(grid, [300.0, -400.0])
