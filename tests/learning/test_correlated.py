"""Training with noise that is correlated over rounds, also on a ledger: one event, paid for before its first result."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import BudgetExceededError, CheckpointError, EntryError, ParameterError
from cpsgd.learning import Trainer, mlp
from cpsgd.learning.datasets import ArrayDataset, load_digits
from cpsgd.learning.experiment import Experiment
from cpsgd.learning.settings import Settings
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.planner import Plan, plan
from tests.learning.training import DIM, finish, make_trainer, weights

DATA = load_digits()
COHORT, ROUNDS, WIDTH = 100, 8, 650
PLAN = plan(COHORT, WIDTH, 8.0, 1e-5, 1.0, bits=12, rounds=ROUNDS, participation="once", correlated=4)


def trainer(folder: Path | None = None, *, resume: bool = False, seed: int | None = 3, **cohorts: Any) -> Trainer:
    model = mlp(DATA.feature_dim, DATA.classes or 0, hidden=(), seed=0)
    options = {"cohort": COHORT, "rounds": None, "lr": 0.5, "seed": seed, "run_dir": folder, "resume": resume}
    return make_trainer(DATA, PLAN, model, **{**options, **cohorts})


def test_a_run_costs_what_was_planned_from_its_first_round_on() -> None:
    run = trainer()
    epsilons = [metrics.epsilon for metrics in run.run()]
    assert len(epsilons) == ROUNDS
    assert set(epsilons) == {PLAN.guarantee.epsilon}
    assert 0.99 * 8.0 < PLAN.guarantee.epsilon <= 8.0


def test_less_noise_is_left_in_the_model_than_independent_noise_would_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients: the model is what noise has made of it."""
    run = trainer()
    monkeypatch.setattr(run._backend.clipping, "rows", lambda rows: 0 * rows)
    start = weights(run)
    moved = np.linalg.norm(weights(finish(run)) - start) / 0.5
    mechanism = PLAN.protocol.mechanism
    correlation = mechanism.correlation  # type: ignore[attr-defined]
    assert correlation is not None
    rest = ROUNDS * (mechanism.noise.own_variance + 1 / 12)  # type: ignore[attr-defined]
    z = mechanism.noise_deviation**2 * correlation.prefix_variance()[-1]  # type: ignore[attr-defined]
    assert moved == pytest.approx(mechanism.scale * np.sqrt(WIDTH / COHORT * (z + rest)), rel=0.15)
    assert moved < 0.6 * mechanism.scale * np.sqrt(WIDTH / COHORT * ROUNDS * mechanism.noise.variance)


@pytest.mark.parametrize("stopped", [1, 5])
def test_a_seeded_run_is_taken_up_bit_by_bit(tmp_path: Path, stopped: int) -> None:
    whole = finish(trainer())
    begun = trainer(tmp_path)
    for _ in range(stopped):
        begun.step()
    del begun
    later = trainer(tmp_path, resume=True)
    assert later.round == stopped
    np.testing.assert_array_equal(weights(finish(later)), weights(whole))


def test_without_a_seed_noise_is_kept_in_the_checkpoint_and_lost_rounds_stay_lost(tmp_path: Path) -> None:
    begun = trainer(tmp_path, seed=None)
    begun.step()
    begun.step()
    kept = begun._backend.parts["lineages"].state_dict()
    # Killed after the charge, before the mean was used.
    assert begun._folder is not None
    begun._folder.charge(2, COHORT)
    del begun
    later = trainer(tmp_path, seed=None, resume=True)
    assert later._backend.parts["lineages"].state_dict() == kept
    assert later.round == 3
    finish(later)
    assert later._backend.parts["lineages"].state_dict()["keys"] == {}
    assert [metrics.released for metrics in later.history].count(False) == 1


def test_what_the_run_is_not_for_is_refused() -> None:
    with pytest.raises(ParameterError, match="dropout=0"):
        trainer(dropout=0.1)
    with pytest.raises(ParameterError, match="plan with so many rounds"):
        trainer(rounds=ROUNDS + 1)


def test_settings_name_the_bands_and_leave_the_bits_to_the_planner() -> None:
    small = {"dataset": "digits", "cohort": 100, "rounds": 8, "model": "linear", "delta": 1e-5, "epsilon": 8.0}
    settings = Settings.of({**small, "correlated": 4, "baselines": False})
    assert (settings.correlated, settings.bits) == ("4", None)
    experiment = Experiment(settings, DATA)
    assert experiment.protocol.mechanism.memory.bands == 4
    with pytest.raises(ParameterError, match="what the planner is given"):
        Settings.of({**small, "correlated": "4", "levels": 2, "trials": 14})
    with pytest.raises(ParameterError, match="whole clients"):
        Experiment(Settings.of({**small, "correlated": "4", "examples": 3}), DATA)


# ------------------------------------------------------------------ on a ledger

DELTA, FEW = 1e-5, 4
ONCE = plan(100, DIM, 2.0, DELTA, 1.0, bits=12, rounds=FEW, participation="once", correlated=2)
EVERY = plan(600, DIM, 2.0, DELTA, 1.0, bits=12, rounds=FEW, participation="every", correlated=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return opened(tmp_path, epsilon=8.0)


def opened(folder: Path, **budget: Any) -> Ledger:
    ledger = Ledger(folder / "budgets.ledger")
    ledger.create(Budget(population="people", delta=DELTA, **budget))
    return ledger


def charged(
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
    run = charged(triangle, ledger, mechanism=mechanism)
    assert charge(ledger) == 0.0
    run.step()
    first = charge(ledger)
    if accounting == "planned":
        assert first == mechanism.guarantee.epsilon
    assert first >= mechanism.guarantee.epsilon
    # Whether it goes on or stops here.
    finish(run)
    assert charge(ledger) == first
    assert [entry.event.round for entry in ledger.events("people")] == list(range(FEW))
    ledger.verify()


def test_a_run_that_is_resumed_pays_nothing_more_and_a_second_one_does(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger
) -> None:
    run = charged(triangle, ledger, tmp_path / "run")
    run.step()
    del run
    first = charge(ledger)
    finish(charged(triangle, ledger, tmp_path / "run", resume=True))
    assert charge(ledger) == first
    other = charged(triangle, ledger)
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
    first, second = charged(triangle, small), charged(triangle, small)
    finish(first)
    for _ in range(2):  # as before, and not as a round that was interrupted
        with pytest.raises(BudgetExceededError):
            second.step()
    with pytest.raises(BudgetExceededError):
        charged(triangle, small)
    assert len(small.events("people")) == FEW


def test_noise_is_never_used_again_from_an_older_copy(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run = charged(triangle, ledger, folder)
    run.step()
    del run
    shutil.copytree(folder, copy)
    # Two at once: what the one has released, the other may not.
    early = charged(triangle, ledger, copy, resume=True)
    later = charged(triangle, ledger, folder, resume=True)
    later.step()
    before = weights(early)
    with pytest.raises(CheckpointError, match="older copy"):
        early.step()
    np.testing.assert_array_equal(weights(early), before)
    del early, later
    entries, spent = len(ledger.events("people")), charge(ledger)
    with pytest.raises(CheckpointError, match="older copy"):
        charged(triangle, ledger, copy, resume=True)
    finish(charged(triangle, ledger, folder, resume=True))
    assert (len(ledger.events("people")), charge(ledger)) == (entries + 2, spent)


def test_two_that_reserve_at_once_do_not_both_release(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    begun = charged(triangle, ledger, folder)
    del begun
    shutil.copytree(folder, copy)
    one, other = charged(triangle, ledger, folder, resume=True), charged(triangle, ledger, copy, resume=True)
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
    run = charged(triangle, ledger, folder, seed=3)
    run.step()
    del run
    shutil.copytree(folder, copy)
    first = finish(charged(triangle, ledger, folder, seed=3, resume=True))
    second = finish(charged(triangle, ledger, copy, seed=3, resume=True))
    np.testing.assert_array_equal(weights(first), weights(second))
    assert len(ledger.events("people")) == FEW


def test_a_round_that_was_charged_and_lost_is_no_older_copy(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the release and the mean, and once between the reservation and the log."""
    run = charged(triangle, ledger, tmp_path / "run")
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
        run = charged(triangle, ledger, tmp_path / "run", resume=True)
    assert run.round == 2
    finish(run)
    assert [metrics.released for metrics in run.history] == [True, False, True, True]
    assert [entry.event.round for entry in ledger.events("people")] == list(range(FEW))
    assert charge(ledger) == ONCE.guarantee.epsilon


def test_more_messages_than_were_planned_are_not_released(ledger: Ledger) -> None:
    entry = ledger.reserve("people", RoundEvent(ONCE.protocol, survivors=90))
    head = ledger.head
    with pytest.raises(ParameterError, match="at most clients=100"):
        ledger.release(entry, survivors=101)
    assert ledger.head == head
    assert ledger.release(entry, survivors=100).released


# ------------------------------------------------------------------ several passes


@pytest.mark.parametrize("bands", [None, 4])
def test_passes_are_played_and_paid_for(bands: int | None, tmp_path: Path) -> None:
    """Cohorts that together are several times the population; one event, or one for each pass."""
    size, rounds, apart = DATA.size, 12, 3
    cohort = size // apart
    planned = plan(
        cohort, WIDTH, 8.0, 1e-5, 1.0, bits=14, rounds=rounds, participation=f"apart:{apart}", correlated=bands
    )
    ledger = opened(tmp_path, epsilon=8.5)
    run = make_trainer(
        DATA,
        planned,
        mlp(DATA.feature_dim, DATA.classes or 0, hidden=(), seed=0),
        **{"cohort": cohort, "rounds": None, "lr": 0.5, "seed": None, "ledger": ledger, "population": "people"},
    )
    epsilons = [metrics.epsilon for metrics in run.run()]
    assert epsilons[-1] == pytest.approx(planned.guarantee.epsilon)
    steps = set(epsilons)
    assert len(steps) == (1 if bands else rounds // apart)
    partitions = {entry.event.partition for entry in ledger.events("people")}
    assert len(partitions) == len(steps)
    # A ledger certifies rounds of independent noise one by one, the run's own account together.
    assert planned.guarantee.epsilon <= charge(ledger) <= (1.0 if bands else 1.01) * planned.guarantee.epsilon
    assert str(run.guarantee().run.participation) == f"apart:{apart}"  # type: ignore[union-attr]


def test_clients_that_would_come_too_soon_are_refused() -> None:
    planned = plan(DATA.size // 3, WIDTH, 8.0, 1e-5, 1.0, bits=14, rounds=12, participation="apart:4", correlated=4)
    model = mlp(DATA.feature_dim, DATA.classes or 0, hidden=(), seed=0)
    with pytest.raises(ParameterError, match="brings clients back after 3 rounds"):
        make_trainer(DATA, planned, model, **{"cohort": DATA.size // 3, "rounds": None, "lr": 0.5, "seed": 1})


def test_settings_choose_passes() -> None:
    settings = Settings.of({"clients": 2000, "rounds": 10, "passes": 5, "model": "linear", "baselines": False})
    found = Experiment(settings)
    assert (found.settings.cohort, found.settings.participation) == (1000, "apart")
    assert str(found.protocol.promise.conditions.participation) == "apart:2"  # type: ignore[union-attr]
    assert Settings.of(settings.to_dict()) == settings
    limits = {"passes": "auto", "downlink": 6000.0, "correlated": "2"}
    chosen = Experiment(Settings.of({"clients": 2000, "rounds": 10, "model": "linear", "baselines": False, **limits}))
    assert chosen.passes is not None
    assert chosen.passes.chosen.bytes_down <= 6000
    assert chosen.settings.cohort == chosen.passes.chosen.cohort
    with pytest.raises(ParameterError, match="passes takes the place of cohort"):
        Settings.of({"passes": 5, "cohort": 10})
    with pytest.raises(ParameterError, match="give passes"):
        Settings.of({"uplink": 5.0})


# ------------------------------------------------------------------ silos that stay


@pytest.mark.parametrize("seed", [5, None])
def test_silos_with_shaped_rounding_are_trained_and_resumed(
    triangle: ArrayDataset, tmp_path: Path, seed: int | None
) -> None:
    planned = plan(triangle.size, DIM, 4.0, DELTA, 1.0, bits=8, rounds=6, participation="every", correlated=3)
    assert planned.protocol.mechanism.name == "shaped-gaussian"
    options = {"cohort": triangle.size, "rounds": None, "lr": 0.5, "seed": seed}
    begun = make_trainer(triangle, planned, run_dir=tmp_path, **options)
    for _ in range(3):
        assert begun.step().epsilon == planned.guarantee.epsilon
    del begun
    resumed = finish(make_trainer(triangle, planned, run_dir=tmp_path, resume=True, **options))
    assert len(resumed.history) == 6
    if seed is not None:
        assert np.array_equal(weights(resumed), weights(finish(make_trainer(triangle, planned, **options))))


def test_silos_that_change_or_drop_out_are_not_simulated(triangle: ArrayDataset) -> None:
    planned = plan(triangle.size, DIM, 4.0, DELTA, 1.0, bits=8, rounds=6, participation="every", correlated=3)
    options = {"cohort": triangle.size, "rounds": None, "lr": 0.5, "seed": 1}
    with pytest.raises(ParameterError, match="dropout"):
        make_trainer(triangle, planned, dropout=0.1, **options)
    bare = replace(planned.protocol, promise=None)
    with pytest.raises(ParameterError, match="participation 'every'"):
        make_trainer(triangle, bare, **{**options, "rounds": 1, "participation": "once", "delta": DELTA})
