"""A client with more examples than the memory limit has room for."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from cpsgd.learning import NoPrivacy, mlp
from cpsgd.learning.datasets import ArrayDataset, from_arrays
from cpsgd.learning.datasets.populations import Batch, PartedDataset
from cpsgd.learning.datasets.torch_datasets import from_torch
from tests.learning.training import finish, make_trainer, weights

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
