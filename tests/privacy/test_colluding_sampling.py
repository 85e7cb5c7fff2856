"""Sampling, seen by colluding clients: all draws of small populations are enumerated, and the exact δ computed.

Colluders know of themselves who was drawn, and who sends noise only. 0.2.0 did not count that.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import cpsgd.privacy.proofs
from cpsgd import Protocol, Run, guarantee
from cpsgd.errors import ParameterError
from cpsgd.ledger import Budget, RoundEvent
from cpsgd.ledger.charging import priced
from cpsgd.ledger.kinds import Account
from cpsgd.neighbours import Participation
from cpsgd.planner.planning import plan
from cpsgd.privacy.fixed_size import SampledRounds, sampled_profile
from cpsgd.privacy.gaussian import gdp_delta
from cpsgd.privacy.loss_sums import COARSE_POINTS
from cpsgd.privacy.release import check_release

Seen = tuple[frozenset[int], frozenset[int]]
"""Colluders who were drawn, and colluders who send noise only."""
Laws = dict[Seen, tuple[dict[int, float], int]]
"""By what colluders see: probabilities of the honest sum without noise, and the honest messages."""

SIGMA = 200.0


def delta_at(epsilon: float, first: Laws, second: Laws, sigma: float = SIGMA) -> float:
    """Returns the exact δ: the sum, over all that colluders see, of ∫ (a - e^ε b)₊ for sums with Gaussian noise."""
    found = 0.0
    for seen in first:
        (a, honest), (b, _) = first[seen], second[seen]
        deviation = sigma * math.sqrt(honest)
        x = np.linspace(-14.0 * deviation - 10.0, 14.0 * deviation + 10.0, 8_001)
        density = {
            name: sum(p * norm.pdf(x, mean, deviation) for mean, p in law.items()) for name, law in (("a", a), ("b", b))
        }
        found += float(np.trapezoid(np.maximum(density["a"] - math.exp(epsilon) * density["b"], 0.0), x))
    return found


def fixed_size(population: int, cohort: int, colluders: int, vectors: list[int]) -> Laws:
    """All cohorts of a fixed size; the first clients are honest, the last ones collude."""
    sums: dict[Seen, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    everybody = list(itertools.combinations(range(population), cohort))
    for drawn in everybody:
        liars = frozenset(i for i in drawn if i >= population - colluders)
        sums[liars, frozenset()][sum(vectors[i] for i in drawn if i not in liars)] += 1.0 / len(everybody)
    return {seen: (dict(law), cohort - len(seen[0])) for seen, law in sums.items() if cohort > len(seen[0])}


def poisson(population: int, messages: int, colluders: int, rate: float, vectors: list[int]) -> Laws:
    """All draws with probability `rate` each, filled up to `messages` by clients chosen among those not drawn."""
    sums: dict[Seen, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    honest = {}
    for draw in range(1 << population):
        drawn = frozenset(i for i in range(population) if draw >> i & 1)
        others = [i for i in range(population) if i not in drawn]
        if len(drawn) > messages:
            continue  # an overflow, which is charged apart
        fillers = list(itertools.combinations(others, messages - len(drawn)))
        for filling in fillers:
            seen = (
                frozenset(i for i in drawn if i >= population - colluders),
                frozenset(i for i in filling if i >= population - colluders),
            )
            chance = rate ** len(drawn) * (1.0 - rate) ** len(others) / len(fillers)
            sums[seen][sum(vectors[i] for i in drawn if i not in seen[0])] += chance
            honest[seen] = messages - len(seen[0]) - len(seen[1])
    return {seen: (dict(law), honest[seen]) for seen, law in sums.items() if honest[seen]}


def neighbours(population: int) -> Iterator[tuple[list[int], list[int]]]:
    """Two vectors of the first client, and others that are like either of them."""
    for others in (1, -1):
        for own in (1, -1):
            yield [own, *[others] * (population - 1)], [-own, *[others] * (population - 1)]


def claimed(cohort: int, participation: Participation, colluding: int, delta: float, adjacency: str) -> float:
    protocol = Protocol.gaussian(clients=cohort, dim=1, clip_norm=1.0, sigma=SIGMA)
    run = Run.of(protocol, participation=participation, colluding=colluding, adjacency=adjacency)
    return guarantee(run, delta).epsilon


def test_three_of_four_clients_one_of_whom_colludes() -> None:
    # 0.2.0 claimed 0.03185.
    found = claimed(3, Participation.parse("fixed-size:0.75"), 1, 1e-12, "replace-one")
    first, second = (fixed_size(4, 3, 1, vectors) for vectors in ([1, -1, -1, -1], [-1, -1, -1, -1]))
    assert delta_at(0.0332, first, second) > 1e-12 > delta_at(0.0334, first, second)
    assert 0.0333 < found < 0.0346


@pytest.mark.parametrize(
    ("population", "cohort", "colluding", "loose"),
    [
        (4, 3, 1, 1.12),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [(6, 4, 2, 1.12), (8, 4, 1, 1.1), (10, 5, 1, 1.08), (5, 3, 1, 1.32), (8, 5, 2, 1.21)]
        ),
    ],
)
def test_the_claim_is_near_the_worst_population(population: int, cohort: int, colluding: int, loose: float) -> None:
    # At most k of the cohort collude, and at most the same share of the population (1.67 and 3.2 in the last two).
    claim = claimed(
        cohort, Participation.fixed_size(cohort=cohort, population=population), colluding, 1e-6, "replace-one"
    )
    worst = 0.0
    for colluders in range(colluding * population // cohort + 1):
        laws = []
        for own in (1, -1):
            drawn = fixed_size(population, cohort, colluders, [own, *[-1] * (population - 1)])
            allowed = {seen: law for seen, law in drawn.items() if len(seen[0]) <= colluding}
            total = sum(sum(law.values()) for law, _ in allowed.values())
            laws.append({s: ({x: p / total for x, p in law.items()}, n) for s, (law, n) in allowed.items()})
        assert delta_at(claim, *laws) <= 1e-6
        worst = max(worst, delta_at(claim / loose, *laws))
    assert worst > 1e-6


@pytest.mark.parametrize("rounds", [1, 7])
def test_rounds_of_unknown_kinds_are_covered(rounds: int) -> None:
    kinds = ((1.0, 0.02), (0.7, 0.04), (0.5, 0.05))
    (mu, rate), *others = kinds
    found = sampled_profile([SampledRounds(mu, rate, rounds, tuple(others))], COARSE_POINTS)
    for epsilon in (0.01, 0.1, 0.5, 2.0):
        largest = 0.0
        for chosen in itertools.combinations_with_replacement(kinds, rounds):
            if len(set(chosen)) in (1, 3):
                parts = [SampledRounds(*kind, chosen.count(kind)) for kind in set(chosen)]
                # Bounds on both sides are within 3 %.
                largest = max(largest, sampled_profile(parts, COARSE_POINTS)(epsilon) * 0.97)
        assert largest <= found(epsilon)
        if rounds == 1:
            exact = max(q * gdp_delta(m, math.log1p(math.expm1(epsilon) / q)) for m, q in kinds)
            assert exact <= found(epsilon) <= 1.03 * exact


def test_a_cohort_that_is_too_large_is_refused() -> None:
    protocol = plan(clients=100, dim=10, epsilon=1.0, delta=1e-6, bits=16, participation="fixed-size:0.1", colluding=20)
    check_release(protocol.protocol, 100)
    with pytest.raises(ParameterError, match="Draw the planned number"):
        check_release(protocol.protocol, 101)


@pytest.mark.parametrize("population", [3, *(pytest.param(each, marks=pytest.mark.thorough) for each in (4, 5))])
def test_no_enumerated_population_has_a_larger_delta_than_is_claimed(population: int) -> None:
    checked = 0
    for cohort, colluders in itertools.product(range(2, population), range(1, population - 1)):
        # The fewest colluders per cohort for which the claim covers this population.
        colluding = max(min(colluders, cohort), math.ceil(colluders * cohort / population))
        if colluding >= cohort:
            continue
        participation = Participation.fixed_size(cohort=cohort, population=population)
        epsilon = claimed(cohort, participation, colluding, 1e-6, "replace-one")
        for pair in neighbours(population):
            first, second = (fixed_size(population, cohort, colluders, vectors) for vectors in pair)
            assert delta_at(epsilon, first, second) <= 1e-6
            checked += 1
    assert checked


@pytest.mark.parametrize(("population", "messages", "colluders"), [(6, 3, 1), (8, 4, 1), (7, 3, 2), (9, 4, 2)])
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_colluders_who_fill_up_are_covered(population: int, messages: int, colluders: int, rate: float) -> None:
    colluding = min(colluders, messages)
    assert colluders <= colluding / messages * (population - messages)  # the limit in docs/proofs/fixed-size.md
    laws = [
        poisson(population, messages, colluders, rate, [own, *[-1] * (population - 1)])
        for own in (1, 0)  # zero-out neighbours
    ]
    for delta in (1e-9, 1e-4):
        epsilon = claimed(messages, Participation.poisson(rate), colluding, delta, "zero-out")
        assert max(delta_at(epsilon, *laws), delta_at(epsilon, *laws[::-1])) <= delta * (1.0 + 1e-6)


def test_colluders_who_fill_up_learn_something() -> None:
    # Four of five others collude and none of them fills up: then the last place is the honest client's own draw.
    laws = [poisson(6, 3, 4, 0.3, [own, 0, *[0] * 4]) for own in (1, 0)]
    alone = [poisson(6, 6, 4, 0.3, [own, 0, *[0] * 4]) for own in (1, 0)]  # all send, so that nothing is learned
    # What matters is the rate given what is seen: compare the largest probability that the client was drawn.
    known, prior = (
        max(law.get(1, 0.0) / sum(law.values()) for law, honest in two[0].values() if honest == 2)
        for two in (laws, alone)
    )
    assert known > 0.45 > prior == pytest.approx(0.3)


def test_the_rate_that_colluders_know() -> None:
    rate = Participation.fixed_size(cohort=100, population=10_000)
    assert rate.known_to(0, 100) == rate
    # N = 10,000 and c = 1,000: 100 of the other 9,000, if no colluder was drawn.
    assert rate.known_to(10, 100).rate == pytest.approx(100 / 9_000, rel=1e-12)
    assert rate.known_to(10, 100).rate >= 100 / 9_000
    assert rate.known_to(100, 100).rate == rate.known_to(99, 100).rate == 1.0
    assert Participation.once().known_to(10, 100) == Participation.once()


def test_ledger_and_planner_account_for_the_same() -> None:
    protocol = Protocol.gaussian(clients=100, dim=1, clip_norm=1.0, sigma=1.0)
    run = Run.of(protocol, rounds=5, participation="fixed-size:0.01", colluding=20)
    alone = guarantee(run, 1e-6).epsilon
    event = RoundEvent(protocol, survivors=100, participation="fixed-size:0.01", colluding=20)
    budget = Budget(population="all", epsilon=50.0, delta=1e-6)
    assert priced(budget, [Account()], [event] * 5).epsilon == pytest.approx(alone, rel=1e-9)
    hidden = Run.of(protocol, rounds=5, participation="fixed-size:0.01", surviving=80)
    assert alone > 1.1 * guarantee(hidden, 1e-6).epsilon  # the same noise, nobody who knows anything
    planned = plan(
        clients=100, dim=10, epsilon=1.0, delta=1e-6, bits=16, rounds=5, participation="fixed-size:0.1", colluding=20
    )
    assert planned.guarantee.epsilon <= 1.0
    assert planned.run.sampling.rate > planned.run.participation.rate == 0.1


def test_every_proof_asks_for_the_rate_that_colluders_know() -> None:
    for file in Path(cpsgd.privacy.proofs.__path__[0]).glob("*.py"):
        assert not re.search(r"\brun\.participation|conditions\.participation\.rate", file.read_text("utf-8")), file
