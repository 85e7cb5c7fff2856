"""Accounting that a mechanism's authors published, for comparison: shown beside the guarantee, never returned as it.

The paper's Theorem 1 is false where neighbours differ by several standard deviations of the noise: like the classical
Gaussian lemma, whose limit ε <= 1 it lacks, it has no term for the mean μ²/2 of the privacy loss. Bin(200,000, ½) noise
and a distance of 1,000 is an example, with ε = 26.4 at δ = 1e-5 by the theorem and an exact δ of 6e-5 at that ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cpsgd.errors import ConditionError
from cpsgd.neighbours import Adjacency
from cpsgd.paper import theorem
from cpsgd.privacy import renyi_bounds
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.proofs.per_round import CITATION, check_composable, optimal_composition
from cpsgd.protocol import Protocol
from cpsgd.run import Run

# Shares of δ that are spent on the rounds themselves; composition gets the rest.
_SHARES = (0.9, 0.5, 0.1, 0.01, 1e-3)


@dataclass(frozen=True)
class Published(Proof):
    """The accounting by the authors of one mechanism, rounds composed optimally.

    Attributes:
        name: Its name among the methods.
        citation: Their paper.
        mechanism: Name of the mechanism.
        bound: Returns ε of one round of a protocol of theirs with noise of `honest` clients, at δ.
    """

    name: str
    citation: str
    mechanism: str
    bound: Callable[[Any, float, Adjacency, int], float]
    effort: int = 6
    comparison: ClassVar[bool] = True

    def label(self, run: Run) -> str:
        """Returns the name of the accounting, with a note where rounds are composed."""
        return self.name if base.alone(run) else f"{self.name} + optimal composition"

    def supports(self, run: Run) -> bool:
        """Returns whether the run's mechanism is the one that the authors account for."""
        return run.protocol.mechanism.name == self.mechanism

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the ε by the authors' accounting."""
        if not base.alone(run):
            check_composable(run)
            return Proved(published_epsilon(run, delta), 0.0, CITATION)

        def prove(left: float) -> tuple[float, float]:
            return self.bound(run.protocol, left, run.adjacency, run.honest), 0.0

        return Proved(*base.with_sampler(run, delta, prove), self.citation)


def published_epsilon(run: Run, delta: float) -> float:
    """Returns ε by the published accounting of the protocol's mechanism, rounds composed optimally.

    Raises:
        ConditionError: The published theorem does not apply to the protocol.
    """
    protocol, rounds, found = run.protocol, run.rounds, math.inf
    published = accounting_of(protocol)
    if published is None:
        raise ConditionError(f"There is no published accounting for {protocol.mechanism.name}.")
    if rounds == 1:
        return published.bound(protocol, delta, run.adjacency, run.honest)
    for share in _SHARES:
        each = share * delta / rounds
        epsilon = published.bound(protocol, each, run.adjacency, run.honest)
        if not math.isfinite(epsilon):
            raise ConditionError("The published accounting gives no finite ε for one round.")
        composed = optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)
        found = min(found, composed)
    return found


def _discrete_gaussian(protocol: Any, delta: float, adjacency: Adjacency, honest: int) -> float:
    """Returns ε by the authors' concentrated differential privacy."""
    mechanism = protocol.mechanism
    norm, size = protocol.clip_norm / mechanism.scale, mechanism.sigma_squared
    shared: dict[str, Any] = {"clients": honest, "dim": protocol.dim, "delta": delta, "adjacency": adjacency}
    return renyi_bounds.discrete_gaussian_epsilon(norm=norm, sigma_squared=size, **shared)


def _skellam(protocol: Any, delta: float, adjacency: Adjacency, honest: int) -> float:
    """Returns ε by the authors' Rényi bound."""
    mechanism = protocol.mechanism
    norm, size = protocol.clip_norm / mechanism.scale, mechanism.variance
    shared: dict[str, Any] = {"clients": honest, "dim": protocol.dim, "delta": delta, "adjacency": adjacency}
    return renyi_bounds.skellam_epsilon(norm=norm, variance=size, **shared)


def _poisson_binomial(protocol: Any, delta: float, adjacency: Adjacency, honest: int) -> float:
    """Returns ε by Rényi divergences of single coordinates, all of them at their worst."""
    mechanism = protocol.mechanism
    shared: dict[str, Any] = {"clients": honest, "dim": protocol.dim, "delta": delta, "adjacency": adjacency}
    return renyi_bounds.poisson_binomial_epsilon(coins=mechanism.coins, theta=mechanism.theta, **shared)


def _theorem(protocol: Any, delta: float, adjacency: Adjacency, honest: int) -> float:
    """Returns ε of the paper's Theorem 1."""
    return theorem.theorem_epsilon(protocol, delta, adjacency=adjacency, noise_clients=honest)


PROOFS = (
    Published("paper-theorem", theorem.CITATION, "binomial", _theorem),
    Published(
        "skellam-mechanism",
        'Agarwal, Kairouz and Liu, "The Skellam Mechanism for Differentially Private Federated Learning", NeurIPS 2021',
        "skellam",
        _skellam,
    ),
    Published(
        "distributed-discrete-gaussian",
        'Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure '
        'Aggregation", ICML 2021, Theorem 1',
        "discrete-gaussian",
        _discrete_gaussian,
    ),
    Published(
        "poisson-binomial",
        'Chen, Ozgur and Kairouz, "The Poisson Binomial Mechanism for Unbiased Federated Learning with Secure '
        'Aggregation", ICML 2022',
        "coins",
        _poisson_binomial,
    ),
)


def accounting_of(protocol: Protocol) -> Published | None:
    """Returns the published accounting of a protocol's mechanism; None where there is none."""
    return next((proof for proof in PROOFS if proof.mechanism == protocol.mechanism.name), None)
