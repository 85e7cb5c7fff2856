"""Data sets from arrays of one's own, and partitions: every example belongs to exactly one client.

Partitions follow from a seed through NumPy's PCG64 generator: they shape a simulation and protect nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets.base import Batch, check_indices, fingerprint

# Numbers looked at in one go when they are checked.
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Partition:
    """Examples dealt out to clients.

    Attributes:
        order: The examples' numbers, client by client.
        starts: Where in `order` each client's examples begin, and the number of examples as a last entry.
    """

    order: NDArray[np.int64] = field(repr=False)
    starts: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        examples = len(self.order)
        if not np.array_equal(np.sort(self.order), np.arange(examples)):
            raise ParameterError("Expected order to hold every example's number exactly once.")
        starts = self.starts
        if len(starts) < 2 or starts[0] != 0 or starts[-1] != examples or (np.diff(starts) < 0).any():
            raise ParameterError(f"Expected starts to rise from 0 to {examples}, the number of examples.")

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.starts) - 1

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.order)

    def rows(self, clients: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of these clients' examples, client by client, and how many each has."""
        counts = self.starts[clients + 1] - self.starts[clients]
        # Row j of a client is j places behind its start: one count through all rows, restarted at each client.
        skipped = self.starts[clients] - (np.cumsum(counts) - counts)
        return self.order[np.arange(counts.sum()) + np.repeat(skipped, counts)], counts


def one_each(examples: int) -> Partition:
    """Example i belongs to client i."""
    _validate.integer("examples", examples, low=1)
    return Partition(np.arange(examples), np.arange(examples + 1))


def iid(examples: int, clients: int, seed: int) -> Partition:
    """Deals shuffled examples out evenly: clients' numbers of examples differ by one at most.

    >>> partition = iid(examples=10, clients=4, seed=0)
    >>> np.diff(partition.starts).tolist()
    [2, 3, 2, 3]
    """
    _validate.integer("examples", examples, low=1)
    _validate.integer("clients", clients, low=1, high=examples)
    return Partition(_generator(seed).permutation(examples), np.arange(clients + 1) * examples // clients)


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int) -> Partition:
    """Deals each class out unevenly: its examples are split in proportions drawn from Dirichlet(α, ..., α).

    Small α gives clients of few classes, large α approaches an even split of every class. Some clients may get no
    example at all. (Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", 2019, section 4.)

    >>> partition = dirichlet([0, 0, 0, 0, 1, 1, 1, 1], clients=2, alpha=0.1, seed=1)
    >>> partition.rows(np.array([0, 1]))[1].sum()
    np.int64(8)
    """
    classes = check_labels("labels", labels)
    _validate.integer("clients", clients, low=1)
    _validate.positive("alpha", alpha, high=1e12)
    generator = _generator(seed)
    owners = np.empty(len(classes), dtype=np.int64)
    for label in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == label))
        shares = np.cumsum(generator.dirichlet(np.full(clients, alpha)))
        # The last share ends at 1 but for rounding.
        ends = np.rint(shares / shares[-1] * len(members)).astype(np.int64)
        owners[members] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    starts = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))])
    return Partition(np.argsort(owners, kind="stable"), starts)


def check_labels(name: str, labels: ArrayLike) -> NDArray[np.int64]:
    """Returns classes 0, 1, ... as an array, or raises."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise DataError(f"Expected {name} to be a list of integers, got {array.dtype} of shape {array.shape}.")
    if array.min() < 0:
        raise DataError(f"Expected {name} 0, 1, ...: there is a negative one at position {int(array.argmin())}.")
    return array.astype(np.int64)


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_validate.integer("seed", seed, low=0)))


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Arrays of examples, dealt out to clients by a partition. Made by `from_arrays`, which explains the fields."""

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
        examples = self.features, self.labels, self.test_features, self.test_labels
        return fingerprint(*examples, self.partition.order, self.partition.starts, self.classes)

    def batch(self, clients: ArrayLike) -> Batch:
        """The examples of these clients. Clients without examples have a count of 0."""
        rows, counts = self.partition.rows(check_indices("clients", clients, self.size))
        return Batch(_flat(self.features[rows]), self.labels[rows], counts)

    def test_set(self) -> Batch:
        """The examples held back."""
        return Batch(_flat(self.test_features), self.test_labels, np.ones(len(self.test_labels), dtype=np.int64))


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

    >>> x, y = np.eye(6, 4), np.array([0, 1, 2, 0, 1, 2])
    >>> data = from_arrays(x, y, test_features=x[:1], test_labels=y[:1], partition=iid(6, clients=3, seed=0))
    >>> data.size, data.classes, data.feature_dim, data.batch([2, 0]).counts.tolist()
    (3, 3, 4, [2, 2])
    """
    train, test = np.asarray(features), np.asarray(test_features)
    train_classes, test_classes = check_labels("labels", labels), check_labels("test_labels", test_labels)
    for what, examples, their_classes in (("", train, train_classes), ("test_", test, test_classes)):
        if examples.ndim < 2 or examples.dtype.kind not in "biuf":
            raise DataError(
                f"Expected {what}features to be numbers with one row per example, "
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
    source = f"arrays of {len(train):,} examples"
    return ArrayDataset(name, source, train, train_classes, test, test_classes, partition, classes)


def _flat(examples: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(examples.reshape(len(examples), math.prod(examples.shape[1:])), dtype=np.float32)


def _check_finite(name: str, examples: NDArray[Any]) -> None:
    step = max(1, _BLOCK // max(1, examples[0].size))
    for start in range(0, len(examples), step):
        with np.errstate(over="ignore"):
            finite = np.isfinite(_flat(examples[start : start + step])).all(axis=1)
        if not finite.all():
            raise DataError(f"{name} holds NaN, infinity or more than float32 can in row {start + finite.argmin()}.")
