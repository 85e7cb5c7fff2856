"""How far apart the grid points of two vectors of known distance can be: a search for pairs that break the bound."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd.codec import clip, pipeline, rotate
from cpsgd.codec._kernels import kernels
from cpsgd.codec.clip import Grid
from cpsgd.mechanisms import Binomial
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol

Vectors = NDArray[np.float64]
Pair = tuple[Vectors, Vectors]

DISTANCES = (1.0, 1.2, math.sqrt(2.0), 1.9)
SHAPES = [
    # dim, levels, range: fine and coarse grids, wide and narrow ranges, powers of two and other lengths.
    (1, 3, 1.0),
    (2, 2, 40.0),
    (5, 17, 0.7),
    (64, 2, 0.2),
    (64, 3, 900.0),
    (100, 5, 1.0),
    (1000, 3, 60.0),
    (1000, 2, 3e4),
    (4096, 33, 0.05),
    (5000, 3, 2e3),
]


def protocol_of(dim: int, levels: int, reach: float, distance: float, rotated: bool) -> Protocol:
    return Protocol(
        clients=10,
        dim=dim,
        clip_norm=1.0,
        mechanism=Binomial(levels=levels, trials=9, coordinate_range=reach),
        rotate=rotated,
        replace_one_distance=distance,
        distance_reason="the test made them so",
    )


def grid_of(protocol: Protocol) -> Grid:
    assert protocol.mechanism.grid is not None
    return protocol.mechanism.grid


def grid_point(protocol: Protocol, vector: Vectors) -> Vectors:
    """Where rounding starts from, by the codec itself."""
    limit = grid_of(protocol).limit
    points = pipeline.to_grid(protocol, pipeline.as_vector(vector, protocol.dim), 3)
    return np.rint(np.clip(points.astype(np.float64), -limit, limit))


def from_grid(protocol: Protocol, points: Vectors) -> Vectors:
    """The vector that the codec puts here, up to float32 arithmetic."""
    vector = points / grid_of(protocol).unit
    if not protocol.rotate:
        return vector
    signs = rotate.signs(protocol.dim, protocol.rotation_seed, 3)
    return rotate.backward(vector.astype(np.float32), signs).astype(np.float64)


def clipped(vector: Vectors) -> Vectors:
    return vector / max(1.0, float(np.linalg.norm(vector)))


def unit_vectors(dim: int, generator: np.random.Generator) -> Pair:
    """Two directions at right angles; in one dimension the same twice."""
    first = generator.standard_normal(dim) * generator.exponential(size=dim) ** generator.integers(0, 4)
    first /= np.linalg.norm(first)
    second = generator.standard_normal(dim)
    second -= (second @ first) * first
    return first, second / np.linalg.norm(second) if dim > 1 else first


def random_pairs(protocol: Protocol, distance: float, generator: np.random.Generator) -> Iterator[Pair]:
    """On the sphere and inside it, and one of the two far outside of it in a direction that clipping keeps."""
    one, other = unit_vectors(protocol.dim, generator)
    yield 0.5 * distance * one, -0.5 * distance * one
    yield one, (1.0 - distance) * one
    if protocol.dim > 1:
        cosine = 1.0 - 0.5 * distance**2
        far = cosine * one + math.sqrt(1.0 - cosine**2) * other
        yield one, far
        yield generator.uniform(1.0, 1e6) * one, generator.uniform(1.0, 1e30) * far


def halfway_pairs(protocol: Protocol, distance: float, generator: np.random.Generator) -> Iterator[Pair]:
    """Coordinates beside the middle between two grid points, so that all of them round outwards."""
    dim, unit = protocol.dim, grid_of(protocol).unit
    signs = np.where(generator.random(dim) < 0.5, -1.0, 1.0)
    largest = 0.5 * distance * unit / math.sqrt(dim)
    for tiny in (1e-3, 1e-2, 0.1):
        whole = np.floor(max(0.0, largest - 0.5 - tiny))
        outwards = signs * (whole + 0.5 + tiny)
        if np.linalg.norm(outwards) > 0.5 * distance * unit:
            outwards[int((0.5 * distance * unit / (0.5 + tiny)) ** 2) :] = 0.0  # as many coordinates as fit
        yield from_grid(protocol, outwards), from_grid(protocol, -outwards)


def long_pairs(protocol: Protocol, distance: float, generator: np.random.Generator) -> Iterator[Pair]:
    """One vector that rounding makes longer than D, so that it is shrunk; the other stays, or rounds inwards."""
    dim, unit = protocol.dim, grid_of(protocol).unit
    signs = np.where(generator.random(dim) < 0.5, -1.0, 1.0)
    for tiny in (1e-3, 0.1):
        whole = np.floor(max(0.0, unit / math.sqrt(dim) - 0.5 - tiny))
        first = signs * (whole + 0.5 + tiny)
        if not 0.0 < np.linalg.norm(first) <= unit:
            continue
        direction = first / np.linalg.norm(first)
        other = direction * (np.linalg.norm(first) - distance * unit)
        yield from_grid(protocol, first), from_grid(protocol, other)
        if dim > 1:
            across = generator.standard_normal(dim)
            across -= (across @ direction) * direction
            across /= np.linalg.norm(across)
            cosine = 1.0 - 0.5 * distance**2
            turned = unit * (cosine * direction + math.sqrt(1.0 - cosine**2) * across)
            yield from_grid(protocol, first), from_grid(protocol, turned)


def search(protocol: Protocol, distance: float, seed: int) -> Iterator[tuple[float, float]]:
    """The real distance of pairs, once clipped, and that of their grid points in grid points."""
    generator = np.random.default_rng(seed)
    for _ in range(4):
        for pairs in (random_pairs, halfway_pairs, long_pairs):
            for first, second in pairs(protocol, distance, generator):
                for dtype in (np.float64, np.float32):
                    one, other = (vector.astype(dtype).astype(np.float64) for vector in (first, second))
                    real = float(np.linalg.norm(clipped(one) - clipped(other)))
                    points = [grid_point(protocol, vector.astype(dtype)) for vector in (one, other)]
                    yield real, float(np.linalg.norm(points[0] - points[1]))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_pair_is_further_apart_on_the_grid(shape: tuple[int, int, float], rotated: bool) -> None:
    tried = 0
    for distance in DISTANCES:
        protocol = protocol_of(*shape, distance, rotated)
        dim, grid = protocol.dim, grid_of(protocol)
        sensitivity = protocol.sensitivity(Adjacency.REPLACE_ONE) * 2.0**grid.fraction_bits
        for real, found in search(protocol, distance, seed=dim):
            # Rounding to float32 may have moved the pair itself a little further apart.
            assert real <= distance * (1.0 + 2.0**-22)
            bound = clip.apart(max(real, distance), dim=dim, clip_norm=1.0, unit=grid.unit)
            assert found <= bound
            if real <= distance:
                assert found <= sensitivity
            tried += 1
    assert tried >= 4 * 4 * 4


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("shape", [(64, 3, 900.0), (1000, 3, 60.0), (1000, 2, 400.0), (5000, 3, 200.0)])
def test_the_grids_part_of_the_bound_is_needed(shape: tuple[int, int, float], distance: float) -> None:
    protocol = protocol_of(*shape, distance, rotated=False)
    dim, unit = protocol.dim, grid_of(protocol).unit
    added = max(found - real * unit for real, found in search(protocol, distance, seed=1))
    assert 0.9 * math.sqrt(dim) < added <= clip.apart(distance, dim=dim, clip_norm=1.0, unit=unit) - distance * unit


def test_vectors_really_are_shrunk_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would prove little of `enforce` if it never had anything to do."""
    shrunk: list[float] = []
    scale = kernels.scale
    protocol = protocol_of(1000, 3, 60.0, 1.2, rotated=True)

    def watched(x: NDArray[np.float32], factor: float, out: NDArray[np.float32]) -> None:
        shrunk.append(factor)
        scale(x, factor, out)

    monkeypatch.setattr(kernels, "scale", watched)
    for _ in search(protocol, 1.2, seed=2):
        pass
    assert min(shrunk) < 0.99


@pytest.mark.parametrize("dim", [2, 100, 4096, 5000, 2**17])
def test_float32_arithmetic_takes_less_than_its_part_of_the_bound(dim: int) -> None:
    """Against the same rotation in float64: rounding of numbers, not of grid points."""
    generator = np.random.default_rng(dim)
    signs = rotate.signs(dim, 0, 1)
    for _ in range(5):
        vector, _ = unit_vectors(dim, generator)
        found = rotate.forward(vector, signs, 1.0).astype(np.float64)
        exact = exact_rotation(vector, signs)
        roundings = 2 * (dim.bit_length() - 1) + 8
        assert np.linalg.norm(found - exact) <= math.expm1(roundings * math.log1p(2.0**-24))


def exact_rotation(vector: Vectors, signs: NDArray[np.uint8]) -> Vectors:
    """The definition in codec/rotate.py, in float64."""
    dim, bits = vector.size, np.unpackbits(signs, bitorder="little")
    size = 1 << (dim.bit_length() - 1)

    def transform(part: Vectors, first: int) -> Vectors:
        part = part * np.where(bits[first : first + size], -1.0, 1.0)
        distance = 1
        while distance < size:
            pairs = part.reshape(-1, 2, distance)
            part = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
            distance *= 2
        return part / math.sqrt(size)

    out = vector.copy()
    out[:size] = transform(out[:size], 0)
    if rest := dim - size:
        out[:rest], out[size:] = out[size:].copy(), out[:rest].copy()
        out[:size] = transform(out[:size], max(16, size))
    return out


def test_the_bound_never_exceeds_what_the_norm_allows() -> None:
    """Where the grid is coarse, 2D, which is enforced on it, is the better bound."""
    for reach in (0.1, 1.0, 1e2, 1e4, 1e6):
        protocol = protocol_of(10_000, 3, reach, math.sqrt(2.0), rotated=True)
        plain = protocol.mechanism.sensitivity(dim=10_000, clip_norm=1.0, adjacency=Adjacency.REPLACE_ONE)
        found = protocol.sensitivity(Adjacency.REPLACE_ONE)
        assert math.sqrt(2.0) / protocol.scale < found <= plain
        assert (found < plain) == (reach < 1e3)
        assert protocol.sensitivity(Adjacency.ZERO_OUT) == protocol.mechanism.sensitivity(
            dim=10_000, clip_norm=1.0, adjacency=Adjacency.ZERO_OUT
        )


def test_a_distance_below_the_norm_counts_as_the_norm() -> None:
    """A vector that is shrunk alone comes nearer to zero, and no further than D from any other."""
    size = {"dim": 50, "clip_norm": 3.0, "unit": 1e4}
    assert clip.apart(0.1, **size) == clip.apart(3.0, **size) < clip.apart(3.1, **size)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_pair_is_further_apart_on_the_grid_in_sums_of_absolute_differences(shape: tuple[int, int, float]) -> None:
    """Zero is among the vectors: clipping and shrinking bring vectors towards it."""
    protocol = protocol_of(*shape, 1.9, rotated=False)
    generator, dim, unit = np.random.default_rng(shape[0]), protocol.dim, grid_of(protocol).unit
    most = 0.0
    for _ in range(8):
        for pairs in (random_pairs, halfway_pairs, long_pairs):
            for first, second in pairs(protocol, 1.9, generator):
                for one, other in ((first, second), (first, np.zeros(dim)), (3.0 * first, second)):
                    real = max(float(np.abs(each).sum()) for each in (one - other, one, other))
                    found = float(np.abs(grid_point(protocol, one) - grid_point(protocol, other)).sum())
                    assert found <= clip.l1_apart(real, dim=dim, unit=unit)
                    most = max(most, (found - real * unit) / dim)
    # The grid's part of the bound, 1 per coordinate, is needed where coordinates are few grid points.
    assert most > 0.9 or shape not in {(64, 3, 900.0), (1000, 3, 60.0)}
