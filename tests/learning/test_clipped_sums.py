# mypy: disable-error-code="no-untyped-call"
"""`ClippedSums`: what it refuses, and examples that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsgd.errors import ParameterError
from cpsgd.learning.clipped_sums import ClippedSums


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(
    "make",
    [
        model,
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 1)), nn.Linear(1, 9), nn.Linear(9, 9), nn.Flatten(), nn.Linear(27, 2)
        ),
    ],
)
def test_an_example_that_is_not_finite_adds_nothing(bad: float, make: object) -> None:
    torch.manual_seed(0)
    assert callable(make)
    net = make()
    sums = ClippedSums(net)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])
    functional.cross_entropy(net(x), y).backward()
    sums.fold(1.0, scale=5.0, count=4)
    expected = sums.total.clone()
    x[4] = bad
    sums.forget()
    functional.cross_entropy(net(x), y, reduction="none").sum().backward()
    sums.fold(1.0, scale=1.0)
    assert bool(torch.isfinite(sums.total).all())
    # 3e38 may have a finite gradient, which counts with at most the clip norm.
    assert float((sums.total - expected).norm()) <= (1.0 if bad == 3e38 else 1e-5)


def test_a_parameter_used_outside_its_layer_is_refused() -> None:
    net = model()
    ClippedSums(net)
    with pytest.raises(ParameterError, match="outside of its layer"):
        (net(torch.randn(2, 3)).sum() + next(net.parameters()).sum()).backward()


def test_a_pass_in_eval_mode_is_refused_and_one_without_gradients_is_not() -> None:
    net = model()
    sums = ClippedSums(net)
    with torch.no_grad():
        net(torch.randn(2, 3))
    assert sums.rows is None
    net.eval()
    with pytest.raises(ParameterError, match="eval mode"):
        net(torch.randn(2, 3)).sum().backward()


def test_batch_norm_a_second_time_and_autocast_are_refused() -> None:
    with pytest.raises(ParameterError, match="GroupNorm"):
        ClippedSums(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    net = model()
    sums = ClippedSums(net)
    with pytest.raises(ParameterError, match="private already"):
        ClippedSums(net)
    with torch.autocast("cpu"), pytest.raises(ParameterError, match="autocast"):
        net(torch.randn(2, 3))
    sums.detach()
    net(torch.randn(2, 3)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_backward_pass_and_inputs_changed_in_place_are_refused(first: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))[first:]
    sums = ClippedSums(net)
    x = torch.randn(2, 3, requires_grad=bool(first))
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ParameterError, match="add up the losses"):
        loss.backward()
    sums.forget()
    loss = net(x).sum()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(ParameterError, match="changed in place"):
        loss.backward()


def test_rows_that_are_not_examples_are_refused() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.first(x.view(-1, 2)).view(len(x), 4))
            return found

    net = Merged()
    sums = ClippedSums(net)
    net(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ParameterError, match="different numbers of rows"):
        sums.fold(1.0, scale=1.0)
    sums.forget()
    with pytest.raises(ParameterError, match="no backward pass"):
        sums.fold(1.0, scale=1.0)
