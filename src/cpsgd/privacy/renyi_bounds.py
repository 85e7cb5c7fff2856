"""Rényi bounds that the authors of other mechanisms prove about them, converted to (ε, δ).

They stand beside our own accounting for comparison; no guarantee of this package rests on them. The conversion is that
of Canonne, Kamath and Steinke (2020, Proposition 12), as in the code of the first two papers, at the best of many
whole orders.

* **Discrete Gaussian**: Kairouz, Liu, Steinke 2021, Theorem 1 and Proposition 14.
* **Skellam**: Agarwal, Kairouz, Liu 2021, the bound for vectors, which holds for whole orders.
* **Poisson binomial**: Chen, Ozgur, Kairouz 2022. Not their theorem's formula: the Rényi divergence of a coordinate
  that such a theorem bounds is computed itself, and no bound can be below it. That only favours them.

The first two condition the rounding of a vector on its norm: it is drawn again until the rounded vector's norm is
within `rounded_norm`, which bounds the sensitivities. The codec of this package does not, and its certificates need no
such bound; so the ε of these two is that of the authors' own protocol with the same parameters.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Array
from cpsgd.neighbours import Adjacency

ORDERS = np.array([*range(2, 129), *(int(128 * 1.1**i) for i in range(1, 95))], dtype=np.float64)
"""The orders α that are tried."""

BETA = math.exp(-0.5)
"""β of the conditional rounding: it is drawn again with at most this probability. The authors' choice."""

# From here on the terms of τ are all but equal.
_TERMS = 100_000
# How deep into the tails the sums go that make up a divergence.
_NATS = 300.0


def best_epsilon(divergences: Array, delta: float) -> float:
    """Returns the smallest ε at δ of Rényi divergences at all `ORDERS`: D_α + log((α-1)/α) - (log δ + log α)/(α-1)."""
    conversion = np.log1p(-1.0 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1.0)
    return max(0.0, float(np.min(divergences + conversion)))


def rounded_norm(norm: float, dim: int) -> float:
    """Returns the largest norm of a vector of this norm after conditional rounding, in units of the lattice."""
    slack = math.sqrt(2.0 * math.log(1.0 / BETA))
    conditional = norm * norm + 0.25 * dim + slack * (norm + 0.5 * math.sqrt(dim))
    return min(norm + math.sqrt(dim), math.sqrt(conditional))


def discrete_gaussian_epsilon(
    *, norm: float, sigma_squared: float, clients: int, dim: int, delta: float, adjacency: Adjacency
) -> float:
    """Returns ε of the distributed discrete Gaussian for vectors of this norm, in units of the lattice.

    Raises:
        ConditionError: σ² is under 1/4, where the theorem says nothing.
    """
    if sigma_squared < 0.25:
        raise ConditionError(f"The authors' theorem needs σ² >= 1/4 for each client, and there is {sigma_squared:g}.")
    l1, l2 = _sensitivities(norm, dim, adjacency)
    return best_epsilon(discrete_gaussian_rdp(l1, l2, sigma_squared, clients, dim), delta)


def discrete_gaussian_rdp(l1: float, l2: float, sigma_squared: float, clients: int, dim: int) -> Array:
    """Returns bounds on D_α at all `ORDERS` for neighbours at L1 distance `l1` and L2 distance `l2`.

    τ bounds the difference between a sum of n discrete Gaussians and one of n times the variance.
    """
    k = np.arange(1.0, min(clients, _TERMS))
    terms = np.exp(-2.0 * math.pi**2 * sigma_squared * k / (k + 1.0))
    further = max(0, clients - _TERMS) * math.exp(-2.0 * math.pi**2 * sigma_squared * _TERMS / (_TERMS + 1.0))
    tau = 10.0 * (float(terms.sum()) + further)
    a, b = l1 / math.sqrt(clients * sigma_squared), l2 / math.sqrt(clients * sigma_squared)
    slope = min(b * b + 2.0 * a * tau + tau * tau * dim, (b + math.sqrt(dim) * tau) ** 2)
    return np.minimum(0.5 * ORDERS * b * b + tau * dim, 0.5 * ORDERS * slope)


def skellam_epsilon(
    *, norm: float, variance: float, clients: int, dim: int, delta: float, adjacency: Adjacency
) -> float:
    """Returns ε of the Skellam mechanism for vectors of this norm, in units of the lattice."""
    l1, l2 = _sensitivities(norm, dim, adjacency)
    return best_epsilon(skellam_rdp(l1, l2, clients * variance), delta)


def skellam_rdp(l1: float, l2: float, variance: float) -> Array:
    """Returns bounds on D_α at all `ORDERS`, for a total noise of this variance."""
    excess = ((2.0 * ORDERS - 1.0) * l2 * l2 + 6.0 * l1) / (4.0 * variance * variance)
    return 0.5 * ORDERS * l2 * l2 / variance + np.minimum(excess, 1.5 * l1 / variance)


def _sensitivities(norm: float, dim: int, adjacency: Adjacency) -> tuple[float, float]:
    """Returns bounds on ‖x‖₁ and ‖x‖₂, x the difference of rounded neighbours: ‖x‖₁ <= √d ‖x‖₂ and <= ‖x‖₂²."""
    l2 = adjacency.distance(rounded_norm(norm, dim))
    return l2 * min(math.sqrt(dim), l2), l2


def poisson_binomial_epsilon(
    *, coins: int, theta: float, clients: int, dim: int, delta: float, adjacency: Adjacency
) -> float:
    """Returns ε of the Poisson binomial mechanism: each coordinate may move from one end of its range to the other."""
    return best_epsilon(dim * poisson_binomial_rdp(coins, theta, clients, adjacency), delta)


@lru_cache(maxsize=64)
def poisson_binomial_rdp(coins: int, theta: float, clients: int, adjacency: Adjacency) -> Array:
    """Returns the largest D_α in one coordinate at all `ORDERS`.

    e^((α-1) D_α) is convex in every coin's odds, so that all are at an end, ½ ± θ. Of those mixtures the one is taken
    where the coins of all others are at the same end: the worst wherever the tests compare all of them, for few coins;
    that it always is has not been proved here.
    """
    ends = (0.5 + theta, 0.5 - theta)
    pairs = [ends] if adjacency.reach == 2.0 else [(end, 0.5) for end in ends]
    found = np.zeros_like(ORDERS)
    for pair in pairs:
        one, other = (_one_more(coins, odds, (clients - 1) * coins, ends[0]) for odds in pair)
        for first, second in ((one, other), (other, one)):
            found = np.maximum(found, _divergences(first, second))
    return found


def _one_more(coins: int, odds: float, others: int, their_odds: float) -> Array:
    """Returns the law of one client's coins plus all other clients' coins, without the far tails."""
    from scipy.special import gammaln  # late: who only encodes does without SciPy

    heads = np.arange(coins + 1.0)
    ways = gammaln(coins + 1.0) - gammaln(heads + 1.0) - gammaln(coins - heads + 1.0)
    own = np.exp(ways + heads * math.log(odds) + (coins - heads) * math.log1p(-odds))
    return np.convolve(BinomialLaw(others, their_odds).window(_NATS).mass, own) if others else own


def _divergences(first: Array, second: Array) -> Array:
    """Returns D_α at all `ORDERS`; infinite where floating point overflows."""
    possible = (first > 0.0) | (second > 0.0)
    first, second = first[possible], second[possible]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = np.log(first / second)
        # Σ q (e^(α r) - 1) keeps the digits of small divergences.
        excess = np.array([np.sum(np.expm1(a * ratio) * second) for a in ORDERS])
    return np.where(np.isfinite(excess), np.log1p(np.where(np.isfinite(excess), excess, 0.0)), np.inf) / (ORDERS - 1.0)
