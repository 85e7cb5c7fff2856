"""The server's steps and its look at test examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cpsgd.learning import mlp, server
from cpsgd.learning.server import Server

LOSS = torch.nn.functional.cross_entropy


def serving(model: torch.nn.Module, **options: Any) -> Server:
    options = {"learning_rate": 0.5, "weight_decay": 0.0, "schedule": "constant", "rounds": 4, **options}
    return Server(model, LOSS, options.pop("optimizer", "sgd"), **options)


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
        monkeypatch.setattr(server, "_TEST_BATCH", batch)
        assert serving(model).evaluate(features, labels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_parameter_is_enough(bad: float) -> None:
    model = mlp(4, 3, (), seed=0)
    found = serving(model)
    assert found.is_finite()
    with torch.no_grad():
        next(iter(model.parameters()))[1, 2] = bad
    assert not found.is_finite()
