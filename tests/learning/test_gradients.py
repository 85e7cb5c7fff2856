from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import check_model, mlp
from cpsgd.learning.option_groups import ClientOptions

LOSS = torch.nn.functional.cross_entropy


def make_batch(counts: list[int], features: int = 6, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    total = sum(counts)
    return Batch(
        rng.normal(size=(total, features)).astype(np.float32), rng.integers(0, 3, total), np.array(counts, np.int64)
    )


def flat(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().numpy().reshape(-1) for t in tensors])


def by_loop(model: torch.nn.Module, batch: Batch, steps: int = 1, rate: float | None = None) -> np.ndarray:
    """The updates by plain autograd, a client at a time."""
    rows, start = [], 0
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    before = flat(p for p in model.parameters() if p.requires_grad)
    for count in batch.counts:
        x = torch.from_numpy(batch.features[start : start + count])
        y = torch.from_numpy(batch.labels[start : start + count])
        start += count
        parameters = [p for p in model.parameters() if p.requires_grad]
        if count == 0:
            rows.append(np.zeros_like(before))
        elif steps == 1:
            rows.append(flat(torch.autograd.grad(LOSS(model(x), y), parameters)))
        else:
            for _ in range(steps):
                for p, slope in zip(parameters, torch.autograd.grad(LOSS(model(x), y), parameters), strict=True):
                    p.data -= (rate or 0.0) * slope
            rows.append(before - flat(parameters))
            model.load_state_dict(initial)
    return np.array(rows)


def by_chunks(model: torch.nn.Module, batch: Batch, **options: Any) -> np.ndarray:
    return np.concatenate(
        [chunk.copy() for chunk in ClientUpdates(model, LOSS, ClientOptions(**options)).chunks(batch)]
    )


def test_one_gradient_a_client_equals_autograd() -> None:
    model = mlp(6, 3, (5, 4), seed=1)
    batch = make_batch([1] * 40)
    np.testing.assert_allclose(by_chunks(model, batch), by_loop(model, batch), atol=1e-6)


def test_clients_with_different_numbers_of_examples() -> None:
    model = mlp(6, 3, (5,), seed=1)
    batch = make_batch([3, 1, 0, 3, 2, 1, 0, 5])
    expected = by_loop(model, batch)
    # Rows come grouped by the number of examples.
    order = np.argsort(batch.counts, kind="stable")
    np.testing.assert_allclose(by_chunks(model, batch), expected[order], atol=1e-6)


def test_local_steps_are_federated_averaging() -> None:
    model = mlp(6, 3, (5,), seed=1)
    batch = make_batch([2] * 9)
    updates = by_chunks(model, batch, local_steps=4, local_lr=0.3)
    np.testing.assert_allclose(updates, by_loop(model, batch, steps=4, rate=0.3), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("memory_limit", [1, 5_000, 1 << 30])
def test_the_memory_limit_changes_chunks_and_nothing_else(memory_limit: int) -> None:
    model = mlp(6, 3, (5,), seed=1)
    batch = make_batch([1] * 50)
    updates = ClientUpdates(model, LOSS, memory_limit=memory_limit)
    chunks = [chunk.copy() for chunk in updates.chunks(batch)]
    assert len(chunks) == {1: 50, 1 << 30: 1}.get(memory_limit, len(chunks))
    assert max(chunk.nbytes for chunk in chunks) <= max(memory_limit, 4 * updates.dim)
    np.testing.assert_allclose(np.concatenate(chunks), by_loop(model, batch), atol=1e-6)


def test_convolutions_buffers_and_frozen_layers() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Linear(6, 6)
            self.convolution = torch.nn.Conv1d(1, 2, 3)
            self.out = torch.nn.Linear(8, 3)
            self.register_buffer("scale", torch.full((1,), 0.5))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.frozen(x) * self.scale)
            return self.out(self.convolution(hidden.unsqueeze(1)).flatten(1))

    torch.manual_seed(0)
    model = Net()
    batch = make_batch([2] * 5)
    updates = by_chunks(model, batch)
    assert updates.shape == (5, 2 * 3 + 2 + 8 * 3 + 3)
    np.testing.assert_allclose(updates, by_loop(model, batch), atol=1e-6)


def test_later_changes_of_the_model_count() -> None:
    model = mlp(6, 3, (), seed=1)
    batch = make_batch([1] * 3)
    updates = ClientUpdates(model, LOSS)
    before = next(iter(updates.chunks(batch))).copy()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    after = next(iter(updates.chunks(batch)))
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, by_loop(model, batch), atol=1e-6)


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(ParameterError, match="no trainable parameters"):
        check_model(torch.nn.ReLU())
    broken = torch.nn.Linear(2, 2)
    broken.weight.data[0, 0] = float("nan")
    with pytest.raises(ParameterError, match="weight holds NaN"):
        check_model(broken)
    with pytest.raises(ParameterError, match="GroupNorm"):
        check_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    with pytest.raises(ParameterError, match="float32"):
        check_model(torch.nn.Linear(2, 2).double())
    with pytest.raises(ParameterError, match="local_lr, a learning rate"):
        ClientOptions(local_steps=2)
