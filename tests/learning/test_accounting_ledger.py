"""Training on a ledger: every round charged once, whatever interrupts it, and refused when nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import BudgetExceededError, CheckpointError, ParameterError, PopulationError
from cpsgd.learning import NoPrivacy, Trainer, mlp
from cpsgd.learning.checkpoints import ChargeLog
from cpsgd.learning.datasets import ArrayDataset, Dataset
from cpsgd.learning.optimization import Server
from cpsgd.learning.option_groups import (
    AccountOptions,
    ClientOptions,
    CohortOptions,
    FolderOptions,
    RunOptions,
    ServerOptions,
)
from cpsgd.ledger import Budget, Ledger
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.protocol import Protocol

LOSS = torch.nn.functional.cross_entropy
PROTOCOL = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=250)
DELTA = 1e-5


class Crash(BaseException):
    """Stands in for the end of the process: nothing catches it."""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=50.0, delta=DELTA))
    return ledger


@dataclass(frozen=True, kw_only=True)
class Options(CohortOptions, ClientOptions, ServerOptions, AccountOptions, RunOptions, FolderOptions):
    """All groups at once."""


def groups(**values: Any) -> dict[str, Any]:
    return dict.fromkeys(("cohorts", "clients", "server", "account", "run", "folder"), Options(**values))


def trainer(data: Dataset, folder: Path | None, ledger: Ledger | None, **options: Any) -> Trainer:
    options = {"cohort": 100, "rounds": 4, "seed": 3, "delta": DELTA, "dropout": 0.05, **options}
    options = {"population": None if ledger is None else "people", **options}
    mechanism = options.pop("mechanism", PROTOCOL)
    # A new object for a new process; a run that goes on opens it by its name.
    book = ledger and (str(ledger.path) if options.get("resume") else Ledger(ledger.path))
    return Trainer(mlp(4, 3, (), seed=0), LOSS, data, mechanism, **groups(run_dir=folder, ledger=book, **options))


def finish(run: Trainer) -> Trainer:
    for _ in run.run():
        pass
    return run


@pytest.mark.slow
def test_the_ledger_agrees_with_the_run(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    for number in range(2):
        run = finish(trainer(triangle, tmp_path / str(number), ledger))
        own = run.guarantee()
        assert own is not None
        if number == 0:
            # Disjoint cohorts: the costliest round.
            assert ledger.total("people").epsilon == own.epsilon
    entries = ledger.events("people")
    assert [entry.event.round for entry in entries] == [0, 1, 2, 3] * 2
    assert [entry.survivors for entry in entries[4:]] == [row.survivors for row in run.history]
    assert all(entry.released for entry in entries)
    # Two runs over the same people: cohorts of one run are disjoint, those of two are not.
    assert len({entry.event.partition for entry in entries}) == 2
    fewest = min(entry.survivors for entry in entries[:4]), min(entry.survivors for entry in entries[4:])
    expected = guarantee_over_rounds(PROTOCOL, DELTA, surviving=fewest).epsilon
    assert ledger.total("people").epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["every", "fixed-size", "poisson"])
def test_every_participation_is_accounted_alike(triangle: ArrayDataset, tmp_path: Path, scheme: str) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    adjacency: Any = "zero-out" if scheme == "poisson" else "replace-one"
    ledger.create(Budget(population="people", epsilon=50.0, delta=DELTA, adjacency=adjacency))
    cohort = triangle.size if scheme == "every" else triangle.size // 4
    run = finish(trainer(triangle, None, ledger, participation=scheme, cohort=cohort, rounds=2, dropout=0.0))
    own = run.guarantee()
    assert own is not None
    assert ledger.total("people").epsilon == pytest.approx(own.epsilon, rel=1e-6)


@pytest.mark.slow
def test_a_run_that_costs_too_much_is_refused_before_it_begins(triangle: ArrayDataset, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    one = guarantee_over_rounds(PROTOCOL, DELTA, surviving=80).epsilon
    ledger.create(Budget(population="people", epsilon=one, delta=DELTA))
    head = ledger.head
    options: dict[str, Any] = {"participation": "every", "cohort": triangle.size, "dropout": 0.0}
    cheap = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=8, trials=2)
    with pytest.raises(BudgetExceededError, match="people"):
        trainer(triangle, tmp_path / "run", ledger, mechanism=cheap, **options)
    assert ledger.head == head
    # And in the middle, if somebody else has spent what was left.
    first, second = trainer(triangle, None, ledger), trainer(triangle, None, ledger)
    finish(first)
    before = {name: value.clone() for name, value in second.model.state_dict().items()}
    with pytest.raises(BudgetExceededError):
        second.step()
    assert all(torch.equal(value, before[name]) for name, value in second.model.state_dict().items())
    assert second.round == 0
    with pytest.raises(BudgetExceededError):
        second.step()  # as before, and not as a round that was interrupted
    assert len(ledger.events("people")) == 4


# ------------------------------------------------------------------ interruptions

POINTS = [
    (Ledger, "reserve", False),
    (Ledger, "reserve", True),
    (ChargeLog, "append", False),
    (ChargeLog, "append", True),
    (Ledger, "release", False),
    (Ledger, "release", True),
    (Server, "step", True),
    (Trainer, "_save", False),
]


def interrupt(patched: pytest.MonkeyPatch, owner: type, name: str, afterwards: bool, call: int) -> None:
    """Makes the `call`-th call of a method the last thing that happens."""
    calls = itertools.count()
    real = getattr(owner, name)

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) < call:
            return real(self, *arguments, **options)
        if afterwards:
            real(self, *arguments, **options)
        raise Crash

    patched.setattr(owner, name, interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "afterwards"), POINTS)
@pytest.mark.parametrize("seed", [3, None])
def test_no_round_is_charged_twice_or_forgotten(
    triangle: ArrayDataset,
    tmp_path: Path,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    afterwards: bool,
    seed: int | None,
) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        with monkeypatch.context() as patched:
            interrupt(patched, owner, name, afterwards, 1)
            with contextlib.suppress(Crash):
                finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
    resumed = finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
    entries = ledger.events("people")
    assert Counter(entry.event.round for entry in entries) == dict.fromkeys(range(4), 1)
    released = {row.round for row in resumed.history if row.released}
    assert {entry.event.round for entry in entries if entry.released} >= released
    if seed is not None:
        assert released == set(range(4))
        assert all(entry.released for entry in entries)
        alone = finish(trainer(triangle, None, None))
        for mine, other in zip(resumed.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.equal(mine, other)
    ledger.verify()


@pytest.mark.slow
def test_an_older_copy_of_the_folder_is_a_second_release_without_a_seed(
    triangle: ArrayDataset, tmp_path: Path, ledger: Ledger
) -> None:
    for seed, extra in ((3, 0), (None, 3)):
        before = len(ledger.events("people"))
        folder, copy = tmp_path / f"run{seed}", tmp_path / f"copy{seed}"
        run = trainer(triangle, folder, ledger, seed=seed)
        run.step()
        del run
        shutil.copytree(folder, copy)
        finish(trainer(triangle, folder, ledger, seed=seed, resume=True))
        finish(trainer(triangle, copy, ledger, seed=seed, resume=True))
        entries = ledger.events("people")[before:]
        assert len(entries) == 4 + extra
        # Clients of a repeated round are in two rounds, which no partition may hide.
        assert sum(entry.event.partition == "" for entry in entries) == extra


def test_a_run_stays_with_its_ledger(triangle: ArrayDataset, tmp_path: Path, ledger: Ledger) -> None:
    folder = tmp_path / "run"
    run = trainer(triangle, folder, ledger)
    run.step()
    del run
    with pytest.raises(CheckpointError, match="another budget"):
        trainer(triangle, folder, None, resume=True)
    other = Ledger(tmp_path / "other.ledger")
    other.create(Budget(population="people", epsilon=50.0, delta=DELTA))
    with pytest.raises(CheckpointError, match="not on the ledger"):
        trainer(triangle, folder, other, resume=True)
    finish(trainer(triangle, folder, ledger, resume=True))
    bare = tmp_path / "bare"
    run = trainer(triangle, bare, None)
    run.step()
    del run
    with pytest.raises(CheckpointError, match="another budget"):
        trainer(triangle, bare, ledger, resume=True)


def test_what_cannot_be_charged(triangle: ArrayDataset, ledger: Ledger) -> None:
    with pytest.raises(ParameterError, match="private at all"):
        trainer(triangle, None, ledger, mechanism=NoPrivacy(1.0), delta=None)
    with pytest.raises(ParameterError, match="population"):
        trainer(triangle, None, ledger, population=None)
    with pytest.raises(ParameterError, match="population"):
        trainer(triangle, None, None, population="people")
    with pytest.raises(PopulationError):
        trainer(triangle, None, ledger, population="nobody")
    with pytest.raises(ParameterError, match="zero-out"):
        trainer(triangle, None, ledger, adjacency="zero-out")
    ledger.create(Budget(population="examples", epsilon=50.0, delta=DELTA, unit="example"))
    with pytest.raises(ParameterError, match="protects one example"):
        trainer(triangle, None, ledger, population="examples")
