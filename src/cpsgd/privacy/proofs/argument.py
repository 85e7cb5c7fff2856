"""`Proof`: the questions that every proof answers about a run, and what proofs share.

The run of a proof is about whole clients: single examples are accounted for by a protocol of their own
(`cpsgd.privacy.one_example`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law, Normal, Steps
from cpsgd.neighbours import Participation, SeenSampling
from cpsgd.privacy import accountant, gaussian
from cpsgd.privacy.accountant import LARGEST_EPSILON, Rounds, composed_epsilon
from cpsgd.promise import Claim, Conditions
from cpsgd.run import Run

SAMPLED_TAIL_SHARE = 0.01
"""Share of δ that pays for the certificate's tails under sampling, where trying several would take too long."""

TAIL_SHARES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)
"""Shares of δ for the certificates' tails that are tried without sampling."""

COMPOSED = {
    "once": "each client is in one round only, so the costliest round counts",
    "every": "Gaussians compose as √Σμ² (Dong, Roth and Su 2022, Corollary 3.3)",
    "poisson": "Poisson-sampled Gaussians by privacy loss distributions (docs/proofs/fixed-size.md), on Doroshenko, "
    "Ghazi, Kamath, Kumar, Manurangsi 2022",
    "fixed-size": "sampling without replacement (docs/proofs/fixed-size.md), on Balle, Barthe and Gaboardi 2018, "
    "Theorem 2, and Zhu, Dong and Wang 2022, Theorem 10",
}
"""The theorem by which equivalent Gaussians of rounds compose, by scheme of participation."""

# Shares of δ that may pay for the noise sampler's resolution.
_SAMPLER_SHARES = (1e-6, 0.1)
# Half of what is put aside at most: the planner's samplers.
_PLANNED_SAMPLER_SHARE = 0.05
_TOLERANCE = 1e-4
# Numbers of colluders that are told apart: where a cost is a closed form, and where it is a certificate.
_CLOSED_PIECES, _PIECES = 8, 3


@dataclass(frozen=True)
class Proved:
    """An ε that is proved.

    Attributes:
        epsilon: ε, rounded up.
        tail: The part of δ that pays for tails and for the noise sampler's resolution.
        citation: The theorem behind it.
    """

    epsilon: float
    tail: float
    citation: str


class Proof(ABC):
    """One way to prove that a run is differentially private."""

    name: str
    """Its name in guarantees."""

    citation: str
    """The theorem behind it."""

    effort: int
    """Proofs are tried in rising order: 0 for closed forms, 2 for the quickest certificate."""

    pure: ClassVar[bool] = False
    """Whether it proves anything at δ = 0."""

    quick: ClassVar[bool] = True
    """Whether `scale` is quickly computed."""

    comparison: ClassVar[bool] = False
    """Whether its ε is shown and never returned as the guarantee."""

    def label(self, run: Run) -> str:
        """Returns the name under which its result for a run is shown."""
        return self.name

    @abstractmethod
    def supports(self, run: Run) -> bool:
        """Returns whether the proof is about runs of this kind."""

    @abstractmethod
    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the ε that is proved for a run at this δ.

        `below` is an ε that is proved already: a proof that cannot come below it need not be computed.

        Raises:
            ConditionError: Nothing is proved; the message says what would help.
        """

    # ------------------------------------------------------------------ for composition with rounds of other runs

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns one round as an equivalent Gaussian, with a tail of this mass; raises where the proof gives none."""
        raise ConditionError(f"{self.name} gives no equivalent Gaussian.")

    def joint_cost(self, run: Run, tail: float) -> Rounds:
        """Returns all rounds together as equivalent Gaussians, with a tail of mass `tail` per round."""
        raise ConditionError(f"{self.name} gives no equivalent Gaussian of several rounds.")

    # ------------------------------------------------------------------ for the planner

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale, rounded up, with which a run of the mechanism keeps the claim.

        Zero where the clipping of coordinates alone keeps neighbours close enough, whatever the scale is.

        Args:
            run: The scale of its mechanism does not matter.
            claim: The (ε, δ) to keep.
            known: A scale that is proved to be enough; a proof that gains next to nothing need not be computed.
            wanted: A scale that is taken anyway where privacy allows it, and may then be returned.
            draft: Whether a scale that is a few percent larger will do, if it is sooner known.

        Raises:
            ConditionError: No scale is proved to be enough.
        """
        raise ConditionError(f"{self.name} is not used for planning.")

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns an estimate of the scale that will be needed, used only to rank candidates."""
        return ideal_scale(run, claim)

    def might_keep(self, run: Run, claim: Claim) -> bool:
        """Returns False if a run can hardly keep the claim at its present scale: a quick check, not a proof."""
        return True

    def least_scale(self, run: Run, claim: Claim) -> float:
        """Returns an approximate lower bound on `scale`: the scale of a Gaussian of the same variance."""
        return ideal_scale(run, claim)


# ------------------------------------------------------------------ a run, as proofs see it


def check(run: Run) -> None:
    """Raises `ConditionError` or `ParameterError` where no proof can be about a run."""
    protocol, memory = run.protocol, run.protocol.mechanism.memory
    memory.check_run(run.rounds, run.sampling)
    if run.honest < 1:
        raise ConditionError(
            f"No honest client's noise is in the sum (surviving={run.surviving}, colluding={run.colluding}): there is "
            "no privacy."
        )
    for size, _ in run.sizes:
        memory.check_messages(size, protocol.clients)
        memory.check_honest(size - run.colluding, run.colluding, protocol.clients)


def law_of(run: Run) -> Law | Normal | Steps:
    """Returns the law of the noise in a sum with the fewest honest clients."""
    return run.protocol.mechanism.noise.law(run.honest)


def sensitivity(run: Run) -> float:
    """Returns S, the largest Euclidean distance of neighbours in units of the noise's law."""
    return run.protocol.sensitivity(run.adjacency)


def alone(run: Run) -> bool:
    """Returns whether the run needs no composition: it has one unsampled round, or one law for all rounds."""
    scheme = run.sampling
    whole = run.protocol.mechanism.memory.one_event or scheme.scheme == "once"
    return whole or (run.rounds == 1 and not scheme.sampled)


def counted(run: Run) -> int:
    """Returns the number of rounds that count for one client."""
    return 1 if alone(run) else run.rounds


def of_size(run: Run, size: int, count: int = 1) -> Run:
    """Returns the run with `count` rounds of this many messages alone."""
    return replace(run, conditions=replace(run.conditions, sizes=((size, count),)))


def moved(run: Run) -> float:
    """Returns a bound on the total variation between the sampled noise of all rounds and its exact law."""
    honest = [(size - run.colluding, count) for size, count in run.sizes]
    draws = max(size for size, _ in honest) if alone(run) else sum(size * count for size, count in honest)
    return draws * run.protocol.dim * run.protocol.mechanism.noise.variation


def with_sampler(
    run: Run, delta: float, prove: Callable[[float], tuple[float, float]], *, least: float = 0.0
) -> tuple[float, float]:
    """Returns ε and the part of δ for tails, where the noise sampler's resolution is paid for, too.

    If both neighbours' output laws are within v of the ones the proof is about, (1 + e^ε) v must be left over from δ.
    A share is put aside first, and ε is accepted if the share turns out to be enough. A larger share only makes ε
    larger: where the largest would not pay for the ε known so far, the proof is not asked again.

    Args:
        run: The run whose sampler is paid for.
        delta: δ in total.
        prove: From the δ that is left to ε and the part of it for tails.
        least: An ε that `prove` does not come below. Shares that would not pay for it are not tried.

    Raises:
        ConditionError: The sampler would cost too much, or `prove` raised it.
    """
    variation = moved(run)

    def price(epsilon: float) -> float:
        return variation * (1.0 + math.exp(min(epsilon, 700.0))) * (1.0 + 1e-12)

    epsilon = least
    for share in _SAMPLER_SHARES if variation else (0.0,):
        if price(epsilon) > share * delta:
            continue
        epsilon, tail = prove(delta * (1.0 - share))
        if epsilon > LARGEST_EPSILON and not alone(run):
            raise ConditionError(f"ε would be over {LARGEST_EPSILON:g}; run fewer rounds or add noise")
        if price(epsilon) <= share * delta * (1.0 - 1e-9) or not variation:
            return epsilon, tail + price(epsilon)
    spent = price(epsilon)
    cost = f"{spent:.2g} of δ={delta:g} at ε={rounded_up(epsilon)}"
    raise ConditionError(f"the noise sampler's resolution would cost {cost}; {run.protocol.mechanism.sampler_remedy}")


def counted_tail(scheme: Participation) -> float:
    """Returns the share of a certificate's tail that counts: under fixed-size sampling, of rounds the client is in."""
    return math.nextafter(scheme.rate, 1.0) if scheme.scheme == "fixed-size" else 1.0


def seen_cost(run: Run, proof: Proof, tail: float, sampling: Participation) -> Rounds:
    """Returns one round as equivalent Gaussians, for colluders who see how many of them take part.

    `seen` of the result has a pair (μ, rate) for every number of colluders in the sum. Where there are many numbers,
    neighbouring ones share a pair: the μ beside the most colluders, and the rate beside the fewest.

    Args:
        run: One round with the fewest messages that it may have.
        proof: The proof that gives equivalent Gaussians.
        tail: The probability of tails that the proof may leave out.
        sampling: The sampling scheme, as colluders see it.
    """
    if not isinstance(sampling, SeenSampling):
        return proof.cost(run, tail)
    pieces = min(_CLOSED_PIECES if proof.effort == 0 else _PIECES, sampling.colluding + 1)
    edges = [(sampling.colluding + 1) * i // pieces for i in range(pieces + 1)]
    costs, seen = [], []
    for first, after in pairwise(edges):
        honest = run.honest + sampling.colluding - (after - 1)
        conditions = replace(of_size(run, honest).conditions, participation=sampling, colluding=0)
        costs.append(proof.cost(replace(run, conditions=conditions), tail))
        seen.append((costs[-1].mu, sampling.rate_beside(first)))
    return replace(accountant.costliest(costs), seen=tuple(seen))


def composed(run: Run, delta: float, proof: Proof, shares: Sequence[float]) -> tuple[float, float]:
    """Returns the smallest ε of rounds as equivalent Gaussians over these shares of δ for the tails, and their cost.

    Raises:
        ConditionError: Nothing is proved about these rounds: they are too many, or have too little noise.
    """
    found: list[tuple[float, float]] = []
    failures: list[ConditionError] = []
    for share in shares:
        try:
            spent = [
                replace(seen_cost(of_size(run, size), proof, share * delta / run.rounds, run.sampling), count=count)
                for size, count in run.sizes
            ]
            epsilon = composed_epsilon(spent, delta=delta, participation=run.sampling)
            tail = sum(r.count * (r.tail_mass + r.variation * (1.0 + math.exp(epsilon))) for r in spent)
            found.append((epsilon, tail))
        except ConditionError as error:
            failures.append(error)
    if not found:
        raise failures[-1]
    best = min(found, key=lambda pair: pair[0])
    if math.isinf(best[0]):
        reason = "ε would be over 500"
        if run.protocol.mechanism.noise.variation > 0.0:
            reason += ", or so large that the noise sampler's resolution spends δ"
        raise ConditionError(f"Nothing is proved about {run.rounds} such rounds ({reason}); run fewer or add noise.")
    return best


# ------------------------------------------------------------------ from a claim to a scale


def gaussian_mu(run: Run, claim: Claim) -> float:
    """Returns the largest μ of one round of an exactly Gaussian mechanism, which has no tails to pay for."""
    return _gaussian_mu(claim, counted(run), run.sampling)


def sampled_mu(run: Run, claim: Claim) -> float:
    """Returns approximately the largest μ of one sampled round, with a share of δ set aside for tails."""
    return _sampled_mu(claim, counted(run), run.sampling)


@lru_cache(maxsize=256)
def _gaussian_mu(claim: Claim, rounds: int, participation: Participation) -> float:
    if participation.rate == 1.0:
        return gaussian.gdp_mu(claim.epsilon, claim.delta) / math.sqrt(rounds) * (1.0 - 1e-14)
    return 1.0 / accountant.least_noise(claim, rounds=rounds, participation=participation, tolerance=_TOLERANCE)


@lru_cache(maxsize=256)
def _sampled_mu(claim: Claim, rounds: int, participation: Participation) -> float:
    """Returns approximately the largest μ per round at which sampled rounds keep the claim, with δ left for tails."""
    mu, left = _gaussian_mu(claim, rounds, participation), claim.delta * (1.0 - SAMPLED_TAIL_SHARE)
    while True:
        mu *= 1.0 - 2.0 * _TOLERANCE
        spent = accountant.composed_delta(
            [Rounds(mu=mu, count=rounds)],
            epsilon=claim.epsilon,
            participation=participation,
            interval=accountant.COARSE,
        )
        if spent <= left:
            return mu


def planned_variation(conditions: Conditions, dim: int, claim: Claim) -> float:
    """Returns the total variation per draw that a planned sampler may have.

    All draws together may move the law of the output by so little that (1 + e^ε) times that is a small share of δ.
    """
    draws = conditions.participation.counted_rounds(conditions.rounds) * conditions.honest * dim
    return _PLANNED_SAMPLER_SHARE * claim.delta / (1.0 + math.exp(claim.epsilon)) / draws


def distance(run: Run) -> float:
    """Returns Δ, the largest distance of two neighbours' vectors."""
    return run.adjacency.distance(run.protocol.clip_norm, run.protocol.replace_one_distance)


def ideal_scale(run: Run, claim: Claim) -> float:
    """Returns the scale that a Gaussian of equal variance needs: about the least that any certificate can reach."""
    deviation = math.sqrt(run.honest * run.protocol.mechanism.noise.variance)
    return distance(run) / (deviation * gaussian_mu(run, claim))


def scale_for(run: Run, allowed: float) -> float:
    """Returns the smallest scale at which neighbours are at most `allowed` apart; 0 if the range ensures that."""
    protocol = run.protocol
    if allowed >= math.sqrt(protocol.dim) * protocol.reach(run.adjacency):
        return 0.0
    scale = distance(run) / allowed * (1.0 + 1e-12)
    # A distance that is stated grows by the grid's resolution, hence with s; never beyond 2D, so this ends.
    while (found := sensitivity(scaled(run, scale))) > allowed:
        scale *= found / allowed * (1.0 + 1e-12)
    return scale


def scaled(run: Run, scale: float) -> Run:
    """Returns the run with another scale of its mechanism."""
    protocol = run.protocol
    return replace(run, protocol=replace(protocol, mechanism=protocol.mechanism.with_scale(scale)))
