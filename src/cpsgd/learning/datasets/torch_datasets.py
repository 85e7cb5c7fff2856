"""Data sets from a `torch.utils.data.Dataset`, or anything else with a length and examples by number."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd.errors import DataError, ParameterError, UserFunctionError
from cpsgd.learning.datasets.arrays import Assigned, as_features, check_classes, check_targets
from cpsgd.learning.datasets.partitions import Partition, by_client, held_back, one_each
from cpsgd.learning.datasets.populations import Batch, fingerprint


@dataclass(frozen=True, eq=False)
class ExampleDataset(Assigned):
    """Examples that are loaded when they are needed. Made by `from_torch`."""

    name: str
    source: str
    classes: int | None
    partition: Partition
    shape: tuple[int, ...]
    fingerprint: str
    train: Examples = field(repr=False)
    test: Examples = field(repr=False)

    @property
    def feature_dim(self) -> int:
        """Numbers in an example's features."""
        return math.prod(self.shape)

    def examples(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Loads features and labels of these examples."""
        return self.train.features(rows, self.shape), self.train.labels[rows]

    def test_set(self) -> Batch:
        """Returns the test examples, which stay in memory."""
        return self._test_set

    @cached_property
    def _test_set(self) -> Batch:
        rows = np.arange(len(self.test.labels))
        return Batch(self.test.features(rows, self.shape), self.test.labels, np.ones(len(rows), dtype=np.int64))


class Examples:
    """A subset of a data set's examples, with their labels."""

    def __init__(self, dataset: Any, rows: NDArray[np.int64], labels: NDArray[Any]) -> None:
        """Takes examples `rows` of `dataset`, with their labels."""
        self._dataset = dataset
        self._rows = rows
        self.labels = labels

    def features(self, chosen: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[Any]:
        """Returns the features of the `chosen` ones, by position."""
        found = [_example(self._dataset, int(row))[0] for row in self._rows[chosen]]
        if any(features.shape != shape for features in found):
            raise DataError(f"An example no longer has the shape {shape} that it had at first.")
        return np.stack(found) if found else np.empty((0, *shape), dtype=np.float32)


def from_torch(
    dataset: Any,
    clients: ArrayLike | None = None,
    *,
    test: Any = None,
    test_share: float = 0.2,
    classes: int | None = None,
    name: str = "examples",
) -> ExampleDataset:
    """Returns a data set of a `torch.utils.data.Dataset` of pairs (features, label).

    Every example is loaded once, to check it and to read its label, and later when it is needed. An example must be the
    same every time: with random augmentation runs cannot be repeated.

    Args:
        dataset: Anything with `len(dataset)` and `dataset[i]`.
        clients: The client id of each example, of any type; every example is a client by default.
        test: Another one for testing; no client may have its examples.
        test_share: Without `test`: the share of the clients that is used for testing, see `from_arrays`.
        classes: Number of classes; by default one more than the largest label.
        name: Short name, for reports.

    Raises:
        DataError: Examples are not alike, or hold NaN or infinity.
        UserFunctionError: The data set itself failed.

    Example:
        >>> import torch
        >>> pairs = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
        >>> data = from_torch(pairs, clients=[i // 6 for i in range(60)])
        >>> data.size, data.classes, data.feature_dim
        (8, 3, 4)
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ParameterError("Expected a data set with a length and examples by number, not an iterable one.")
    shape, labels, digest = _inspected(dataset, "labels")
    partition = one_each(len(labels)) if clients is None else by_client(clients)
    if partition.examples != len(labels):
        raise ParameterError(f"There are {partition.examples} client ids for {len(labels)} examples.")
    if test is None:
        classes = check_classes(classes, labels)
        partition, kept, aside = held_back(partition, test_share)
        train, held = Examples(dataset, kept, labels[kept]), Examples(dataset, aside, labels[aside])
        test_digest = ""
    else:
        test_shape, test_labels, test_digest = _inspected(test, "test labels")
        if (test_shape, test_labels.shape[1:]) != (shape, labels.shape[1:]):
            raise DataError(f"Expected examples of one shape, got {shape} and for testing {test_shape}.")
        classes = check_classes(classes, labels, test_labels)
        train = Examples(dataset, np.arange(len(labels)), labels)
        held = Examples(test, np.arange(len(test_labels)), test_labels)
    found = fingerprint(digest, test_digest, partition.order, partition.starts, classes)
    return ExampleDataset(
        name, f"{len(train.labels):,} examples", classes, partition, shape, found, train=train, test=held
    )


def _inspected(dataset: Any, name: str) -> tuple[tuple[int, ...], NDArray[Any], str]:
    """Returns the examples' shape, their labels, and a digest of all."""
    digest, labels = hashlib.sha256(), []
    shape: tuple[int, ...] | None = None
    for number in range(len(dataset)):
        features, label = _example(dataset, number)
        if shape is not None and features.shape != shape:
            raise DataError(f"Expected examples of one shape, got {shape}, and {features.shape} from number {number}.")
        shape = features.shape
        if features.dtype.kind == "f" and not np.isfinite(features).all():
            raise DataError(f"The features of example {number} hold NaN, infinity or more than float32 can.")
        digest.update(features.tobytes())
        labels.append(label)
    if shape is None or 0 in shape:
        raise DataError("The data set has no examples, or no numbers in them.")
    try:
        targets = check_targets(name, np.stack(labels))
    except ValueError as error:
        raise error if isinstance(error, DataError) else DataError(f"Expected {name} of one shape.") from None
    digest.update(targets.tobytes())
    return shape, targets, digest.hexdigest()


def _example(dataset: Any, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the features and label of one example, checked."""
    try:
        pair = dataset[number]
    except Exception as error:
        raise UserFunctionError(f"Example {number} of the data set", error) from error
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"Expected example {number} to be a pair of features and label, got {type(pair).__name__}.")
    try:
        features, label = np.asarray(pair[0]), np.asarray(pair[1])
    except Exception as error:
        raise UserFunctionError(f"Example {number} of the data set", error) from error
    if features.dtype.kind not in "biuf":
        raise DataError(f"Expected the features of example {number} to be numbers, got {features.dtype}.")
    with np.errstate(over="ignore"):
        return as_features(features), label
