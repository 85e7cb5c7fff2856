"""A run's folder by itself; whole runs that are interrupted and taken up are in `test_resume`."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import CheckpointError
from cpsgd.learning import checkpoints, mlp
from cpsgd.learning.checkpoints import Progress, RunFolder
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.learning.metrics import RoundMetrics

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


def test_checkpoints_do_not_grow_with_the_rounds(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    sizes = []
    for rounds in (100, 1_000):
        for number in range(len(folder.charged), rounds):
            folder.charge(number, 90 + number)
        folder.save(progress(rounds), model, {"optimizer": optimizer})
        sizes.append((tmp_path / "checkpoint.bin").stat().st_size)
    assert sizes[1] - sizes[0] < 100
    del folder
    again = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert again.restore(model, {"optimizer": optimizer}) == progress(1_000)


def test_a_checkpoint_of_before_is_taken_up_and_the_next_one_is_new(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    for number in range(3):
        folder.charge(number, 90 + number)
    folder.save(progress(2), model, {"optimizer": optimizer})
    path = tmp_path / "checkpoint.bin"
    old = checkpoints.load(path) | {
        "history": "\n".join(json.dumps(row.to_dict()) for row in progress(2).history),
        "charged": torch.tensor([[0, 90], [1, 91]]),
    }
    checkpoints.save(path, old)
    path.write_bytes(b"cpsgd checkpoint 1\n" + path.read_bytes().removeprefix(b"cpsgd checkpoint 2\n"))
    (tmp_path / "metrics.jsonl").write_text(
        "whatever a person has put there, longer than all that was ever there\n" * 99
    )
    del folder
    again = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert again.restore(model, {"optimizer": optimizer}) == progress(2)
    again.save(progress(3), model, {"optimizer": optimizer})
    del again
    last = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert last.restore(model, {"optimizer": optimizer}) == progress(3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_log_that_differs_from_what_was_spent_is_refused(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    for number in range(3):
        folder.charge(number, 90 + number)
    folder.save(progress(2), model, {"optimizer": optimizer})
    del folder
    log = tmp_path / "charges.jsonl"
    first, second, third = log.read_bytes().splitlines(keepends=True)
    other = b'{"round": 1, "survivors": 99}'
    for bad in (first, first + third, first + other + b" %08x\n" % zlib.crc32(other) + third):
        log.write_bytes(bad)
        with pytest.raises(CheckpointError, match="does not hold all that the checkpoint has spent"):
            RunFolder(tmp_path, CONFIG, triangle, resume=True).restore(model, {"optimizer": optimizer})
    log.write_bytes(first + second)  # what was charged after the checkpoint is missing, which nobody can see
    assert RunFolder(tmp_path, CONFIG, triangle, resume=True).restore(model, {"optimizer": optimizer}) == progress(2)


def test_a_folder_that_cannot_be_written_is_named(triangle: ArrayDataset, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: File exists"):
        RunFolder(tmp_path / "file", CONFIG, triangle, resume=False)
    (tmp_path / "run" / "charges.jsonl").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"charges\.jsonl: Is a directory"):
        RunFolder(tmp_path / "run", CONFIG, triangle, resume=False)
