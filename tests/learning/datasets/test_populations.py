"""Image data sets: what they hold, scikit-learn's digits, and all by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.datasets

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import (
    NAMES,
    Dataset,
    ImageDataset,
    digits,
    infinite_digits,
    load,
    load_digits,
    populations,
)
from cpsgd.learning.datasets.populations import check_indices, fingerprint

IMAGES = np.zeros((3, 4, 4), np.uint8)
LABELS = np.array([0, 1, 9], np.uint8)
GOOD: dict[str, Any] = {
    "name": "mine",
    "source": "mine",
    "images": IMAGES,
    "labels": LABELS,
    "test_images": IMAGES[:2],
    "test_labels": LABELS[:2],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": IMAGES[:, :3]},
        {"images": IMAGES[:, :3, :3]},
        {"images": IMAGES.astype(np.float32)},
        {"images": IMAGES[0]},
        {"test_images": IMAGES[:0], "test_labels": LABELS[:0]},
        {"labels": LABELS[:2]},
        {"labels": LABELS.astype(np.int64)},
        {"test_labels": LABELS[:2] + np.uint8(9)},
        {"classes": 9},
    ],
)
def test_images_and_labels_must_fit(wrong: dict[str, Any]) -> None:
    assert ImageDataset(**GOOD).size == 3
    with pytest.raises(DataError, match="Expected"):
        ImageDataset(**{**GOOD, **wrong})


@pytest.mark.parametrize(
    "change",
    [
        {"images": IMAGES + np.uint8(1)},
        {"labels": LABELS[::-1].copy()},
        {"test_images": IMAGES[:2] + np.uint8(1)},
        {"test_labels": LABELS[1:]},
        {"classes": 11},
    ],
)
def test_fingerprints_tell_data_apart(change: dict[str, Any]) -> None:
    assert ImageDataset(**GOOD).fingerprint == ImageDataset(**{**GOOD, "source": "yours"}).fingerprint
    assert ImageDataset(**GOOD).fingerprint != ImageDataset(**{**GOOD, **change}).fingerprint


def test_the_fingerprint_of_a_long_array_looks_at_some_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populations, "_HASHED_BYTES", 16)
    rows = np.arange(30, dtype=np.int8).reshape(10, 3)
    first = fingerprint(rows)
    rows[1] = 0
    assert fingerprint(rows) == first
    rows[2] = 0
    assert fingerprint(rows) != first


@pytest.mark.parametrize("indices", [[0, 4], range(5), np.array([4], np.uint8), np.array([3], np.uint64), [], ()])
def test_numbers(indices: Any) -> None:
    result = check_indices("clients", indices, 5)
    assert result.dtype == np.int64
    assert result.tolist() == list(indices)


@pytest.mark.parametrize("indices", [[5], [0, -1], [2**63], [2**70], [0.0], [True], 1, [[1]], "1", None])
def test_wrong_numbers(indices: Any) -> None:
    with pytest.raises(ParameterError, match="Expected clients"):
        check_indices("clients", indices, 5)


def test_shades_and_split() -> None:
    data, bundled = load_digits(), sklearn.datasets.load_digits()
    test: list[tuple[Any, int]] = []
    train: list[tuple[Any, int]] = []
    seen = dict.fromkeys(range(10), 0)
    for image, label in zip(bundled.images, bundled.target, strict=True):
        seen[int(label)] += 1
        (test if seen[int(label)] % 5 == 0 else train).append((image, label))
    for part, images, labels in (
        (train, data.images, data.labels),
        (test, data.test_images, data.test_labels),
    ):
        assert images.dtype == np.uint8
        np.testing.assert_array_equal(labels, [label for _, label in part])
        np.testing.assert_array_equal(images, np.round(np.array([image for image, _ in part]) * 255 / 16))
    assert (len(train), len(test)) == (1442, 355)
    assert np.bincount(data.test_labels).min() >= 34


def test_batches_and_test_set() -> None:
    data = load_digits()
    batch, test = data.batch([3, 1441]), data.test_set()
    np.testing.assert_array_equal(batch.features, data.images[[3, 1441]].reshape(2, 64) / np.float32(255))
    assert batch.labels.tolist() == data.labels[[3, 1441]].tolist()
    assert (test.features.shape, test.labels.shape, test.counts.sum()) == ((355, 64), (355,), 355)
    assert (data.name, data.size, data.classes, data.feature_dim) == ("digits", 1442, 10, 64)


def test_without_end() -> None:
    data = infinite_digits(size=1_000)
    assert (data.name, data.size, data.shift) == ("infinite-digits", 1_000, 0)
    assert "cpsgd's own fields" in data.source
    np.testing.assert_array_equal(data.batch(np.arange(1_000)).labels, data.base.labels[:1_000])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load_digits()


@pytest.mark.parametrize(
    ("file", "reason"), [("changed", "other digits"), ("garbage", "can be read"), ("missing", "can be read")]
)
def test_other_digits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, reason: str) -> None:
    path = tmp_path / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True)
    if file == "changed":
        bundled = sklearn.datasets.load_digits()
        rows = np.column_stack([bundled.data, bundled.target]).astype(np.int64)
        rows[5, 45] += 1
        np.savetxt(path, rows, "%d", delimiter=",")
    elif file == "garbage":
        path.write_bytes(b"garbage")
    monkeypatch.setattr(digits, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(DataError, match=reason):
        load_digits()


def test_scikit_learn_is_not_imported() -> None:
    code = (
        "import sys; from cpsgd.learning.datasets import load_digits; load_digits(); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fashion-mnist"])
def test_every_name(name: str, small_mnist: Path) -> None:
    data: Dataset = load(name, folder=small_mnist)
    assert data.name == name
    assert data.size == {"digits": 1442, "mnist": 30}.get(name, 25_000_000)
    assert data.classes == 10
    batch = data.batch([0, data.size - 1])
    assert batch.features.shape == (2, data.feature_dim)
    assert 0 <= batch.features.min() < batch.features.max() <= 1
    assert set(data.test_set().labels) <= set(range(10))
    assert data.source


def test_the_number_of_clients(small_mnist: Path) -> None:
    assert load("infinite-mnist", clients=123, folder=small_mnist).size == 123
    assert load("infinite-digits", clients=10**12).size == 10**12
    assert load("digits", clients=1442).size == 1442
    with pytest.raises(ParameterError, match=r"1,442 clients.* not 1,000\. infinite-digits has"):
        load("digits", clients=1_000)
    for name in NAMES:
        with pytest.raises(ParameterError, match="clients"):
            load(name, clients=0, folder=small_mnist)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(ParameterError, match=r"'cifar'\. Known are digits, infinite-digits, mnist, infinite-mnist"):
        load("cifar")
