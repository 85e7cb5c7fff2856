"""What a mechanism's authors published, for comparison: shown beside the guarantee, never returned as it.

The paper's Theorem 1 is false where neighbours differ by several standard deviations of the noise: like the classical
Gaussian lemma, whose limit ε <= 1 it lacks, it has no term for the mean μ²/2 of the privacy loss. Bin(200,000, ½) noise
and a distance of 1,000 is an example, with ε = 26.4 at δ = 1e-5 by the theorem and an exact δ of 6e-5 at that ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cpsgd.errors import ConditionError
from cpsgd.privacy.proofs import interface as base
from cpsgd.privacy.proofs.interface import Proof, Proved
from cpsgd.privacy.proofs.per_round import CITATION, check_composable, optimal_composition
from cpsgd.registry import MECHANISMS
from cpsgd.run import Run

# Shares of δ that are spent on the rounds themselves; composition gets the rest.
_SHARES = (0.9, 0.5, 0.1, 0.01, 1e-3)


@dataclass(frozen=True)
class Published(Proof):
    """The accounting by the authors of one mechanism, rounds composed optimally."""

    name: str
    citation: str
    effort: int = 6
    comparison: ClassVar[bool] = True

    def label(self, run: Run) -> str:
        """Returns the name, and that rounds are composed."""
        return self.name if base.alone(run) else f"{self.name} + optimal composition"

    def supports(self, run: Run) -> bool:
        """Returns whether it is their mechanism."""
        published = run.protocol.mechanism.published
        return published is not None and published[0] == self.name

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns their ε."""
        if not base.alone(run):
            check_composable(run)
            return Proved(published_epsilon(run, delta), 0.0, CITATION)
        mechanism = run.protocol.mechanism

        def prove(left: float) -> tuple[float, float]:
            return mechanism.published_epsilon(run.protocol, left, run.adjacency, run.honest), 0.0

        return Proved(*base.with_sampler(run, delta, prove), self.citation)


def published_epsilon(run: Run, delta: float) -> float:
    """Returns ε by the published accounting of the protocol's mechanism, rounds composed optimally.

    Raises:
        ConditionError: The published theorem does not apply to the protocol.
    """
    protocol, rounds, found = run.protocol, run.rounds, math.inf
    for share in _SHARES if rounds > 1 else (1.0 - 1e-9,):
        each = share * delta / rounds
        epsilon = protocol.mechanism.published_epsilon(protocol, each, run.adjacency, run.honest)
        if not math.isfinite(epsilon):
            raise ConditionError("The published accounting gives no finite ε for one round.")
        composed = optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)
        found = min(found, composed)
    return found


PROOFS = tuple(Published(*kind.published) for kind in MECHANISMS.values() if kind.published is not None)
