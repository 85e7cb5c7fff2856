"""The model and its card, and functions that are called after a round."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpsgd.errors import CheckpointError, ParameterError, UserFunctionError
from cpsgd.learning import NoPrivacy, RoundMetrics, Trainer, export, tensorboard
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.mechanisms import Gaussian
from cpsgd.protocol import Protocol
from tests.learning.nets import low_rank
from tests.learning.training import linear, make_trainer, spent

GAUSSIAN = Protocol(clients=100, dim=15, clip_norm=1.0, mechanism=Gaussian(sigma=1.0), rotate=False)


def trainer(data: ArrayDataset, mechanism: Any = GAUSSIAN, seed: int | None = None, **options: Any) -> Trainer:
    return make_trainer(data, mechanism, seed=seed, delta=1e-5, **options)


def test_model_and_card_say_the_same(triangle: ArrayDataset, tmp_path: Path) -> None:
    found = trainer(triangle)
    *_, last = found.run()
    model, card_file = found.export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model-card.json", "model.safetensors"]
    fresh = linear(seed=9)
    fresh.load_state_dict(load_file(model))
    assert all(map(torch.equal, fresh.state_dict().values(), found.model.state_dict().values()))
    card = json.loads(card_file.read_text())
    proved = spent(found)
    assert card["model"]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    privacy = card["privacy"]
    assert privacy["epsilon"] == proved.epsilon == last.epsilon
    assert (privacy["delta"], privacy["unit"], privacy["adjacency"]) == (1e-5, "client", "replace-one")
    assert privacy["theorem"] == {"method": proved.method, "citation": proved.citation}
    assert (privacy["rounds"], privacy["participation"], privacy["noise"]) == (3, "once", "secret")
    assert card["data"] == {"name": "blobs", "source": triangle.source, "clients": 600, "classes": 3}
    assert card["settings"]["optimizer"] == "sgd"
    assert card["settings"]["mechanism"] == {"protocol": GAUSSIAN.to_dict()}
    assert card["results"] == {"round": 2, "loss": last.loss, "accuracy": last.accuracy, "r_squared": None}


def test_a_seed_stays_with_the_run_and_is_no_protection(triangle: ArrayDataset, tmp_path: Path) -> None:
    found = trainer(triangle, seed=81726354)
    found.step()
    _, card = found.export(tmp_path)
    assert "81726354" not in card.read_text()
    assert triangle.fingerprint not in card.read_text()
    assert "protects nobody" in json.loads(card.read_text())["privacy"]["noise"]


def test_without_privacy_or_rounds_none_is_claimed(triangle: ArrayDataset, tmp_path: Path) -> None:
    unprotected = trainer(triangle, NoPrivacy(1.0))
    unprotected.step()
    for found in (unprotected, trainer(triangle)):
        _, card = found.export(tmp_path)
        assert json.loads(card.read_text())["privacy"] is None


def test_frozen_and_tied_parameters_are_written_too(tmp_path: Path) -> None:
    model = low_rank()
    model.register_parameter("tied", model.get_parameter("out.weight"))
    path, card = export.write(tmp_path, model, None)
    assert load_file(path).keys() == model.state_dict().keys()
    counts = json.loads(card.read_text())["model"]
    assert counts["parameters"] - counts["trained_parameters"] == 64 * 32 + 32


def test_an_interrupted_round_has_no_model(triangle: ArrayDataset, tmp_path: Path, monkeypatch: Any) -> None:
    found = trainer(triangle)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(found._server, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        found.step()
    with pytest.raises(CheckpointError, match="interrupted"):
        found.export(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_are_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ParameterError, match="pip install safetensors"):
        export.check()


# ------------------------------------------------------------------ callbacks


def test_callbacks_see_every_round(triangle: ArrayDataset) -> None:
    seen: list[tuple[int, int]] = []
    found = trainer(triangle, callbacks=[lambda trainer, metrics: seen.append((trainer.round, metrics.round))])
    list(found.run())
    assert seen == [(1, 0), (2, 1), (3, 2)]


def test_a_callback_that_fails_ends_no_run(triangle: ArrayDataset) -> None:
    def fail(trainer: Trainer, metrics: RoundMetrics) -> None:
        if metrics.round == 1:
            raise OSError("a path")

    found = trainer(triangle, callbacks=[fail])
    found.step()
    with pytest.raises(
        UserFunctionError, match=r"A callback failed with OSError .*Round 1 is complete, and was charged"
    ):
        found.step()
    assert found.step().round == 2


def test_tensorboard_gets_what_was_measured(
    triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

    stub = ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    found = trainer(triangle, callbacks=[tensorboard(tmp_path)])
    first = found.step()
    assert ("loss", first.loss, 1) in written
    assert ("epsilon", first.epsilon, 1) in written
    assert {name for name, _, _ in written} == {"loss", "accuracy", "epsilon", "noise_to_signal", "survivors"}


def test_tensorboard_is_missed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ParameterError, match="pip install tensorboard"):
        tensorboard(tmp_path)
