from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from cpsgd import Protocol
from cpsgd.codec import clip, pack, pipeline, rotate, wire
from cpsgd.codec._kernels import numpy_twin
from cpsgd.codec.clip import Grid
from cpsgd.errors import NonFiniteError, ParameterError, VectorError
from cpsgd.mechanisms import binomial
from cpsgd.randomness import Keystream


def grid_of(protocol: Protocol) -> Grid:
    grid = protocol.mechanism.grid
    assert grid is not None
    return grid


def make(dim: int, levels: int = 2, trials: int = 14, p: float = 0.5, rotated: bool = True, **more: int) -> Protocol:
    build = Protocol.rotated_binomial if rotated else Protocol.binomial
    return build(clients=100, dim=dim, clip_norm=1.0, levels=levels, trials=trials, p=p, **more)


def gaussian_vector(dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([dim, seed]).standard_normal(dim)


CASES = [
    (1, 2, 14, 0.5, True),
    (7, 3, 0, 0.5, False),
    (1000, 2, 14, 0.5, True),
    (5000, 16, 100, 0.5, True),
    (20_000, 5, 60, 0.3, True),
    (51_370, 2, 14, 0.5, True),
    (70_000, 3, 200, 0.5, False),
]


@pytest.fixture
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less keystream at a time, so that a vector of moderate length takes several blocks."""
    monkeypatch.setattr(pipeline, "_BLOCK_BYTES", 1 << 16)
    pipeline._stages.cache_clear()
    yield
    pipeline._stages.cache_clear()


@pytest.mark.usefixtures("many_blocks")
@pytest.mark.parametrize(("dim", "levels", "trials", "p", "rotated"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fused_path_equals_the_stages_in_numpy(
    dim: int, levels: int, trials: int, p: float, rotated: bool, dtype: type[np.floating]
) -> None:
    protocol = make(dim, levels, trials, p, rotated)
    x = gaussian_vector(dim).astype(dtype)
    message = pipeline.encode(protocol, x, 6, Keystream(bytes(16)))

    lattice = grid_of(protocol)
    factor = clip.factor(x, 1.0) * lattice.unit
    grid = np.empty(dim, np.float32)
    if rotated:
        numpy_twin.rotate_forward(x, factor, rotate.signs(dim, 0, 6), grid)
    else:
        numpy_twin.scale(x, factor, grid)
    table = binomial.table(trials, p)
    kernel = numpy_twin.Rounder(levels, lattice.fraction_bits, trials, table.high, table.low, table.base)
    stages = pipeline._stages(protocol)
    stream = Keystream(bytes(16))
    values = []
    for start in range(0, dim, stages.block):
        block = grid[start : start + stages.block]
        words = stream.take(block.size * protocol.mechanism.keystream_bytes)
        values.append(np.empty(block.size, np.uint32))
        kernel.values(block, words, values[-1])
    expected = np.concatenate(values)
    np.testing.assert_array_equal(pack.backward(wire.read(message).payload, dim, protocol.radix), expected)


@pytest.mark.parametrize(("dim", "levels", "trials", "p", "rotated"), CASES)
def test_the_grid_point_is_within_the_clip_norm(dim: int, levels: int, trials: int, p: float, rotated: bool) -> None:
    # Exact in integers: ‖v‖ <= 2^F D/s. Vectors far too long, just too long and just short enough.
    protocol = make(dim, levels, trials, p, rotated)
    x = gaussian_vector(dim)
    for length in (1e30, 5.0, 1.0 + 1e-7, 1.0, 1.0 - 1e-7):
        grid = pipeline.to_grid(protocol, x * (length / np.linalg.norm(x)), 1)
        lattice = grid_of(protocol)
        point = numpy_twin.grid_points(grid, lattice.limit).astype(np.int64).astype(object)
        limit = 2.0**lattice.fraction_bits * protocol.clip_norm / protocol.scale
        assert int((point**2).sum()) <= limit**2
    if rotated and dim > 100:  # and the bound is not met by throwing the vector away
        assert float((point**2).sum()) ** 0.5 == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("position", [0, 17, 999])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_vectors_are_refused(position: int, bad: float) -> None:
    for protocol in (
        make(1000),
        make(1000, rotated=False),
        Protocol.gaussian(clients=1, dim=1000, clip_norm=1, sigma=1),
    ):
        x = np.zeros(1000, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteError) as caught:
            protocol.encode(x, 0)
        assert caught.value.coordinate == position


@pytest.mark.parametrize("bad", [np.zeros(9), np.zeros((10, 1)), np.zeros(()), ["a"] * 10, np.zeros(10, complex)])
def test_wrong_vectors_are_refused(bad: object) -> None:
    with pytest.raises(VectorError):
        make(10).encode(bad, 0)


def test_masked_and_ragged_vectors_are_refused() -> None:
    with pytest.raises(VectorError, match="masked"):
        make(3).encode(np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]), 0)
    with pytest.raises(VectorError, match="lengths"):
        make(2).encode([[1.0], [1.0, 2.0]], 0)


def test_a_misaligned_vector_is_copied() -> None:
    protocol = make(100, levels=1000, trials=0)
    x = gaussian_vector(100).astype(np.float32)
    misaligned = np.frombuffer(b"-" + x.tobytes(), np.float32, 100, offset=1)
    assert pipeline.as_vector(misaligned, 100).flags.aligned
    np.testing.assert_array_equal(
        pipeline.to_grid(protocol, pipeline.as_vector(misaligned, 100), 0), pipeline.to_grid(protocol, x, 0)
    )


@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1", True])
def test_wrong_rounds_are_refused(bad: object) -> None:
    with pytest.raises(ParameterError, match="round"):
        make(10).encode(np.zeros(10), bad)


def test_vectors_of_other_types_and_layouts() -> None:
    protocol = make(6, levels=1000, trials=0)
    x = np.array([0.1, 0.2, -0.3, 0.0, 0.25, -0.5])
    expected = pipeline.to_grid(protocol, x, 0)
    matrix = np.zeros((6, 3))
    matrix[:, 1] = x
    for same in (list(x), matrix[:, 1], x[::-1][::-1], x.astype(">f8")):
        np.testing.assert_array_equal(pipeline.to_grid(protocol, pipeline.as_vector(same, 6), 0), expected)
    assert pipeline.as_vector(np.arange(6), 6).dtype == np.float64
    assert pipeline.as_vector(x.astype(np.float16), 6).dtype == np.float32


@pytest.mark.parametrize("size", [1e-19, 1e-5, 1e5, 1e19])
def test_any_unit_of_measurement_will_do(size: float) -> None:
    x = gaussian_vector(100)
    plain = Protocol.binomial(clients=1, dim=100, clip_norm=2.0, levels=100, trials=0)
    scaled = Protocol.binomial(clients=1, dim=100, clip_norm=2.0 * size, levels=100, trials=0)
    for dtype in (np.float32, np.float64):
        grid = pipeline.to_grid(scaled, (x * size).astype(dtype), 0)
        np.testing.assert_allclose(grid, pipeline.to_grid(plain, x.astype(dtype), 0), rtol=1e-5)


def test_huge_float32_vectors_are_clipped_not_lost() -> None:
    grid = pipeline.to_grid(make(4, levels=100, trials=0), np.full(4, 3e38, np.float32), 0)
    expected = pipeline.to_grid(make(4, levels=100, trials=0), np.full(4, 1.0), 0)
    np.testing.assert_allclose(grid, expected, rtol=1e-5)


def test_every_call_draws_fresh_noise() -> None:
    protocol = make(100)
    messages = [protocol.encode(np.zeros(100), 0) for _ in range(50)]
    assert len({message[64:] for message in messages}) == 50
    assert len({wire.read(message).message_id for message in messages}) == 50


@pytest.mark.parametrize("dim", [1, 1000, 2**20])
def test_a_message_is_nobody_elses_memory(dim: int) -> None:
    protocol, x = make(dim), np.ones(dim)
    first = protocol.encode(x, 0)
    before = bytearray(first)
    for _ in range(3):
        protocol.encode(-x, 0)
    assert first == before


def test_noise_and_ids_come_from_the_operating_system_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda size: bytes(range(size)))
    for protocol in (make(100), make(100, p=0.3), Protocol.gaussian(clients=1, dim=100, clip_norm=1.0, sigma=1.0)):
        first, second = (protocol.encode(np.ones(100), 0) for _ in range(2))
        assert first == second
        monkeypatch.setattr("os.urandom", lambda size: bytes(range(1, size + 1)))
        third = protocol.encode(np.ones(100), 0)
        assert third[64:] != first[64:]
        assert third[36:52] != first[36:52]
        monkeypatch.setattr("os.urandom", lambda size: bytes(range(size)))


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("dim", [2**16, 2**20, 10**6 + 1])
def test_memory_beside_the_output(dim: int, gaussian: bool) -> None:
    protocol = Protocol.gaussian(clients=1, dim=dim, clip_norm=1.0, sigma=1.0) if gaussian else make(dim)
    x = np.zeros(dim, np.float32)
    protocol.encode(x, 0)  # tables and signs are made once
    tracemalloc.start()
    try:
        message = protocol.encode(x, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - len(message) <= 1.5 * x.nbytes


def test_the_gaussian_protocol_adds_its_noise() -> None:
    dim, sigma = 200_000, 0.7
    protocol = Protocol.gaussian(clients=1, dim=dim, clip_norm=1.0, sigma=sigma)
    values = np.frombuffer(pipeline.encode(protocol, np.zeros(dim), 0, Keystream(bytes(16)))[64:], "<f4") / sigma
    # Kolmogorov–Smirnov at false-alarm 1e-7: √(ln(2/1e-7)/2) = 2.9.

    assert stats.kstest(values, "norm").statistic * dim**0.5 < 2.9
    assert stats.kstest(values * 1.03, "norm").statistic * dim**0.5 > 2.9


@pytest.mark.usefixtures("many_blocks")
@pytest.mark.parametrize(("dim", "levels", "trials", "p", "rotated"), CASES)
def test_integers_are_what_a_message_packs(dim: int, levels: int, trials: int, p: float, rotated: bool) -> None:
    protocol = make(dim, levels, trials, p, rotated)
    x = gaussian_vector(dim)
    message = pipeline.encode(protocol, x, 6, Keystream(bytes(16)))
    payload = np.frombuffer(message, dtype=np.uint8)[wire.HEADER_BYTES :]
    found = pipeline.integers(protocol, x, 6, Keystream(bytes(16)))
    np.testing.assert_array_equal(found, pack.backward(payload, dim, protocol.radix))


def test_integers_and_sums_refuse_what_they_cannot_hold() -> None:
    gaussian = Protocol.gaussian(clients=3, dim=2, clip_norm=1.0, sigma=1.0)
    sums = np.zeros(2, dtype=np.uint64)
    with pytest.raises(ParameterError, match="no integers"):
        gaussian.encode_integers([0.0, 0.0], round=0)
    with pytest.raises(ParameterError, match="no integers"):
        gaussian.decode_sum(sums, 1, round=0)
    protocol = make(2)
    for wrong in (sums[:1], sums.astype(np.int64)):
        with pytest.raises(VectorError, match="Expected 2 sums"):
            protocol.decode_sum(wrong, 1, round=0)
    with pytest.raises(ParameterError, match="count"):
        protocol.decode_sum(sums, 0, round=0)
