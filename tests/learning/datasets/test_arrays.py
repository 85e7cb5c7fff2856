"""Data sets from arrays, and their partitions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import Dataset, Partition, dirichlet, from_arrays, iid
from cpsgd.learning.datasets.partitions import one_each

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


def held(partition: Partition) -> list[list[int]]:
    """Each client's examples, asked for one by one."""
    return [partition.rows(np.array([client]))[0].tolist() for client in range(partition.clients)]


def assert_each_example_once(partition: Partition, examples: int) -> None:
    assert sorted(itertools.chain.from_iterable(held(partition))) == list(range(examples))


@given(st.integers(1, 300), st.data(), st.integers(0, 2**70))
def test_iid_is_even_and_complete(examples: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, examples))
    partition = iid(examples, clients, seed)
    assert partition.clients == clients
    assert_each_example_once(partition, examples)
    sizes = {len(rows) for rows in held(partition)}
    assert max(sizes) - min(sizes) <= 1


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.integers(1, 40),
    st.floats(1e-300, 1e11),
    st.integers(0, 2**70),
)
@settings(deadline=None)
def test_dirichlet_is_complete_whatever_alpha(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    partition = dirichlet(labels, clients, alpha, seed)
    assert partition.clients == clients
    assert_each_example_once(partition, len(labels))


def test_the_seed_decides() -> None:
    labels = np.arange(500) % 7
    first, again, other = ([held(iid(500, 20, seed)), held(dirichlet(labels, 20, 0.5, seed))] for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_order_of_examples_is_shuffled() -> None:
    assert held(iid(1_000, 1, 0))[0] != list(range(1_000))


def shares(alpha: float, clients: int) -> np.ndarray:
    """[class, client]: which share of the class the client has, for 500 classes of 1,000 examples."""
    labels = np.arange(500_000) % 500
    partition = dirichlet(labels, clients, alpha, seed=1)
    counts = np.array([np.bincount(labels[rows], minlength=500) for rows in held(partition)])
    return counts.T / 1_000


def test_alpha_rules_how_uneven_classes_are() -> None:
    """A share of Dirichlet(α, ..., α) over n clients has variance (1/n)(1 − 1/n)/(nα + 1).

    Shares are nearly Gamma(α) variables, whose excess kurtosis is 6/α: at α = 0.1 the variance of 25,000 of them has a
    relative standard error of 5 %. The draws are fixed; with fresh ones 30 % would be exceeded once in 10^8.
    """
    clients = 50
    for alpha in (0.1, 1.0, 10.0):
        expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        assert shares(alpha, clients).var() == pytest.approx(expected, rel=0.3)
    np.testing.assert_allclose(shares(1e9, clients), 1 / clients, atol=1e-3)
    # Nothing but whole classes.
    assert (shares(1e-9, clients).max(axis=1) == 1).all()


def test_rows_of_several_clients() -> None:
    partition = Partition(np.array([4, 1, 0, 3, 2]), np.array([0, 2, 2, 5]))
    rows, counts = partition.rows(np.array([2, 1, 0, 2]))
    assert rows.tolist() == [0, 3, 2, 4, 1, 0, 3, 2]
    assert counts.tolist() == [3, 0, 2, 3]
    rows, counts = partition.rows(np.array([], dtype=np.int64))
    assert (rows.size, counts.size) == (0, 0)


def test_one_each() -> None:
    assert held(one_each(3)) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("order", "starts"),
    [
        ([0, 0], [0, 2]),
        ([0, 2], [0, 2]),
        ([-1, 0], [0, 2]),
        ([0, 1], [0, 1]),
        ([0, 1], [1, 2]),
        ([0, 1], [0, 2, 1, 2]),
        ([0, 1], [2]),
    ],
)
def test_what_is_no_partition_is_refused(order: list[int], starts: list[int]) -> None:
    with pytest.raises(ParameterError):
        Partition(np.array(order), np.array(starts))


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(ParameterError, match="clients in"):
        iid(10, 11, 0)
    for clients, alpha, seed in ((0, 1.0, 0), (3, 0.0, 0), (3, float("nan"), 0), (3, 1e12, 0), (3, 1.0, -1)):
        with pytest.raises(ParameterError):
            dirichlet([0, 1, 2, 3], clients, alpha, seed)
    for labels in ([], [0.5], [[1]], ["a"]):
        with pytest.raises(DataError, match="list of integers"):
            dirichlet(labels, 2, 1.0, 0)
    with pytest.raises(DataError, match="negative one at position 2"):
        dirichlet([0, 1, -1], 2, 1.0, 0)


def test_lists_make_a_partition() -> None:
    partition = Partition([4, 1, 0, 3, 2], [0, 2, 2, 5])  # type: ignore[arg-type]
    assert partition.rows(np.array([2]))[0].tolist() == [0, 3, 2]
    for order, starts in (([0.5], [0, 1]), ([0], "ab"), ([[0], [1, 2]], [0, 1])):
        with pytest.raises(ParameterError, match="list of integers"):
            Partition(order, starts)  # type: ignore[arg-type]
