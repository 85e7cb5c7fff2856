"""Canaries in a `Trainer`'s run: they are clients like others, and tell noise that is too small by half."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning import NoPrivacy, Trainer, mlp
from cpsgd.learning.canaries import FILE, Canaries, audit_folder
from cpsgd.learning.datasets import ArrayDataset, from_arrays
from cpsgd.mechanisms import Gaussian
from cpsgd.planner.examples import sum_norm
from cpsgd.protocol import Protocol

from .training import Crash, finish, interrupt, make_trainer, spent, weights

# μ of Gaussian noise whose ε is 2 at δ = 1e-6.
_MU = 0.448
PROTOCOL = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=250)


def trainer(data: ArrayDataset, folder: Path | None = None, **options: Any) -> Trainer:
    options = {"rounds": 4, "delta": 1e-5, "canaries": 12, "seed": 3, **options}
    return make_trainer(data, options.pop("mechanism", PROTOCOL), run_dir=folder, **options)


def examples_run(canaries: int, noise: float, *, examples: int, rounds: int) -> Trainer:
    """Returns a finished run that protects single examples, with a factor on the noise that nobody is told of."""
    features, labels = np.zeros((2, 1), np.float32), np.zeros(2, np.int64)
    data = from_arrays(features, labels, test_features=features, test_labels=labels, classes=canaries // 2)
    clients = 2 + canaries // examples
    sigma = 2.0 * math.sqrt(rounds) / (_MU * math.sqrt(clients))
    protocol = Protocol(
        clients=clients, dim=canaries, clip_norm=sum_norm(1.0, examples), mechanism=Gaussian(sigma=sigma), rotate=False
    )
    run = make_trainer(
        data,
        protocol,
        mlp(1, canaries // 2, (), seed=0),
        **{"cohort": clients, "rounds": rounds, "participation": "every", "delta": 1e-6, "evaluate_every": rounds},
        **{"canaries": canaries, "examples": examples, "seed": 5},
    )
    run._backend._protocol = replace(protocol, mechanism=Gaussian(sigma=noise * sigma))
    return finish(run)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "passed"), [(1.0, True), (0.5, False)])
def test_noise_too_small_by_half_is_caught(noise: float, passed: bool) -> None:
    # Coins and noise follow from the seed, so the outcome is fixed. Of honest runs with other seeds at most 5 % fail;
    # with half the noise nearly all do.
    report = examples_run(40_000, noise, examples=400, rounds=2).audit()
    assert report.claimed == pytest.approx(2.0, abs=0.02)
    assert report.passed is passed, report
    assert report.unit == "example"


@pytest.mark.slow
@pytest.mark.parametrize("participation", ["once", "every", "poisson"])
def test_clients_are_audited_by_what_they_sent(participation: str, triangle: ArrayDataset) -> None:
    # Without noise every canary is told that a known cohort has; a secret one is told where it was drawn.
    everybody = triangle.size + 12
    cohort = {"once": everybody // 2, "every": everybody, "poisson": everybody // 2}[participation]
    loud = Protocol(clients=2 * cohort, dim=15, clip_norm=1.0, mechanism=Gaussian(sigma=3.0), rotate=False)
    run = trainer(triangle, mechanism=loud, cohort=cohort, rounds=2, participation=participation)
    run._backend._protocol = replace(loud, mechanism=Gaussian(sigma=1e-6))
    finish(run)
    assert run._canaries is not None
    found = run._canaries.canaries
    if participation != "poisson":
        assert np.array_equal(found.scores > 0.0, found.included)
    report = run.audit()
    assert (report.unit, report.claimed) == ("client", spent(run).epsilon)
    assert report.right >= 10 or participation == "poisson"


@pytest.mark.slow
def test_vectors_of_canaries_and_their_opposites(triangle: ArrayDataset) -> None:
    for adjacency, left_out in (("replace-one", -1.0), ("zero-out", 0.0)):
        held = trainer(triangle, adjacency=adjacency)._canaries
        assert held is not None
        found, clients = held.canaries, np.arange(triangle.size + 3, triangle.size + 12)
        assert held.holds(np.array([triangle.size - 1, triangle.size])).tolist() == [False, True]
        (rows,) = held.rows(clients)
        expected = np.zeros((9, 15))
        expected[np.arange(9), found.coordinates[3:]] = (found.signs * np.where(found.included, 1.0, left_out))[3:]
        assert np.abs(rows - expected).max() < 1e-5
        assert np.linalg.norm(rows, axis=1).max() < 1.0


def test_coins_follow_from_a_seed_and_are_secret_without(triangle: ArrayDataset) -> None:
    def coins(seed: int | None) -> Any:
        run = trainer(triangle, seed=seed)
        assert run._canaries is not None
        return run._canaries.state_dict()

    assert coins(3) == coins(3)
    assert len({json.dumps(each) for each in (coins(3), coins(4), coins(None), coins(None))}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, None])
def test_a_resumed_run_keeps_its_canaries(
    seed: int | None, triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(triangle, tmp_path, seed=seed)
    run.step()
    run.step()
    assert run._canaries is not None
    before = run._canaries.state_dict()
    with monkeypatch.context() as patched:
        interrupt(patched, Canaries, "observe", afterwards=True, call=0)
        with pytest.raises(Crash):
            run.step()
    again = trainer(triangle, tmp_path, seed=seed, resume=True)
    assert again._canaries is not None
    assert again._canaries.state_dict() == before
    finish(again)
    if seed is not None:
        whole = finish(trainer(triangle))
        assert whole.audit() == again.audit()
        np.testing.assert_array_equal(weights(whole), weights(again))
    with pytest.raises(CheckpointError, match="canaries"):
        trainer(triangle, tmp_path, seed=seed, canaries=11, resume=True)


def test_the_card_has_the_audit_and_the_folder_its_canaries(triangle: ArrayDataset, tmp_path: Path) -> None:
    run = finish(trainer(triangle))
    paths = run.export(tmp_path)
    assert [path.name for path in paths] == ["model.safetensors", "model-card.json", FILE]
    card = json.loads(paths[1].read_text())
    assert card["audit"] == run.audit().to_dict()
    assert card["audit"]["finding"].endswith("with 95 % confidence")
    assert "included" not in paths[1].read_text()
    assert audit_folder(tmp_path) == run.audit()


def test_what_cannot_be_audited_is_refused(triangle: ArrayDataset) -> None:
    with pytest.raises(ParameterError, match="at most 15 canaries"):
        trainer(triangle, canaries=16)
    with pytest.raises(ParameterError, match="canaries"):
        trainer(triangle, canaries=7)
    with pytest.raises(ParameterError, match="canaries=1000"):
        trainer(triangle, canaries=None).audit()
    # Without privacy canaries send nothing: the model is that of as many clients with zero updates.
    run = trainer(triangle, mechanism=NoPrivacy(1e6), cohort=triangle.size + 12, rounds=1, participation="every")
    other = trainer(
        triangle, mechanism=NoPrivacy(1e6), cohort=triangle.size, rounds=1, participation="every", canaries=None
    )
    finish(run), finish(other)
    start = weights(trainer(triangle))
    share = triangle.size / (triangle.size + 12)
    np.testing.assert_allclose(weights(run) - start, share * (weights(other) - start), atol=1e-6)
    with pytest.raises(ParameterError, match="privacy"):
        run.audit()
