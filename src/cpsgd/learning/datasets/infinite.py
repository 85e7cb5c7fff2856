"""Infinite data sets: sample i is a small deformation of a training image, and a pure function of i.

The construction is that of the infinite MNIST (Loosli, Canu and Bottou, "Training invariant support vector machines
using selective sampling", 2007; their program infimnist, version 1.3), for images of any size. With B test images and
A training images, sample i is

* i < B: test image i; B <= i < B + A: training image i − B, both unmodified;
* i >= B + A: training image a = (i − B) mod A, deformed. Two of 1522 displacement fields F are used, of numbers
  k1 = ((131071·i) mod 2^32) mod 1521 and k2 = (k1 + 1 + 2i) mod 1522. In float32, pixel by pixel,
  v = base − (F[k1]·T0 − F[k2]·T1), where T0 and T1 are the base image's slopes to the right and downwards; v is clamped
  to [0, 255] and truncated to an integer. Last, with `shift`, the image is moved by one pixel, by k1 mod 9: up, down,
  left, right, up-left, up-right, down-left, down-right, not at all.

Unlike in the original program, pixels that leave the image do not come back on the other side. Unless the files of the
original are given, F are the fields of `smooth_fields`, and slopes are central differences with zeros around the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.populations import Batch, ImageDataset, check_indices, fingerprint, one_each
from cpsgd.randomness import public_bits

FIELD_COUNT = 1522
# Clients of the paper's experiment.
DEFAULT_SIZE = 25_000_000
# k1 + 1 + 2i must not leave 63 bits.
INDEX_LIMIT = 1 << 61
# Pixels per block: large enough to hide the interpreter's overhead, small enough for the caches.
_BLOCK = 1 << 17
# By k1 mod 9: rows down and columns right that the image is moved by.
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1), (0, 0)])
_UNIT = 1 << 13
_NOISE = 1 << 16
# Fields smoothed at a time, to bound memory.
_FIELD_BLOCK = 128


@dataclass(frozen=True)
class Recipe:
    """Parameters of deformed samples, one entry each: `base` image, fields `k1` and `k2`, number of the `move`."""

    base: NDArray[np.int64]
    k1: NDArray[np.int64]
    k2: NDArray[np.int64]
    move: NDArray[np.int64]


def recipe(indices: NDArray[np.int64], *, test: int, train: int) -> Recipe:
    """Returns the parameters of the samples with these numbers, made from `test` and `train` images.

    >>> recipe(np.array([70_000, 10**12]), test=10_000, train=60_000)
    Recipe(base=array([    0, 30000]), k1=array([1010,  243]), k2=array([ 987, 1432]), move=array([2, 0]))
    """
    # 131071·i may overflow; unsigned numbers wrap around, which does not change it modulo 2^32.
    k1 = ((indices.astype(np.uint64) * np.uint64(131071)) % np.uint64(1 << 32) % np.uint64(1521)).astype(np.int64)
    return Recipe(base=(indices - test) % train, k1=k1, k2=(k1 + 1 + 2 * indices) % FIELD_COUNT, move=k1 % len(MOVES))


@dataclass(frozen=True, eq=False)
class InfiniteDataset:
    """The infinite version of an image data set: with B test and A training images, client c has sample B + A + c.

    No client has a test image or an unmodified training image. Nothing is stored per client.

    Attributes:
        base: The finite data set.
        fields: Displacement fields in pixels, [1522, side, side].
        size: Number of clients.
        shift: Pixels that images are moved by at last, 1 or 0.
        tangents: Slopes of the training images, [A, 2, side, side]; None for central differences.
        made_with: Origin of the fields and slopes, for reports.
    """

    base: ImageDataset
    fields: NDArray[np.float32] = field(repr=False)
    size: int
    shift: int = 1
    tangents: NDArray[np.float32] | None = field(default=None, repr=False)
    made_with: str = "cpsgd's own fields"
    # Labels and images, test first, and fields; images and fields are padded by a column and a row of zeros.
    _labels: NDArray[np.uint8] = field(init=False, repr=False)
    _pixels: NDArray[np.uint8] = field(init=False, repr=False)
    _fields: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = len(self.base.test_images) + len(self.base.images)
        _validate.integer("size", self.size, low=1, high=INDEX_LIMIT - first)
        # The padding allows one pixel only.
        _validate.integer("shift", self.shift, low=0, high=1)
        side = self.base.images.shape[1]
        shapes = {"fields": (FIELD_COUNT, side, side), "tangents": (len(self.base.images), 2, side, side)}
        for name, shape in shapes.items():
            if (array := getattr(self, name)) is not None and array.shape != shape:
                raise ParameterError(f"Expected {name} of shape {shape}, got {array.shape}.")
        pixels = np.concatenate([_pad(self.base.test_images), _pad(self.base.images)])
        # A central difference is half the difference of the neighbours. Halving the field instead is exact.
        fields = _pad(self.fields.astype(np.float32)) * np.float32(1.0 if self.tangents is not None else 0.5)
        object.__setattr__(self, "_labels", np.concatenate([self.base.test_labels, self.base.labels]))
        object.__setattr__(self, "_pixels", pixels)
        object.__setattr__(self, "_fields", fields)

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return f"infinite-{self.base.name}"

    @property
    def source(self) -> str:
        """Origin of the samples."""
        return f"{self.base.source}, deformed without end with {self.made_with}"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.base.classes

    @property
    def feature_dim(self) -> int:
        """Pixels of an image."""
        return self.base.feature_dim

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the samples are made from."""
        return fingerprint(self.base.fingerprint, self.fields, self.size, self.shift, self.tangents)

    def test_set(self) -> Batch:
        """Returns the finite data set's test images, unmodified."""
        return self.base.test_set()

    def batch(self, clients: ArrayLike) -> Batch:
        """Returns the samples of these clients, with shades divided by 255."""
        numbers = check_indices("clients", clients, self.size)
        labels, images = self.images(numbers + (len(self.base.test_images) + len(self.base.images)))
        return one_each(images, labels)

    def images(self, indices: ArrayLike) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Returns labels and images [samples, side, side] of the samples with these numbers, in any order."""
        numbers = check_indices("indices", indices, INDEX_LIMIT)
        test, train = len(self.base.test_images), len(self.base.images)
        made = recipe(numbers, test=test, train=train)
        plain = numbers < test + train
        rows = np.where(plain, numbers, test + made.base)
        images = np.empty((len(numbers), *self.base.images.shape[1:]), dtype=np.uint8)
        self._deform(rows, made, images)
        images[plain] = _inside(self._pixels[rows[plain]])
        return self._labels[rows], images

    def _deform(self, rows: NDArray[np.int64], made: Recipe, images: NDArray[np.uint8]) -> None:
        """Writes the deformed images.

        Images lie one after the other in a flat array, with zeros between rows and images. So a pixel's neighbours are
        at a fixed distance, blocks of images are one operation, and a move changes only the position of a window.
        """
        side = images.shape[1]
        width, padded = side + 1, self._pixels.shape[1]
        block = max(1, min(_BLOCK // padded, len(rows)))
        # Zeros before the first image and after the last, for neighbours and moves.
        margin = width + 1
        moved = self.shift * MOVES[made.move] @ np.array([width, 1])
        pixels = np.empty((block, padded), dtype=np.uint8)
        shades = np.zeros(margin + block * padded + margin, dtype=np.float32)
        displacement, first, second = np.zeros((3, block, padded), dtype=np.float32)
        deformed = np.zeros(margin + block * padded + margin, dtype=np.uint8)
        windows = sliding_window_view(deformed, side * width)
        for start in range(0, len(rows), block):
            part = slice(start, min(start + block, len(rows)))
            count = part.stop - start
            here = slice(margin, margin + count * padded)
            # All indices are valid: the mode only saves numpy.take a copy.
            np.take(self._pixels, rows[part], axis=0, out=pixels[:count], mode="clip")
            shades[here] = pixels[:count].reshape(-1)
            for axis, k, term in ((0, made.k1, first), (1, made.k2, second)):
                if self.tangents is None:
                    step = (1, width)[axis]
                    after, before = (shades[here.start + by : here.stop + by] for by in (step, -step))
                    np.subtract(after, before, out=term[:count].reshape(-1))
                else:
                    _inside(term[:count])[...] = self.tangents[made.base[part], axis]
                np.take(self._fields, k[part], axis=0, out=displacement[:count], mode="clip")
                term[:count] *= displacement[:count]
            value = first[:count]
            value -= second[:count]
            np.subtract(shades[here], value.reshape(-1), out=value.reshape(-1))
            np.clip(value, np.float32(0), np.float32(255), out=value)
            # The cast to integers truncates.
            deformed[here] = value.reshape(-1)
            begin = margin + padded * np.arange(count) - moved[part]
            images[part] = windows[begin].reshape(count, side, width)[:, :, :side]


def _pad(images: NDArray[Any]) -> NDArray[Any]:
    """Pads images by a column of zeros on the right and a row of zeros below; returns one flat row each."""
    return np.pad(images, [(0, 0), (0, 1), (0, 1)]).reshape(len(images), -1)


def _inside(padded: NDArray[Any]) -> NDArray[Any]:
    """Returns the images within the result of `_pad`, as a view."""
    width = math.isqrt(padded.shape[1])
    return padded.reshape(-1, width, width)[:, :-1, :-1]


def smooth_fields(count: int, side: int, *, smoothing: float, displacement: float) -> NDArray[np.float32]:
    """Returns smooth random displacement fields [count, side, side]: each pixel's displacement along one axis.

    Uniform 16-bit integers on a grid that is wider than the image by the kernel's radius are smoothed with integer
    weights round(8192·exp(−x²/(2σ²))), |x| <= ⌈4σ⌉, along rows and columns. All sums are integers below 2^53, which
    float64 holds exactly in any order of addition, so that every machine makes the same fields. They are divided by
    their standard deviation, which follows from the weights.

    Args:
        count: Number of fields; the first ones do not depend on it.
        side: Pixels per side.
        smoothing: σ of the smoothing Gaussian, in pixels.
        displacement: Standard deviation of a pixel's displacement, in pixels.

    >>> smooth_fields(2, 8, smoothing=1.5, displacement=1.0)[1, 0, :3]
    array([-1.5897619 , -0.7146024 ,  0.17997856], dtype=float32)
    """
    radius = math.ceil(4 * smoothing)
    offsets = range(-radius, radius + 1)
    weights = np.array([round(_UNIT * math.exp(-(x**2) / (2 * smoothing**2))) for x in offsets], dtype=np.float64)
    wide = side + 2 * radius
    smooth = np.zeros((side, wide))
    for row in range(side):
        smooth[row, row : row + weights.size] = weights
    # The integers −2^15..2^15−1 have variance (2^32 − 1)/12; a pixel is their sum weighted by products of two weights.
    deviation = math.sqrt((_NOISE**2 - 1) / 12) * float(weights @ weights)

    fields = np.empty((count, side, side), dtype=np.float32)
    for start in range(0, count, _FIELD_BLOCK):
        block = range(start, min(start + _FIELD_BLOCK, count))
        raw = np.stack([public_bits("infinite-fields", side, number, 2 * wide * wide) for number in block])
        noise = raw.view("<i2").reshape(-1, wide, wide).astype(np.float64)
        fields[start : block.stop] = smooth @ noise @ smooth.T * (displacement / deviation)
    return fields
