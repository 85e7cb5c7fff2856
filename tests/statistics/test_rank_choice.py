"""Quantiles by a choice of bins: the exact law, its privacy by enumeration, ranks, intervals, and the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import statistics
from cpsgd.errors import InfeasibleError
from cpsgd.ledger import Budget, Ledger
from cpsgd.neighbours import Adjacency
from cpsgd.statistics import Quantiles, prepare
from cpsgd.statistics.rank_choice import RankChoice, RankTask, choose_nearest, distances_to
from cpsgd.statistics.table_options import events_for

AGE = {"age": (0.0, 100.0)}


def law(distances: Sequence[float], spread: float) -> list[float]:
    """The probabilities of permute-and-flip: a random order, and the first with heads."""
    odds = [math.exp(-(each - min(distances)) / spread) for each in distances]
    found = [0.0] * len(odds)
    for heads in product((False, True), repeat=len(odds)):
        chance = math.prod(p if head else 1.0 - p for head, p in zip(heads, odds, strict=True))
        for i, head in enumerate(heads):
            found[i] += chance / sum(heads) if head else 0.0
    return found


def test_bins_are_chosen_by_the_law_of_permute_and_flip() -> None:
    distances, rounds = [7, 3, 3, 4, 12], 1500
    expected = law(distances, 2.5 * 2)
    found = np.bincount([choose_nearest(np.array(distances), 5) for _ in range(rounds)], minlength=5) / rounds
    # Six standard deviations, of five bins: false alarms are below 1e-8.
    assert (np.abs(found - expected) < 6.0 * np.sqrt(np.array(expected) / rounds)).all()
    assert sum(expected) == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_a_choice_between_neighbours_loses_what_is_proved(spread: float) -> None:
    """All tables of three users in four bins, and all that differ in one user: the largest loss is below 2/spread."""
    bins, users, worst = 4, 3, 0.0
    tables = {
        places: law(distances_to(2, np.bincount(places, minlength=bins)).tolist(), spread)
        for places in combinations_with_replacement(range(bins), users)
    }
    for places, own in tables.items():
        for i, other in product(range(users), range(bins)):
            changed = tuple(sorted((*places[:i], *places[i + 1 :], other)))
            worst = max(worst, *(math.log(p / q) for p, q in zip(own, tables[changed], strict=True)))
    assert 1.0 / spread < worst <= 2.0 / spread + 1e-12


def task_of(question: Quantiles, epsilon: float = 1.0, confidence: float = 0.95) -> RankTask:
    return RankTask(question, RankChoice.of(question, epsilon, confidence))


def test_a_user_changes_no_rank_by_more_than_is_paid_for() -> None:
    task, generator = task_of(Quantiles(AGE, bins=4)), np.random.default_rng(0)
    for rows in (1, 2, 3, 7, 50, 1000):
        values = generator.uniform(-20.0, 120.0, rows)
        ranks = np.cumsum(task.sum({"age": values}, np.array([rows])))
        # Six seventh parts of a unit are rounded up in some bins; all together are one user, and half a unit per bin.
        assert abs(int(ranks[-1]) - task.noise.units) <= task.noise.bins // 2
        assert 0 <= ranks[0] <= ranks[-1] <= task.noise.distance


def test_sums_of_parts_are_those_of_the_whole() -> None:
    generator = np.random.default_rng(1)
    table = {"id": np.repeat(np.arange(300), 3), "age": generator.uniform(0, 100, 900)}
    job = prepare(Quantiles(AGE, [0.5]), user="id", epsilon=1.0).job
    assert isinstance(job.tasks[0], RankTask)
    parts = [{name: column[rows] for name, column in table.items()} for rows in (slice(0, 450), slice(450, None))]
    merged, whole = job.merged([job.partial(part) for part in parts]), job.partial(table)
    assert np.array_equal(merged.sums[0], whole.sums[0])
    assert merged.users == whole.users == 300


def test_epsilon_is_kept_and_charged(tmp_path: Path) -> None:
    two = AGE | {"pay": (0.0, 1.0)}
    # At ε below 2^-12, one in a whole number may be 10^-4 too small for a record.
    for quantiles, columns, epsilon in (([0.5], AGE, 0.7), ([0.1, 0.9], two, 0.7), ([0.5], AGE, 2.2521769e-4)):
        choice = RankChoice.of(Quantiles(columns, quantiles), epsilon)
        assert epsilon * (1.0 - 1e-6) < choice.epsilon <= epsilon * (1.0 + 1e-11)
        ledger = Ledger(tmp_path / f"{len(quantiles)}, {epsilon}.ledger")
        for name in ("replace-one", "zero-out"):  # both change ranks by one user
            ledger.create(Budget(population=name, epsilon=20.0, delta=1e-5, adjacency=Adjacency.parse(name)))
            quoted = ledger.quote(name, events_for(ledger, "", None, [choice])).epsilon
            assert choice.epsilon <= quoted <= choice.epsilon * 1.001
    with pytest.raises(InfeasibleError, match="too small"):
        RankChoice.of(Quantiles(AGE), 1e-8)


@pytest.mark.parametrize(
    ("options", "mechanism"),
    [
        ({"quantiles": [0.5]}, "permute-and-flip"),
        ({"quantiles": [0.5], "delta": 1e-6}, "permute-and-flip"),
        ({"quantiles": [0.1, 0.3, 0.5, 0.7, 0.9], "delta": 1e-6}, "discrete-gaussian"),
        ({"quantiles": [0.5], "missing": "drop", "delta": 1e-6}, "discrete-gaussian"),
        ({"quantiles": [0.5], "neighbours": "add-remove", "delta": 1e-6}, "discrete-gaussian"),
        ({"quantiles": [0.5], "group_by": {"sex": ["f", "m"]}, "delta": 1e-6}, "discrete-gaussian"),
    ],
)
def test_the_nearer_of_both_is_taken(options: dict[str, Any], mechanism: str) -> None:
    table = {"age": np.linspace(0.0, 100.0, 400), "sex": ["f", "m"] * 200}
    found = statistics.quantiles(table, bounds=AGE, bins=32, epsilon=1.0, **options)
    assert found.mechanism == mechanism
    assert found.epsilon <= 1.0
    assert found.delta == (0.0 if mechanism == "permute-and-flip" else 1e-6)


@pytest.mark.parametrize("values", ["even", "one value", "two values", "the ends"])
def test_intervals_hold_whatever_the_values(values: str) -> None:
    table = {
        "even": np.linspace(0.0, 100.0, 501),
        "one value": np.full(501, 40.0),
        "two values": np.repeat([10.0, 90.0], [250, 251]),
        "the ends": np.repeat([-5.0, 50.0, 500.0], [240, 21, 240]),
    }[values]
    task = task_of(Quantiles(AGE, [0.3, 0.5], bins=16), epsilon=2.0, confidence=0.5)
    sums = task.sum({"age": table}, np.ones(501, dtype=np.int64))
    exact = np.quantile(np.clip(table, 0.0, 100.0), [0.3, 0.5], method="inverted_cdf")
    rounds, held, width = 40, np.zeros(2), 100.0 / task.noise.bins
    for _ in range(rounds):
        found = task.read(task.release(sums, 501), 501, 0.5)
        held += (found.low[0] <= exact) & (exact <= found.high[0])
        assert ((found.low <= found.values) & (found.values <= found.high)).all()
        if values == "one value":
            assert np.abs(found.values - 40.0).max() <= width
    # Fewer than 5 of 40 at a chance of one half at least: 1e-7 for each of eight.
    assert (held >= 5).all()


def test_the_end_of_an_interval_fails_as_rarely_as_it_says_where_that_is_hardest(fixed_seed: None) -> None:
    """All bins but the quantile's own are just as far away as makes them wrong, and many may have heads."""
    noise = RankChoice.of(Quantiles(AGE, [0.5], bins=2), 2.0, confidence=0.5)
    users = np.zeros(noise.bins, dtype=np.int64)
    users[[0, -1]] = 500 * noise.units
    found = np.array([noise.choose(users, 1000)[0] for _ in range(500)])
    # With K heads among 30 bins, each of chance 0.5/32, E[K/(K + 1)] = 0.20, less where the value is in the first bin.
    # At most 0.25 may be wrong. Further away, at ln(B/β), it would be 0.11; five standard deviations of both.
    assert 0.135 < np.mean([found[:, 1] > 0, found[:, 2] < noise.bins - 1]) < 0.265


def test_a_report_chooses_bins_too() -> None:
    table = {"age": np.linspace(0.0, 100.0, 400), "yes": [0, 1] * 200}
    questions = {"median": Quantiles(AGE, [0.5], bins=32), "yes": statistics.Count(["yes"])}
    found = statistics.report(table, questions, epsilon=2.0, wanted={"median": 0.02, "yes": 4.0})
    assert found["median"].mechanism == "permute-and-flip"
    assert found.method == found["median"].method == "table-choice"
    assert (found.claim.delta, found.claim.epsilon <= 2.0) == (0.0, True)
    assert found.split["median"].error / 0.02 == pytest.approx(found.split["yes"].error / 4.0, rel=0.3)


@pytest.mark.filterwarnings("ignore::cpsgd.statistics.ClippingWarning")
def test_bins_are_of_the_bounds_that_were_found() -> None:
    table = {"age": np.linspace(40.0, 60.0, 4000)}
    found = statistics.quantiles(table, [0.5], columns=["age"], bins=32, epsilon=16.0)
    assert found.mechanism == "permute-and-flip"
    assert abs(found.values[0] - 50.0) < 2.0
    low, high = found.bounds["age"]
    assert low <= found.low[0] <= found.high[0] <= high
