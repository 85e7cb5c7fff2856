"""The smallest modulus of secure aggregation.

Masked integers are added modulo M, so a coordinate of the sum is known only modulo M. The server takes the
representative nearest to the centre C of the sum, in a window of M integers around it; that is the true sum Y whenever
-M/2 <= Y - C < M/2. A mechanism bounds that deviation by an offset and a variable with a bounded moment generating
function (`Mechanism.deviations`); with Chernoff's inequality and a union bound over the d coordinates

    P(some coordinate overflows) <= 2 d exp(Λ(λ) - λ t),   t = M/2 - offset,

for any λ > 0; the best one is searched for. The bound is over rotation, rounding and noise; it holds for all vectors
that do not depend on the rotation's seed. Overflow spoils accuracy, never privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Required, TypedDict, Unpack

from cpsgd._searches import lowest, vertex
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.sums import Deviation

DEFAULT_OVERFLOW = 1e-9
# More than what rounding to 128 bits moves in a table of 2^20 thresholds. That tails are cut off only helps.
_RESOLUTION = 2.0**-100
# The best λ is found to this relative accuracy, which costs about the square of it.
_ACCURACY, _COST = 1e-5, 1.0 + 1e-9
# Slopes are searched for up to e^±40, from one that suits a tail of e^-30.
_PROBE, _TYPICAL_NATS = 1e-4, 60.0
_FARTHEST = 40.0
_PARABOLAS = 12


def overflow_probability(
    modulus: int,
    mechanism: Mechanism,
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    rotate: bool = True,
    mean_norm: float | None = None,
) -> float:
    """Returns a proved upper bound on the probability that any coordinate of a round's sum wraps around.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> mechanism = Binomial(levels=3, trials=13, coordinate_range=0.2)
        >>> overflow_probability(100 * 15 + 1, mechanism, clients=100, dim=1024, clip_norm=1.0)
        0.0
        >>> f"{overflow_probability(450, mechanism, clients=100, dim=1024, clip_norm=1.0):.1e}"
        '5.6e-16'
    """
    if modulus >= _everything(mechanism, clients):
        return 0.0
    deviations = mechanism.deviations(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, mean_norm=mean_norm)
    half = 0.5 * modulus - _misplaced(mechanism, clients)
    # The bounds are about the exact law of the noise; a sampler that is not exact may place this much of it anywhere.
    sampled = clients * dim * _RESOLUTION if mechanism.noise.variation else 0.0
    return min(1.0, min(_tail(half, deviation, dim) for deviation in deviations) + sampled)


class Summed(TypedDict, total=False):
    """Arguments of `window`, which describe the sums that a modulus must hold."""

    clients: Required[int]
    dim: Required[int]
    clip_norm: Required[float]
    rotate: bool
    mean_norm: float | None
    overflow: float


def smallest_modulus(mechanism: Mechanism, **sums: Unpack[Summed]) -> int:
    """Returns the smallest modulus with an `overflow_probability` of at most `overflow` that holds a client's values.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> mechanism = Binomial(levels=3, trials=13, coordinate_range=0.2)
        >>> smallest_modulus(mechanism, clients=100, dim=1024, clip_norm=1.0)
        367
    """
    return max(window(mechanism, **sums), mechanism.values)


@lru_cache(maxsize=8192)
def window(
    mechanism: Mechanism,
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    rotate: bool = True,
    mean_norm: float | None = None,
    overflow: float = DEFAULT_OVERFLOW,
) -> int:
    """Returns the number of integers around the centre that hold all of a sum, except with probability `overflow`."""
    nats = math.log(2.0 * dim / overflow)
    found = _everything(mechanism, clients)
    for deviation in mechanism.deviations(
        clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, mean_norm=mean_norm
    ):
        # The factor keeps the result on the safe side of the search for λ; overflow_probability confirms it.
        half = (deviation.offset + reach(deviation, nats)) * _COST + _misplaced(mechanism, clients)
        found = min(found, math.ceil(min(2.0 * half, found)))
    return found


def _everything(mechanism: Mechanism, clients: int) -> int:
    """Returns a modulus that gives every possible sum its own residue in the server's window."""
    centre, most = clients * mechanism.centre, clients * (mechanism.values - 1)
    return math.floor(2.0 * (max(centre, most - centre) + _misplaced(mechanism, clients))) + 1


def _misplaced(mechanism: Mechanism, clients: int) -> float:
    """Returns the shift of the server's window that rounding its centre causes; 0 for whole and half centres."""
    exact = (2.0 * mechanism.centre).is_integer() and clients * mechanism.centre < 2.0**50
    return 0.0 if exact else 2.0**-50 * clients * mechanism.centre


def _tail(half: float, deviation: Deviation, dim: int) -> float:
    """Returns 2 d exp(Λ(λ) - λ t) at the best λ, the union of two-sided tails, rounded up and at most 1."""
    reach = half - deviation.offset
    if reach <= 0.0:
        return 1.0
    best = _smallest(lambda slope: deviation.at(slope) - slope * reach, deviation)
    exponent = min(best * (1.0 - 1e-12), 0.0)
    return min(1.0, 2.0 * dim * math.exp(exponent) * (1.0 + 1e-12))


def reach(deviation: Deviation, nats: float) -> float:
    """Returns the smallest t with Λ(λ) - λ t <= -nats for some λ."""
    return _smallest(lambda slope: (deviation.at(slope) + nats) / slope, deviation)


def _smallest(objective: Callable[[float], float], deviation: Deviation) -> float:
    """Returns the minimum over λ of a function that falls and then rises.

    By doubling, and then golden-section search over log λ.
    """
    last = math.log(deviation.steepest)

    @cache
    def at(place: float) -> float:
        return objective(min(math.exp(place), deviation.steepest)) if place <= last else math.inf

    # About where a Gaussian of the same variance has its best λ.
    variance = 2.0 * deviation.at(_PROBE) / _PROBE**2
    high = math.log(_TYPICAL_NATS / variance) * 0.5 if variance > 0.0 else 0.0
    high = min(high, last)
    low = high - 1.0
    at_low, at_high = at(low), at(high)
    # Where both are infinite, smaller ones are not: cumulants of heavy tails end at some λ.
    step = -1.0 if at_low < at_high or math.isinf(at_high) else 1.0
    if step < 0.0:
        low, high, at_low, at_high = high, low, at_high, at_low
    # From `low` to `high` it falls (or both are out of reach); go on until it rises.
    while at_high <= at_low and abs(high) < _FARTHEST:
        low, high, at_low, at_high = high, high + step, at_high, at(high + step)
    left, right = sorted((low - step, high))
    # Where it is smooth, the vertex of a parabola through three places is soon as good as the best place itself.
    place, best = low, at_low
    at_left, at_right = at(left), at(right)
    for _ in range(_PARABOLAS):
        if not math.isfinite(at_left + at_right):
            break
        following = vertex(left, place, right, at_left, best, at_right)
        if not left < following < right or abs(following - place) < _ACCURACY:
            return best
        found = at(following)
        if found > best:
            if following < place:
                left, at_left = following, found
            else:
                right, at_right = following, found
            continue
        if best - found < _ACCURACY**2 * abs(best):
            return found
        if following < place:
            right, at_right = place, best
        else:
            left, at_left = place, best
        place, best = following, found
    return min(best, at(lowest(at, left, right, close=_ACCURACY)))
