"""`largest_norm`: a bound on the norm of a released mean if all clients are honest.

Honest vectors are clipped to norm D, so their mean has a norm of at most D, and what is released one of at most
D + ‖e‖, where e is rounding and noise. Given the rotation, the coordinates e_i are independent with mean zero and a
variance of at most v. Two rare events are set aside:

* Some |e_i| is larger than B. The planner's `window` bounds |sum - centre| of all coordinates at once by half its
  width, and with it the distance of a coordinate's mean from the centre; so B is its width (in integers).
* The e_i² (each at most B², with a mean of at most v and a variance of at most B² v) exceed d v + t in all. By
  Bernstein's inequality that has a probability of at most exp(-L) for t = L B²/3 + sqrt((L B²/3)² + 2 L d B² v).

An honest round is thus above D + sqrt(d v + t) with a probability of at most `FALSE_ALARM`. Malicious uploads below it
pass: what they can do to the mean is then of the size of honest noise.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cpsgd.planner.modulus import window
from cpsgd.protocol import Protocol

FALSE_ALARM = 1e-9
"""Probability, at most, that an honest round's mean is called implausible."""

# What clipping on the codec's grid may leave above D.
_RESOLUTION = 1.0 + 2.0**-8


@lru_cache(maxsize=64)
def largest_norm(protocol: Protocol, survivors: int) -> float:
    """Returns a bound that the norm of an honest round's mean exceeds with probability `FALSE_ALARM` at most.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=10, dim=4096, clip_norm=1.0, levels=64, trials=500)
        >>> noise = (protocol.dim * protocol.mechanism.noise.variance / 10) ** 0.5 * protocol.scale
        >>> largest_norm(protocol, 10) < 1.0 + 2.0 * noise
        True
    """
    mechanism, dim, clip_norm = protocol.mechanism, protocol.dim, protocol.clip_norm
    farthest = window(
        mechanism,
        clients=survivors,
        dim=dim,
        clip_norm=clip_norm,
        rotate=protocol.rotate,
        # A third of its half: a coordinate whose mean is beyond half the modulus is there itself half of the time.
        overflow=FALSE_ALARM / 6.0,
    )
    variance = survivors * (mechanism.noise.settled_variance + mechanism.largest_rounding_variance)
    nats = math.log(2.0 / FALSE_ALARM)
    linear = nats * farthest**2 / 3.0
    excess = linear + math.sqrt(linear**2 + 2.0 * nats * dim * farthest**2 * variance)
    return _RESOLUTION * clip_norm + protocol.scale / survivors * math.sqrt(dim * variance + excess)
