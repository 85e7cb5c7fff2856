"""A run's folder by itself; whole runs that are interrupted and taken up are in `test_resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import CheckpointError
from cpsgd.learning import mlp
from cpsgd.learning.checkpoints import Progress, RoundMetrics, RunFolder
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import ArrayDataset

CONFIG = {"learning_rate": 0.1, "seed": 3}
COHORTS = Cohorts(population=300, cohort=100, scheme="once", messages=100, overflow=0.0, key=2**63 - 1)


def server(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mlp(4, 3, (), seed=seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def progress(rounds: int) -> Progress:
    fixed: dict[str, Any] = {"released": True, "loss": 1.0, "accuracy": 0.5, "epsilon": 1.0, "delta": 1e-5}
    fixed |= {"method": "m", "bytes_per_client": 9, "bytes_total": 9, "noise_to_signal": 1.0, "seconds": 0.1}
    return Progress(rounds, [RoundMetrics(round=n, survivors=90 + n, **fixed) for n in range(rounds)], COHORTS, "run")


def test_what_was_saved_is_restored(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b", CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    assert folder.restore(model, {"optimizer": optimizer}) is None
    for number in range(3):
        folder.charge(number, 90 + number)
    torch.nn.functional.cross_entropy(model(torch.ones(1, 4)), torch.tensor([1])).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    folder.save(progress(2), model, {"optimizer": optimizer})
    del folder
    other, other_optimizer = server(seed=2)
    again = RunFolder(tmp_path / "a" / "b", CONFIG, triangle, resume=True)
    assert again.restore(other, {"optimizer": other_optimizer}) == progress(2)
    assert again.charged == {0: 90, 1: 91, 2: 92}  # the third was charged and not completed
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert len(other_optimizer.state_dict()["state"]) == len(optimizer.state_dict()["state"]) > 0


def test_a_round_is_charged_once(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    folder.charge(0, 90)
    written = (tmp_path / "charges.jsonl").read_bytes()
    folder.charge(0, 90)
    with pytest.raises(CheckpointError, match="charged with 90 messages and has 91 now"):
        folder.charge(0, 91)
    assert (tmp_path / "charges.jsonl").read_bytes() == written


def test_a_run_that_is_refused_changes_nothing(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    folder.charge(0, 90)
    first, first_optimizer = server(seed=1)
    folder.save(progress(1), first, {"optimizer": first_optimizer})
    del folder
    model, optimizer = server(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="holds a run already"):
        RunFolder(tmp_path, CONFIG, triangle, resume=False)
    changed = RunFolder(tmp_path, {**CONFIG, "seed": 4}, triangle, resume=True)
    with pytest.raises(CheckpointError, match="another seed;"):
        changed.restore(model, {"optimizer": optimizer})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
