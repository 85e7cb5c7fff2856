"""The stand-in that settings are selected with, against the trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cpsgd.learning import CohortOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets import from_arrays, load_digits
from reproduction.many_runs import Setting, _Noise, train

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
    together = train(data, SETTINGS, [0.0] * 3, [(1.0,)] * 3, **SIZES)
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
        train(given, [Setting("sgd", 0.3, "constant", 1.0, normalised=normalised)], [0.0], [(1.0,)], **SIZES)[0].loss
        for given, normalised in ((digits, True), (data, False), (digits, False))
    ]
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-4)
    assert outcomes[0] != pytest.approx(outcomes[2], rel=1e-2)


def test_an_average_of_the_models_lags_behind_the_last() -> None:
    def loss(rate: float, averaging: float) -> float:
        setting = Setting("sgd", rate, "constant", math.inf, averaging=averaging)
        return train(load_digits(), [setting], [0.0], [(1.0,)], **SIZES)[0].loss

    assert loss(1.0, 0.0) < loss(1.0, 0.9) < loss(1e-9, 0.0)


def test_noise_has_the_covariance_asked_for() -> None:
    """Rounds t and t − 1 of z_t − z_(t−1)/2 have covariance −σ²/2, and variances σ² and 5σ²/4.

    With 40,000 coordinates a moment's standard error is below 0.0125 σ²; five of them are a false alarm of 6e-7.
    """
    noise = _Noise([Setting("sgd", 1.0, "constant", 2.0)], [0.5], [(1.0, -0.5)], 40_000, 0, CPU)
    rows = np.stack([noise.draw()[0].numpy() for _ in range(4)])
    covariance = rows @ rows.T / rows.shape[1]
    expected = np.diag([1.0, 1.25, 1.25, 1.25]) + np.diag([-0.5] * 3, 1) + np.diag([-0.5] * 3, -1)
    assert np.abs(covariance - expected).max() < 0.0625
