"""The server's steps, schedules and averages, and its evaluation of test examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from cpsgd.errors import CheckpointError, ParameterError, UserFunctionError
from cpsgd.learning import NoPrivacy, Trainer, mlp, optimization
from cpsgd.learning.datasets import ArrayDataset, load_digits
from cpsgd.learning.optimization import MovingAverage, Server, make_optimizer
from cpsgd.learning.option_groups import OptimizerName, ServerOptions
from cpsgd.planner.workloads import rate_factor
from tests.learning.training import LOSS, make_trainer, weights

NAMES = get_args(OptimizerName)
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


def serving(model: torch.nn.Module, **options: Any) -> Server:
    return Server(model, LOSS, ServerOptions(**{"lr": 0.5, **options}), rounds=4)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.from_numpy(weights(model))


def test_a_step_follows_the_mean_and_the_schedule() -> None:
    model = mlp(4, 3, (), seed=0)
    found = serving(model, schedule="linear")
    mean = torch.arange(15.0)
    for number, rate in enumerate((0.5, 0.375, 0.25, 0.125)):
        before = flat(model)
        found.step(mean, number)
        torch.testing.assert_close(flat(model), before - rate * mean)
        assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_stay() -> None:
    model = mlp(4, 3, (2,), seed=0)
    first = next(iter(model.parameters()))
    first.requires_grad = False
    kept = first.clone()
    before = flat(model)
    serving(model).step(torch.ones(len(before) - first.numel()), 0)
    assert torch.equal(first, kept)
    assert not torch.equal(flat(model), before)


def test_parts_of_the_test_set_count_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(50, 4, generator=generator), torch.randint(3, (50,), generator=generator)
    model = mlp(4, 3, (5,), seed=0)
    outputs = model(features).detach()
    expected = float(LOSS(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())
    for batch in (4096, 7):
        monkeypatch.setattr(optimization, "_TEST_BATCH", batch)
        assert serving(model).evaluate(features, labels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_parameter_is_enough(bad: float) -> None:
    model = mlp(4, 3, (), seed=0)
    found = serving(model)
    assert found.is_finite()
    with torch.no_grad():
        next(iter(model.parameters()))[1, 2] = bad
    assert not found.is_finite()


@pytest.mark.parametrize("name", NAMES)
def test_named_optimizers_take_the_rate(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    made = make_optimizer(ServerOptions(optimizer=name, lr=0.25), [weight])
    assert made.param_groups[0]["lr"] == 0.25
    assert made.param_groups[0].get("momentum", 0.0) == (0.9 if name == "momentum" else 0.0)


def test_other_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert isinstance(
        make_optimizer(ServerOptions(optimizer=partial(torch.optim.RMSprop, lr=0.1)), [weight]), torch.optim.RMSprop
    )
    with pytest.raises(ParameterError, match="Known are sgd, momentum, adagrad, adam"):
        ServerOptions(optimizer="lion")
    with pytest.raises(ParameterError, match="Expected lr > 0"):
        ServerOptions(optimizer="sgd", lr=0.0)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ParameterError, match="Known are constant, linear"):
        ServerOptions(schedule="cosine")


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_pulls_parameters_towards_zero(name: str) -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer(ServerOptions(optimizer=name, lr=0.1, weight_decay=0.5), [parameter])
    parameter.grad = torch.zeros(1)
    optimizer.step()
    assert 0.0 < float(parameter.detach()) < 2.0


def test_schedules_end_low() -> None:
    assert [rate_factor("constant", number, 10) for number in (0, 9)] == [1.0, 1.0]
    assert [rate_factor("linear", number, 10) for number in (0, 9)] == pytest.approx([1.0, 0.1])
    assert [rate_factor("late", number, 10) for number in (0, 7, 8, 9)] == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3])


# ------------------------------------------------------------------ any optimizer and schedule, interrupted and resumed


def scheduled(data: ArrayDataset, optimizer: Any, schedule: Any, **folder: Any) -> Trainer:
    options = {"cohort": 50, "rounds": 6, "optimizer": optimizer, "schedule": schedule}
    return make_trainer(data, NoPrivacy(1.0), **options, **folder)


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
    whole = scheduled(triangle, optimizer, schedule)
    rates = [whole._server.optimizer.param_groups[0]["lr"]]
    for _ in whole.run():
        rates.append(whole._server.optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    begun = scheduled(triangle, optimizer, schedule, run_dir=tmp_path)
    for _ in range(3):
        begun.step()
    del begun
    resumed = scheduled(triangle, optimizer, schedule, run_dir=tmp_path, resume=True)
    assert resumed.round == 3
    list(resumed.run())
    assert resumed.history == whole.history
    np.testing.assert_array_equal(weights(resumed), weights(whole))
    assert resumed._server.optimizer.param_groups[0]["lr"] == rates[-1]


def test_the_rates_are_the_schedules_own(triangle: ArrayDataset) -> None:
    found = scheduled(triangle, partial(torch.optim.SGD, lr=0.8), partial(lr_scheduler.ExponentialLR, gamma=0.5))
    before = weights(found)
    found.step()
    assert found._server.optimizer.param_groups[0]["lr"] == 0.4
    assert found.config["schedule"] == "ExponentialLR"
    assert not np.array_equal(weights(found), before)


def test_another_schedule_is_not_resumed(triangle: ArrayDataset, tmp_path: Path) -> None:
    optimizer = partial(torch.optim.Adam, lr=0.1)
    scheduled(triangle, optimizer, SCHEDULES[0], run_dir=tmp_path).step()
    with pytest.raises(CheckpointError, match="another schedule"):
        scheduled(triangle, optimizer, SCHEDULES[2], run_dir=tmp_path, resume=True)


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
        scheduled(triangle, optimizer, schedule, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ moving averages


def averaging_trainer(
    averaging: float | None, folder: Path | None = None, *, resume: bool = False, rounds: int = 6
) -> Trainer:
    data = load_digits()
    model = mlp(data.feature_dim, data.classes, (), seed=1)
    options = {"cohort": 50, "rounds": rounds, "optimizer": "momentum", "lr": 0.5, "averaging": averaging, "seed": 2}
    return make_trainer(data, NoPrivacy(1.0), model, run_dir=folder, resume=resume, **options)


def test_the_average_is_that_of_the_models_and_comes_out_last() -> None:
    """The decay grows to 0.4 from (t + 1)/(t + 10): recomputed here from the models of the same run without it."""
    plain, averaged = averaging_trainer(None), averaging_trainer(0.4)
    expected = weights(plain)
    for number in range(6):
        before, after = plain.step(), averaged.step()
        keep = min(0.4, (number + 1) / (number + 10))
        expected = keep * expected + (1.0 - keep) * weights(plain)
        if number < 5:  # training itself is not changed by it
            np.testing.assert_array_equal(weights(averaged), weights(plain))
            assert before.loss != after.loss
    np.testing.assert_allclose(weights(averaged), expected, rtol=1e-5, atol=1e-6)
    assert averaged.evaluate()[0] == after.loss


def test_a_run_goes_on_with_its_average(tmp_path: Path) -> None:
    whole, begun = averaging_trainer(0.9), averaging_trainer(0.9, tmp_path)
    losses = [metrics.loss for metrics in whole.run()]
    begun.step()
    begun.step()
    del begun
    resumed = averaging_trainer(0.9, tmp_path, resume=True)
    assert [metrics.loss for metrics in resumed.run()] == losses[2:]
    np.testing.assert_array_equal(weights(resumed), weights(whole))


def test_an_export_within_the_run_is_the_average(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    run = averaging_trainer(0.9)
    run.step()
    run.step()
    last = weights(run)
    model, _ = run.export(tmp_path)
    written = np.concatenate([tensor.numpy().reshape(-1) for tensor in load_file(model).values()])
    np.testing.assert_array_equal(weights(run), last)
    assert np.abs(np.sort(written) - np.sort(last)).max() > 1e-4


def test_the_model_is_itself_again_after_an_error() -> None:
    model = mlp(3, 2, ())
    average = MovingAverage(model.parameters(), 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    moved = weights(model)

    def fail() -> None:
        with average.in_place():
            assert np.abs(weights(model) - moved).min() > 0.5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    np.testing.assert_array_equal(weights(model), moved)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.0, float("nan")])
def test_a_decay_is_between_zero_and_one(wrong: float) -> None:
    with pytest.raises(ParameterError, match="averaging"):
        ServerOptions(averaging=wrong)
