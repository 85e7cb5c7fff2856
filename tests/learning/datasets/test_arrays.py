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
    np.testing.assert_array_equal(batch.features, X[[7, 0]].astype(np.float32))
    assert batch.features.dtype == np.float32
    assert batch.labels.tolist() == [3, 0]
    assert batch.counts.tolist() == [1, 1]
    test = data.test_set()
    np.testing.assert_array_equal(test.features, (X[:5] + 1).astype(np.float32))
    assert (test.labels.tolist(), test.counts.tolist()) == ([0, 1, 2, 3, 0], [1] * 5)


def test_clients_with_several_examples() -> None:
    partition = iid(12, clients=5, seed=0)
    data = from_arrays(**DEFAULTS, partition=partition, classes=9, name="mine")
    assert (data.name, data.size, data.classes) == ("mine", 5, 9)
    batch = data.batch([4, 1])
    rows = [*partition.rows(np.array([4]))[0], *partition.rows(np.array([1]))[0]]
    np.testing.assert_array_equal(batch.features, X[rows].astype(np.float32))
    np.testing.assert_array_equal(batch.labels, Y[rows])
    assert batch.counts.sum() == len(rows)
    assert data.batch([]).features.shape == (0, 2, 3)
    with pytest.raises(ParameterError, match=r"clients in \[0, 4\]"):
        data.batch([5])


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = from_arrays(**{**DEFAULTS, "features": mapped})
    assert np.shares_memory(data.features, mapped)
    np.testing.assert_array_equal(data.batch([3]).features[0], X[3].astype(np.float32))


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
        ({"labels": Y.astype(float)}, "labels of one kind: integers are classes"),
        ({"labels": Y.astype(str)}, "integers .classes. or floats"),
        ({"labels": Y + np.nan, "test_labels": Y[:5] + 0.5}, "labels holds .* in row 0"),
        ({"labels": Y[:, None]}, "labels of one shape"),
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
    with pytest.raises(ParameterError, match="have no classes"):
        from_arrays(X, Y + 0.5, classes=4)
    with pytest.raises(ParameterError, match="both test_features and test_labels"):
        from_arrays(X, Y, test_features=X)
    with pytest.raises(ParameterError, match="Expected partition to be a Partition, got list: make one with iid"):
        from_arrays(**DEFAULTS, partition=[0] * 12)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="lists of several lengths"):
        from_arrays(**DEFAULTS, clients=[[0, 1], [2]])  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="clients or a partition"):
        from_arrays(**DEFAULTS, clients=Y, partition=iid(12, 3, 0))
    with pytest.raises(ParameterError, match="test_share"):
        from_arrays(X, Y, test_share=0.0)


def test_ids_of_any_kind_make_clients() -> None:
    for ids in (Y, [f"user {y}" for y in Y], Y.astype("S2")):
        data = from_arrays(**DEFAULTS, clients=ids)
        assert data.size == 4
        assert data.batch([2]).labels.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*range(11), None], "several types, or some are missing"),
        ([*map(float, range(11)), np.nan], "missing"),
        (np.zeros((12, 2)), "one client id per example"),
    ],
)
def test_ids_that_name_nobody_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(**DEFAULTS, clients=ids)


def test_without_a_test_set_whole_clients_are_set_aside() -> None:
    ids = np.arange(12) % 6
    data = from_arrays(X, Y, clients=ids, test_share=0.3)
    train, test = data.batch(range(data.size)), data.test_set()
    assert (data.size, len(train.labels), len(test.labels)) == (4, 8, 4)
    whose = {X[row].tobytes(): ids[row] for row in range(12)}

    def owners(features: np.ndarray) -> set[int]:
        return {whose[row.tobytes()] for row in features}

    assert owners(data.features) | owners(data.test_features) == set(range(6))
    assert not owners(data.features) & owners(data.test_features)
    assert from_arrays(X, Y, clients=ids, test_share=0.3).fingerprint == data.fingerprint
    with pytest.raises(DataError, match="give a test set"):
        from_arrays(X, Y, clients=np.zeros(12, int))


def test_token_ids_stay_whole_numbers_and_regression_has_floats() -> None:
    tokens = np.arange(24).reshape(12, 2).astype(np.uint16)
    data = from_arrays(tokens, Y / 3)
    batch = data.batch([0])
    assert (batch.features.dtype, batch.labels.dtype, data.classes) == (np.int64, np.float32, None)
    assert from_arrays(tokens.astype(bool), Y).batch([0]).features.dtype == np.float32
