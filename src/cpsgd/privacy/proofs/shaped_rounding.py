"""Gaussian noise whose rounding is shaped over the rounds of a run: silos that stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpsgd.correlated.shaped import ShapedNoise
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import RoundedNormal
from cpsgd.neighbours import Participation
from cpsgd.privacy import gaussian
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.promise import Claim
from cpsgd.run import Run

# The largest shares of δ and ε that distances from the exact Gaussian may cost in a plan.
_MOST_FOR_VARIATION, _MOST_FOR_SLACK = 0.1, 0.1


@dataclass(frozen=True)
class ShapedProof(Proof):
    """The theorem of docs/proofs/shaped-rounding.md: a run is a post-processing of the adaptive Gaussian mechanism."""

    name: str = "shaped-gaussian"
    citation: str = (
        "rounding errors shaped over the rounds of a run (docs/proofs/shaped-rounding.md), on Denisov, McMahan, Rush, "
        'Smith and Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive '
        'Streams", NeurIPS 2022, and Balle and Wang, ICML 2018, Theorem 8'
    )
    effort: int = 0

    def supports(self, run: Run) -> bool:
        """Returns whether the law is that of shaped rounding."""
        law = base.law_of(run)
        return isinstance(law, RoundedNormal) and law.method == self.name

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the exact ε of the Gaussian mechanism, with what rounding, samplers and the state's grid cost."""
        cost = _cost(run)
        try:
            epsilon = composed_epsilon([cost], delta=delta, participation=Participation.every())
        except ConditionError:
            epsilon = math.inf
        if math.isinf(epsilon):
            raise ConditionError(f"rounding may cost all of δ={delta:g}; {run.protocol.mechanism.sampler_remedy}")
        return Proved(epsilon, cost.variation * (1.0 + math.exp(epsilon)) * (1.0 + 1e-12), self.citation)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the run as one Gaussian mechanism."""
        return _cost(run)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale of noise that is a Gaussian, up to a total variation and a slack."""
        cost = _cost(run)
        spent = cost.variation * (1.0 + math.exp(claim.epsilon)) / claim.delta
        if spent > _MOST_FOR_VARIATION or cost.slack > _MOST_FOR_SLACK * claim.epsilon:
            raise ConditionError(f"The noise is too far from a Gaussian; {run.protocol.mechanism.sampler_remedy}.")
        left = claim.delta * (1.0 - spent * (1.0 + 1e-9)) * math.exp(-cost.slack)
        mu = gaussian.gdp_mu(claim.epsilon - 2.0 * cost.slack, left) * (1.0 - 1e-14)
        return base.scale_for(run, mu * _law(run).deviation * (1.0 - 1e-12))


def _law(run: Run) -> RoundedNormal:
    law = base.law_of(run)
    assert isinstance(law, RoundedNormal)
    return law


def _cost(run: Run) -> Rounds:
    """Returns the run as one Gaussian mechanism, with its total variation and its slack over all rounds."""
    noise, dim, honest = run.protocol.mechanism.noise, run.protocol.dim, run.honest
    assert isinstance(noise, ShapedNoise)
    variation = honest * dim * noise.variation + noise.state_variation(honest, dim)
    return Rounds(
        base.sensitivity(run) / _law(run).deviation * (1.0 + 1e-14),
        variation=variation * (1.0 + 1e-12),
        slack=dim * noise.run_slack(honest, run.protocol.clients) * (1.0 + 1e-14),
    )


PROOFS = (ShapedProof(),)
