from __future__ import annotations

import math

import numpy as np
import pytest

from cpsgd.errors import ParameterError
from reproduction.paper_convergence import gradient_norm_bound, gradient_variance, step_size


def test_formulas_by_hand() -> None:
    assert gradient_variance(sampling=0.5, estimation=1.5) == 4.0
    assert step_size(smoothness=2.0, initial_gap=8.0, variance=4.0, rounds=50) == pytest.approx(0.2)
    assert step_size(smoothness=2.0, initial_gap=8.0, variance=0.0, rounds=50) == 0.5
    assert step_size(smoothness=2.0, initial_gap=8.0, variance=1e-9, rounds=50) == 0.5
    bound = gradient_norm_bound(smoothness=2.0, initial_gap=8.0, variance=4.0, rounds=50, gradient_bound=3.0, bias=0.25)
    assert bound == pytest.approx(2 * 8 * 2 / 50 + 2 * math.sqrt(2) * 2 * math.sqrt(16) / math.sqrt(50) + 0.75)


@pytest.mark.parametrize("deviation", [0.0, 0.5, 3.0])
def test_sgd_on_a_quadratic_keeps_the_bound(deviation: float) -> None:
    # F(w) = L ‖w‖²/2; the average of 200 runs of the squared gradient norm stays well under the bound in expectation.
    smoothness, rounds, dim = 4.0, 60, 5
    rng = np.random.default_rng(3)
    start = np.full(dim, 1.0)
    gap = smoothness * float(start @ start) / 2
    # σ² of the corollary is twice the variance of the noise.
    variance = gradient_variance(sampling=0.0, estimation=deviation**2 * dim)
    rate = step_size(smoothness=smoothness, initial_gap=gap, variance=variance, rounds=rounds)
    total = 0.0
    for _ in range(200):
        w = start.copy()
        for _ in range(rounds):
            gradient = smoothness * w
            total += float(gradient @ gradient)
            w -= rate * (gradient + rng.normal(scale=deviation, size=dim) if deviation else gradient)
    bound = gradient_norm_bound(smoothness=smoothness, initial_gap=gap, variance=variance, rounds=rounds)
    assert total / (200 * rounds) <= bound


def test_bad_input() -> None:
    with pytest.raises(ParameterError, match="smoothness"):
        step_size(smoothness=0.0, initial_gap=1.0, variance=1.0, rounds=1)
    with pytest.raises(ParameterError, match="variance"):
        step_size(smoothness=1.0, initial_gap=1.0, variance=-1.0, rounds=1)
    with pytest.raises(ParameterError, match="gradient_bound"):
        gradient_norm_bound(smoothness=1.0, initial_gap=1.0, variance=1.0, rounds=1, bias=0.1)
    with pytest.raises(ParameterError, match="estimation"):
        gradient_variance(sampling=1.0, estimation=math.nan)
