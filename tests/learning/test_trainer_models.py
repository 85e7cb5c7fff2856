"""Real models on real data, and input that is refused before anything is charged or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import nn

from cpsgd.errors import CpsgdError, ParameterError, UserFunctionError
from cpsgd.learning import Trainer, squared_error
from cpsgd.learning.datasets import Dataset, dirichlet, from_arrays, from_frame, load_mnist
from cpsgd.ledger import Budget, Ledger
from cpsgd.mechanisms import Gaussian
from cpsgd.protocol import Protocol
from tests.learning.datasets.conftest import folder_with
from tests.learning.nets import Recurrent, Transformer, cnn, low_rank
from tests.learning.training import LOSS, finish, make_trainer

SHADES, CLASSES = load_digits().images[:600], load_digits().target[:600]
IMAGES = SHADES[:, None] / 16.0


def dim(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train(model: nn.Module, data: Dataset, loss: Any = LOSS, rounds: int = 12, **options: Any) -> Trainer:
    """All clients in every round, and as little noise as anything is proved about: models are tested here."""
    mechanism = Gaussian(sigma=0.16 * (rounds / data.size) ** 0.5)
    protocol = Protocol(clients=data.size, dim=dim(model), clip_norm=2.0, mechanism=mechanism, rotate=False)
    settings = {"cohort": data.size, "rounds": rounds, "participation": "every", "evaluate_every": rounds}
    settings |= {"optimizer": "adam", "lr": 0.03, "delta": 1e-5, **options}
    return finish(make_trainer(data, protocol, model, loss, **settings))


@pytest.mark.parametrize(
    ("make", "features", "least"),
    [
        pytest.param(cnn, IMAGES, 0.7, id="cnn"),
        pytest.param(Transformer, SHADES.reshape(-1, 64).astype(int), 0.3, id="transformer", marks=pytest.mark.slow),
        pytest.param(Recurrent, IMAGES[:, 0], 0.4, id="gru", marks=pytest.mark.slow),
        pytest.param(low_rank, IMAGES.reshape(-1, 64), 0.6, id="lora"),
    ],
)
def test_models_learn_digits(make: Callable[[], nn.Module], features: np.ndarray, least: float) -> None:
    data = from_arrays(features, CLASSES, clients=np.arange(600) // 5, name="five digits per client")
    model = make()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    last = train(model, data, rounds=10, lr=0.04).history[-1]
    assert last.accuracy is not None
    assert last.accuracy > least
    assert last.epsilon is not None
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_clients_of_few_classes() -> None:
    data = from_arrays(
        IMAGES.reshape(-1, 64), CLASSES, partition=dirichlet(CLASSES, clients=60, alpha=0.2, seed=0), classes=10
    )
    found = train(nn.Linear(64, 10), data).history[-1]
    assert found.accuracy is not None
    assert found.accuracy > 0.7


def test_a_table_with_a_column_of_clients() -> None:
    frame = load_breast_cancer(as_frame=True).frame
    columns = [name for name in frame.columns if name != "target"]
    frame[columns] = (frame[columns] - frame[columns].mean()) / frame[columns].std()
    data = from_frame(frame.assign(hospital=np.arange(len(frame)) % 80), label="target", clients="hospital")
    found = train(nn.Linear(30, 2), data).history[-1]
    assert found.accuracy is not None
    assert found.accuracy > 0.9


def test_regression_has_its_own_metric() -> None:
    x, y = load_diabetes(return_X_y=True)
    data = from_arrays(x / x.std(), (y - y.mean()) / y.std(), clients=np.arange(len(y)) % 100)
    trainer = train(nn.Linear(10, 1), data, squared_error, rounds=20, lr=0.05)
    last = trainer.history[-1]
    assert (last.accuracy, trainer.history[0].r_squared) == (None, None)
    assert last.r_squared is not None
    assert last.loss is not None
    assert last.r_squared > 0.3
    test = data.test_set()
    with torch.no_grad():
        outputs = trainer.model(torch.from_numpy(test.features))[:, 0].numpy()
    assert last.loss == pytest.approx(float(np.mean((outputs - test.labels) ** 2)), rel=1e-5)
    assert last.r_squared == pytest.approx(1 - np.mean((outputs - test.labels) ** 2) / np.var(test.labels), rel=1e-4)


def test_mnist_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = load_mnist(folder_with("mnist"))
    data = from_arrays(
        mnist.images[:400, None] / 255.0,
        mnist.labels[:400],
        clients=np.arange(400) // 8,
        test_features=mnist.test_images[:300, None] / 255.0,
        test_labels=mnist.test_labels[:300],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 10))
    found = train(model, data).history[-1]
    assert found.accuracy is not None
    assert found.accuracy > 0.6


# ------------------------------------------------------------------ bad input


def fails(*arguments: Any) -> Any:
    raise KeyError("something private")


class Fails(nn.Linear):
    """A model that fails at its n-th call."""

    calls = 0
    fatal = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.fatal:
            fails()
        return super().forward(x)


FLAT = from_arrays(IMAGES.reshape(-1, 64), CLASSES)
NUMBERS = from_arrays(IMAGES.reshape(-1, 64), CLASSES / 10)


@pytest.mark.parametrize(
    ("model", "loss", "data", "error", "message"),
    [
        (nn.Linear(63, 10), LOSS, FLAT, UserFunctionError, r"float32 of shape \(64,\), failed .*\(1x64 and 63x10\)"),
        (nn.Linear(64, 9), LOSS, FLAT, ParameterError, r"\['n', 10\] for labels of 10 classes, .* \['n', 9\]"),
        (nn.Linear(64, 10), fails, FLAT, UserFunctionError, "The loss.* failed with KeyError"),
        (Fails(64, 10), LOSS, FLAT, UserFunctionError, "The model.* failed with KeyError"),
        (nn.Linear(64, 10), lambda o, y: LOSS(o, y, reduction="none"), FLAT, UserFunctionError, "The loss"),
        (nn.Linear(64, 10), lambda o, y: LOSS(o, y) * torch.nan, FLAT, ParameterError, "loss .* NaN or infinite"),
        (nn.Linear(64, 1), nn.functional.mse_loss, NUMBERS, ParameterError, r"compare all with all.*squared_error"),
        (nn.Linear(64, 2), squared_error, NUMBERS, ParameterError, r"\['n', 2\] and the labels \['n'\]"),
        (nn.GRU(64, 10), LOSS, FLAT, ParameterError, "to return a tensor, got tuple"),
        (nn.Embedding(5, 10), LOSS, FLAT, UserFunctionError, "float32 of shape"),
        (cnn(), LOSS, FLAT, UserFunctionError, "given examples of float32"),
        (nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)), LOSS, FLAT, ParameterError, "use GroupNorm"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_costs_anything(
    model: nn.Module, loss: Any, data: Dataset, error: type[CpsgdError], message: str, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "book")
    ledger.create(Budget(population="people", epsilon=400, delta=1e-4))
    with pytest.raises(error, match=message) as refused:
        train(model, data, loss, ledger=ledger, population="people", run_dir=tmp_path / "run")
    assert "private" not in str(refused.value) or message.endswith("KeyError")
    assert not (tmp_path / "run").exists()
    assert list(ledger.events("people")) == []


def test_a_model_that_fails_in_a_round_costs_nothing(tmp_path: Path) -> None:
    model = Fails(64, 10)
    model.fatal = 10**9
    protocol = Protocol(clients=480, dim=650, clip_norm=1.0, mechanism=Gaussian(sigma=0.1), rotate=False)
    options = {"cohort": 480, "rounds": 2, "participation": "every", "delta": 1e-5, "seed": None, "run_dir": tmp_path}
    trainer = make_trainer(FLAT, protocol, model, **options)
    trainer.step()
    model.fatal = model.calls + 1
    with pytest.raises(UserFunctionError, match=r"data set failed with KeyError .*Nothing was charged") as refused:
        trainer.step()
    assert "private" not in str(refused.value)
    assert (tmp_path / "charges.jsonl").read_text().count("\n") == 1
    model.fatal = 10**9
    assert trainer.step().round == 1
