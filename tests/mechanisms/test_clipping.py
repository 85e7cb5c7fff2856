"""Expected errors of rounding and clipping, against integrals and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from cpsgd.mechanisms import clipping


@pytest.mark.parametrize("reach", [0.0, 0.3, 1.0, 2.5, 5.0])
def test_clipped_gaussians_are_integrals(reach: float) -> None:
    lost = quad(lambda x: 2.0 * (x - reach) ** 2 * norm.pdf(x), reach, reach + 12.0, epsabs=0.0, epsrel=1e-11)[0]
    kept = quad(lambda x: 2.0 * min(x, reach) ** 2 * norm.pdf(x), 0.0, 12.0, points=[reach], epsabs=1e-13)[0]
    assert clipping.gaussian_clipping(reach) == pytest.approx(lost, rel=1e-9)
    assert clipping.clipped_square(reach) == pytest.approx(kept, rel=1e-9, abs=1e-13)


def test_clipping_far_out_takes_nothing_away() -> None:
    assert 0.0 <= clipping.gaussian_clipping(30.0) < 1e-190
    assert clipping.gaussian_clipping(1e9) == 0.0


@pytest.mark.parametrize(("reach", "rotate", "share"), [(0.5, False, 1.0), (0.5, True, None), (2.0, True, 0.0)])
def test_what_clipping_takes_from_a_mean(reach: float, rotate: bool, share: float | None) -> None:
    found = clipping.expected_clipping(reach, dim=49, clip_norm=1.5, rotate=rotate)
    # A single coordinate of 1.5 loses all but the reach; rotated ones are Gaussian with a deviation of 1.5/7.
    expected = 1.5**2 * clipping.gaussian_clipping(reach / 1.5 * 7.0) if share is None else share * (1.5 - reach) ** 2
    assert found == pytest.approx(expected, rel=1e-12)
    # In one dimension a single coordinate is the worst that there is.
    assert clipping.expected_clipping(0.01, dim=1, clip_norm=3.0, rotate=True) <= 2.99**2


def fraction_variance(x: float, step: float, levels: int) -> float:
    place = x / step + 0.5 * (levels - 1)
    f = place - math.floor(place)
    return f * (1.0 - f) if 0.0 < place < levels - 1 else 0.0


@pytest.mark.parametrize("levels", [2, 3, 4, 7, 31])
@pytest.mark.parametrize("step", [0.0625, 0.4, 0.9, 1.0, 1.3, 2.0, 4.0, 30.0])
def test_rounding_of_a_gaussian_is_an_integral(step: float, levels: int) -> None:
    edges = np.clip(step * (np.arange(levels) - 0.5 * (levels - 1)), -9.0, 9.0)
    edges = np.unique(np.concatenate([edges, np.linspace(edges[0], edges[-1], 9)]))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        x = low + 0.5 * (high - low) * (1.0 + nodes)
        values = np.array([fraction_variance(float(each), step, levels) for each in x]) * norm.pdf(x)
        expected += 0.5 * float(high - low) * float(values @ weights)
    assert clipping.gaussian_rounding(step, levels) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_fine_rounding_is_a_sixth_of_what_is_not_clipped() -> None:
    for step, levels in ((0.06, 3), (0.01, 300), (0.06, 16)):
        inside = norm.cdf(0.5 * step * (levels - 1)) - norm.cdf(-0.5 * step * (levels - 1))
        assert clipping.gaussian_rounding(step, levels) == pytest.approx(inside / 6.0, rel=1e-12)
    # Where cells are counted in place of that, a few of them have less at their ends.
    assert clipping.gaussian_rounding(0.063, 9) != pytest.approx(math.erf(0.252 / math.sqrt(2.0)) / 6.0, rel=1e-9)


def test_no_vector_is_rounded_worse_than_the_worst() -> None:
    assert clipping.worst_rounding(0.0, 4) == clipping.worst_rounding(9.0, 2) == 0.25
    assert [clipping.worst_rounding(x, 5) for x in (0.0, 0.1, 0.5, 3.0)] == pytest.approx([0.0, 0.09, 0.25, 0.25])


def test_reaches_are_those_that_lose_as_little_as_they_say() -> None:
    assert 0.001 < clipping.gaussian_clipping(clipping.LEAST_REACH) < 0.0025
    assert 1e-14 < clipping.gaussian_clipping(clipping.ENOUGH_REACH) < 1e-12
