"""Products of coordinates by enumeration, and one coordinate beside a Gaussian with 50 digits.

Nothing here uses the excess curves, their integral or the order of pairs: laws are written down from the definitions
and divergences are sums over all outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr
from scipy.stats import binom, skellam

Array = NDArray[np.float64]
Pair = tuple[Array, Array]
DIGITS = 50


# ---------------------------------------------------------------------- laws of one coordinate


def binomial_masses(trials: int, p: float) -> Array:
    return np.asarray(binom.pmf(np.arange(trials + 1), trials, p))


def skellam_masses(variance: float) -> Array:
    """Up to where nothing is left in floating point."""
    end = math.ceil(20.0 * math.sqrt(variance) + 40.0)
    return np.asarray(skellam.pmf(np.arange(-end, end + 1), 0.5 * variance, 0.5 * variance))


def rounded(noise: Array, u: float, room: int) -> Array:
    """⌊u⌋ or ⌊u⌋ + 1, at random with mean u, plus the noise, on 0, ..., len(noise) + room; 0 <= u <= room."""
    whole, found = math.floor(u), np.zeros(len(noise) + room + 1)
    found[whole : whole + len(noise)] += (1.0 - (u - whole)) * noise
    found[whole + 1 : whole + 1 + len(noise)] += (u - whole) * noise
    return found


def lattice_pair(noise: Array, u: float, v: float) -> Pair:
    """Two neighbours' laws in one coordinate."""
    room = math.ceil(max(u, v)) + 1
    return rounded(noise, u, room), rounded(noise, v, room)


def step_sum(low: Sequence[float], high: Sequence[float], places: Sequence[float]) -> Array:
    """The law of a sum of steps of clients at these coordinates, in units of X."""
    found = np.ones(1)
    for x in places:
        found = np.convolve(found, 0.5 * ((1.0 - x) * np.array(low) + (1.0 + x) * np.array(high)))
    return found


def step_pair(low: Sequence[float], high: Sequence[float], others: Sequence[float], x: float, y: float) -> Pair:
    """Two neighbours' laws: the others are at the same places, one client at x or at y."""
    rest = step_sum(low, high, others)
    return np.convolve(rest, step_sum(low, high, [x])), np.convolve(rest, step_sum(low, high, [y]))


# ---------------------------------------------------------------------- hockey-stick divergences


def divergences(pairs: Sequence[Pair], gammas: Array) -> Array:
    """H_γ of a product, by enumeration of all outcomes but the last coordinate's, whose tests are all tried."""
    first, second = np.ones(1), np.ones(1)
    for a, b in pairs[:-1]:
        first, second = np.outer(first, a).ravel(), np.outer(second, b).ravel()
    kept = (first > 0.0) | (second > 0.0)
    first, second = first[kept], second[kept]
    a, b = pairs[-1]
    found = np.empty(len(gammas))
    for i, gamma in enumerate(gammas):
        total = np.zeros(len(first))
        for p, q in zip(a, b, strict=True):
            total += np.maximum(first * p - gamma * second * q, 0.0)
        found[i] = total.sum()
    return found


def repeated_divergences(pair: Pair, count: int, gammas: Array) -> Array:
    """H_γ of `count` coordinates with the same three possible outcomes: only how often each occurs matters."""
    i, j = (x.ravel() for x in np.meshgrid(np.arange(count + 1), np.arange(count + 1)))
    i, j = i[i + j <= count], j[i + j <= count]
    k = count - i - j
    ways = gammaln(count + 1) - gammaln(i + 1) - gammaln(j + 1) - gammaln(k + 1)
    first, second = (np.exp(ways + i * np.log(a) + j * np.log(b) + k * np.log(c)) for a, b, c in pair)
    return np.array([np.maximum(first - gamma * second, 0.0).sum() for gamma in gammas])


def gaussian_divergences(mu: float, gammas: Array) -> Array:
    """H_γ of N(μ, 1) against N(0, 1)."""
    c = np.log(gammas)
    return ndtr(0.5 * mu - c / mu) - gammas * ndtr(-0.5 * mu - c / mu)


def violations(pairs: Sequence[Pair], mu: float, tail_mass: float, gammas: Array) -> list[str]:
    """The γ, in both orders, at which the product is not within N(μ, 1) and N(0, 1) but for the tail."""
    wrong = []
    allowed = gaussian_divergences(mu, gammas) + tail_mass * np.minimum(1.0, gammas)
    for order in (pairs, [(b, a) for a, b in pairs]):
        found = divergences(order, gammas)
        # The enumeration is accurate to about 1e-14 of what it adds up.
        for i in np.flatnonzero(found > allowed + 1e-13 * (1.0 + gammas)):
            wrong.append(f"H at {gammas[i]:.6g} is {found[i]:.8g}, over {allowed[i]:.8g}")
    return wrong


# ---------------------------------------------------------------------- one coordinate beside a Gaussian


Exact = list[mpmath.mpf]


def exact_binomial(trials: int, p: float) -> Exact:
    with mpmath.workdps(DIGITS):
        head = mpmath.mpf(p)
        return [mpmath.binomial(trials, j) * head**j * (1 - head) ** (trials - j) for j in range(trials + 1)]


def exact_shift(noise: Exact, t: float) -> tuple[Exact, Exact]:
    """P_t and Z_0, t >= 0."""
    with mpmath.workdps(DIGITS):
        whole, zero = math.floor(t), mpmath.mpf(0)
        fraction, room = mpmath.mpf(t) - whole, [zero] * (whole + 1)
        near, far = [*room[:-1], *noise, zero], [*room, *noise]
        return [(1 - fraction) * a + fraction * b for a, b in zip(near, far, strict=True)], [*noise, *room]


def exact_steps(low: Sequence[float], high: Sequence[float], ones: int, others: int, t: float) -> tuple[Exact, Exact]:
    """The client at -1 + t and at -1, and so many of the others at 1."""
    with mpmath.workdps(DIGITS):
        less, more, share = [mpmath.mpf(a) for a in low], [mpmath.mpf(a) for a in high], mpmath.mpf(t) / 2
        rest = [mpmath.mpf(1)]
        for i in range(others):
            rest = _convolved(rest, more if i < ones else less)
        moved = [(1 - share) * a + share * b for a, b in zip(less, more, strict=True)]
        return _convolved(rest, moved), _convolved(rest, less)


def _convolved(first: Exact, second: Exact) -> Exact:
    found = [mpmath.mpf(0)] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            found[i + j] += a * b
    return found


def smoothed_excess(pair: tuple[Exact, Exact], w: float, c: float) -> mpmath.mpf:
    """H_exp(c)(pair ⊗ G(w)) - H_exp(c)(G(w)): for each outcome of the pair, tests of the Gaussian are thresholds."""
    with mpmath.workdps(DIGITS):
        root, gamma, one = mpmath.sqrt(w), mpmath.exp(c), mpmath.mpf(1)
        total = mpmath.fsum(_divergence(a, b, root, gamma) for a, b in zip(*pair, strict=True))
        return total - _divergence(one, one, root, gamma)


def gaussian_increment(w: float, more: float, c: float) -> mpmath.mpf:
    """H_exp(c)(G(w + more)) - H_exp(c)(G(w))."""
    with mpmath.workdps(DIGITS):
        gamma, one = mpmath.exp(c), mpmath.mpf(1)
        after = _divergence(one, one, mpmath.sqrt(mpmath.mpf(w) + mpmath.mpf(more)), gamma)
        return after - _divergence(one, one, mpmath.sqrt(w), gamma)


def _divergence(p: mpmath.mpf, q: mpmath.mpf, root: mpmath.mpf, gamma: mpmath.mpf) -> mpmath.mpf:
    """∫ (p φ(z - √w) - γ q φ(z))₊ dz."""
    if p == 0:
        return mpmath.mpf(0)
    if q == 0:
        return p
    place = mpmath.log(p / (gamma * q)) / root
    return p * mpmath.ncdf(place + root / 2) - gamma * q * mpmath.ncdf(place - root / 2)
