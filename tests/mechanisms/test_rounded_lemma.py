"""Gaussians that are rounded one by one, against the lemma: their sum, rounded by a kernel that knows no data.

Everything is brute force on a grid of 16 points per level, which is as good as continuous. The rounds' noise may be
correlated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import fftconvolve

from cpsgd.mechanisms.rounded_gaussian import uniformity

Array = NDArray[np.float64]
POINTS = 16
REACH = 14
"""Points per level, and levels either way."""


def gaussian(mean: Array, covariance: Array) -> Array:
    """Masses on the grid, one axis per round, from -REACH levels on."""
    axis = np.arange(-REACH * POINTS, REACH * POINTS) / POINTS
    places = np.stack(np.meshgrid(*[axis - shift for shift in mean], indexing="ij"), axis=-1)
    found = np.exp(-0.5 * np.einsum("...i,ij,...j", places, np.linalg.inv(covariance), places))
    total: Array = found / found.sum()
    return total


def rounded(masses: Array) -> Array:
    """To the nearest level, ties up, in every round. The first level is -REACH."""
    for axis in range(masses.ndim):
        widths = [(POINTS // 2, POINTS // 2) if i == axis else (0, 0) for i in range(masses.ndim)]
        padded = np.pad(masses, widths)
        shape = [*padded.shape[:axis], -1, POINTS, *padded.shape[axis + 1 :]]
        masses = padded.reshape(shape).sum(axis=axis + 1)
    return masses


def convolved(parts: list[Array]) -> Array:
    found = parts[0]
    for part in parts[1:]:
        found = fftconvolve(found, part)
    return found


def spread(masses: Array, clients: int) -> Array:
    """n - 1 numbers uniform on a level are added in every round, which is the lemma's kernel but for the rounding."""
    for axis in range(masses.ndim):
        shape = [1] * masses.ndim
        shape[axis] = POINTS
        for _ in range(clients - 1):
            masses = fftconvolve(masses, np.full(shape, 1.0 / POINTS))
    return masses


def _first(clients: int) -> int:
    """The point that `spread` sums start with: rounding, ties up, moves a point by -7 to 8 sixteenths."""
    return -clients * REACH * POINTS - (clients - 1) * (POINTS // 2 - 1)


def distance(means: list[Array], covariance: Array) -> float:
    """Total variation of the sum of rounded Gaussians from the rounding of their sum."""
    clients = len(means)
    parts = [gaussian(mean, covariance) for mean in means]
    one_by_one = convolved([rounded(part) for part in parts])
    whole = spread(convolved(parts), clients)
    first = _first(clients)
    level = -clients * REACH - clients
    before = first - (level * POINTS - POINTS // 2)
    after = -(before + whole.shape[0]) % POINTS
    padded = np.pad(whole, [(before, after)] * whole.ndim)
    for axis in range(padded.ndim):
        shape = [*padded.shape[:axis], -1, POINTS, *padded.shape[axis + 1 :]]
        padded = padded.reshape(shape).sum(axis=axis + 1)
    size = max(padded.shape[0], one_by_one.shape[0] + clients)
    a = np.pad(one_by_one, [(clients, size - clients - one_by_one.shape[0])] * whole.ndim)
    b = np.pad(padded, [(0, size - padded.shape[0])] * whole.ndim)
    return float(0.5 * np.abs(a - b).sum())


def correlation(coefficient: float) -> Array:
    """C⁻¹C⁻ᵀ of two rounds, C⁻¹ unit lower triangular."""
    inverse = np.array([[1.0, 0.0], [-coefficient, 1.0]])
    found: Array = inverse @ inverse.T
    return found


def bound_on_distance(sigma_squared: float, clients: int, rounds: int = 1) -> float:
    """A density within 1 ± τ of uniform has a total variation of at most τ/2 from it."""
    return 0.5 * ((1.0 + uniformity(sigma_squared, clients)) ** rounds - 1.0)


def theta(sigma_squared: float, clients: int) -> float:
    """Σ exp(-2π²σ²(|k|² - (Σk)²/n)) over the integer vectors k of n - 1 entries."""
    total = 0.0
    for k in itertools.product(range(-4, 5), repeat=clients - 1):
        form = sum(entry * entry for entry in k) - sum(k) ** 2 / clients
        total += math.exp(-2.0 * math.pi**2 * sigma_squared * form)
    return total


@pytest.mark.parametrize("clients", [2, 3, 4])
@pytest.mark.parametrize("sigma_squared", [0.3, 1.0, 2.0])
def test_the_excess_is_a_theta_series(clients: int, sigma_squared: float) -> None:
    expected = theta(sigma_squared, clients) - 1.0
    found = uniformity(sigma_squared, clients)
    assert expected * (1.0 - 1e-6) <= found <= 1.12 * expected


@pytest.mark.parametrize("sigma", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("means", [(0.0, 0.0), (0.3, -0.2), (0.5, 0.25), (0.1, 0.4, 0.45)])
def test_one_round_is_as_close_as_the_lemma_says(sigma: float, means: tuple[float, ...]) -> None:
    snapped = [np.array([round(mean * POINTS) / POINTS]) for mean in means]
    found = distance(snapped, np.array([[sigma**2]]))
    assert found <= bound_on_distance(sigma**2, len(means)) + 1e-12


def test_the_lemma_is_not_far_from_the_truth() -> None:
    # Otherwise the tests above could not fail. The worst means of two clients reach a quarter of the bound.
    worst = max(distance([np.array([i / POINTS]), np.array([0.0])], np.array([[0.5**2]])) for i in range(POINTS))
    assert 0.2 * bound_on_distance(0.5**2, 2) < worst < bound_on_distance(0.5**2, 2)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("clients", [2, 3])
def test_two_rounds_with_correlated_noise(clients: int, coefficient: float) -> None:
    sigma_squared = 0.36
    means = [np.array([round(0.3 * i * POINTS), round(-0.2 * i * POINTS)]) / POINTS for i in range(clients)]
    found = distance(means, sigma_squared * correlation(coefficient))
    assert found <= bound_on_distance(sigma_squared, clients, rounds=2) + 1e-12


def test_the_quadratic_form_must_be_one_on_integers() -> None:
    # With a correlation that is not unit triangular the sum of two rounds has little noise, and the lemma fails.
    shrunk = np.array([[1.0, -0.97], [-0.97, 1.0]])
    found = distance([np.array([0.5, 0.5]), np.array([0.0, 0.25])], 0.5 * shrunk)
    assert found > bound_on_distance(0.5, 2, rounds=2)


def test_the_second_round_may_depend_on_the_first() -> None:
    # A client that answers the released sum: likelihood ratios multiply, whatever it answers.
    sigma = 0.5
    covariance = np.array([[sigma**2]])

    def sums(client: float, means: Callable[[int], float]) -> tuple[Array, Array]:
        first = [gaussian(np.array([mean]), covariance) for mean in (client, 0.0)]
        real = convolved([rounded(part) for part in first])
        ideal = _levels(spread(convolved(first), 2), 2)
        joint_real, joint_ideal = [], []
        for index, (a, b) in enumerate(zip(real, ideal, strict=True)):
            second = [gaussian(np.array([mean]), covariance) for mean in (means(index), 0.0)]
            joint_real.append(a * convolved([rounded(part) for part in second]))
            joint_ideal.append(b * _levels(spread(convolved(second), 2), 2))
        return np.array(joint_real), np.array(joint_ideal)

    real, ideal = sums(0.25, lambda index: (index % 4) / 4)
    excess = uniformity(sigma**2, 2)
    seen = ideal > 1e-9
    ratios = real[seen] / ideal[seen]
    assert np.all(ratios <= (1.0 + excess) ** 2)
    assert np.all(ratios >= (1.0 - excess) ** 2)
    assert np.abs(np.log(ratios)).max() > 0.3 * excess


def _levels(whole: Array, clients: int) -> Array:
    """The lemma's rounding of a one-dimensional sum, from the level that `convolved` of rounded parts starts with."""
    first = _first(clients)
    start = -clients * REACH * POINTS - POINTS // 2
    before = first - start
    if before < 0:
        whole, before = whole[-before:], 0
    padded = np.pad(whole, (before, -(before + len(whole)) % POINTS))
    levels = padded.reshape(-1, POINTS).sum(axis=1)
    size = clients * (2 * REACH + 1) - clients + 1
    return np.pad(levels, (0, max(0, size - len(levels))))[:size]
