"""Pure differential privacy of discrete Laplace noise, and of fewer or more shares of it than make it up.

Let a bound the logarithm of the ratio of neighbouring masses of the noise (`PolyaLaw.step_loss`). A coordinate at
distance τ = i + f (i whole, 0 <= f < 1) is rounded at random before the noise comes, and loses at most
i a + log(1 + f (e^a - 1)). That is at most (e^a - 1) τ, and at most a τ + c(a) with c the cumulant of rounding. So d
coordinates whose distances add up to at most S₁ lose at most

    ε = min((e^a - 1) S₁, a S₁ + d c(a)).

S₁ is at most √d S, d times the reach, and what the protocol states (`Protocol.l1_sensitivity`). Where the vectors that
noise is added to are enforced to be whole, and no two of them more than N levels apart (`Protocol.levels_apart`), it is
at most a N.

With fewer honest clients than shares masses are log-convex on either side of 0, and a coordinate never loses more than
H(⌈τ⌉), H(z) = log f(0)/f(z), which is concave: d coordinates lose at most d H(⌈S₁/d⌉ + 1), which may be less.
docs/proofs/pure-laplace.md has the proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cpsgd._lazy import Late
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.discrete_laplace import PolyaLaw
from cpsgd.mechanisms.sums import rounding_cumulant
from cpsgd.neighbours import Adjacency
from cpsgd.privacy.accountant import LARGEST_EPSILON, Rounds, pure_epsilon
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.promise import Claim
from cpsgd.run import Run

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

_SAFE = 1.0 + 1e-13


@dataclass(frozen=True)
class PureLaplace(Proof):
    """ε at δ = 0, by the L1 distance of neighbours; of several rounds added up."""

    name: str = "discrete-laplace"
    citation: str = (
        "discrete Laplace noise in shares (docs/proofs/pure-laplace.md), on Ács and Castelluccia 2011, Goryczka and "
        'Xiong 2015, and Ghosh, Roughgarden and Sundararajan, "Universally Utility-Maximizing Privacy Mechanisms", 2009'
    )
    effort: int = 0
    pure: ClassVar[bool] = True

    def supports(self, run: Run) -> bool:
        """Returns whether the noise is made of shares of discrete Laplace noise."""
        return isinstance(base.law_of(run), PolyaLaw)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the ε of all rounds that a client is in; sampled ones cost log(1 + q (e^ε - 1))."""
        each = [(self.cost(base.of_size(run, size), 0.0), count) for size, count in run.sizes]
        if base.alone(run):
            return Proved(max(cost.pure for cost, _ in each), 0.0, self.citation)
        rounds = [Rounds(cost.mu, count, pure=cost.pure) for cost, count in each]
        found = pure_epsilon([(part, run.sampling) for part in rounds])
        return Proved(found, 0.0, f"{self.citation}; pure ε add up")

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns one round: (ε, 0)-DP is μ-GDP with Φ(μ/2) = e^ε/(1 + e^ε) (Dong, Roth and Su 2022, section 2)."""
        epsilon = _epsilon(run)
        # log(e^-ε / (1 + e^-ε)), also where e^ε is too large a number.
        mu = -2.0 * float(special.ndtri_exp(-epsilon - math.log1p(math.exp(-epsilon))))
        return Rounds(mu * (1.0 + 1e-12) + 4e-15, pure=epsilon)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale at which the rounds' ε add up to no more than is allowed."""
        if (apart := run.protocol.levels_apart(run.adjacency)) is not None:
            if apart * _law(run).step_loss * _SAFE**2 > _each(run, claim):
                raise ConditionError(f"Neighbours are {apart:,} levels apart, which is too far for this noise.")
            return run.protocol.mechanism.scale
        allowed = _allowed(run, claim)
        if allowed >= run.protocol.dim * run.protocol.reach(run.adjacency):
            return 0.0
        scale = _distance(run) / allowed * (1.0 + 1e-12)
        # What is stated grows by the grid's resolution, hence with s; never beyond √d 2D, so this ends.
        while (found := base.scaled(run, scale).protocol.l1_sensitivity(run.adjacency)) > allowed:
            scale *= max(found / allowed, 1.0 + 1e-4) * (1.0 + 1e-12)
        return scale

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale that is needed if the range of coordinates does not help."""
        if (apart := run.protocol.levels_apart(run.adjacency)) is not None:
            return run.protocol.mechanism.scale * apart * _law(run).step_loss / _each(run, claim)
        return _distance(run) / _allowed(run, claim)

    def least_scale(self, run: Run, claim: Claim) -> float:
        """Returns a rough lower bound on `scale`; at δ > 0 rounds together may cost less than their summed ε."""
        return self.rough_scale(run, claim) / (1.0 if claim.delta == 0.0 else base.counted(run))


def _law(run: Run) -> PolyaLaw:
    law = base.law_of(run)
    assert isinstance(law, PolyaLaw)
    return law


def _each(run: Run, claim: Claim) -> float:
    """Returns the largest ε of a round, rounded down, with which all rounds add up to no more than is claimed."""
    each, rate = claim.epsilon / base.counted(run) * (1.0 - 1e-12), run.sampling.rate
    if rate == 1.0:
        return each
    # Beyond the largest ε sampling is not accounted for.
    return min(math.log1p(math.expm1(each) / rate), LARGEST_EPSILON) * (1.0 - 1e-12)


def _allowed(run: Run, claim: Claim) -> float:
    """Returns the largest S₁, rounded down, with which the rounds' ε add up to no more than is claimed."""
    loss, dim = _law(run).step_loss, run.protocol.dim
    allowed = _each(run, claim)
    total = max(allowed / math.expm1(loss), (allowed - dim * rounding_cumulant(loss)) / loss)
    return total * (1.0 - 1e-12)


def _distance(run: Run) -> float:
    """Returns the largest sum of absolute differences of two neighbours' vectors."""
    stated = run.protocol.replace_one_l1_distance if run.adjacency is Adjacency.REPLACE_ONE else None
    return min(math.sqrt(run.protocol.dim) * base.distance(run), stated or math.inf)


def _epsilon(run: Run) -> float:
    """Returns ε of one round, rounded up."""
    law, dim = _law(run), run.protocol.dim
    loss, farthest = law.step_loss, min(base.sensitivity(run), run.protocol.reach(run.adjacency))
    total = run.protocol.l1_sensitivity(run.adjacency) * _SAFE
    found = min(math.expm1(loss) * total, loss * total + dim * rounding_cumulant(loss))
    if (apart := run.protocol.levels_apart(run.adjacency)) is not None:
        found = min(found, loss * apart)
    if law.parts < law.shares:
        found = min(found, dim * law.losses(min(math.ceil(farthest), math.ceil(total / dim) + 1)))
    return found * _SAFE


PROOFS = (PureLaplace(),)
