"""A lower bound on ε from one run of training, by canaries of which half were left out.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023. Each of m canaries is put into
the training with probability ½, independently. Afterwards the auditor guesses r of the coins from the result and
abstains from the others. If training is (ε, δ)-differentially private for adding or removing one canary, the number W
of right guesses satisfies (their Theorem 5.2)

    P(W >= v) <= P(W' >= v) + 2 m δ max_{1 <= i <= v} P(v - i <= W' < v) / i,   W' ~ Binomial(r, e^ε/(1 + e^ε)).

An ε for which this is at most γ is refuted with confidence 1 - γ. How many guesses are best depends on ε; a few numbers
are tried, each with its share of γ.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from cpsgd import _validate
from cpsgd._numbers import rounded_down
from cpsgd.errors import ParameterError

# Shares of the canaries that are guessed.
_SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
FEWEST = 8
"""Fewest canaries that an audit takes."""
_LARGEST = 50.0


@dataclass(frozen=True)
class OneRunReport:
    """Findings of canaries about a trained model.

    Attributes:
        epsilon: A lower bound on the true ε, with `confidence`.
        delta: δ that it goes with.
        confidence: Probability that the bound is right, over the canaries' coins and the training.
        claimed: The ε that was claimed for this δ.
        canaries: m, all canaries, in and out.
        guesses: r, of the best number of guesses.
        right: Right ones among them.
        unit: What a canary stands for: an example, or a client.
    """

    epsilon: float
    delta: float
    confidence: float
    claimed: float
    canaries: int
    guesses: int
    right: int
    unit: str = "example"

    @property
    def passed(self) -> bool:
        """Whether the claim is not refuted."""
        return self.epsilon <= self.claimed

    @property
    def finding(self) -> str:
        """The bound with its confidence, in words."""
        return f"ε ≥ {rounded_down(self.epsilon)} with {100.0 * self.confidence:g} % confidence"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"finding": self.finding, **asdict(self), "passed": self.passed}


def audit_scores(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    *,
    claimed: float,
    delta: float,
    confidence: float = 0.95,
    unit: str = "example",
) -> OneRunReport:
    """Returns the lower bound on ε from canaries' scores; a high score suggests that a canary was trained on.

    Half of the guesses are "in", for the highest scores, and half are "out", for the lowest.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> included = generator.random(10_000) < 0.5
        >>> scores = included + generator.normal(size=10_000)
        >>> report = audit_scores(scores, included, claimed=1.0, delta=1e-6)
        >>> report.passed, report.guesses, round(report.epsilon, 2)
        (False, 1000, 1.96)
    """
    count = len(scores)
    if count != len(included) or count < FEWEST:
        raise ParameterError(f"Expected at least {FEWEST} canaries with a score each, got {count} scores.")
    error = 1.0 - _validate.probability("confidence", confidence)
    order = np.argsort(scores, kind="stable")
    sizes = sorted({int(count * share) // 2 for share in _SHARES if count * share >= FEWEST})
    found = []
    for half in sizes:
        right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
        found.append((lower_bound(count, 2 * half, right, delta, error / len(sizes)), 2 * half, right))
    epsilon, guesses, right = max(found)
    return OneRunReport(epsilon, delta, confidence, claimed, count, guesses, right, unit)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Returns the largest ε that this number of right guesses refutes, with error probability `error`; 0 if none.

    Example:
        >>> round(lower_bound(1000, 100, 95, 1e-6, 0.05), 3)
        2.172
    """
    if right == 0 or p_value(canaries, guesses, right, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, _LARGEST
    while high - low > 1e-5:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if p_value(canaries, guesses, right, middle, delta) <= error else (low, middle)
    return low


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Returns a bound on the probability of at least `right` right guesses under (epsilon, delta)-privacy."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, rate))
    # P(v - i <= W' < v) for i = 1, 2, ...; further on it is at most 1, and is divided by more.
    most = min(right, 100 + math.ceil(40.0 * math.sqrt(guesses)))
    below = np.cumsum(binom.pmf(np.arange(right - 1, right - 1 - most, -1), guesses, rate))
    steepest = max(float(np.max(below / np.arange(1, most + 1))), 1.0 / (most + 1) if most < right else 0.0)
    return min(1.0, (tail + 2.0 * canaries * delta * steepest) * (1.0 + 1e-9))
