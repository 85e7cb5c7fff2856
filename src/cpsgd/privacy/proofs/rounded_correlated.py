"""Correlated noise without noise of the client's own, rounded at random: clients that take part once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.rounded_runs import RunCost, run_cost
from cpsgd.promise import Claim
from cpsgd.run import Run

# Share of δ for everything that is left out, and of the sampler's in a plan.
_TAIL_SHARE, _MOST_FOR_VARIATION = 0.01, 0.02
# The smallest scale is looked for so often, and to this factor.
_TRIES, _CLOSE = 12, 0.9995


@dataclass(frozen=True)
class SlotsProof(Proof):
    """The theorem of docs/proofs/rounded-correlated.md: a run is as private as a Gaussian, up to a tail."""

    name: str = "rounded-correlated"
    citation: str = (
        "correlated Gaussian noise rounded at random (docs/proofs/rounded-correlated.md), on Denisov, McMahan, Rush, "
        'Smith and Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive '
        'Streams", NeurIPS 2022, and Balle and Wang, ICML 2018, Theorem 8'
    )
    effort: int = 2

    def supports(self, run: Run) -> bool:
        """Returns whether the noise is a `SlotsAndCoins` law."""
        return isinstance(base.law_of(run), SlotsAndCoins)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns ε of the run."""

        def prove(left: float) -> tuple[float, float]:
            found = _cost(run, _TAIL_SHARE * left)
            mu = math.sqrt(found.w) * (1.0 + 1e-14)
            return gdp_epsilon(mu, (left - found.tail_mass) * (1.0 - 2.0**-52)), found.tail_mass

        return Proved(*base.with_sampler(run, delta, prove), self.citation)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the run as an equivalent Gaussian."""
        found = _cost(run, tail)
        variation = run.honest * run.protocol.dim * run.protocol.mechanism.noise.variation
        return Rounds(math.sqrt(found.w) * (1.0 + 1e-14), 1, found.tail_mass, variation)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns approximately the smallest scale that keeps the claim."""
        if base.moved(run) * (1.0 + math.exp(claim.epsilon)) > _MOST_FOR_VARIATION * claim.delta:
            raise ConditionError(f"The sampler costs too much of δ; {run.protocol.mechanism.sampler_remedy}.")
        mu = gdp_mu(claim.epsilon, claim.delta * (1.0 - _TAIL_SHARE - _MOST_FOR_VARIATION) * (1.0 - 1e-9))
        scale, enough = self.rough_scale(run, claim), math.inf
        for _ in range(_TRIES):
            here = base.scaled(run, scale)
            scale = here.protocol.mechanism.scale
            try:
                found = math.sqrt(_cost(here, _TAIL_SHARE * claim.delta * (1.0 - 2.0 * _MOST_FOR_VARIATION)).w)
            except ConditionError:
                if enough < math.inf:
                    break
                scale *= 1.3
                continue
            if found <= mu:
                enough = min(enough, scale)
            following = scale * found / mu * (1.0 + 1e-4)
            if following >= enough * _CLOSE:
                break
            scale = following
        if enough < math.inf:
            return enough
        raise ConditionError(f"No scale of {run.protocol.mechanism.name} was found that keeps the target.")

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale by the noise of slots alone."""
        law = base.law_of(run)
        assert isinstance(law, SlotsAndCoins)
        deviation = law.deviation * math.sqrt(max(law.untold, 1)) / law.weighting.column_norm
        return float(base.distance(run) / (deviation * base.gaussian_mu(run, claim)))


def _cost(run: Run, tail: float) -> RunCost:
    law = base.law_of(run)
    assert isinstance(law, SlotsAndCoins)
    if law.weighting.separation is not None:
        raise ConditionError("Noise that is rounded at random is proved for clients in one round of the run only.")
    if not tail > 0.0:
        raise ConditionError("Nothing is proved about noise that is rounded at random without a part of δ for tails.")
    return run_cost(
        law,
        distance=base.sensitivity(run),
        reach=run.protocol.reach(run.adjacency),
        dim=run.protocol.dim,
        tail=tail,
    )


PROOFS = (SlotsProof(),)
