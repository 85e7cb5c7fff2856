"""Runs that are interrupted: at every point of a round, and by kill -9 at random moments."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import CheckpointError, InfeasibleError, UserFunctionError
from cpsgd.learning import (
    AccountOptions,
    CohortOptions,
    FolderOptions,
    NoPrivacy,
    RunOptions,
    ServerOptions,
    Trainer,
    checkpoints,
    mlp,
)
from cpsgd.learning.datasets import ArrayDataset, Dataset, load_digits
from cpsgd.learning.metrics import MetricsFile
from cpsgd.learning.optimization import Server
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import RoundSimulator
from tests.learning.training import LOSS, Crash, finish, interrupt, make_trainer, weights

from .conftest import blobs

PROTOCOL = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=250)


def trainer(data: Dataset, folder: Path | None = None, **options: Any) -> Trainer:
    options = {"rounds": 6, "optimizer": "adam", "seed": 3, "delta": 1e-5, "dropout": 0.05, **options}
    return make_trainer(data, options.pop("mechanism", PROTOCOL), run_dir=folder, **options)


def charges(folder: Path) -> list[int]:
    return [json.loads(line.rsplit(" ", 1)[0])["round"] for line in (folder / "charges.jsonl").read_text().splitlines()]


def same(first: Trainer, second: Trainer) -> None:
    np.testing.assert_array_equal(weights(first), weights(second))
    assert first.history == second.history
    assert first.guarantee() == second.guarantee()


def test_a_finished_run_has_its_files_and_stays_finished(triangle: ArrayDataset, tmp_path: Path) -> None:
    first = finish(trainer(triangle, tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(6))
    assert rows[-1]["epsilon"] == first.history[-1].epsilon
    assert first.guarantee() is not None
    assert charges(tmp_path) == list(range(6))
    again = trainer(triangle, tmp_path, resume=True)
    assert again.round == 6
    same(finish(again), first)


def test_runs_of_earlier_releases_are_told_apart_by_the_same_names(triangle: ArrayDataset) -> None:
    names = "mechanism delta adjacency colluding dataset population budget cohort messages participation dropout "
    names += (
        "optimizer learning_rate weight_decay schedule local_steps local_learning_rate examples seed device parameters"
    )
    assert list(trainer(triangle).config) == names.split()


def test_a_run_can_be_taken_up_and_prolonged(triangle: ArrayDataset, tmp_path: Path) -> None:
    finish(trainer(triangle, tmp_path, rounds=4))
    same(finish(trainer(triangle, tmp_path, rounds=6, resume=True)), finish(trainer(triangle)))


# Where in a round the process ends: the function that is interrupted, and whether it has done its work by then.
POINTS: list[tuple[Any, str, bool]] = [
    (checkpoints.ChargeLog, "append", False),
    (checkpoints.ChargeLog, "append", True),
    (RoundSimulator, "mean", True),
    (Server, "step", True),
    (checkpoints, "save", False),
    (checkpoints, "save", True),
    (MetricsFile, "append", False),
    (MetricsFile, "append", True),
]


@pytest.mark.parametrize(("owner", "name", "afterwards"), POINTS)
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    triangle: ArrayDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    afterwards: bool,
    checkpoint_every: int,
) -> None:
    expected = finish(trainer(triangle))
    for call in (1, 2):
        with monkeypatch.context() as patched:
            interrupt(patched, owner, name, afterwards, call)
            # Where fewer calls are left than it takes, the run ends by itself.
            with contextlib.suppress(Crash):
                finish(trainer(triangle, tmp_path, checkpoint_every=checkpoint_every, resume=True))
    same(finish(trainer(triangle, tmp_path, resume=True)), expected)
    assert charges(tmp_path) == list(range(6))


@pytest.mark.parametrize(("owner", "name", "afterwards"), POINTS)
def test_without_a_seed_a_charged_round_is_spent_and_not_repeated(
    triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, afterwards: bool
) -> None:
    with monkeypatch.context() as patched:
        interrupt(patched, owner, name, afterwards, 2)
        with pytest.raises(Crash):
            finish(trainer(triangle, tmp_path, seed=None))
    charged = charges(tmp_path)
    resumed = trainer(triangle, tmp_path, seed=None, resume=True)
    assert resumed.round == len(charged)
    lost = [row.round for row in resumed.history if not row.released]
    finish(resumed)
    assert charges(tmp_path) == list(range(6))
    assert [row.round for row in resumed.history] == list(range(6))
    assert [row.round for row in resumed.history if not row.released] == lost
    assert len(lost) <= 1
    found = resumed.guarantee()
    assert found is not None
    assert found.rounds == 6


def test_an_interrupted_trainer_does_not_go_on_by_itself(
    triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(triangle, tmp_path, seed=None)
    run.step()
    with monkeypatch.context() as patched:
        interrupt(patched, Server, "step", False, 0)
        with pytest.raises(Crash):
            run.step()
    with pytest.raises(CheckpointError, match="Round 1 was interrupted after its charge"):
        run.step()
    with pytest.raises(CheckpointError, match="Round 1 was interrupted after its charge: there is no model"):
        run.export(tmp_path)
    resumed = finish(trainer(triangle, tmp_path, seed=None, resume=True))
    assert [row.released for row in resumed.history] == [True, False, True, True, True, True]


def test_without_privacy_a_run_is_resumed_as_well(
    triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mechanism": NoPrivacy(1.0), "delta": None}
    with monkeypatch.context() as patched:
        interrupt(patched, checkpoints, "save", False, 3)
        with pytest.raises(Crash):
            finish(trainer(triangle, tmp_path, **options))
    same(finish(trainer(triangle, tmp_path, resume=True, **options)), finish(trainer(triangle, **options)))


def digits(folder: Path | None, **options: Any) -> Trainer:
    protocol = Protocol.rotated_binomial(clients=20, dim=650, clip_norm=1.0, levels=8, trials=250)
    return Trainer(
        mlp(64, 10, (), seed=0),
        LOSS,
        load_digits(),
        protocol,
        cohorts=CohortOptions(cohort=20, rounds=40, dropout=0.1),
        server=ServerOptions(optimizer="adagrad"),
        account=AccountOptions(delta=1e-3),
        run=RunOptions(seed=5),
        folder=FolderOptions(run_dir=folder, **options),
    )


def _trains(folder: Path, begun: Any) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    run = digits(folder, resume=True)
    begun.send(run.round)
    finish(run)


def test_kill_minus_9_at_random_moments(tmp_path: Path) -> None:
    # The moments differ from run to run on purpose: the claim is about every moment.
    context, killed = multiprocessing.get_context("fork"), 0
    for _ in range(3):
        here, there = context.Pipe()
        process = context.Process(target=_trains, args=(tmp_path / "run", there))
        process.start()
        assert here.recv() <= 40
        time.sleep(random.uniform(0.0, 0.25))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 1
    resumed = finish(digits(tmp_path / "run", resume=True))
    same(resumed, finish(digits(None)))
    assert charges(tmp_path / "run") == list(range(40))


def test_bad_run_directories(triangle: ArrayDataset, tmp_path: Path) -> None:
    finish(trainer(triangle, tmp_path, rounds=2))
    with pytest.raises(CheckpointError, match="holds a run already"):
        trainer(triangle, tmp_path)
    with pytest.raises(CheckpointError, match="another learning_rate, seed"):
        trainer(triangle, tmp_path, resume=True, seed=4, lr=0.2)
    with pytest.raises(InfeasibleError, match="buys"):
        trainer(triangle, tmp_path, resume=True, epsilon=1e-3)
    features = triangle.features.copy()
    features[-1, -1] += 1.0
    with pytest.raises(CheckpointError, match="another content of the data set;"):
        trainer(replace(triangle, features=features), tmp_path, resume=True)
    checkpoint, log = tmp_path / "checkpoint.bin", tmp_path / "charges.jsonl"
    good, spent = checkpoint.read_bytes(), log.read_bytes()
    checkpoint.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(triangle, tmp_path, resume=True)
    checkpoint.write_bytes(good)
    log.write_bytes(spent.splitlines(keepends=True)[0])
    with pytest.raises(CheckpointError, match="does not hold all"):
        trainer(triangle, tmp_path, resume=True)
    log.write_bytes(spent)
    checkpoint.unlink()
    with pytest.raises(CheckpointError, match="charges but no checkpoint"):
        trainer(triangle, tmp_path, resume=True)


@pytest.mark.parametrize("change", [{"round": None}, {"history": [{"loss": 1.0}]}, {"model": {}}, {"cohorts": 3}])
def test_a_checkpoint_of_something_else(triangle: ArrayDataset, tmp_path: Path, change: dict[str, Any]) -> None:
    run = trainer(triangle, tmp_path, rounds=1)
    finish(run)
    path = tmp_path / checkpoints.CHECKPOINT
    checkpoints.save(path, {**checkpoints.load(path), **change})
    with pytest.raises(CheckpointError, match="does not hold the state"):
        trainer(triangle, tmp_path, rounds=1, resume=True)


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """Makes fsync of a file of this name, or of its draft, fail as on a full disk after `calls` of them."""
    real, counter = os.fsync, itertools.count()

    def fail(descriptor: int) -> None:
        name_of_file = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.lstrip(".")
        if name_of_file.startswith(name) and next(counter) >= calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("charges.jsonl", r"charges\.jsonl: No space left on device\. Round 2 was not computed; make room"),
        ("metrics.jsonl", r": No space left on device\. 2 rounds are complete: make room and save"),
        ("checkpoint.bin", r"checkpoint\.bin: No space left on device\. 2 rounds are complete: make room and save"),
    ],
)
def test_a_full_disk_is_told_of_and_costs_no_round(
    triangle: ArrayDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    run = trainer(triangle, tmp_path)
    with monkeypatch.context() as patched:
        full_disk(patched, name, calls=2 if name == "charges.jsonl" else 1)
        with pytest.raises(CheckpointError, match=words):
            finish(run)
    if name == "charges.jsonl":
        with pytest.raises(CheckpointError, match="Round 2 was interrupted"):
            run.step()
        run = trainer(triangle, tmp_path, resume=True)
    else:
        # All is in memory, and room was made: the run goes on, and nothing is missing on the disk.
        assert run.round == 2
        run.save()
        assert trainer(triangle, tmp_path, resume=True).round == 2
    same(finish(run), finish(trainer(triangle)))
    assert charges(tmp_path) == list(range(6))
    same(trainer(triangle, tmp_path, resume=True), run)


def test_an_evaluation_that_fails_later_is_told_of_with_the_round(triangle: ArrayDataset, tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) == 200:  # the test set
            seen.append(len(seen))
            if len(seen) == 4:
                raise IndexError("Target 98765 is out of bounds.")
        return LOSS(outputs, labels)

    run = make_trainer(triangle, PROTOCOL, loss=loss, rounds=6, delta=1e-5, run_dir=tmp_path)
    assert seen == [0]  # before anything is charged
    with pytest.raises(
        UserFunctionError, match=r"given the test examples, failed with IndexError.*was charged"
    ) as found:
        finish(run)
    assert "98765" not in str(found.value)
    with pytest.raises(CheckpointError, match="Round 2 was interrupted after its charge"):
        run.step()
    assert charges(tmp_path) == [0, 1, 2]


def test_labels_beyond_the_outputs_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    beyond = blobs()
    beyond.test_labels[7] = 12
    with pytest.raises(
        UserFunctionError, match=r"given the test examples, failed with IndexError.*Nothing was charged"
    ):
        trainer(beyond, tmp_path)
    assert not (tmp_path / "charges.jsonl").exists()
