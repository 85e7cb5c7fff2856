from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import Dataset, from_arrays, iid

X = np.random.default_rng(0).standard_normal((12, 2, 3))
Y = np.arange(12) % 4
DEFAULTS: dict[str, Any] = {"features": X, "labels": Y, "test_features": X[:5] + 1, "test_labels": Y[:5]}


def test_each_example_is_a_client_by_default() -> None:
    data: Dataset = from_arrays(**DEFAULTS)
    assert (data.name, data.size, data.classes, data.feature_dim) == ("arrays", 12, 4, 6)
    batch = data.batch([7, 0])
    np.testing.assert_array_equal(batch.features, X[[7, 0]].reshape(2, 6).astype(np.float32))
    assert batch.features.dtype == np.float32
    assert batch.labels.tolist() == [3, 0]
    assert batch.counts.tolist() == [1, 1]
    test = data.test_set()
    np.testing.assert_array_equal(test.features, (X[:5] + 1).reshape(5, 6).astype(np.float32))
    assert (test.labels.tolist(), test.counts.tolist()) == ([0, 1, 2, 3, 0], [1] * 5)


def test_clients_with_several_examples() -> None:
    partition = iid(12, clients=5, seed=0)
    data = from_arrays(**DEFAULTS, partition=partition, classes=9, name="mine")
    assert (data.name, data.size, data.classes) == ("mine", 5, 9)
    batch = data.batch([4, 1])
    rows = [*partition.rows(np.array([4]))[0], *partition.rows(np.array([1]))[0]]
    np.testing.assert_array_equal(batch.features, X[rows].reshape(-1, 6).astype(np.float32))
    np.testing.assert_array_equal(batch.labels, Y[rows])
    assert batch.counts.sum() == len(rows)
    assert data.batch([]).features.shape == (0, 6)
    with pytest.raises(ParameterError, match=r"clients in \[0, 4\]"):
        data.batch([5])


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = from_arrays(**{**DEFAULTS, "features": mapped})
    assert np.shares_memory(data.features, mapped)
    np.testing.assert_array_equal(data.batch([3]).features[0], X[3].ravel().astype(np.float32))


def test_whole_numbers_and_lists_will_do() -> None:
    data = from_arrays([[1, 2], [3, 4]], [0, 1], test_features=[[5, 6]], test_labels=[1])
    assert data.batch([1]).features.tolist() == [[3.0, 4.0]]


def changed(value: float, row: int) -> np.ndarray:
    x = np.tile(X, (100_000, 1, 1))[: row + 2]
    x[row, 1, 2] = value
    return x


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"features": X[:11]}, "11 rows of features, but 12 labels"),
        ({"test_labels": Y[:4]}, "5 rows of test_features, but 4 labels"),
        ({"features": X[:, 0, 0]}, "one row per example"),
        ({"features": X.astype(complex)}, "complex128"),
        ({"features": X.astype(str)}, "to be numbers"),
        ({"test_features": X[:5, :1]}, "one shape"),
        ({"features": X[:, :0], "test_features": X[:5, :0]}, "one shape"),
        ({"features": changed(np.nan, 7)[:12], "labels": Y[:9]}, "features holds .* in row 7"),
        ({"features": changed(1e39, 500_003), "labels": np.zeros(500_005, int)}, "features holds .* in row 500003"),
        ({"test_features": -X[:5] * np.inf}, "test_features holds .* in row 0"),
        ({"labels": Y - 1}, "negative"),
        ({"labels": Y.astype(float)}, "list of integers"),
        ({"classes": 3}, "there is a label 3"),
        ({"features": X[:0], "labels": Y[:0]}, "labels"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(**{**DEFAULTS, **wrong})


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ParameterError, match="partition is of 11 examples"):
        from_arrays(**DEFAULTS, partition=iid(11, 3, 0))
    with pytest.raises(ParameterError, match="classes"):
        from_arrays(**DEFAULTS, classes=0)
