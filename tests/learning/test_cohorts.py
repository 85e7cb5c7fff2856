from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.learning.cohorts import OVERFLOW_SHARE, Cohorts, permuted
from cpsgd.learning.option_groups import CohortOptions
from cpsgd.neighbours import Scheme


def make(
    scheme: Scheme = "once",
    population: int = 1000,
    cohort: int = 100,
    rounds: int = 10,
    key: int = 1,
    overflow: float = 1e-9,
) -> Cohorts:
    options = CohortOptions(cohort=cohort, rounds=rounds, participation=scheme)
    return Cohorts.plan(options, population=population, key=key, delta=overflow * rounds / OVERFLOW_SHARE)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
@pytest.mark.parametrize("key", [0, 7])
def test_permutations_are_one_to_one(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_permutations_look_random() -> None:
    # 100,000 of 25 million: spread evenly over 50 bins, and over the last digits; false alarms 1e-7 each.
    numbers = permuted(np.arange(100_000), 25_000_000, key=3)
    assert len(set(numbers.tolist())) == 100_000
    for bins in (numbers * 50 // 25_000_000, numbers % 97):
        assert chisquare(np.bincount(bins)).pvalue > 1e-7
    # Neighbours do not stay neighbours.
    assert np.abs(np.diff(numbers)).min() < 5_000 < np.median(np.abs(np.diff(numbers)))


def test_once_is_disjoint_and_covers_everybody() -> None:
    cohorts = make()
    members = np.concatenate([cohorts.clients(r) for r in range(10)])
    assert sorted(members.tolist()) == list(range(1000))
    assert cohorts.clients(3).tolist() == make().clients(3).tolist()
    assert cohorts.clients(3).tolist() != make(key=2).clients(3).tolist()
    assert str(cohorts.participation) == "once"


def test_nobody_takes_part_twice_in_a_round_too_many() -> None:
    with pytest.raises(InfeasibleError, match="took part before"):
        make().clients(10)


def test_fixed_size_draws_without_repetition() -> None:
    cohorts = make("fixed-size")
    for number in range(3):
        members = cohorts.clients(number)
        assert len(set(members.tolist())) == 100
        assert 0 <= members.min() <= members.max() < 1000
    assert cohorts.clients(0).tolist() != cohorts.clients(1).tolist()
    assert cohorts.participation.rate == 0.1
    big = make("fixed-size", population=25_000_000, cohort=10_000).clients(0)
    assert len(np.unique(big)) == 10_000


def test_poisson_has_the_binomial_size_and_room_for_it() -> None:
    cohorts = make("poisson")
    sizes = np.array([len(cohorts.clients(r)) for r in range(2000)])
    # Mean 100 and variance 90; bounds of 5.4 standard deviations.
    assert abs(sizes.mean() - 100) < 5.4 * np.sqrt(90 / 2000)
    assert abs(sizes.var() - 90) < 5.4 * 90 * np.sqrt(2 / 2000)
    assert sizes.max() < cohorts.messages
    # The others' draws fill all places with probability at most `overflow`.
    assert binom.sf(cohorts.messages - 1, 999, 0.1) <= cohorts.overflow <= 1e-9
    assert cohorts.messages < 170


def test_every() -> None:
    assert make("every", cohort=1000, rounds=99).clients(5).tolist() == list(range(1000))


def test_bad_input() -> None:
    with pytest.raises(ParameterError, match="larger than the population"):
        make(cohort=1001, rounds=1)
    with pytest.raises(InfeasibleError, match="enough for 10 disjoint"):
        make(rounds=11)
    with pytest.raises(ParameterError, match="every"):
        make("every")
    with pytest.raises(ParameterError, match="once"):
        make("twice")


@pytest.mark.parametrize(("population", "cohort"), [(1000, 250), (997, 100), (50, 50), (50, 49), (60, 25)])
def test_passes_go_round_and_keep_clients_apart(population: int, cohort: int) -> None:
    cohorts = make("apart", population=population, cohort=cohort, rounds=40)
    apart = cohorts.participation.separation
    assert apart == population // cohort
    last: dict[int, int] = {}
    counts = np.zeros(population, dtype=int)
    for number, clients in enumerate(cohorts.several(range(40))):
        assert clients.tolist() == cohorts.clients(number).tolist()
        assert len(set(clients.tolist())) == cohort
        counts[clients] += 1
        for client in clients.tolist():
            assert number - last.get(client, number - apart) >= apart
            last[client] = number
    assert counts.max() <= cohorts.participation.counted_rounds(40)
    assert counts.max() - counts.min() <= 1


def test_one_pass_is_the_same_as_once() -> None:
    assert make("apart").clients(3).tolist() == make("once").clients(3).tolist()
