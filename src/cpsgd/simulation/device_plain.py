"""The kernels of a round in plain PyTorch, for any device; `device_fused.py` is tested against them.

Sums and differences of the transform are taken in the order of `cpsgd.codec` (stages from distance 1 upwards), random
words come from a counter, and all else is integers: so plain and fused kernels agree in every bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cpsgd._torch import torch

Transform = Callable[[torch.Tensor], None]
"""The unnormalised Walsh–Hadamard transform of each row, in place."""

# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Columns = list[tuple[int, torch.Tensor]]
"""Rows in pieces: some of their columns each, and the number of the first of these, a multiple of 4."""

LONGEST = 1e18
"""Rows that are longer than this many times the norm they are clipped to count as zero."""

ROUNDING, COINS = 0, 1
"""What random words are for: the third word of a counter."""

# Counters worked on at a time: enough to fill a GPU, small enough for its memory.
_COUNTERS = 1 << 22


def philox(key: int, c0: torch.Tensor, c1: torch.Tensor, c2: int) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words, as int64, for each counter (c0, c1, c2, 0).

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
    """Low and high half of a 32-bit by 32-bit product; 64 bits that wrap around still hold it."""
    full = b * a
    return full & _WORD, (full >> 32) & _WORD


def sign_values(signs: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` signs ±1 from bit `first` on; a 1 means minus."""
    bits = torch.arange(first, first + count, device=signs.device)
    return 1.0 - 2.0 * ((signs[bits >> 3] >> (bits & 7).to(torch.uint8)) & 1).to(torch.float32)


def hadamard(rows: torch.Tensor) -> None:
    """The unnormalised Walsh–Hadamard transform of each row, in place. Rows have a power of two of coordinates."""
    distance = 1
    while distance < rows.shape[1]:
        pairs = rows.view(len(rows), -1, 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first += second
        second.copy_(difference)
        distance *= 2


def split(dim: int) -> tuple[int, int, float]:
    """2^j, r and 2^(-j/2) of `cpsgd.codec.rotate`, the last as a float32 number."""
    bits = dim.bit_length() - 1
    return 1 << bits, dim - (1 << bits), float(torch.tensor(math.pow(2.0, -0.5 * bits), dtype=torch.float32))


def scale(rows: torch.Tensor, bound: float, unit: float) -> None:
    """Clips rows to norm `bound` and multiplies them by `unit`, in place. See `clip_factors`."""
    factors = clip_factors(rows, bound) * unit
    rows *= factors.to(torch.float32)[:, None]


def clip_factors(rows: torch.Tensor, bound: float) -> torch.Tensor:
    """What rows are multiplied by to have norm at most `bound`; rows that are broken become zero, in place.

    Broken are rows that are not finite, or so long that the squares of their coordinates would not be.
    """
    lengths = torch.linalg.vector_norm(rows / bound, dim=1).to(torch.float64)
    # A comparison with NaN is false.
    whole = lengths < LONGEST
    rows.masked_fill_(~whole[:, None], 0.0)
    return torch.where(whole & (lengths > 1.0), 1.0 / lengths, 1.0)


def scale_and_rotate(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> Columns:
    """Clips rows to norm `bound`, multiplies them by `unit` and rotates them. The rows are overwritten."""
    scale(rows, bound, unit)
    rotate(rows, signs)
    return [(0, rows)]


def rotate(rows: torch.Tensor, signs: torch.Tensor, transform: Transform | None = None) -> None:
    """The rotation of `cpsgd.codec.rotate`, of each row in place."""
    transform = transform or hadamard
    size, rest, normalise = split(rows.shape[1])
    head = rows[:, :size]
    head *= normalise * sign_values(signs, 0, size)
    transform(head)
    if rest:
        _swap(rows, size, rest)
        head *= normalise * sign_values(signs, max(16, size), size)
        transform(head)


def rotate_back(vector: torch.Tensor, signs: torch.Tensor, transform: Transform | None = None) -> None:
    """The inverse rotation of one vector, in place."""
    transform = transform or hadamard
    size, rest, normalise = split(len(vector))
    rows = vector[None]
    head = rows[:, :size]
    if rest:
        transform(head)
        head *= normalise
        head *= sign_values(signs, max(16, size), size)
        _swap(rows, size, rest)
    transform(head)
    head *= normalise
    head *= sign_values(signs, 0, size)


def _swap(rows: torch.Tensor, size: int, rest: int) -> None:
    tail = rows[:, size:].clone()
    rows[:, size:] = rows[:, :rest]
    rows[:, :rest] = tail


def round_and_sum(
    columns: Columns, sums: torch.Tensor, *, key: int, first: int, levels: int, fraction_bits: int
) -> None:
    """Rounds rows in grid units stochastically to levels 0..k-1 and adds them to `sums` (int64).

    The word of client `first` + i and coordinate c is number c mod 4 of counter (c div 4, client).
    """
    for start, rows in columns:
        _round_part(rows, sums[start : start + rows.shape[1]], start // 4, key, first, levels, fraction_bits)


def _round_part(
    rows: torch.Tensor, sums: torch.Tensor, counter: int, key: int, first: int, levels: int, fraction_bits: int
) -> None:
    dim = rows.shape[1]
    limit = (levels - 1) << (fraction_bits - 1)
    columns = torch.arange(counter, counter - (-dim // 4), device=rows.device)
    step = max(1, _COUNTERS // len(columns))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        clients = torch.arange(first + start, first + start + len(part), device=rows.device)
        words = torch.stack(philox(key, columns[None, :], clients[:, None], ROUNDING), dim=-1).flatten(1)[:, :dim]
        grid = part.clamp(-float(limit), float(limit)).round().to(torch.int64) + limit
        sums += ((grid + ((words & 0xFFFF) >> (16 - fraction_bits))) >> fraction_bits).sum(dim=0)


def add_coins(sums: torch.Tensor, *, key: int, trials: int) -> None:
    """Adds Binomial(trials, ½) to each of `sums` (int64): the ones among so many random bits.

    The bits of coordinate c are those of the words of counters (c, 0), (c, 1), ...
    """
    columns = torch.arange(len(sums), device=sums.device)
    step = max(1, _COUNTERS // len(sums))
    groups = -(-trials // 128)
    for start in range(0, groups, step):
        numbers = torch.arange(start, min(start + step, groups), device=sums.device)
        for place, words in enumerate(philox(key, columns[None, :], numbers[:, None], COINS)):
            kept = (trials - 128 * numbers - 32 * place).clamp(0, 32)
            sums += _ones(words & ((1 << kept) - 1)[:, None]).sum(dim=0)


def _ones(words: torch.Tensor) -> torch.Tensor:
    """Ones in the binary digits of 32-bit numbers."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) & _WORD) >> 24
