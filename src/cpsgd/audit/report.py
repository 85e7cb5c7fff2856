"""What an audit found, and what was claimed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpsgd.audit.checks import Check
from cpsgd.audit.lattice import Array
from cpsgd.privacy.guarantee import Guarantee


@dataclass(frozen=True)
class Claim:
    """What is claimed and what was found at one δ.

    Attributes:
        delta: δ.
        claimed: ε that is proved, an upper bound.
        found: ε that the attack proves, a lower bound that holds for all δ at once but for the audit's false-alarm
            probability.
    """

    delta: float
    claimed: float
    found: float


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        claimed: The guarantee under audit.
        lower_bound: ε at the guarantee's δ that the attack proves with `confidence`.
        confidence: Of `lower_bound`.
        claims: Claimed and found ε at several δ, the guarantee's first. These decide.
        canary: The canary that did best.
        promises: For every canary, ε that it promised when canaries were compared.
        rounds: Rounds played in all.
        attacked_rounds: Rounds behind the lower bounds.
        surviving: Messages of a round.
        false_alarm: Probability that an honest transport fails.
        error_rates: The attacker's two error rates, (false alarms, misses), from one end to the other.
        checks: The attack's verdict and the checks of the law.
    """

    claimed: Guarantee
    lower_bound: float
    confidence: float
    claims: tuple[Claim, ...]
    canary: str
    promises: tuple[tuple[str, float], ...]
    rounds: int
    attacked_rounds: int
    surviving: int
    false_alarm: float
    error_rates: tuple[tuple[float, float], ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the claim."""
        return all(check.passed for check in self.checks)

    def claimed_misses(self, false_alarms: Array) -> Array:
        """The claimed trade-off: the least share of misses at these shares of false alarms.

        Of every (ε, δ) that is claimed, 1 - δ - e^ε α and e^-ε (1 - δ - α) (Dong, Roth and Su, "Gaussian Differential
        Privacy", 2022, Proposition 3).
        """
        lines = [np.zeros_like(false_alarms)]
        for claim in self.claims:
            lines.append(1.0 - claim.delta - math.exp(claim.claimed) * false_alarms)
            lines.append(math.exp(-claim.claimed) * (1.0 - claim.delta - false_alarms))
        highest: Array = np.max(lines, axis=0)
        return highest

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "passed": self.passed,
            **vars(self),
            "claimed": self.claimed.to_dict(),
            "claims": [vars(claim) for claim in self.claims],
            "promises": dict(self.promises),
            "error_rates": [list(pair) for pair in self.error_rates],
            "checks": [{**vars(check), "passed": check.passed} for check in self.checks],
        }
