"""Data sets of PyTorch, whose examples are asked for one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import IterableDataset, TensorDataset

from cpsgd.errors import DataError, ParameterError, UserFunctionError
from cpsgd.learning.datasets import from_arrays, from_torch

IMAGES = torch.tensor(load_digits().images[:60, None] / 16.0)
CLASSES = torch.tensor(load_digits().target[:60])
WRITERS = np.arange(60) % 10


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


class Own:
    """Examples by a function."""

    def __init__(self, function: Any, length: int = 20) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return self.function(number)


def test_it_holds_what_arrays_do() -> None:
    data = from_torch(TensorDataset(IMAGES, CLASSES), WRITERS)
    same = from_arrays(IMAGES.numpy(), CLASSES.numpy(), clients=WRITERS)
    assert (data.size, data.feature_dim, data.classes) == (same.size, same.feature_dim, same.classes) == (8, 64, 10)
    for ours, theirs in ((data.batch([5, 1]), same.batch([5, 1])), (data.test_set(), same.test_set())):
        np.testing.assert_array_equal(ours.features, theirs.features)
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        np.testing.assert_array_equal(ours.counts, theirs.counts)
        assert ours.features.dtype == np.float32
    assert data.batch([]).features.shape == (0, 1, 8, 8)


def test_a_test_set_of_its_own_and_fingerprints() -> None:
    train, test = TensorDataset(IMAGES[:50], CLASSES[:50]), TensorDataset(IMAGES[50:], CLASSES[50:])
    data = from_torch(train, test=test)
    assert (data.size, len(data.test_set().labels)) == (50, 10)
    assert from_torch(train, test=test).fingerprint == data.fingerprint
    assert from_torch(TensorDataset(IMAGES[:50] + 1, CLASSES[:50]), test=test).fingerprint != data.fingerprint


def fails(number: int) -> Any:
    raise KeyError("a secret")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fails, UserFunctionError, "Example 0 of the data set failed with KeyError"),
        (lambda i: np.ones(3), DataError, "a pair of features and label"),
        (lambda i: (np.ones(3 + i // 9), 0), DataError, r"\(4,\) from number 9"),
        (lambda i: (np.ones(3), np.ones(1 + i // 9)), DataError, "labels of one shape"),
        (lambda i: (np.full(3, np.nan if i == 7 else 1.0), 0), DataError, "example 7 hold NaN"),
        (lambda i: (np.ones(3), -1), DataError, "negative"),
        (lambda i: ("text", 0), DataError, "to be numbers"),
        (lambda i: (np.ones(0), 0), DataError, "no numbers"),
    ],
)
def test_examples_that_cannot_be_used_are_refused(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as refused:
        from_torch(Own(function))
    assert "secret" not in str(refused.value)


def test_data_sets_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ParameterError, match="not an iterable one"):
        from_torch(Endless())
    with pytest.raises(DataError, match="no examples"):
        from_torch(Own(fails, 0))
    with pytest.raises(ParameterError, match="3 client ids for 60"):
        from_torch(TensorDataset(IMAGES, CLASSES), [1, 2, 3])
    with pytest.raises(DataError, match="one shape"):
        from_torch(TensorDataset(IMAGES, CLASSES), test=TensorDataset(IMAGES[:, 0], CLASSES))


def test_an_example_that_changes_its_shape_later_is_refused() -> None:
    size = [3]
    data = from_torch(Own(lambda i: (np.ones(size[0]), 0)))
    size[0] = 4
    with pytest.raises(DataError, match="no longer has the shape"):
        data.batch([0])
