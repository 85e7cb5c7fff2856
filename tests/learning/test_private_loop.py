# mypy: disable-error-code="no-untyped-call"
"""`make_private`: the loop is the user's own, the sum is private, and the account is right."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import cpsgd
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.learning.loop_account import epsilon_of
from cpsgd.learning.private_loop import Private, make_private
from cpsgd.learning.sum_noise import SumNoise


def digits() -> TensorDataset:
    features, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(features / 16, dtype=torch.float32), torch.tensor(labels))


def small(count: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def loop(
    data: TensorDataset, *, batch: int = 20, epochs: float = 2, optimizer: Any = None, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, Private]:
    torch.manual_seed(0)
    model = nn.Linear(data.tensors[0].shape[1], int(data.tensors[1].max()) + 1)
    made = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.5)
    options = {"noise_multiplier": 1.0} | options if "epsilon" not in options else options
    private = make_private(model, made, DataLoader(data, batch_size=batch), delta=1e-5, epochs=epochs, **options)
    return model, made, private


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, private: Private) -> None:
    for features, labels in private:
        optimizer.zero_grad()
        functional.cross_entropy(model(features), labels).backward()
        optimizer.step()


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SumNoise, "added", lambda self, sums, deviation, divisor: (sums / divisor).float())


@pytest.mark.slow
def test_digits_are_learned() -> None:
    data = digits()
    model, optimizer, private = loop(data, batch=200, epochs=10, epsilon=4.0, optimizer=torch.optim.Adam)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    for _ in range(10):
        epoch(model, optimizer, private)
    features, labels = data.tensors
    assert float((model(features).argmax(1) == labels).float().mean()) > 0.8
    assert 3.95 < private.epsilon <= 4.0


@pytest.mark.slow
def test_epsilon_is_that_of_the_poisson_sampled_gaussian_mechanism() -> None:
    _, _, private = loop(small(), noise_multiplier=1.1)
    private.steps = 20
    peer = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    peer.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.1)), 20)
    expected = peer.get_epsilon(1e-5)
    assert expected <= private.epsilon + 1e-6
    assert private.epsilon <= 1.005 * expected


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_budget_asked_for_is_spent(epsilon: float) -> None:
    _, _, private = loop(small(), epsilon=epsilon)
    private.steps = private.planned
    assert 0.98 * epsilon <= private.epsilon <= epsilon


def test_the_gradient_is_the_clipped_sum_over_the_expected_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    data = small()
    model, optimizer, private = loop(data, clip_norm=0.3)
    for features, labels in private:
        rows = []
        for i in range(len(features)):
            loss = functional.cross_entropy(model.eval()(features[i : i + 1]), labels[i : i + 1])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
        gradients = torch.stack(rows) if rows else torch.zeros(1, 21)
        clipped = gradients * (0.3 / gradients.norm(dim=1)).clamp(max=1.0)[:, None]
        optimizer.zero_grad()
        functional.cross_entropy(model.train()(features), labels).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        counted = private._loader.current
        assert counted is not None
        expected = clipped.sum(0) / 20 if counted.count else torch.zeros(21)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


def test_micro_batches_step_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    model, optimizer, private = loop(small(), micro_batch=3, optimizer=torch.optim.Adam)
    before, moved, parts = copy.deepcopy(model.state_dict()), 0, 0
    for features, labels in private:
        optimizer.zero_grad()
        functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        parts += 1
        changed = not torch.equal(before["weight"], model.weight)
        part = private._loader.current
        assert part is not None
        assert changed == part.last
        moved += changed
        before = copy.deepcopy(model.state_dict())
    assert (moved, private.steps) == (10, 10)
    assert parts > 40


def test_noise_has_the_deviation_that_is_accounted_for() -> None:
    model = nn.Linear(100, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.zeros(40, 100), torch.zeros(40, dtype=torch.int64))
    private = make_private(
        model, optimizer, DataLoader(data, batch_size=10), delta=1e-5, epochs=1, noise_multiplier=2.0, clip_norm=0.5
    )
    features, labels = next(iter(private))
    functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
    assert model.weight.grad is not None
    # Features are zero, so that the weights' gradients are noise alone: 2 · 0.5 / 10 each.
    found = float(model.weight.grad.double().std())
    assert abs(found / 0.1 - 1.0) < 6.2 / math.sqrt(2.0 * model.weight.numel())


@pytest.mark.slow
def test_noise_and_clip_norm_follow_their_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def added(self: SumNoise, sums: torch.Tensor, deviation: float, divisor: float) -> torch.Tensor:
        used.append(deviation)
        return (sums / divisor).float()

    monkeypatch.setattr(SumNoise, "added", added)
    model, optimizer, private = loop(
        small(),
        epsilon=3.0,
        clip_norm=lambda step: 1.0 if step < 10 else 0.5,
        noise_schedule=lambda step: 2.0 if step < 10 else 1.0,
    )
    for _ in range(2):
        epoch(model, optimizer, private)
    assert used[0] == pytest.approx(4.0 * used[-1], rel=0.01)
    assert 2.94 <= private.epsilon <= 3.0
    assert "noise multiplier" in str(private)


def test_steps_after_the_last_one_planned_are_refused() -> None:
    model, optimizer, private = loop(small(), epochs=1)
    epoch(model, optimizer, private)
    before = model.weight.clone()
    with pytest.raises(InfeasibleError, match="All 10 steps"):
        epoch(model, optimizer, private)
    assert torch.equal(before, model.weight)


def test_a_loop_goes_on_from_its_checkpoint() -> None:
    model, optimizer, private = loop(small())
    epoch(model, optimizer, private)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), private.state_dict()))
    again, stepping, other = loop(small(), noise_multiplier=9.0)
    again.load_state_dict(saved[0])
    stepping.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    assert (other.steps, other.epsilon) == (10, private.epsilon)
    epoch(again, stepping, other)
    with pytest.raises(InfeasibleError):
        epoch(again, stepping, other)
    _, _, shorter = loop(small(), epochs=1)
    with pytest.raises(ParameterError, match="another batch size"):
        shorter.load_state_dict(saved[2])


def test_an_older_checkpoint_does_not_give_steps_back() -> None:
    model, optimizer, private = loop(small())
    old = private.state_dict()
    epoch(model, optimizer, private)
    with pytest.raises(ParameterError, match="steps"):
        private.load_state_dict(old)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta"])
def test_any_optimizer_steps(kind: str) -> None:
    model, optimizer, private = loop(small(), epochs=1, optimizer=getattr(torch.optim, kind))
    before = model.weight.clone()
    epoch(model, optimizer, private)
    assert not torch.equal(before, model.weight)


def test_what_cannot_be_private_is_refused() -> None:
    data, model = DataLoader(small(), batch_size=20), nn.Linear(6, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    asked: dict[str, Any] = {"delta": 1e-5, "epochs": 1, "epsilon": 1.0}
    with pytest.raises(ParameterError, match="either epsilon or noise_multiplier"):
        make_private(model, sgd, data, **asked, noise_multiplier=1.0)
    with pytest.raises(ParameterError, match="Expected optimizer of type Optimizer, got Linear"):
        make_private(model, model, data, **asked)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="no examples"):
        make_private(model, sgd, DataLoader([]), **asked)
    with pytest.raises(ParameterError, match="LBFGS"):
        make_private(model, torch.optim.LBFGS(model.parameters()), data, **asked)
    with pytest.raises(ParameterError, match="not the model's"):
        make_private(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), data, **asked)
    with pytest.raises(ParameterError, match=r"model\.module"):
        make_private(nn.DataParallel(model), sgd, data, **asked)
    with pytest.raises(InfeasibleError, match="No noise keeps"):
        make_private(model, sgd, data, delta=1e-30, epochs=1, epsilon=1e-7)


def test_steps_without_a_private_batch_are_refused() -> None:
    model, optimizer, _ = loop(small())
    functional.cross_entropy(model(torch.randn(2, 6)), torch.tensor([0, 1])).backward()
    with pytest.raises(ParameterError, match="not of the private loop"):
        optimizer.step()


def test_processes_that_join_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would draw from all examples, and the sum of their sums have one example as often as there are processes."""
    model, optimizer, private = loop(small())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ParameterError, match="init_process_group first"):
        epoch(model, optimizer, private)
    assert private.steps == 0


def test_processes_that_are_forked_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would count its own steps alone: of a model in shared memory, all of them together cost more than ε."""
    model, optimizer, private = loop(small())
    epoch(model, optimizer, private)
    steps, own = private.steps, os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    with pytest.raises(ParameterError, match="forked"):
        epoch(model, optimizer, private)
    assert private.steps == steps > 0


def test_a_batch_of_ones_own_in_the_loop_is_refused() -> None:
    model, optimizer, private = loop(small())
    for _ in private:
        functional.cross_entropy(model(torch.randn(150, 6)), torch.zeros(150, dtype=torch.int64)).backward()
        with pytest.raises(ParameterError, match="first dimension"):
            optimizer.step()
        break


def test_a_checkpoint_with_more_noise_does_not_make_steps_cheaper() -> None:
    model, optimizer, private = loop(small(), noise_multiplier=0.5)
    epoch(model, optimizer, private)
    _, _, other = loop(small(), noise_multiplier=5.0)
    with pytest.raises(ParameterError, match="other noise"):
        private.load_state_dict(other.state_dict() | {"steps": 10})
    assert private._multipliers[0] == 0.5


def test_a_batch_is_for_one_step() -> None:
    # Several steps with one draw of examples cost more than as many with draws of their own.
    model, optimizer, private = loop(small())
    features, labels = next(iter(private))
    functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
    before = model.weight.clone()
    functional.cross_entropy(model(features), labels).backward()
    with pytest.raises(ParameterError, match="one step per batch"):
        optimizer.step()
    assert torch.equal(before, model.weight)
    assert private.steps == 1


def test_no_step_has_examples_of_two_micro_batches_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # Gradients of two micro-batches, clipped together, would change by two clip norms with one example.
    silent(monkeypatch)
    model, _, private = loop(small(), batch=200, micro_batch=100)
    batches = iter(private)
    features, labels = next(batches)
    functional.cross_entropy(model(features), labels).backward()
    with pytest.raises(ParameterError, match="backward pass that no step took"):
        next(batches)


def test_a_batch_without_its_last_step_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    model, optimizer, private = loop(small(), batch=100, micro_batch=10, clip_norm=0.01)
    ended = False
    for features, labels in private:
        part = private._loader.current
        assert part is not None
        if part.last:
            ended = True
            continue
        functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        if ended:
            break
    # Ten examples of the second batch, and none of the first.
    assert float(private._sums.total.norm()) <= 10 * 0.01


def test_one_clip_norm_holds_for_all_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # A function that changes its mind between micro-batches must not clip at 10 and add the noise of 1.
    used: list[float] = []

    def added(self: SumNoise, sums: torch.Tensor, deviation: float, divisor: float) -> torch.Tensor:
        used.append(deviation)
        return (sums / divisor).float()

    monkeypatch.setattr(SumNoise, "added", added)
    norms = iter([10.0, 1.0])
    model, optimizer, private = loop(small(), batch=200, micro_batch=100, epochs=1, clip_norm=lambda step: next(norms))
    epoch(model, optimizer, private)
    assert used == [10.0]


def test_a_parameter_that_is_unfrozen_later_gets_no_raw_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(
        model, optimizer, DataLoader(small(), batch_size=20), delta=1e-5, epochs=1, noise_multiplier=1.0
    )
    model[0].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ParameterError, match="not private"):
        epoch(model, optimizer, private)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_model_is_given_back() -> None:
    model, optimizer, private = loop(small())
    epoch(model, optimizer, private)
    private.detach()
    optimizer.zero_grad()
    functional.cross_entropy(model(torch.randn(2, 6)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert model.weight.grad is not None
    assert "forward" not in vars(model)
    assert cpsgd.make_private is make_private


def _worker(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # other first weights, which are made equal
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(
        model, optimizer, DataLoader(small(), batch_size=200), delta=1e-5, epochs=2, noise_multiplier=1e-4
    )
    for _ in range(2):
        epoch(model, optimizer, private)
    torch.save((model.state_dict(), private.epsilon if rank < 0 else private.steps), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_train_one_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from torch.multiprocessing.spawn import start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked, so that nothing is imported again; threads do not survive that.
    torch.set_num_threads(1)
    start_processes(_worker, (port, str(tmp_path)), nprocs=2, start_method="fork")
    (first, steps), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert steps == others == 2
    assert torch.equal(first["weight"], second["weight"])
    # All examples are in every batch and there is hardly any noise: as one process without noise.
    silent(monkeypatch)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(
        model, optimizer, DataLoader(small(), batch_size=200), delta=1e-5, epochs=2, noise_multiplier=1e-4
    )
    for _ in range(2):
        epoch(model, optimizer, private)
    assert np.allclose(first["weight"], model.weight.detach(), atol=1e-5)


def test_a_rate_below_what_is_accounted_for_is_rounded_up() -> None:
    found = epsilon_of(Counter({1.0: 10}), 1e-6, 5e-8, 10)
    assert found == epsilon_of(Counter({1.0: 10}), 1e-6, 1e-7, 10) < 0.1
