"""Partitions: every example belongs to exactly one client. Random ones follow from a seed, for simulations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import DataError, ParameterError


@dataclass(frozen=True, eq=False)
class Partition:
    """Assignment of examples to clients.

    Attributes:
        order: The examples' numbers, client by client.
        starts: Position in `order` of each client's first example, and the number of examples as a last entry.
    """

    order: NDArray[np.int64] = field(repr=False)
    starts: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("order", "starts"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
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

    def counts(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of examples of these clients."""
        found: NDArray[np.int64] = self.starts[clients + 1] - self.starts[clients]
        return found

    def part(self, client: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the numbers of a client's examples from position `start` to `stop`."""
        first, end = self.starts[client], self.starts[client + 1]
        return self.order[first + start : min(first + stop, end)]

    def rows(self, clients: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the numbers of these clients' examples, client by client, and each client's count."""
        counts = self.counts(clients)
        # Row j of a client is j positions after its start.
        skipped = self.starts[clients] - (np.cumsum(counts) - counts)
        return self.order[np.arange(counts.sum()) + np.repeat(skipped, counts)], counts


def held_back(partition: Partition, share: float) -> tuple[Partition, NDArray[np.int64], NDArray[np.int64]]:
    """Takes a share of the clients for testing, always the same ones.

    Returns:
        The partition of the other clients, with examples renumbered from 0; the numbers of their examples; and the
        numbers of the test examples.

    Raises:
        DataError: There are fewer than two clients with examples.

    >>> partition, kept, aside = held_back(one_each(10), 0.2)
    >>> partition.clients, len(kept), len(aside)
    (8, 8, 2)
    """
    _validate.probability("test_share", share)
    holders = np.flatnonzero(np.diff(partition.starts))
    if len(holders) < 2:
        raise DataError("With one client there is nobody to set aside for testing: give a test set.")
    count = min(max(1, round(share * len(holders))), len(holders) - 1)
    chosen = np.sort(_generator(0).permutation(holders)[:count])
    kept, counts = partition.rows(np.setdiff1d(np.arange(partition.clients), chosen))
    others = Partition(np.arange(len(kept)), np.concatenate([[0], np.cumsum(counts)]))
    return others, kept, partition.rows(chosen)[0]


def one_each(examples: int) -> Partition:
    """Returns the partition in which example i belongs to client i."""
    _validate.integer("examples", examples, low=1)
    return Partition(np.arange(examples), np.arange(examples + 1))


def by_client(ids: ArrayLike) -> Partition:
    """Returns the partition by client ids, one per example; clients are numbered in the order of their ids.

    >>> partition = by_client(["zoe", "ann", "zoe"])
    >>> partition.clients, partition.rows(np.array([1]))[0].tolist()
    (2, [0, 2])
    """
    try:
        array = np.asarray(ids)
    except ValueError:
        raise DataError("Expected one client id per example, got lists of several lengths.") from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "biufSUOM":
        raise DataError(f"Expected one client id per example, got {array.dtype} of shape {array.shape}.")
    try:
        found, owners = np.unique(array, return_inverse=True)
    except TypeError:
        raise DataError("The client ids are of several types, or some are missing: give every example one.") from None
    if (found != found).any():
        raise DataError("Some client ids are missing (NaN): give every example one.")
    return _owned(owners, len(found))


def iid(examples: int, clients: int, seed: int) -> Partition:
    """Returns a random partition in which clients' numbers of examples differ by at most one.

    >>> partition = iid(examples=10, clients=4, seed=0)
    >>> np.diff(partition.starts).tolist()
    [2, 3, 2, 3]
    """
    _validate.integer("examples", examples, low=1)
    _validate.integer("clients", clients, low=1, high=examples)
    return Partition(_generator(seed).permutation(examples), np.arange(clients + 1) * examples // clients)


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int) -> Partition:
    """Returns a random partition that splits each class in proportions drawn from Dirichlet(α, ..., α).

    With small α clients have few classes; large α approaches an even split of every class. Some clients may get no
    example. (Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", 2019, section 4.)

    >>> partition = dirichlet([0, 0, 0, 0, 1, 1, 1, 1], clients=2, alpha=0.1, seed=1)
    >>> partition.rows(np.array([0, 1]))[1].sum()
    np.int64(8)
    """
    classes = _classes(labels)
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
    return _owned(owners, clients)


def _classes(labels: ArrayLike) -> NDArray[np.int64]:
    """Returns classes 0, 1, ... as an array; raises `DataError` for anything else."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise DataError(f"Expected labels to be a list of integers, got {array.dtype} of shape {array.shape}.")
    if array.min() < 0:
        raise DataError(f"Expected labels 0, 1, ...: there is a negative one at position {int(array.argmin())}.")
    return array.astype(np.int64)


def _integers(name: str, given: ArrayLike) -> NDArray[np.int64]:
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ParameterError(f"Expected {name} to be a list of integers.")
    return array.astype(np.int64, copy=False)


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_validate.integer("seed", seed, low=0, high=2**128 - 1)))


def _owned(owners: NDArray[np.int64], clients: int) -> Partition:
    starts = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))])
    return Partition(np.argsort(owners, kind="stable"), starts)
