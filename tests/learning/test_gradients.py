"""Gradients of clients: by torch.func, of dense layers in one pass, and of a client with very many examples."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import NoPrivacy, dense
from cpsgd.learning.datasets import ArrayDataset, from_arrays
from cpsgd.learning.datasets.populations import Batch, PartedDataset
from cpsgd.learning.datasets.torch_datasets import from_torch
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import Scaled, check_model, mlp
from cpsgd.learning.option_groups import ClientOptions
from tests.learning.training import LOSS, finish, make_trainer, weights


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


@pytest.mark.parametrize("hidden", [(), (7,), (9, 6), (5, 4, 3)])
def test_gradients_equal_those_of_torch_func(hidden: tuple[int, ...]) -> None:
    model = mlp(12, 5, hidden, seed=1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 12, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    updates = ClientUpdates(model, LOSS)
    general = torch.cat([rows.clone() for rows in updates.tensors(x, y, np.ones(40, dtype=np.int64))])
    layers = dense.dense_layers(model, LOSS)
    assert layers is not None
    rows = torch.full((40, updates.dim + 3), float("nan"))[:, : updates.dim]  # every coordinate must be written
    dense.write_dense_gradients(layers, x, y, rows)
    torch.testing.assert_close(rows, general, rtol=1e-5, atol=1e-6)


def test_scaled_features_come_before_the_layers() -> None:
    model, plain = mlp(12, 5, (7,), scaled=True, seed=1), mlp(12, 5, (7,), seed=1)
    layers, first = dense.dense_layers(model, LOSS), dense.scaling(model)
    assert layers is not None
    assert first is not None
    assert dense.scaling(plain) is None
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 12, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    updates = ClientUpdates(model, LOSS)
    general = torch.cat([rows.clone() for rows in updates.tensors(x, y, np.ones(40, dtype=np.int64))])
    rows = torch.empty(40, updates.dim)
    dense.write_dense_gradients(layers, (x - 0.1307) / 0.3081, y, rows)
    torch.testing.assert_close(rows, general, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), plain((x - 0.1307) / 0.3081))


def frozen() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    next(model.parameters()).requires_grad_(False)
    return model


def shared() -> torch.nn.Module:
    layer = torch.nn.Linear(4, 4)
    return torch.nn.Sequential(layer, torch.nn.ReLU(), layer)


def hooked() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    next(model.children()).register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def hooked_as_a_whole() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(4, 2),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), Scaled(), torch.nn.Linear(3, 2)),
        frozen(),
        shared(),
        hooked(),
        hooked_as_a_whole(),
    ],
)
def test_other_models_take_the_general_way(model: torch.nn.Module) -> None:
    assert dense.dense_layers(model, LOSS) is None


def test_other_losses_take_the_general_way() -> None:
    assert dense.dense_layers(mlp(4, 2), torch.nn.functional.mse_loss) is None
    assert dense.dense_layers(mlp(4, 2), LOSS) is not None


LARGE, FEATURES = 30_000, 100


@pytest.fixture(scope="module")
def data() -> ArrayDataset:
    """One client with 12 MB of examples among small ones, one of them without any in the first rows."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(LARGE + 9, FEATURES)).astype(np.float32)
    labels = generator.integers(0, 3, LARGE + 9)
    owners = np.r_[np.full(LARGE, 2), [0, 0, 1, 3, 3, 3, 4, 5, 6]]
    order = generator.permutation(LARGE + 9)
    return from_arrays(
        features[order], labels[order], clients=owners[order], test_features=features[:9], test_labels=labels[:9]
    )


def mean(data: Any, memory_limit: int, **options: Any) -> np.ndarray:
    """A step without noise, by which the model's parameters tell what the clients' mean was."""
    settings = {"cohort": 7, "rounds": 1, "participation": "every", "lr": 1.0, "memory_limit": memory_limit, **options}
    return weights(finish(make_trainer(data, NoPrivacy(100.0), mlp(FEATURES, 3, (4,), seed=0), **settings)))


@pytest.mark.parametrize("options", [{}, {"local_steps": 3, "local_lr": 0.1}, {"examples": 20_000}])
def test_a_large_client_is_computed_in_parts(
    data: ArrayDataset, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = mean(data, 1024, **options)
    largest = {"batch": 0, "part": 0}
    for name, real in (("batch", ArrayDataset.batch), ("part", ArrayDataset.part)):

        def asked(self: ArrayDataset, *arguments: Any, name: str = name, real: Any = real) -> Batch:
            found: Batch = real(self, *arguments)
            largest[name] = max(largest[name], found.features.nbytes)
            return found

        monkeypatch.setattr(ArrayDataset, name, asked)
    tracemalloc.start()
    found = mean(data, 1, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert max(largest.values()) <= (1 << 20) / 8
    assert largest["part"] > 0
    assert peak < 3 << 20  # of NumPy and Python; the examples alone are 12 MB


def test_parts_are_what_a_batch_has(data: ArrayDataset) -> None:
    rows = [(data.features[i], data.labels[i]) for i in range(len(data.labels))]
    owners = np.empty(len(rows), dtype=np.int64)
    owners[data.partition.order] = np.repeat(np.arange(7), np.diff(data.partition.starts))
    for dataset in (data, from_torch(rows, clients=owners, test=rows[:9])):
        assert isinstance(dataset, PartedDataset)
        clients = np.array([3, 2, 0])
        assert dataset.counts(clients).tolist() == dataset.batch(clients).counts.tolist() == [3, LARGE, 2]
        whole, parts = dataset.batch([3]), [dataset.part(3, start, start + 2) for start in (0, 2)]
        assert [part.counts.tolist() for part in parts] == [[2], [1]]
        np.testing.assert_array_equal(np.concatenate([part.features for part in parts]), whole.features)
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
