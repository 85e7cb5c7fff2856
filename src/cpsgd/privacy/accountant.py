"""The cost of many rounds.

The Gaussian certificate turns a round into one that is μ-GDP on all but `tail_mass` of its outputs. Whatever the
clients hold, the round's two output laws are the image of N(0, 1) and N(μ, 1) under one randomized map (Blackwell;
Dong, Roth, Su 2022, Theorem 2.10). So a Gaussian mechanism with noise multiplier 1/μ stands in for it:

* Rounds compose adaptively, and Gaussians as √Σμ² (Corollary 3.3 there): a closed form.
* Poisson sampling mixes the two laws with probability q. The same map sends (1-q) N(0,1) + q N(μ,1) to the mixture
  of the round's laws, for zero-out neighbours: `cpsgd.privacy.poisson`.
* Fixed-size sampling, for replace-one neighbours: `cpsgd.privacy.fixed_size`.

Tails: let I be the event that every round's output lies in its certified range. Inside I the real and the certified
laws agree, so for any event E, A(E) <= A(E ∩ I) + A(not I) <= e^ε B(E) + δ(ε) + Σ tail_mass, the sum over the rounds.
(Under sampling the range is chosen for given other members of the cohort.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd._searches import smallest_enough
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Participation
from cpsgd.privacy import gaussian
from cpsgd.privacy.fixed_size import SampledRounds, sampled_profile
from cpsgd.privacy.loss_sums import COARSE_POINTS, FINE_POINTS
from cpsgd.privacy.poisson import PoissonRounds, poisson_profile
from cpsgd.promise import Claim

FINE = 1e-4
"""Discretisation of privacy losses for final answers."""
COARSE = 1e-3
"""Discretisation of privacy losses inside searches; pessimistic too, and several times faster."""

# About the factor between a coarse ε and the fine one.
_NEAR = 1.0 + 1e-4
# Below every δ that is asked for; logarithms of zero do not exist.
_TINY = 1e-300
# Where e^ε is still far from overflowing; nobody is protected by such an ε anyway.
LARGEST_EPSILON = 500.0
_LARGEST_MULTIPLIER = 1e9

Profile = Callable[[float], float]
"""ε to an upper bound on δ; non-increasing."""


@dataclass(frozen=True)
class Rounds:
    """`count` rounds, each of them μ-GDP on all but `tail_mass` of its outputs.

    Attributes:
        mu: μ of a `GaussianCertificate`, or the inverse noise multiplier of a Gaussian mechanism.
        count: Number of such rounds.
        tail_mass: Added to δ by each of them, whatever ε is.
        variation: Distance in total variation of each round's output law from the one `mu` speaks of; it adds
            (1 + e^ε) times as much to δ.
        slack: λ: apart from that, each round's output has e^±λ times the probabilities of what `mu` speaks of. It adds
            2λ to ε, and multiplies δ by e^λ.
        pure: An ε for which each of them is (ε, 0)-DP, if any.
        seen: With fixed-size cohorts: pairs of a μ and a rate. Each round has one of them, whichever is worst. Empty
            where each has `mu` and the rate of its participation, which also cover all pairs.
    """

    mu: float
    count: int = 1
    tail_mass: float = 0.0
    variation: float = 0.0
    slack: float = 0.0
    pure: float = math.inf
    seen: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _validate.positive("mu", self.mu)
        _validate.integer("count", self.count, low=1)


def costliest(rounds: Iterable[Rounds], count: int = 1) -> Rounds:
    """Returns `count` equal rounds, each of which costs at least as much as any of the given ones.

    Each number is the largest one given. `seen` is empty unless all of the given rounds have it.
    """
    listed, names = list(rounds), ("mu", "tail_mass", "variation", "slack", "pure")
    worst = {name: max(getattr(each, name) for each in listed) for name in names}
    seen = itertools.chain.from_iterable(each.seen for each in listed)
    return Rounds(count=count, seen=tuple(seen) if all(each.seen for each in listed) else (), **worst)


Part = tuple[Rounds, Participation]
"""Rounds, and who takes part in them."""

_EVERY = Participation.every()


def composed_epsilon(
    rounds: Sequence[Rounds], *, delta: float, participation: Participation, interval: float = FINE
) -> float:
    """Returns the smallest ε for which all the rounds together are (ε, delta)-DP, rounded up.

    Args:
        rounds: The rounds. In the scheme "once" a client is in only one of them, and the costliest counts.
        delta: Target δ.
        participation: The rounds that a client takes part in. `mu` must be for an adjacency that
            `Participation.check` accepts.
        interval: Discretisation of privacy losses.

    Raises:
        ConditionError: The tails alone spend `delta`.

    Example:
        >>> ten = [Rounds(mu=0.1, count=10)]
        >>> round(composed_epsilon(ten, delta=1e-6, participation=Participation.every()), 4)
        1.3676
        >>> round(composed_epsilon(ten, delta=1e-6, participation=Participation.once()), 4)
        0.3969
    """
    delta = _validate.fraction("delta", delta)
    if not rounds:
        return 0.0
    if participation.scheme == "once":
        return max(_composed_epsilon([(replace(r, count=1), _EVERY)], delta, interval) for r in rounds)
    return _composed_epsilon([(r, participation) for r in rounds], delta, interval)


def mixed_epsilon(parts: Sequence[Part], *, delta: float, interval: float = FINE) -> float:
    """Returns the smallest ε for rounds with different participation, rounded up; see `composed_epsilon`.

    One accountant composes them all: unsampled rounds are Gaussians, sampled ones each have their own rate. The scheme
    "once" is a statement about several rounds: put in the costliest as one in which everybody takes part.

    Raises:
        ParameterError: "once" is among the schemes, or both "poisson" and "fixed-size", whose neighbours differ.
        ConditionError: The tails alone spend `delta`.

    Example:
        >>> mixed = [(Rounds(mu=0.1, count=10), Participation.every()), (Rounds(0.5, 20), Participation.poisson(0.01))]
        >>> round(mixed_epsilon(mixed, delta=1e-6), 3)
        1.372
    """
    delta = _validate.fraction("delta", delta)
    schemes = {participation.scheme for _, participation in parts}
    if "once" in schemes or schemes >= {"poisson", "fixed-size"}:
        raise ParameterError(f"Rounds with participation {sorted(schemes)} are not composed as such.")
    return _composed_epsilon(parts, delta, interval) if parts else 0.0


def pure_epsilon(parts: Sequence[Part]) -> float:
    """Returns Σε of rounds that are (ε, 0)-DP, of sampled ones log(1 + q (e^ε - 1)); infinity where one is not.

    A round that is drawn with probability q has the law (1 - q) B + q A, and A <= e^ε B (Balle, Barthe and Gaboardi
    2018, Theorem 2, advanced joint convexity, which covers sampling without replacement as well).
    """
    return math.fsum(r.count * _sampled_pure(r.pure, who.rate) for r, who in parts) * (1.0 + 1e-13)


def _sampled_pure(epsilon: float, rate: float) -> float:
    """Returns log(1 + q (e^ε - 1)), or ε where e^ε would be too large: sampling never costs privacy."""
    if rate == 1.0 or epsilon > LARGEST_EPSILON:
        return epsilon
    return math.log1p(rate * math.expm1(epsilon))


def _composed_epsilon(parts: Sequence[Part], delta: float, interval: float) -> float:
    """Returns the smallest ε of three: of pure rounds added up, of equivalent Gaussians, or of both kinds added."""
    pure = pure_epsilon(parts)
    if delta == 0.0:
        if math.isinf(pure):
            raise ConditionError("Not all rounds have pure differential privacy (δ = 0); allow a delta above 0.")
        return pure
    if math.isinf(pure):
        found = _gaussian_epsilon(parts, delta, interval)
        some, others = ([part for part in parts if math.isinf(part[0].pure) == no] for no in (False, True))
        # Or the pure ones add up, and only the others are Gaussians: (ε, 0) and (ε', δ) are (ε + ε', δ).
        return min(found, pure_epsilon(some) + _gaussian_epsilon(others, delta, interval)) if some else found
    try:
        return min(pure, _gaussian_epsilon(parts, delta, interval))
    except ConditionError:
        return pure


def _gaussian_epsilon(parts: Sequence[Part], delta: float, interval: float) -> float:
    """Returns the ε of equivalent Gaussians, with tails and variation paid out of δ."""
    rounds = [r for r, _ in parts]
    tails = _tails(rounds)
    if tails(0.0) >= delta:
        raise ConditionError(
            f"The tails of {sum(r.count for r in rounds)} rounds alone spend δ={tails(0.0):.3g} of {delta:g}; "
            "certify them with a smaller tail, or allow a larger delta."
        )
    # As a function of e^ε, δ is convex, and what the variation adds is a line that rises. So where both together are
    # small enough up to some limit, they are from a threshold on, and the search is sure to find that. Beyond the limit
    # chosen here, the variation alone would spend half of what the tails leave.
    limit = LARGEST_EPSILON
    if variation := math.fsum(r.count * r.variation for r in rounds):
        left = delta - math.fsum(r.count * r.tail_mass for r in rounds)
        limit = min(limit, math.log(max(1.0 + 1e-9, 0.5 * left / variation)))
    slack = _slack(rounds)
    found, start, step = math.inf, 1.0, 2.0
    if interval <= FINE and any(who.sampled for _, who in parts):
        # A coarse answer is sooner known, and near the fine one.
        start, step = _gaussian_epsilon(parts, delta, COARSE), _NEAR
    for profile in _profiles(parts, interval):

        def excess(epsilon: float, profile: Profile = profile) -> float:
            left = epsilon - 2.0 * slack
            if left < 0.0:
                return math.inf
            return _excess((profile(left) + tails(epsilon)) * math.exp(slack), delta)

        # A profile that needs more than another is not searched.
        limit = min(limit, found)
        if found < math.inf:
            start = limit
        found = min(found, _smallest(excess, start=min(start, limit), limit=limit, step=step))
    return found


def composed_delta(
    rounds: Sequence[Rounds], *, epsilon: float, participation: Participation, interval: float = FINE
) -> float:
    """Returns the smallest δ for which all rounds together are (epsilon, δ)-DP, rounded up; see `composed_epsilon`."""
    epsilon = min(_validate.finite("epsilon", epsilon), LARGEST_EPSILON)  # δ falls with ε
    if not rounds:
        return 0.0
    if participation.scheme == "once":
        return max(composed_delta([replace(r, count=1)], epsilon=epsilon, participation=_EVERY) for r in rounds)
    profiles = _profiles([(r, participation) for r in rounds], interval)
    slack = _slack(rounds)
    if (left := epsilon - 2.0 * slack) < min(0.0, epsilon):
        return 1.0
    return min(1.0, (min(profile(left) for profile in profiles) + _tails(rounds)(epsilon)) * math.exp(slack))


def _tails(rounds: Sequence[Rounds]) -> Profile:
    """Returns a function of ε: the δ that the rounds spend outside of their certified ranges."""
    tail = math.fsum(r.count * r.tail_mass for r in rounds) * (1.0 + 1e-12)
    variation = math.fsum(r.count * r.variation for r in rounds) * (1.0 + 1e-12)
    return lambda epsilon: tail + variation * (1.0 + math.exp(epsilon))


def _slack(rounds: Sequence[Rounds]) -> float:
    """Returns Λ, the slacks of all rounds added up, since likelihood ratios multiply."""
    return min(math.fsum(r.count * r.slack for r in rounds) * (1.0 + 1e-12), LARGEST_EPSILON)


def _profiles(parts: Sequence[Part], interval: float) -> list[Profile]:
    """Returns functions from ε to upper bounds on δ, without the tails."""
    total = _summed([r for r, _ in parts])

    def unsampled(epsilon: float) -> float:
        return gaussian.gdp_delta(total, epsilon)

    rates = [(r, math.nextafter(who.rate, 1.0)) for r, who in parts]
    sampled = [(r, rate) for r, rate in rates if rate < 1.0 or r.seen]
    if not sampled:
        return [unsampled]
    points = FINE_POINTS if interval <= FINE else COARSE_POINTS
    # The rounds without sampling are one Gaussian.
    others = _summed([r for r, rate in rates if rate == 1.0 and not r.seen])
    every = [SampledRounds(others, 1.0, 1)] if others > 0.0 else []
    # Sampling never costs privacy: given who was drawn, a client is in some of the rounds only, and divergences are
    # jointly convex.
    if any(participation.scheme == "fixed-size" for _, participation in parts):
        return [sampled_profile([*(_sampled_rounds(r, rate) for r, rate in sampled), *every], points), unsampled]
    return [poisson_profile([*(PoissonRounds(r.mu, rate, r.count) for r, rate in sampled), *every], points), unsampled]


def _sampled_rounds(rounds: Rounds, rate: float) -> SampledRounds:
    (mu, rate), *others = rounds.seen or [(rounds.mu, rate)]
    return SampledRounds(mu, rate, rounds.count, tuple(others))


def _summed(rounds: Sequence[Rounds]) -> float:
    """Returns √Σμ², rounded up: the μ of all rounds together if every client is in all of them."""
    return math.sqrt(math.fsum(r.count * r.mu * r.mu for r in rounds)) * (1.0 + 1e-14)


@dataclass(frozen=True)
class NoiseBudget:
    """The answer of `solve`: a number of rounds, their noise, and the ε that they cost."""

    epsilon: float
    delta: float
    noise_multiplier: float
    rounds: int
    participation: Participation


def solve(
    *,
    delta: float,
    participation: Participation,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    tail_mass: float = 0.0,
    tolerance: float = 1e-6,
) -> NoiseBudget:
    """Given two of (epsilon, noise_multiplier, rounds), finds the third, rounded to the safe side.

    Args:
        delta: Target δ.
        participation: The rounds that a client takes part in.
        epsilon: ε that may be spent.
        noise_multiplier: Standard deviation of the (equivalent) Gaussian noise over the sensitivity, 1/μ.
        rounds: Number of rounds.
        tail_mass: Added to δ by each round (see `GaussianCertificate.tail_mass`).
        tolerance: Relative width at which the search for the noise stops.

    Raises:
        ParameterError: Not exactly one of the three is missing, or any number of rounds costs the same.
        ConditionError: The tails alone spend δ, or not even one round fits.

    Example:
        >>> budget = solve(delta=1e-6, participation=Participation.every(), epsilon=2.0, noise_multiplier=50.0)
        >>> budget.rounds, round(budget.epsilon, 4)
        (502, 1.9989)
        >>> round(solve(delta=1e-6, participation=Participation.every(), epsilon=2.0, rounds=502).noise_multiplier, 3)
        49.975
    """
    limits: dict[str, Any] = {"participation": participation, "tail_mass": tail_mass}
    if epsilon is None and noise_multiplier is not None and rounds is not None:
        noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier)
    elif noise_multiplier is None and epsilon is not None and rounds is not None:
        noise_multiplier = least_noise(Claim(epsilon, delta), rounds=rounds, tolerance=tolerance, **limits)
    elif rounds is None and epsilon is not None and noise_multiplier is not None:
        rounds = most_rounds(Claim(epsilon, delta), noise_multiplier, **limits)
    else:
        raise ParameterError("Give exactly two of epsilon, noise_multiplier and rounds; the third is computed.")
    spent = [Rounds(_inverse(noise_multiplier), rounds, tail_mass)]
    cost = composed_epsilon(spent, delta=delta, participation=participation)
    return NoiseBudget(cost, delta, noise_multiplier, rounds, participation)


def least_noise(
    claim: Claim, *, rounds: int, participation: Participation, tail_mass: float = 0.0, tolerance: float = 1e-6
) -> float:
    """Returns the smallest noise multiplier with which `rounds` rounds keep the claim, rounded up.

    Raises:
        ConditionError: The tails alone spend δ.
    """
    epsilon = _validate.positive("epsilon", claim.epsilon)
    delta = _validate.probability("delta", claim.delta)
    rounds = _validate.integer("rounds", rounds, low=1)

    @cache
    def excess(noise: float) -> float:
        """log(δ(noise)/δ): decreasing, and zero at the answer."""
        spent = [Rounds(_inverse(noise), rounds, tail_mass)]
        found = composed_delta(spent, epsilon=epsilon, participation=participation, interval=COARSE)
        return _excess(found, delta)

    if tail_mass * participation.counted_rounds(rounds) >= delta:
        raise ConditionError(
            f"No noise makes {rounds} rounds ({rounded_up(epsilon)}, {delta:g})-DP: their tails alone spend δ. "
            "Certify them with a smaller tail, or allow a larger delta."
        )
    # As many rounds as there are make Gaussians of sampled ones, roughly: T q² (exp(μ²) - 1) = μ_T², the
    # central limit theorem of Bu, Dong, Long and Su 2020; without sampling it is just T μ².
    rate, counted = participation.rate, participation.counted_rounds(rounds)
    spread = gaussian.gdp_mu(epsilon, delta) / (rate * math.sqrt(counted))
    factor = math.exp(0.01)
    low = high = 1.0 / (spread if rate == 1.0 else math.sqrt(math.log1p(spread * spread)))
    while excess(high) > 0.0 and high <= _LARGEST_MULTIPLIER:
        low, high, factor = high, high * factor, factor * factor
    while low == high or excess(low) <= 0.0:
        high, low, factor = low, low / factor, factor * factor
        if low < 1.0 / _LARGEST_MULTIPLIER:
            return high
    # The search comes so near that rounding in a sum of losses could be felt.
    found = smallest_enough(excess, low, high, close=1.0 + 0.05 * tolerance) * (1.0 + 1e-10)
    if found > _LARGEST_MULTIPLIER:
        raise ConditionError(f"No noise multiplier under {_LARGEST_MULTIPLIER:g} is enough for {rounds} rounds.")
    return found


def most_rounds(claim: Claim, noise_multiplier: float, *, participation: Participation, tail_mass: float = 0.0) -> int:
    """Returns the largest number of rounds with this noise that keep the claim.

    Raises:
        ParameterError: Everybody takes part once, so that any number of rounds costs the same.
        ConditionError: A single round already exceeds the claim.
    """
    epsilon, delta = _validate.positive("epsilon", claim.epsilon), claim.delta
    mu = _inverse(_validate.positive("noise_multiplier", noise_multiplier))

    def affordable(count: int) -> bool:
        spent = [Rounds(mu, count, tail_mass)]
        return composed_delta(spent, epsilon=epsilon, participation=participation, interval=COARSE) <= delta

    if not affordable(1):
        raise ConditionError(
            f"Not even one round with noise multiplier {noise_multiplier:g} is ({rounded_up(epsilon)}, {delta:g})-DP; "
            "add noise."
        )
    if participation.scheme == "once":
        raise ParameterError("Where each client takes part at most once, any number of rounds costs as much as one.")
    most, over = 1, 2
    while affordable(over):
        most, over = over, 2 * over
        if over > 2**40:
            raise ConditionError("More than 10^12 rounds are affordable; the limit is not the privacy budget.")
    while over - most > 1:
        middle = (most + over) // 2
        most, over = (middle, over) if affordable(middle) else (most, middle)
    return most


def _inverse(noise_multiplier: float) -> float:
    """Returns μ = 1/multiplier, rounded up."""
    return 1.0 / noise_multiplier * (1.0 + 1e-15)


def _excess(needed: float, delta: float) -> float:
    """Returns log(needed/delta): above zero exactly if more than `delta` is needed, and infinity for no number."""
    if not needed < math.inf:
        return math.inf
    ratio = math.log(max(needed, _TINY) / delta)
    return max(ratio, _TINY) if needed > delta else min(ratio, 0.0)


def _smallest(excess: Callable[[float], float], *, start: float, limit: float, step: float = 2.0) -> float:
    """Returns the smallest x > 0 at which a falling function is at most zero; infinity if there is none up to `limit`.

    It is found from the side where it holds. The search begins at `start`, with steps that grow from the factor `step`
    to 2.
    """
    excess = cache(excess)
    low = high = start
    while not excess(high) <= 0.0:
        if high >= limit:
            return math.inf
        low, high, step = high, min(step * high, limit), min(step**3, 2.0)
    while low == high or excess(low) <= 0.0:
        high, low, step = low, low / step, min(step**3, 2.0)
        if low < 1e-9:
            return high
    return smallest_enough(excess, low, high, close=1.0 + 1e-12)
