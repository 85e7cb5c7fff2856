"""The smoothed certificate of a round, or of many: a product of all their coordinates.

Rounds of the same protocol are more coordinates, whatever the later ones are asked after the earlier were seen: in the
proof coordinates are swapped for Gaussians from the last to the first, and each may depend on those before it.

A client that adds several independent steps per coordinate (the m coins of a client) is accounted for as if their sums
were released one by one: adding them up is post-processing.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cpsgd import _validate
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law, Steps
from cpsgd.privacy import curves
from cpsgd.privacy.certificate import SMALLEST_MASS, GaussianCertificate
from cpsgd.privacy.curves import Family
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.smoothed import Growth, fisher, growth

SHARES = (0.003, 0.1, 0.5)
"""Shares of δ for the tails, in the order in which they are tried: the first that will do is as good as any."""

# Coordinates at their largest distance that neighbours must be able to differ in.
_FEWEST = 3.0
# How often the budget is doubled where there is too little to smooth over: what is given away is more, and still valid.
_LARGER_BUDGETS = 4


def smoothed_certificate(
    law: Law | Steps, *, dim: int, sensitivity: float, reach: float, tail: float, rounds: int = 1
) -> GaussianCertificate:
    """The smoothed certificate of `rounds` rounds together: all of them are μ-GDP up to `tail_mass`.

    All its numbers are upper bounds, also in floating point.

    Args:
        law: Of the noise in one coordinate of a sum, or of the sum itself.
        dim: d.
        sensitivity: S, the largest Euclidean distance of neighbours in one round, in units of the law.
        reach: The largest distance in one coordinate.
        tail: Probability, over all coordinates and rounds together, that may be left out.
        rounds: How many rounds neighbours differ in.

    Raises:
        ConditionError: The law's support ends too early, or a single coordinate gives away too much.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> law = BinomialLaw(10_000, 0.5)
        >>> found = smoothed_certificate(law, dim=65_536, sensitivity=19.8177, reach=1.0, tail=1e-11)
        >>> f"{found.unit_mu * 50:.2f}"  # 50 is the standard deviation
        '1.00'
    """
    _validate.integer("dim", dim, low=1)
    _validate.positive("sensitivity", sensitivity)
    _validate.probability("tail", tail)
    copies = law.copies if isinstance(law, Steps) else 1
    coordinates = dim * copies
    # Up to the next power of two one and the same growth serves every number of rounds.
    most = 1 << (_validate.integer("rounds", rounds, low=1) - 1).bit_length()
    each = tail / (2.0 * coordinates * most)
    if each < SMALLEST_MASS:
        raise ConditionError(f"No smoothed certificate is computed for a tail of {each:.2g} per coordinate.")
    budget = sensitivity * sensitivity * copies
    if isinstance(law, Law) and coordinates * rounds < _FEWEST:
        raise ConditionError("No smoothed certificate is computed: there is next to nothing to smooth.")
    found = _first_growth(law, min(reach, sensitivity), each, budget * most)
    mu = math.sqrt(found.reached(budget * rounds)) * (1.0 + 1e-15)
    mass = coordinates * rounds * (_families(law, min(reach, sensitivity), each)[0].tail + each) * (1.0 + 2.0**-50)
    return GaussianCertificate(mu=mu, unit_mu=mu / sensitivity * (1.0 + 2.0**-52), tail_mass=mass)


def smoothed_sensitivity(law: Law, *, dim: int, reach: float, mu: float, tail: float, rounds: int = 1) -> float:
    """The largest sensitivity, rounded down, at which `rounds` rounds together are certified as μ-GDP.

    Raises:
        ConditionError: There is no certificate.
    """
    each = tail / (2.0 * dim * rounds)
    if each < SMALLEST_MASS:
        raise ConditionError(f"No smoothed certificate is computed for a tail of {each:.2g} per coordinate.")
    # A Gaussian of the same variance allows about that much; a smaller reach would be proved for less than is used.
    most = min(reach, 1.01 * mu * math.sqrt(law.variance / rounds))
    if dim * rounds < _FEWEST or mu * mu * law.variance < _FEWEST * most * most:
        raise ConditionError("No smoothed certificate is computed: there is next to nothing to smooth.")
    found = growth(_families(law, most, each), around=mu * mu, tail=each)
    allowed = math.sqrt(found.affordable(mu * mu) / rounds)
    return allowed if reach <= most else min(allowed, most)


def smoothed_epsilon(
    law: Law | Steps, *, dim: int, sensitivity: float, reach: float, delta: float, rounds: int = 1
) -> tuple[float, GaussianCertificate]:
    """The smallest ε that the smoothed certificate proves for this δ, tails included, and the certificate.

    Raises:
        ConditionError: There is no certificate at any share of δ for the tails.
    """
    reason: ConditionError | None = None
    for share in SHARES:
        try:
            found = smoothed_certificate(
                law, dim=dim, sensitivity=sensitivity, reach=reach, tail=share * delta, rounds=rounds
            )
        except ConditionError as error:
            reason = error
            continue
        return gdp_epsilon(found.mu, (delta - found.tail_mass) * (1.0 - 2.0**-52)), found
    assert reason is not None
    raise reason


@lru_cache(maxsize=32)
def _families(law: Law | Steps, reach: float, tail: float) -> list[Family]:
    make = curves.of_steps if isinstance(law, Steps) else curves.of_law
    return make(law, reach=reach, tail=tail)  # type: ignore[arg-type]  # each takes its own kind


def _first_growth(law: Law | Steps, reach: float, tail: float, budget: float) -> Growth:
    """The growth up to this budget, or to a few times as much where that is too little to smooth over."""
    _families(law, reach, tail)  # if there are none, no budget helps
    for _ in range(_LARGER_BUDGETS):
        try:
            return _growth(law, reach, tail, budget)
        except ConditionError:
            budget *= 2.0
    return _growth(law, reach, tail, budget)


@lru_cache(maxsize=64)
def _growth(law: Law | Steps, reach: float, tail: float, budget: float) -> Growth:
    families = _families(law, reach, tail)
    return growth(families, around=budget * max(fisher(family) for family in families), tail=tail)
