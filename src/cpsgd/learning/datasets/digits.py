"""Handwritten digits of 8×8 pixels that come with scikit-learn, without a download.

They are the 1,797 digits of the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI
repository, 1998), with 17 shades. Shade s becomes round(255·s/16), so that all images here have shades 0..255.

The split is fixed: in the data's order, every fifth image of each digit is a test image. That makes 355 test and 1,442
training images. The same people wrote both parts.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cpsgd.errors import DataError
from cpsgd.learning.datasets.infinite import DEFAULT_SIZE, FIELD_COUNT, InfiniteDataset, smooth_fields
from cpsgd.learning.datasets.populations import ImageDataset

# Of the shades 0..16 and then the labels, one byte each.
_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
_HELD_BACK = 5


def load_digits() -> ImageDataset:
    """Returns the digits, one per client.

    >>> digits = load_digits()
    >>> digits.size, len(digits.test_labels), digits.feature_dim
    (1442, 355, 64)
    """
    # Importing scikit-learn would take over a second.
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("The embedded digits come with scikit-learn, which is not installed: pip install scikit-learn.")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    try:
        rows = np.loadtxt(path, np.uint8, delimiter=",")
    except (OSError, ValueError) as error:
        raise DataError(
            f"The installed scikit-learn has no digits that can be read ({type(error).__name__}): reinstall it."
        ) from None
    shades, labels = np.ascontiguousarray(rows[:, :-1]).reshape(-1, 8, 8), np.ascontiguousarray(rows[:, -1])
    if hashlib.sha256(shades.tobytes() + labels.tobytes()).hexdigest() != _SHA256:
        raise DataError("The installed scikit-learn has other digits than cpsgd knows: reinstall it.")
    images = np.rint(shades * (255 / 16)).astype(np.uint8)

    held_back = np.zeros(len(labels), dtype=np.bool_)
    for digit in range(10):
        held_back[np.flatnonzero(labels == digit)[_HELD_BACK - 1 :: _HELD_BACK]] = True
    train, test = (images[~held_back], labels[~held_back]), (images[held_back], labels[held_back])
    return ImageDataset("digits", "scikit-learn's digits, 8×8 pixels", *train, *test)


def infinite_digits(size: int = DEFAULT_SIZE) -> InfiniteDataset:
    """Returns the infinite digits, for `size` clients.

    The smoothing of MNIST's fields, 4 px of 28, becomes 8/7 px of 8. Images are not shifted: a pixel is an eighth of
    the width, and shifting costs about 4 points of accuracy.

    >>> infinite_digits().batch([0, 24_999_999]).labels.tolist()
    [0, 7]
    """
    fields = smooth_fields(FIELD_COUNT, 8, smoothing=8 / 7, displacement=0.5)
    return InfiniteDataset(base=load_digits(), fields=fields, size=size, shift=0)
