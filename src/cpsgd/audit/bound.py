"""A lower bound on ε from the number of an attacker's right and wrong answers.

**The experiment.** Every round a fair coin B decides which of two neighbours is played; the attacker looks at what is
released and says "one", or says nothing. Let p₁ and p₀ be the probabilities of "one" in the two worlds. If the round is
(ε, δ)-private, p₁ <= e^ε p₀ + δ.

**The bound.** Suppose so. Colour a right answer red with probability max(0, 1 - e^ε p₀/p₁), a number that is at most
δ/p₁. In T rounds the red answers are dominated by Binomial(T, δ/2). Of the others, each is right with probability at
most q = e^ε/(1 + e^ε), independently. With w right and f wrong answers, let r be a number that Binomial(T, δ/2) exceeds
with probability at most γ/2. Then, but for probability γ, at least w - r answers are right and not red, and
P(Binomial(w - r + f, q) >= w - r) > γ/2, because that tail falls as w grows for the same f. Solved for q, this is the
lower end of Clopper and Pearson's interval, and ε is its log odds. Both error rates enter one interval through their
ratio, so nothing is lost to two intervals that have to hold at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

from cpsgd.audit.sum_law import Array

# Shares of the rounds in which an attacker may answer.
_SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002)


def epsilon_lower_bound(right: float, wrong: float, rounds: int, delta: float, error: float) -> float:
    """Returns a lower bound on ε, wrong with probability at most `error`; 0.0 if the attack proves nothing.

    Args:
        right: w, answers "one" when it was one.
        wrong: f, answers "one" when it was the other.
        rounds: T, all rounds, those without an answer too.
        delta: δ.
        error: γ, the probability with which the bound may be wrong.

    Example:
        >>> round(epsilon_lower_bound(900, 100, 10_000, 1e-6, 0.05), 3)
        1.99
    """
    kept = right - float(binom.isf(0.5 * error, rounds, 0.5 * delta))
    if kept <= 0.0:
        return 0.0
    rate = float(beta.ppf(0.5 * error, kept, wrong + 1.0))
    return max(0.0, math.log(rate / (1.0 - rate))) if rate > 0.0 else 0.0


@dataclass(frozen=True)
class Attacker:
    """An attacker that answers if sign · score > threshold; `sign` also says which world counts as "one"."""

    sign: int
    threshold: float

    @classmethod
    def answering(cls, scores: Array, sign: int, share: float) -> Self:
        """Returns an attacker whose threshold makes it answer in this share of the given rounds."""
        return cls(sign, float(np.quantile(sign * scores, 1.0 - share, method="lower")))

    def counts(self, scores: Array, worlds: NDArray[np.bool_]) -> tuple[int, int]:
        """Returns the numbers of right and wrong answers."""
        answered = self.sign * scores > self.threshold
        right = int(np.count_nonzero(answered & (worlds == (self.sign > 0))))
        return right, int(np.count_nonzero(answered)) - right

    def lower_bound(self, scores: Array, worlds: NDArray[np.bool_], delta: float, error: float) -> float:
        """Returns the lower bound on ε that this attacker proves on these rounds."""
        return epsilon_lower_bound(*self.counts(scores, worlds), len(scores), delta, error)


@dataclass(frozen=True)
class Prospect:
    """The ε that an attacker with this sign and share of answered rounds will probably prove."""

    epsilon: float
    sign: int
    share: float


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """Rounds to learn from: scores and worlds. They prove nothing any more."""

    scores: Array
    worlds: NDArray[np.bool_]

    @cached_property
    def _answers(self) -> list[tuple[int, float, int, int]]:
        """Sign and share of every candidate attacker, with its numbers of right and wrong answers."""
        return [
            (sign, share, *Attacker.answering(self.scores, sign, share).counts(self.scores, self.worlds))
            for sign in (1, -1)
            for share in _SHARES
        ]

    def best_prospect(self, rounds: int, delta: float, error: float) -> Prospect:
        """Returns the attacker that will probably prove the largest ε on `rounds` fresh rounds.

        The promise is a guess, two standard deviations to the safe side, so that rare answers that were right by chance
        do not win.
        """
        growth = rounds / len(self.scores)
        prospects: list[Prospect] = []
        for sign, share, right, wrong in self._answers:
            fewer, more = max(0.0, right - 2.0 * math.sqrt(right)), wrong + 1.0 + 2.0 * math.sqrt(wrong + 1.0)
            epsilon = epsilon_lower_bound(growth * fewer, growth * more, rounds, delta, error)
            prospects.append(Prospect(epsilon, sign, share))
        return max(prospects, key=lambda promise: promise.epsilon)
