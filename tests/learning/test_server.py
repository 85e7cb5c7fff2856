"""The server's steps and its look at test examples."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import mlp, optimization
from cpsgd.learning.optimization import Server, make_optimizer
from cpsgd.learning.option_groups import OptimizerName, ServerOptions
from cpsgd.planner.workloads import rate_factor

LOSS = torch.nn.functional.cross_entropy
NAMES = get_args(OptimizerName)


def serving(model: torch.nn.Module, **options: Any) -> Server:
    return Server(model, LOSS, ServerOptions(**{"lr": 0.5, **options}), rounds=4)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


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
