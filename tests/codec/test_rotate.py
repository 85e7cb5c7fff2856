from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cpsgd.codec import rotate
from cpsgd.codec._kernels import kernels

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "rotation-signs.json").read_text())


def rotated_unit_vector(dim: int, position: int, seed: int = 0, round: int = 0) -> np.ndarray:
    unit = np.zeros(dim, np.float32)
    unit[position] = 1.0
    return rotate.forward(unit, rotate.signs(dim, seed, round))


def spread(rotated: np.ndarray) -> float:
    """max |coordinate| · √d of a vector that has norm 1."""
    return float(np.abs(rotated).max()) * rotated.size**0.5


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"d={v['dim']}")
def test_signs_match_the_committed_vectors(vector: dict[str, object]) -> None:
    signs = rotate.signs(vector["dim"], vector["seed"], vector["round"])
    assert signs.tobytes().hex() == vector["signs"]


def test_signs_depend_on_seed_and_round() -> None:
    streams = {rotate.signs(1000, seed, round).tobytes() for seed in (0, 1, 2**64 - 1) for round in (0, 1, 2**64 - 1)}
    assert len(streams) == 9


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 7, 12, 31, 32, 33, 100, 255, 300])
def test_orthogonal(dim: int) -> None:
    matrix = np.stack([rotated_unit_vector(dim, i) for i in range(dim)]).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=2e-6)


@pytest.mark.parametrize("dim", [1, 2, 3, 1000, 4096, 51_370, 65_536, 99_999, 2**20, 10**6 + 3])
def test_backward_undoes_forward(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal(dim).astype(np.float32)
    signs = rotate.signs(dim, 1, 2)
    y = rotate.forward(x, signs)
    error = np.linalg.norm((rotate.backward(y, signs) - x).astype(np.float64))
    norm = float(np.linalg.norm(x.astype(np.float64)))
    assert error <= 1e-6 * norm
    assert float(np.linalg.norm(y.astype(np.float64))) == pytest.approx(norm, rel=1e-6)


def test_power_of_two_is_the_paper_s_rotation() -> None:
    # R = HA: a unit vector becomes perfectly flat.
    for dim in (2, 64, 4096):
        np.testing.assert_allclose(np.abs(rotated_unit_vector(dim, dim // 3)), dim**-0.5, rtol=1e-6)


@pytest.mark.parametrize("dim", [*range(2, 130), 1000, 1025, 2047])
def test_every_unit_vector_is_spread(dim: int) -> None:
    assert max(spread(rotated_unit_vector(dim, i)) for i in range(dim)) < 6


def test_unit_vectors_of_the_first_block_are_rearrangements() -> None:
    # Why checking one of them checks them all: entries are w(a xor i), up to sign, outside the last r coordinates.
    dim = 700
    magnitudes = {tuple(np.sort(np.abs(rotated_unit_vector(dim, i)[:512])).round(6)) for i in range(512)}
    assert len(magnitudes) == 1


def test_unit_vectors_are_spread_in_thousands_of_dimensions() -> None:
    # One vector of each kind stands for all of its dimension: the first block's share one profile (see above), and
    # the rest, transformed once, are flat.
    near_powers = [2**j + offset for j in range(1, 17) for offset in (-1, 0, 1, 2, 3, 17, 1000)]
    random = np.random.default_rng(0).integers(2, 100_001, 1500).tolist()
    worst = 0.0
    for dim in {*range(2, 500), *near_powers, *random}:
        if 2 <= dim <= 100_000:
            worst = max(worst, spread(rotated_unit_vector(dim, 0)), spread(rotated_unit_vector(dim, dim - 1)))
    assert worst < 6


@pytest.mark.parametrize("dim", [40_000, 65_537])
def test_every_unit_vector_of_a_large_dimension_is_spread(dim: int) -> None:
    signs, out = rotate.signs(dim, 0, 0), np.empty(dim, np.float32)
    unit = np.zeros(dim, np.float32)
    worst = 0.0
    for i in range(dim):
        unit[i] = 1.0
        kernels.rotate_forward(unit, 1.0, signs, out)
        unit[i] = 0.0
        worst = max(worst, float(out.max()), -float(out.min()))
    assert worst * dim**0.5 < 6


def test_dense_vectors_look_gaussian_after_rotation() -> None:
    # A constant vector, the worst case without signs (it would become one-hot), is spread like noise.
    dim = 65_536 + 4321
    y = rotate.forward(np.full(dim, dim**-0.5, np.float32), rotate.signs(dim, 0, 0))
    assert spread(y) < 6
    assert float(np.mean((y * dim**0.5) ** 4)) == pytest.approx(3.0, abs=0.2)
