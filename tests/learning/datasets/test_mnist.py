from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import DataError
from cpsgd.learning.datasets import ImageDataset, infinite_mnist, load_mnist, mnist
from cpsgd.learning.datasets.infinite import FIELD_COUNT


def test_the_real_one(real_mnist: ImageDataset) -> None:
    assert real_mnist.images.shape == (60_000, 28, 28)
    assert real_mnist.test_images.shape == (10_000, 28, 28)
    assert real_mnist.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert real_mnist.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # The mean shade that everyone normalises MNIST with.
    assert real_mnist.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert (real_mnist.name, real_mnist.size, real_mnist.feature_dim) == ("mnist", 60_000, 784)


def test_the_known_checksums_are_those_of_the_files(mnist_folder: Path) -> None:
    for part in mnist.PARTS:
        packed = (mnist_folder / "mnist" / part.name).read_bytes()
        assert (len(packed), hashlib.sha256(packed).hexdigest()) == (part.packed_size, part.packed_sha256)


def unpacked(folder: Path, name: str, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress((folder / "mnist" / name).read_bytes())[header:], dtype=np.uint8)


def test_what_the_files_hold(small_mnist: Path) -> None:
    data = load_mnist(small_mnist)
    images = unpacked(small_mnist, "train-images-idx3-ubyte.gz", 16).reshape(30, 28, 28)
    np.testing.assert_array_equal(data.images, images)
    np.testing.assert_array_equal(data.labels, unpacked(small_mnist, "train-labels-idx1-ubyte.gz", 8))
    np.testing.assert_array_equal(data.test_labels, unpacked(small_mnist, "t10k-labels-idx1-ubyte.gz", 8))
    assert data.test_images.shape == (20, 28, 28)


def test_where_it_is_looked_for(small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPSGD_DATA_DIR", str(small_mnist))
    assert load_mnist().size == 30
    # A folder that holds the files themselves will do; one that is given goes before the variable's.
    assert load_mnist(small_mnist / "mnist").size == 30
    with pytest.raises(DataError, match="cpsgd data mnist"):
        load_mnist(tmp_path)
    monkeypatch.delenv("CPSGD_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="CPSGD_DATA_DIR"):
        load_mnist()
    small_mnist.rename(tmp_path / "cpsgd")
    assert load_mnist().size == 30
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").mkdir()
    (tmp_path / "cpsgd").rename(tmp_path / ".cache" / "cpsgd")
    assert load_mnist().size == 30
    assert load_mnist("~/.cache/cpsgd").size == 30


def test_every_damage_is_noticed(small_mnist: Path) -> None:
    for part in mnist.PARTS:
        path = small_mnist / "mnist" / part.name
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        content = gzip.decompress(good)
        damages = {
            "truncated": good[:-9],
            "empty": b"",
            "flipped": bytes(flipped),
            "not gzip": content,
            "another": gzip.compress(content[:-1] + bytes([content[-1] ^ 1])),
            "shorter": gzip.compress(content[:-1]),
            "longer": gzip.compress(content + b"\0"),
            "huge": gzip.compress(bytes(10_000_000)),
        }
        for damage, content in damages.items():
            path.write_bytes(content)
            with pytest.raises(DataError, match=f"{part.name}.*`cpsgd data mnist`") as caught:
                load_mnist(small_mnist)
            if damage == "truncated":
                assert "truncated" in str(caught.value)
        path.unlink()
        with pytest.raises(DataError, match=f"no {part.name}"):
            load_mnist(small_mnist)
        path.write_bytes(good)
    assert load_mnist(small_mnist).size == 30


def test_files_packed_anew_are_the_same_data(small_mnist: Path) -> None:
    path = small_mnist / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1))
    assert load_mnist(small_mnist).size == 30


@pytest.fixture
def mirror(server: Any, small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    server.files = {path.name: path.read_bytes() for path in (small_mnist / "mnist").iterdir()}
    monkeypatch.setattr(mnist, "MIRRORS", (server.url,))
    return server


def test_download(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fresh"
    monkeypatch.setenv("CPSGD_DATA_DIR", str(folder))
    seen: dict[str, int] = {}
    files = mnist.download(progress=lambda part, done: seen.update({part.name: done}))
    assert files == dict.fromkeys([folder / "mnist" / part.name for part in mnist.PARTS], True)
    assert seen == {part.name: part.packed_size for part in mnist.PARTS}
    assert load_mnist().size == 30


def test_only_what_is_missing_or_damaged_is_downloaded(mirror: Any, small_mnist: Path) -> None:
    labels, images = (
        small_mnist / "mnist" / name for name in ("t10k-labels-idx1-ubyte.gz", "train-images-idx3-ubyte.gz")
    )
    labels.unlink()
    images.write_bytes(images.read_bytes()[:-1])
    files = mnist.download(small_mnist)
    assert {path for path, downloaded in files.items() if downloaded} == {labels, images}
    assert {path for path, _ in mirror.requests} == {f"/{labels.name}", f"/{images.name}"}
    assert load_mnist(small_mnist).size == 30


def test_the_mirrors_are_secure() -> None:
    assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in mnist.MIRRORS)


class TestOriginalFiles:
    """The original infinite MNIST's own fields and slopes."""

    @pytest.fixture(autouse=True)
    def files(self, small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mnist, "_ORIGINAL_TANGENTS", ("tangVec_float_60000x28x28.bin", (30, 2, 28, 28)))
        random = np.random.default_rng(0)
        self.folder = small_mnist
        self.fields = random.standard_normal((FIELD_COUNT, 28, 28), dtype=np.float32)
        self.tangents = random.standard_normal((30, 2, 28, 28), dtype=np.float32)
        (small_mnist / "infimnist").mkdir()
        self.fields_file = small_mnist / "infimnist" / "fields_float_1522x28x28.bin"
        self.tangents_file = small_mnist / "infimnist" / "tangVec_float_60000x28x28.bin"
        self.fields_file.write_bytes(self.fields.astype("<f4").tobytes())
        self.tangents_file.write_bytes(self.tangents.astype("<f4").tobytes())

    def test_are_used_and_named(self) -> None:
        data = infinite_mnist(10, self.folder)
        np.testing.assert_array_equal(data.fields, self.fields)
        assert data.tangents is not None
        np.testing.assert_array_equal(data.tangents, self.tangents)
        assert "the original's fields" in data.source
        self.fields_file.rename(self.folder / self.fields_file.name)
        assert infinite_mnist(10, self.folder).source == data.source

    def test_without_them_our_own_are_used_and_named(self) -> None:
        self.fields_file.unlink()
        self.tangents_file.unlink()
        data = infinite_mnist(10, self.folder)
        assert data.tangents is None
        assert "cpsgd's own fields" in data.source

    def test_one_without_the_other_is_refused(self) -> None:
        for file in (self.fields_file, self.tangents_file):
            hidden = file.rename(file.with_suffix(".hidden"))
            with pytest.raises(DataError, match=file.name):
                infinite_mnist(10, self.folder)
            hidden.rename(file)

    def test_truncated_or_damaged(self) -> None:
        for file in (self.fields_file, self.tangents_file):
            good = file.read_bytes()
            file.write_bytes(good[:-4])
            with pytest.raises(DataError, match=f"{file.name} has .* bytes instead of {len(good):,}"):
                infinite_mnist(10, self.folder)
            file.write_bytes(good[:-4] + np.float32(np.nan).tobytes())
            with pytest.raises(DataError, match=f"{file.name} is damaged"):
                infinite_mnist(10, self.folder)
            file.write_bytes(good)
