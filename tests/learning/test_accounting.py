from __future__ import annotations

import pytest

from cpsgd.errors import InfeasibleError
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.option_groups import AccountOptions, CohortOptions
from cpsgd.learning.spending import Spending
from cpsgd.neighbours import Scheme
from cpsgd.planner import plan
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.rotated_binomial(clients=500, dim=200, clip_norm=1.0, levels=8, trials=200)


def make(
    scheme: Scheme = "every",
    *,
    epsilon: float | None = None,
    population: int = 500,
    cohort: int = 500,
    delta: float = 1e-6,
    protocol: Protocol = PROTOCOL,
) -> Spending:
    options = CohortOptions(cohort=cohort, rounds=1, participation=scheme)
    cohorts = Cohorts.plan(options, population=population, key=0, delta=delta / 20)
    return Spending(protocol, cohorts, AccountOptions(delta=delta, epsilon=epsilon))


def test_rounds_count_with_the_messages_that_arrived() -> None:
    spending = make()
    assert spending.guarantee() is None
    for survivors in (500, 450, 480):
        spending.charge(survivors)
    expected = guarantee_over_rounds(PROTOCOL, 1e-6, surviving=[500, 450, 480], participation="every")
    found = spending.guarantee()
    assert found is not None
    assert (found.epsilon, found.rounds) == (expected.epsilon, 3)


def test_once_the_smallest_round_says_it_all() -> None:
    spending = make("once")
    for survivors in (500, 400, 480):
        spending.charge(survivors)
    found = spending.guarantee()
    expected = guarantee_over_rounds(PROTOCOL, 1e-6, surviving=[500, 400, 480], participation="once")
    assert found == expected


def test_colluding_clients_noise_does_not_count() -> None:
    cohorts = Cohorts.plan(CohortOptions(cohort=500, rounds=1), population=500, key=0, delta=0.1)
    honest = Spending(PROTOCOL, cohorts, AccountOptions(delta=1e-6))
    wary = Spending(PROTOCOL, cohorts, AccountOptions(delta=1e-6, colluding=100))
    found = [spending.guarantee([size]) for spending, size in ((wary, 500), (honest, 400), (honest, 500))]
    epsilons = [each.epsilon for each in found if each is not None]
    assert epsilons[0] == epsilons[1] > epsilons[2]


def test_the_budget_says_how_many_rounds_it_buys() -> None:
    best = plan(clients=500, dim=200, epsilon=3.0, delta=1e-6, bits=10, rounds=7, participation="every")
    spending = make(epsilon=3.0, protocol=best.protocol)
    spending.check(7, 500)
    with pytest.raises(InfeasibleError, match=r"buys 7\."):
        spending.check(30, 500)
    # What was spent counts: 5 of them, and only 7 in all.
    for _ in range(5):
        spending.charge(500)
    with pytest.raises(InfeasibleError, match=r"buys 7\."):
        spending.check(8, 500)
    spending.check(7, 500)


def test_where_clients_take_part_once_a_budget_buys_all_or_none() -> None:
    with pytest.raises(InfeasibleError, match=r"buys 0\."):
        make("once", epsilon=0.01).check(5, 500)


def test_a_round_with_too_few_messages_is_not_affordable() -> None:
    best = plan(clients=500, dim=200, epsilon=3.0, delta=1e-6, bits=10, dropout=0.1)
    spending = make("once", epsilon=3.0, protocol=best.protocol)
    spending.check(5, 450)
    assert spending.affords(450, rounds_left=4)
    assert not spending.affords(430, rounds_left=4)
    assert not spending.affords(0, rounds_left=4)
    unlimited = make("once", protocol=best.protocol)
    unlimited.check(5, 450)
    assert unlimited.affords(430, rounds_left=4)
    assert not unlimited.affords(0, rounds_left=4)


def test_a_small_round_may_be_paid_for_by_rounds_that_are_not_run() -> None:
    best = plan(clients=500, dim=200, epsilon=3.0, delta=1e-6, bits=10, rounds=8, participation="every")
    spending = make(epsilon=3.0, protocol=best.protocol)
    spending.check(4, 500)
    assert spending.affords(400, rounds_left=3)
    assert not spending.affords(50, rounds_left=3)


def test_poisson_is_accounted_with_its_filled_cohort_and_overflow() -> None:
    spending = make("poisson", population=5000, cohort=500)
    messages = spending._messages
    for _ in range(10):
        spending.charge(messages)
    found = spending.guarantee()
    assert found is not None
    assert (found.adjacency, found.delta) == ("zero-out", 1e-6)
    simple = guarantee_over_rounds(
        PROTOCOL, 1e-6, rounds=10, participation="poisson:0.1", adjacency="zero-out", surviving=messages
    )
    assert simple.epsilon < found.epsilon < simple.epsilon * 1.001
    # Sizes are rounded down, by 2 % at most.
    assert spending.rounded_down(messages) == messages
    for survivors in (messages - 1, messages - 30, 1):
        rounded = spending.rounded_down(survivors)
        assert max(1, survivors - messages // 50) <= rounded <= survivors
