"""MNIST (LeCun, Cortes and Burges): 60,000 training and 10,000 test digits of 28×28 pixels, from local files.

The four gzip'd files are in the data folder (see `files`) or its subfolder `mnist`; `download` fetches them. Their
content is checked against known checksums whenever it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import DataError
from cpsgd.learning.datasets.files import VARIABLE, data_folder, fetch, find_file
from cpsgd.learning.datasets.infinite import DEFAULT_SIZE, FIELD_COUNT, InfiniteDataset, smooth_fields
from cpsgd.learning.datasets.populations import ImageDataset

SIDE = 28
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_SUBFOLDER = "mnist"
# The original infinite MNIST's displacement fields and slopes: a separate download, float32 without a header.
_ORIGINAL_SUBFOLDER = "infimnist"
_ORIGINAL_FIELDS = ("fields_float_1522x28x28.bin", (FIELD_COUNT, SIDE, SIDE))
_ORIGINAL_TANGENTS = ("tangVec_float_60000x28x28.bin", (60_000, 2, SIDE, SIDE))


@dataclass(frozen=True)
class Part:
    """One of the files: size and SHA-256 of the download (`packed`) and of its content."""

    name: str
    packed_size: int
    packed_sha256: str
    size: int
    sha256: str


TRAIN_IMAGES = Part(
    name="train-images-idx3-ubyte.gz",
    packed_size=9_912_422,
    packed_sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    size=47_040_016,
    sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
)
TRAIN_LABELS = Part(
    name="train-labels-idx1-ubyte.gz",
    packed_size=28_881,
    packed_sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    size=60_008,
    sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
)
TEST_IMAGES = Part(
    name="t10k-images-idx3-ubyte.gz",
    packed_size=1_648_877,
    packed_sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    size=7_840_016,
    sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
)
TEST_LABELS = Part(
    name="t10k-labels-idx1-ubyte.gz",
    packed_size=4_542,
    packed_sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    size=10_008,
    sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
PARTS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


def load_mnist(folder: Path | str | None = None) -> ImageDataset:
    """Returns MNIST from a data folder (see `data_folder`), one image per client.

    Raises:
        DataError: A file is missing, truncated or damaged.
    """
    where = data_folder(folder)
    train, train_labels, test, test_labels = (read(_find(where, part), part) for part in PARTS)
    images, test_images = train.reshape(-1, SIDE, SIDE), test.reshape(-1, SIDE, SIDE)
    return ImageDataset("mnist", "MNIST, 28×28 pixels", images, train_labels, test_images, test_labels)


def infinite_mnist(size: int = DEFAULT_SIZE, folder: Path | str | None = None) -> InfiniteDataset:
    """Returns the infinite MNIST, for `size` clients.

    It uses the original program's fields and slopes if `fields_float_1522x28x28.bin` and
    `tangVec_float_60000x28x28.bin` are in the data folder or its subfolder `infimnist`. Otherwise it uses fields of
    our own, smoothed over 4 px and with a standard deviation of 1 px. `source` says which.

    Raises:
        DataError: A file is missing, truncated or damaged.
    """
    where = data_folder(folder)
    base = load_mnist(where)
    fields, tangents = (_map_floats(where, *known) for known in (_ORIGINAL_FIELDS, _ORIGINAL_TANGENTS))
    if fields is None and tangents is None:
        own = smooth_fields(FIELD_COUNT, SIDE, smoothing=4.0, displacement=1.0)
        return InfiniteDataset(base=base, fields=own, size=size)
    if fields is None or tangents is None:
        missing = (_ORIGINAL_FIELDS if fields is None else _ORIGINAL_TANGENTS)[0]
        raise DataError(
            f"The original infinite MNIST needs both of its files, and {missing} is not in {where}. "
            "Add it, or take the other away to use cpsgd's own fields."
        )
    return InfiniteDataset(base=base, fields=fields, size=size, tangents=tangents, made_with="the original's fields")


def download(
    folder: Path | str | None = None, progress: Callable[[Part, int], None] = lambda part, done: None
) -> dict[Path, bool]:
    """Downloads the files that are missing or damaged into the data folder's subfolder `mnist`.

    `progress` is called with a file and the number of its bytes that have arrived.

    Returns:
        Whether each of the four files had to be downloaded.

    Raises:
        DataError: No mirror could be reached, or none has the right file.
    """
    where = data_folder(folder)
    downloaded = {}
    for part in PARTS:
        target = find_file(where, _SUBFOLDER, part.name) or where / _SUBFOLDER / part.name
        downloaded[target] = True
        with suppress(DataError, FileNotFoundError):
            read(target, part)
            downloaded[target] = False
        if downloaded[target]:
            urls = [mirror + part.name for mirror in MIRRORS]
            fetch(urls, target, size=part.packed_size, sha256=part.packed_sha256, progress=partial(progress, part))
    return downloaded


def _find(folder: Path, part: Part) -> Path:
    path = find_file(folder, _SUBFOLDER, part.name)
    if path is None:
        raise DataError(
            f"There is no {part.name} in {folder} or its folder {_SUBFOLDER}. Get MNIST with `cpsgd data mnist`, "
            f"or set {VARIABLE} to a folder that has it."
        )
    return path


def read(path: Path, part: Part, remedy: str = "Get it anew with `cpsgd data mnist`.") -> NDArray[np.uint8]:
    """Returns the numbers of a gzip'd file, without its header.

    Raises:
        DataError: The file is truncated or damaged, or is another one.
    """
    # The header has four bytes of type and four bytes per dimension; the checksum covers it.
    header = 16 if "idx3" in part.name else 8
    return np.frombuffer(_unpack(path, part, remedy), dtype=np.uint8, offset=header)


def _unpack(path: Path, part: Part, remedy: str) -> bytes:
    try:
        with gzip.open(path) as file:
            # A hostile file might unpack to any size.
            content = file.read(part.size + 1)
    except EOFError:
        raise DataError(f"{path} is truncated. {remedy}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}). {remedy}") from None
    if len(content) != part.size or hashlib.sha256(content).hexdigest() != part.sha256:
        raise DataError(f"{path} is not the {part.name} of this data set: its checksum differs. {remedy}")
    return content


def _map_floats(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Returns the file's numbers as a memory map; None if there is no such file."""
    path = find_file(folder, _ORIGINAL_SUBFOLDER, name)
    if path is None:
        return None
    size, expected = path.stat().st_size, 4 * math.prod(shape)
    if size != expected:
        raise DataError(f"{path} has {size:,} bytes instead of {expected:,}. Get it anew.")
    numbers = np.memmap(path, dtype="<f4", mode="r", shape=shape)
    # No checksum is known; at least NaN and infinity are refused.
    step = max(1, len(numbers) // 64)
    if not all(np.isfinite(numbers[start : start + step]).all() for start in range(0, len(numbers), step)):
        raise DataError(f"{path} is damaged: it holds NaN or infinity. Get it anew.")
    return numbers
