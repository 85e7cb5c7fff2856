"""Searches: what they find is on the right side, near enough, after few tries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from cpsgd._searches import lowest, smallest_enough, vertex

FALLING: dict[str, Callable[[float], float]] = {
    "straight": lambda x: 3.0 - x,
    "steep": lambda x: 3.0**9 - x**9,
    "flat": lambda x: math.exp(-x) - math.exp(-3.0),
    "steps": lambda x: 5.5 - math.floor(2.0 * x),
    "no value": lambda x: math.inf if x < 3.0 else -1.0,
    "no end": lambda x: 1.0 if x < 3.0 else -math.inf,
}


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("close", [1.1, 1.0 + 1e-4, 1.0 + 1e-10])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.999, 500.0), (1e-6, 3.001)])
def test_the_smallest_is_enough_and_near(name: str, close: float, low: float, high: float) -> None:
    tried: list[float] = []

    def excess(x: float) -> float:
        tried.append(x)
        return FALLING[name](x)

    found = smallest_enough(excess, low, high, close=close)
    assert FALLING[name](found) <= 0.0
    assert found in tried
    assert max(x for x in tried if FALLING[name](x) > 0.0) >= found / close * (1.0 - 1e-12)
    assert all(low <= x <= high for x in tried)


@pytest.mark.parametrize("name", ["straight", "steep", "flat"])
def test_few_tries_are_enough_where_a_function_is_smooth(name: str) -> None:
    tried: list[float] = []

    def excess(x: float) -> float:
        tried.append(x)
        return FALLING[name](x)

    smallest_enough(excess, 2.0, 4.0, close=1.0 + 1e-7)
    assert len(tried) <= 14  # halving takes 25


def test_a_bracket_without_a_number_between_is_left() -> None:
    low = 1.0
    high = math.nextafter(low, 2.0)
    assert smallest_enough(lambda x: 1.0 if x < high else -1.0, low, high, close=1.0) == high
    assert smallest_enough(lambda x: 1.0 if x < 2.0 else 0.0, 1.0, 3.0, close=1.0) == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize("place", [-1.9, -0.3, 0.0, 0.9, 2.8])
def test_the_lowest_place_of_a_parabola_is_exact(place: float) -> None:
    assert lowest(lambda x: (x - place) ** 2 + 5.0, -2.0, 3.0, close=0.5) == pytest.approx(place, abs=1e-7)


def test_the_lowest_place_is_within_the_accuracy_or_an_end() -> None:
    assert lowest(lambda x: abs(x - 0.7), -2.0, 3.0, close=1e-3) == pytest.approx(0.7, abs=1e-3)
    assert lowest(lambda x: x, -2.0, 3.0, close=1e-3) == -2.0
    assert lowest(lambda x: -x, -2.0, 3.0, close=1e-3) == 3.0


def test_the_vertex_of_a_parabola() -> None:
    assert vertex(0.0, 1.0, 3.0, 4.0, 1.0, 1.0) == pytest.approx(2.0)
    assert vertex(0.0, 1.0, 2.0, 0.0, 1.0, 2.0) == math.inf  # a straight line
    assert vertex(0.0, 1.0, 2.0, 0.0, 1.0, 0.0) == math.inf


def test_what_is_no_number_is_never_enough() -> None:
    """A search for ε must not end where nothing was proved."""
    assert smallest_enough(lambda x: math.nan if x < 1.5 else 2.0 - x, 1.0, 4.0, close=1.001) >= 2.0
    at = {1.0: 1.0, 4.0: -1.0}
    assert smallest_enough(lambda x: at.get(x, math.nan), 1.0, 4.0, close=1.001) == 4.0
