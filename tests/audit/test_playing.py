"""The auditor's own way to the lattice agrees with the codec's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol
from cpsgd.audit import Case, all_cases
from cpsgd.audit.playing import RoundLattice, canaries_of, peculiar, resting, rounded
from cpsgd.audit.sum_law import SumLaw
from cpsgd.codec import pipeline, rotate
from cpsgd.codec.clip import Grid
from cpsgd.mechanisms import Coins, LazyCoins, SampledCoins
from cpsgd.neighbours import Adjacency

PROTOCOLS = [
    Protocol.rotated_binomial(clients=3, dim=16, clip_norm=1.0, levels=8, trials=20, coordinate_range=0.3),
    Protocol.rotated_binomial(clients=3, dim=23, clip_norm=5.0, levels=33, trials=20, rotation_seed=9),
    Protocol.rotated_binomial(clients=3, dim=5, clip_norm=0.01, levels=2, trials=300, p=0.2),
    Protocol.binomial(clients=3, dim=6, clip_norm=2.0, levels=5, trials=20),
    Protocol.binomial(clients=3, dim=1, clip_norm=2.0, levels=4000, trials=20),
    Protocol(clients=3, dim=24, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.2, coordinate_range=0.5)),
    Protocol(clients=3, dim=9, clip_norm=3.0, mechanism=Coins(coins=40, theta=0.05, coordinate_range=2.0)),
    Protocol(clients=3, dim=15, clip_norm=1.0, mechanism=SampledCoins(rate=0.1, theta=0.4, coordinate_range=0.2)),
    Protocol(
        clients=3, dim=2, clip_norm=1.0, rotate=False, mechanism=LazyCoins(rate=0.6, theta=0.5, coordinate_range=1.0)
    ),
]


def grid_of(protocol: Protocol) -> Grid:
    grid = protocol.mechanism.grid
    assert grid is not None
    return grid


def reach(protocol: Protocol) -> float:
    """X."""
    return grid_of(protocol).limit / grid_of(protocol).unit


def encoders_points(protocol: Protocol, vector: np.ndarray) -> np.ndarray:
    """Where the encoder puts a vector between the levels."""
    grid = grid_of(protocol)
    points = pipeline.to_grid(protocol, vector, 6)
    shares = (np.clip(np.rint(points), -grid.limit, grid.limit) + grid.limit) / (2.0 * grid.limit)
    return shares * (protocol.mechanism.levels - 1)


def resolution(lattice: RoundLattice) -> float:
    """How far the codec may move a point."""
    return lattice.slack(1) * lattice.protocol.scale / lattice.step


protocols = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: f"d={protocol.dim}")


@protocols
@pytest.mark.parametrize("length", [0.0, 0.3, 7.0])
def test_points_are_the_encoders(protocol: Protocol, length: float) -> None:
    vector = np.random.default_rng(4).normal(size=protocol.dim)
    vector *= length * protocol.clip_norm / np.linalg.norm(vector)
    lattice = RoundLattice(protocol, 6)
    np.testing.assert_allclose(lattice.points(vector), encoders_points(protocol, vector), atol=resolution(lattice))


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 8, 12, 16, 17, 23, 32, 33, 100, 255, 256, 257, 700, 1024, 1500])
@pytest.mark.parametrize(("seed", "round"), [(0, 0), (9, 6)])
def test_the_auditors_own_rotation_is_the_codecs(dim: int, seed: int, round: int) -> None:
    protocol = Protocol.rotated_binomial(clients=3, dim=dim, clip_norm=1.0, levels=3, trials=5, rotation_seed=seed)
    lattice = RoundLattice(protocol, round)
    signs = rotate.signs(dim, seed, round)
    found = np.stack([rotate.forward(row, signs) for row in np.eye(dim, dtype=np.float32)])
    matrix = lattice._rotation
    # Orthogonal to the last digits of float64, and the codec's to those of float32.
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-13)
    np.testing.assert_allclose(matrix, found, atol=1e-6)
    vector = np.random.default_rng(dim).normal(size=dim)
    norm = float(np.linalg.norm(vector))
    np.testing.assert_allclose(vector @ matrix, rotate.forward(vector, signs), atol=1e-6 * norm)
    back = rotate.backward(vector.astype(np.float32), signs)
    np.testing.assert_allclose(lattice.unrotated(vector), back, atol=1e-6 * norm)


def test_another_round_has_another_rotation() -> None:
    assert not np.allclose(RoundLattice(PROTOCOLS[0], 6)._rotation, RoundLattice(PROTOCOLS[0], 7)._rotation)
    np.testing.assert_array_equal(RoundLattice(PROTOCOLS[3], 6)._rotation, np.eye(6))


@protocols
def test_unrotated(protocol: Protocol) -> None:
    lattice = RoundLattice(protocol, 6)
    wanted = np.full(protocol.dim, 0.1 * min(reach(protocol), protocol.clip_norm / protocol.dim))
    points = lattice.points(lattice.unrotated(wanted))
    np.testing.assert_allclose(points * lattice.step - reach(protocol), wanted, atol=1e-6 * reach(protocol))


@protocols
def test_sums_come_back_from_the_mean(protocol: Protocol) -> None:
    aggregator = Aggregator(protocol, 6)
    for i in range(3):
        aggregator.add(protocol.encode(np.full(protocol.dim, 0.1 * i * protocol.clip_norm), 6))
    sums = RoundLattice(protocol, 6).sums(aggregator.mean()[None], 3)
    np.testing.assert_allclose(sums[0], aggregator.sums, atol=0.01)


@pytest.mark.parametrize("case", [c for c in all_cases() if not c.claimed], ids=lambda case: case.name)
@pytest.mark.usefixtures("fixed_seed")
def test_the_middle_is_where_the_wires_integers_lie(case: Case) -> None:
    """Both the auditor's, by the exact law, and the one that decoding subtracts."""
    protocol = replace(case.protocol, modulus=None, promise=None)
    lattice, zero = RoundLattice(protocol, 6), np.zeros(protocol.dim)
    integers = np.array([pipeline.integers(protocol, zero, 6) for _ in range(800)])
    chance = 6.5 * math.sqrt(SumLaw(protocol, [(lattice.points(zero), 1)]).variance[0] / integers.size)
    # Half an integer is what a fault would be off by.
    assert chance < 0.3
    assert abs(integers.mean() - lattice.middle(1)) < chance
    assert abs(integers.mean() - protocol.mechanism.centre) < chance
    assert abs(lattice.middle(3) - 3 * protocol.mechanism.centre) < 1e-6


@protocols
@pytest.mark.parametrize("adjacency", Adjacency)
def test_the_corner_is_as_far_as_neighbours_can_be(protocol: Protocol, adjacency: Adjacency) -> None:
    lattice = RoundLattice(protocol, 6)
    farthest = protocol.mechanism.sensitivity(dim=protocol.dim, clip_norm=protocol.clip_norm, adjacency=adjacency)
    # Units of the law in a level.
    unit = protocol.mechanism.extent.reach(Adjacency.REPLACE_ONE) / (protocol.mechanism.levels - 1)
    distances = {
        canary.name: unit * float(np.linalg.norm(lattice.points(canary.one) - lattice.points(canary.zero)))
        for canary in canaries_of(lattice, adjacency)
    }
    assert max(distances.values()) == pytest.approx(farthest, rel=1e-5)
    assert len(distances) == (4 if protocol.rotate else 2)
    assert distances["corner after rotation" if protocol.rotate else "spread"] == pytest.approx(farthest, rel=1e-5)


@protocols
def test_canaries_are_too_long(protocol: Protocol) -> None:
    for canary in canaries_of(RoundLattice(protocol, 6), Adjacency.REPLACE_ONE):
        assert np.linalg.norm(canary.one) == pytest.approx(8.0 * protocol.clip_norm, rel=1e-5)
        np.testing.assert_array_equal(canary.zero, -canary.one)


def fractions(protocol: Protocol, vector: np.ndarray) -> np.ndarray:
    points = RoundLattice(protocol, 6).points(vector)
    return np.abs(points - np.rint(points))


@protocols
def test_others_rest_on_a_level_if_there_is_one(protocol: Protocol) -> None:
    lattice = RoundLattice(protocol, 6)
    vector = resting(lattice)
    if protocol.mechanism.levels == 2 and np.sqrt(protocol.dim) * reach(protocol) > protocol.clip_norm:
        # The level is out of reach: towards it, and too long.
        assert np.linalg.norm(vector) == pytest.approx(8.0 * protocol.clip_norm, rel=1e-5)
        points = encoders_points(protocol, vector)
        assert points.max() < 0.5
        assert np.ptp(points) < 1e-3
    else:
        assert np.linalg.norm(vector) <= protocol.clip_norm
        assert fractions(protocol, vector).max() < 1e-3


@protocols
def test_rounding_is_looked_at_between_levels(protocol: Protocol) -> None:
    vector = rounded(RoundLattice(protocol, 6))
    assert np.linalg.norm(vector) <= 0.5 * protocol.clip_norm * (1.0 + 1e-6)
    assert fractions(protocol, vector).min() > 0.2


@protocols
def test_peculiar_vectors_are_encoded_where_the_auditor_expects_them(protocol: Protocol) -> None:
    lattice = RoundLattice(protocol, 6)
    for name, vector in peculiar(lattice).items():
        points = encoders_points(protocol, vector)
        np.testing.assert_allclose(lattice.points(vector), points, atol=resolution(lattice), err_msg=name)


def test_peculiar_vectors_are_what_they_are_called() -> None:
    vectors = peculiar(RoundLattice(PROTOCOLS[0], 6))
    assert not vectors["zero"].any()
    assert np.linalg.norm(vectors["constant, of the largest norm"]) == pytest.approx(PROTOCOLS[0].clip_norm)
    assert np.ptp(vectors["constant, of the largest norm"]) == 0.0
    assert np.count_nonzero(vectors["one-hot"]) == 1
    short = peculiar(RoundLattice(PROTOCOLS[2], 6))["one-hot after rotation"]
    assert np.linalg.norm(short) == pytest.approx(0.08)
    assert 0.0 < np.abs(vectors["subnormal"]).max() < np.finfo(np.float64).smallest_normal
    assert np.isfinite(vectors["huge"].astype(np.float32)).all()
    assert np.linalg.norm(vectors["huge"]) ** 2 > np.finfo(np.float32).max
    assert vectors["single precision"].dtype == np.float32


@protocols
@pytest.mark.parametrize("share", [1.0, 1.3, 2.0**0.5, 2.0])
def test_canaries_keep_a_stated_distance(protocol: Protocol, share: float) -> None:
    distance = share * protocol.clip_norm
    stated = replace(protocol, replace_one_distance=distance, distance_reason="why")
    for canary in canaries_of(RoundLattice(stated, 6), Adjacency.REPLACE_ONE):
        clipped = [
            vector * min(1.0, protocol.clip_norm / max(float(np.linalg.norm(vector)), 1e-300))
            for vector in (canary.zero, canary.one)
        ]
        # Always as far apart as two clients can be, and never further.
        assert np.linalg.norm(clipped[0] - clipped[1]) == pytest.approx(distance, rel=1e-5)
    for mine, usual in zip(
        canaries_of(RoundLattice(stated, 6), Adjacency.ZERO_OUT),
        canaries_of(RoundLattice(protocol, 6), Adjacency.ZERO_OUT),
        strict=True,
    ):
        np.testing.assert_array_equal([mine.zero, mine.one], [usual.zero, usual.one])
