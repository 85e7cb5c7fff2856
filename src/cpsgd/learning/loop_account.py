"""The account of a private loop: ε of its steps, and the least noise that keeps an ε.

A step is a Poisson-sampled Gaussian mechanism; steps are composed by `cpsgd.privacy.accountant`
(docs/proofs/private-loop.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError, InfeasibleError
from cpsgd.learning.sum_noise import VARIATION, gaussian_mu
from cpsgd.neighbours import Participation
from cpsgd.privacy.accountant import COARSE, FINE, Rounds, composed_epsilon

Schedule = Callable[[int], float]
"""From the number of a step, from 0, to a factor of the noise, or to a clip norm."""

# Noise multipliers that are tried.
_LEAST, _MOST = 0.05, 1e5
# Multipliers that differ by less than this factor count as one: each takes its own time to account for.
_SAME = 1.01
_CLOSE = 1e-3


def epsilon_of(multipliers: Counter[float], delta: float, rate: float, dim: int, interval: float = FINE) -> float:
    """Returns ε of the steps, given the number of steps at each noise multiplier."""
    rounds = [
        Rounds(gaussian_mu(multiplier, dim), count=count, variation=dim * VARIATION)
        for multiplier, count in sorted(multipliers.items())
    ]
    return composed_epsilon(
        rounds, delta=delta, participation=Participation.poisson(max(rate, 2e-7)), interval=interval
    )


def least_multiplier(epsilon: float, delta: float, factors: list[float], rate: float, dim: int) -> float:
    """Returns the least noise multiplier with which all steps cost at most ε, to within a thousandth."""
    counted = Counter(factors)

    def affordable(multiplier: float, interval: float) -> bool:
        tried = Counter({multiplier * factor: count for factor, count in counted.items()})
        try:
            return epsilon_of(tried, delta, rate, dim, interval) <= epsilon
        except ConditionError:
            return False

    low = high = 1.0
    while low > _LEAST and affordable(low, COARSE):
        low, high = 0.5 * low, low
    while not affordable(high, COARSE):
        low, high = high, 2.0 * high
        if high > _MOST:
            raise InfeasibleError(
                f"No noise keeps ε = {rounded_up(epsilon)} at δ = {delta:g} for {len(factors):,} steps and {dim:,} "
                "parameters: allow more, or train for fewer epochs."
            )
    while high > (1.0 + _CLOSE) * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if affordable(middle, COARSE) else (middle, high)
    while not affordable(high, FINE):
        high *= 1.0 + _CLOSE
    return high


def factors_of(schedule: Schedule | None, steps: int) -> list[float]:
    """Returns the factor of the noise in each step, rounded to powers of 1.01."""
    if schedule is None:
        return [1.0] * steps
    found = [_validate.positive("noise_schedule", schedule(step)) for step in range(steps)]
    return [_SAME ** round(math.log(factor) / math.log(_SAME)) for factor in found]
