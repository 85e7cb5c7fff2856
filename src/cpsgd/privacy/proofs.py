"""Proofs about all rounds together that do not go by equivalent Gaussians, each with its citation.

Each takes how many rounds ended with how many clients, and an ε that it has to come `below` to be of any use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpsgd.errors import ConditionError
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.law import Law, Normal
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy import composition
from cpsgd.privacy.accountant import LARGEST_EPSILON
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.products import smoothed_epsilon
from cpsgd.privacy.renyi import renyi_floor, summed_renyi_certificate
from cpsgd.privacy.single import CITATIONS, best_proof, quick_proof
from cpsgd.run import Run

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Proof = tuple[float, float, str]
"""ε, the part of δ spent on tails, and the citation."""

# Optimal composition sums over rounds; with more of them the Gaussian certificate is far ahead anyway.
_MOST_COMPOSED = 20_000
# No certificate is below a Gaussian of equal variance by more than this.
_NEARLY = 0.999
# Shares of δ that a published route spends on the rounds themselves; composition gets the rest.
_PUBLISHED_SHARES = (0.9, 0.5, 0.1, 0.01, 1e-3)
# Rényi certificates of rounds with more different numbers of clients are not computed.
_MOST_RENYI_SIZES = 4
# The smoothed certificate is worth its time where it may be better by more than this.
_GAIN = 1.002
# Shares of δ that may pay for the noise sampler's resolution over all rounds.
_SAMPLER_SHARES = (1e-6, 0.1)

_PRODUCT = "rounds are more coordinates of one product"
_SUMMED = "Rényi divergences of rounds add up (Mironov 2017, Proposition 1)"


def smoothed_proof(
    protocol: Protocol, delta: float, sizes: Counter[int], adjacency: Adjacency, colluding: int, below: float
) -> Proof:
    """ε by the smoothed certificate of all rounds' coordinates together, each as if it had the fewest clients."""
    mechanism, dim, rounds, honest = protocol.mechanism, protocol.dim, sizes.total(), min(sizes) - colluding
    law, sensitivity = mechanism.noise.law(honest), protocol.sensitivity(adjacency)
    assert not isinstance(law, Normal)
    if isinstance(law, Law):
        floor = gdp_epsilon(sensitivity * math.sqrt(rounds / law.variance), delta) * _GAIN
        if floor >= below:
            raise ConditionError(f"could not come below {math.floor(1e4 * floor) / 1e4:g}, so not computed")
    moved = dim * mechanism.noise.variation * rounds * max(sizes)

    def prove(delta: float) -> tuple[float, float]:
        epsilon, certificate = smoothed_epsilon(
            law, dim=dim, sensitivity=sensitivity, reach=protocol.reach(adjacency), delta=delta, rounds=rounds
        )
        return epsilon, certificate.tail_mass

    epsilon, tail = _with_sampler(mechanism, moved, delta, prove)
    return epsilon, tail, f"{CITATIONS['smoothed-certificate']}; {_PRODUCT}"


def renyi_proof(
    protocol: Protocol, delta: float, sizes: Counter[int], adjacency: Adjacency, colluding: int, below: float
) -> Proof:
    """ε by the Rényi certificates of all rounds, added up; not computed where it could not come below this."""
    if len(sizes) > _MOST_RENYI_SIZES:
        raise ConditionError(f"is computed for rounds of up to {_MOST_RENYI_SIZES} different numbers of clients")
    mechanism, dim = protocol.mechanism, protocol.dim
    sensitivity = protocol.sensitivity(adjacency)
    laws = [(mechanism.noise.law(size - colluding), count) for size, count in sizes.items()]
    rounds = [(law, count) for law, count in laws if isinstance(law, Law)]
    slope = sum(count * sensitivity**2 / (2.0 * law.variance) for law, count in rounds)
    if (floor := renyi_floor(slope, delta)) >= below:
        raise ConditionError(f"could not come below {math.floor(1e4 * floor) / 1e4:g}, so not computed")
    # Both neighbours' laws are, over all rounds, this close in total variation to the ones the certificates are about.
    moved = dim * mechanism.noise.variation * sum(count * (size - colluding) for size, count in sizes.items())

    def prove(delta: float) -> tuple[float, float]:
        found = summed_renyi_certificate(rounds, dim=dim, sensitivity=sensitivity, levels=mechanism.levels, delta=delta)
        return found.epsilon, found.tail_mass

    epsilon, tail = _with_sampler(mechanism, moved, delta, prove)
    return epsilon, tail, f"{CITATIONS['renyi-certificate']}; {_SUMMED}"


def _with_sampler(
    mechanism: Mechanism, moved: float, delta: float, prove: Callable[[float], tuple[float, float]]
) -> tuple[float, float]:
    """ε and the part of δ for tails, where the noise sampler's resolution is paid for, too.

    Args:
        mechanism: Whose sampler.
        moved: How far from the laws that `prove` is about, in total variation, the sampler may be over all rounds.
        delta: δ in total.
        prove: From the δ that is left to ε and the part of it for tails.
    """
    spent = 2.0 * moved
    for share in _SAMPLER_SHARES if moved else (0.0,):
        if spent > _SAMPLER_SHARES[-1] * delta:
            break
        epsilon, tail = prove(delta * (1.0 - share))
        if epsilon > LARGEST_EPSILON:
            raise ConditionError(f"ε would be over {LARGEST_EPSILON:g}; run fewer rounds or add noise")
        spent = moved * (1.0 + math.exp(epsilon)) * (1.0 + 1e-12)
        if spent <= share * delta * (1.0 - 1e-9) or not moved:
            return epsilon, tail + spent
    raise ConditionError(f"the noise sampler's resolution would cost {spent:.2g} of δ; {mechanism.sampler_remedy}")


def per_round_proof(
    run: Run, protocol: Protocol, delta: float, sizes: Counter[int], adjacency: Adjacency, colluding: int, below: float
) -> Proof:
    """Each round's (ε, δ) alone, by whichever certificate is best for one round, composed optimally.

    Where even Gaussian noise of the same variance would not come `below`, by the quickest certificate.
    """
    rounds = run.rounds
    _check_composable(run.participation, rounds)
    each = 0.5 * delta / rounds

    def composed(epsilon: float) -> float:
        return composition.optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)

    law = protocol.mechanism.noise.law(run.honest)
    prove = best_proof
    if isinstance(law, Law):
        least = gdp_epsilon(protocol.sensitivity(adjacency) / math.sqrt(law.variance), each) * _NEARLY
        prove = quick_proof if composed(least) >= below else best_proof
    single = prove(run, each)
    if (epsilon := composed(single.epsilon)) > LARGEST_EPSILON:
        raise ConditionError(f"Nothing worth the name is proved about {rounds} such rounds; run fewer or add noise.")
    return epsilon, rounds * single.tail, f"{single.citation}; {composition.CITATION}"


def published_epsilon(
    protocol: Protocol,
    delta: float,
    *,
    rounds: int,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    noise_clients: int | None = None,
) -> float:
    """ε by the published accounting of the protocol's mechanism, rounds composed optimally.

    For the paper's mechanism that is its Theorem 1. For comparison only:
    `cpsgd.privacy.single.COMPARISONS` says where that fails.

    Raises:
        ConditionError: The published theorem does not apply to the protocol.
    """
    neighbours = Adjacency.parse(adjacency)
    honest = protocol.clients if noise_clients is None else noise_clients
    found = math.inf
    for share in _PUBLISHED_SHARES if rounds > 1 else (1.0 - 1e-9,):
        each = share * delta / rounds
        epsilon = protocol.mechanism.published_epsilon(protocol, each, neighbours, honest)
        if not math.isfinite(epsilon):
            raise ConditionError("The published accounting gives no finite ε for one round.")
        composed = composition.optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)
        found = min(found, composed)
    return found


def published_proof(
    protocol: Protocol, delta: float, rounds: int, scheme: Participation, adjacency: Adjacency, honest: int
) -> Proof:
    """`published_epsilon` of rounds without sampling."""
    _check_composable(scheme, rounds)
    epsilon = published_epsilon(protocol, delta, rounds=rounds, adjacency=adjacency, noise_clients=honest)
    return epsilon, 0.0, composition.CITATION


def _check_composable(scheme: Participation, rounds: int) -> None:
    if scheme.sampled:
        raise ConditionError("composes rounds without sampling only")
    if rounds > _MOST_COMPOSED:
        raise ConditionError(f"is computed for up to {_MOST_COMPOSED:,} rounds")
