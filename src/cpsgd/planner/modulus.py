"""How small the modulus of secure aggregation may be.

Masked integers are added modulo M, so a coordinate of the sum is known only modulo M. The server takes the
representative nearest to the centre C = n(m p + (k-1)/2), in a window of M integers around it; that is the true sum
whenever it is at most M/2 - 1 away from C. The deviation of one coordinate has three parts, in units of s:

* the vectors: Σ_i c(y_i)/s, with y_i the client's rotated coordinate and c the clipping to ±X. A rotated coordinate
  is a sum Σ_l ε_l h_l v_l with independent random signs ε and |h_l| = 1/√B, B = 2^⌊log2 d⌋ the length of the
  transform: symmetric, and sub-Gaussian with variance proxy ρ² = D²/B (Hoeffding's lemma). Clipping is odd and
  shortens, hence E exp(λ c(y)) = E cosh(λ c(y)) <= E cosh(λ y) <= exp(λ² ρ²/2). By convexity of exp, the mean over
  the clients, who all share one rotation and may all hold the same vector, has the same proxy; the sum has (n ρ/s)².
* stochastic rounding: n independent centred variables on intervals of length 1, proxy n/4 (Hoeffding).
* noise: n m independent centred Bernoulli variables, proxy n m/4 (Hoeffding).

Together, with a union bound over the d coordinates,

    P(some coordinate overflows) <= 2 d exp(-t²/(2V)),   t = M/2 - 1 - slack,   V = (n ρ/s)² + n(m+1)/4.

Without rotation, or where it is smaller, the vectors enter by their largest possible sum n min(D, X)/s instead of
through V. The slack pays for the codec's finite resolution. The bound is over rotation, rounding and noise at p = ½;
it holds for all vectors that do not depend on the rotation's seed. Overflow spoils accuracy, never privacy.
"""

from __future__ import annotations

import math

from cpsgd.codec import quantize

DEFAULT_OVERFLOW = 1e-9


def overflow_probability(
    modulus: int,
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    levels: int,
    trials: int,
    coordinate_range: float,
    rotate: bool = True,
) -> float:
    """A proved upper bound on the probability that any coordinate of a round's sum wraps around.

    Example:
        >>> round_ = dict(clients=100, dim=1024, clip_norm=1.0, levels=3, trials=13, coordinate_range=0.2)
        >>> overflow_probability(100 * 15 + 2, **round_)
        0.0
        >>> 0.0 < overflow_probability(450, **round_) < 1e-6
        True
    """
    if modulus >= _everything(clients, levels, trials):
        return 0.0
    bounds = [
        _tail(0.5 * modulus - 1.0 - offset, proxy, dim)
        for offset, proxy in _deviations(clients, dim, clip_norm, levels, trials, coordinate_range, rotate)
    ]
    return min(bounds)


def smallest_modulus(
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    levels: int,
    trials: int,
    coordinate_range: float,
    rotate: bool = True,
    overflow: float = DEFAULT_OVERFLOW,
) -> int:
    """The smallest modulus for which `overflow_probability` is at most `overflow`, and at least k + m.

    Example:
        >>> smallest_modulus(clients=100, dim=1024, clip_norm=1.0, levels=3, trials=13, coordinate_range=0.2)
        370
    """
    spread = 2.0 * math.log(2.0 * dim / overflow)
    found = _everything(clients, levels, trials)
    for offset, proxy in _deviations(clients, dim, clip_norm, levels, trials, coordinate_range, rotate):
        # The factor keeps the result on the safe side of rounding; overflow_probability confirms it.
        half = (offset + math.sqrt(spread * proxy)) * (1.0 + 1e-12) + 1.0
        found = min(found, math.ceil(2.0 * half))
    return max(found, levels + trials)


def _everything(clients: int, levels: int, trials: int) -> int:
    """A modulus that gives every possible sum its own residue, wherever the server's window begins by rounding."""
    return clients * (levels + trials - 1) + 2


def _deviations(
    clients: int, dim: int, clip_norm: float, levels: int, trials: int, coordinate_range: float, rotate: bool
) -> list[tuple[float, float]]:
    """Pairs (largest possible offset, variance proxy of the rest) that each bound a coordinate's deviation."""
    scale = 2.0 * coordinate_range / (levels - 1)
    # Vectors are rounded to a grid of 2^-F levels, and a float32 transform is off by less than 2^-18 D a coordinate.
    slack = clients * (2.0 ** -quantize.fraction_bits(levels) + 2.0**-18 * clip_norm / scale)
    noise = 0.25 * clients * trials
    rounding = 0.25 * clients
    largest = clients * min(clip_norm, coordinate_range) / scale
    found = [(largest + slack, noise + rounding)]
    if coordinate_range <= clip_norm:
        found.append((largest, noise))  # the rounded values themselves lie within ±(k-1)/2
    if rotate:
        block = 2.0 ** math.floor(math.log2(dim))
        found.append((slack, (clients * clip_norm / scale) ** 2 / block + noise + rounding))
    return found


def _tail(deviation: float, proxy: float, dim: int) -> float:
    """2 d exp(-t²/(2V)), the union of two-sided sub-Gaussian tails, rounded up and at most 1."""
    if deviation <= 0.0:
        return 1.0
    if proxy == 0.0:
        return 0.0
    return min(1.0, 2.0 * dim * math.exp(-0.5 * deviation * deviation / proxy) * (1.0 + 1e-12))
