"""The Gaussian mechanism: the classical lemma and the exact answer, in both directions.

A Gaussian mechanism with standard deviation σ and Euclidean sensitivity Δ distinguishes neighbours as well as
N(0, 1) and N(μ, 1) can be told apart, μ = Δ/σ ("μ-GDP"; Dong, Roth and Su, "Gaussian Differential Privacy", 2022).
Its exact trade-off is (Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018,
Theorem 8)

    δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

Every function rounds to the safe side: ε, δ and σ up, μ down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpsgd import _validate
from cpsgd._lazy import Late
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

# Assumed of scipy.special.erfcx and ndtr: relative error within this (the tests compare them with mpmath).
_SPECIAL = 1e-14
_SAFE = 1.0 + 1e-14
# The smallest normal float: what underflows is rounded up to it.
_TINY = 2.0**-1022


def gdp_delta(mu: float, epsilon: float) -> float:
    """Returns δ(ε) of a μ-GDP mechanism (Balle and Wang, Theorem 8), rounded up.

    With x = ε/μ, h = μ/2 and Φ(-y) = ½ e^(-y²/2) erfcx(y/√2) both terms share the factor e^(-(x-h)²/2), because
    (x + h)² = (x - h)² + 2ε. So the difference is taken between two numbers of ordinary size, and is accurate
    however small δ is.

    Example:
        >>> f"{gdp_delta(1.0, 1.0):.6f}"
        '0.126937'
    """
    return _delta(_validate.positive("mu", mu), _validate.non_negative("epsilon", epsilon))


def _delta(mu: float, epsilon: float) -> float:
    """Returns δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), rounded up."""
    near, far = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    if near > 38.0:
        return _TINY  # δ <= Φ(-near) is smaller still
    # `near` and `far` are off by at most 2^-52 far; erfcx and ndtr pass that on at most as a relative error.
    error = _SPECIAL + 2.0**-51 * far
    scale = 0.5 * math.exp(-0.5 * near * near)
    error_of_scale = 2.0**-51 * (1.0 + far * abs(near))
    far_term = float(special.erfcx(far / math.sqrt(2.0))) * (1.0 - error)
    if near < 0.0:  # δ is not small here, and erfcx might overflow
        return min(1.0, float(special.ndtr(-near)) * (1.0 + error) - scale * far_term * (1.0 - error_of_scale))
    return max(
        scale * (1.0 + error_of_scale) * (float(special.erfcx(near / math.sqrt(2.0))) * (1.0 + error) - far_term), _TINY
    )


def gdp_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest ε >= 0 at which a μ-GDP mechanism is (ε, δ)-private, rounded up.

    Example:
        >>> f"{gdp_epsilon(0.5, 1e-6):.4f}"
        '2.2541'
    """
    _validate.positive("mu", mu)
    _validate.probability("delta", delta)
    if _delta(mu, 0.0) <= delta:
        return 0.0
    # Φ(-y) <= e^(-y²/2)/2 makes this enough; the search confirms it.
    enough = mu * (0.5 * mu + math.sqrt(2.0 * math.log(1.0 / delta)))
    return _boundary(lambda epsilon: _delta(mu, epsilon) <= delta, 0.0, enough)[1]


def gdp_mu(epsilon: float, delta: float) -> float:
    """Returns the largest μ at which a μ-GDP mechanism is (ε, δ)-private, rounded down.

    Example:
        >>> f"{gdp_mu(1.0, 1e-6):.4f}"
        '0.2367'
    """
    _validate.positive("epsilon", epsilon)
    _validate.probability("delta", delta)
    return _boundary(lambda mu: _delta(mu, epsilon) > delta, 0.0, epsilon)[0]


def analytic_epsilon(*, sigma: float, sensitivity: float, delta: float) -> float:
    """Returns the exact ε of the Gaussian mechanism with noise σ, rounded up (Balle and Wang, Theorem 8).

    Example:
        >>> from cpsgd.privacy import analytic_epsilon
        >>> f"ε = {analytic_epsilon(sigma=4.0, sensitivity=1.0, delta=1e-6):.3f}"
        'ε = 1.061'
    """
    mu = _validate.positive("sensitivity", sensitivity) / _validate.positive("sigma", sigma) * _SAFE
    return gdp_epsilon(mu, delta)


def analytic_sigma(*, epsilon: float, sensitivity: float, delta: float) -> float:
    """Returns the smallest σ for an (ε, δ)-private Gaussian mechanism, rounded up (Balle and Wang, Theorem 8).

    Example:
        >>> from cpsgd.privacy import analytic_sigma
        >>> f"σ = {analytic_sigma(epsilon=1.0, sensitivity=1.0, delta=1e-6):.3f}"
        'σ = 4.225'
    """
    return _validate.positive("sensitivity", sensitivity) / gdp_mu(epsilon, delta) * _SAFE


def classical_epsilon(*, sigma: float, sensitivity: float, delta: float) -> float:
    """Returns ε = (Δ₂/σ) √(2 log(1.25/δ)), rounded up: the paper's lemma (Dwork and Roth, Theorem A.1).

    Raises:
        ConditionError: σ < Δ₂ √(2 log(1.25/δ)), that is, ε would be over 1, where the lemma is silent.

    Example:
        >>> from cpsgd.privacy import classical_epsilon
        >>> f"ε = {classical_epsilon(sigma=6.0, sensitivity=1.0, delta=1e-6):.3f}"
        'ε = 0.883'
    """
    factor = _classical_factor(delta)
    epsilon = _validate.positive("sensitivity", sensitivity) / _validate.positive("sigma", sigma) * factor * _SAFE
    if epsilon > 1.0:
        raise ConditionError(
            f"The classical lemma holds for ε <= 1 and would give {rounded_up(epsilon)} here. It needs "
            f"sigma >= {sensitivity * factor * _SAFE:.6g}, got sigma={sigma:.6g}; the analytic formula has no limit."
        )
    return epsilon


def classical_sigma(*, epsilon: float, sensitivity: float, delta: float) -> float:
    """Returns σ = (Δ₂/ε) √(2 log(1.25/δ)) for ε <= 1 (Dwork and Roth, Theorem A.1), rounded up.

    Example:
        >>> from cpsgd.privacy import classical_sigma
        >>> f"σ = {classical_sigma(epsilon=1.0, sensitivity=1.0, delta=1e-6):.3f}"
        'σ = 5.299'
    """
    if _validate.positive("epsilon", epsilon) > 1.0:
        raise ConditionError(
            f"The classical lemma holds for ε <= 1, got {epsilon!r}; the analytic formula has no limit."
        )
    return _validate.positive("sensitivity", sensitivity) / epsilon * _classical_factor(delta) * _SAFE


def _classical_factor(delta: float) -> float:
    return math.sqrt(2.0 * math.log(1.25 / _validate.probability("delta", delta)))


def _boundary(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Returns neighbouring numbers (up to about 1e-15) with `holds` false at the first and true at the second.

    `holds` is false at `low` and true from some point on; `high` is a first guess of such a point.
    """
    while not holds(high):
        low, high = high, 2.0 * high
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high or high - low <= 1e-15 * high:
            return low, high
        low, high = (low, middle) if holds(middle) else (middle, high)
