"""Training with noise that is correlated over rounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import ParameterError
from cpsgd.learning import Trainer, mlp
from cpsgd.learning.datasets import load_digits
from cpsgd.learning.experiment import Experiment
from cpsgd.learning.settings import Settings
from cpsgd.planner import plan
from tests.learning.training import finish, make_trainer, weights

DATA = load_digits()
COHORT, ROUNDS, DIM = 100, 8, 650
PLAN = plan(COHORT, DIM, 8.0, 1e-5, 1.0, bits=12, rounds=ROUNDS, participation="once", correlated=4)


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
    assert moved == pytest.approx(mechanism.scale * np.sqrt(DIM / COHORT * (z + rest)), rel=0.15)
    assert moved < 0.6 * mechanism.scale * np.sqrt(DIM / COHORT * ROUNDS * mechanism.noise.variance)


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
