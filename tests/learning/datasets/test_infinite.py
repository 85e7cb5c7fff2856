"""Infinite data sets: the original program's output, a plain loop, displacement fields, and samples on a device."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.learning.datasets import ImageDataset, InfiniteDataset, infinite_digits, infinite_mnist, load_digits
from cpsgd.learning.datasets.device_data import DeviceInfinite, on_device
from cpsgd.learning.datasets.infinite import FIELD_COUNT, INDEX_LIMIT, recipe, smooth_fields
from cpsgd.randomness import public_bits

TEST, TRAIN = 9, 7
MOVES = ["up", "down", "left", "right", "up left", "up right", "down left", "down right", ""]


def finite(side: int, seed: int = 0) -> ImageDataset:
    random = np.random.default_rng(seed)

    def images(count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return random.integers(0, 256, (count, side, side), dtype=np.uint8), random.integers(0, 10, count, np.uint8)

    (train, labels), (test, test_labels) = images(TRAIN), images(TEST)
    return ImageDataset("noise", "noise", train, labels, test, test_labels)


def fields(side: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((FIELD_COUNT, side, side), dtype=np.float32)


def by_hand(data: InfiniteDataset, index: int) -> NDArray[np.uint8]:
    """Sample `index` >= B + A by the definition, pixel by pixel."""
    k1 = index * 131071 % 2**32 % 1521
    k2 = (k1 + 1 + 2 * index) % 1522
    number = (index - TEST) % TRAIN
    base = data.base.images[number].astype(np.float32)
    side = len(base)

    def at(row: int, column: int) -> np.float32:
        return base[row, column] if 0 <= row < side and 0 <= column < side else np.float32(0)

    result = np.zeros((side, side), dtype=np.uint8)
    move = MOVES[k1 % 9] if data.shift else ""
    down = ("down" in move) - ("up" in move)
    right = ("right" in move) - ("left" in move)
    for row in range(side):
        for column in range(side):
            if data.tangents is None:
                slope0 = (at(row, column + 1) - at(row, column - 1)) / np.float32(2)
                slope1 = (at(row + 1, column) - at(row - 1, column)) / np.float32(2)
            else:
                slope0, slope1 = data.tangents[number, :, row, column]
            change = data.fields[k1, row, column] * slope0 - data.fields[k2, row, column] * slope1
            shade = int(min(max(base[row, column] - change, np.float32(0)), np.float32(255)))
            if 0 <= row + down < side and 0 <= column + right < side:
                result[row + down, column + right] = shade
    return result


@pytest.mark.parametrize("side", [1, 2, 5, 28])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("given_slopes", [False, True])
def test_the_definition_pixel_by_pixel(side: int, shift: int, given_slopes: bool) -> None:
    slopes = np.random.default_rng(2).normal(0, 90, (TRAIN, 2, side, side)).astype(np.float32) if given_slopes else None
    data = InfiniteDataset(base=finite(side), fields=fields(side), size=100, shift=shift, tangents=slopes)
    # All nine moves, all base images, and numbers whose products leave 32 and 64 bits.
    indices = [*range(TEST + TRAIN, TEST + TRAIN + 18), 2**32 - 1, 2**32, 2**40 + 7, 10**15, INDEX_LIMIT - 1]
    assert set(recipe(np.array(indices), test=TEST, train=TRAIN).move) == set(range(9))
    labels, images = data.images(indices)
    assert (labels.dtype, images.dtype, images.shape) == (np.uint8, np.uint8, (len(indices), side, side))
    for index, label, image in zip(indices, labels, images, strict=True):
        np.testing.assert_array_equal(image, by_hand(data, index))
        assert label == data.base.labels[(index - TEST) % TRAIN]


def test_the_first_samples_are_the_images_themselves() -> None:
    data = InfiniteDataset(base=finite(5), fields=fields(5), size=100)
    indices = [TEST + TRAIN, TEST + TRAIN - 1, 0, TEST, TEST - 1, 30]
    labels, images = data.images(indices)
    for position, (index, label, image) in enumerate(zip(indices, labels, images, strict=True)):
        if position in (0, 5):
            np.testing.assert_array_equal(image, by_hand(data, index))
            continue
        of_test = index < TEST
        expected, classes = (
            (data.base.test_images, data.base.test_labels) if of_test else (data.base.images, data.base.labels)
        )
        number = index if of_test else index - TEST
        np.testing.assert_array_equal(image, expected[number])
        assert label == classes[number]


def test_a_sample_depends_on_its_number_alone() -> None:
    data = InfiniteDataset(base=finite(28), fields=fields(28), size=10**9)
    random = np.random.default_rng(3)
    # Several blocks, in no order, with repetitions.
    indices = random.integers(0, 10**9, 1_000)
    indices[::7] = indices[0]
    indices[::11] = random.integers(0, TEST + TRAIN, len(indices[::11]))
    labels, images = data.images(indices)
    for position in [*range(0, 1_000, 37), 999]:
        label, image = data.images(indices[position : position + 1])
        np.testing.assert_array_equal(image[0], images[position])
        assert label[0] == labels[position]


def test_clients_hold_deformed_samples_and_never_test_images() -> None:
    data = InfiniteDataset(base=finite(5), fields=fields(5), size=100)
    batch = data.batch([99, 0, 3])
    labels, images = data.images([TEST + TRAIN + 99, TEST + TRAIN, TEST + TRAIN + 3])
    np.testing.assert_array_equal(batch.features, images.reshape(3, 25) / np.float32(255))
    np.testing.assert_array_equal(batch.labels, labels)
    assert batch.counts.tolist() == [1, 1, 1]
    assert (batch.features.dtype, batch.labels.dtype) == (np.float32, np.int64)
    test = data.test_set()
    np.testing.assert_array_equal(test.features, data.base.test_images.reshape(TEST, 25) / np.float32(255))
    np.testing.assert_array_equal(test.labels, data.base.test_labels)
    assert (data.name, data.classes, data.feature_dim) == ("infinite-noise", 10, 25)


def test_no_samples() -> None:
    data = InfiniteDataset(base=finite(5), fields=fields(5), size=100)
    assert data.images([])[1].shape == (0, 5, 5)
    assert data.batch([]).features.shape == (0, 25)


def test_memory_is_the_results_and_a_constant() -> None:
    data = InfiniteDataset(base=finite(28), fields=fields(28), size=10**9)

    def beside(count: int) -> int:
        indices = np.arange(10**6, 10**6 + count)
        tracemalloc.start()
        _, images = data.images(indices)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak - images.nbytes

    # Nine numbers of 8 bytes a sample, for bookkeeping.
    assert beside(20_000) - beside(1_000) < 19_000 * 72
    assert beside(20_000) < 6 * 2**20


@pytest.mark.parametrize("indices", [[-1], [0, INDEX_LIMIT], [0.5], [[1]], 3, ["1"], [True]])
def test_wrong_numbers_are_refused(indices: object) -> None:
    data = InfiniteDataset(base=finite(5), fields=fields(5), size=100)
    with pytest.raises(ParameterError, match="Expected indices"):
        data.images(indices)
    with pytest.raises(ParameterError, match="Expected clients"):
        data.batch(indices)


def test_clients_beyond_the_population_are_refused() -> None:
    data = InfiniteDataset(base=finite(5), fields=fields(5), size=100)
    with pytest.raises(ParameterError, match=r"clients in \[0, 99\], got 100 at position 1 of 3"):
        data.batch([5, 100, 7])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size"),
        ({"size": INDEX_LIMIT}, "size"),
        ({"shift": 2}, "shift"),
        ({"fields": np.zeros((3, 5, 5), np.float32)}, "fields"),
        ({"tangents": np.zeros((TRAIN, 5, 5), np.float32)}, "tangents"),
    ],
)
def test_wrong_parts_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        InfiniteDataset(**{"base": finite(5), "fields": fields(5), "size": 100, **wrong})


@pytest.fixture(scope="module")
def vectors(vectors_folder: Path) -> dict[str, NDArray]:
    """The original program's output on given fields and slopes."""
    return {path.stem: np.load(path) for path in vectors_folder.glob("*.npy")}


def test_the_originals_recipe(vectors: dict[str, NDArray]) -> None:
    made = recipe(vectors["indices"], test=10_000, train=60_000)
    base, k1, k2, _, move = vectors["index_map_base_k1_k2_sign_shift"].T
    np.testing.assert_array_equal([made.base, made.k1, made.k2, made.move], [base, k1, k2, move])


@pytest.mark.parametrize("given_slopes", [False, True])
def test_the_originals_images_byte_for_byte(
    vectors: dict[str, NDArray], real_mnist: ImageDataset, given_slopes: bool
) -> None:
    base, k1, k2, _, _ = vectors["index_map_base_k1_k2_sign_shift"].T
    np.testing.assert_array_equal(real_mnist.images[base], vectors["base_images"])
    used = np.zeros((FIELD_COUNT, 28, 28), dtype=np.float32)
    used[k1], used[k2] = vectors["field_k1"], vectors["field_k2"]
    slopes = None
    if given_slopes:
        slopes = np.zeros((60_000, 2, 28, 28), dtype=np.float32)
        slopes[base, 0], slopes[base, 1] = vectors["tangent0"], vectors["tangent1"]
    data = InfiniteDataset(base=real_mnist, fields=used, size=1, tangents=slopes)
    labels, images = data.images(vectors["indices"])
    np.testing.assert_array_equal(labels, vectors["labels"])
    np.testing.assert_array_equal(images, vectors["images_c_program_surrogate_fields"])


def test_infinite_mnist(real_mnist: ImageDataset, mnist_folder: Path) -> None:
    data = infinite_mnist(folder=mnist_folder)
    assert (data.name, data.size, data.feature_dim) == ("infinite-mnist", 25_000_000, 784)
    batch = data.batch([0, 24_999_999])
    assert batch.labels.tolist() == [real_mnist.labels[0], real_mnist.labels[(25_060_000 - 1) % 60_000]]
    np.testing.assert_array_equal(data.test_set().labels, real_mnist.test_labels)


def test_deformations_are_visible_but_small() -> None:
    data = infinite_digits()
    copies = data.batch(np.arange(0, 1442 * 20, 1442)).features
    base = data.base.batch([0]).features
    assert len(np.unique(copies, axis=0)) == 20
    assert (np.abs(copies - base).max(axis=1) > 0.05).all()
    # On the whole closer to their own digit than other digits are.
    others = data.base.batch(np.flatnonzero(data.base.labels != data.base.labels[0])).features
    nearest = np.linalg.norm(others - base, axis=1).min()
    assert np.linalg.norm(copies - base, axis=1).mean() < nearest


def test_fingerprints_tell_what_samples_are_made_of() -> None:
    digits = infinite_digits(1000)
    assert digits.fingerprint == infinite_digits(1000).fingerprint
    shaken = replace(digits, fields=digits.fields + np.float32(0.1))
    for other in (infinite_digits(1001), replace(digits, shift=1), shaken):
        assert other.fingerprint != digits.fingerprint


@pytest.mark.parametrize(
    ("side", "smoothing", "displacement", "digest"),
    [
        (28, 4.0, 1.0, "40b36c61a029b8b0a64191dde07669333d21d2c639b27a5aa70466ec57dbfa55"),
        (8, 8 / 7, 0.5, "f3c5712b70b61eed7bc4c91866bceff414c503d28762cb1b6363b8cf66cec997"),
    ],
)
def test_the_same_for_ever(side: int, smoothing: float, displacement: float, digest: str) -> None:
    """Results with these fields are published; a new construction needs a new name."""
    fields = smooth_fields(1522, side, smoothing=smoothing, displacement=displacement)
    assert (fields.shape, fields.dtype) == ((1522, side, side), np.float32)
    assert hashlib.sha256(fields.astype("<f4").tobytes()).hexdigest() == digest


def test_the_construction_in_whole_numbers() -> None:
    side, smoothing, displacement, number = 5, 0.8, 0.5, 130
    radius = 4
    weights = [round(8192 * math.exp(-(x**2) / (2 * smoothing**2))) for x in range(-radius, radius + 1)]
    wide = side + 2 * radius
    raw = bytes(public_bits("infinite-fields", side, number, 2 * wide * wide))
    noise = [int.from_bytes(raw[2 * j : 2 * j + 2], "little", signed=True) for j in range(wide * wide)]
    deviation = math.sqrt((2**32 - 1) / 12) * sum(w * w for w in weights)
    field = smooth_fields(number + 1, side, smoothing=smoothing, displacement=displacement)[number]
    for row in range(side):
        for column in range(side):
            total = sum(
                weights[y] * weights[x] * noise[(row + y) * wide + column + x]
                for y in range(2 * radius + 1)
                for x in range(2 * radius + 1)
            )
            assert field[row, column] == np.float32(total * (displacement / deviation))


def test_the_first_fields_do_not_depend_on_how_many_there_are() -> None:
    few, many = (smooth_fields(count, 8, smoothing=1.0, displacement=1.0) for count in (3, 200))
    np.testing.assert_array_equal(few, many[:3])


def test_displacement_and_smoothness() -> None:
    """Fixed draws; with fresh ones these bounds of six standard errors would fail once in 10^7."""
    count, side, smoothing, displacement = 2_000, 8, 1.0, 0.5
    fields = smooth_fields(count, side, smoothing=smoothing, displacement=displacement) / displacement
    # The mean square of `count` independent, nearly Gaussian numbers of variance 1, at every pixel.
    np.testing.assert_allclose((fields.astype(np.float64) ** 2).mean(axis=0), 1.0, atol=6 * math.sqrt(2 / count))
    # Noise smoothed with a Gaussian has the autocorrelation exp(−distance²/(4σ²)).
    for distance in (1, 2, 3):
        correlation = (fields[:, 0, 0] * fields[:, 0, distance]).mean()
        expected = math.exp(-(distance**2) / (4 * smoothing**2))
        assert correlation == pytest.approx(expected, abs=6 * math.sqrt((1 + expected**2) / count))


CPU = torch.device("cpu")


@pytest.mark.parametrize("shift", [0, 1])
def test_infinite_samples_are_the_same_bit_for_bit(shift: int) -> None:
    data = replace(infinite_digits(), shift=shift)
    source = on_device(data, CPU)
    assert isinstance(source, DeviceInfinite)
    clients = np.concatenate([np.arange(2_000), np.random.default_rng(0).integers(0, data.size, 2_000)])
    found, expected = source.batch(clients), data.batch(clients)
    np.testing.assert_array_equal(found.features.numpy(), expected.features)
    np.testing.assert_array_equal(found.labels.numpy(), expected.labels)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(source.test.features.numpy(), data.test_set().features)


def test_any_other_data_set_is_carried() -> None:
    data = load_digits()
    source = on_device(data, CPU)
    found, expected = source.batch(np.array([3, 1])), data.batch([3, 1])
    np.testing.assert_array_equal(found.features.numpy(), expected.features)
    np.testing.assert_array_equal(found.labels.numpy(), expected.labels)
