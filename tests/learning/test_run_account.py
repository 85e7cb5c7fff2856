"""Spending of a run, and its ledger: every round charged once, whatever interrupts it, until nothing is left."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import BudgetExceededError, CheckpointError, InfeasibleError, ParameterError, PopulationError
from cpsgd.learning import NoPrivacy, Trainer
from cpsgd.learning.checkpoints import ChargeLog
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import ArrayDataset, Dataset
from cpsgd.learning.optimization import Server
from cpsgd.learning.option_groups import AccountOptions, CohortOptions
from cpsgd.learning.run_account import Spending
from cpsgd.ledger import Budget, Ledger
from cpsgd.neighbours import Scheme
from cpsgd.planner import plan
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.protocol import Protocol
from tests.learning.training import Crash, finish, interrupt, make_trainer, spent, weights

PROTOCOL = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=250)
DELTA = 1e-5
PROTOCOL_500 = Protocol.rotated_binomial(clients=500, dim=200, clip_norm=1.0, levels=8, trials=200)


def make(
    scheme: Scheme = "every",
    *,
    epsilon: float | None = None,
    population: int = 500,
    cohort: int = 500,
    delta: float = 1e-6,
    protocol: Protocol = PROTOCOL_500,
) -> Spending:
    options = CohortOptions(cohort=cohort, rounds=1, participation=scheme)
    cohorts = Cohorts.plan(options, population=population, key=0, delta=delta / 20)
    return Spending(protocol, cohorts, AccountOptions(delta=delta, epsilon=epsilon))


def test_rounds_count_with_the_messages_that_arrived() -> None:
    spending = make()
    assert spending.guarantee() is None
    for survivors in (500, 450, 480):
        spending.charge(survivors)
    expected = guarantee_over_rounds(PROTOCOL_500, 1e-6, surviving=[500, 450, 480], participation="every")
    found = spending.guarantee()
    assert found is not None
    assert (found.epsilon, found.rounds) == (expected.epsilon, 3)


def test_once_the_smallest_round_says_it_all() -> None:
    spending = make("once")
    for survivors in (500, 400, 480):
        spending.charge(survivors)
    found = spending.guarantee()
    expected = guarantee_over_rounds(PROTOCOL_500, 1e-6, surviving=[500, 400, 480], participation="once")
    assert found == expected


def test_colluding_clients_noise_does_not_count() -> None:
    cohorts = Cohorts.plan(CohortOptions(cohort=500, rounds=1), population=500, key=0, delta=0.1)
    honest = Spending(PROTOCOL_500, cohorts, AccountOptions(delta=1e-6))
    wary = Spending(PROTOCOL_500, cohorts, AccountOptions(delta=1e-6, colluding=100))
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
        PROTOCOL_500, 1e-6, rounds=10, participation="poisson:0.1", adjacency="zero-out", surviving=messages
    )
    assert simple.epsilon < found.epsilon < simple.epsilon * 1.001
    # Sizes are rounded down, by 2 % at most.
    assert spending.rounded_down(messages) == messages
    for survivors in (messages - 1, messages - 30, 1):
        rounded = spending.rounded_down(survivors)
        assert max(1, survivors - messages // 50) <= rounded <= survivors


# ------------------------------------------------------------------ a ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=50.0, delta=DELTA))
    return ledger


def trainer(data: Dataset, folder: Path | None, ledger: Ledger | None, **options: Any) -> Trainer:
    options = {"rounds": 4, "seed": 3, "delta": DELTA, "dropout": 0.05, **options}
    options = {"population": None if ledger is None else "people", **options}
    # A new object for a new process; a run that goes on opens it by its name.
    book = ledger and (str(ledger.path) if options.get("resume") else Ledger(ledger.path))
    return make_trainer(data, options.pop("mechanism", PROTOCOL), run_dir=folder, ledger=book, **options)


def test_the_ledger_agrees_with_the_run(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    for number in range(2):
        run = finish(trainer(triangle, tmp_path / str(number), ledger))
        if number == 0:
            # Disjoint cohorts: the costliest round.
            assert ledger.total("people").epsilon == spent(run).epsilon
    entries = ledger.events("people")
    assert [entry.event.round for entry in entries] == [0, 1, 2, 3] * 2
    assert [entry.survivors for entry in entries[4:]] == [row.survivors for row in run.history]
    assert all(entry.released for entry in entries)
    # Two runs over the same people: cohorts of one run are disjoint, those of two are not.
    assert len({entry.event.partition for entry in entries}) == 2
    fewest = min(entry.survivors for entry in entries[:4]), min(entry.survivors for entry in entries[4:])
    expected = guarantee_over_rounds(PROTOCOL, DELTA, surviving=fewest).epsilon
    assert ledger.total("people").epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scheme", ["every", "fixed-size", "poisson"])
def test_every_participation_is_accounted_alike(triangle: ArrayDataset, tmp_path: Path, scheme: str) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    adjacency: Any = "zero-out" if scheme == "poisson" else "replace-one"
    ledger.create(Budget(population="people", epsilon=50.0, delta=DELTA, adjacency=adjacency))
    cohort = triangle.size if scheme == "every" else triangle.size // 4
    run = finish(trainer(triangle, None, ledger, participation=scheme, cohort=cohort, rounds=2, dropout=0.0))
    assert ledger.total("people").epsilon == pytest.approx(spent(run).epsilon, rel=1e-6)


def test_a_run_that_costs_too_much_is_refused_before_it_begins(triangle: ArrayDataset, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    one = guarantee_over_rounds(PROTOCOL, DELTA, surviving=80).epsilon
    ledger.create(Budget(population="people", epsilon=one, delta=DELTA))
    head = ledger.head
    options: dict[str, Any] = {"participation": "every", "cohort": triangle.size, "dropout": 0.0}
    cheap = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=2)
    with pytest.raises(BudgetExceededError, match="people"):
        trainer(triangle, tmp_path / "run", ledger, mechanism=cheap, **options)
    assert ledger.head == head
    # And in the middle, if somebody else has spent what was left.
    first, second = trainer(triangle, None, ledger), trainer(triangle, None, ledger)
    finish(first)
    before = weights(second)
    with pytest.raises(BudgetExceededError):
        second.step()
    np.testing.assert_array_equal(weights(second), before)
    assert second.round == 0
    with pytest.raises(BudgetExceededError):
        second.step()  # as before, and not as a round that was interrupted
    assert len(ledger.events("people")) == 4


# ------------------------------------------------------------------ interruptions

POINTS = [
    (Ledger, "reserve", False),
    (Ledger, "reserve", True),
    (ChargeLog, "append", False),
    (ChargeLog, "append", True),
    (Ledger, "release", False),
    (Ledger, "release", True),
    (Server, "step", True),
    (Trainer, "_save", False),
]


@pytest.mark.parametrize(("owner", "name", "afterwards"), POINTS)
@pytest.mark.parametrize("seed", [3, None])
def test_no_round_is_charged_twice_or_forgotten(
    triangle: ArrayDataset,
    tmp_path: Path,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    afterwards: bool,
    seed: int | None,
) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        with monkeypatch.context() as patched:
            interrupt(patched, owner, name, afterwards, 1)
            with contextlib.suppress(Crash):
                finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
    resumed = finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
    entries = ledger.events("people")
    assert Counter(entry.event.round for entry in entries) == dict.fromkeys(range(4), 1)
    released = {row.round for row in resumed.history if row.released}
    assert {entry.event.round for entry in entries if entry.released} >= released
    if seed is not None:
        assert released == set(range(4))
        assert all(entry.released for entry in entries)
        np.testing.assert_array_equal(weights(resumed), weights(finish(trainer(triangle, None, None))))
    ledger.verify()


def test_an_older_copy_of_the_folder_is_a_second_release_without_a_seed(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger
) -> None:
    for seed, extra in ((3, 0), (None, 3)):
        before = len(ledger.events("people"))
        folder, copy = tmp_path / f"run{seed}", tmp_path / f"copy{seed}"
        run = trainer(triangle, folder, ledger, seed=seed)
        run.step()
        del run
        shutil.copytree(folder, copy)
        finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
        finish(trainer(triangle, copy, ledger, seed=seed, resume=True))
        entries = ledger.events("people")[before:]
        assert len(entries) == 4 + extra
        # Clients of a repeated round are in two rounds, which no partition may hide.
        assert sum(entry.event.partition == "" for entry in entries) == extra


def test_a_run_stays_with_its_ledger(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    folder = tmp_path / "run"
    run = trainer(triangle, folder, ledger)
    run.step()
    del run
    with pytest.raises(CheckpointError, match="another budget"):
        trainer(triangle, folder, None, resume=True)
    other = Ledger(tmp_path / "other.ledger")
    other.create(Budget(population="people", epsilon=50.0, delta=DELTA))
    with pytest.raises(CheckpointError, match="not on the ledger"):
        trainer(triangle, folder, other, resume=True)
    finish(trainer(triangle, folder, ledger, resume=True))
    bare = tmp_path / "bare"
    run = trainer(triangle, bare, None)
    run.step()
    del run
    with pytest.raises(CheckpointError, match="another budget"):
        trainer(triangle, bare, ledger, resume=True)


def test_what_cannot_be_charged(triangle: ArrayDataset, ledger: Ledger) -> None:
    with pytest.raises(ParameterError, match="private at all"):
        trainer(triangle, None, ledger, mechanism=NoPrivacy(1.0), delta=None)
    with pytest.raises(ParameterError, match="population"):
        trainer(triangle, None, ledger, population=None)
    with pytest.raises(ParameterError, match="population"):
        trainer(triangle, None, None, population="people")
    with pytest.raises(PopulationError):
        trainer(triangle, None, ledger, population="nobody")
    with pytest.raises(ParameterError, match="zero-out"):
        trainer(triangle, None, ledger, adjacency="zero-out")
    ledger.create(Budget(population="examples", epsilon=50.0, delta=DELTA, unit="example"))
    with pytest.raises(ParameterError, match="protects one example"):
        trainer(triangle, None, ledger, population="examples")
