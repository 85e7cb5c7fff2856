"""The stages in plain NumPy: slow, short, and value for value what the C++ kernels compute. Tests compare the two."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_PARTIAL_SUMS = 32


def norm_squared(x: NDArray[np.floating]) -> float:
    """Sum of squares in float64, in the kernels' order: 32 interleaved partial sums, then a tree."""
    squares = x.astype(np.float64) ** 2
    squares = np.concatenate([squares, np.zeros(-squares.size % _PARTIAL_SUMS)]).reshape(-1, _PARTIAL_SUMS)
    partial = np.zeros(_PARTIAL_SUMS)
    for row in squares:
        partial += row
    while partial.size > 1:
        partial = partial[: partial.size // 2] + partial[partial.size // 2 :]
    return float(partial[0])


def scale(x: NDArray[np.float32] | NDArray[np.float64], factor: float) -> NDArray[np.float32]:
    """X · factor, in the precision of x."""
    return (x * x.dtype.type(factor)).astype(np.float32)


def to_grid(y: NDArray[np.float32], levels: int, fraction_bits: int) -> NDArray[np.int64]:
    """The grid point that rounding starts from: clipped to ±(k-1)/2 levels, then to the nearest integer."""
    limit = np.float32((levels - 1) << (fraction_bits - 1))
    return np.rint(np.clip(y, -limit, limit)).astype(np.int64)


def hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The unnormalised Walsh–Hadamard transform, stages from distance 1 upwards."""
    result = x.copy()
    distance = 1
    while distance < result.size:
        pairs = result.reshape(-1, 2, distance)
        result = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        distance *= 2
    return result


def sign_values(signs: NDArray[np.uint8], first: int, count: int) -> NDArray[np.float32]:
    """`count` signs ±1 from bit `first` on; a 1 means minus."""
    bits = np.unpackbits(signs, bitorder="little")[first : first + count]
    return np.where(bits, np.float32(-1), np.float32(1))


def _split(dim: int) -> tuple[int, int, np.float32]:
    size = 1 << (dim.bit_length() - 1)
    return size, dim - size, np.float32(math.pow(2.0, -0.5 * (dim.bit_length() - 1)))


def rotate_forward(
    x: NDArray[np.float32] | NDArray[np.float64], factor: float, signs: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """The rotation of codec/rotate.py."""
    size, rest, normalise = _split(x.size)
    result = scale(x, factor)
    result[:size] = hadamard(result[:size] * normalise * sign_values(signs, 0, size))
    if rest:
        result[:rest], result[size:] = result[size:].copy(), result[:rest].copy()
        result[:size] = hadamard(result[:size] * normalise * sign_values(signs, max(16, size), size))
    return result


def rotate_backward(y: NDArray[np.float32], signs: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The inverse rotation."""
    size, rest, normalise = _split(y.size)
    result = y.copy()
    if rest:
        result[:size] = hadamard(result[:size]) * normalise * sign_values(signs, max(16, size), size)
        result[:rest], result[size:] = result[size:].copy(), result[:rest].copy()
    result[:size] = hadamard(result[:size]) * normalise * sign_values(signs, 0, size)
    return result


def quantize(
    y: NDArray[np.float32], keystream: NDArray[np.uint8], levels: int, fraction_bits: int
) -> NDArray[np.uint32]:
    """Stochastic rounding with the low 16 bits of each coordinate's keystream word."""
    words = keystream[: 4 * y.size].view("<u4").astype(np.int64)
    shifted = to_grid(y, levels, fraction_bits) + ((levels - 1) << (fraction_bits - 1))
    return ((shifted + ((words & 0xFFFF) >> (16 - fraction_bits))) >> fraction_bits).astype(np.uint32)


def coins(count: int, trials: int, keystream: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Binomial(m, 1/2): ones among the high halves of the words, then among planes of 32 coins."""
    planes = keystream[: keystream.size // 4 * 4].view("<u4").reshape(-1, count)
    first = (planes[0] >> np.uint32(16)) & np.uint32((1 << min(trials, 16)) - 1)
    ones: NDArray[np.uint32] = np.bitwise_count(first).astype(np.uint32)
    left = max(0, trials - 16)
    for plane in planes[1:]:
        here = min(left, 32)
        ones += np.bitwise_count(plane & np.uint32((1 << here) - 1))
        left -= here
    return ones


def inverted(
    count: int, keystream: NDArray[np.uint8], high: NDArray[np.uint64], low: NDArray[np.uint64], base: int
) -> NDArray[np.uint32]:
    """Binomial(m, p) by inversion: base + the number of thresholds that a 128-bit number reaches."""
    halves = keystream[4 * count : 20 * count].copy().view("<u8").reshape(count, 2)
    thresholds = [int(upper) << 64 | int(lower) for upper, lower in zip(high, low, strict=True)]
    numbers = [int(upper) << 64 | int(lower) for lower, upper in halves]
    reached = [sum(number >= threshold for threshold in thresholds) for number in numbers]
    return np.array(reached, dtype=np.uint32) + np.uint32(base)


def pack(values: NDArray[np.uint32], radix: int, digits: int, bits: int, last_bits: int) -> NDArray[np.uint8]:
    """Groups of digits to words, words to bits, bits to bytes."""
    full = values.size // digits * digits
    streams = []
    for part, width in ((values[:full].reshape(-1, digits), bits), (values[full:].reshape(1, -1), last_bits)):
        words = np.zeros(part.shape[0], dtype=np.uint64)
        for digit in part.T[::-1]:
            words = words * np.uint64(radix) + digit
        streams.append(((words[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)).reshape(-1))
    return np.packbits(np.concatenate(streams).astype(np.uint8), bitorder="little")


def unpack(
    payload: NDArray[np.uint8], count: int, radix: int, digits: int, bits: int, last_bits: int
) -> NDArray[np.uint32]:
    """Bytes to bits, bits to words, words to digits."""
    stream = np.unpackbits(payload, bitorder="little").astype(np.uint64)
    full = count // digits
    values = []
    for start, words, width, size in ((0, full, bits, digits), (full * bits, 1, last_bits, count % digits)):
        table = stream[start : start + words * width].reshape(words, width)
        word = (table << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        part = np.empty((words, size), dtype=np.uint32)
        for j in range(size):
            part[:, j] = word % np.uint64(radix)
            word //= np.uint64(radix)
        values.append(part.reshape(-1))
    return np.concatenate(values)
