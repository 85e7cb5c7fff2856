"""The displacement fields: exact, for ever the same, and of the law they are said to have."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from cpsgd.learning.datasets.infinite import smooth_fields
from cpsgd.randomness import public_bits


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
