"""Data sets from arrays: shapes are kept, floats become float32 and integers int64."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets.partitions import Partition, by_client, held_back, one_each
from cpsgd.learning.datasets.populations import Batch, check_indices, fingerprint

# Numbers checked at a time.
_BLOCK = 1 << 20


class Assigned(ABC):
    """Examples that a partition assigns to clients."""

    partition: Partition

    @property
    def size(self) -> int:
        """Number of clients."""
        return self.partition.clients

    def batch(self, clients: ArrayLike) -> Batch:
        """Returns the examples of these clients; one without examples has a count of 0."""
        rows, counts = self.partition.rows(check_indices("clients", clients, self.size))
        return Batch(*self.examples(rows), counts)

    def counts(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of examples of these clients."""
        return self.partition.counts(clients)

    def part(self, client: int, start: int, stop: int) -> Batch:
        """Returns examples `start` to `stop` of a client."""
        rows = self.partition.part(client, start, stop)
        return Batch(*self.examples(rows), np.array([len(rows)]))

    @abstractmethod
    def examples(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns features and labels of these examples."""


@dataclass(frozen=True, eq=False)
class ArrayDataset(Assigned):
    """Arrays of examples, assigned to clients by a partition. Made by `from_arrays`, which explains the fields."""

    name: str
    source: str
    features: NDArray[Any] = field(repr=False)
    labels: NDArray[Any] = field(repr=False)
    test_features: NDArray[Any] = field(repr=False)
    test_labels: NDArray[Any] = field(repr=False)
    partition: Partition
    classes: int | None

    @property
    def feature_dim(self) -> int:
        """Numbers in an example's features."""
        return math.prod(self.features.shape[1:])

    @property
    def fingerprint(self) -> str:
        """Hash of the examples and their partition."""
        examples = self.features, self.labels, self.test_features, self.test_labels
        return fingerprint(*examples, self.partition.order, self.partition.starts, self.classes)

    def examples(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns features and labels of these examples."""
        return as_features(self.features[rows]), self.labels[rows]

    def test_set(self) -> Batch:
        """Returns the test examples."""
        counts = np.ones(len(self.test_labels), dtype=np.int64)
        return Batch(as_features(self.test_features), self.test_labels, counts)


def from_arrays(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    clients: ArrayLike | None = None,
    partition: Partition | None = None,
    test_features: ArrayLike | None = None,
    test_labels: ArrayLike | None = None,
    test_share: float = 0.2,
    classes: int | None = None,
    name: str = "arrays",
) -> ArrayDataset:
    """Returns a data set of arrays. If test arrays are given, nothing is copied; arrays may be memory maps.

    Shapes are kept: images go to the model as [examples, channels, height, width]. Floats become float32, and integers
    int64, which embedding layers need; give pixels as floats.

    Args:
        features: The examples along the first axis.
        labels: Their classes 0, 1, ..., or floats for regression.
        clients: The client id of each example, of any type; every example is a client by default.
        partition: The clients' examples, instead of `clients`: `iid` or `dirichlet`.
        test_features: Test examples, which no client may have.
        test_labels: Their labels.
        test_share: Without test examples: this share of the clients is used for testing and takes no part. Loss and
            accuracy are shown without noise, so no guarantee covers these clients.
        classes: Number of classes; by default one more than the largest label.
        name: Short name, for reports.

    Raises:
        DataError: The arrays do not fit together, or hold NaN or infinity.
        ParameterError: The partition is not one, or is of other examples.

    >>> x, y = np.eye(6, 4), np.array([0, 1, 2, 0, 1, 2])
    >>> data = from_arrays(x, y, clients=["ann", "bob", "ann", "cem", "bob", "dan"])
    >>> data.size, data.classes, data.feature_dim, len(data.test_set().labels)
    (3, 3, 4, 1)
    """
    train, train_labels = np.asarray(features), check_targets("labels", labels)
    check_examples("features", train, train_labels)
    if clients is not None:
        if partition is not None:
            raise ParameterError("Give clients or a partition, not both.")
        partition = by_client(clients)
    if partition is None:
        partition = one_each(len(train))
    elif not isinstance(partition, Partition):
        raise ParameterError(
            f"Expected partition to be a Partition, got {type(partition).__name__}: make one with iid, dirichlet or "
            "by_client, or give the examples' client ids as clients."
        )
    elif partition.examples != len(train):
        raise ParameterError(f"The partition is of {partition.examples} examples, there are {len(train)}.")
    if (test_features is None) != (test_labels is None):
        raise ParameterError("Give both test_features and test_labels, or neither.")
    if test_features is None or test_labels is None:
        classes = check_classes(classes, train_labels)
        partition, kept, aside = held_back(partition, test_share)
        test, test_targets = train[aside], train_labels[aside]
        train, train_labels = train[kept], train_labels[kept]
    else:
        test, test_targets = np.asarray(test_features), check_targets("test_labels", test_labels)
        check_examples("test_features", test, test_targets)
        for what, ours, theirs in (("examples", train, test), ("labels", train_labels, test_targets)):
            if ours.shape[1:] != theirs.shape[1:]:
                raise DataError(
                    f"Expected {what} of one shape, got {ours.shape[1:]} and for testing {theirs.shape[1:]}."
                )
        classes = check_classes(classes, train_labels, test_targets)
    source = f"arrays of {len(train):,} examples"
    return ArrayDataset(name, source, train, train_labels, test, test_targets, partition, classes)


def as_features(examples: NDArray[Any]) -> NDArray[Any]:
    """Converts features for models: integers to int64, other numbers to float32."""
    return np.ascontiguousarray(examples, dtype=np.int64 if examples.dtype.kind in "iu" else np.float32)


def check_targets(name: str, labels: ArrayLike) -> NDArray[Any]:
    """Converts labels for losses: classes to int64, floats to float32; raises `DataError` for anything else."""
    array = np.asarray(labels)
    if array.ndim == 0 or array.size == 0 or array.dtype.kind not in "biuf":
        raise DataError(
            f"Expected {name} to be integers (classes) or floats (regression), got {array.dtype} of shape "
            f"{array.shape}."
        )
    if array.dtype.kind == "f":
        _check_finite(name, array)
        return array.astype(np.float32)
    if array.min() < 0:
        raise DataError(f"Expected {name} 0, 1, ...: there is a negative one at position {int(array.argmin())}.")
    return array.astype(np.int64)


def check_examples(name: str, examples: NDArray[Any], labels: NDArray[Any]) -> None:
    """Raises `DataError` if features are not finite numbers, or not as many as labels."""
    if examples.ndim < 2 or examples.dtype.kind not in "biuf":
        raise DataError(
            f"Expected {name} to be numbers with one row per example, got {examples.dtype} of shape {examples.shape}."
        )
    if len(examples) != len(labels):
        raise DataError(f"There are {len(examples)} rows of {name}, but {len(labels)} labels.")
    if examples[0].size == 0:
        raise DataError(f"Expected {name} of one shape with a number in it, got {examples.shape[1:]}.")
    _check_finite(name, examples)


def check_classes(classes: int | None, *labels: NDArray[Any]) -> int | None:
    """Returns the number of classes, None for regression; raises an error if the labels contradict it."""
    kinds = {array.dtype.kind for array in labels}
    if len(kinds) > 1:
        raise DataError("Expected labels of one kind: integers are classes, floats are for regression.")
    if kinds == {"f"}:
        if classes is not None:
            raise ParameterError(f"Labels that are floats have no classes, got classes={classes}: leave that out.")
        return None
    largest = max(int(array.max()) for array in labels)
    if classes is None:
        return largest + 1
    if _validate.integer("classes", classes, low=1) <= largest:
        raise DataError(f"With {classes} classes labels are 0..{classes - 1}, but there is a label {largest}.")
    return classes


def _check_finite(name: str, examples: NDArray[Any]) -> None:
    step = max(1, _BLOCK // max(1, examples[0].size))
    for start in range(0, len(examples), step):
        part = examples[start : start + step]
        with np.errstate(over="ignore"):
            finite = np.isfinite(part.reshape(len(part), -1).astype(np.float32)).all(axis=1)
        if not finite.all():
            raise DataError(f"{name} holds NaN, infinity or more than float32 can in row {start + finite.argmin()}.")
