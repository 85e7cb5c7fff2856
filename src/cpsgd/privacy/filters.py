"""Budgets for rounds that are chosen by looking at earlier results: privacy filters, and an odometer made of them.

A filter is fixed in advance: ε and δ, and how much of each kind of cost all rounds together may have. Before a round is
run, whatever it may be and however it was chosen, its costs are added to those of the rounds before; where one of the
sums would be over its limit, the round is refused. Then everything that was released is (ε, δ)-private, although the
rounds, their number and the moment of stopping depend on results. docs/proofs/adaptive.md has the proofs.

* The Gaussian filter adds up μ². It allows what would be allowed had the rounds been fixed in advance.
* The Rényi filter adds up divergences of one order, fixed in advance; sampled rounds cost less by it.

| symbol | here |
|---|---|
| w, ρ (what the filter adds up) | `Cost.size` |
| η (tails), v (total variation), λ (likelihood slack) | `Cost.tail`, `Cost.variation`, `Cost.slack` |
| capital letters, or index B (limits) | the same names of `Filter` |
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cpsgd import _validate
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Participation
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.fixed_size import sampled_divergence
from cpsgd.privacy.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs.certified_renyi import rdp_epsilon

TAIL_SHARE = 0.01
"""Share of δ for the tails of all rounds."""
VARIATION_SHARE = 0.05
"""Share of δ for the resolution of noise samplers."""
SLACK_SHARE = 1e-4
"""Λ over ε: what rounding after the noise may tell, which costs twice as much of ε."""
LEVELS = 16
"""The odometer reads multiples of ε over this, each at a share 1/16 of δ, and below them"""
FINE_LEVELS = 100
"""this many smaller levels, each at a share 1/100 of δ,"""
FINE_STEP = 1.07
"""each this much smaller than the next."""
READING_DELTAS = 3
"""An odometer's reading is proved at this many times δ: the filter itself, the multiples, and the smaller levels."""
MAX_ORDER = 1024
GAUSSIAN_CITATION = (
    "fully adaptive composition of Gaussian certificates (docs/proofs/adaptive.md; Smith and Thakurta 2022, "
    "Koskela, Tobaben and Honkela 2023)"
)
RENYI_CITATION = "Rényi filter (Feldman and Zrnic 2021; docs/proofs/adaptive.md)"
_SAFE = 1.0 + 1e-12
_TINY = 1e-300
# Σ (j+1)^-2 over all j is π²/6.
_OCTAVES = 6.0 / math.pi**2 * (1.0 - 1e-12)


@dataclass(frozen=True)
class Cost:
    """The cost of rounds in a filter, rounded up.

    Attributes:
        size: Σμ², or the sum of the Rényi divergences of the filter's order.
        tail: Added to δ for outputs outside of certified ranges, and for other rare events.
        variation: Distance in total variation from the laws that are certified.
        slack: Λ, as in `Rounds`.
    """

    size: float = 0.0
    tail: float = 0.0
    variation: float = 0.0
    slack: float = 0.0

    def within(self, limit: Cost) -> bool:
        """Returns whether every part of the cost is at most that of the limit."""
        return (
            self.size <= limit.size
            and self.tail <= limit.tail
            and self.variation <= limit.variation
            and self.slack <= limit.slack
        )


def summed(costs: Iterable[tuple[Cost, int]]) -> Cost:
    """Returns the total of these costs, each multiplied by its count."""
    listed = list(costs)

    def total(name: str) -> float:
        return math.fsum(count * getattr(cost, name) for cost, count in listed) * _SAFE

    return Cost(total("size"), total("tail"), total("variation"), total("slack"))


def largest(costs: Iterable[Cost]) -> Cost:
    """Returns the maximum of each part over these costs, for rounds that share no client."""
    listed = list(costs)
    names = ("size", "tail", "variation", "slack")
    return Cost(*(max(getattr(cost, name) for cost in listed) for name in names))


@dataclass(frozen=True)
class Filter:
    """Limits that keep adaptively chosen rounds (ε, δ)-private. Made by `Filter.of`.

    Attributes:
        epsilon: ε.
        delta: δ in total.
        limit: The largest cost of all rounds together, rounded down.
        order: Of the Rényi divergences that are added up; None where it is μ².

    Example:
        >>> budget = Filter.of(epsilon=2.0, delta=1e-6)
        >>> round = budget.cost(Rounds(mu=0.05), Participation.every())
        >>> rounds = 0
        >>> while summed([(round, rounds + 1)]).within(budget.limit):
        ...     rounds += 1
        >>> rounds  # 80 if they were fixed in advance
        79
    """

    epsilon: float
    delta: float
    limit: Cost
    order: int | None = None

    @classmethod
    def of(cls, epsilon: float, delta: float, order: int | None = None) -> Filter:
        """Returns the filter for these ε and δ, by Rényi divergences if an order is given.

        Raises:
            ConditionError: No round would be allowed.
        """
        epsilon = _validate.positive("epsilon", epsilon)
        delta = _validate.probability("delta", delta)
        if order is not None:
            _validate.integer("order", order, low=2, high=MAX_ORDER)
        return _filter(epsilon, delta, TAIL_SHARE * delta, VARIATION_SHARE * delta, SLACK_SHARE * epsilon, order)

    def cost(self, rounds: Rounds, participation: Participation, overflow: float = 0.0) -> Cost:
        """Returns the cost of one of these rounds in the filter.

        Raises:
            ParameterError: The participation is "once", which is about several rounds. Charge the costliest of them
                as one round with everybody.
        """
        size, more = _size(rounds.mu, participation, self.order)
        return Cost(size, (rounds.tail_mass + more + overflow) * _SAFE, rounds.variation, rounds.slack)

    def tail(self, octave: int) -> float:
        """Returns the target tail of each of the rounds 2^octave, ..., 2^(octave + 1) - 1, counted from 1.

        Over all rounds, however many they are, these add up to less than the limit.
        """
        return _OCTAVES * self.limit.tail / ((octave + 1.0) ** 2 * 2.0**octave)

    def enough(self, spent: Cost) -> float:
        """Returns the ε of the smallest filter that would allow the spent cost; infinity if there is none."""
        if not Cost(0.0, spent.tail, spent.variation, spent.slack).within(self.limit):
            return math.inf
        left, slack = _left(self.epsilon, self.delta, self.limit)
        if spent.size <= 0.0:
            return 0.0
        if self.order is None:
            return (gdp_epsilon(math.sqrt(spent.size) * _SAFE, left) + slack) * _SAFE
        return (rdp_epsilon(spent.size, self.order, left) + slack) * _SAFE

    def reading(self, spent: Cost) -> float:
        """Returns the odometer's reading: an ε that holds, ex post, at whatever moment one looks.

        If the rounds stop when the reading is e, by any rule, all releases together have ε = e and `READING_DELTAS`
        times δ. docs/proofs/adaptive.md says in which sense.

        Example:
            >>> budget = Filter.of(epsilon=2.0, delta=1e-6)
            >>> few = summed([(budget.cost(Rounds(mu=0.01), Participation.every()), 10)])
            >>> round(budget.reading(few), 3), round(gdp_epsilon(0.01 * 10**0.5, 1e-6), 3)
            (0.153, 0.116)
        """
        if spent == Cost():
            return 0.0
        kept = (level.epsilon for level in _levels(self) if spent.within(level.limit))
        return next(kept, self.epsilon)


@lru_cache(maxsize=64)
def _levels(budget: Filter) -> tuple[Filter, ...]:
    """Returns the odometer's filters below the budget itself, rising, with its limits for tails and variation."""
    limit, found = budget.limit, []
    levels = [(budget.epsilon * k / LEVELS, LEVELS, limit.slack) for k in range(1, LEVELS)]
    for k in range(1, FINE_LEVELS + 1):
        part = FINE_STEP**-k
        levels.append((budget.epsilon * part, FINE_LEVELS, limit.slack * part))
    for epsilon, share, slack in sorted(levels):
        variation = limit.variation * (1.0 + math.exp(epsilon)) * _SAFE
        delta = budget.delta / share + limit.tail + variation
        with contextlib.suppress(ConditionError):
            found.append(_filter(epsilon, delta, limit.tail, variation, slack, budget.order))
    return tuple(found)


@lru_cache(maxsize=4096)
def _filter(epsilon: float, delta: float, tail: float, variation: float, slack: float, order: int | None) -> Filter:
    """Returns the filter with these limits: of tails, of the δ that variation adds at this ε, and of the slack Λ."""
    room = Cost(0.0, tail, variation / (1.0 + math.exp(epsilon)) / _SAFE, slack)
    left, more = _left(epsilon, delta, room)
    if left <= 0.0 or more >= epsilon:
        raise ConditionError(f"A filter for ε={epsilon!r} and δ={delta:g} would allow nothing.")
    if order is None:
        size = gdp_mu((epsilon - more) * (1.0 - 1e-15), left) ** 2 / _SAFE
        # The definition once more, from the side where it must hold.
        if gdp_delta(math.sqrt(size) * (1.0 + 1e-15), (epsilon - more) * (1.0 - 1e-15)) > left:
            raise ConditionError("The filter's limit could not be computed.")
    else:
        size = (epsilon - more) - rdp_shift(order, left)
        size -= 1e-13 * (epsilon + abs(size))
        if size <= 0.0 or rdp_epsilon(size, order, left) > epsilon - more:
            raise ConditionError(
                f"A Rényi filter of order {order} for ε={epsilon!r} and δ={delta:g} would allow nothing; choose a "
                f"larger order."
            )
    return Filter(epsilon, delta, Cost(size, room.tail, room.variation, room.slack), order)


def _left(epsilon: float, delta: float, room: Cost) -> tuple[float, float]:
    """Returns the δ left for the sizes, rounded down, and the ε spent on rounding after the noise, rounded up."""
    others = (room.tail + room.variation * (1.0 + math.exp(epsilon))) * _SAFE
    return (delta * math.exp(-room.slack) / _SAFE - others), 2.0 * room.slack


def rdp_shift(order: int, delta: float) -> float:
    """Returns the amount that converting a Rényi divergence of this order to ε adds to it."""
    return math.log1p(-1.0 / order) - math.log(order) / (order - 1.0) - math.log(delta) / (order - 1.0)


def best_order(epsilon: float, delta: float) -> int:
    """Returns the order by which a Rényi filter allows most rounds of Gaussian noise, without sampling."""

    def rounds(order: int) -> float:
        return (epsilon - rdp_shift(order, (1.0 - TAIL_SHARE - VARIATION_SHARE) * delta)) / order

    return max(range(2, MAX_ORDER + 1), key=rounds)


@lru_cache(maxsize=4096)
def _size(mu: float, participation: Participation, order: int | None) -> tuple[float, float]:
    """Returns the amounts that one round adds to the filter's size and to its tails."""
    if participation.scheme == "once":
        raise ParameterError('A filter takes rounds that everybody is in, or sampled ones, not "once".')
    if order is None:
        # Sampling never costs privacy, and the Gaussian filter does not know it.
        return mu * mu * _SAFE, 0.0
    rate = math.nextafter(participation.rate, 1.0)
    whole = 0.5 * order * mu * mu * _SAFE
    if rate >= 1.0:
        return whole, 0.0
    if participation.scheme == "poisson":
        return min(whole, _poisson_divergence(mu, rate, order)), 0.0
    divergence, infinite = sampled_divergence(mu, rate, order)
    return (divergence, infinite) if divergence < whole else (whole, 0.0)


def _poisson_divergence(mu: float, rate: float, order: int) -> float:
    """Returns D_α of (1-q) N(0,1) + q N(μ,1) from N(0,1), rounded up.

    For whole α, e^((α-1) D_α) - 1 = Σ_{i>=2} C(α,i) q^i (1-q)^(α-i) (e^((i²-i) μ²/2) - 1), all terms positive (Mironov,
    Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019, section 3.3, who also show
    that the other order of the two laws has no larger one).
    """
    logs = []
    for i in range(2, order + 1):
        ways = math.lgamma(order + 1.0) - math.lgamma(i + 1.0) - math.lgamma(order - i + 1.0)
        exponent = max(0.5 * (i * i - i) * mu * mu, _TINY)
        # log(e^x - 1), for any x > 0
        grown = exponent + math.log(-math.expm1(-exponent))
        logs.append(ways + i * math.log(rate) + (order - i) * math.log1p(-rate) + grown)
    top = max(logs)
    # Logarithms of binomial coefficients are differences of numbers of size α log α, known to a few units each.
    error = 1e-15 * (64.0 + 8.0 * order * math.log(order) + 4.0 * order * abs(math.log(rate)) + abs(top))
    log_sum = top + math.log(math.fsum(math.exp(term - top) for term in logs)) + error
    # log(1 + e^s)
    grown = log_sum + math.log1p(math.exp(-log_sum)) if log_sum > 0.0 else math.log1p(math.exp(log_sum))
    return grown / (order - 1.0) * _SAFE
