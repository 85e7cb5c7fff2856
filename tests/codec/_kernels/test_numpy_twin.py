"""The C++ kernels against their NumPy twin, value for value, at the SIMD level this process runs.

`test_levels.py` runs this file again at every other level the processor has.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.codec import clip, pack, rotate
from cpsgd.codec._kernels import _native, numpy_twin
from cpsgd.codec.clip import Grid
from cpsgd.codec.rounding import Table
from cpsgd.mechanisms import binomial, fine_gaussian
from cpsgd.randomness import Keystream

from ..stages import clipped, keystream_bytes, lowest, rounder  # noqa: TID252 - tests are no package

# Thresholds of three outcomes.
TWO = np.array([2**62, 2**63], np.uint64), np.zeros(2, np.uint64)
# Around every boundary of the blocking: lanes, tiles, leaves, powers of two.
DIMENSIONS = [
    *(1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 100, 255, 256, 257, 1000, 4095, 4096, 4097, 10_000, 2**15 + 1),
    51_370,
]


FINE = _native.FineGaussian(*TWO)


def saturated(
    *, keystream: int = 64, noise: int = 8, limit: int = 100, window: int = 24, bits: int = 51, values: int = 8
) -> None:
    """Rounds eight numbers with arrays of these sizes."""
    arrays = np.zeros(8, np.float32), np.zeros(keystream, np.uint8), np.zeros(noise, np.int64)
    _native.saturate(*arrays, limit, window, 14, bits, np.zeros(values, np.uint32))


def vector(dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([dim, seed]).standard_normal(dim).astype(np.float32)


def keystream(size: int, name: int = 0) -> np.ndarray:
    return Keystream(bytes([name] * 16)).take(size)


def grid_of(levels: int) -> Grid:
    return Grid.of_levels(levels, 1.0)


def written(call: Callable[..., None], *arguments: Any, size: int, dtype: type = np.float32) -> np.ndarray:
    """What a kernel writes to its last argument."""
    out: np.ndarray = np.zeros(size, dtype)
    call(*arguments, out)
    return out


def rounded_by(module: Any, y: np.ndarray, words: np.ndarray, levels: int, noise: tuple[Any, ...]) -> np.ndarray:
    """Values of a `Rounder` with this noise: trials, thresholds' halves and the first outcome."""
    kernel = module.Rounder(levels, grid_of(levels).fraction_bits, *noise)
    return written(kernel.values, y, words, size=y.size, dtype=np.uint32)


def noise_of(trials: int, p: float) -> tuple[Any, ...]:
    table = binomial.table(trials, p)
    return trials, table.high, table.low, table.base


def inverted(count: int, words: np.ndarray, high: np.ndarray, low: np.ndarray, base: int) -> np.ndarray:
    """By inversion as it is defined: base + the number of thresholds that a 128-bit number reaches."""
    halves = words[4 * count : 20 * count].copy().view("<u8").reshape(count, 2)
    thresholds = [int(upper) << 64 | int(lower) for upper, lower in zip(high, low, strict=True)]
    numbers = [int(upper) << 64 | int(lower) for lower, upper in halves]
    reached = [sum(number >= threshold for threshold in thresholds) for number in numbers]
    return np.array(reached, dtype=np.uint32) + np.uint32(base)


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1_000, 4_097, 2**32 + 5, 2**62, 2**63 - 1])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1_000])
def test_permutations_are_the_same(size: int, count: int) -> None:
    source = np.random.default_rng([size, count])
    numbers, keys = source.integers(0, size, count), source.integers(0, 2**64, 6, dtype=np.uint64)
    half = max(1, -(-(size - 1).bit_length() // 2))
    found = [np.full(count, -1), np.full(count, -1)]
    for module, own in zip((_native, numpy_twin), found, strict=True):
        module.permute(numbers, size, half, keys, own)
    np.testing.assert_array_equal(*found)
    assert count == 0 or 0 <= found[0].min() <= found[0].max() < size


@pytest.mark.parametrize(
    ("numbers", "size", "half"), [([5], 5, 2), ([-1], 5, 2), ([0], 17, 2), ([0], 0, 2), ([0], 5, 0), ([0], 5, 33)]
)
def test_permutations_of_what_is_not_there_are_refused(numbers: list[int], size: int, half: int) -> None:
    with pytest.raises((ValueError, TypeError)):
        _native.permute(np.array(numbers), size, half, np.zeros(6, np.uint64), np.zeros(1, np.int64))


def test_the_twin_has_every_kernel() -> None:
    def public(module: Any) -> set[str]:
        return {name for name in dir(module) if callable(getattr(module, name)) and not name.startswith("_")}

    assert public(_native) <= public(numpy_twin)
    assert public(_native.Rounder) <= public(numpy_twin.Rounder)
    assert public(_native.Flipper) <= public(numpy_twin.Flipper)
    assert public(_native.GaussianRounder) <= public(numpy_twin.GaussianRounder)
    assert public(_native.FineGaussian) <= public(numpy_twin.FineGaussian)
    assert public(_native.FinerGaussian) <= public(numpy_twin.FinerGaussian)


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norm_squared_is_the_same(dim: int, dtype: type[np.float32] | type[np.float64]) -> None:
    x = vector(dim).astype(dtype)
    assert _native.norm_squared(x) == numpy_twin.norm_squared(x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_norms_that_are_no_number_are_the_same(bad: float) -> None:
    x = np.array([1.0, bad])
    np.testing.assert_array_equal(numpy_twin.norm_squared(x), _native.norm_squared(x))
    y = np.array([np.nan, 1.0], np.float32)
    np.testing.assert_array_equal(numpy_twin.grid_norm_squared(y, 4.0), _native.grid_norm_squared(y, 4.0))


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("levels", [2, 3, 300])
def test_grid_norm_is_the_norm_of_the_grid_point(dim: int, levels: int) -> None:
    y = vector(dim) * np.float32(20_000)
    limit = grid_of(levels).limit
    found = _native.grid_norm_squared(y, limit)
    assert found == numpy_twin.grid_norm_squared(y, limit)
    assert found == numpy_twin.norm_squared(numpy_twin.grid_points(y, limit).astype(np.int64).astype(np.float64))


@pytest.mark.parametrize("dim", [*DIMENSIONS, 2**16, 2**17, 2**18 + 12345])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rotation_gives_the_same_bits(dim: int, dtype: type[np.float32] | type[np.float64]) -> None:
    x = vector(dim).astype(dtype)
    signs = rotate.signs(dim, 5, 9)
    forward = rotate.forward(x, signs, 0.37)
    np.testing.assert_array_equal(forward, written(numpy_twin.rotate_forward, x, 0.37, signs, size=dim))
    backward = forward.copy()
    numpy_twin.rotate_backward(backward, signs)
    np.testing.assert_array_equal(rotate.backward(forward, signs), backward)


@pytest.mark.parametrize("dim", [*DIMENSIONS, 2**13, 2**14 + 77, 2**16, 2**17 + 12345])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("factor", [30.0, 3e4])
def test_the_norm_of_a_rotation_is_that_of_its_grid_point(
    dim: int, dtype: type[np.float32] | type[np.float64], factor: float
) -> None:
    x, signs = vector(dim).astype(dtype), rotate.signs(dim, 5, 9)
    found, twin = np.empty((2, dim), np.float32)
    squared = _native.rotate_to_grid(x, factor, signs, 2.0**15, found)
    assert squared == numpy_twin.rotate_to_grid(x, factor, signs, 2.0**15, twin)
    np.testing.assert_array_equal(found, twin)
    np.testing.assert_array_equal(found, rotate.forward(x, signs, factor))


@pytest.mark.parametrize("dim", [2**13, 2**13 + 1, 3 * 2**13])
@pytest.mark.parametrize("size", [2.0**20, 2.0**23, 2.0**26, 2.0**30])
def test_the_norm_is_the_same_also_where_float64_rounds_its_sum(dim: int, size: float) -> None:
    # Around and beyond 2^53 the order of additions shows.
    x, signs = vector(dim), rotate.signs(dim, 1, 2)
    found, twin = np.empty((2, dim), np.float32)
    squared = _native.rotate_to_grid(x, size, signs, 2.0**31, found)
    assert squared == numpy_twin.rotate_to_grid(x, size, signs, 2.0**31, twin)
    np.testing.assert_array_equal(found, twin)


@pytest.mark.parametrize("dim", [100, 2**13, 2**13 + 1000])
def test_the_norm_of_a_rotation_that_is_no_number(dim: int) -> None:
    x, signs = vector(dim), rotate.signs(dim, 1, 2)
    x[-1] = np.nan
    for module in (_native, numpy_twin):
        assert np.isnan(module.rotate_to_grid(x, 1.0, signs, 2.0**15, np.empty(dim, np.float32)))


@pytest.mark.parametrize("dim", [*DIMENSIONS, 2**13, 2**14 + 77, 2**16, 2**17 + 12345])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_decoding_gives_the_same_bits(dim: int, dtype: type[np.uint32] | type[np.uint64]) -> None:
    sums = np.random.default_rng(dim).integers(0, np.iinfo(dtype).max, dim, dtype, endpoint=True)
    arguments = (sums, 0.375 * float(sums.max()), 1.7e-5, rotate.signs(dim, 3, 4))
    found = written(_native.centre_and_rotate, *arguments, size=dim)
    np.testing.assert_array_equal(found, written(numpy_twin.centre_and_rotate, *arguments, size=dim))
    plain = written(_native.centre, *arguments[:3], size=dim)
    np.testing.assert_array_equal(found, rotate.backward(plain, arguments[3]))


@pytest.mark.parametrize("dim", [2**13, 2**14 + 1, 2**16, 2**17 + 5])
def test_long_vectors_are_rotated_the_same_in_any_number_of_passes(dim: int) -> None:
    signs, x = rotate.signs(dim, 3, 4), vector(dim)
    sums = np.random.default_rng(dim).integers(0, 1000, dim, np.uint32)
    for name, arguments in (
        ("rotate_forward", (x, 1.3, signs)),
        ("rotate_to_grid", (x, 1e3, signs, 1500.0)),
        ("centre_and_rotate", (sums, 498.5, 0.37, signs)),
        ("centre_and_rotate", (sums, 499.0, 0.37, signs)),
    ):
        found, twin = (written(getattr(module, name), *arguments, size=dim) for module in (_native, numpy_twin))
        np.testing.assert_array_equal(found, twin)


@pytest.mark.parametrize("dim", [*DIMENSIONS, 2**20 - 1, 2**20, 10**7, 2**32 - 1])
def test_a_rotation_takes_as_many_signs(dim: int) -> None:
    assert _native.sign_bytes(dim) == numpy_twin.sign_bytes(dim)


@pytest.mark.parametrize("dim", DIMENSIONS)
@pytest.mark.parametrize("levels", [2, 3, 17, 65_536, 65_537, 2**20, 2**24])
def test_quantize_is_the_same(dim: int, levels: int) -> None:
    # Some coordinates inside the range, some beyond it, some on its ends.
    y = vector(dim) * np.float32(grid_of(levels).limit)
    y[::7] = np.float32(grid_of(levels).limit)
    words = keystream(4 * dim)
    values = rounded_by(_native, y, words, levels, noise_of(0, 0.5))
    np.testing.assert_array_equal(values, rounded_by(numpy_twin, y, words, levels, noise_of(0, 0.5)))
    assert int(values.max()) <= levels - 1


@pytest.mark.parametrize("trials", [0, 1, 14, 16, 17, 47, 48, 49, 100, 256])
@pytest.mark.parametrize("count", [1, 3, 1000, 1024, 2500])
def test_coins_are_the_same(trials: int, count: int) -> None:
    words = keystream(count * keystream_bytes(trials, 0.5))
    values = rounded_by(_native, lowest(count), words, 2, noise_of(trials, 0.5))
    np.testing.assert_array_equal(values, rounded_by(numpy_twin, lowest(count), words, 2, noise_of(trials, 0.5)))


@pytest.mark.parametrize(
    ("trials", "p"), [(1, 0.3), (2, 0.9), (14, 0.25), (257, 0.5), (1000, 0.01), (3, 1e-9), (5000, 0.5)]
)
@pytest.mark.parametrize("count", [1, 333, 1100])
def test_inversion_is_the_same(trials: int, p: float, count: int) -> None:
    table = binomial.table(trials, p)
    words = keystream(count * keystream_bytes(trials, p))
    expected = inverted(count, words, table.high, table.low, table.base)
    for module in (_native, numpy_twin):
        np.testing.assert_array_equal(rounded_by(module, lowest(count), words, 2, noise_of(trials, p)), expected)


@pytest.mark.parametrize(("levels", "trials", "p"), [(2, 14, 0.5), (5, 100, 0.5), (9, 20, 0.3), (70_000, 400, 0.5)])
@pytest.mark.parametrize("count", [1, 100, 1024, 5000])
def test_packed_values_are_the_same(levels: int, trials: int, p: float, count: int) -> None:
    y = vector(count) * np.float32(grid_of(levels).limit)
    words = keystream(count * keystream_bytes(trials, p))
    radix = levels + trials
    grouping = pack.grouping(radix).arguments(count)
    payloads = []
    for module in (_native, numpy_twin):
        kernel = module.Rounder(levels, grid_of(levels).fraction_bits, *noise_of(trials, p))
        size = pack.payload_bytes(count, radix)
        payloads.append(written(kernel.packed, y, words, *grouping, size=size, dtype=np.uint8))
        values = rounded_by(module, y, words, levels, noise_of(trials, p))
        np.testing.assert_array_equal(pack.backward(payloads[-1], count, radix), values)
    np.testing.assert_array_equal(*payloads)


@pytest.mark.parametrize("count", DIMENSIONS)
@pytest.mark.parametrize(("limit", "coins"), [(7864, 1), (1, 1), (2**15, 1), (20_000, 3), (2**15 - 1, 16)])
def test_biased_coins_are_the_same(count: int, limit: int, coins: int) -> None:
    # Some grid points inside the range, some beyond it, some on its ends, some halfway between two.
    y = vector(count) * np.float32(limit)
    y[::7], y[3::7], y[5::7] = limit, -limit, np.rint(y[5::7]) + np.float32(0.5)
    words = keystream(2 * coins * count)
    planes = words.view("<u2").reshape(coins, count).astype(np.int64)
    heads = (planes < 2**15 + np.rint(np.clip(y, -limit, limit)).astype(np.int64)).sum(axis=0)
    for module in (_native, numpy_twin):
        flipper = module.Flipper(limit, coins)
        np.testing.assert_array_equal(written(flipper.values, y, words, size=count, dtype=np.uint32), heads)
        for radix in (coins + 1, coins + 2, 1000):
            size, grouping = pack.payload_bytes(count, radix), pack.grouping(radix).arguments(count)
            payload = written(flipper.packed, y, words, *grouping, size=size, dtype=np.uint8)
            assert payload.tobytes() == pack.forward(heads.astype(np.uint32), radix)


@pytest.mark.parametrize("count", DIMENSIONS)
@pytest.mark.parametrize(
    ("limit", "window", "bits", "sigma"),
    [(700, 24, 11, 1.5), (1, 33, 9, 4.0), (2**24, 2**17, 1, 2047.0), (1, 2**17, 0, 2100.0)],
)
def test_gaussian_noise_before_rounding_is_the_same(
    count: int, limit: int, window: int, bits: int, sigma: float
) -> None:
    table = fine_gaussian.table(sigma * 2**bits / 256, 60)
    y = vector(count) * np.float32(limit)
    y[::7], y[3::7], y[5::7] = limit, -limit, np.rint(y[5::7]) + np.float32(0.5)
    words = keystream((16 + 28) * count)
    # The smallest and the largest noise there is.
    words[:16], words[16 * count - 16 : 16 * count] = 0, 255
    halves = words[: 16 * count].view("<u8").reshape(count, 2)
    numbers = [int(upper) << 64 | int(lower) for lower, upper in halves]
    thresholds = [int(upper) << 64 | int(lower) for upper, lower in zip(table.high, table.low, strict=True)]
    cells = np.array([bisect.bisect_right(thresholds, number) for number in numbers], dtype=np.int64) - 60
    noise = 256 * cells + words[16 * count :].reshape(28, count).sum(axis=0, dtype=np.int64) - 14 * 255
    points = np.rint(np.clip(y, -limit, limit)).astype(np.int64)
    expected = np.clip(np.floor((points + noise) / 2**bits + window / 2), 0, window - 1).astype(np.uint32)
    for module in (_native, numpy_twin):
        rounder = module.GaussianRounder(limit, window, bits, table.high, table.low)
        np.testing.assert_array_equal(written(rounder.values, y, words, size=count, dtype=np.uint32), expected)
        for radix in (window, 2 * window + 1):
            size, grouping = pack.payload_bytes(count, radix), pack.grouping(radix).arguments(count)
            payload = written(rounder.packed, y, words, *grouping, size=size, dtype=np.uint8)
            assert payload.tobytes() == pack.forward(expected, radix)


def fine_draws(table: Table, words: np.ndarray, count: int) -> list[int]:
    """Draws of a block in plain integers, as docs/proofs/rounded-correlated.md has them."""
    thresholds = [int(upper) << 64 | int(lower) for upper, lower in zip(table.high, table.low, strict=True)]
    planes, read, found = words[1024:].reshape(-1, 35, 64).swapaxes(0, 1).reshape(35, -1).astype(int), 0, {}
    for place, (first, second, third, *uniforms) in enumerate(planes.T.tolist()):
        lowest = (first << 16 | second << 8 | third & 254) << 104
        draw = bisect.bisect_right(thresholds, lowest | (1 << 105) - 1)
        if bisect.bisect_left(thresholds, lowest) < draw:
            rest = int.from_bytes(words[16 * read : 16 * read + 16].tobytes(), "little") & (1 << 105) - 1
            draw, read = bisect.bisect_right(thresholds, lowest | rest), (read + 1) % 64
        draw, doubled_mean = -draw if third & 1 else draw, 0
        for numbers in (15, 8, 5, 4):
            draw = (draw << 8) + sum(uniforms[:numbers])
            uniforms, doubled_mean = uniforms[numbers:], (doubled_mean << 8) + 255 * numbers
        found[place // 64 * 64 + place % 64 // 2 + place % 2 * 32] = draw - doubled_mean // 2
    return [found[place] for place in range(count)]


def prefixed(words: np.ndarray, place: int, first: int) -> None:
    """Lets a draw's number begin with these 23 bits."""
    heads = words[1024:].reshape(-1, 35, 64)[place // 64, :3, place % 64]
    heads[:] = first >> 15, first >> 7 & 255, (first & 127) << 1 | heads[2] & 1


@pytest.mark.parametrize("count", [count for count in DIMENSIONS if count <= 4096])
@pytest.mark.parametrize(("ratio", "weight"), [(64.0, 1 << 14), (127.9, -8118), (90.0, 0)])
@pytest.mark.parametrize("untold", [0, 64, 65, 4096])
def test_refined_gaussian_noise_is_the_same(count: int, ratio: float, weight: int, untold: int) -> None:
    table = fine_gaussian.magnitudes(ratio, 15)
    width = -(-count // 64) * 64
    words = keystream(1024 + 35 * width)
    # Draws that begin as a threshold does, far out too, where many thresholds begin alike; and those just before it.
    prefixes = (table.high >> np.uint64(41)).tolist()
    for place in range(min(untold, width)):
        prefixed(words, place, prefixes[-1 - 7 * place % len(prefixes)])
    for place in range(untold, min(width, untold + 100)):
        prefixed(words, place, max(0, prefixes[11 * place % len(prefixes)] - 1))
    # Numbers beyond every threshold, and below the first; and some that are the last's or one less.
    words[:16], words[16:32] = 255, 0
    last = int(table.high[-1]) << 64 | int(table.low[-1])
    for number, rest in enumerate((last, last - 1)):
        words[32 + 16 * number : 48 + 16 * number] = np.frombuffer(rest.to_bytes(16, "little"), np.uint8)
    expected = np.array(fine_draws(table, words, count))
    before = np.random.default_rng(count).integers(-(2**61), 2**61, count)
    for module in (_native, numpy_twin):
        total = before.copy()
        module.FineGaussian(table.high, table.low).add(words, weight, total)
        np.testing.assert_array_equal(total, before + weight * expected)


def test_the_first_bits_of_a_fine_draw_decide_in_tables_of_every_size() -> None:
    """A full last block of a step has numbers behind it: those beyond all of its thresholds."""
    words, mean = np.zeros(1024 + 35 * 64, np.uint8), 255 * (15 << 24 | 8 << 16 | 5 << 8 | 4) // 2
    for size in range(2, 1 << 11):
        # Thresholds are even, and draws just behind the last 32 of them and some others.
        thresholds = 2 * np.sort(np.random.default_rng(size).choice(1 << 22, size, replace=False).astype(np.uint64))
        reached = np.append(np.arange(size - 31, size + 1), np.arange(1, 33) * size // 33).clip(1)
        draws = thresholds[reached - 1] + np.uint64(1)
        words[1024:1216] = np.concatenate(
            [draws >> np.uint64(15), draws >> np.uint64(7) & np.uint64(255), (draws & np.uint64(127)) << np.uint64(1)]
        )
        found = np.zeros(64, np.int64)
        _native.FineGaussian(thresholds << np.uint64(41), np.zeros(size, np.uint64)).add(words, 1, found)
        np.testing.assert_array_equal(found.reshape(2, 32).T.ravel() + mean >> 32, reached)


@pytest.mark.parametrize("rest", [0, 255])
def test_the_first_bits_of_a_fine_draw_decide_as_all_of_them_do(rest: int) -> None:
    """Every beginning there is, once, with the least and the largest rest: the law of |H| itself, in units of 2^-23."""
    table, heads = fine_gaussian.magnitudes(77.0, 15), np.arange(1 << 24, dtype=np.uint32)
    kernel, counts = _native.FineGaussian(table.high, table.low), np.zeros(2 * table.high.size + 1, np.int64)
    words, total = np.zeros(1024 + 35 * 4096, np.uint8), np.zeros(4096, np.int64)
    words[:1024] = rest
    planes, mean = words[1024:].reshape(64, 35, 64), 255 * (15 << 24 | 8 << 16 | 5 << 8 | 4) // 2
    for start in range(0, 1 << 24, 4096):
        part = heads[start : start + 4096].reshape(64, 64)
        planes[:, 0], planes[:, 1], planes[:, 2] = part >> 16, part >> 8 & 255, part & 255
        total[:] = 0
        kernel.add(words, 1, total)
        counts += np.bincount((total + mean >> 32) + table.high.size, minlength=counts.size)
    thresholds = [int(upper) << 64 | int(lower) for upper, lower in zip(table.high, table.low, strict=True)]
    fewer = [(1 << 23) - (threshold + ((1 << 105) - 1 if rest == 0 else 0) >> 105) for threshold in thresholds]
    magnitudes = -np.diff([1 << 23, *fewer, 0])
    middle = table.high.size
    assert counts[middle] == 2 * magnitudes[0]
    np.testing.assert_array_equal(counts[middle + 1 :], magnitudes[1:])
    np.testing.assert_array_equal(counts[middle - 1 :: -1], magnitudes[1:])


@pytest.mark.parametrize("count", [1, 64, 4096, 4097, 10_000])
def test_keystream_of_the_kernel_is_the_librarys(count: int) -> None:
    table = fine_gaussian.magnitudes(100.0, 15)
    kernel, keys = _native.FineGaussian(table.high, table.low), (b"k" * 16, bytes(range(16)))
    weights, found, expected = np.array([-3, 8118]), np.arange(count), np.arange(count)
    for key, weight in zip(keys, weights.tolist(), strict=True):
        stream = Keystream.in_gcm(key)
        for start in range(0, count, 4096):
            part = expected[start : start + 4096]
            kernel.add(stream.take(1024 + 35 * (-(-part.size // 64) * 64)), weight, part)
    if not kernel.ciphers():
        with pytest.raises(ValueError, match="no instructions"):
            kernel.expand(np.frombuffer(b"".join(keys), np.uint8), weights, found)
        return
    kernel.expand(np.frombuffer(b"".join(keys), np.uint8), weights, found)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", DIMENSIONS)
@pytest.mark.parametrize("ratio", [8.0, 15.0])
def test_noise_of_sums_is_the_same(count: int, ratio: float) -> None:
    table = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
    words = keystream(55 * count)
    # The smallest and the largest noise there is.
    numbers = words[: 16 * count].reshape(count, 16)
    planes = words[16 * count :].reshape(39, count)
    numbers[0], planes[:, 0], numbers[-1], planes[:, -1] = 0, 0, 255, 255
    cells = [int.from_bytes(number.tobytes(), "little") for number in numbers]
    thresholds = [int(high) << 64 | int(low) for high, low in zip(table.high, table.low, strict=True)]
    drawn = np.array([bisect.bisect_right(thresholds, cell) for cell in cells], np.int64) - len(thresholds) // 2
    bits = np.unpackbits(planes[38:], axis=0)
    expected = 512 * (256 * drawn + planes[:28].sum(axis=0, dtype=np.int64) - 3570)
    expected += 2 * planes[28:38].sum(axis=0, dtype=np.int64) - 2550 + bits.sum(axis=0, dtype=np.int64) - 4
    for module in (_native, numpy_twin):
        found = written(module.FinerGaussian(table.high, table.low).draw, words, size=count, dtype=np.int32)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", DIMENSIONS)
@pytest.mark.parametrize(
    ("limit", "window", "grid_bits", "bits"), [(700, 32, 14, 51), (2**20, 7, 14, 54), (1, 2**31, 0, 1), (90, 2, 5, 60)]
)
def test_noise_that_is_rounded_at_random_is_the_same(
    count: int, limit: int, window: int, grid_bits: int, bits: int
) -> None:
    y = vector(count) * np.float32(limit)
    y[::7], y[3::7], y[5::7] = limit, -limit, np.rint(y[5::7]) + np.float32(0.5)
    words = keystream(8 * count)
    words[:8], words[8 * count - 8 :] = 0, 255
    # Numbers in the window, and beyond it on either side.
    reach = min(2 * (window << bits), 2**60)
    noise = np.random.default_rng(count).integers(-reach, reach, count)
    coins = [int.from_bytes(words[8 * i : 8 * i + 8].tobytes(), "little") >> (64 - bits) for i in range(count)]
    points = np.rint(np.clip(y, -limit, limit)).astype(np.int64).tolist()
    middle = (window - 1) << (bits - 1)
    exact = [
        (point * 2 ** (bits - grid_bits) + each + coin + middle) >> bits
        for point, each, coin in zip(points, noise.tolist(), coins, strict=True)
    ]
    expected = [min(max(level, 0), window - 1) for level in exact]
    for module in (_native, numpy_twin):
        arguments = y, words, noise, limit, window, grid_bits, bits
        np.testing.assert_array_equal(written(module.saturate, *arguments, size=count, dtype=np.uint32), expected)


def test_a_coin_at_every_word_and_at_its_threshold() -> None:
    # Over all 2^16 words exactly 2^15 + g of them are heads.
    words = np.arange(2**16, dtype="<u2").view(np.uint8)
    for point in (-(2**15), -30_000, -1, 0, 1, 7_864, 2**15 - 1, 2**15):
        y = np.full(2**16, point, np.float32)
        for module in (_native, numpy_twin):
            heads = written(module.Flipper(2**15, 1).values, y, words, size=2**16, dtype=np.uint32)
            assert int(heads.sum()) == 2**15 + point
            assert np.all(heads[: 2**15 + point] == 1)


@pytest.mark.parametrize("count", DIMENSIONS)
@pytest.mark.parametrize("bound", [1, 655, 3276, 30_000, 43_690, 2**16 - 1])
def test_positions_of_small_words_are_the_same(count: int, bound: int) -> None:
    words = keystream(2 * count, name=3)
    words[: min(count, 6) // 2 * 2] = 0
    expected = np.flatnonzero(words.view("<u2") < bound) + 5
    for module in (_native, numpy_twin):
        positions = np.zeros(count, np.uint32)
        found = module.find_below(words, bound, 5, positions)
        np.testing.assert_array_equal(positions[:found], expected)


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 300), share=st.floats(0.0, 1.0), seed=st.integers(0, 2**32))
def test_signs_add_up_the_same(count: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    positions = np.flatnonzero(random.random(count) < share).astype(np.uint32)
    bits = random.integers(0, 2, positions.size)
    payload = np.packbits(bits.astype(np.uint8), bitorder="little")
    expected = random.integers(0, 100, count)
    start = expected.copy()
    expected += 1
    expected[positions] += 2 * bits - 1
    for module in (_native, numpy_twin):
        for dtype in (np.uint32, np.uint64):
            sums = start.astype(dtype)
            module.add_signs(payload, positions, sums)
            np.testing.assert_array_equal(sums, expected)


def test_inversion_at_the_thresholds_themselves() -> None:
    table = binomial.table(20, 0.3)
    halves = np.stack([table.low, table.high], axis=1)
    below = halves.copy()
    below[:, 0] -= np.uint64(1)  # wraps for a low half of 0, which would be a smaller number still
    count = 2 * len(halves)
    words = np.concatenate([np.zeros(4 * count, np.uint8), np.concatenate([halves, below]).reshape(-1).view(np.uint8)])
    expected = inverted(count, words, table.high, table.low, table.base)
    for module in (_native, numpy_twin):
        values = rounded_by(module, lowest(count), words, 2, noise_of(20, 0.3))
        np.testing.assert_array_equal(values, expected)
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
    expected = inverted(len(draws), words, high, low, 5)
    for module in (_native, numpy_twin):
        values = rounded_by(module, lowest(len(draws)), words, 2, (size + 5, high, low, 5))
        np.testing.assert_array_equal(values, expected)
        assert values[1] == 5 + size


RADICES = st.integers(1, 31).map(lambda bits: 2**bits) | st.integers(2, 70_000) | st.integers(70_001, 2**32 - 1)


@settings(max_examples=500, deadline=None)
@given(radix=RADICES, count=st.integers(1, 2500), seed=st.integers(0, 2**32))
def test_packing_is_the_same(radix: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, radix, count, dtype=np.uint32)
    arguments = pack.grouping(radix).arguments(count)
    payload = np.frombuffer(pack.forward(values, radix), np.uint8)
    twin = written(numpy_twin.pack, values, *arguments, size=payload.size, dtype=np.uint8)
    np.testing.assert_array_equal(payload, twin)
    np.testing.assert_array_equal(pack.backward(payload, count, radix), values)
    np.testing.assert_array_equal(written(numpy_twin.unpack, payload, *arguments, size=count, dtype=np.uint32), values)
    for module in (_native, numpy_twin):
        for dtype in (np.uint32, np.uint64):
            sums = np.full(count, 7, dtype=dtype)
            module.add_packed(payload, *arguments, sums)
            np.testing.assert_array_equal(sums, values.astype(np.uint64) + np.uint64(7))


@settings(max_examples=500, deadline=None)
@given(radix=RADICES, count=st.integers(1, 200), share=st.floats(0.0, 1.0), data=st.data())
def test_payloads_that_nobody_packs_are_read_the_same(
    radix: int, count: int, share: float, data: st.DataObject
) -> None:
    # Any bytes, hence also words that no digits make; padding is for another check.
    arguments = pack.grouping(radix).arguments(count)
    size, bits = pack.payload_bytes(count, radix), pack.grouping(radix).total_bits(count)
    payload = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    if bits % 8:
        payload[-1] &= (1 << bits % 8) - 1
    found, twin = (
        written(module.unpack, payload, *arguments, size=count, dtype=np.uint32) for module in (_native, numpy_twin)
    )
    np.testing.assert_array_equal(found, twin)
    for limit in (radix, max(1, round(share * radix))):
        outside = np.flatnonzero(found >= limit)
        expected = int(outside[0]) if outside.size else count
        for module in (_native, numpy_twin):
            assert module.find_out_of_range(payload, *arguments, limit, count) == expected


@pytest.mark.parametrize("radix", [3, 5, 6, 7, 100, 1000, 70_000, 2**32 - 1])
def test_the_first_word_that_no_digits_make_is_found(radix: int) -> None:
    grouping = pack.grouping(radix)
    for count in (3 * grouping.digits, 3 * grouping.digits + 1):
        arguments = grouping.arguments(count)
        for position in range(3):
            word = (1 << grouping.bits) - 1
            assert word >= radix**grouping.digits
            packed = (word << position * grouping.bits).to_bytes(pack.payload_bytes(count, radix), "little")
            payload = np.frombuffer(packed, np.uint8)
            for module in (_native, numpy_twin):
                first = module.find_out_of_range(payload, *arguments, radix, count)
                # The digits below the last are remainders, so the last of the group shows it.
                assert first == (position + 1) * grouping.digits - 1


@pytest.mark.parametrize("dim", [1, 15, 1000])
def test_noisy_means_are_the_same(dim: int) -> None:
    source = np.random.default_rng(dim)
    sums = np.append(source.normal(scale=1e3, size=dim), [0.125, 0.375, -1e300, 1e300, np.inf, -np.inf, np.nan])
    noise = source.integers(-(2**25), 2**25, sums.size, dtype=np.int32)
    found = [
        written(module.noisy_mean, sums, noise, 0.25, 3.0, 2.0**52, size=sums.size) for module in (_native, numpy_twin)
    ]
    np.testing.assert_array_equal(*found)
    # Halves are rounded to even, and what is not a number counts as zero.
    points = [0.0, 2.0, -(2.0**52), 2.0**52, 2.0**52, -(2.0**52), 0.0]
    exact = np.append(np.rint(sums[:dim] / 0.25), points) + noise
    np.testing.assert_array_equal(found[0], (exact * 0.25 / 3.0).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("dim", [1, 17, 1000, 4097])
def test_sums_are_centred_the_same(dtype: type[np.uint32] | type[np.uint64], dim: int) -> None:
    sums = np.random.default_rng(dim).integers(0, np.iinfo(dtype).max, dim, dtype=dtype, endpoint=True)
    for middle, factor in ((0.0, 1.0), (123_456.5, 0.37 / 3), (2.0**31, 1e-12), (-3.0, 0.7), (2.0**52 + 2.0, 0.7)):
        found, twin = (written(module.centre, sums, middle, factor, size=dim) for module in (_native, numpy_twin))
        np.testing.assert_array_equal(found, twin)


def test_clip_scales_in_the_precision_of_its_input() -> None:
    for dtype in (np.float32, np.float64):
        x = vector(1000).astype(dtype)
        twin = written(numpy_twin.scale, x, clip.factor(x, 1.0) * 3.0, size=x.size)
        np.testing.assert_array_equal(clipped(x, 1.0, 3.0), twin)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 3071, 3072, 3073, 10_000])
def test_checksum_is_crc32c(size: int) -> None:
    data = keystream(size)
    state = 0xFFFFFFFF
    for byte in data.tolist():
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    for module in (_native, numpy_twin):
        assert module.crc32c(data) == state ^ 0xFFFFFFFF
        assert module.crc32c(data[size // 3 :], module.crc32c(data[: size // 3])) == module.crc32c(data)


def test_checksum_check_value() -> None:
    # The check value of CRC-32C, e.g. in RFC 3720's catalogue.
    for module in (_native, numpy_twin):
        assert module.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.scale(np.zeros(3, np.float32), 1.0, np.zeros(4, np.float32)),
        lambda: _native.rotate_forward(np.zeros(64, np.float32), 1.0, np.zeros(7, np.uint8), np.zeros(64, np.float32)),
        lambda: _native.rotate_backward(np.zeros(65, np.float32), np.zeros(8, np.uint8)),
        lambda: _native.rotate_to_grid(
            np.zeros(64, np.float32), 1.0, np.zeros(7, np.uint8), 9.0, np.zeros(64, np.float32)
        ),
        lambda: _native.rotate_to_grid(
            np.zeros(64, np.float32), 1.0, np.zeros(8, np.uint8), 9.0, np.zeros(63, np.float32)
        ),
        lambda: _native.rotate_to_grid(
            np.zeros(0, np.float32), 1.0, np.zeros(8, np.uint8), 9.0, np.zeros(0, np.float32)
        ),
        lambda: _native.noisy_mean(np.ones(3), np.ones(2, np.int32), 1.0, 1.0, 9.0, np.ones(3, np.float32)),
        lambda: _native.noisy_mean(np.ones(3), np.ones(3, np.int32), 1.0, 1.0, 9.0, np.ones(4, np.float32)),
        lambda: _native.noisy_mean(np.ones(3), np.ones(3, np.int32), 1.0, 1.0, 2.0**53, np.ones(3, np.float32)),
        lambda: _native.centre_and_rotate(
            np.zeros(65, np.uint32), 1.0, 1.0, np.zeros(8, np.uint8), np.zeros(65, np.float32)
        ),
        lambda: _native.centre_and_rotate(
            np.zeros(64, np.uint64), 1.0, 1.0, np.zeros(8, np.uint8), np.zeros(65, np.float32)
        ),
        lambda: _native.centre_and_rotate(
            np.zeros(0, np.uint32), 1.0, 1.0, np.zeros(8, np.uint8), np.zeros(0, np.float32)
        ),
        lambda: _native.unpack(np.zeros(3, np.uint8), 16, 1, 4, 0, np.zeros(8, np.uint32)),
        lambda: _native.add_packed(np.zeros(5, np.uint8), 16, 1, 4, 0, np.zeros(8, np.uint32)),
        lambda: _native.pack(np.zeros(8, np.uint32), 1, 1, 4, 0, np.zeros(4, np.uint8)),
        lambda: _native.find_out_of_range(np.zeros(3, np.uint8), 16, 1, 4, 0, 16, 8),
        # So many values that the number of their bits is a multiple of 2^64.
        lambda: _native.find_out_of_range(np.zeros(0, np.uint8), 256, 1, 8, 0, 16, 2**61),
        lambda: _native.Rounder(1, 16, 0, np.zeros(0, np.uint64), np.zeros(0, np.uint64), 0),
        lambda: _native.Rounder(2, 16, 9000, np.zeros(0, np.uint64), np.zeros(0, np.uint64), 0),
        lambda: _native.Rounder(2, 16, 4, np.zeros(5, np.uint64), np.zeros(5, np.uint64), 0),
        lambda: _native.Flipper(0, 1),
        lambda: _native.Flipper(2**15 + 1, 1),
        lambda: _native.Flipper(100, 0),
        lambda: _native.Flipper(100, 4097),
        lambda: _native.Flipper(100, 3).values(np.zeros(8, np.float32), np.zeros(47, np.uint8), np.zeros(8, np.uint32)),
        lambda: _native.Flipper(100, 3).values(np.zeros(8, np.float32), np.zeros(48, np.uint8), np.zeros(7, np.uint32)),
        lambda: _native.Flipper(100, 3).packed(
            np.zeros(8, np.float32), np.zeros(48, np.uint8), 3, 1, 2, 0, np.zeros(2, np.uint8)
        ),
        lambda: _native.Flipper(100, 1).packed(
            np.zeros(9, np.float32), np.zeros(18, np.uint8), 2, 1, 1, 0, np.zeros(1, np.uint8)
        ),
        lambda: _native.GaussianRounder(0, 24, 11, *TWO),
        lambda: _native.GaussianRounder(2**24 + 1, 24, 11, *TWO),
        lambda: _native.GaussianRounder(100, 1, 11, *TWO),
        lambda: _native.GaussianRounder(100, 24, -1, *TWO),
        lambda: _native.GaussianRounder(100, 2**17, 16, *TWO),
        lambda: _native.GaussianRounder(100, 24, 11, np.zeros(3, np.uint64), np.zeros(3, np.uint64)),
        lambda: _native.GaussianRounder(100, 24, 11, np.zeros(2, np.uint64), np.zeros(4, np.uint64)),
        lambda: _native.GaussianRounder(100, 24, 11, np.zeros(2**13, np.uint64), np.zeros(2**13, np.uint64)),
        lambda: _native.GaussianRounder(100, 24, 11, *TWO).values(
            np.zeros(8, np.float32), np.zeros(351, np.uint8), np.zeros(8, np.uint32)
        ),
        lambda: _native.GaussianRounder(100, 24, 11, *TWO).values(
            np.zeros(8, np.float32), np.zeros(352, np.uint8), np.zeros(7, np.uint32)
        ),
        lambda: _native.GaussianRounder(100, 24, 11, *TWO).packed(
            np.zeros(8, np.float32), np.zeros(352, np.uint8), 23, 1, 5, 0, np.zeros(5, np.uint8)
        ),
        lambda: _native.FineGaussian(np.zeros(1, np.uint64), np.zeros(1, np.uint64)),
        lambda: _native.FineGaussian(np.zeros(2**11, np.uint64), np.zeros(2**11, np.uint64)),
        lambda: _native.FineGaussian(np.zeros(2, np.uint64), np.zeros(4, np.uint64)),
        lambda: FINE.add(np.zeros(1024 + 64 * 35 - 1, np.uint8), 1, np.zeros(8, np.int64)),
        lambda: FINE.add(np.zeros(1024 + 64 * 35, np.uint8), 2**14 + 1, np.zeros(8, np.int64)),
        lambda: FINE.add(np.zeros(1024 + 65 * 64 * 35, np.uint8), 1, np.zeros(4097, np.int64)),
        lambda: FINE.expand(np.zeros(31, np.uint8), np.ones(2, np.int64), np.zeros(8, np.int64)),
        lambda: FINE.expand(np.zeros(16, np.uint8), np.full(1, -(2**14) - 1), np.zeros(8, np.int64)),
        lambda: FINE.expand(np.zeros(16, np.uint8), np.ones(1, np.int64), np.zeros(2**24 + 1, np.int64)),
        lambda: _native.FinerGaussian(np.zeros(3, np.uint64), np.zeros(3, np.uint64)),
        lambda: _native.FinerGaussian(np.zeros(2, np.uint64), np.zeros(4, np.uint64)),
        lambda: _native.FinerGaussian(np.zeros(2**13, np.uint64), np.zeros(2**13, np.uint64)),
        lambda: _native.FinerGaussian(*TWO).draw(np.zeros(8 * 55 - 1, np.uint8), np.zeros(8, np.int32)),
        lambda: saturated(keystream=63),
        lambda: saturated(noise=7),
        lambda: saturated(values=9),
        lambda: saturated(limit=0),
        lambda: saturated(limit=2**24 + 1),
        lambda: saturated(window=1),
        lambda: saturated(window=129, bits=57),
        lambda: saturated(bits=13),
        lambda: saturated(bits=63),
        lambda: _native.find_below(np.zeros(8, np.uint8), 100, 0, np.zeros(3, np.uint32)),
        lambda: _native.find_below(np.zeros(7, np.uint8), 100, 0, np.zeros(4, np.uint32)),
        lambda: _native.add_signs(np.zeros(2, np.uint8), np.zeros(8, np.uint32), np.zeros(9, np.uint32)),
        lambda: _native.add_signs(np.zeros(1, np.uint8), np.array([9], np.uint32), np.zeros(9, np.uint64)),
        lambda: rounder(2, 17, 0.5).values(np.zeros(8, np.float32), np.zeros(63, np.uint8), np.zeros(8, np.uint32)),
        lambda: rounder(2, 17, 0.5).packed(
            np.zeros(8, np.float32), np.zeros(64, np.uint8), 16, 1, 4, 0, np.zeros(4, np.uint8)
        ),
    ],
)
def test_wrong_sizes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()


@pytest.mark.parametrize("module", [_native, numpy_twin])
@pytest.mark.parametrize("size", [2, 64, 2**20])
def test_a_finished_message_is_what_was_written(module: Any, size: int) -> None:
    buffer = module.MessageBuffer(size)
    array = buffer.array()
    assert (array.dtype, array.shape) == (np.uint8, (size,))
    array[:] = np.arange(size) % 251
    message = buffer.finished()
    assert type(message) is bytes
    assert message == (bytes(range(251)) * (size // 251 + 1))[:size]


def test_a_message_outlives_its_buffer() -> None:
    array = _native.MessageBuffer(1000).array()
    array[:] = 7
    assert (array == 7).all()


@pytest.mark.parametrize("size", [0, 1])
def test_bytes_that_python_may_share_are_no_buffer(size: int) -> None:
    with pytest.raises(ValueError, match="too short"):
        _native.MessageBuffer(size)
