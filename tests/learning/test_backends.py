"""Training on a device: the choice of one, and the backend for GPUs, on the CPU here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from cpsgd import Protocol
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning import NoPrivacy, Trainer, devices, mlp
from cpsgd.learning.backends import GpuBackend
from cpsgd.learning.datasets import from_arrays, infinite_digits
from cpsgd.mechanisms import Coins, Mechanism, RoundedGaussian, SampledCoins
from cpsgd.planner import plan
from tests.learning.nets import Transformer
from tests.learning.training import make_trainer, spent, weights

data_set = cache(infinite_digits)


def trainer(mechanism: Any, **options: Any) -> Trainer:
    data = data_set()
    model = mlp(data.feature_dim, data.classes, (), seed=0)
    settings: dict[str, Any] = {"cohort": 200, "rounds": 4, "lr": 2.0, "seed": 3, "evaluate_every": 2}
    return make_trainer(data, mechanism, model, **{**settings, **options})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other in so small tensors only cost time, a great deal on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend for GPUs, on the CPU."""
    monkeypatch.setattr(devices, "is_gpu", lambda device: True)


@cache
def private() -> Any:
    # Few trials: the plain way to toss coins, one by one, is slow on a CPU.
    return plan(200, 650, 20.0, 1e-6, bits=4, rounds=4, participation="once", mechanism="binomial")


def test_without_privacy_the_engine_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for on in (False, True):
        monkeypatch.setattr(devices, "is_gpu", lambda device, on=on: on)
        found = trainer(NoPrivacy(1.0))
        assert len(list(found.run())) == 4
        models.append(weights(found))
    np.testing.assert_allclose(models[0], models[1], rtol=1e-4, atol=1e-5)


def test_an_adaptive_norm_and_models_of_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    images = load_digits().images[:200]
    data = from_arrays(images.reshape(-1, 64).astype(int), load_digits().target[:200], test_share=0.2)
    norms, models = [], []
    for on in (False, True):
        monkeypatch.setattr(devices, "is_gpu", lambda device, on=on: on)
        options = {"cohort": 160, "participation": "every", "clip_quantile": 0.5, "lr": 0.5}
        found = make_trainer(data, NoPrivacy(1.0), Transformer(), **options)
        norms.append([metrics.clip_norm for metrics in found.run()])
        models.append(weights(found))
    assert len(set(norms[0])) == 3
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    np.testing.assert_allclose(models[0], models[1], rtol=1e-3, atol=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    "poisson": {"cohort": 60, "participation": "poisson"},
    "local steps": {"cohort": 120, "participation": "every", "local_steps": 3, "local_lr": 0.2},
    "examples": {"cohort": 120, "participation": "every", "examples": 3, "lr": 2.0},
    "few at a time": {"cohort": 120, "participation": "every", "examples": 3, "lr": 2.0, "memory_limit": 1},
}


@pytest.mark.parametrize("on", ["as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_whatever_clients_do(kind: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one example and more."""
    digits = load_digits()
    features = digits.images[:400].reshape(-1, 64) / 16.0
    owners = np.concatenate([np.arange(120), np.random.default_rng(0).integers(0, 120, 280)])
    test = {"test_features": features[:50], "test_labels": digits.target[:50]}
    data = from_arrays(features, digits.target[:400], clients=owners, **test)
    models = []
    for where in ("cpu", on):
        monkeypatch.setattr(devices, "is_gpu", lambda device, where=where: where != "cpu")
        options = {"lr": 0.5, "device": "cuda" if where == "gpu" else "cpu", **KINDS[kind]}
        found = make_trainer(data, NoPrivacy(1.0), mlp(64, 10, (20,), seed=0), **options)
        assert len(list(found.run())) == 3
        models.append(weights(found))
    assert np.linalg.norm(models[0] - weights(mlp(64, 10, (20,), seed=0))) > 0.1
    np.testing.assert_allclose(models[0], models[1], rtol=1e-3, atol=1e-5)


def test_private_rounds_are_charged_and_repeatable(gpu: None, tmp_path: Path) -> None:
    accuracies = []
    for name in ("a", "b"):
        found = trainer(private(), run_dir=tmp_path / name)
        history = list(found.run())
        assert [metrics.accuracy is None for metrics in history] == [True, False, True, False]
        assert [metrics.noise_to_signal is None for metrics in history] == [True, False, True, False]
        assert spent(found).epsilon <= 20.0
        accuracies.append(history[-1].accuracy)
    assert accuracies[0] == accuracies[1]


def test_an_interrupted_run_goes_on_to_the_same_end(gpu: None, tmp_path: Path) -> None:
    whole = trainer(private(), run_dir=tmp_path / "whole")
    expected = list(whole.run())[-1]
    first = trainer(private(), run_dir=tmp_path / "parts", checkpoint_every=2)
    for _ in range(3):
        first.step()
    del first
    second = trainer(private(), run_dir=tmp_path / "parts", checkpoint_every=2, resume=True)
    assert second.round == 2  # the third was charged, not kept, and is run again
    found = list(second.run())[-1]
    assert (found.accuracy, found.loss, found.epsilon) == (expected.accuracy, expected.loss, expected.epsilon)


def test_a_run_stays_on_its_kind_of_device(tmp_path: Path) -> None:
    started = trainer(private(), run_dir=tmp_path)
    started.config["device"] = "cuda"  # as a run on a GPU writes it
    started.step()
    del started
    with pytest.raises(CheckpointError, match="another device"):
        trainer(private(), run_dir=tmp_path, resume=True)


def test_dropout(gpu: None) -> None:
    planned = plan(200, 650, 20.0, 1e-6, bits=4, rounds=4, participation="once", mechanism="binomial", dropout=0.5)
    history = list(trainer(planned, dropout=0.2).run())
    assert all(metrics.released and 100 <= metrics.survivors < 200 for metrics in history)


@pytest.mark.parametrize("on", ["as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_private_examples_are_charged(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_gpu", lambda device: True)
    protocol = replace(private().protocol, promise=None)
    found = trainer(protocol, examples=3, rounds=2, delta=1e-6, device="cuda" if on == "gpu" else "cpu")
    history = list(found.run())
    assert len(history) == 2
    assert all(metrics.released for metrics in history)
    assert 0.0 < spent(found).epsilon < 100.0


# How a full GPU is told of: by PyTorch, by CUDA before PyTorch has begun, and by its library for matrices.
FULL = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def fails(error: Exception) -> Any:
    def call(*arguments: object, **options: object) -> None:
        raise error

    return call


def test_a_gpu_that_is_too_full_for_a_rounds_clients(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer(private())
    monkeypatch.setattr(found._backend.updates, "tensors", fails(FULL[0]))
    with pytest.raises(ParameterError, match=r"4,096 MiB of clients.*smaller memory_limit \(.*--memory-limit\)"):
        found.step()
    assert found.guarantee() is None  # nothing was charged


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("torch.nn.Module.to", "too little memory for the model. Free it, use device cpu, or use a smaller one."),
        ("cpsgd.learning.backends.on_device", "too little memory for the data set. Free it"),
        ("cpsgd.learning.optimization.make_optimizer", "too little memory for the optimizer. Free it"),
    ],
)
def test_a_full_gpu_is_told_of_before_the_first_round(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, words: str, error: Exception
) -> None:
    monkeypatch.setattr(place, fails(error))
    with pytest.raises(ParameterError) as raised:
        trainer(private(), run_dir=tmp_path / "run")
    assert words in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("cpsgd.simulation.device.DeviceRound.mean", "for the model's step"),
        ("torch.optim.SGD.step", "for the model's step"),
        ("torch.Tensor.argmax", "for the test examples"),
    ],
)
def test_a_gpu_that_is_full_after_the_charge_says_so_and_the_run_goes_on(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, words: str
) -> None:
    found = trainer(private(), run_dir=tmp_path, evaluate_every=1)
    with monkeypatch.context() as patched:
        patched.setattr(place, fails(FULL[0]))
        with pytest.raises(ParameterError, match=rf"{words}.*The round was charged; .* can be resumed"):
            found.step()
    with pytest.raises(CheckpointError, match="resume=True"):
        found.step()
    del found
    resumed = trainer(private(), run_dir=tmp_path, evaluate_every=1, resume=True)
    assert len(list(resumed.run())) == 4


def test_a_gpu_that_is_too_full_to_resume_is_no_damaged_checkpoint(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer(private(), run_dir=tmp_path).step()
    monkeypatch.setattr("torch.optim.SGD.load_state_dict", fails(FULL[0]))
    with pytest.raises(ParameterError, match="too little memory for the model and its optimizer"):
        trainer(private(), run_dir=tmp_path, resume=True)


def test_the_test_examples_alone_cost_nothing(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer(private())
    monkeypatch.setattr("torch.Tensor.argmax", fails(FULL[0]))
    with pytest.raises(ParameterError, match=r"for the test examples.*use a smaller model\.$"):
        found.evaluate()


def test_other_errors_of_torch_stay_what_they_are(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.Module.to", fails(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(RuntimeError, match="device-side"):
        trainer(private())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    assert devices.resolve("auto") == torch.device("cpu")
    with pytest.raises(ParameterError, match=r"There is no CUDA device.*Use device cpu or auto"):
        devices.resolve("cuda")


@pytest.mark.parametrize("name", ["tpu", "meta", ""])
def test_unknown_devices_are_named(name: str) -> None:
    with pytest.raises(ParameterError, match="Known are cpu, cuda or auto"):
        devices.resolve(name)


@pytest.mark.gpu
def test_training_on_a_gpu_learns_and_repeats() -> None:
    accuracies = []
    for _ in range(2):
        *_, last = trainer(private(), device="cuda", rounds=4).run()
        accuracies.append(last.accuracy)
    assert accuracies[0] == accuracies[1]


def coins(kind: str) -> Protocol:
    reach = 4.0 / 650**0.5
    mechanism: Mechanism = Coins(coins=1, theta=0.2, coordinate_range=reach)
    if kind == "sampled coins":
        mechanism = SampledCoins(rate=0.2, theta=0.4, coordinate_range=reach)
    if kind == "noise before rounding":
        mechanism = RoundedGaussian(noise_deviation=1.6, step=0.3, window=32, coordinate_range=reach)
    return Protocol(clients=1000, dim=650, clip_norm=1.0, mechanism=mechanism)


ON = {"cpu": (False, "cpu"), "as on a GPU": (True, "cpu"), "gpu": (True, "cuda")}


@pytest.mark.parametrize("on", ["cpu", "as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["coins", "sampled coins", "noise before rounding"])
def test_coins_learn_and_are_charged(kind: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    like_a_gpu, device = ON[on]
    monkeypatch.setattr(devices, "is_gpu", lambda device: like_a_gpu)
    found = trainer(coins(kind), cohort=1000, rounds=10, evaluate_every=10, delta=1e-6, device=device)
    *_, last = found.run()
    assert last.accuracy is not None
    assert last.accuracy > 0.5  # a tenth by chance
    assert 0.0 < spent(found).epsilon < 4.0
    assert last.bytes_per_client == coins(kind).message_bytes < (500 if kind == "noise before rounding" else 150)


def test_unsupported_numbers_are_refused() -> None:
    data = data_set()
    model = mlp(data.feature_dim, data.classes, (), seed=0).double()
    with pytest.raises(ParameterError, match="float32"):
        make_trainer(data, NoPrivacy(1.0), model)


def test_cohorts_are_drawn_ahead(gpu: None) -> None:
    found = trainer(NoPrivacy(1.0))
    backend, cohorts = found._backend, found._cohorts
    assert isinstance(backend, GpuBackend)
    np.testing.assert_array_equal(backend.clients(cohorts, 0, 4), cohorts.clients(0))
    assert list(backend._ahead) == [0]
    np.testing.assert_array_equal(backend.clients(cohorts, 1, 4), cohorts.clients(1))
    np.testing.assert_array_equal(backend.clients(cohorts, 3, 4), cohorts.clients(3))
    # Blocks of 16 rounds; of those that are past none is kept.
    np.testing.assert_array_equal(backend.clients(cohorts, 17, 60), cohorts.clients(17))
    assert list(backend._ahead) == [1, 2, 3]


def test_a_ledger_does_not_pay_for_noise_that_protects_nobody(gpu: None, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="protects nobody"):
        trainer(private(), ledger=str(tmp_path / "b.ledger"), population="people")
