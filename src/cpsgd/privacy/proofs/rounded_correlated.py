"""Correlated noise that is rounded at random: slots protect as Gaussians, and the roundings of others as coins.

A client in one round of a run moves its sum. That is made up for by shifting the noise of the others (`slots`), but for
a share θ of the move, which the coins of everybody's rounding hide. docs/proofs/rounded-correlated.md has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cpsgd.correlated.run_memory import MORE
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.mechanisms.rounded_gaussian import uniformity
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.coin_pairs import Moves, family
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.smoothed import rate
from cpsgd.promise import Claim
from cpsgd.run import Run

# Share of δ for everything that is left out, and the number of events of a coordinate and round that it pays for.
_TAIL_SHARE, _EVENTS = 0.01, 12.0
# Share of the slots' w that the adversary is given, so that coins can be smoothed.
_GIVEN = 0.02
# Fractions within this many points of z's grid of a whole number are not counted among the coins.
_NEAR_POINTS = 30.0
# With less than this given their sum, the fractions of clients' numbers are as good as uniform.
_MOST_UNEVEN = 0.2
# Later rounds are grouped by the size of their moves; the largest moves are made in parts.
_GROUPS = (0.03, 0.1, 0.3)
_MOST_PARTS = 64
# With fewer clients there are too few coins.
_FEWEST = 128
# The smallest scale is looked for so often, and to this factor.
_TRIES, _CLOSE = 6, 0.999
# The mean change of coins' means is tried at these shares.
_SHARES = np.linspace(0.0, 0.5, 51)


@dataclass(frozen=True)
class SlotsCertificate:
    """What is proved about a run.

    Attributes:
        rate: κ: a run is √(κ S²)-GDP, S the distance of neighbours in steps.
        slots: The part of κ that is the noise of slots.
        tail_mass: Up to so much.
    """

    rate: float
    slots: float
    tail_mass: float


@lru_cache(maxsize=512)
def slots_certificate(
    law: SlotsAndCoins, *, reach: float, budget: float, dim: int, rounds: int, tail: float
) -> SlotsCertificate:
    """Returns the certificate of a run.

    Args:
        law: The noise.
        reach: The largest distance of neighbours in a coordinate, in steps.
        budget: At most S²/(n σ²), n the untold messages: what smooths.
        dim: d.
        rounds: T.
        tail: Probability that may be left out, over all coordinates and rounds.

    Raises:
        ConditionError: There are too few clients, or too little noise.
    """
    untold = law.untold
    if untold < _FEWEST:
        raise ConditionError(
            f"Of the others in a round {untold} have noise that nobody tells; use more clients, at least a few hundred."
        )
    each = tail / (_EVENTS * dim * rounds)
    # Where moves are made in parts, the slack of a part may grow on the way: Φ(Φ⁻¹(η) + μ) <= η exp(μ (z + 1)).
    most = math.sqrt(budget) * 4.0 * law.weighting.column_norm
    each /= _MOST_PARTS * math.exp(min(most * (1.0 + math.sqrt(-2.0 * math.log(each))), 200.0))
    log = math.log(2.0 / each)
    uneven = max(uniformity(law.deviation**2, count) for count in (untold, MORE * (untold + law.told)))
    if not uneven <= _MOST_UNEVEN:
        raise ConditionError(
            f"Noise of {law.deviation:.3g} steps does not hide where clients' numbers lie between two integers; use a "
            "smaller step."
        )
    constant = _share(law.saturating, untold, log)
    coins = _coins(law, untold, constant, reach, log)
    share, own_share, shifts, moved = _split(law, coins[-1][1], constant)
    slots = float(shifts @ shifts) / (untold * law.deviation**2) * (1.0 + 1e-9)
    # In the own round all slots smooth the coins; in later ones those from there on, and what is given away.
    whole = float(shifts @ shifts) * budget
    given = _GIVEN * whole
    factor = 1.0 + uneven
    # A large move is made in equal parts, each beside its part of what smooths: k parts of κ make the same κ.
    parts = math.ceil(2.0 * reach)
    if parts > _MOST_PARTS:
        raise ConditionError("A coordinate may change by too many steps; use a larger step or a smaller range.")
    near = reach / parts
    own = max(
        rate(family(moves, coins, reach=near, tail=each, factor=factor), whole / parts**2, each)
        for moves in _own(law, own_share, constant, coins, near, log)
    )
    later = 0.0
    left = np.cumsum((shifts * shifts)[::-1])[::-1][1:] / float(shifts @ shifts)
    places = np.digitize(moved * reach, _GROUPS)
    for place in range(len(_GROUPS) + 1):
        chosen = places == place
        if not chosen.any():
            continue
        smooths = float(np.min(left[chosen])) * whole if place else 0.0
        farthest = float(np.max(moved[chosen])) * reach
        parts = math.ceil(farthest / _GROUPS[-1])
        moves = _later(law, share, farthest / parts, log)
        curve = family(moves, coins, reach=farthest / parts, tail=each, factor=factor)
        found = rate(curve, max(smooths, given) / parts**2, each)
        later += found * float(moved[chosen] @ moved[chosen]) * (1.0 + 1e-9)
    return SlotsCertificate((slots * (1.0 + _GIVEN) + own + later) * (1.0 + 1e-9), slots, tail)


def _share(probability: float, count: int, log: float) -> float:
    """Returns a share of `count` clients that saturate, exceeded with a probability of at most e^-log (Chernoff)."""

    def exponent(share: float) -> float:
        if share >= 1.0:
            return math.inf if probability < 1.0 else 0.0
        first = share * math.log(share / probability)
        return count * (first + (1.0 - share) * math.log((1.0 - share) / (1.0 - probability)))

    low, high = probability, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exponent(middle) < log else (low, middle)
    return high


def _coins(law: SlotsAndCoins, untold: int, constant: float, reach: float, log: float) -> tuple[tuple[float, int], ...]:
    """Returns numbers of fair coins, each with a bound on the probability that there are no more than the next one."""
    near = _NEAR_POINTS * law.point
    fair = 0.5 - 2.0 * reach / untold - 2.0 * near * near
    half = 0.5 * math.sqrt(untold)

    def count(deviations: float) -> int:
        return math.floor(fair * (untold - 1) - deviations * half - constant * untold)

    # Hoeffding: more than z deviations of fair coins below the mean with a probability of at most e^(-z²/2).
    return (math.exp(-12.5), count(math.sqrt(2.0 * log))), (math.exp(-4.5), count(5.0)), (1.0, count(3.0))


def _split(law: SlotsAndCoins, coins: int, constant: float) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Returns the shares θ of later rounds and of the own one, the slots' shifts S_k, and the moves q_k, k >= 1."""
    spread, weights = 0.25 * max(coins, 1), law.weighting.factors
    best: tuple[float, float, float, np.ndarray, np.ndarray] | None = None
    for share in _SHARES:
        grown = _grown(weights, law.weighting.rounds, 1.0 - share)
        slots = float(grown @ grown) / (law.untold * law.deviation**2)
        moved = grown[1:] / (1.0 - share)
        coin = 1.3 * (share + constant) ** 2 * float(moved @ moved) / spread
        # (1 - θ₀)² (slots + coin) + (θ₀ + constant)²/V is least here.
        own = max(0.0, (slots + coin - 1.5 * constant / spread) / (slots + coin + 1.5 / spread))
        cost = (1.0 - own) ** 2 * (slots + coin) + 1.5 * (own + constant) ** 2 / spread
        if best is None or cost < best[0]:
            best = cost, float(share), own, (1.0 - own) * grown, (1.0 - own) * moved
    assert best is not None
    return best[1:]


@lru_cache(maxsize=1024)
def _cached_grown(weights: tuple[float, ...], rounds: int, kept: float) -> np.ndarray:
    steps = -np.array(weights[1:])[::-1] * kept
    found = np.zeros(rounds)
    found[0] = 1.0
    for k in range(1, rounds):
        width = min(k, len(steps))
        found[k] = steps[len(steps) - width :] @ found[k - width : k]
    return found * (1.0 + 1e-9)


def _grown(weights: np.ndarray, rounds: int, kept: float) -> np.ndarray:
    """Returns S_k of the recursion S_k = kept Σ_j |g_j| S_(k-j), S_0 = 1, rounded up."""
    return _cached_grown(tuple(weights.tolist()), rounds, kept)


def _own(
    law: SlotsAndCoins, share: float, constant: float, coins: tuple[tuple[float, int], ...], reach: float, log: float
) -> tuple[Moves, Moves]:
    """Returns the moves in the client's own round: its number is an integer in the one world, or in the other."""
    untold = law.untold
    uneven = math.sqrt(2.0 * log / untold) + 4.0 * reach / untold
    most = share + (1.0 - share) * constant + 2.0 / untold
    small, edge = (reach + 1.0) / untold, 0.5 * (1.0 - coins[0][1] / untold) + 0.5 * uneven
    third = 0.55 + 0.6 * reach + 0.5 * reach * reach + uneven
    wander = 1.01 * (1.0 + uneven + edge) * reach
    return (
        Moves(
            (share, most),
            (-0.5 * uneven - small, 0.5 * (1.0 + uneven + most * reach) + small),
            third,
            edge * reach,
            0,
            1.01 * edge * reach,
            wander,
        ),
        Moves(
            (share, most),
            (-0.5 * (1.0 + uneven) - most * reach - small, 0.5 * uneven + small),
            third,
            (1.0 + edge) * reach,
            1,
            1.01 * edge * reach,
            wander,
        ),
    )


def _later(law: SlotsAndCoins, share: float, reach: float, log: float) -> Moves:
    """Returns the moves in a later round, per unit of what its messages inherit; lineages may break as they like."""
    untold = law.untold
    # Of those that saturate: the largest mean of their moves, and Bernstein's inequality.
    chance = law.saturating
    lost = chance + math.sqrt(4.0 * chance * log / untold) + (0.7 * log + 2.0) / untold
    most = share + lost
    uneven = math.sqrt(4.0 * log / untold) + (law.told + 4.0) / untold
    spread = 0.5 * uneven + reach * (most + 1.0 / untold)
    third = 1.0 + 4.0 * reach + 1.5 * reach * reach
    rare = 1.01 * (0.5 + uneven) * reach
    return Moves((-lost, most), (-spread, spread), third, rare, 0, rare, 1.01 * (2.5 + 3.0 * uneven) * reach)


# ---------------------------------------------------------------------- the proof


@dataclass(frozen=True)
class SlotsProof(Proof):
    """Correlated noise without noise of the client's own, rounded at random."""

    name: str = "rounded-correlated"
    citation: str = (
        "correlated Gaussian noise rounded at random (docs/proofs/rounded-correlated.md), on Denisov, McMahan, Rush, "
        'Smith and Thakurta, NeurIPS 2022, Dong, Roth and Su, "Gaussian Differential Privacy", JRSS B 2022, and Balle '
        "and Wang, ICML 2018, Theorem 8"
    )
    effort: int = 2

    def supports(self, run: Run) -> bool:
        """Returns whether noise is that of slots and coins."""
        return isinstance(base.law_of(run), SlotsAndCoins)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns ε of the run."""
        sensitivity = base.sensitivity(run)

        def prove(left: float) -> tuple[float, float]:
            tail = _TAIL_SHARE * left
            found = _certificate(run, tail, sensitivity)
            mu = math.sqrt(found.rate) * sensitivity * (1.0 + 1e-14)
            return gdp_epsilon(mu, (left - found.tail_mass) * (1.0 - 2.0**-52)), found.tail_mass

        return Proved(*base.with_sampler(run, delta, prove), self.citation)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the run as an equivalent Gaussian."""
        sensitivity = base.sensitivity(run)
        found = _certificate(run, tail, sensitivity)
        variation = run.honest * run.protocol.dim * run.protocol.mechanism.noise.variation
        return Rounds(math.sqrt(found.rate) * sensitivity * (1.0 + 1e-14), 1, found.tail_mass, variation)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale, within a little, that keeps the claim."""
        spent = base.moved(run) * (1.0 + math.exp(claim.epsilon)) / claim.delta
        if spent > 2.0 * _TAIL_SHARE:
            raise ConditionError(f"The sampler costs too much of δ; {run.protocol.mechanism.sampler_remedy}.")
        mu = gdp_mu(claim.epsilon, claim.delta * (1.0 - 4.0 * _TAIL_SHARE))
        scale, enough = self.rough_scale(run, claim), math.inf
        for _ in range(_TRIES):
            here = base.scaled(run, scale)
            scale = here.protocol.mechanism.scale
            try:
                found = _certificate(here, _TAIL_SHARE * claim.delta, base.sensitivity(here))
            except ConditionError:
                if enough < math.inf:
                    break
                raise
            if math.sqrt(found.rate) * base.sensitivity(here) <= mu:
                enough = min(enough, scale)
            following = base.scale_for(here, mu / math.sqrt(found.rate) * (1.0 - 1e-4))
            if following == 0.0 or following >= enough * _CLOSE:
                break
            scale = following
        if enough < math.inf:
            return enough
        raise ConditionError(f"No scale of {run.protocol.mechanism.name} was found that keeps the target.")

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale by the noise of slots alone."""
        law = base.law_of(run)
        assert isinstance(law, SlotsAndCoins)
        deviation = law.deviation * math.sqrt(law.untold) / law.weighting.column_norm
        return float(base.distance(run) / (deviation * base.gaussian_mu(run, claim)))


def _certificate(run: Run, tail: float, sensitivity: float) -> SlotsCertificate:
    law = base.law_of(run)
    assert isinstance(law, SlotsAndCoins)
    if law.weighting.separation is not None:
        raise ConditionError("Noise that is rounded at random is proved for clients in one round of the run only.")
    budget = (sensitivity / law.deviation) ** 2 / law.untold
    return slots_certificate(
        law,
        reach=run.protocol.reach(run.adjacency),
        budget=_rounded_down(budget),
        dim=run.protocol.dim,
        rounds=law.weighting.rounds,
        tail=tail,
    )


def _rounded_down(value: float) -> float:
    """Returns a number of two binary digits, so that nearby questions have the same answer."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 4.0) / 4.0, exponent)


PROOFS = (SlotsProof(),)
