"""Computes the errors of other protocols by their authors' own design and accounting, to compare plans with.

* **Discrete Gaussian and Skellam**: vectors are rotated, rounded to a lattice and sent modulo M, with or without secure
  aggregation. The lattice is as fine as M allows: 4 standard deviations of the sum fit into M/2. Errors by wrapping
  around are not counted here.
* **Poisson binomial**: m coins per coordinate, θ by the accounting, and the range with the least error by clipping and
  noise. Sums do not wrap around: M >= n m + 1.
* **cpSGD**, by its Theorem 1: k levels, m coins for noise, a range of at least the paper's. M >= n (k + m - 1) + 1.

All for replace-one neighbours, one round and vectors of norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scipy.optimize import brentq, minimize_scalar

from cpsgd.codec.clip import MAX_LEVELS
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Binomial, Coins
from cpsgd.mechanisms.clipping import ENOUGH_REACH, LEAST_REACH, gaussian_clipping, gaussian_rounding
from cpsgd.mechanisms.discrete_gaussian import integer_variance
from cpsgd.neighbours import Adjacency
from cpsgd.paper import theorem
from cpsgd.planner.search import values_of
from cpsgd.privacy import renyi_bounds
from cpsgd.protocol import Protocol
from cpsgd.registry import by_name

# Standard deviations of the sum that fit into half the modulus, as the discrete Gaussian's authors choose it.
_DEVIATIONS = 4.0
# More levels than coordinates ever reach, one of them at zero: the authors clip no coordinates.
_LEVELS = 2**24 - 1
# More coins change nothing.
_MOST_COINS = 31
_ADJACENCY = Adjacency.REPLACE_ONE
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class PublishedProblem:
    """The requirements: n, d, ε, δ, bits per coordinate, and whether sums are taken by secure aggregation."""

    clients: int
    dim: int
    epsilon: float
    delta: float
    bits: float
    secure: bool


def published_error(name: str, problem: PublishedProblem) -> float | None:
    """Returns the expected squared error of the mean by the authors' design; None if it cannot meet the problem.

    Raises:
        ParameterError: Nothing is published about the mechanism of this name, or there is none.

    Example:
        >>> problem = PublishedProblem(clients=10_000, dim=65_536, epsilon=2.0, delta=1e-9, bits=18, secure=True)
        >>> gaussian = 0.0212112  # of the exact Gaussian mechanism
        >>> [f"{(published_error(name, problem) or 0.0) / gaussian:.2f}" for name in ("discrete-gaussian", "skellam")]
        ['1.13', '1.13']
    """
    by_name(name)
    if name not in _DESIGNS:
        raise ParameterError(f"Nothing is published about {name}; expected one of {list(_DESIGNS)}.")
    return _DESIGNS[name](problem)


def _discrete_gaussian(problem: PublishedProblem) -> float | None:
    def epsilon(norm: float, size: float, **known: Any) -> float:
        return renyi_bounds.discrete_gaussian_epsilon(norm=norm, sigma_squared=size, **known)

    return _modular(problem, epsilon, integer_variance, 0.25)


def _skellam(problem: PublishedProblem) -> float | None:
    def epsilon(norm: float, size: float, **known: Any) -> float:
        return renyi_bounds.skellam_epsilon(norm=norm, variance=size, **known)

    return _modular(problem, epsilon, lambda size: size, 1e-6)


def _modular(
    problem: PublishedProblem,
    epsilon: Callable[..., float],
    variance: Callable[[float], float],
    least_size: float,
) -> float | None:
    """Returns the error with the finest lattice whose sums fit the modulus and the least noise that keeps ε."""
    n, d = problem.clients, problem.dim
    known = {"clients": n, "dim": d, "delta": problem.delta, "adjacency": _ADJACENCY}

    def size(step: float) -> float:
        def missed(log_size: float) -> float:
            return epsilon(1.0 / step, math.exp(log_size), **known) - problem.epsilon

        low = math.log(least_size)
        return math.exp(brentq(missed, low, 80.0, xtol=_TOLERANCE)) if missed(low) > 0.0 else least_size

    def excess(log_step: float) -> float:
        step = math.exp(log_step)
        # A vector's coordinates are about 1/√d, and all clients may hold the same.
        deviation = math.sqrt((n / step) ** 2 / d + n * (variance(size(step)) + 0.25))
        return math.log(2.0 * _DEVIATIONS * deviation) - problem.bits * math.log(2.0)

    finest, coarsest = math.log(1e-12), math.log(1e3)
    if excess(coarsest) > 0.0:
        return None
    step = math.exp(brentq(excess, finest, coarsest, xtol=_TOLERANCE))
    rounding = gaussian_rounding(step * math.sqrt(d), _LEVELS)
    return d * step * step * (variance(size(step)) + rounding) / n


def _poisson_binomial(problem: PublishedProblem) -> float | None:
    coins = min((values_of(problem.bits) - 1) // (problem.clients if problem.secure else 1), _MOST_COINS)
    if coins < 1:
        return None
    return _poisson_binomial_error(coins, problem.clients, problem.dim, problem.epsilon, problem.delta)


@lru_cache(maxsize=256)
def _poisson_binomial_error(coins: int, clients: int, dim: int, epsilon: float, delta: float) -> float | None:
    """Returns the error with `coins` coins per coordinate."""

    def missed(log_theta: float) -> float:
        reached = renyi_bounds.poisson_binomial_epsilon(
            coins=coins, theta=math.exp(log_theta), clients=clients, dim=dim, delta=delta, adjacency=_ADJACENCY
        )
        return min(reached, 1e3) - epsilon

    least, most = math.log(2.0**-16), math.log(Coins.most_theta)
    if missed(least) > 0.0:
        return None
    theta = math.exp(brentq(missed, least, most, xtol=_TOLERANCE)) if missed(most) > 0.0 else Coins.most_theta

    draws = clients * coins

    def error(reach: float) -> float:
        # With x̄ = θ x/X a coin has the variance ¼ - x̄²; the squares of a vector's coordinates add up to 1.
        return (0.25 * (reach / theta) ** 2 - 1.0) / draws + gaussian_clipping(reach)

    return float(minimize_scalar(error, bounds=(LEAST_REACH, ENOUGH_REACH), method="bounded").fun)


def _cpsgd(problem: PublishedProblem) -> float | None:
    values = values_of(problem.bits)
    if problem.secure:
        values = (values - 1) // problem.clients + 1
    best: float | None = None
    levels = 2
    while levels < min(values, MAX_LEVELS):
        try:
            found = _cpsgd_error(problem, levels, values - levels)
            best = found if best is None else min(best, found)
        except ConditionError:
            pass  # more levels leave less room for noise, fewer may do
        levels = max(levels + 1, round(1.2 * levels))
    return best


def _cpsgd_error(problem: PublishedProblem, levels: int, trials: int) -> float:
    """Returns the error with the smallest range that keeps ε by the paper's theorem.

    Raises:
        ConditionError: The theorem does not apply, or no range keeps ε.
    """
    n, d = problem.clients, problem.dim
    least = Binomial.usual(clients=n, dim=d, clip_norm=1.0, rotate=True, delta=problem.delta)["coordinate_range"]

    def mechanism(log_factor: float) -> Binomial:
        reach = least * math.exp(log_factor) * (1.0 + 1e-9)
        return Binomial(levels=levels, trials=trials, coordinate_range=reach)

    def missed(log_factor: float) -> float:
        protocol = Protocol(clients=n, dim=d, clip_norm=1.0, mechanism=mechanism(log_factor))
        epsilon = theorem.theorem_epsilon(protocol, problem.delta, adjacency=_ADJACENCY, noise_clients=n)
        return epsilon - problem.epsilon

    factor, widest = 0.0, 7.0
    if missed(0.0) > 0.0:
        if missed(widest) > 0.0:
            raise ConditionError("No range keeps ε: rounding alone moves neighbours too far apart for the theorem.")
        factor = brentq(missed, 0.0, widest, xtol=_TOLERANCE)
    return mechanism(factor).predicted_error(clients=n, dim=d, clip_norm=1.0, rotate=True).total


_DESIGNS: dict[str, Callable[[PublishedProblem], float | None]] = {
    "binomial": _cpsgd,
    "skellam": _skellam,
    "discrete-gaussian": _discrete_gaussian,
    "coins": _poisson_binomial,
}
