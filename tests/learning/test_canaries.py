# mypy: disable-error-code="no-untyped-call"
"""Canaries in a private loop, and `cpsgd audit --model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from cpsgd.errors import DamagedFileError, ParameterError
from cpsgd.learning.canaries import FILE, Canaries, audit_folder
from cpsgd.learning.private_loop import Private, make_private
from cpsgd.learning.sum_noise import SumNoise


def trained(canaries: int, *, epsilon: float = 1.0, batch: int = 50, width: int = 100, **options: Any) -> Private:
    """Returns a loop whose steps are done, on examples that teach nothing."""
    data = TensorDataset(torch.randn(50, width), torch.arange(50) % 2)
    model = nn.Linear(width, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(data, batch_size=batch)
    private = make_private(
        model, optimizer, loader, epsilon=epsilon, delta=1e-6, epochs=2, canaries=canaries, **options
    )
    for _ in range(2):
        for features, labels in private:
            optimizer.zero_grad()
            functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    return private


def quieter(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    honest = SumNoise.added
    monkeypatch.setattr(SumNoise, "added", lambda self, sums, *given: honest(self, sums, factor * given[0], given[1]))


@pytest.mark.slow
def test_honest_noise_passes_and_far_too_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # The coins are secret: at this confidence an honest loop is refuted with probability 1e-7 at most.
    report = trained(4000).audit(confidence=1.0 - 1e-7)
    assert report.passed
    assert report.claimed == pytest.approx(1.0, rel=0.02)
    quieter(monkeypatch, 0.05)
    report = trained(4000).audit(confidence=0.99)
    assert not report.passed
    assert report.epsilon > 3.0


@pytest.mark.slow
def test_noise_too_small_by_half_is_caught_in_a_trained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, count = np.random.default_rng(5), 400_000
    # Seeded coins and noise: the outcome is fixed.
    included = generator.random(count) < 0.5
    noise = [generator.normal(size=402_000) for _ in range(2)]
    for factor, passed in ((1.0, True), (0.5, False)):
        steps = iter(noise)

        def seeded(
            self: SumNoise, sums: Any, deviation: float, divisor: float, steps: Any = steps, factor: Any = factor
        ) -> Any:
            return ((sums + factor * deviation * torch.from_numpy(next(steps))) / divisor).float()

        monkeypatch.setattr(SumNoise, "added", seeded)
        monkeypatch.setattr(
            Canaries,
            "draw",
            lambda number, dim: Canaries(np.arange(count), np.ones(count, dtype=np.int64), included, np.zeros(count)),
        )
        data = TensorDataset(torch.zeros(50, 2009), torch.zeros(50, dtype=torch.int64))
        model = nn.Linear(2009, 200)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private = make_private(
            model, optimizer, DataLoader(data, batch_size=50), epsilon=2.0, delta=1e-8, epochs=2, canaries=count
        )
        for _ in range(2):
            for features, labels in private:
                functional.cross_entropy(model(features), labels).backward()
                optimizer.step()
        report = private.audit()
        assert report.passed is passed, report


def test_half_of_the_canaries_are_in_and_each_has_its_coordinate() -> None:
    canaries = Canaries.draw(4000, 5000)
    assert len(set(canaries.coordinates.tolist())) == 4000
    assert abs(int(canaries.included.sum()) - 2000) < 6.2 * 32
    assert abs(int(canaries.signs.sum())) < 6.2 * 64
    canaries.observe(torch.arange(5000.0), np.arange(7))
    assert np.array_equal(canaries.scores[:7], (canaries.signs * canaries.coordinates)[:7])
    assert not canaries.scores[7:].any()
    total = torch.zeros(5000, dtype=torch.float64)
    canaries.add_to(total, 0.5, 1.0)
    assert np.array_equal(total.numpy()[canaries.coordinates], 0.5 * canaries.signs * canaries.included)
    total.zero_()
    canaries.add_to(total, 1.0, 0.1)
    drawn = int((total != 0.0).sum())
    assert abs(drawn - 200) < 6.2 * 14
    with pytest.raises(ParameterError, match="at most 8 canaries"):
        Canaries.draw(9, 8)


def test_canaries_go_on_with_a_checkpoint() -> None:
    private, other = trained(20), trained(30)
    other.steps = 0
    other.load_state_dict(json.loads(json.dumps(private.state_dict())))
    assert other._canaries is not None
    assert private._canaries is not None
    assert other._canaries.to_dict() == private._canaries.to_dict()
    with pytest.raises(ParameterError, match="canaries=1000"):
        trained(0).audit()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"no model\.safetensors"):
        audit_folder(tmp_path)
    trained(0).export(tmp_path)
    with pytest.raises(ParameterError, match=r"no canaries\.json"):
        audit_folder(tmp_path)
    trained(20).export(tmp_path)
    good = json.loads((tmp_path / FILE).read_text())
    for change in (
        {"format": "other"},
        {"sha256": "0" * 64},
        {"coordinates": "abc"},
        {"scores": [[0.0] * 20]},
        {"included": [True]},
        {"epsilon": -1.0},
        {"epsilon": "one"},
        {"unit": "house"},
        {"delta": None},
    ):
        (tmp_path / FILE).write_text(json.dumps(good | change))
        with pytest.raises(DamagedFileError):
            audit_folder(tmp_path)
    (tmp_path / FILE).write_text("[" * 100_000)
    with pytest.raises(DamagedFileError):
        audit_folder(tmp_path)
