from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning import datasets
from cpsgd.learning.datasets import fashion


def test_the_real_one() -> None:
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    found = datasets.load("fashion-mnist")
    assert (found.size, found.feature_dim, found.classes) == (60_000, 784, 10)
    assert isinstance(found, datasets.ImageDataset)
    # The mean shade that everyone normalises Fashion-MNIST with, and the first labels.
    assert found.images.mean() / 255 == pytest.approx(0.2860, abs=1e-4)
    assert found.labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert found.test_labels[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    with pytest.raises(ParameterError, match=r"60,000 clients, one per image, and not 7\.$"):
        datasets.load("fashion-mnist", clients=7)


def test_a_missing_file_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion, "_DEBIAN", tmp_path / "debian")
    with pytest.raises(DataError, match="dataset-fashion-mnist"):
        datasets.load("fashion-mnist", folder=tmp_path)


def test_mnist_is_not_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have files of the same names: those in the data folder itself are MNIST's."""
    monkeypatch.setattr(fashion, "_DEBIAN", tmp_path / "debian")
    for folder in (tmp_path, tmp_path / "fashion-mnist"):
        folder.mkdir(exist_ok=True)
        (folder / fashion.PARTS[0].name).write_bytes(gzip.compress(bytes(100)))
        with pytest.raises(DataError, match="There is no" if folder == tmp_path else "its checksum differs"):
            datasets.load("fashion-mnist", folder=tmp_path)
