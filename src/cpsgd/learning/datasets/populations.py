"""Data sets as a trainer sees them: clients addressed by number, and a test set that no client holds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd.errors import DataError, ParameterError

# Of longer arrays this many bytes are hashed, in rows spread evenly.
_HASHED_BYTES = 1 << 28


@dataclass(frozen=True)
class Batch:
    """Examples of some clients, in the clients' order.

    Attributes:
        features: One row per example: float32, or int64 for token ids. Shapes are the examples' own.
        labels: The examples' classes, int64, or float32 numbers to predict.
        counts: Number of each client's rows; the rows of a client follow each other.

    Example:
        >>> from cpsgd.learning.datasets import load_digits
        >>> batch = load_digits().batch(np.array([3, 5]))
        >>> batch.features.shape, batch.labels, batch.counts
        ((2, 64), array([3, 5]), array([1, 1]))
    """

    features: NDArray[Any]
    labels: NDArray[Any]
    counts: NDArray[np.int64]


class Dataset(Protocol):
    """A population of clients with their examples, and a test set apart from them.

    A data set may also have a `fingerprint` (a text, see the function of this name): a run is then resumed only with
    data of the same fingerprint. If clients may have many examples, it should be a `PartedDataset`.

    Attributes:
        name: Short name, as on the command line.
        source: Where the examples come from and how they were made, for reports.
        size: Number of clients; they are numbered 0..size−1.
        classes: Number of classes; labels are 0..classes−1. None if labels are numbers to predict.
        feature_dim: Numbers in an example's features.

    Example:
        >>> from cpsgd.learning.datasets import load_digits
        >>> data = load_digits()
        >>> data.size, data.classes, data.feature_dim
        (1442, 10, 64)
        >>> data.batch(np.array([3, 5])).labels
        array([3, 5])
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def source(self) -> str: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def classes(self) -> int | None: ...  # noqa: D102

    @property
    def feature_dim(self) -> int: ...  # noqa: D102

    def batch(self, clients: ArrayLike) -> Batch:
        """Returns the examples of these clients, a pure function of their numbers."""
        ...

    def test_set(self) -> Batch:
        """Returns the test examples, each as a client of its own."""
        ...


@runtime_checkable
class PartedDataset(Protocol):
    """A data set that need not have all examples of a client in memory at once."""

    def counts(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of examples of these clients."""
        ...

    def part(self, client: int, start: int, stop: int) -> Batch:
        """Returns examples `start` to `stop` of a client, in the order of `batch`."""
        ...


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images [clients, side, side] in shades of grey, 0..255, one per client, and test images."""

    name: str
    source: str
    images: NDArray[np.uint8] = field(repr=False)
    labels: NDArray[np.uint8] = field(repr=False)
    test_images: NDArray[np.uint8] = field(repr=False)
    test_labels: NDArray[np.uint8] = field(repr=False)
    classes: int = 10

    def __post_init__(self) -> None:
        side = self.images.shape[-1]
        for images, labels in ((self.images, self.labels), (self.test_images, self.test_labels)):
            if images.dtype != np.uint8 or images.shape[1:] != (side, side) or images.size == 0:
                raise DataError(
                    f"Expected square images of one size and type uint8, got {images.dtype} of shape {images.shape}."
                )
            if labels.shape != images.shape[:1] or labels.dtype != np.uint8 or labels.max() >= self.classes:
                raise DataError(f"Expected a uint8 label below {self.classes} for each of {len(images)} images.")

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.images)

    @property
    def feature_dim(self) -> int:
        """Pixels of an image."""
        return math.prod(self.images.shape[1:])

    @property
    def fingerprint(self) -> str:
        """Hash of all images and labels."""
        return fingerprint(self.images, self.labels, self.test_images, self.test_labels, self.classes)

    def batch(self, clients: ArrayLike) -> Batch:
        """Returns the images of these clients, with shades divided by 255."""
        numbers = check_indices("clients", clients, self.size)
        return one_each(self.images[numbers], self.labels[numbers])

    def test_set(self) -> Batch:
        """Returns the test images, with shades divided by 255."""
        return one_each(self.test_images, self.test_labels)


def one_each(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Batch:
    """Returns a batch of clients with one image each."""
    pixels = images.reshape(len(images), math.prod(images.shape[1:]))
    features = np.divide(pixels, np.float32(255), dtype=np.float32)
    return Batch(features, labels.astype(np.int64), np.ones(len(labels), dtype=np.int64))


def fingerprint(*parts: NDArray[Any] | str | int | None) -> str:
    """Returns a SHA-256 of arrays and plain values; of an array over 256 MiB some rows, spread evenly.

    >>> fingerprint(np.arange(3))[:8], fingerprint(np.arange(4))[:8]
    ('e504a90b', '8fa0a6df')
    """
    found = hashlib.sha256()
    for part in parts:
        if not isinstance(part, np.ndarray):
            found.update(f"{part!r};".encode())
            continue
        found.update(f"{part.dtype.str} {part.shape};".encode())
        rows = max(1, (1 << 20) // max(1, part[:1].nbytes))
        chosen = part[:: max(1, math.ceil(part.nbytes / _HASHED_BYTES))]
        for start in range(0, len(chosen), rows):
            found.update(np.ascontiguousarray(chosen[start : start + rows]).tobytes())
    return found.hexdigest()


def check_indices(name: str, indices: ArrayLike, limit: int) -> NDArray[np.int64]:
    """Returns a list of whole numbers in [0, limit) as an array; raises `ParameterError` for anything else."""
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ParameterError(f"Expected {name} to be a list of integers, got {array.dtype} of shape {array.shape}.")
    wrong = np.flatnonzero((array < 0) | (array >= limit))
    if wrong.size:
        raise ParameterError(
            f"Expected {name} in [0, {limit - 1}], got {array[wrong[0]]} at position {wrong[0]} of {array.size}."
        )
    return array.astype(np.int64)
