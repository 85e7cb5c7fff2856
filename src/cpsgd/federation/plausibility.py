"""Bounds that the mean of an honest round keeps: one on its norm, and one on every block of its coordinates.

Honest vectors are clipped to norm D, so a mean is x + e with ‖x‖ <= D, and e rounding and noise. Given the rotation the
coordinates X of e (in integers, of the sum) are independent, with variances of at most v and a cumulant of at most
K(λ), which every mechanism states (`Noise.cumulant`). The proof that e behaves like a Gaussian:

1. *Truncation.* |X| > B has a probability of at most p for each coordinate, by Chernoff's inequality. What is left has
   E exp(λX) <= exp(K(λ) + p).
2. *One variance for all λ.* There is a w with log E exp(λX) <= w λ²/2 + c for all λ, c = K(0) + p + 0.02 √p: beyond
   λ = 2B/w because λB is less; up to λ = 0.02/B by Taylor's theorem, for w >= 1.0203 v; in between w is the largest of
   2 (K(λ) - K(0))/λ² on a grid, times the square of its ratio, for K is not decreasing.
3. *Any block.* So E exp(<θ, e>) <= exp(w ‖θ‖²/2 + d c) for all θ, also after the rotation is taken back. By Hsu, Kakade
   and Zhang ("A tail inequality for quadratic forms of subgaussian random vectors", 2012, Theorem 1), a block of b
   coordinates of e has a squared norm above w (b + 2 √(bL) + 2L) with a probability of at most exp(dc - L). And
   <x, e> > D √(2wL) has at most that.

A block of an honest mean is thus above D² + 2D √(2wL) + w (b + 2 √(bL) + 2L), in squared norm, with a probability of at
most 2 exp(dc - L). L is chosen so that all blocks together have `FALSE_ALARM` at most. Beside it there is the plan's
own probability that a sum wraps around. Two more bounds hold for every mechanism, and the smallest counts: a client's
integers are within 0..k, so w = n k²/4 by Hoeffding's lemma; and Bernstein's inequality bounds the whole norm.

**What this does not do.** A client that uploads what it likes can still move the mean, by up to about w^½ (4dL)^¼ over
all coordinates together: more than D, where the noise is larger than D. `benchmarks/poisoning.py` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cpsgd.mechanisms.sums import Deviation, rounding_cumulant
from cpsgd.planner.modulus import reach, window
from cpsgd.protocol import Protocol

FALSE_ALARM = 1e-9
"""Probability, at most, that an honest round's mean is called implausible."""

# Sizes of the blocks of coordinates, beside all of them.
_BLOCKS = (1, 32, 1024, 32768)
# What clipping on the codec's grid may leave above D; what its float32 transform may, per √d; and what decoding may.
_RESOLUTION, _TRANSFORM, _DECODING = 1.0 + 2.0**-8, 2.0**-17, 1.0 + 1e-4
# Ratio of the grid of λ, where its first steps begin (times 1/B), and Taylor's factor up to there, e^0.02.
_RATIO, _SMALL, _TAYLOR = 1.005, 0.02, 1.0203


@dataclass(frozen=True)
class Bounds:
    """The bounds of a round.

    Attributes:
        norm: Largest norm of an honest mean.
        blocks: Maps a block length to the largest norm of any block of that many coordinates.
    """

    norm: float
    blocks: dict[int, float]


@lru_cache(maxsize=64)
def bounds(protocol: Protocol, survivors: int) -> Bounds:
    """Returns bounds that an honest round's mean exceeds with probability `FALSE_ALARM` at most.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=10, dim=4096, clip_norm=1.0, levels=64, trials=500)
        >>> noise = (protocol.dim * protocol.mechanism.noise.variance / 10) ** 0.5 * protocol.scale
        >>> round(bounds(protocol, 10).norm / noise, 2)
        1.43
    """
    dim, unit = protocol.dim, protocol.scale / survivors
    clip_norm = protocol.clip_norm * (_RESOLUTION + _TRANSFORM * math.sqrt(dim))
    proxy, shift = min(_sub_gaussian(protocol, survivors), _bounded(protocol, survivors))
    sizes = [size for size in _BLOCKS if size < dim]
    nats = math.log(4.0 * (1 + sum(-(-dim // size) for size in sizes)) / FALSE_ALARM) + shift
    spread = proxy * unit**2

    def largest(size: int) -> float:
        noise = spread * (size + 2.0 * math.sqrt(size * nats) + 2.0 * nats)
        return _DECODING * math.sqrt(clip_norm**2 + 2.0 * clip_norm * math.sqrt(2.0 * spread * nats) + noise)

    whole = min(largest(dim), _bernstein(protocol, survivors, clip_norm))
    return Bounds(whole, {size: largest(size) for size in sizes})


def _sub_gaussian(protocol: Protocol, survivors: int) -> tuple[float, float]:
    """Returns the module's w, in squared integers, and d c; infinite if no bound is known."""
    mechanism, noise = protocol.mechanism, protocol.mechanism.noise
    missed = FALSE_ALARM / (8.0 * protocol.dim)

    def cumulant(slope: float) -> float:
        rounding = rounding_cumulant(slope) if noise.separate else 0.0
        return survivors * (noise.cumulant(slope) + rounding)

    variance = survivors * (noise.settled_variance + mechanism.largest_rounding_variance)
    constant = cumulant(0.0)
    if not (variance > 0.0 and math.isfinite(constant)):
        return math.inf, math.inf
    farthest = max(reach(Deviation(0.0, cumulant), math.log(2.0 / missed)), math.sqrt(variance))
    proxy = max(_TAYLOR * variance, _steepest(cumulant, constant, _SMALL / farthest, 2.0 * farthest / variance))
    return proxy, protocol.dim * (constant + missed + _SMALL * math.sqrt(missed))


def _bounded(protocol: Protocol, survivors: int) -> tuple[float, float]:
    """Returns the module's w by Hoeffding's lemma, with c = 0."""
    return survivors * (protocol.mechanism.values - 1) ** 2 / 4.0, 0.0


def _steepest(cumulant: Callable[[float], float], constant: float, low: float, high: float) -> float:
    """Returns a bound on 2 (K(λ) - K(0))/λ² for all λ between two."""
    steps = math.ceil(math.log(high / low) / math.log(_RATIO)) + 1
    found = (low * _RATIO**step for step in range(steps + 1))
    return max(2.0 * (cumulant(slope) - constant) / slope**2 for slope in found) * _RATIO**2


def _bernstein(protocol: Protocol, survivors: int, clip_norm: float) -> float:
    """Returns a bound on the norm for any noise: D + √(d v + t), where each coordinate is at most B.

    The planner's `window` bounds |sum - centre| of all coordinates at once by half its width, and with it the distance
    of a coordinate's mean from the centre; so B is its width. The X² (each at most B², with a mean of at most v and a
    variance of at most B² v) exceed d v + t in all with a probability of at most exp(-L), for
    t = L B²/3 + √((L B²/3)² + 2 L d B² v).
    """
    mechanism, dim = protocol.mechanism, protocol.dim
    farthest = window(
        mechanism,
        clients=survivors,
        dim=dim,
        clip_norm=protocol.clip_norm,
        rotate=protocol.rotate,
        # A third of its half: a coordinate whose mean is beyond half the modulus is there itself half of the time.
        overflow=FALSE_ALARM / 6.0,
    )
    variance = survivors * (mechanism.noise.settled_variance + mechanism.largest_rounding_variance)
    nats = math.log(2.0 / FALSE_ALARM)
    linear = nats * farthest**2 / 3.0
    excess = linear + math.sqrt(linear**2 + 2.0 * nats * dim * farthest**2 * variance)
    return clip_norm + protocol.scale / survivors * math.sqrt(dim * variance + excess)
