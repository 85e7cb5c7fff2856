from __future__ import annotations

from functools import partial

import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import models, optimizers


def test_a_seed_repeats_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = models.mlp(4, 2, seed=3), models.mlp(4, 2, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(next(models.mlp(4, 2, seed=4).parameters()), next(first.parameters()))


def test_models_by_name() -> None:
    assert sum(p.numel() for p in models.by_name("mlp-60-60", 784, 10).parameters()) == 51_370
    assert [type(layer).__name__ for layer in models.by_name("mlp-7", 3, 2).children()] == ["Linear", "ReLU", "Linear"]
    for wrong in ("resnet", "mlp-x", "linear-3", "mlp-0"):
        with pytest.raises(ParameterError):
            models.by_name(wrong, 3, 2)


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_named_optimizers_take_the_rate(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    made = optimizers.make(name, [weight], 0.25)
    assert made.param_groups[0]["lr"] == 0.25
    assert made.param_groups[0].get("momentum", 0.0) == (0.9 if name == "momentum" else 0.0)


def test_other_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert isinstance(optimizers.make(partial(torch.optim.RMSprop, lr=0.1), [weight], 1.0), torch.optim.RMSprop)
    with pytest.raises(ParameterError, match="Known are sgd, momentum, adagrad, adam"):
        optimizers.make("lion", [weight], 0.1)
    with pytest.raises(ParameterError, match="learning_rate"):
        optimizers.make("sgd", [weight], 0.0)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ParameterError, match="Known are constant, linear"):
        optimizers.check_schedule("cosine")


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_weight_decay_pulls_parameters_towards_zero(name: str) -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = optimizers.make(name, [parameter], 0.1, 0.5)
    parameter.grad = torch.zeros(1)
    optimizer.step()
    assert 0.0 < float(parameter.detach()) < 2.0


def test_schedules_end_low() -> None:
    assert [optimizers.factor("constant", number, 10) for number in (0, 9)] == [1.0, 1.0]
    assert [optimizers.factor("linear", number, 10) for number in (0, 9)] == pytest.approx([1.0, 0.1])
    assert [optimizers.factor("late", number, 10) for number in (0, 7, 8, 9)] == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3])
