"""How far the fractional parts of silos' noisy numbers are from uniform, given their sums over a whole run.

`excess` bounds τ of docs/proofs/shaped-rounding.md: given the sums, the fractional parts have a density within 1 ± τ
of uniform, for any dropouts and restarts. It is a theta series, bounded by its shortest vector and by its total:

    τ <= exp(-(1 - κ) α q) ρ Π_t (1 + τ_(n_t)(κα)) θ₃(κα)^(messages that did not arrive),    α = 2π²σ², 0 < κ < 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.rounded_gaussian import uniformity

# More numbers of messages than this are not looked at one by one.
_MOST_COUNTS = 512
# κσ² that are tried. With less than the first the products are of no use.
_SHARES = (0.35, 0.45, 0.55, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
_UP, _DOWN = 1.0 + 1e-9, 1.0 - 1e-9


def shortest(correlation: Correlation, honest: int) -> float:
    """Returns q_n, a lower bound on the squared length of a non-zero vector of the lattice, rounded down.

    Example:
        >>> round(shortest(Correlation(bands=32, rounds=300), honest=8), 3)
        0.433
    """
    apart = 1.0 - 1.0 / honest
    return apart / (1.0 + 4.0 * apart * correlation.column_norm**2 / honest) * _DOWN


def excess(variance: float, correlation: Correlation, *, honest: int, silos: int) -> float:
    """Returns a bound on τ, rounded up; infinite if no useful bound is found.

    Args:
        variance: σ², of a silo's z in squared steps.
        correlation: The weights and the number of rounds; a round has one sum.
        honest: n, the fewest honest messages of any sum, at least 2.
        silos: The most honest silos that compute a message in a round, whether or not it arrives.

    Raises:
        ConditionError: One message alone is in a sum, or far more silos may drop out than are looked at.
    """
    if honest < 2:
        raise ConditionError("With rounding that is shaped over rounds a sum needs two honest silos or more.")
    if silos - honest > _MOST_COUNTS:
        raise ConditionError(f"More than {_MOST_COUNTS} of {silos} silos may drop out: plan for fewer dropouts.")
    length = 2.0 * math.pi**2 * shortest(correlation, honest) * _DOWN
    found = math.inf
    for share in _SHARES:
        if share < variance:
            most = max(_series(share, count, silos - count) for count in range(honest, silos + 1))
            # ρ <= √(Σg²)^T. A silo may begin anew, so that it is not 1 even where nobody drops out.
            total = correlation.rounds * (math.log(correlation.spread) + most)
            found = min(found, total - length * (variance - share))
    return math.exp(min(found, 700.0)) * _UP


@lru_cache(maxsize=4096)
def _series(variance: float, arrived: int, missing: int) -> float:
    """Returns log((1 + τ_n) θ₃^missing), one sum's factor in the module's bound, at β = 2π² `variance`; rounded up."""
    series = np.exp(-2.0 * math.pi**2 * variance * np.arange(1.0, 40.0) ** 2)
    return (math.log1p(uniformity(variance, arrived)) + missing * math.log1p(2.0 * float(series.sum()))) * _UP
