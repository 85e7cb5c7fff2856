from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.datasets

from cpsgd.errors import DataError
from cpsgd.learning.datasets import digits, infinite_digits, load_digits


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
