"""Any optimizer and any schedule of PyTorch, interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from cpsgd.errors import CheckpointError, ParameterError, UserFunctionError
from cpsgd.learning import CohortOptions, FolderOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets import ArrayDataset

OPTIMIZERS: list[Callable[..., Any]] = [
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    torch.optim.Adam,
    partial(torch.optim.AdamW, amsgrad=True),
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    torch.optim.Rprop,
]
SCHEDULES: list[Callable[..., Any]] = [
    partial(lr_scheduler.StepLR, step_size=2),
    partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    partial(lr_scheduler.ExponentialLR, gamma=0.7),
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 / (step + 1)),
    partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=7, cycle_momentum=False),
    partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, gamma=0.5)],
        milestones=[3],
    ),
]


def trainer(data: ArrayDataset, optimizer: Any, schedule: Any, **folder: Any) -> Trainer:
    return Trainer(
        mlp(4, 3, (), seed=0),
        torch.nn.functional.cross_entropy,
        data,
        NoPrivacy(1.0),
        cohorts=CohortOptions(cohort=50, rounds=6),
        server=ServerOptions(optimizer=optimizer, schedule=schedule),
        run=RunOptions(seed=1),
        folder=FolderOptions(**folder),
    )


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *[(partial(make, lr=0.1), SCHEDULES[0]) for make in OPTIMIZERS],
        *[(partial(torch.optim.Adam, lr=0.1), make) for make in SCHEDULES],
    ],
)
def test_it_trains_and_is_resumed_bit_for_bit(
    triangle: ArrayDataset, optimizer: Any, schedule: Any, tmp_path: Path
) -> None:
    whole = trainer(triangle, optimizer, schedule)
    rates = [whole._server.optimizer.param_groups[0]["lr"]]
    for _ in whole.run():
        rates.append(whole._server.optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    begun = trainer(triangle, optimizer, schedule, run_dir=tmp_path)
    for _ in range(3):
        begun.step()
    del begun
    resumed = trainer(triangle, optimizer, schedule, run_dir=tmp_path, resume=True)
    assert resumed.round == 3
    list(resumed.run())
    assert resumed.history == whole.history
    assert all(map(torch.equal, resumed.model.state_dict().values(), whole.model.state_dict().values()))
    assert resumed._server.optimizer.param_groups[0]["lr"] == rates[-1]


def test_the_rates_are_the_schedules_own(triangle: ArrayDataset) -> None:
    found = trainer(triangle, partial(torch.optim.SGD, lr=0.8), partial(lr_scheduler.ExponentialLR, gamma=0.5))
    before = torch.cat([p.detach().reshape(-1).clone() for p in found.model.parameters()])
    found.step()
    assert found._server.optimizer.param_groups[0]["lr"] == 0.4
    assert found.config["schedule"] == "ExponentialLR"
    assert not torch.equal(before, torch.cat([p.detach().reshape(-1) for p in found.model.parameters()]))


def test_another_schedule_is_not_resumed(triangle: ArrayDataset, tmp_path: Path) -> None:
    optimizer = partial(torch.optim.Adam, lr=0.1)
    trainer(triangle, optimizer, SCHEDULES[0], run_dir=tmp_path).step()
    with pytest.raises(CheckpointError, match="another schedule"):
        trainer(triangle, optimizer, SCHEDULES[2], run_dir=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "error", "message"),
    [
        (torch.optim.LBFGS, "constant", ParameterError, "one step per gradient, got LBFGS"),
        (lambda parameters: None, "constant", ParameterError, "got NoneType"),
        (lambda parameters: 1 / 0, "constant", UserFunctionError, "makes the optimizer failed with ZeroDivisionError"),
        ("adam", lambda optimizer: 1 / 0, UserFunctionError, "makes the schedule failed with ZeroDivisionError"),
        ("adam", lambda optimizer: optimizer, ParameterError, r"scheduler of torch.optim.lr_scheduler .* got Adam"),
    ],
)
def test_what_is_no_optimizer_or_schedule_is_refused(
    triangle: ArrayDataset, optimizer: Any, schedule: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        trainer(triangle, optimizer, schedule, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
