from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import ImageDataset, populations
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
