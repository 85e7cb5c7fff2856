"""Scales of coordinates that follow earlier private means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.run_sums import Slots
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning import ClientOptions, NoPrivacy, Trainer, coordinate_scales
from cpsgd.learning.coordinate_scales import CoordinateScales
from cpsgd.learning.datasets import ArrayDataset, load_digits
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import mlp
from cpsgd.mechanisms import Gaussian
from cpsgd.planner import plan
from cpsgd.protocol import Protocol
from cpsgd.simulation.products import Layout
from tests.learning.training import DIM, make_trainer, weights

PROTOCOL = Protocol(clients=600, dim=DIM, clip_norm=1.0, mechanism=Gaussian(sigma=2.0), rotate=False)


def trainer(data: ArrayDataset, mechanism: Any = PROTOCOL, every: int | None = 2, **more: Any) -> Trainer:
    options = {"cohort": 600, "rounds": 12, "participation": "every", "rescale_every": every, "lr": 0.05, **more}
    return make_trainer(data, mechanism, delta=None if isinstance(mechanism, NoPrivacy) else 1e-5, **options)


def rank_one(model: torch.nn.Module, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns a vector whose layers, with the bias as one more column, are outer products with random signs."""
    rng = np.random.default_rng(seed)
    parts, matrices = [], []
    for layer in (module for module in model if isinstance(module, torch.nn.Linear)):  # type: ignore[attr-defined]
        outer, inner = rng.uniform(0.5, 2.0, layer.out_features), rng.uniform(0.5, 2.0, layer.in_features + 1)
        matrix = torch.from_numpy(np.outer(outer, inner)).float()
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], matrix.shape)).float()
        matrices.append(matrix)
        parts += [(matrix * signs)[:, :-1].reshape(-1), (matrix * signs)[:, -1]]
    return torch.cat(parts), matrices


def test_scales_are_roots_of_the_sizes_and_keep_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinate_scales, "_UNIFORM", 0.0)
    model = mlp(7, 3, hidden=(5,))
    scales = CoordinateScales(model, every=1)
    sizes, _ = rank_one(model, seed=1)
    scales.learn(sizes, noise_norm=0.0, number=0)
    ratio = scales.scales / sizes.abs().sqrt()
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio[0])), rtol=1e-5, atol=0.0)
    assert torch.linalg.vector_norm(sizes / scales.scales) == pytest.approx(float(torch.linalg.vector_norm(sizes)))
    # The squared error of noise of one size is (Σ s)² / (d Σ s²) of what it was, and no other scales do better.
    error = float(scales.scales.square().mean())
    expected = float(sizes.abs().sum() ** 2 / (len(sizes) * sizes.square().sum()))
    assert error == pytest.approx(expected, rel=1e-5)
    rng = np.random.default_rng(2)
    for _ in range(20):
        other = scales.scales * torch.from_numpy(np.exp(rng.normal(0, 0.1, len(sizes)))).float()
        other *= torch.linalg.vector_norm(sizes / other) / torch.linalg.vector_norm(sizes)
        assert float(other.square().mean()) > error


def test_factors_of_dense_layers_are_divided_alike() -> None:
    model = mlp(7, 3, hidden=(5,))
    scales = CoordinateScales(model, every=1)
    scales.learn(torch.randn(58, generator=torch.Generator().manual_seed(3)), noise_norm=0.0, number=0)
    pairs = torch.from_numpy(Layout(((5, 7), (3, 5))).pairs())
    together = scales.inverse_factors[pairs[:, 0]] * scales.inverse_factors[pairs[:, 1]]
    torch.testing.assert_close(together * scales.scales, torch.ones(58))


def test_noise_is_taken_off_before_sizes_are_read() -> None:
    # Five coordinates are 1 and fifteen nothing; noise of deviation 0.5 is in all of them.
    model, noise = torch.nn.Linear(20, 400, bias=False), 0.5
    mean = torch.zeros(400, 20)
    mean[:, :5] = 1.0
    noisy = mean + noise * torch.randn(400, 20, generator=torch.Generator().manual_seed(4))
    scales = CoordinateScales(model, every=1)
    scales.learn(noisy.reshape(-1), noise_norm=noise * 8000**0.5, number=0)
    found = scales.scales.view(400, 20).mean(dim=0)
    # A quarter of the mean square, 1/16, and a twentieth of the noise's variance, 1/80, are added to squared sizes of 1
    # and 0: scales differ by (1.075 / 0.075)^(1/4) = 1.95. With the noise left in they would differ by 1.38.
    assert float(found[:5].mean() / found[5:].mean()) == pytest.approx(1.95, rel=0.05)


def test_nothing_is_scaled_while_means_are_zero() -> None:
    scales = CoordinateScales(mlp(4, 2, hidden=()), every=1)
    scales.learn(torch.zeros(10), noise_norm=1.0, number=0)
    torch.testing.assert_close(scales.scales, torch.ones(10))


def test_scales_go_back_to_one_where_means_are_noise() -> None:
    scales = CoordinateScales(mlp(30, 10, hidden=(20,)), every=1)
    random = torch.Generator().manual_seed(8)
    first = torch.randn(830, generator=random) * torch.logspace(-2, 0, 830)
    scales.learn(first, noise_norm=0.0, number=0)
    assert float(scales.scales.min()) < 0.57
    # They settle there, also after thousands of rounds.
    for number in range(1, 2000):
        noisy, _ = scales.read(torch.randn(830, generator=random), 830**0.5, number)
        assert bool(torch.isfinite(noisy).all())
    assert 0.6 < float(scales.scales.min()) < float(scales.scales.max()) < 1.7


def test_a_bias_belongs_to_its_layer_and_other_vectors_have_one_size() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.GroupNorm(1, 3), torch.nn.Linear(4, 2, bias=False))
    scales = CoordinateScales(model, every=1)
    mean = torch.rand(3 * 18 + 3 + 6 + 8, generator=torch.Generator().manual_seed(5)) + 0.1
    scales.learn(mean, noise_norm=0.0, number=0)
    assert (scales.scales[57:60] == scales.scales[57]).all()
    assert (scales.scales[60:63] == scales.scales[60]).all()
    filters = torch.cat([scales.scales[:54].view(3, 18), scales.scales[54:57, None]], dim=1)
    assert torch.linalg.matrix_rank(filters, rtol=1e-4) == 1


def test_real_gradients_get_less_noise_from_private_means_alone() -> None:
    data = load_digits()
    model = mlp(data.feature_dim, data.classes or 0, hidden=(32,), seed=0)
    updates = ClientUpdates(model, torch.nn.functional.cross_entropy)
    rows = np.concatenate([chunk.copy() for chunk in updates.chunks(data.batch(range(1000)))])
    norms = np.linalg.norm(rows, axis=1)
    rng, clip = np.random.default_rng(6), float(np.median(norms))
    mean = (rows * np.minimum(1.0, clip / norms)[:, None]).mean(axis=0)
    # The noise of ten thousand clients at ε = 2 and δ = 10⁻⁹.
    deviation = 2 * clip / (0.3515 * 10_000)
    scales = CoordinateScales(model, every=10)
    for number in range(10):
        noisy = torch.from_numpy(mean + deviation * rng.normal(size=len(mean))).float()
        scales.learn(noisy, noise_norm=deviation * len(mean) ** 0.5, number=number)
    found = scales.scales.double().numpy()
    scaled = float(np.median(np.linalg.norm(rows / found, axis=1)))
    assert (scaled / clip) ** 2 * np.mean(found**2) < 1 / 1.4


def test_scales_chosen_by_somebody_do_not_let_a_client_weigh_more(triangle: ArrayDataset) -> None:
    found = trainer(triangle, NoPrivacy(1.0))
    scales = found._backend.updates.scales
    assert scales is not None
    chosen = torch.logspace(-20, 20, DIM)
    scales.scales.copy_(chosen)
    simulator: Any = found._backend.summed(0, np.arange(600), 0)
    assert np.linalg.norm(simulator.mean()) <= 1.0 + 1e-6


def test_it_costs_no_more_and_is_resumed_bit_for_bit(triangle: ArrayDataset, tmp_path: Path) -> None:
    whole, plain = trainer(triangle), trainer(triangle, every=None)
    *_, last = whole.run()
    *_, other = plain.run()
    assert last.epsilon == other.epsilon
    assert not np.array_equal(weights(whole), weights(plain))
    begun = trainer(triangle, run_dir=tmp_path)
    for _ in range(5):
        begun.step()
    del begun
    resumed = trainer(triangle, run_dir=tmp_path, resume=True)
    list(resumed.run())
    assert resumed.history == whole.history
    np.testing.assert_array_equal(weights(resumed), weights(whole))
    with pytest.raises(CheckpointError, match="another rescale_every"):
        trainer(triangle, every=None, run_dir=tmp_path, resume=True)


def test_correlated_noise_starts_anew_at_each_change() -> None:
    mechanism = CorrelatedGaussian(
        noise_deviation=20.0, step=0.01, window=400, coordinate_range=0.5, bands=4, run_length=12
    )
    for seed in (7, None):
        slots = Slots(mechanism, seed, restart_every=5)
        needed = [sorted(slots.draw(number)) for number in range(12)]
        assert needed[:7] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [5], [5, 6]]
        assert needed[10:] == [[10], [10, 11]]


def test_correlated_training_rescales_at_change_points(triangle: ArrayDataset) -> None:
    private = plan(
        clients=600, dim=DIM, epsilon=8.0, delta=1e-5, rounds=6, correlated=4, bits=12, mechanism="correlated-gaussian"
    )
    found = trainer(triangle, private, every=3, rounds=6, participation=None)
    *_, last = found.run()
    assert last.epsilon is not None
    assert last.epsilon <= 8.0


def test_what_does_not_go_with_it_is_refused(triangle: ArrayDataset) -> None:
    stated = replace(PROTOCOL, replace_one_distance=1.0, distance_reason="one-hot rows")
    with pytest.raises(ParameterError, match=r"rescale_every.*plan without"):
        trainer(triangle, stated)
    with pytest.raises(ParameterError, match="whole clients"):
        ClientOptions(rescale_every=1, examples=3)
    with pytest.raises(ParameterError, match="rescale_every"):
        ClientOptions(rescale_every=0)
    shaped = ShapedGaussian(
        noise_deviation=3.0, step=0.1, window=80, coordinate_range=0.5, bands=4, run_length=12, separation=1
    )
    with pytest.raises(ParameterError, match="do not start anew"):
        trainer(triangle, Protocol(clients=600, dim=DIM, clip_norm=1.0, mechanism=shaped, rotate=False))
