"""How small the modulus of secure aggregation may be.

Masked integers are added modulo M, so a coordinate of the sum is known only modulo M. The server takes the
representative nearest to the centre C of the sum, in a window of M integers around it; that is the true sum whenever it
is at most M/2 - 1 away from C. A mechanism bounds that deviation by an offset and a variable with a bounded moment
generating function (`Mechanism.deviations`); with Chernoff's inequality and a union bound over the d coordinates

    P(some coordinate overflows) <= 2 d exp(λ² V/2 - λ t),   t = M/2 - 1 - offset,

at the best λ that the mechanism allows, which is t/V where it may be that large. The bound is over rotation, rounding
and noise; it holds for all vectors that do not depend on the rotation's seed. Overflow spoils accuracy, never privacy.
"""

from __future__ import annotations

import math

from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.base import Deviation

DEFAULT_OVERFLOW = 1e-9
# More than what rounding to 128 bits moves in a table of 2^20 thresholds. That tails are cut off only helps.
_RESOLUTION = 2.0**-100


def overflow_probability(
    modulus: int, mechanism: Mechanism, *, clients: int, dim: int, clip_norm: float, rotate: bool = True
) -> float:
    """A proved upper bound on the probability that any coordinate of a round's sum wraps around.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> mechanism = Binomial(levels=3, trials=13, coordinate_range=0.2)
        >>> overflow_probability(100 * 15 + 2, mechanism, clients=100, dim=1024, clip_norm=1.0)
        0.0
        >>> 0.0 < overflow_probability(450, mechanism, clients=100, dim=1024, clip_norm=1.0) < 1e-6
        True
    """
    if modulus >= _everything(mechanism, clients):
        return 0.0
    deviations = mechanism.deviations(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)
    # The bounds are about the exact law of the noise; a sampler that is not exact may place this much of it anywhere.
    sampled = clients * dim * _RESOLUTION if mechanism.variation else 0.0
    return min(1.0, min(_tail(0.5 * modulus - 1.0, deviation, dim) for deviation in deviations) + sampled)


def smallest_modulus(
    mechanism: Mechanism,
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    rotate: bool = True,
    overflow: float = DEFAULT_OVERFLOW,
) -> int:
    """The smallest modulus for which `overflow_probability` is at most `overflow`, and at least a client's values.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> mechanism = Binomial(levels=3, trials=13, coordinate_range=0.2)
        >>> smallest_modulus(mechanism, clients=100, dim=1024, clip_norm=1.0)
        370
    """
    nats = math.log(2.0 * dim / overflow)
    found = _everything(mechanism, clients)
    for deviation in mechanism.deviations(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate):
        # λ t - λ² V/2 = nats at the best λ, √(2 nats/V), or at the largest.
        reach = math.sqrt(2.0 * nats * deviation.proxy)
        if reach > deviation.steepest * deviation.proxy:
            reach = nats / deviation.steepest + 0.5 * deviation.steepest * deviation.proxy
        # The factor keeps the result on the safe side of rounding; overflow_probability confirms it.
        half = (deviation.offset + reach) * (1.0 + 1e-12) + 1.0
        found = min(found, math.ceil(2.0 * half))
    return max(found, mechanism.values)


def _everything(mechanism: Mechanism, clients: int) -> int:
    """A modulus that gives every possible sum its own residue, wherever the server's window begins by rounding."""
    return clients * (mechanism.values - 1) + 2


def _tail(half: float, deviation: Deviation, dim: int) -> float:
    """2 d exp(λ² V/2 - λ t), the union of two-sided tails, rounded up and at most 1."""
    reach = half - deviation.offset
    if reach <= 0.0:
        return 1.0
    if deviation.proxy == 0.0:
        return 0.0
    if reach <= deviation.steepest * deviation.proxy:
        exponent = -0.5 * reach * reach / deviation.proxy
    else:
        exponent = (0.5 * deviation.steepest * deviation.proxy - reach) * deviation.steepest
    return min(1.0, 2.0 * dim * math.exp(exponent) * (1.0 + 1e-12))
