"""Data to learn from: embedded digits, MNIST, both without end, and arrays of one's own.

Every data set is a population of clients addressed by number (`batch`) and a test set that no client holds.
"""

from cpsgd.learning.datasets.arrays import ArrayDataset, from_arrays
from cpsgd.learning.datasets.base import Batch, Dataset, ImageDataset
from cpsgd.learning.datasets.digits import infinite_digits, load_digits
from cpsgd.learning.datasets.infinite import InfiniteDataset
from cpsgd.learning.datasets.mnist import infinite_mnist, load_mnist
from cpsgd.learning.datasets.named import NAMES, load
from cpsgd.learning.datasets.partition import Partition, dirichlet, iid

__all__ = [
    "NAMES",
    "ArrayDataset",
    "Batch",
    "Dataset",
    "ImageDataset",
    "InfiniteDataset",
    "Partition",
    "dirichlet",
    "from_arrays",
    "iid",
    "infinite_digits",
    "infinite_mnist",
    "load",
    "load_digits",
    "load_mnist",
]
