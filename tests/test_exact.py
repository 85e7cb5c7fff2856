"""Exact samplers against the laws they are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cpsgd._exact import GAUSSIAN_BITS, discrete_gaussian, discrete_laplace
from cpsgd.randomness import Keystream


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 3), (3, 2), (5, 1), (1, 1 << 20)])
def test_discrete_laplace_has_its_law(numerator: int, denominator: int) -> None:
    drawn = discrete_laplace(numerator, denominator, 20_000, Keystream(bytes(16)))
    loss = numerator / denominator
    # Bins of about 0.3 spreads each, so that there are always several with many draws.
    width = max(1, int(0.3 / loss))
    code = np.clip(np.floor_divide(drawn + 12 * width, width), 0, 24)
    last = width * np.arange(-11.0, 13.0) - 1.0
    falling = np.exp(-loss * np.where(last < 0.0, -last, last + 1.0)) / (1.0 + math.exp(-loss))
    below = np.where(last < 0.0, falling, 1.0 - falling)
    expected = np.diff(below, prepend=0.0, append=1.0)
    kept = expected > 1e-4
    chi = stats.chisquare(np.bincount(code, minlength=25)[kept], 20_000 * expected[kept], sum_check=False)
    assert chi.pvalue > 1e-6


def test_discrete_gaussian_has_its_law() -> None:
    drawn = discrete_gaussian(20_000, Keystream(bytes(16))) / 2.0**GAUSSIAN_BITS
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert abs(drawn.std() - 1.0) < 5.0 / math.sqrt(2 * 20_000)
