"""The stand-in that settings are selected with, against the trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cpsgd.learning import CohortOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets import from_arrays, load_digits
from reproduction.many_runs import Noise, Setting, _Draws, train

SETTINGS = (
    Setting("sgd", 2.0, "late", 0.5, 1e-3),
    Setting("momentum", 0.5, "linear", 1.0),
    Setting("adam", 0.01, "constant", 1e6),
)
ROUNDS, COHORT, SEED = 6, 200, 3
CPU = torch.device("cpu")
SIZES = {"cohort": COHORT, "rounds": ROUNDS, "seed": SEED, "device": CPU}


def test_without_noise_it_is_the_trainer() -> None:
    data = load_digits()
    together = train(data, SETTINGS, [Noise()] * 3, **SIZES)
    for setting, found in zip(SETTINGS, together, strict=True):
        trainer = Trainer(
            mlp(data.feature_dim, data.classes, seed=SEED),
            torch.nn.functional.cross_entropy,
            data,
            NoPrivacy(setting.clip_norm),
            cohorts=CohortOptions(cohort=COHORT, rounds=ROUNDS),
            server=ServerOptions(
                optimizer=setting.optimizer,
                lr=setting.rate,
                weight_decay=setting.weight_decay,
                schedule=setting.schedule,
            ),
            run=RunOptions(seed=SEED, evaluate_every=ROUNDS),
        )
        *_, last = trainer.run()
        assert last.loss == pytest.approx(found.loss, rel=1e-4)


def test_normalised_shades_are_those_of_data_that_have_them() -> None:
    digits = load_digits()
    plain, tested = digits.batch(np.arange(digits.size)), digits.test_set()
    shades = [(features - np.float32(0.1307)) / np.float32(0.3081) for features in (plain.features, tested.features)]
    data = from_arrays(shades[0], plain.labels, test_features=shades[1], test_labels=tested.labels)
    outcomes = [
        train(given, [Setting("sgd", 0.3, "constant", 1.0, normalised=normalised)], [Noise()], **SIZES)[0].loss
        for given, normalised in ((digits, True), (data, False), (digits, False))
    ]
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-4)
    assert outcomes[0] != pytest.approx(outcomes[2], rel=1e-2)


def test_an_average_of_the_models_lags_behind_the_last() -> None:
    def loss(rate: float, averaging: float) -> float:
        setting = Setting("sgd", rate, "constant", math.inf, averaging=averaging)
        return train(load_digits(), [setting], [Noise()], **SIZES)[0].loss

    assert loss(1.0, 0.0) < loss(1.0, 0.9) < loss(1e-9, 0.0)


def test_noise_has_the_covariance_asked_for() -> None:
    """Rounds t and t − 2 of z_t − z_(t−2)/2 have covariance −σ²/2, and variances σ² and 5σ²/4; the rest adds 0.36.

    With 40,000 coordinates a moment's standard error is below 0.0125 σ²; five of them are a false alarm of 6e-7. A
    setting without noise stays without.
    """
    settings = [Setting("sgd", 1.0, "constant", 2.0), Setting("sgd", 1.0, "constant", math.inf)]
    noise = _Draws(settings, [Noise(0.5, (1.0, 0.0, -0.5), 0.3), Noise()], 40_000, 0, CPU)
    drawn = np.stack([noise.draw().numpy() for _ in range(4)])
    assert not drawn[:, 1].any()
    covariance = drawn[:, 0] @ drawn[:, 0].T / drawn.shape[2]
    expected = np.diag([1.36, 1.36, 1.61, 1.61]) + np.diag([-0.5] * 2, 2) + np.diag([-0.5] * 2, -2)
    assert np.abs(covariance - expected).max() < 0.0625 * 1.4
