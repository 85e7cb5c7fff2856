"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 training and 10,000 test images of clothes, 28×28 pixels.

Debian's package `dataset-fashion-mnist` has the four files; elsewhere they go to `fashion-mnist` in the data folder.
Their content is checked against known checksums whenever it is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cpsgd.errors import DataError
from cpsgd.learning.datasets import mnist
from cpsgd.learning.datasets.files import VARIABLE, data_folder, find_file
from cpsgd.learning.datasets.populations import ImageDataset

_SUBFOLDER = "fashion-mnist"
_DEBIAN = Path("/usr/share/datasets")
_REMEDY = (
    f"Install Debian's package dataset-fashion-mnist, or put the four files into the folder {_SUBFOLDER} of {VARIABLE}."
)
# Names and sizes are MNIST's. Packages compress the files anew, so only the content has a known checksum.
_CONTENT = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
PARTS = tuple(replace(part, sha256=content) for part, content in zip(mnist.PARTS, _CONTENT, strict=True))


def load_fashion_mnist(folder: Path | str | None = None) -> ImageDataset:
    """Returns Fashion-MNIST from a data folder (see `data_folder`) or Debian's package, one image per client.

    Raises:
        DataError: A file is missing, truncated or damaged.
    """
    where = data_folder(folder)
    read = []
    for part in PARTS:
        path = find_file(where, _SUBFOLDER, part.name) if (where / _SUBFOLDER).is_dir() else None
        path = path or find_file(_DEBIAN / _SUBFOLDER, "", part.name)
        if path is None:
            raise DataError(f"There is no {part.name} in {where / _SUBFOLDER} or {_DEBIAN / _SUBFOLDER}. {_REMEDY}")
        read.append(mnist.read(path, part, _REMEDY))
    train, train_labels, test, test_labels = read
    images, test_images = (found.reshape(-1, mnist.SIDE, mnist.SIDE) for found in (train, test))
    return ImageDataset("fashion-mnist", "Fashion-MNIST, 28×28 pixels", images, train_labels, test_images, test_labels)
