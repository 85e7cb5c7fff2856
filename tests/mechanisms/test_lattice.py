"""The error model's integrals against numerical quadrature and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate

from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.clipping import gaussian_clipping, gaussian_rounding, worst_rounding


def rounding_by_quadrature(step: float, levels: int) -> float:
    half = 0.5 * step * (levels - 1)

    def integrand(x: float) -> float:
        fraction = ((x + half) / step) % 1.0
        return fraction * (1 - fraction) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    limit = min(half, 12.0)
    knots = [-limit, *(x for x in -half + step * np.arange(levels) if -limit < x < limit), limit]
    pieces = sorted({*knots, 0.0})
    return sum(integrate.quad(integrand, a, b, epsabs=1e-14)[0] for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize("step", [0.04, 0.07, 0.3, 0.9999, 1.0, 1.3, 4.0, 31.0, 300.0])
@pytest.mark.parametrize("levels", [2, 3, 4, 5, 8, 33])
def test_rounding_is_the_integral(step: float, levels: int) -> None:
    # Below a sixteenth of a standard deviation the model takes 1/6, which is off by up to about step²/60.
    tolerance = 1e-9 if step > 1 / 16 else 1e-4
    assert gaussian_rounding(step, levels) == pytest.approx(rounding_by_quadrature(step, levels), rel=tolerance)


def test_rounding_limits() -> None:
    # Levels far apart: with one at zero E|x|/s, without one 1/4; levels close together: 1/6.
    assert gaussian_rounding(1000.0, 3) == pytest.approx(math.sqrt(2 / math.pi) / 1000, rel=2e-3)
    assert gaussian_rounding(1000.0, 2) == pytest.approx(0.25, rel=1e-5)
    assert gaussian_rounding(0.01, 4001) == pytest.approx(1 / 6, rel=1e-9)


@pytest.mark.parametrize("reach", [0.0, 0.5, 1.0, 3.0, 5.0, 8.0])
def test_clipping_is_the_integral(reach: float) -> None:
    def integrand(x: float) -> float:
        return 2 * (x - reach) ** 2 * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    assert gaussian_clipping(reach) == pytest.approx(integrate.quad(integrand, reach, reach + 12)[0], rel=1e-6)
    assert gaussian_clipping(60.0) == 0.0


@pytest.mark.parametrize("levels", [3, 5])
def test_no_vector_is_worse_than_the_worst_case_for_odd_levels(levels: int) -> None:
    rng = np.random.default_rng(7)
    for spread in (0.05, 0.2, 0.45, 0.7):
        bound = worst_rounding(spread, levels)
        for _ in range(200):
            vector = rng.standard_normal(64) * rng.exponential(size=64) ** 2
            vector *= spread / math.sqrt(float(np.mean(vector**2)))
            fraction = np.abs(vector) % 1.0
            assert float(np.mean(fraction * (1 - fraction))) <= bound * (1 + 1e-12)
        if spread <= 0.5:
            assert bound == pytest.approx(spread * (1 - spread))


def test_noise_term_is_the_variance() -> None:
    mechanism = Binomial(levels=4, trials=7, coordinate_range=3.0, p=0.3)
    error = mechanism.predicted_error(clients=50, dim=300, clip_norm=2.0, rotate=False)
    assert error.noise == pytest.approx(300 * 2.0**2 * 7 * 0.3 * 0.7 / 50)
    assert error.rounding == pytest.approx(300 * 2.0**2 * 0.25 / 50)
    assert error.clipping < 1e-7


def test_scales_with_the_square_of_the_norm() -> None:
    small, large = (
        Binomial(levels=5, trials=3, coordinate_range=0.2 * norm).predicted_error(
            clients=9, dim=128, clip_norm=norm, rotate=True
        )
        for norm in (1.0, 10.0)
    )
    for part in ("noise", "rounding", "clipping", "total"):
        assert getattr(large, part) == pytest.approx(100 * getattr(small, part), rel=1e-9)
