"""Checks that compare the package with the oracle and return what is wrong, as a list of sentences.

The tests ask for empty lists; the mutation test spoils the package on purpose and asks for lists that are not empty.
So everything is looked up in its module at the time of the call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import mpmath
import numpy as np
from scipy.stats import norm

from cpsgd.errors import ConditionError
from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.neighbours import Adjacency
from cpsgd.paper import theorem
from cpsgd.privacy import fixed_size, gaussian, loss_sums, moments
from cpsgd.privacy import guarantee as ask
from cpsgd.privacy.proofs import certified_gaussian as certificate
from cpsgd.privacy.proofs import certified_renyi as renyi
from cpsgd.protocol import Protocol

from .oracle import Array, Exact, Pair, composed, hockey_stick

exact_law = functools.cache(Exact)


def binomial(protocol: Protocol) -> Binomial:
    """The protocol's mechanism, which is Binomial."""
    assert isinstance(protocol.mechanism, Binomial)
    return protocol.mechanism


def sensitivity(protocol: Protocol, adjacency: str = "replace-one") -> float:
    """S, the largest distance of two neighbours in units of the noise."""
    return protocol.mechanism.sensitivity(
        dim=protocol.dim, clip_norm=protocol.clip_norm, adjacency=Adjacency.parse(adjacency)
    )


# ---------------------------------------------------------------------- ε by enumeration of all outputs


def certificate_epsilon(pair: Pair) -> float:
    """What the Gaussian certificate claims for this pair."""
    return certificate.certified_epsilon(
        BinomialLaw(pair.noise_trials, pair.p),
        dim=len(pair.u),
        sensitivity=pair.distance,
        levels=pair.levels,
        delta=pair.delta,
    )[0]


def renyi_epsilon(pair: Pair) -> float:
    """What the Rényi certificate claims for this pair."""
    return renyi.renyi_certificate(
        BinomialLaw(pair.noise_trials, pair.p),
        dim=len(pair.u),
        sensitivity=pair.distance,
        levels=pair.levels,
        delta=pair.delta,
    ).epsilon


def theorem_epsilon(pair: Pair) -> float:
    """What the paper's Theorem 1 claims for this pair of integer vectors."""
    moved = [abs(a - b) for a, b in zip(pair.u, pair.v, strict=True)]
    return theorem.binomial_mechanism_epsilon(
        noise_trials=pair.noise_trials,
        p=pair.p,
        dim=len(pair.u),
        delta=pair.delta,
        sensitivities=theorem.Sensitivities(l1=sum(moved), l2=pair.distance, linf=max(moved)),
    )


def wrong_epsilons(claim: Callable[[Pair], float], pairs: Iterable[Pair]) -> list[str]:
    """The pairs whose exact δ at the claimed ε is over the δ asked for. Pairs the method refuses are skipped."""
    wrong: list[str] = []
    for pair in pairs:
        try:
            wrong += wrong_epsilon(claim(pair), pair)
        except ConditionError:
            continue
    return wrong


def wrong_epsilon(epsilon: float, pair: Pair) -> list[str]:
    """Says so if the pair is not (ε, δ)-indistinguishable."""
    exact = pair.delta_at(epsilon)
    # The enumeration itself is accurate to about 1e-13 of the mass it adds up.
    if exact <= pair.delta + 1e-12 * (1.0 + math.exp(epsilon)):
        return []
    return [f"{pair} has δ={exact:.6g} at the claimed ε={epsilon:.6g}"]


def random_pairs(count: int, seed: int) -> list[Pair]:
    """Pairs of all kinds: d <= 2, N <= 1000, skewed and fair coins, integer and fractional coordinates."""
    rng = np.random.default_rng(seed)
    pairs: list[Pair] = []
    while len(pairs) < count:
        dim, levels = int(rng.integers(1, 3)), int(rng.integers(2, 6))
        u, v = rng.uniform(0, levels - 1, dim), rng.uniform(0, levels - 1, dim)
        kind = rng.integers(4)
        if kind == 0:
            u, v = np.round(u), np.round(v)
        elif kind == 1:
            v = np.clip(u + rng.uniform(-0.1, 0.1, dim), 0, levels - 1)
        if np.array_equal(u, v):
            continue
        clients, largest = int(rng.integers(1, 20)), 1000 if dim == 1 or rng.random() < 0.1 else 300
        pairs.append(
            Pair(
                u=tuple(map(float, u)),
                v=tuple(map(float, v)),
                levels=levels,
                clients=clients,
                trials=int(rng.integers(20 // clients + 1, largest // clients + 1)),
                p=0.5 if rng.random() < 0.4 else float(rng.uniform(0.05, 0.95)),
                delta=float(10.0 ** rng.uniform(-8, -1.5)),
            )
        )
    return pairs


# ---------------------------------------------------------------------- the whole way from a protocol to ε

PROTOCOLS = [
    # Few clients and one coordinate that moves from one end to the other: the case with the least slack.
    (Protocol.binomial(clients=2, dim=1, clip_norm=1.0, levels=2, trials=500), 1e-2),
    (Protocol.binomial(clients=2, dim=1, clip_norm=1.0, levels=5, trials=480), 3e-2),
    (Protocol.binomial(clients=3, dim=2, clip_norm=1.0, levels=3, trials=250, p=0.4), 1e-2),
]


def wrong_guarantees() -> list[str]:
    """Asks for guarantees of whole protocols, all clients surviving or not, and enumerates the worst neighbours."""
    wrong: list[str] = []
    for protocol, delta in PROTOCOLS:
        for dropped in (0, 1):
            clients = protocol.clients - dropped
            mechanism = binomial(protocol)
            middle, half = (mechanism.levels - 1) / 2.0, protocol.clip_norm / protocol.scale
            rest = (middle,) * (protocol.dim - 1)
            pair = Pair(
                u=(middle + half, *rest),
                v=(middle - half, *rest),
                levels=mechanism.levels,
                clients=clients,
                trials=mechanism.trials,
                p=mechanism.p,
                delta=delta,
            )
            found = [ask(protocol, delta, surviving=clients), ask(protocol, delta, colluding=dropped)]
            for claimed in {guarantee.epsilon for guarantee in found}:
                wrong += wrong_epsilon(claimed, pair)
    return wrong


# ---------------------------------------------------------------------- the pieces against 50 digits

CERTIFICATES = [(400, 0.5, 3, 1.0, 2, 1e-6), (600, 0.15, 10, 2.5, 4, 1e-5), (900, 0.8, 1, 0.3, 3, 1e-9)]


def wrong_certificates() -> list[str]:
    """Compares μ₁ and the tail mass with the definitions."""
    wrong = []
    for trials, p, dim, sensitivity, levels, tail in CERTIFICATES:
        law, steps = exact_law(trials, p), math.ceil(min(levels - 1, sensitivity))
        low, high = law.central_range(tail / dim)
        mu, mass = law.unit_mu(low - steps, high + steps), dim * (law.below[low - 1] + law.above[high])
        found = certificate.gaussian_certificate(
            BinomialLaw(trials, p), dim=dim, sensitivity=sensitivity, levels=levels, tail=tail
        )
        if not mu <= found.unit_mu <= mu * (1 + 1e-8):
            wrong.append(f"μ₁ of {trials}, {p} is {found.unit_mu!r}, not {float(mu)!r}")
        if not mu * sensitivity <= found.mu <= mu * sensitivity * (1 + 1e-8):
            wrong.append(f"μ of {trials}, {p} is {found.mu!r}, not {float(mu * sensitivity)!r}")
        if not mass <= found.tail_mass <= mass * (1 + 1e-8):
            wrong.append(f"the tails of {trials}, {p} have {found.tail_mass!r}, not {float(mass)!r}")
    return wrong


MOMENTS = [
    (100, 0.5, 1.0, 2, 1.3),
    (100, 0.5, 1.0, 2, 30.0),
    (150, 0.3, 2.6, 6, 8.0),
    (90, 0.6, 0.4, 2, 60.0),
    (100, 0.4, 3.0, 4, 2.1),
    (64, 0.5, 2.0, 3, 2.5),
    (80, 0.5, 1.7, 3, 2.95),
]


def wrong_moments() -> list[str]:
    """Compares κ with the maximum over a grid: it must lie above, and not far."""
    wrong = []
    for trials, p, sensitivity, levels, order in MOMENTS:
        law, reach, tail = exact_law(trials, p), min(levels - 1.0, sensitivity), 1e-5
        least = law.kappa(order, *law.central_range(tail), reach)
        found = moments.Moments(BinomialLaw(trials, p), dim=1, sensitivity=sensitivity, levels=levels, tail=tail).kappa(
            order
        )
        if not least <= found <= least * 1.002:
            wrong.append(f"κ({order}) of {trials}, {p} is {found!r}, but {float(least)!r} is attained")
    return wrong


SUMS = [
    (30, 0.5, 3, 1, 1.0, 2, 1e-3),
    (64, 0.5, 40, 1, 2.0, 3, 1e-5),
    (50, 0.35, 7, 4, 1.3, 2, 1e-4),
    (400, 0.5, 100, 20, 2.5, 3, 1e-6),
]


def wrong_sums() -> list[str]:
    """Compares what is added up over rounds, divergences and tails, with the definitions for one round."""
    wrong = []
    for trials, p, rounds, dim, sensitivity, levels, delta in SUMS:
        law, name = exact_law(trials, p), f"{rounds} rounds of {trials}, {p}"
        found = renyi.summed_renyi_certificate(
            [(BinomialLaw(trials, p), rounds)], dim=dim, sensitivity=sensitivity, levels=levels, delta=delta
        )
        # One of the boxes that pay for the tails with a share of δ.
        boxes = {law.central_range(share * delta / rounds / dim) for share in renyi.RENYI_TAIL_SHARES}
        tails = {box: rounds * dim * (law.below[box[0] - 1] + law.above[box[1]]) for box in boxes}
        box = min(boxes, key=lambda box: abs(tails[box] - found.tail_mass))
        if not tails[box] <= found.tail_mass <= tails[box] * (1 + 1e-8):
            wrong.append(f"the tails of {name} have {found.tail_mass!r}, the nearest is {float(tails[box])!r}")
        least = rounds * law.kappa(found.order, *box, min(levels - 1.0, sensitivity))
        if not least <= found.kappa <= least * 1.003:
            wrong.append(f"κ({found.order}) of {name} is {found.kappa!r}, but {float(least)!r} is attained")
        # Canonne, Kamath and Steinke 2020, Proposition 12.
        order, left = mpmath.mpf(found.order), delta - tails[box]
        epsilon = least * sensitivity**2 + mpmath.log1p(-1 / order) - mpmath.log(left * order) / (order - 1)
        if not epsilon <= found.epsilon <= 1.01 * epsilon:
            wrong.append(f"ε of {name} is {found.epsilon!r}, not {float(epsilon)!r}")
    return wrong


def few_coins(count: int, seed: int) -> list[tuple[Pair, int]]:
    """Pairs with at most 30 coins, d <= 2, and a number of rounds that can be enumerated."""
    rng = np.random.default_rng(seed)
    pairs: list[tuple[Pair, int]] = []
    while len(pairs) < count:
        dim, levels = int(rng.integers(1, 3)), int(rng.integers(2, 4))
        u, v = rng.uniform(0, levels - 1, dim), rng.uniform(0, levels - 1, dim)
        if rng.random() < 0.5:
            u, v = np.round(u), np.round(v)
        if np.array_equal(u, v):
            continue
        p = 0.5 if rng.random() < 0.5 else float(rng.uniform(0.3, 0.7))
        delta = float(10.0 ** rng.uniform(-4, -1.5))
        pair = Pair(
            u=tuple(map(float, u)),
            v=tuple(map(float, v)),
            levels=levels,
            clients=1,
            trials=int(rng.integers(15, 31)),
            p=p,
            delta=delta,
        )
        pairs.append((pair, int(rng.integers(2, 6)) if dim == 1 else 2))
    return pairs


def summed_epsilon(pair: Pair, rounds: int) -> float:
    """What the Rényi certificates of the rounds, added up, claim for this pair."""
    return renyi.summed_renyi_certificate(
        [(BinomialLaw(pair.noise_trials, pair.p), rounds)],
        dim=len(pair.u),
        sensitivity=pair.distance,
        levels=pair.levels,
        delta=pair.delta,
    ).epsilon


# ---------------------------------------------------------------------- fixed-size sampling of Gaussians

_OUTPUTS = np.linspace(-8.0, 10.0, 1_201)


def cells(mean: float) -> Array:
    """N(mean, 1) with its outputs put into cells, which is post-processing."""
    edges = np.concatenate([[-np.inf], 0.5 * (_OUTPUTS[1:] + _OUTPUTS[:-1]), [np.inf]])
    return np.diff(norm.cdf(edges - mean))


def sampled_rounds(mu: float, rate: float) -> list[tuple[Array, Array]]:
    """Rounds as they may happen: the client drawn instead is like one of the neighbours, or between them."""
    found = []
    for first, second, instead in ((mu, 0.0, 0.0), (0.0, mu, 0.0), (0.5 * mu, -0.5 * mu, 0.0), (mu, 0.0, 0.7 * mu)):
        one, other, between = cells(first), cells(second), cells(instead)
        found.append((rate * one + (1 - rate) * between, rate * other + (1 - rate) * between))
    return found


SAMPLED = [(1.0, 0.1), (2.0, 0.3), (0.5, 0.05), (3.0, 0.01)]
EPSILONS = (0.0, 0.1, 0.5, 2.0)


@functools.cache
def sampled_deltas(mu: float, rate: float) -> list[tuple[int, float, float]]:
    """The largest exact δ of one round and of two as they may happen, at every ε: the number, ε, δ."""
    rounds = sampled_rounds(mu, rate)
    pairs = itertools.combinations_with_replacement(rounds, 2)
    laws = {1: rounds, 2: [composed(list(pair)) for pair in pairs]}
    return [
        (count, epsilon, max(hockey_stick(*pair, epsilon) for pair in laws[count]))
        for count in laws
        for epsilon in EPSILONS
    ]


def wrong_sampling() -> list[str]:
    """Compares fixed-size sampling with one and two rounds, all outputs enumerated."""
    wrong = []
    for mu, rate in SAMPLED:
        claimed = {
            count: fixed_size.sampled_profile([fixed_size.SampledRounds(mu, rate, count)], loss_sums.COARSE_POINTS)
            for count in (1, 2)
        }
        for count, epsilon, exact in sampled_deltas(mu, rate):
            # The enumeration itself is accurate to about 1e-13.
            if exact > (delta := claimed[count](epsilon)) + 1e-12:
                wrong.append(f"{count} rounds, μ={mu}, q={rate}: δ={exact:.6g} at ε={epsilon}, not {delta!r}")
    return wrong


def wrong_conversions() -> list[str]:
    """A Gaussian has D_α = α μ²/2, and its exact ε is known: no order may claim less, and the best not much more."""
    wrong = []
    for mu, delta in [(0.1, 1e-9), (1.0, 1e-6), (3.0, 1e-3)]:
        exact = gaussian.gdp_epsilon(mu, delta)
        orders = 1.0 + np.geomspace(0.05, 1e3, 400)
        best = min(renyi.rdp_epsilon(0.5 * mu * mu * order, float(order), delta) for order in orders)
        if not exact <= best <= 1.15 * exact:
            wrong.append(f"a {mu}-GDP mechanism has ε={exact!r} at δ={delta}, converted {best!r}")
    return wrong


def wrong_theorem() -> list[str]:
    """Compares Theorem 1 with values computed by hand."""
    one, several = theorem.Sensitivities(1.0, 1.0, 1.0), theorem.Sensitivities(40.0, 7.0, 3.0)
    # 40 digits, from the theorem as printed (c_p not rounded).
    cases = [(2_000, 0.5, 1, 1e-6, one, 0.637513410643578), (90_000, 0.2, 30, 1e-8, several, 0.4680039166435448)]
    wrong = []
    for trials, p, dim, delta, sensitivities, expected in cases:
        found = theorem.binomial_mechanism_epsilon(
            noise_trials=trials, p=p, dim=dim, delta=delta, sensitivities=sensitivities
        )
        if not abs(found - expected) <= 1e-12 * expected:
            wrong.append(f"Theorem 1 gives {found!r} with N={trials}, p={p}, not {expected!r}")
    return wrong
