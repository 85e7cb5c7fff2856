"""Optimal composition of (ε, δ) guarantees: the paper's route from one round to many.

Kairouz, Oh, Viswanath: "The Composition Theorem for Differential Privacy", IEEE Trans. Inf. Theory 63(6), 2017.
Their Theorem 3.3 gives the exact (ε', δ') of R mechanisms of which nothing is known but that each is (ε, δ)-DP:
the worst of them is R-fold randomized response, plus a catastrophe of probability 1 - (1-δ)^R. It is kept for
comparison: knowing the mechanism, as `cpsgd.privacy.accountant` does, is far better than knowing one (ε, δ) of it.

| symbol | here |
|---|---|
| k (number of mechanisms) | `rounds` |
| ε, δ of one mechanism | `epsilon`, `delta` |
| ε_g, δ_g of the composition | the result and `target_delta` |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cpsgd import _validate
from cpsgd._lazy import Late
from cpsgd._numbers import rounded_down
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law, Steps
from cpsgd.neighbours import Participation
from cpsgd.privacy.accountant import LARGEST_EPSILON
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs import best
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.run import Run

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

CITATION = "Kairouz, Oh, Viswanath (2017), The Composition Theorem for Differential Privacy, Theorem 3.3"


def randomized_response_delta(*, epsilon: float, rounds: int, target_epsilon: float) -> float:
    """Returns the smallest δ' with which `rounds` pure `epsilon`-DP mechanisms are (target_epsilon, δ')-DP, rounded up.

    Theorem 3.3 with δ = 0, written for every ε' >= 0 and not only for the ε' = (R-2i)ε at the corners:
    δ' = Σ_l C(R, l) max(0, e^((R-l)ε) - e^(ε' + lε)) / (1 + e^ε)^R, the hockey-stick divergence of R-fold
    randomized response.

    Example:
        >>> round(randomized_response_delta(epsilon=0.1, rounds=100, target_epsilon=3.0), 6)
        0.001361
    """
    epsilon = _validate.positive("epsilon", epsilon)
    rounds = _validate.integer("rounds", rounds, low=1)
    _validate.non_negative("target_epsilon", target_epsilon)
    # Terms are positive for (R - 2l) ε > ε'.
    lost = np.arange(rounds // 2 + 1, dtype=np.float64)
    gap = (rounds - 2.0 * lost) * epsilon - target_epsilon
    lost, gap = lost[gap > 0], gap[gap > 0]
    if not gap.size:
        return 0.0
    log_ways = special.gammaln(rounds + 1.0) - special.gammaln(lost + 1.0) - special.gammaln(rounds - lost + 1.0)
    log_terms = log_ways + (rounds - lost) * epsilon + np.log(-np.expm1(-gap))
    log_delta = float(special.logsumexp(log_terms)) - rounds * (epsilon + math.log1p(math.exp(-epsilon)))
    # The logarithms are differences of numbers of size R (1 + ε) log R, each known to a few units in the last place.
    slack = 1e-12 + 1e-15 * rounds * (1.0 + epsilon) * math.log(rounds + 2.0) * 8.0
    return min(1.0, math.exp(min(0.0, log_delta + slack)))


def optimal_composition(*, epsilon: float, delta: float, rounds: int, target_delta: float) -> float:
    """Returns the smallest ε', rounded up, so that `rounds` (epsilon, delta)-DP mechanisms are (ε', target_delta)-DP.

    Raises:
        ConditionError: The rounds' own δ already add up to `target_delta`.
        ParameterError: A parameter is outside its range; `delta` may be 0.

    Example:
        >>> round(optimal_composition(epsilon=0.1, delta=1e-9, rounds=100, target_delta=1e-6), 3)
        4.788
    """
    epsilon = _validate.non_negative("epsilon", epsilon)
    delta = _validate.fraction("delta", delta)
    rounds = _validate.integer("rounds", rounds, low=1)
    target_delta = _validate.probability("target_delta", target_delta)
    # 1 - (1-δ_g)/(1-δ)^R, what is left for the randomized responses, in the precision of log1p and expm1.
    left = -math.expm1(math.log1p(-target_delta) - rounds * math.log1p(-delta))
    left *= 1.0 - 1e-12
    if left <= 0.0:
        raise ConditionError(
            f"{rounds} rounds with δ={delta:g} each spend more than δ={target_delta:g}; "
            f"use at most δ={target_delta / rounds:.3g} per round or fewer rounds."
        )
    low, high = 0.0, rounds * epsilon  # basic composition always holds
    if epsilon == 0.0 or randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=0.0) <= left:
        return 0.0
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=middle) <= left:
            high = middle
        else:
            low = middle
    return high


# ---------------------------------------------------------------------- the proof

# The sum is over rounds; with more of them other proofs are far ahead anyway.
_MOST_COMPOSED = 20_000
# No certificate is below a Gaussian of equal variance by more than this.
_NEARLY = 0.999


@dataclass(frozen=True)
class PerRound(Proof):
    """Each round's (ε, δ) alone, by whichever proof is best for one round, composed optimally."""

    name: str = "per-round guarantee + optimal composition"
    citation: str = CITATION
    effort: int = 5

    def supports(self, run: Run) -> bool:
        """Returns whether there are several rounds; sums without separate noise have better proofs."""
        return not base.alone(run) and not isinstance(base.law_of(run), Steps)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the composed ε."""
        rounds = run.rounds
        check_composable(run)
        each = 0.5 * delta / rounds

        def composed(epsilon: float) -> float:
            return optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)

        law = base.law_of(run)
        if isinstance(law, Law):
            least = composed(gdp_epsilon(base.sensitivity(run) / math.sqrt(law.variance), each) * _NEARLY)
            if least >= below:
                raise ConditionError(f"could not come below {rounded_down(least)}, so not computed")
        conditions = replace(run.conditions, sizes=((run.surviving, 1),), participation=Participation.every())
        _, found, _ = best(replace(run, conditions=conditions), each)
        if (epsilon := composed(found.epsilon)) > LARGEST_EPSILON:
            raise ConditionError(f"Nothing useful is proved about {rounds} such rounds; run fewer or add noise.")
        return Proved(epsilon, rounds * found.tail, f"{found.citation}; {CITATION}")


def check_composable(run: Run) -> None:
    """Raises `ConditionError` where rounds are sampled, or too many to be composed one by one."""
    if run.sampling.sampled:
        raise ConditionError("composes rounds without sampling only")
    if run.rounds > _MOST_COMPOSED:
        raise ConditionError(f"is computed for up to {_MOST_COMPOSED:,} rounds")


PROOFS = (PerRound(),)
