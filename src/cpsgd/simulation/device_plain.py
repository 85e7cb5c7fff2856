"""The kernels of a round in plain PyTorch, for any device: the reference that `device_cuda.py` is tested against.

Sums and differences of the transform are taken in the order of `cpsgd.codec` (stages from distance 1 upwards), random
words come from a counter, and all else is integers: so kernels in PyTorch and in CUDA agree in every bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpsgd._torch import torch
from cpsgd.mechanisms.interface import Rounding

# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

LONGEST = 1e18
"""A row longer than this many times the norm it is clipped to counts as zero."""

ROUNDING, COINS, TOSSES = 0, 1, 2
"""The purposes of random words: the third word of a counter. Several kinds of tosses are numbered upwards."""

SLAB = 1024
"""Number of neighbouring coordinates that take the same word of neighbouring counters."""

FEW_COINS = 64
"""The most coins that are tossed one by one."""

# Counters worked on at a time: enough to fill a GPU, few enough for its memory.
_COUNTERS = 1 << 22


@dataclass(frozen=True)
class Encoding:
    """The way clients' rows become integers in a round.

    Attributes:
        signs: Signs of the rotation, one bit each; None for no rotation.
        bound: The norm that rows are clipped to.
        unit: Grid units in 1.
        keys: The key of the random words, eight bytes.
        rounding: The way grid points become integers.
    """

    signs: torch.Tensor | None
    bound: float
    unit: float
    keys: torch.Tensor
    rounding: Rounding


def philox(key: int, c0: torch.Tensor, c1: torch.Tensor, c2: int) -> tuple[torch.Tensor, ...]:
    """Returns four random 32-bit words, as int64, for each counter (c0, c1, c2, 0).

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox(0, zero, zero, 0)]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    zero = torch.zeros_like(c0 + c1)
    words = c0 + zero, c1 + zero, zero + c2, zero
    keys = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        low0, high0 = _product(_MULTIPLIERS[0], words[0])
        low1, high1 = _product(_MULTIPLIERS[1], words[2])
        words = high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0
        keys = (keys[0] + _WEYL[0]) & _WORD, (keys[1] + _WEYL[1]) & _WORD
    return words


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the low and high halves of a 32-bit by 32-bit product, which 64 bits hold even if they wrap around."""
    full = b * a
    return full & _WORD, (full >> 32) & _WORD


def sign_values(signs: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Returns `count` signs ±1 from bit `first` on; a 1 means minus."""
    bits = torch.arange(first, first + count, device=signs.device)
    return 1.0 - 2.0 * ((signs[bits >> 3] >> (bits & 7).to(torch.uint8)) & 1).to(torch.float32)


def hadamard(rows: torch.Tensor) -> None:
    """Applies the unnormalised Walsh–Hadamard transform to each row, in place. The length is a power of two."""
    distance = 1
    while distance < rows.shape[1]:
        pairs = rows.view(len(rows), -1, 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first += second
        second.copy_(difference)
        distance *= 2


def split(dim: int) -> tuple[int, int, float]:
    """Returns 2^j, the largest power of two up to d, with r = d - 2^j and 2^(-j/2), the last as a float32 number."""
    bits = dim.bit_length() - 1
    return 1 << bits, dim - (1 << bits), float(torch.tensor(math.pow(2.0, -0.5 * bits), dtype=torch.float32))


def scale(rows: torch.Tensor, bound: float, unit: float) -> None:
    """Clips rows to norm `bound` and multiplies them by `unit`, in place. See `clip_factors`."""
    factors = clip_factors(rows, bound) * unit
    rows *= factors.to(torch.float32)[:, None]


def clip_factors(rows: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns the factors that bring rows to norm at most `bound`.

    Rows that are not finite, or too long for finite squares of their coordinates, become zero, in place.
    """
    lengths = torch.linalg.vector_norm(rows / bound, dim=1).to(torch.float64)
    # A comparison with NaN is false.
    usable = lengths < LONGEST
    rows.masked_fill_(~usable[:, None], 0.0)
    return torch.where(usable & (lengths > 1.0), 1.0 / lengths, 1.0)


def rotate(rows: torch.Tensor, signs: torch.Tensor) -> None:
    """Rotates each row as `cpsgd.codec.rotate` does, in place."""
    size, rest, normalise = split(rows.shape[1])
    head = rows[:, :size]
    head *= normalise * sign_values(signs, 0, size)
    hadamard(head)
    if rest:
        _swap(rows, size, rest)
        head *= normalise * sign_values(signs, max(16, size), size)
        hadamard(head)


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """Rotates one vector back, in place."""
    size, rest, normalise = split(len(vector))
    rows = vector[None]
    head = rows[:, :size]
    if rest:
        hadamard(head)
        head *= normalise
        head *= sign_values(signs, max(16, size), size)
        _swap(rows, size, rest)
    hadamard(head)
    head *= normalise
    head *= sign_values(signs, 0, size)


def _swap(rows: torch.Tensor, size: int, rest: int) -> None:
    tail = rows[:, size:].clone()
    rows[:, size:] = rows[:, :rest]
    rows[:, :rest] = tail


def add_rows(rows: torch.Tensor, sums: torch.Tensor, encoding: Encoding, first: int) -> None:
    """Clips, rotates and rounds clients' rows, and adds the integers to `sums`. The rows are overwritten.

    Args:
        rows: One row of float32 per client.
        sums: Sums of integers (int64).
        encoding: The way rows become integers.
        first: Number of the first client.
    """
    to_grid(rows, encoding)
    round_and_sum(rows, sums, keys=encoding.keys, first=first, rounding=encoding.rounding)


def to_grid(rows: torch.Tensor, encoding: Encoding) -> None:
    """Clips and rotates clients' rows in place, to grid units."""
    scale(rows, encoding.bound, encoding.unit)
    if encoding.signs is not None:
        rotate(rows, encoding.signs)


def round_and_sum(
    rows: torch.Tensor, sums: torch.Tensor, *, keys: torch.Tensor, first: int, rounding: Rounding
) -> None:
    """Rounds rows, in grid units, to grid points and those at random to integers, and adds them to `sums` (int64).

    See `Rounding`; row i takes the random words of client `first` + i.
    """
    tosses = _heads if (rounding.coins or 0) <= FEW_COINS else _many_heads
    draw = _levels if rounding.coins is None else tosses
    key, limit, step = key_of(keys), float(rounding.limit), max(1, 4 * _COUNTERS // rows.shape[1])
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        clients = torch.arange(first + begin, first + begin + len(part), device=rows.device)[:, None]
        points = part.clamp(-limit, limit).round().to(torch.int64) + rounding.offset
        sums += draw(points, key, clients, rounding).sum(dim=0)


def key_of(keys: torch.Tensor) -> int:
    """Returns the integer that eight bytes hold."""
    return int.from_bytes(keys.view(torch.uint8).cpu().numpy().tobytes(), "little")


def _slabs(key: int, clients: torch.Tensor, dim: int, purpose: int, slabs: int) -> torch.Tensor:
    """Returns the words that coordinates take, [clients, groups, 4, 1024]: a counter's four words for four slabs.

    Coordinates are in slabs of 1024, and `slabs` of these in a group: place p of group b has counter (1024·b + p,
    client). Coordinate c is in group c div (1024·slabs), and its place is c mod 1024.
    """
    groups = -(-dim // (SLAB * slabs))
    counters = torch.arange(groups * SLAB, device=clients.device)
    words = torch.stack(philox(key, counters, clients, purpose), dim=1)
    return words.view(len(clients), 4, groups, SLAB).transpose(1, 2)


def _words(key: int, clients: torch.Tensor, dim: int, purpose: int) -> torch.Tensor:
    """Returns one random word per client and coordinate, laid out by `_slabs` in groups of four slabs."""
    return _slabs(key, clients, dim, purpose, 4).flatten(1)[:, :dim]


def _levels(points: torch.Tensor, key: int, clients: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Rounds each point with the lower half of a random word; the upper half decides whether it is sampled."""
    words = _words(key, clients, points.shape[1], ROUNDING)
    bits = rounding.fraction_bits
    drawn = (points + ((words & 0xFFFF) >> (16 - bits))) >> bits
    return drawn if rounding.rate is None else torch.where(words >> 16 < rounding.rate, 2 * drawn, 1)


def _heads(points: torch.Tensor, key: int, clients: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Tosses coins one by one. Of eight slabs the first four take the lower halves of words, the others the upper.

    See `_slabs`; each coin has its own third word of the counter.
    """
    dim = points.shape[1]
    heads = torch.zeros_like(points)
    for coin in range(rounding.coins or 0):
        words = _slabs(key, clients, dim, TOSSES + coin, 8)
        halves = torch.cat([words & 0xFFFF, words >> 16], dim=2).flatten(1)[:, :dim]
        heads += (points + halves) >> 16
    return heads


def _many_heads(points: torch.Tensor, key: int, clients: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Counts the 16-bit random numbers below the point, one for each coin, digit by digit.

    Of the numbers that agree with the point so far, those with 0 where the point has 1 are below it (heads) and those
    with 1 where it has 0 are above; the others still agree. Their number is that of ones among as many random bits.
    About half agree each time, so that two bits per coin are enough.
    """
    heads = torch.zeros_like(points)
    left = torch.full_like(points, rounding.coins or 0)
    for digit in range(16):
        ones = torch.zeros_like(points)
        for number in range(-(-int(left.max()) // 32)):
            words = _words(key, clients, points.shape[1], TOSSES + 16 * number + digit)
            ones += _ones(words & ((1 << (left - 32 * number).clamp(0, 32)) - 1))
        one = (points >> (15 - digit)) & 1 == 1
        heads += torch.where(one, left - ones, 0)
        left = torch.where(one, ones, left - ones)
    return heads


def add_coins(sums: torch.Tensor, *, keys: torch.Tensor, trials: int) -> None:
    """Adds Binomial(trials, ½) to each of `sums` (int64): the ones among `trials` random bits.

    The bits of coordinate c are those of the words of counters (c, 0), (c, 1), ...
    """
    key, columns = key_of(keys), torch.arange(len(sums), device=sums.device)
    step = max(1, _COUNTERS // len(sums))
    groups = -(-trials // 128)
    for start in range(0, groups, step):
        numbers = torch.arange(start, min(start + step, groups), device=sums.device)
        for place, words in enumerate(philox(key, columns[None, :], numbers[:, None], COINS)):
            kept = (trials - 128 * numbers - 32 * place).clamp(0, 32)
            sums += _ones(words & ((1 << kept) - 1)[:, None]).sum(dim=0)


def _ones(words: torch.Tensor) -> torch.Tensor:
    """Returns the number of ones in the binary digits of 32-bit numbers."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) & _WORD) >> 24
