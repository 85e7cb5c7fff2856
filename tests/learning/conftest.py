"""A population small enough for tests: points around the corners of a triangle."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd.learning.datasets import ArrayDataset, Partition, from_arrays, iid


def blobs(clients: int = 600, partition: Partition | None = None) -> ArrayDataset:
    rng = np.random.default_rng(7)
    corners = np.array([[2.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 2.0, 1.0]])

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 3, count)
        return corners[labels] + rng.normal(scale=0.5, size=(count, 4)), labels

    x, y = draw(clients)
    test_x, test_y = draw(200)
    return from_arrays(x, y, test_features=test_x, test_labels=test_y, partition=partition, name="blobs")


@pytest.fixture(scope="session")
def triangle() -> ArrayDataset:
    return blobs()


@pytest.fixture(scope="session")
def families() -> ArrayDataset:
    """Clients with five points each."""
    return blobs(3000, iid(3000, clients=600, seed=0))
