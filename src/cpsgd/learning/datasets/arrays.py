"""Data sets from arrays of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets.base import Batch, check_indices, fingerprint
from cpsgd.learning.datasets.partition import Partition, check_labels, one_each

# Numbers looked at in one go when they are checked.
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Arrays of examples, dealt out to clients by a partition. Made by `from_arrays`.

    Attributes:
        name: Short name.
        source: Where the examples come from.
        features: The clients' examples along the first axis.
        labels: Their classes.
        test_features: The examples held back.
        test_labels: Their classes.
        partition: Which client holds which examples.
        classes: Number of classes.
    """

    name: str
    source: str
    features: NDArray[Any] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)
    test_features: NDArray[Any] = field(repr=False)
    test_labels: NDArray[np.int64] = field(repr=False)
    partition: Partition
    classes: int

    @property
    def size(self) -> int:
        """Number of clients."""
        return self.partition.clients

    @property
    def feature_dim(self) -> int:
        """Length of a feature vector."""
        return math.prod(self.features.shape[1:])

    @property
    def fingerprint(self) -> str:
        """Tells these examples, and how they are dealt out, from others."""
        partition = self.partition
        return fingerprint(
            self.features,
            self.labels,
            self.test_features,
            self.test_labels,
            partition.order,
            partition.starts,
            self.classes,
        )

    def batch(self, clients: ArrayLike) -> Batch:
        """The examples of these clients. Clients without examples have a count of 0."""
        rows, counts = self.partition.rows(check_indices("clients", clients, self.size))
        return Batch(_flat(self.features[rows]), self.labels[rows], counts)

    def test_set(self) -> Batch:
        """The examples held back."""
        counts = np.ones(len(self.test_labels), dtype=np.int64)
        return Batch(_flat(self.test_features), self.test_labels, counts)


def from_arrays(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    partition: Partition | None = None,
    classes: int | None = None,
    name: str = "arrays",
) -> ArrayDataset:
    """A data set from arrays. They are not copied (and may be memory maps), so leave them as they are.

    Args:
        features: The clients' examples along the first axis; further axes are flattened. Taken as float32.
        labels: Their classes 0, 1, ...
        test_features: Examples for measuring accuracy, which no client may hold.
        test_labels: Their classes.
        partition: Which client holds which examples; one each by default.
        classes: Number of classes; by default one more than the largest label.
        name: Short name, for reports.

    Raises:
        DataError: The arrays do not fit together, or hold NaN or infinity.

    >>> from cpsgd.learning.datasets import partition
    >>> x, y = np.eye(6, 4), np.array([0, 1, 2, 0, 1, 2])
    >>> data = from_arrays(x, y, test_features=x[:1], test_labels=y[:1], partition=partition.iid(6, clients=3, seed=0))
    >>> data.size, data.classes, data.feature_dim, data.batch([2, 0]).counts.tolist()
    (3, 3, 4, [2, 2])
    """
    train, test = np.asarray(features), np.asarray(test_features)
    train_classes, test_classes = check_labels("labels", labels), check_labels("test_labels", test_labels)
    for what, examples, their_classes in (("", train, train_classes), ("test_", test, test_classes)):
        if examples.ndim < 2 or examples.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {what}features to be numbers with one row an example, "
                f"got {examples.dtype} of shape {examples.shape}."
            )
        if len(examples) != len(their_classes):
            raise DataError(f"There are {len(examples)} rows of {what}features, but {len(their_classes)} labels.")
        _check_finite(f"{what}features", examples)
    if train.shape[1:] != test.shape[1:] or train[0].size == 0:
        raise DataError(f"Expected examples of one shape, got {train.shape[1:]} and for testing {test.shape[1:]}.")

    largest = int(max(train_classes.max(), test_classes.max()))
    if classes is None:
        classes = largest + 1
    elif _validate.integer("classes", classes, low=1) <= largest:
        raise DataError(f"With {classes} classes labels are 0..{classes - 1}, but there is a label {largest}.")
    if partition is None:
        partition = one_each(len(train))
    elif partition.examples != len(train):
        raise ParameterError(f"The partition is of {partition.examples} examples, there are {len(train)}.")
    return ArrayDataset(
        name=name,
        source=f"arrays of {len(train):,} examples",
        features=train,
        labels=train_classes,
        test_features=test,
        test_labels=test_classes,
        partition=partition,
        classes=classes,
    )


def _flat(examples: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(examples.reshape(len(examples), math.prod(examples.shape[1:])), dtype=np.float32)


def _check_finite(name: str, examples: NDArray[Any]) -> None:
    step = max(1, _BLOCK // max(1, examples[0].size))
    for start in range(0, len(examples), step):
        with np.errstate(over="ignore"):
            finite = np.isfinite(_flat(examples[start : start + step])).all(axis=1)
        if not finite.all():
            raise DataError(f"{name} holds NaN, infinity or more than float32 can in row {start + finite.argmin()}.")
