"""The C++ kernels against their NumPy twins, value for value, at the SIMD level this process runs.

`test_levels.py` runs this file again at every other level the processor has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.codec import clip, noise, pack, quantize, rotate
from cpsgd.codec._kernels import _native, reference
from cpsgd.randomness import Keystream

# Around every boundary of the blocking: lanes, tiles, leaves, powers of two.
DIMENSIONS = [
    1,
    2,
    3,
    5,
    8,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    100,
    255,
    256,
    257,
    1000,
    4095,
    4096,
    4097,
    10_000,
    2**15 + 1,
    51_370,
]


def vector(dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([dim, seed]).standard_normal(dim).astype(np.float32)


def keystream(size: int, name: int = 0) -> np.ndarray:
    return Keystream(bytes([name] * 16)).take(size)


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norm_squared_is_the_same(dim: int, dtype: type[np.float32] | type[np.float64]) -> None:
    x = vector(dim).astype(dtype)
    assert _native.norm_squared(x) == reference.norm_squared(x)


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("levels", [2, 3, 300])
def test_grid_norm_is_the_norm_of_the_grid_point(dim: int, levels: int) -> None:
    bits = quantize.fraction_bits(levels)
    y = vector(dim) * np.float32(20_000)
    grid = reference.to_grid(y, levels, bits)
    assert _native.grid_norm_squared(y, quantize.coordinate_limit(levels)) == reference.norm_squared(
        grid.astype(np.float64)
    )


@pytest.mark.parametrize("dim", [*DIMENSIONS, 2**16, 2**17, 2**18 + 12345])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rotation_gives_the_same_bits(dim: int, dtype: type[np.float32] | type[np.float64]) -> None:
    x = vector(dim).astype(dtype)
    signs = rotate.signs(dim, 5, 9)
    forward = rotate.forward(x, signs, 0.37)
    np.testing.assert_array_equal(forward, reference.rotate_forward(x, 0.37, signs))
    np.testing.assert_array_equal(rotate.backward(forward, signs), reference.rotate_backward(forward, signs))


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("levels", [2, 3, 17, 65_536, 65_537, 2**20, 2**24])
def test_quantize_is_the_same(dim: int, levels: int) -> None:
    bits = quantize.fraction_bits(levels)
    # Some coordinates inside the range, some beyond it, some on its ends.
    y = vector(dim) * np.float32(quantize.coordinate_limit(levels))
    y[::7] = np.float32(quantize.coordinate_limit(levels))
    words = keystream(4 * dim)
    values = quantize.forward(y, levels, words)
    np.testing.assert_array_equal(values, reference.quantize(y, words, levels, bits))
    assert int(values.max()) <= levels - 1


@pytest.mark.parametrize("trials", [0, 1, 14, 16, 17, 47, 48, 49, 100, 256])
@pytest.mark.parametrize("count", [1, 3, 1000, 1024, 2500])
def test_coins_are_the_same(trials: int, count: int) -> None:
    words = keystream(count * noise.keystream_bytes(trials, 0.5))
    values = noise.forward(np.zeros(count, np.uint32), trials, 0.5, words)
    np.testing.assert_array_equal(values, reference.coins(count, trials, words))


@pytest.mark.parametrize(
    ("trials", "p"), [(1, 0.3), (2, 0.9), (14, 0.25), (257, 0.5), (1000, 0.01), (3, 1e-9), (5000, 0.5)]
)
@pytest.mark.parametrize("count", [1, 333, 1100])
def test_inversion_is_the_same(trials: int, p: float, count: int) -> None:
    table = noise.table(trials, p)
    words = keystream(count * noise.keystream_bytes(trials, p))
    values = noise.forward(np.zeros(count, np.uint32), trials, p, words)
    np.testing.assert_array_equal(values, reference.inverted(count, words, table.high, table.low, table.base))


def test_inversion_at_the_thresholds_themselves() -> None:
    table = noise.table(20, 0.3)
    halves = np.stack([table.low, table.high], axis=1)
    below = halves.copy()
    below[:, 0] -= np.uint64(1)  # wraps for a low half of 0, which would be a smaller number still
    count = 2 * len(halves)
    words = np.concatenate([np.zeros(4 * count, np.uint8), np.concatenate([halves, below]).reshape(-1).view(np.uint8)])
    values = noise.forward(np.zeros(count, np.uint32), 20, 0.3, words)
    np.testing.assert_array_equal(values, reference.inverted(count, words, table.high, table.low, table.base))
    np.testing.assert_array_equal(values[: len(halves)], table.base + 1 + np.arange(len(halves)))


# Around changes of the number of steps, of blocks of sixteen and (a last step of more than 4,096) of pages of them.
@pytest.mark.parametrize(
    "size", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 255, 256, 257, 1000, 2048, 4095, 4096, 8190, 8193, 17_000]
)
def test_inversion_with_tables_of_every_size(size: int) -> None:
    random = np.random.default_rng(size)
    # As in true tables there are small thresholds and large ones, close to each other and to the ends, and equal ones.
    numbers = [int.from_bytes(random.bytes(16), "little") >> int(random.integers(0, 128)) for _ in range(size)]
    thresholds = sorted(2**128 - 1 - number if random.random() < 0.5 else number for number in numbers)
    high, low = (np.array([t >> shift & 2**64 - 1 for t in thresholds], np.uint64) for shift in (64, 0))
    near = [thresholds[i] + int(random.integers(-1, 2)) for i in random.integers(0, size, 100)]
    draws = [0, 2**128 - 1, *(number % 2**128 for number in near)]
    draws += [int.from_bytes(random.bytes(16), "little") for _ in range(30)]
    words = np.frombuffer(bytes(4 * len(draws)) + b"".join(draw.to_bytes(16, "little") for draw in draws), np.uint8)
    values = np.empty(len(draws), np.uint32)
    lowest = np.full(len(draws), -quantize.coordinate_limit(2), np.float32)
    _native.Rounder(2, quantize.fraction_bits(2), size + 5, high, low, 5).values(lowest, words, values)
    np.testing.assert_array_equal(values, reference.inverted(len(draws), words, high, low, 5))
    assert values[1] == 5 + size


RADICES = st.integers(1, 31).map(lambda bits: 2**bits) | st.integers(2, 70_000) | st.integers(70_001, 2**32 - 1)


@settings(max_examples=500, deadline=None)
@given(radix=RADICES, count=st.integers(1, 2500), seed=st.integers(0, 2**32))
def test_packing_is_the_same(radix: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, radix, count, dtype=np.uint32)
    arguments = pack.grouping(radix).arguments(count)
    payload = np.frombuffer(pack.forward(values, radix), np.uint8)
    np.testing.assert_array_equal(payload, reference.pack(values, *arguments))
    np.testing.assert_array_equal(pack.backward(payload, count, radix), values)
    np.testing.assert_array_equal(reference.unpack(payload, count, *arguments), values)
    for dtype in (np.uint32, np.uint64):
        sums = np.full(count, 7, dtype=dtype)
        _native.add_packed(payload, *arguments, sums)
        np.testing.assert_array_equal(sums, values.astype(np.uint64) + np.uint64(7))


def test_clip_scales_in_the_precision_of_its_input() -> None:
    for dtype in (np.float32, np.float64):
        x = vector(1000).astype(dtype)
        np.testing.assert_array_equal(clip.forward(x, 1.0, 3.0), reference.scale(x, clip.factor(x, 1.0) * 3.0))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 3071, 3072, 3073, 10_000])
def test_checksum_is_crc32c(size: int) -> None:
    data = keystream(size)
    state = 0xFFFFFFFF
    for byte in data.tolist():
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    assert _native.crc32c(data) == state ^ 0xFFFFFFFF
    assert _native.crc32c(data[size // 3 :], _native.crc32c(data[: size // 3])) == _native.crc32c(data)


def test_checksum_check_value() -> None:
    # The check value of CRC-32C, e.g. in RFC 3720's catalogue.
    assert _native.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.scale(np.zeros(3, np.float32), 1.0, np.zeros(4, np.float32)),
        lambda: _native.rotate_forward(np.zeros(64, np.float32), 1.0, np.zeros(7, np.uint8), np.zeros(64, np.float32)),
        lambda: _native.rotate_backward(np.zeros(65, np.float32), np.zeros(8, np.uint8)),
        lambda: _native.unpack(np.zeros(3, np.uint8), 16, 1, 4, 0, np.zeros(8, np.uint32)),
        lambda: _native.add_packed(np.zeros(5, np.uint8), 16, 1, 4, 0, np.zeros(8, np.uint32)),
        lambda: _native.pack(np.zeros(8, np.uint32), 1, 1, 4, 0, np.zeros(4, np.uint8)),
        lambda: _native.find_out_of_range(np.zeros(3, np.uint8), 16, 1, 4, 0, 16, 8),
        # So many values that the number of their bits is a multiple of 2^64.
        lambda: _native.find_out_of_range(np.zeros(0, np.uint8), 256, 1, 8, 0, 16, 2**61),
        lambda: _native.Rounder(1, 16, 0, np.zeros(0, np.uint64), np.zeros(0, np.uint64), 0),
        lambda: _native.Rounder(2, 16, 9000, np.zeros(0, np.uint64), np.zeros(0, np.uint64), 0),
        lambda: _native.Rounder(2, 16, 4, np.zeros(5, np.uint64), np.zeros(5, np.uint64), 0),
        lambda: noise.rounder(2, 17, 0.5).values(
            np.zeros(8, np.float32), np.zeros(63, np.uint8), np.zeros(8, np.uint32)
        ),
        lambda: noise.rounder(2, 17, 0.5).packed(
            np.zeros(8, np.float32), np.zeros(64, np.uint8), 16, 1, 4, 0, np.zeros(4, np.uint8)
        ),
    ],
)
def test_wrong_sizes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()
