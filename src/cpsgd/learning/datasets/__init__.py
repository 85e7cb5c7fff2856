"""Data sets: digits, MNIST, Fashion-MNIST, changelogs, infinite digits, and your own arrays, tables and PyTorch data.

Every data set is a population of clients addressed by number (`batch`) and a test set that no client holds.
"""

from __future__ import annotations

from pathlib import Path

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.arrays import ArrayDataset, from_arrays
from cpsgd.learning.datasets.changelogs import load_changelogs
from cpsgd.learning.datasets.digits import infinite_digits, load_digits
from cpsgd.learning.datasets.fashion import load_fashion_mnist
from cpsgd.learning.datasets.from_tables import from_frame
from cpsgd.learning.datasets.infinite import DEFAULT_SIZE, InfiniteDataset
from cpsgd.learning.datasets.mnist import infinite_mnist, load_mnist
from cpsgd.learning.datasets.partitions import Partition, by_client, dirichlet, iid
from cpsgd.learning.datasets.populations import Batch, Dataset, ImageDataset, fingerprint
from cpsgd.learning.datasets.torch_datasets import ExampleDataset, from_torch

__all__ = [
    "NAMES",
    "ArrayDataset",
    "Batch",
    "Dataset",
    "ExampleDataset",
    "ImageDataset",
    "InfiniteDataset",
    "Partition",
    "by_client",
    "dirichlet",
    "fingerprint",
    "from_arrays",
    "from_frame",
    "from_torch",
    "iid",
    "infinite_digits",
    "infinite_mnist",
    "load",
    "load_changelogs",
    "load_digits",
    "load_fashion_mnist",
    "load_mnist",
]

NAMES = ("digits", "infinite-digits", "mnist", "infinite-mnist", "fashion-mnist")


def load(name: str, *, clients: int | None = None, folder: Path | str | None = None) -> Dataset:
    """Returns the data set of this name.

    Args:
        name: One of `NAMES`.
        clients: Size of the population. By default 25 million for the infinite data sets; the finite ones have one
            client per image and no other size.
        folder: The data folder; by default `CPSGD_DATA_DIR`, or else `cpsgd` in the user's cache.

    Raises:
        ParameterError: There is no such data set, or it has another number of clients.
        DataError: Its files are missing or damaged.

    >>> load("infinite-digits", clients=1_000_000).size
    1000000
    """
    if clients is not None:
        _validate.integer("clients", clients, low=1)
    if name not in NAMES:
        raise ParameterError(f"There is no data set {name!r}. Known are {', '.join(NAMES)}.")
    if name.startswith("infinite-"):
        size = DEFAULT_SIZE if clients is None else clients
        return infinite_digits(size) if name == "infinite-digits" else infinite_mnist(size, folder)
    if name == "digits":
        finite = load_digits()
    else:
        finite = load_mnist(folder) if name == "mnist" else load_fashion_mnist(folder)
    if clients not in (None, finite.size):
        more = f" infinite-{name} has as many as wanted." if f"infinite-{name}" in NAMES else ""
        raise ParameterError(f"{name} has {finite.size:,} clients, one per image, and not {clients:,}.{more}")
    return finite
