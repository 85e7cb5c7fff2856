"""The norm that follows a quantile of the updates' norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.federation.extras import Extras
from cpsgd.learning import ClientOptions, NoPrivacy, Trainer
from cpsgd.learning.backends import Clipping
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.mechanisms import Gaussian
from cpsgd.protocol import Protocol
from tests.learning.training import DIM, make_trainer, weights

PROTOCOL = Protocol(clients=600, dim=DIM + 1, clip_norm=1.0, mechanism=Gaussian(sigma=2.0), rotate=False)


def trainer(
    data: ArrayDataset, mechanism: Any = PROTOCOL, quantile: float | None = 0.5, lr: float = 0.05, **folder: Any
) -> Trainer:
    options = {"cohort": 600, "rounds": 20, "participation": "every", "clip_quantile": quantile, "lr": lr, **folder}
    return make_trainer(data, mechanism, delta=None if isinstance(mechanism, NoPrivacy) else 1e-5, **options)


def test_vectors_are_those_of_a_federations_clients() -> None:
    clipping = Clipping(ClientOptions(clip_quantile=0.5), 2.0)
    clipping.norm = 3.0
    updates = np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32)
    updates[3] *= 1e30
    updates[4] = 0.0
    extras = Extras(clip=3.0)
    expected = [extras.encode(update, {}, 2.0) for update in updates]
    found = clipping.rows(updates)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    # Nobody's vector is longer than what is accounted for.
    assert np.linalg.norm(found.astype(np.float64), axis=1).max() <= 2.0 * (1 + 1e-6)
    mean = torch.from_numpy(found.mean(axis=0))
    update, unclipped, _ = extras.decode(mean.numpy(), 2.0)
    np.testing.assert_allclose(clipping.read(mean).numpy(), update, rtol=1e-5)
    assert unclipped == pytest.approx(np.mean(np.linalg.norm(updates.astype(float), axis=1) <= 3.0), abs=1e-6)
    assert unclipped is not None
    assert clipping.norm == pytest.approx(3.0 * np.exp(-0.2 * (unclipped - 0.5)))


def test_what_is_not_finite_stays_so() -> None:
    clipping = Clipping(ClientOptions(clip_quantile=0.5), 1.0)
    rows = clipping.rows(np.array([[np.nan, 1.0], [np.inf, 1.0], [0.1, 0.1]], dtype=np.float32))
    assert np.isfinite(rows).all(axis=1).tolist() == [False, False, True]


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_the_norm_finds_the_quantile(triangle: ArrayDataset, quantile: float) -> None:
    found = trainer(triangle, NoPrivacy(1.0), quantile, lr=1e-3)
    *_, last = found.run()
    assert last.clip_norm is not None
    chunks = found._backend.updates.chunks(triangle.batch(range(600)))
    norms = np.concatenate([np.linalg.norm(chunk, axis=1) for chunk in chunks])
    # It began at 1, where other shares are within.
    assert abs(np.mean(norms <= 1.0) - quantile) > 0.2
    assert np.mean(norms <= last.clip_norm) == pytest.approx(quantile, abs=0.1)


def test_it_costs_no_more_and_is_resumed_bit_for_bit(triangle: ArrayDataset, tmp_path: Any) -> None:
    whole = trainer(triangle)
    *_, last = whole.run()
    assert last.clip_norm is not None
    assert last.clip_norm != 1.0
    plain = trainer(triangle, replace(PROTOCOL, dim=DIM), None)
    *_, other = plain.run()
    assert (last.epsilon, other.clip_norm) == (other.epsilon, None)
    begun = trainer(triangle, run_dir=tmp_path)
    for _ in range(7):
        begun.step()
    del begun
    resumed = trainer(triangle, run_dir=tmp_path, resume=True)
    assert resumed.round == 7
    list(resumed.run())
    assert resumed.history == whole.history
    np.testing.assert_array_equal(weights(resumed), weights(whole))


def test_what_does_not_go_with_it_is_refused(triangle: ArrayDataset) -> None:
    with pytest.raises(ParameterError, match=r"15 trainable parameters, and one for .* makes 16, .* 15 coord"):
        trainer(triangle, replace(PROTOCOL, dim=DIM))
    stated = replace(PROTOCOL, replace_one_distance=1.0, distance_reason="one-hot rows")
    with pytest.raises(ParameterError, match="replace_one_distance"):
        trainer(triangle, stated)
    with pytest.raises(ParameterError, match="whole clients"):
        ClientOptions(clip_quantile=0.5, examples=3)
    with pytest.raises(ParameterError, match="clip_quantile"):
        ClientOptions(clip_quantile=1.0)


def test_a_run_with_it_is_not_resumed_without(triangle: ArrayDataset, tmp_path: Path) -> None:
    trainer(triangle, NoPrivacy(1.0), run_dir=tmp_path).step()
    with pytest.raises(CheckpointError, match="another clip_quantile"):
        trainer(triangle, NoPrivacy(1.0), None, run_dir=tmp_path, resume=True)
