"""The paper's Corollary 1 on the convergence of SGD with quantized, noisy gradients.

Let F be L-smooth with ‖∇F‖ <= D everywhere and F(w⁰) - F(w*) <= D_F, and let T rounds of SGD with the step size γ use
estimates of the gradient with the variance and bias below. Then the expected squared norm of the gradient, at a round
drawn uniformly, is at most

    2 D_F L / T + 2 √2 σ √(L D_F) / √T + D B,

    γ = min{1/L, √(2 D_F) / (σ √(LT))},
    σ² = 2 max_t E‖g^t - ∇F‖² + 2 max_t E‖g^t - g̃^t‖²      (sampling of clients; estimation of their mean),
    B  = max_t ‖E[g^t - g̃^t]‖                               (bias of that estimation, here from clipping).

(Agarwal, Suresh, Yu, Kumar, McMahan, "cpSGD", NeurIPS 2018, Corollary 1, after Ghadimi and Lan 2013.)

| paper | here |
|---|---|
| L | `smoothness` |
| D | `gradient_bound` |
| D_F | `initial_gap` |
| σ² | `variance`, from `gradient_variance` |
| B | `bias` |
| T | `rounds` |
"""

from __future__ import annotations

import math

from cpsgd import _validate
from cpsgd.errors import ParameterError


def gradient_variance(*, sampling: float, estimation: float) -> float:
    """Returns σ² = 2 (variance of the cohort's mean gradient) + 2 (squared error of its estimate), equation (2).

    Args:
        sampling: Largest E‖g - ∇F‖² over the rounds; for a cohort of n clients drawn at random it falls as 1/n.
        estimation: Largest E‖g - g̃‖² over the rounds, such as `Plan.error.total`.
    """
    return 2.0 * _validate.non_negative("sampling", sampling) + 2.0 * _validate.non_negative("estimation", estimation)


def step_size(*, smoothness: float, initial_gap: float, variance: float, rounds: int) -> float:
    """Returns γ = min{1/L, √(2 D_F) / (σ √(LT))}, the step size for which `gradient_norm_bound` holds.

    Example:
        >>> step_size(smoothness=1.0, initial_gap=2.0, variance=4.0, rounds=100)
        0.1
    """
    smoothness = _validate.positive("smoothness", smoothness)
    gap = _validate.positive("initial_gap", initial_gap)
    rounds = _validate.integer("rounds", rounds, low=1)
    deviation = math.sqrt(_validate.non_negative("variance", variance))
    if deviation == 0.0:
        return 1.0 / smoothness
    return min(1.0 / smoothness, math.sqrt(2.0 * gap) / (deviation * math.sqrt(smoothness * rounds)))


def gradient_norm_bound(
    *,
    smoothness: float,
    initial_gap: float,
    variance: float,
    rounds: int,
    gradient_bound: float = 0.0,
    bias: float = 0.0,
) -> float:
    """Returns the bound on E‖∇F(w^t)‖², t uniform over the rounds: 2 D_F L/T + 2 √2 σ √(L D_F)/√T + D B.

    Args:
        smoothness: L, the Lipschitz constant of ∇F.
        initial_gap: D_F >= F(w⁰) - F(w*).
        variance: σ², see `gradient_variance`.
        rounds: T.
        gradient_bound: D >= ‖∇F‖; needed only with a bias.
        bias: B, the largest norm of the estimate's bias. Zero where nothing is clipped.

    Example:
        >>> round(gradient_norm_bound(smoothness=1.0, initial_gap=2.0, variance=4.0, rounds=100), 6)
        0.84
    """
    smoothness = _validate.positive("smoothness", smoothness)
    gap = _validate.positive("initial_gap", initial_gap)
    rounds = _validate.integer("rounds", rounds, low=1)
    deviation = math.sqrt(_validate.non_negative("variance", variance))
    bias, bound = _validate.non_negative("bias", bias), _validate.non_negative("gradient_bound", gradient_bound)
    if bias > 0.0 and bound == 0.0:
        raise ParameterError("With a bias the bound needs gradient_bound, D >= ‖∇F‖.")
    noise = 2.0 * math.sqrt(2.0 * smoothness * gap / rounds) * deviation
    return 2.0 * gap * smoothness / rounds + noise + bound * bias
