"""A training run with correlated noise on a ledger: one event, paid for before its first result."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import BudgetExceededError, CheckpointError, EntryError, ParameterError
from cpsgd.learning import Trainer
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.planner import Plan, plan
from tests.learning.training import DIM, finish, make_trainer, weights

DELTA, ROUNDS = 1e-5, 4
ONCE = plan(100, DIM, 2.0, DELTA, 1.0, bits=12, rounds=ROUNDS, participation="once", correlated=2)
EVERY = plan(600, DIM, 2.0, DELTA, 1.0, bits=12, rounds=ROUNDS, participation="every", correlated=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return opened(tmp_path, epsilon=8.0)


def opened(folder: Path, **budget: Any) -> Ledger:
    ledger = Ledger(folder / "budgets.ledger")
    ledger.create(Budget(population="people", delta=DELTA, **budget))
    return ledger


def trainer(
    data: ArrayDataset,
    ledger: Ledger,
    folder: Path | None = None,
    *,
    mechanism: Plan = ONCE,
    seed: int | None = None,
    resume: bool = False,
) -> Trainer:
    options = {"cohort": mechanism.protocol.clients, "rounds": None, "lr": 0.5, "run_dir": folder, "resume": resume}
    return make_trainer(data, mechanism, ledger=ledger, population="people", seed=seed, **options)


def charge(ledger: Ledger) -> float:
    return ledger.total("people").epsilon


@pytest.mark.parametrize("mechanism", [ONCE, EVERY], ids=["once", "every"])
@pytest.mark.parametrize("accounting", ["planned", "adaptive"])
def test_a_run_is_paid_for_with_its_first_round(
    triangle: ArrayDataset, tmp_path: Path, mechanism: Plan, accounting: Any
) -> None:
    ledger = opened(tmp_path, epsilon=3.0, accounting=accounting)
    run = trainer(triangle, ledger, mechanism=mechanism)
    assert charge(ledger) == 0.0
    run.step()
    first = charge(ledger)
    if accounting == "planned":
        assert first == mechanism.guarantee.epsilon
    assert first >= mechanism.guarantee.epsilon
    # Whether it goes on or stops here.
    finish(run)
    assert charge(ledger) == first
    assert [entry.event.round for entry in ledger.events("people")] == list(range(ROUNDS))
    ledger.verify()


def test_a_run_that_is_resumed_pays_nothing_more_and_a_second_one_does(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger
) -> None:
    run = trainer(triangle, ledger, tmp_path / "run")
    run.step()
    del run
    first = charge(ledger)
    finish(trainer(triangle, ledger, tmp_path / "run", resume=True))
    assert charge(ledger) == first
    other = trainer(triangle, ledger)
    other.step()
    both = charge(ledger)
    assert 1.3 * first < both < 2.0 * first
    finish(other)
    assert charge(ledger) == both
    # Somebody else's round composes with both, each of which is one.
    ledger.reserve("people", RoundEvent(ONCE.protocol, survivors=100))
    assert charge(ledger) > both


def test_what_is_left_must_buy_the_whole_run(triangle: ArrayDataset, tmp_path: Path) -> None:
    small = opened(tmp_path, epsilon=1.2 * ONCE.guarantee.epsilon)
    first, second = trainer(triangle, small), trainer(triangle, small)
    finish(first)
    for _ in range(2):  # as before, and not as a round that was interrupted
        with pytest.raises(BudgetExceededError):
            second.step()
    with pytest.raises(BudgetExceededError):
        trainer(triangle, small)
    assert len(small.events("people")) == ROUNDS


def test_noise_is_never_used_again_from_an_older_copy(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run = trainer(triangle, ledger, folder)
    run.step()
    del run
    shutil.copytree(folder, copy)
    # Two at once: what the one has released, the other may not.
    early = trainer(triangle, ledger, copy, resume=True)
    later = trainer(triangle, ledger, folder, resume=True)
    later.step()
    before = weights(early)
    with pytest.raises(CheckpointError, match="older copy"):
        early.step()
    np.testing.assert_array_equal(weights(early), before)
    del early, later
    entries, spent = len(ledger.events("people")), charge(ledger)
    with pytest.raises(CheckpointError, match="older copy"):
        trainer(triangle, ledger, copy, resume=True)
    finish(trainer(triangle, ledger, folder, resume=True))
    assert (len(ledger.events("people")), charge(ledger)) == (entries + 2, spent)


def test_two_that_reserve_at_once_do_not_both_release(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    begun = trainer(triangle, ledger, folder)
    del begun
    shutil.copytree(folder, copy)
    one, other = trainer(triangle, ledger, folder, resume=True), trainer(triangle, ledger, copy, resume=True)
    real = other._folder.charge  # type: ignore[union-attr]

    def meanwhile(number: int, survivors: int) -> None:
        real(number, survivors)
        one.step()

    monkeypatch.setattr(other._folder, "charge", meanwhile)
    with pytest.raises(EntryError, match="released before"):
        other.step()
    assert one.round == 1


def test_with_a_seed_an_older_copy_has_the_same_rounds_again(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run = trainer(triangle, ledger, folder, seed=3)
    run.step()
    del run
    shutil.copytree(folder, copy)
    first = finish(trainer(triangle, ledger, folder, seed=3, resume=True))
    second = finish(trainer(triangle, ledger, copy, seed=3, resume=True))
    np.testing.assert_array_equal(weights(first), weights(second))
    assert len(ledger.events("people")) == ROUNDS


def test_a_round_that_was_charged_and_lost_is_no_older_copy(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the release and the mean, and once between the reservation and the log."""
    run = trainer(triangle, ledger, tmp_path / "run")
    run.step()
    for owner, name in ((type(run._account.charges), "release"), (type(run._folder), "charge")):
        with monkeypatch.context() as patched:
            real = getattr(owner, name)

            def killed(*arguments: Any, real: Any = real, name: str = name) -> None:
                if name == "release":
                    real(*arguments)
                raise KeyboardInterrupt

            patched.setattr(owner, name, killed)
            with pytest.raises(KeyboardInterrupt):
                run.step()
        del run
        run = trainer(triangle, ledger, tmp_path / "run", resume=True)
    assert run.round == 2
    finish(run)
    assert [metrics.released for metrics in run.history] == [True, False, True, True]
    assert [entry.event.round for entry in ledger.events("people")] == list(range(ROUNDS))
    assert charge(ledger) == ONCE.guarantee.epsilon


def test_more_messages_than_were_planned_are_not_released(ledger: Ledger) -> None:
    entry = ledger.reserve("people", RoundEvent(ONCE.protocol, survivors=90))
    head = ledger.head
    with pytest.raises(ParameterError, match="at most clients=100"):
        ledger.release(entry, survivors=101)
    assert ledger.head == head
    assert ledger.release(entry, survivors=100).released
