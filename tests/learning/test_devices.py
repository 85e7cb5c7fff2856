"""Training on a device: the choice of one, and the trainer's way through the engine for devices, on the CPU here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning import NoPrivacy, Trainer, devices, mlp
from cpsgd.learning.datasets import infinite_digits
from cpsgd.learning.places import Accelerator
from cpsgd.planner import plan
from cpsgd.privacy.ledger import Ledger

LOSS = torch.nn.functional.cross_entropy


data_set = cache(infinite_digits)


def trainer(mechanism: Any, **options: Any) -> Trainer:
    data = data_set()
    model = mlp(data.feature_dim, data.classes, (), seed=0)
    settings: dict[str, Any] = {"cohort": 200, "rounds": 4, "learning_rate": 2.0, "seed": 3, "evaluate_every": 2}
    return Trainer(model, LOSS, data, mechanism, **{**settings, **options})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other in so small tensors only cost time, a great deal on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine for devices, on the CPU."""
    monkeypatch.setattr(devices, "has_engine", lambda device: True)


@cache
def private() -> Any:
    # Few trials: the plain way to toss coins, one by one, is slow on a CPU.
    return plan(200, 650, 20.0, 1e-6, bits=4, rounds=4, participation="once")


def test_without_privacy_the_engine_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for on in (False, True):
        monkeypatch.setattr(devices, "has_engine", lambda device, on=on: on)
        found = trainer(NoPrivacy(1.0))
        assert len(list(found.run())) == 4
        models.append(torch.cat([p.detach().flatten() for p in found.model.parameters()]))
    torch.testing.assert_close(models[0], models[1], rtol=1e-4, atol=1e-5)


def test_private_rounds_are_charged_and_repeatable(engine: None, tmp_path: Path) -> None:
    accuracies = []
    for name in ("a", "b"):
        found = trainer(private(), run_dir=tmp_path / name)
        history = list(found.run())
        assert [metrics.accuracy is None for metrics in history] == [True, False, True, False]
        assert [metrics.noise_to_signal is None for metrics in history] == [True, False, True, False]
        guarantee = found.guarantee()
        assert guarantee is not None
        assert guarantee.epsilon <= 20.0
        accuracies.append(history[-1].accuracy)
    assert accuracies[0] == accuracies[1]


def test_an_interrupted_run_goes_on_to_the_same_end(engine: None, tmp_path: Path) -> None:
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


def test_dropout(engine: None) -> None:
    planned = plan(200, 650, 20.0, 1e-6, bits=4, rounds=4, participation="once", dropout=0.5)
    history = list(trainer(planned, dropout=0.2).run())
    assert all(metrics.released and 100 <= metrics.survivors < 200 for metrics in history)


def test_examples_are_for_the_cpu(engine: None) -> None:
    with pytest.raises(ParameterError, match="device cpu"):
        trainer(private(), examples=3)


def test_too_little_memory_says_what_to_do(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer(private())

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(found._updates, "tensors", full)
    with pytest.raises(ParameterError, match="smaller memory_limit"):
        found.step()
    assert found.guarantee() is None  # nothing was charged


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


def test_unsupported_numbers_are_refused() -> None:
    data = data_set()
    model = mlp(data.feature_dim, data.classes, (), seed=0).double()
    with pytest.raises(ParameterError, match="float32"):
        Trainer(model, LOSS, data, NoPrivacy(1.0), cohort=10, rounds=1)


def test_cohorts_are_drawn_ahead(engine: None) -> None:
    found = trainer(NoPrivacy(1.0))
    place, cohorts = found._place, found._cohorts
    assert isinstance(place, Accelerator)
    np.testing.assert_array_equal(place.clients(cohorts, 0, 4), cohorts.clients(0))
    assert list(place._ahead) == [1]
    np.testing.assert_array_equal(place.clients(cohorts, 1, 4), cohorts.clients(1))
    np.testing.assert_array_equal(place.clients(cohorts, 3, 4), cohorts.clients(3))


def test_a_ledger_does_not_pay_for_noise_that_protects_nobody(engine: None, tmp_path: Path) -> None:
    with Ledger(tmp_path / "b.ledger") as ledger, pytest.raises(ParameterError, match="protects nobody"):
        trainer(private(), ledger=ledger, population="people")
