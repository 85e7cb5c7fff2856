"""Filters against adversaries who look at everything: games in which all their choices are enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.neighbours import Participation
from cpsgd.privacy import filters
from cpsgd.privacy.accountant import Rounds, most_rounds
from cpsgd.privacy.filters import LEVELS, Cost, Filter, best_order, largest, summed
from cpsgd.privacy.fixed_size import sampled_divergence
from cpsgd.privacy.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs.certified_gaussian import gaussian_certificate
from cpsgd.privacy.proofs.certified_renyi import rdp_epsilon
from cpsgd.promise import Claim
from tests import known_values as known

EVERY = Participation.every()
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Move:
    """A round that an adversary may choose: its two laws, and what it costs."""

    first: Array
    second: Array
    cost: Cost


def response(probability: float, told: float = 0.0) -> tuple[Array, Array]:
    """Randomized response, and with probability `told` the truth, recognizably."""
    here = np.array([probability, 1.0 - probability]) * (1.0 - told)
    return np.append(here, [told, 0.0]), np.append(here[::-1], [0.0, told])


def gaussian_moves() -> list[Move]:
    # Of all pairs that are μ-GDP, randomized response takes both errors where the curve of N(0,1) and N(μ,1) crosses
    # the diagonal.
    return [
        Move(*response(p, told), Cost((2.0 * float(ndtri(p))) ** 2, told))
        for p, told in ((0.55, 0.0), (0.6, 0.0), (0.66, 0.0), (0.56, 0.002))
    ]


def renyi_moves(order: int) -> list[Move]:
    def divergence(p: float) -> float:
        return math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)) / (order - 1)

    return [
        Move(*response(p, told), Cost(divergence(p), told))
        for p, told in ((0.55, 0.0), (0.62, 0.0), (0.68, 0.0), (0.56, 0.002))
    ]


def best(
    payoff: Callable[[float, float, Cost], float],
    moves: list[Move],
    limit: Cost,
    rounds: int,
    state: tuple[float, float, Cost] = (1.0, 1.0, Cost()),
) -> float:
    """What an adversary gets at most, who knows all outputs, chooses every round, and stops when it likes."""
    first, second, spent = state
    found = payoff(first, second, spent)
    if rounds == 0:
        return found
    for move in moves:
        after = summed([(spent, 1), (move.cost, 1)])
        if not after.within(limit):
            continue
        outcomes = ((first * a, second * b) for a, b in zip(move.first, move.second, strict=True) if a or b)
        found = max(found, sum(best(payoff, moves, limit, rounds - 1, (a, b, after)) for a, b in outcomes))
    return found


def planned(payoff: Callable[[float, float, Cost], float], moves: list[Move], limit: Cost, rounds: int) -> float:
    """The same where the rounds are fixed in advance."""
    found = 0.0
    for count in range(rounds + 1):
        for chosen in itertools.combinations_with_replacement(moves, count):
            if not summed((move.cost, 1) for move in chosen).within(limit):
                continue
            total = 0.0
            for places in itertools.product(*(range(len(move.first)) for move in chosen)):
                first = math.prod(move.first[i] for move, i in zip(chosen, places, strict=True))
                second = math.prod(move.second[i] for move, i in zip(chosen, places, strict=True))
                total += payoff(first, second, Cost())
            found = max(found, total)
    return found


def advantage(epsilon: float, first: float, second: float, spent: Cost) -> float:
    """Summed over outcomes: how far A(E) is above e^ε B(E), for the best E."""
    return max(0.0, first - math.exp(epsilon) * second)


# ------------------------------------------------------------------ the theorem, against every adversary


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.12), (1.0, 0.06), (1.5, 0.15)])
def test_no_adversary_gets_more_than_a_gaussian_filter_promises(epsilon: float, delta: float) -> None:
    budget = Filter.of(epsilon, delta)
    # More of it goes to tails than is usual, so that they matter.
    limit = Cost(budget.limit.size, 0.006, 1.0, 1.0)
    moves = gaussian_moves()
    assert sum(move.cost.within(limit) for move in moves) >= 3
    for threshold in (0.0, 0.5 * epsilon, epsilon, 1.3 * epsilon):
        found = best(partial(advantage, threshold), moves, limit, rounds=4)
        assert 0.0 < found <= gdp_delta(math.sqrt(limit.size), threshold) + limit.tail
    assert found > 0.0


def test_adversaries_of_these_games_gain_by_looking() -> None:
    limit = Cost(0.9, 0.006, 1.0, 1.0)
    moves = gaussian_moves()
    gains = []
    for threshold in (0.3, 0.6, 0.9, 1.2):
        adaptive = best(partial(advantage, threshold), moves, limit, rounds=4)
        fixed = planned(partial(advantage, threshold), moves, limit, rounds=4)
        assert adaptive >= fixed * (1 - 1e-12)
        gains.append(adaptive / fixed)
    assert max(gains) > 1.005


@pytest.mark.parametrize("order", [2, 6])
def test_no_adversary_gets_more_than_a_renyi_filter_promises(order: int) -> None:
    moves = renyi_moves(order)
    for size in (0.3, 0.8):
        limit = Cost(size, 0.004, 1.0, 1.0)
        for delta in (0.3, 0.1, 0.03):
            epsilon = rdp_epsilon(size, order, delta)
            found = best(partial(advantage, epsilon), moves, limit, rounds=4)
            assert found <= delta + limit.tail
    assert best(partial(advantage, 0.1), moves, limit, rounds=4) > 0.05


def test_no_adversary_with_rounds_of_the_library_gets_more() -> None:
    """Sums of coins of two sizes; the neighbours differ by one level, so that all is a finite sum."""
    moves = []
    for coins in (150, 400):
        certificate = gaussian_certificate(BinomialLaw(coins, 0.5), dim=1, sensitivity=1.0, levels=2, tail=1e-3)
        masses = binom.pmf(np.arange(coins + 1), coins, 0.5)
        cost = Cost(certificate.mu**2, certificate.tail_mass)
        moves.append(Move(np.append(masses, 0.0), np.append(0.0, masses), cost))
    limit = Cost(2.3 * moves[0].cost.size, 5e-3, 1.0, 1.0)

    def value(ratio: Array, spent: Cost, rounds: int, threshold: float) -> Array:
        """For each likelihood ratio B/A so far: what the adversary gets of what A has left."""
        found = np.maximum(0.0, 1.0 - threshold * ratio)
        for move in moves if rounds else []:
            after = summed([(spent, 1), (move.cost, 1)])
            if not after.within(limit):
                continue
            inside = move.first > 0.0
            step = move.second[inside] / move.first[inside]
            rest = value(np.multiply.outer(ratio, step), after, rounds - 1, threshold)
            found = np.maximum(found, rest @ move.first[inside])
        return found

    for epsilon in (0.05, 0.15, 0.3):
        exact = float(value(np.ones(1), Cost(), 2, math.exp(epsilon))[0])
        promised = gdp_delta(math.sqrt(limit.size), epsilon) + limit.tail
        assert 0.1 * promised < exact <= promised


def test_the_odometer_holds_when_the_moment_to_look_is_chosen_by_results() -> None:
    budget = Filter.of(2.0, 0.3)
    moves = [Move(*response(p), Cost((2.0 * float(ndtri(p))) ** 2)) for p in (0.54, 0.6, 0.66)]

    def payoff(first: float, second: float, spent: Cost) -> float:
        return max(0.0, first - math.exp(budget.reading(spent)) * second)

    readings = {budget.reading(summed([(moves[0].cost, count)])) for count in range(5)}
    assert len(readings) >= 3
    assert 0.0 <= best(payoff, moves, budget.limit, rounds=4) <= 3.0 * budget.delta


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_a_reading_is_stated_at_the_delta_that_the_best_stopping_rule_cannot_exceed(epsilon: float) -> None:
    """Many small Gaussian rounds are a Brownian motion. Its best moment to stop is found by going backwards in time."""
    delta = 1e-6
    budget = Filter.of(epsilon, delta)
    # The moments at which a reading is about to rise. Earlier ones would need a finer grid, and can only add.
    ends: list[tuple[float, float]] = []
    for level in [*filters._levels(budget), budget]:
        if level.epsilon >= epsilon / 8.0 and (not ends or level.limit.size > ends[-1][0]):
            ends.append((level.limit.size, level.epsilon))
    step = 0.001 * epsilon
    losses = np.arange(-2.0 * epsilon - 2.0, 4.0 * epsilon + 4.0, step)
    best_so_far = np.zeros_like(losses)
    later = ends[-1][0]
    for size, reading in reversed(ends):
        moved = later - size
        if moved > 0.0:  # E of the value after a loss of N(moved/2, moved), under the first law
            reach = math.ceil((0.5 * moved + 9.0 * math.sqrt(moved)) / step) + 1
            cells = (np.arange(-reach, reach + 2) - 0.5) * step
            masses = np.diff(ndtr((cells - 0.5 * moved) / math.sqrt(moved)))
            padded = np.pad(best_so_far, reach, mode="edge")
            best_so_far = np.convolve(padded, masses[::-1], mode="valid")
        best_so_far = np.maximum(best_so_far, -np.expm1(np.minimum(reading - losses, 0.0)))
        later = size
    first = norm.pdf(losses, 0.5 * later, math.sqrt(later)) * step
    found = float(np.sum(first * best_so_far))
    # More than δ, so that it must not be printed as such; and less than what is printed.
    assert 1.2 * delta < found < filters.READING_DELTAS * delta


def test_the_shares_of_all_levels_add_up_to_what_is_printed() -> None:
    # The filter itself, fifteen multiples at a sixteenth each, and a hundred levels at a hundredth.
    shares = 1.0 + (LEVELS - 1) / LEVELS + filters.FINE_LEVELS / filters.FINE_LEVELS
    assert shares <= filters.READING_DELTAS
    budget = Filter.of(2.0, 1e-6)
    levels = filters._levels(budget)
    assert len(levels) <= LEVELS - 1 + filters.FINE_LEVELS
    spent = 0.0
    for level in levels:
        spent += gdp_delta(math.sqrt(level.limit.size), level.epsilon - 2.0 * level.limit.slack)
    top = gdp_delta(math.sqrt(budget.limit.size), budget.epsilon - 2.0 * budget.limit.slack)
    others = budget.limit.tail + budget.limit.variation * (1.0 + math.exp(budget.epsilon))
    assert (spent + top + others) * math.exp(budget.limit.slack) <= filters.READING_DELTAS * budget.delta


# ------------------------------------------------------------------ limits and costs


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("renyi", [False, True])
def test_limits_add_up_to_delta(epsilon: float, delta: float, renyi: bool) -> None:
    order = best_order(epsilon, delta) if renyi else None
    budget = Filter.of(epsilon, delta, order)
    limit = budget.limit
    rest = epsilon - 2.0 * limit.slack
    left = delta * math.exp(-limit.slack) - limit.tail - limit.variation * (1.0 + math.exp(epsilon))
    if order is None:
        assert gdp_delta(math.sqrt(limit.size), rest) <= left
        assert gdp_delta(math.sqrt(limit.size * 1.0001), rest) > left
    else:
        assert rdp_epsilon(limit.size, order, left) <= rest
        assert rdp_epsilon(limit.size * 1.0001, order, left) > rest
    assert limit.within(limit)
    assert budget.enough(limit) <= epsilon * (1 + 1e-9)
    assert budget.enough(Cost(1.01 * limit.size)) > epsilon
    assert math.isinf(budget.enough(Cost(0.0, 1.01 * limit.tail)))


@pytest.mark.parametrize(("epsilon", "delta", "mu"), [(2.0, 1e-6, 0.01), (0.5, 1e-9, 0.003), (8.0, 1e-5, 0.05)])
def test_rounds_that_could_have_been_planned_are_allowed(epsilon: float, delta: float, mu: float) -> None:
    budget = Filter.of(epsilon, delta)
    allowed = math.floor(budget.limit.size / budget.cost(Rounds(mu), EVERY).size)
    fixed = most_rounds(Claim(epsilon, delta), 1.0 / mu, participation=EVERY)
    assert 0.99 * fixed <= allowed <= fixed


def test_tails_of_any_number_of_rounds_keep_the_limit() -> None:
    budget = Filter.of(1.0, 1e-6)
    octaves = [2**octave * budget.tail(octave) for octave in range(60)]
    assert 0.98 * budget.limit.tail < math.fsum(octaves) <= budget.limit.tail
    assert all(budget.tail(octave + 1) < budget.tail(octave) for octave in range(59))


@pytest.mark.parametrize(("mu", "rate", "order"), [(1.0, 0.01, 8), (0.3, 0.2, 3), (0.02, 1e-4, 40), (2.0, 0.5, 2)])
def test_divergences_of_sampled_rounds_are_not_below_the_exact_ones(mu: float, rate: float, order: int) -> None:
    mpmath.mp.dps = 40
    q, m = mpmath.mpf(rate), mpmath.mpf(mu)

    def ratio(x: mpmath.mpf) -> mpmath.mpf:
        return 1 + q * (mpmath.exp(m * x - m * m / 2) - 1)

    def integral(function: Callable[[mpmath.mpf], mpmath.mpf], low: mpmath.mpf) -> mpmath.mpf:
        points = [low, m / 2 + 2, order * m + 2, order * m + 30]
        return mpmath.quad(lambda x: mpmath.npdf(x) * function(x), points)

    exact = float(mpmath.log1p(integral(lambda x: ratio(x) ** order - 1, mpmath.mpf(-30))) / (order - 1))
    budget = Filter.of(1.0, 1e-3, 100)
    by_poisson = Filter(1.0, 1e-3, budget.limit, order).cost(Rounds(mu), Participation.poisson(rate))
    assert exact * (1 - 1e-9) <= by_poisson.size <= exact * (1 + 1e-5)
    # The pair of docs/proofs/fixed-size.md, whose two halves mirror each other.
    both = integral(lambda x: (ratio(x) ** order - 1) * (1 - ratio(x) ** (1 - order)), m / 2)
    exact = float(mpmath.log1p(both) / (order - 1))
    found, left_out = sampled_divergence(mu, rate, order)
    assert exact <= found <= 1.05 * exact + 1e-9
    assert left_out < 1e-38


def test_sampling_never_costs_more_than_none() -> None:
    for order in (8, 12, 60):
        budget = Filter.of(4.0, 1e-5, order)
        whole = budget.cost(Rounds(0.7), EVERY).size
        for sampled in (Participation.poisson(0.9), Participation.fixed_size(cohort=9, population=10)):
            assert budget.cost(Rounds(0.7), sampled).size <= whole
        for rate in (1.0 - 2.0**-53, 1.1e-7):
            for mu in (1e-170, 1e-9, 3.0):
                cost = budget.cost(Rounds(mu), Participation.poisson(rate))
                assert 0.0 <= cost.size <= budget.cost(Rounds(mu), EVERY).size
    blind = Filter.of(4.0, 1e-5)
    assert blind.cost(Rounds(0.7), Participation.poisson(0.1)) == blind.cost(Rounds(0.7), EVERY)


def test_all_parts_of_a_cost_count() -> None:
    budget = Filter.of(1.0, 1e-6)
    cost = budget.cost(Rounds(0.1, 1, 1e-9, 1e-12, 1e-7), EVERY, overflow=2e-9)
    assert 3e-9 <= cost.tail <= 3.1e-9
    assert (cost.variation, cost.slack) == (1e-12, 1e-7)
    for name in ("size", "tail", "variation", "slack"):
        over = Cost(**{name: 1.001 * getattr(budget.limit, name)})
        assert not over.within(budget.limit)
        assert Cost(**{name: 0.999 * getattr(budget.limit, name)}).within(budget.limit)
    assert summed([(Cost(0.1, 0.2), 3)]).size >= 0.3
    assert largest([Cost(0.1, 0.2), Cost(0.3, 0.1)]) == Cost(0.3, 0.2)


def test_the_odometer_rises_and_ends_at_the_limit() -> None:
    budget = Filter.of(2.0, 1e-6)
    sizes = [budget.limit.size * k / 200 for k in range(201)]
    readings = [budget.reading(Cost(size)) for size in sizes]
    assert readings == sorted(readings)
    assert readings[0] == 0.0
    assert readings[-1] == budget.epsilon
    assert len(set(readings)) > 1.5 * LEVELS
    for size, reading in zip(sizes[1:], readings[1:], strict=True):
        # Never below what rounds of that size cost that were fixed in advance, and not twice as much.
        fixed = gdp_epsilon(math.sqrt(size), budget.delta)
        assert fixed <= reading * (1 + 1e-9)
        assert reading <= 1.4 * fixed


def test_what_is_refused() -> None:
    with pytest.raises(ConditionError, match="larger order"):
        Filter.of(0.5, 1e-9, 2)
    with pytest.raises(ParameterError, match="once"):
        Filter.of(1.0, 1e-6).cost(Rounds(0.1), Participation.once())
    for wrong in ({"epsilon": 0.0}, {"delta": 0.0}, {"delta": 1.0}, {"order": 1}, {"order": 2.5}):
        with pytest.raises(ParameterError):
            Filter.of(**{"epsilon": 1.0, "delta": 1e-6, **wrong})  # type: ignore[arg-type]


# ------------------------------------------------------------------ parts

_COSTS = [
    Rounds(0.05, 1, 1e-10, 1e-11, 2e-6),
    Rounds(0.4, 3, 2e-9, 0.0, 1e-5),
]


@pytest.mark.parametrize("order", [None, 2, 12, 300])
def test_known_filters(order: int | None) -> None:
    values: dict[str, object] = {}
    for epsilon, delta in ((2.0, 1e-5), (12.0, 1e-3)):
        try:
            budget = Filter.of(epsilon, delta, order)
        except ConditionError:
            values[f"limit {epsilon}"] = math.nan
            continue
        values[f"limit {epsilon}"] = astuple(budget.limit)
        values[f"tails {epsilon}"] = [budget.tail(octave) for octave in (0, 1, 7)]
        for who in (EVERY, Participation.poisson(0.05), Participation.fixed_size(cohort=3, population=40)):
            costs = [budget.cost(rounds, who, overflow=1e-12) for rounds in _COSTS]
            spent = [summed([(costs[0], n), (costs[1], n // 9)]) for n in (1, 20, 90)]
            values |= {
                f"cost {epsilon} {who}": [part for each in costs for part in astuple(each)],
                f"summed {epsilon} {who}": astuple(spent[1]),
                f"enough {epsilon} {who}": [budget.enough(each) for each in spent],
                f"reading {epsilon} {who}": [budget.reading(each) for each in spent],
            }
        levels = filters._levels(budget)
        values[f"levels {epsilon}"] = [part for level in levels for part in (level.epsilon, *astuple(level.limit))]
    known.check("privacy/filters", {f"{order} {key}": value for key, value in values.items()})


def test_known_parts_of_filters() -> None:
    cases = ((0.3, 0.01), (2.0, 0.4), (1e-160, 0.1))
    values = {
        "divergences": [filters._poisson_divergence(*each, order) for each in cases for order in (2, 3, 40)],
        "shifts": [filters.rdp_shift(order, delta) for order in (2, 3, 40) for delta in (1e-3, 1e-9)],
        "best": [best_order(epsilon, delta) for epsilon, delta in ((0.1, 1e-6), (2.0, 1e-6), (30.0, 1e-2))],
        "largest": astuple(largest([Cost(1.0, 2.0, 3.0, 4.0), Cost(4.0, 3.0, 2.0, 1.0)])),
        "sizes": [part for order in (None, 3) for part in filters._size(0.3, Participation.poisson(1.0), order)],
        "near one": filters._size(0.3, Participation.poisson(math.nextafter(1.0, 0.0)), 3),
    }
    known.check("privacy/filters", values)


@pytest.mark.parametrize("part", ["size", "tail", "variation", "slack"])
def test_every_part_of_a_cost_is_limited(part: str) -> None:
    budget = Filter.of(2.0, 1e-5)
    most = getattr(budget.limit, part)
    at, over = (replace(Cost(), **{part: each}) for each in (most, math.nextafter(most, math.inf)))
    assert at.within(budget.limit)
    assert not over.within(budget.limit)
    assert budget.reading(replace(Cost(), **{part: 1.001 * most})) == budget.epsilon
    assert (budget.enough(over) == math.inf) == (part != "size")


def test_a_filter_that_allows_nothing_is_refused() -> None:
    for delta in (1e-3, 1e-9):
        shift = filters.rdp_shift(2, delta)
        with pytest.raises(ConditionError, match="larger order"):
            Filter.of(shift, delta, order=2)
        assert Filter.of(1.1 * shift + 1.0, delta, order=2).limit.size > 0.0
    for left in (0.0, -1e-9):
        with pytest.raises(ConditionError, match="allow nothing"):
            filters._filter(1.0, 1e-6, 1e-6 - left, 0.0, 0.0, None)
    with pytest.raises(ConditionError, match="allow nothing"):
        filters._filter(1.0, 1e-6, 0.0, 0.0, 0.5, None)
    for order in (1, filters.MAX_ORDER + 1):
        with pytest.raises(ParameterError):
            Filter.of(1.0, 1e-6, order=order)


@pytest.mark.parametrize(("mu", "rate", "order"), [(0.01, 1e-3, 1024), (0.05, 0.3, 400)])
def test_roundings_of_a_thousand_terms_are_on_the_safe_side(mu: float, rate: float, order: int) -> None:
    found = filters._poisson_divergence(mu, rate, order)
    with mpmath.workdps(40):
        q, square, ways = mpmath.mpf(rate), mpmath.mpf(mu) ** 2, mpmath.mpf(order)
        total = mpmath.mpf(0)
        for i in range(2, order + 1):
            ways *= mpmath.mpf(order - i + 1) / i
            total += ways * q**i * (1 - q) ** (order - i) * mpmath.expm1((i * i - i) * square / 2)
        exact = mpmath.log1p(total) / (order - 1)
        assert 0 < found / exact - 1 < 1e-9


def test_nothing_spent_needs_no_epsilon() -> None:
    assert Filter.of(2.0, 1e-5).enough(Cost(tail=1e-9)) == 0.0


def test_a_cost_within_its_limit_may_be_all_of_it() -> None:
    limit = Cost(1.0, 2.0, 3.0, 4.0)
    assert limit.within(limit)
    for part in ("size", "tail", "variation", "slack"):
        assert not replace(limit, **{part: math.nextafter(getattr(limit, part), 9.0)}).within(limit)


def test_tails_alone_cost_no_epsilon() -> None:
    budget = Filter.of(1.0, 1e-6)
    assert budget.enough(Cost(0.0, budget.limit.tail)) == 0.0
    assert budget.enough(Cost(0.0, 1.01 * budget.limit.tail)) == math.inf


def test_almost_sure_sampling_is_no_sampling() -> None:
    almost = Participation.poisson(math.nextafter(1.0, 0.0))
    assert filters._size(0.1, almost, 4) == (pytest.approx(0.5 * 4 * 0.01), 0.0)


def test_a_limit_is_checked_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "gdp_mu", lambda epsilon, delta: gdp_mu(1.0001 * epsilon, delta))
    with pytest.raises(ConditionError, match="could not be computed"):
        Filter.of(1.2345, 1e-6)


def test_losses_that_are_left_out_of_a_divergence_are_tails() -> None:
    fixed = Participation.fixed_size(cohort=5, population=100)
    rate = math.nextafter(fixed.rate, 1.0)
    lost = sampled_divergence(0.5, rate, 8)[1]
    assert lost > 0.0
    assert Filter.of(2.0, 1e-6, 8).cost(Rounds(0.5), fixed).tail == pytest.approx(lost, rel=1e-9, abs=0.0)
    more = Filter.of(2.0, 1e-6, 8).cost(Rounds(0.5), fixed, overflow=3.0 * lost).tail
    assert more == pytest.approx(4.0 * lost, rel=1e-9, abs=0.0)


def test_orders_are_tried_up_to_the_largest() -> None:
    assert best_order(1e-4, 1e-9) == filters.MAX_ORDER


def test_a_divergence_without_sampling_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for divergence, expected in ((0.01, (0.01, 1e-3)), (9.0, (0.5 * 4 * 0.123**2, 0.0))):
        monkeypatch.setattr(filters, "sampled_divergence", lambda *_, found=(divergence, 1e-3): found)
        size = filters._size.__wrapped__(0.123, Participation("fixed-size", 0.3), 4)
        assert size == pytest.approx(expected, rel=1e-9, abs=0.0)
