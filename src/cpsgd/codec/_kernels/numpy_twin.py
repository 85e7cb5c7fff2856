"""The kernels in plain NumPy: what runs where no C++ kernel could be built, and what tests compare the C++ code with.

Functions and signatures are those of `_native`, and so is every value, bit for bit. Sizes are not checked again, and
the time taken may depend on what is drawn.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels.accounting_twin import bessel_ratios as bessel_ratios
from cpsgd.codec._kernels.accounting_twin import cell_masses as cell_masses
from cpsgd.codec._kernels.accounting_twin import chords as chords
from cpsgd.codec._kernels.accounting_twin import gaps as gaps
from cpsgd.codec._kernels.accounting_twin import log_averages as log_averages
from cpsgd.codec._kernels.accounting_twin import tilted_sums as tilted_sums
from cpsgd.codec._kernels.by_values import ByValues
from cpsgd.codec._kernels.lineage_twin import UNIFORMS, inverted
from cpsgd.codec._kernels.lineage_twin import FineGaussian as FineGaussian
from cpsgd.codec._kernels.modular_twin import extension_powers as extension_powers
from cpsgd.codec._kernels.modular_twin import extension_product as extension_product
from cpsgd.codec._kernels.modular_twin import modular_gram as modular_gram
from cpsgd.codec._kernels.modular_twin import modular_polynomial as modular_polynomial
from cpsgd.codec._kernels.modular_twin import modular_product as modular_product
from cpsgd.codec._kernels.modular_twin import modular_sum as modular_sum
from cpsgd.codec._kernels.modular_twin import uniform_elements as uniform_elements

Floats = NDArray[np.float32] | NDArray[np.float64]
Sums = NDArray[np.uint32] | NDArray[np.uint64]

_PARTIAL_SUMS = 32


def simd_level() -> str:
    """Returns the name of this set of kernels."""
    return "numpy"


def supported_levels() -> list[str]:
    """Returns NumPy alone."""
    return ["numpy"]


def norm_squared(x: Floats) -> float:
    """Returns the sum of squares in float64, in the kernels' order: 32 interleaved partial sums, then a tree."""
    with np.errstate(over="ignore"):  # infinity says it
        squares = x.astype(np.float64) ** 2
    rows = np.concatenate([squares, np.zeros(-squares.size % _PARTIAL_SUMS)]).reshape(-1, _PARTIAL_SUMS)
    partial = np.zeros(_PARTIAL_SUMS)
    for row in rows:
        partial += row
    while partial.size > 1:
        partial = partial[: partial.size // 2] + partial[partial.size // 2 :]
    return float(partial[0])


def grid_points(y: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Returns the grid point that rounding starts from: clipped to ±limit, then to the nearest integer."""
    return np.rint(np.clip(y, np.float32(-limit), np.float32(limit)))


def grid_norm_squared(y: NDArray[np.float32], limit: float) -> float:
    """Returns the squared norm of the grid point nearest to y."""
    return norm_squared(grid_points(y, limit))


def scale(x: Floats, factor: float, out: NDArray[np.float32]) -> None:
    """Writes x · factor, in the precision of x."""
    out[:] = x * x.dtype.type(factor)


def hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the unnormalised Walsh–Hadamard transform, stages from distance 1 upwards."""
    result = x.copy()
    distance = 1
    while distance < result.size:
        pairs = result.reshape(-1, 2, distance)
        result = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        distance *= 2
    return result


def permute(
    numbers: NDArray[np.int64], size: int, half: int, keys: NDArray[np.uint64], found: NDArray[np.int64]
) -> None:
    """Permutes numbers below `size` by a Feistel network over 2 `half` bits, repeated for results >= `size`."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    walked = numbers.astype(np.uint64)
    walking = np.arange(walked.size)
    while walking.size:
        values = walked[walking]
        left, right = values >> shift, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values = left << shift | right
        walked[walking] = values
        walking = walking[values >= size]
    found[:] = walked.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the finalizer of MurmurHash3: every bit of the input moves every bit of the output."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def _sign_values(signs: NDArray[np.uint8], first: int, count: int) -> NDArray[np.float32]:
    """Returns `count` signs ±1 from bit `first` on; a 1 means minus."""
    bits = np.unpackbits(signs, bitorder="little")[first : first + count]
    return np.where(bits, np.float32(-1), np.float32(1))


def _split(dim: int) -> tuple[int, int, np.float32]:
    size = 1 << (dim.bit_length() - 1)
    return size, dim - size, np.float32(math.pow(2.0, -0.5 * (dim.bit_length() - 1)))


def sign_bytes(n: int) -> int:
    """Returns the bytes of the signs of a rotation of n coordinates."""
    size = max(16, 1 << (n.bit_length() - 1))
    return (size if n & (n - 1) == 0 else 2 * size) // 8


def rotate_forward(x: Floats, factor: float, signs: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Writes the rotation of codec/rotate.py."""
    size, rest, normalise = _split(x.size)
    scale(x, factor, out)
    out[:size] = hadamard(out[:size] * normalise * _sign_values(signs, 0, size))
    if rest:
        out[:rest], out[size:] = out[size:].copy(), out[:rest].copy()
        out[:size] = hadamard(out[:size] * normalise * _sign_values(signs, max(16, size), size))


def rotate_to_grid(x: Floats, factor: float, signs: NDArray[np.uint8], limit: float, out: NDArray[np.float32]) -> float:
    """Writes the rotation, and returns the squared norm of the grid point nearest to it."""
    rotate_forward(x, factor, signs, out)
    return grid_norm_squared(out, limit)


def rotate_backward(data: NDArray[np.float32], signs: NDArray[np.uint8]) -> None:
    """Rotates back, in place."""
    size, rest, normalise = _split(data.size)
    if rest:
        data[:size] = hadamard(data[:size]) * normalise * _sign_values(signs, max(16, size), size)
        data[:rest], data[size:] = data[size:].copy(), data[:rest].copy()
    data[:size] = hadamard(data[:size]) * normalise * _sign_values(signs, 0, size)


class _Values(ByValues):
    """Base of the twin's kernels: packs their integers."""

    @staticmethod
    def pack(
        values: NDArray[np.uint32], radix: int, digits: int, bits: int, last_bits: int, out: NDArray[np.uint8]
    ) -> None:
        """Packs integers."""
        pack(values, radix, digits, bits, last_bits, out)


class Rounder(_Values):
    """Stochastic rounding to k levels, and noise: fair coins, or by inversion where there are thresholds."""

    def __init__(
        self,
        levels: int,
        fraction_bits: int,
        trials: int,
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
        base: int,
    ) -> None:
        """Fixes the parameters."""
        self._limit, self._bits, self._trials = ((levels - 1) << fraction_bits) >> 1, fraction_bits, trials
        self._high, self._low, self._base = high, low, np.uint32(base)

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes rounded and noisy integers of grid points."""
        words = keystream[: 4 * grid.size].view("<u4").astype(np.int64)
        shifted = grid_points(grid, float(self._limit)).astype(np.int64) + self._limit
        values[:] = (shifted + ((words & 0xFFFF) >> (16 - self._bits))) >> self._bits
        if self._high.size:
            values += self._base + inverted(self._high, self._low, keystream[4 * grid.size : 20 * grid.size])
        else:
            values += _coins(self._trials, keystream, grid.size)


class Flipper(_Values):
    """Biased coins: each shows heads with probability 1/2 + g/2^16, g a grid point within ±limit."""

    def __init__(self, limit: int, coins: int) -> None:
        """Fixes the parameters."""
        self._limit, self._coins = limit, coins

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes heads among the coins of each grid point: planes of 16 bits per coin, compared with 2^15 + g."""
        below = grid_points(grid, float(self._limit)).astype(np.int32) + 2**15
        planes = keystream[: 2 * self._coins * grid.size].view("<u2").reshape(self._coins, grid.size)
        values[:] = 0
        for plane in planes:
            values += plane < below


class GaussianRounder(_Values):
    """Fine Gaussian noise, then rounding to the nearest of `window` levels, the outermost of which take what is beyond.

    The noise is 2^8 H + U_1 + ... + U_28, less its mean: H by inversion, the U of 8 bits each.
    """

    def __init__(
        self, limit: int, window: int, fraction_bits: int, high: NDArray[np.uint64], low: NDArray[np.uint64]
    ) -> None:
        """Fixes the parameters. The thresholds are those of a symmetric H, an odd number of outcomes."""
        self._limit, self._window, self._bits = limit, window, fraction_bits
        self._high, self._low = high, low

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes noisy and rounded integers of grid points: 128-bit numbers come first, then planes of bytes."""
        draws, planes = keystream[: 16 * grid.size], keystream[16 * grid.size : (16 + UNIFORMS) * grid.size]
        noise = inverted(self._high, self._low, draws).astype(np.int64) - self._high.size // 2
        noise *= 256
        noise += planes.reshape(UNIFORMS, grid.size).sum(axis=0, dtype=np.int64) - UNIFORMS * 255 // 2
        noise += grid_points(grid, float(self._limit)).astype(np.int64)
        noise += (self._window << self._bits) >> 1
        values[:] = np.clip(noise >> self._bits, 0, self._window - 1)


class FinerGaussian:
    """Draws on a grid 2^9 times finer than the noise Z of `GaussianRounder`: 2^9 Z + 2 ΣV + ΣW, less its mean.

    Ten V are single bytes, and eight W the bits of one. The 128-bit numbers come first, then planes of bytes.
    """

    def __init__(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None:
        """Fixes the thresholds: those of a symmetric H, an odd number of outcomes."""
        self._high, self._low = high, low

    def draw(self, keystream: NDArray[np.uint8], out: NDArray[np.int32]) -> None:
        """Writes a draw to each number of `out`."""
        size = out.size
        planes = keystream[16 * size : (27 + UNIFORMS) * size].reshape(-1, size)
        cells = inverted(self._high, self._low, keystream[: 16 * size]).astype(np.int32) - self._high.size // 2
        coarse = 256 * cells + planes[:UNIFORMS].sum(axis=0, dtype=np.int32) - UNIFORMS * 255 // 2
        finer = 2 * planes[UNIFORMS:-1].sum(axis=0, dtype=np.int32) + np.bitwise_count(planes[-1])
        out[:] = 512 * coarse + finer - 2554


def saturate(
    grid: NDArray[np.float32],
    keystream: NDArray[np.uint8],
    noise: NDArray[np.int64],
    limit: int,
    window: int,
    grid_bits: int,
    fraction_bits: int,
    values: NDArray[np.uint32],
) -> None:
    """Writes grid points with noise, rounded at random by 64-bit numbers and kept within a window."""
    points = grid_points(grid, float(limit)).astype(np.int64) << (fraction_bits - grid_bits)
    coins = (keystream[: 8 * grid.size].view("<u8") >> np.uint64(64 - fraction_bits)).astype(np.int64)
    # An even number of integers has its middle between two of them.
    levels = (points + noise + coins + ((window - 1) << (fraction_bits - 1))) >> fraction_bits
    values[:] = np.clip(levels, 0, window - 1)


def _coins(trials: int, keystream: NDArray[np.uint8], count: int) -> NDArray[np.uint32]:
    """Returns Binomial(m, 1/2): ones among the high halves of the words, then among planes of 32 coins."""
    left = max(0, trials - 16)
    planes = keystream[: 4 * count * (1 - -left // 32)].view("<u4").reshape(-1, count)
    first = (planes[0] >> np.uint32(16)) & np.uint32((1 << min(trials, 16)) - 1)
    ones: NDArray[np.uint32] = np.bitwise_count(first).astype(np.uint32)
    for plane in planes[1:]:
        here = min(left, 32)
        ones += np.bitwise_count(plane & np.uint32((1 << here) - 1))
        left -= here
    return ones


def pack(
    values: NDArray[np.uint32], radix: int, digits: int, bits: int, last_bits: int, out: NDArray[np.uint8]
) -> None:
    """Turns groups of digits to words, words to bits, bits to bytes."""
    full = values.size // digits * digits
    streams = []
    for part, width in ((values[:full].reshape(-1, digits), bits), (values[full:].reshape(1, -1), last_bits)):
        words = np.zeros(part.shape[0], dtype=np.uint64)
        for digit in part.T[::-1]:
            words = words * np.uint64(radix) + digit
        streams.append(((words[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)).reshape(-1))
    out[:] = np.packbits(np.concatenate(streams).astype(np.uint8), bitorder="little")


def unpack(
    payload: NDArray[np.uint8], radix: int, digits: int, bits: int, last_bits: int, values: NDArray[np.uint32]
) -> None:
    """Turns bytes to bits, bits to words, words to digits."""
    stream = np.unpackbits(payload, bitorder="little").astype(np.uint64)
    full = values.size // digits
    parts = []
    for start, words, width, size in ((0, full, bits, digits), (full * bits, 1, last_bits, values.size % digits)):
        table = stream[start : start + words * width].reshape(words, width)
        word = (table << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        part = np.empty((words, size), dtype=np.uint32)
        for j in range(size):
            # The last digit keeps what no digit can be, so that a value out of range shows.
            last = j == size - 1
            part[:, j] = np.minimum(word, np.uint64(2**32 - 1)) if last else word % np.uint64(radix)
            word //= np.uint64(radix)
        parts.append(part.reshape(-1))
    values[:] = np.concatenate(parts)


def find_out_of_range(
    payload: NDArray[np.uint8], radix: int, digits: int, bits: int, last_bits: int, limit: int, n: int
) -> int:
    """Returns the position of the first value that is not below `limit`, or n."""
    values = np.empty(n, dtype=np.uint32)
    unpack(payload, radix, digits, bits, last_bits, values)
    outside = values >= limit
    return int(np.argmax(outside)) if outside.any() else n


def add_packed(payload: NDArray[np.uint8], radix: int, digits: int, bits: int, last_bits: int, sums: Sums) -> None:
    """Adds packed values to sums."""
    values = np.empty(sums.size, dtype=np.uint32)
    unpack(payload, radix, digits, bits, last_bits, values)
    sums += values


def find_below(words: NDArray[np.uint8], bound: int, first: int, positions: NDArray[np.uint32]) -> int:
    """Writes the positions, plus `first`, of 16-bit words below the bound; returns their number."""
    found = np.flatnonzero(words.view("<u2") < bound)
    positions[: found.size] = first + found
    return found.size


def add_signs(bits: NDArray[np.uint8], positions: NDArray[np.uint32], sums: Sums) -> None:
    """Adds 1 to all sums, and at each position 1 or -1 by its bit."""
    bit = np.unpackbits(bits, count=positions.size, bitorder="little")
    sums += sums.dtype.type(1)
    # Never below zero on the way: what was there, then 2 more or nothing.
    sums[positions] -= sums.dtype.type(1)
    sums[positions] += bit + bit


def noisy_mean(
    sums: NDArray[np.float64],
    noise: NDArray[np.int32],
    step: float,
    divisor: float,
    most: float,
    out: NDArray[np.float32],
) -> None:
    """Writes (q + noise) · step / divisor, q the nearest integers to sums / step within ±`most`; NaN counts as 0."""
    with np.errstate(over="ignore"):
        points = np.clip(np.nan_to_num(sums / step, nan=0.0), -most, most)
        out[:] = (np.rint(points) + noise) * step / divisor


def centre(sums: Sums, middle: float, factor: float, out: NDArray[np.float32]) -> None:
    """Writes (sums - middle) · factor, in float64."""
    out[:] = (sums.astype(np.float64) - middle) * factor


def centre_and_rotate(
    sums: Sums, middle: float, factor: float, signs: NDArray[np.uint8], out: NDArray[np.float32]
) -> None:
    """Writes (sums - middle) · factor, rotated back."""
    centre(sums, middle, factor, out)
    rotate_backward(out, signs)


@lru_cache(maxsize=1)
def _crc_table() -> list[int]:
    table = []
    for state in range(256):
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
        table.append(state)
    return table


class MessageBuffer:
    """A message while it is written."""

    def __init__(self, size: int) -> None:
        self._array = np.empty(size, dtype=np.uint8)

    def array(self) -> NDArray[np.uint8]:
        """Returns its bytes, to be written."""
        return self._array

    def finished(self) -> bytes:
        """Returns the message. From here on nobody may write to `array`."""
        return self._array.tobytes()


def crc32c(data: NDArray[np.uint8], prior: int = 0) -> int:
    """Returns the CRC-32C of bytes that follow those with the checksum `prior`."""
    table, state = _crc_table(), prior ^ 0xFFFFFFFF
    for byte in data.tobytes():
        state = (state >> 8) ^ table[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF
