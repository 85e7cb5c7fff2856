"""Gaussian noise: exact, rounded by every client, or correlated over the rounds of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Normal, RoundedNormal
from cpsgd.neighbours import Participation
from cpsgd.privacy import gaussian
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.promise import Claim
from cpsgd.run import Run

# The largest share of δ that noise which is only close to a Gaussian may cost in a plan.
_MOST_FOR_VARIATION = 0.1
# And of ε, half of it, for what its rounding tells.
_MOST_FOR_SLACK = 0.1


@dataclass(frozen=True)
class GaussianProof(Proof):
    """The proof for Gaussian noise, with the sampler's deviation from an exact Gaussian paid for.

    Attributes:
        rounded: Whether clients round what they send.
        correlated: Whether the noise of several rounds is one law.
    """

    name: str
    citation: str
    rounded: bool
    correlated: bool
    effort: int = 0

    def supports(self, run: Run) -> bool:
        """Returns whether the law is a Gaussian of this kind."""
        law = base.law_of(run)
        if isinstance(law, RoundedNormal):
            return self.rounded and law.method == self.name
        kind = False, run.protocol.mechanism.memory.one_event
        return isinstance(law, Normal) and kind == (self.rounded, self.correlated)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the exact ε of the Gaussian mechanism, with what rounding and the sampler cost."""
        if not base.alone(run):
            found = base.composed(run, delta, self, [0.0])
            return Proved(*found, f"{self.citation}; {base.COMPOSED[run.sampling.scheme]}")
        if self.rounded:
            return Proved(*_rounded_epsilon(run, delta), self.citation)
        law, sensitivity = _law(run), base.sensitivity(run)

        def prove(left: float) -> tuple[float, float]:
            return gaussian.analytic_epsilon(sigma=law.deviation, sensitivity=sensitivity, delta=left), 0.0

        return Proved(*base.with_sampler(run, delta, prove), self.citation)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the Gaussian mechanism itself."""
        return gaussian_cost(run)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale that keeps the claim, where the noise is near enough to a Gaussian."""
        mechanism, spent = run.protocol.mechanism, _spent(run, claim)
        slack = base.counted(run) * run.protocol.dim * mechanism.noise.slack(run.honest)
        if spent > _MOST_FOR_VARIATION or slack > _MOST_FOR_SLACK * claim.epsilon:
            raise ConditionError(f"The noise is too far from a Gaussian; {mechanism.sampler_remedy}.")
        return base.scale_for(run, _mu(run, claim, spent, slack) * _law(run).deviation * (1.0 - 1e-12))

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale with the sampler's cost, without the rounding's."""
        return base.ideal_scale(run, claim) * base.gaussian_mu(run, claim) / _mu(run, claim, _spent(run, claim))


def gaussian_cost(run: Run) -> Rounds:
    """Returns one round of Gaussian noise, with the sampler's total variation and the rounding's slack."""
    mechanism, dim = run.protocol.mechanism, run.protocol.dim
    return Rounds(
        base.sensitivity(run) / _law(run).deviation * (1.0 + 1e-14),
        variation=run.honest * dim * mechanism.noise.variation,
        slack=dim * mechanism.noise.slack(run.honest) * (1.0 + 1e-14),
    )


def _law(run: Run) -> Normal:
    law = base.law_of(run)
    assert isinstance(law, Normal)
    return law


def _rounded_epsilon(run: Run, delta: float) -> tuple[float, float]:
    """Returns ε of one round of rounded Gaussian noise, with the cost of rounding balanced against the rest."""
    cost = gaussian_cost(run)
    try:
        epsilon = composed_epsilon([cost], delta=delta, participation=Participation.every())
    except ConditionError:
        epsilon = math.inf
    if math.isinf(epsilon):
        remedy = run.protocol.mechanism.sampler_remedy
        raise ConditionError(f"rounding may cost all of δ={delta:g}; {remedy}")
    return epsilon, cost.variation * (1.0 + math.exp(epsilon)) * (1.0 + 1e-12)


def _spent(run: Run, claim: Claim) -> float:
    """Returns the share of δ that the sampler's total variation takes."""
    draws = base.counted(run) * run.honest * run.protocol.dim
    return draws * run.protocol.mechanism.noise.variation * (1.0 + math.exp(claim.epsilon)) / claim.delta


def _mu(run: Run, claim: Claim, spent: float, slack: float = 0.0) -> float:
    """Returns the largest μ of a round after `spent` of δ and the slack λ are paid; approximate if sampled."""
    if run.sampling.rate < 1.0:
        mu = base.gaussian_mu(run, claim) if spent < 1e-6 else base.sampled_mu(run, claim)
        return mu * (1.0 - 2.0 * slack / claim.epsilon)
    left = max(1.0 - spent * (1.0 + 1e-9), 1.0 - _MOST_FOR_VARIATION) * math.exp(-slack)
    mu = gaussian.gdp_mu(claim.epsilon - 2.0 * slack, claim.delta * left)
    return mu / math.sqrt(base.counted(run)) * (1.0 - 1e-14)


@dataclass(frozen=True)
class ClassicalLemma(Proof):
    """The lemma that the paper uses for Gaussian noise, valid for ε up to 1."""

    name: str = "gaussian-classical"
    citation: str = (
        'classical Gaussian mechanism: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, '
        "Theorem A.1"
    )
    effort: int = 1

    def supports(self, run: Run) -> bool:
        """Returns whether the run is one round of Gaussian noise."""
        return base.alone(run) and isinstance(base.law_of(run), Normal)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the lemma's ε, with what rounding and the sampler cost."""
        law, mechanism, sensitivity = _law(run), run.protocol.mechanism, base.sensitivity(run)
        slack = run.protocol.dim * mechanism.noise.slack(run.honest)

        def prove(left: float) -> tuple[float, float]:
            if slack > 1.0:  # and e^-λ δ may be zero
                raise ConditionError(f"rounding may add more than 1 to ε; {mechanism.sampler_remedy}")
            found = gaussian.classical_epsilon(
                sigma=law.deviation, sensitivity=sensitivity, delta=left * math.exp(-slack)
            )
            return found + 2.0 * slack, 0.0

        return Proved(*base.with_sampler(run, delta, prove), self.citation)


PROOFS = (
    GaussianProof(
        "gaussian-analytic",
        'exact Gaussian mechanism: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", '
        "ICML 2018, Theorem 8",
        rounded=False,
        correlated=False,
    ),
    GaussianProof(
        "rounded-gaussian",
        "rounding of the exact Gaussian mechanism (docs/proofs/rounded-gaussian.md), by Balle and Wang, "
        "ICML 2018, Theorem 8",
        rounded=True,
        correlated=False,
    ),
    GaussianProof(
        "correlated-gaussian",
        "Gaussian noise correlated over the rounds of a run, rounded (docs/proofs/correlated-gaussian.md), on Denisov, "
        'McMahan, Rush, Smith and Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear '
        'Operators on Adaptive Streams", NeurIPS 2022, and Balle and Wang, ICML 2018, Theorem 8',
        rounded=True,
        correlated=True,
    ),
    ClassicalLemma(),
)
