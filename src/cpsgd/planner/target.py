"""`Target`: the claim that a plan must keep, and the smallest scale of a mechanism that keeps it.

For given levels and noise, privacy depends on one number, S = Δ/s. Δ is 2D for replace-one, if no smaller distance is
stated, and D for zero-out. The more levels two neighbours can be apart, the less the same noise hides. The proofs turn
the claim into the largest allowed S, hence the smallest s. They are evaluated here in the form that answers this
backwards question at once; where the law itself depends on the scale, by trying. The guarantee of a plan comes from
`cpsgd.privacy.guarantees` on the finished protocol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from cpsgd.errors import ConditionError
from cpsgd.mechanisms import Gaussian, Mechanism
from cpsgd.mechanisms.whole_laplace import WholeLaplace
from cpsgd.privacy.proofs import supporting
from cpsgd.privacy.proofs.argument import Proof, gaussian_mu, planned_variation
from cpsgd.promise import Claim, Conditions
from cpsgd.protocol import Protocol
from cpsgd.run import Run


@dataclass(frozen=True)
class Target:
    """A claim about vectors of this kind on these conditions.

    Attributes:
        claim: The (ε, δ) required.
        conditions: The rounds, with the fewest messages in each; about whole clients.
        dim: d.
        clip_norm: D.
        replace_one_distance: The largest distance of two clients' vectors, where it is stated to be less than 2D.
        replace_one_l1_distance: The largest sum of absolute differences of two clients' vectors, where it is stated.
        levels: k and X, where all coordinates are on k levels from -X to X.
        draft: Whether scales that are a few percent larger than the smallest will do, if they are sooner known.
    """

    claim: Claim
    conditions: Conditions
    dim: int
    clip_norm: float
    replace_one_distance: float | None = None
    replace_one_l1_distance: float | None = None
    levels: tuple[int, float] | None = None
    draft: bool = False

    def run(self, mechanism: Mechanism) -> Run:
        """Returns the run of a mechanism without rotation, which does not change privacy."""
        stated = (self.replace_one_distance, self.replace_one_l1_distance)
        protocol = Protocol(
            clients=self.conditions.surviving,
            dim=self.dim,
            clip_norm=self.clip_norm,
            mechanism=mechanism,
            rotate=False,
            replace_one_distance=stated[0],
            replace_one_l1_distance=stated[1],
            distance_reason=None if stated == (None, None) else "planned",
        )
        return Run(protocol, self.conditions).of_one_client

    @property
    def honest(self) -> int:
        """Clients whose noise counts: neither dropped out nor colluding."""
        return self.conditions.honest

    @property
    def distance(self) -> float:
        """Δ, the largest distance of two neighbours' vectors."""
        return self.conditions.adjacency.distance(self.clip_norm, self.replace_one_distance)

    @cached_property
    def gaussian_mu(self) -> float:
        """The largest μ of one round of an exactly Gaussian mechanism, which has no tails to pay for."""
        return gaussian_mu(self.run(Gaussian(sigma=1.0)), self.claim)

    @property
    def laplace_spread(self) -> float:
        """b, the spread of Laplace noise that keeps (ε, 0) over all rounds: Δ₁ is at most √d Δ, or what is stated."""
        rounds = self.conditions.participation.counted_rounds(self.conditions.rounds)
        apart = min(math.sqrt(self.dim) * self.distance, self.replace_one_l1_distance or math.inf)
        if self.levels is not None:
            levels, reach = self.levels
            on = WholeLaplace(levels=levels, coordinate_range=reach, spread=0, divisor=1, shares=1, window=levels)
            steps = on.levels_apart(dim=self.dim, clip_norm=self.clip_norm, adjacency=self.conditions.adjacency)
            apart = min(apart, steps * on.scale)
        return rounds * apart / self.claim.epsilon

    @cached_property
    def variation(self) -> float:
        """The total variation per draw that a sampler may have."""
        return planned_variation(self.conditions, self.dim, self.claim)

    def ideal_scale(self, mechanism: Mechanism) -> float:
        """Returns an approximate lower bound on the scale: for most, the scale of a Gaussian of equal variance."""
        run = self.run(mechanism)
        return min(proof.least_scale(run, self.claim) for proof in self._planning(run))

    def might_keep(self, mechanism: Mechanism) -> bool:
        """Returns False if a mechanism at its present scale can hardly keep the claim: a quick check, not a proof."""
        run = self.run(mechanism)
        return any(proof.might_keep(run, self.claim) for proof in self._planning(run))

    def rough_scale(self, mechanism: Mechanism) -> float:
        """Returns an estimate of the scale that the quickest proof needs, used only to rank candidates."""
        run = self.run(mechanism)
        return self._planning(run)[0].rough_scale(run, self.claim)

    def quick_scale(self, mechanism: Mechanism) -> float:
        """Returns the smallest scale by the quickest proof, or an estimate if that is slow or missing."""
        run = self.run(mechanism)
        first = self._planning(run)[0]
        try:
            return first.scale(run, self.claim) if first.quick else first.rough_scale(run, self.claim)
        except ConditionError:
            return first.rough_scale(run, self.claim)

    def quickly_certified(self, mechanism: Mechanism) -> bool:
        """Returns whether the quickest proof proves anything about this noise."""
        run = self.run(mechanism)
        first = self._planning(run)[0]
        try:
            return first.quick and first.scale(run, self.claim) >= 0.0
        except ConditionError:
            return False

    def smallest_scale(self, mechanism: Mechanism, wanted: float = 0.0) -> float:
        """Returns the smallest scale, rounded up, at which a mechanism's rounding and noise keep the claim.

        Zero where the coordinates' clipping alone keeps neighbours close enough, whatever s is.

        Args:
            mechanism: Its own scale does not matter.
            wanted: A scale that is taken anyway where privacy allows it. Where it does, this may be returned.

        Raises:
            ConditionError: No proof exists for so little noise.
        """
        run = self.run(mechanism)
        found = math.inf
        reason: ConditionError | None = None
        for proof in self._planning(run):
            try:
                found = min(found, proof.scale(run, self.claim, known=found, wanted=wanted, draft=self.draft))
            except ConditionError as error:
                reason = error
        if math.isinf(found):
            raise reason or ConditionError(f"No proof exists for {mechanism.name}.")
        return found

    def closed_form(self, mechanism: Mechanism) -> bool:
        """Returns whether the scale follows from a formula, without a search."""
        return self._planning(self.run(mechanism))[0].effort == 0

    def found_by_trying(self, mechanism: Mechanism) -> bool:
        """Returns whether scales are found by trying the final proof again and again."""
        return not self._planning(self.run(mechanism))[0].quick

    def _planning(self, run: Run) -> list[Proof]:
        """Returns the proofs that compute a scale, the same for all mechanisms of a kind."""
        kind = type(run.protocol.mechanism)
        if kind not in self._proofs:
            self._proofs[kind] = [proof for proof in supporting(run) if type(proof).scale is not Proof.scale]
        return self._proofs[kind]

    @cached_property
    def _proofs(self) -> dict[type[Mechanism], list[Proof]]:
        return {}
