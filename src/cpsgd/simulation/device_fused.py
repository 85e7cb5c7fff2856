"""The kernels of a round in Triton.

A client's whole vector is clipped, scaled, rotated twice by 2^j-point transforms and swapped by one program that holds
it in registers: a round's vectors are read and written once. Rounding and the sum over clients are one more read; the
rounded integers are never written. Vectors of 2^16 coordinates or more do not fit in registers: their transform takes
one pass for every few stages.

Products are not contracted with the sums that follow them (`enable_fp_fusion=False`), so that results equal those of
`device_plain.py` bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from cpsgd._torch import torch
from cpsgd.mechanisms.base import Rounding
from cpsgd.simulation import device_plain as plain

# Largest transform that one program holds in registers, and the smallest that is worth a kernel.
_LARGEST, _SMALLEST = 15, 6
# Larger transforms: stages of the first pass, over neighbours, and of the later ones, over columns of this width.
_FIRST_STAGES, _LATER_STAGES, _COLUMN_BITS = 13, 10, 5
# Rounding: random words, hence coordinates or pairs of them, and clients of a program.
_WORDS, _CLIENTS = 512, 128
# Rows of one launch: CUDA's limit on the second dimension of a grid.
_ROWS = 65_535
# Coins: coordinates of a program, and counters it draws.
_COIN_COORDINATES, _COUNTERS = 256, 64

_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
_ROUNDING = tl.constexpr(plain.ROUNDING)
_COINS = tl.constexpr(plain.COINS)
_TOSSES = tl.constexpr(plain.TOSSES)
_SLAB = tl.constexpr(plain.SLAB)


@triton.jit
def _butterflies(x, SIZE: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr):
    """Stages of the transform over the flat tensor x, of distances 2^FIRST, 2^(FIRST+1), ..."""
    for stage in tl.static_range(FIRST, FIRST + STAGES):
        pairs = tl.permute(tl.reshape(x, [SIZE >> (stage + 1), 2, 1 << stage]), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [SIZE])
    return x


@triton.jit
def _signed(x, signs, first, normalise, offsets):
    """x times ±normalise; the signs are bits from number `first` on, a multiple of 8."""
    bits = tl.load(signs + (first + offsets) // 8) >> (offsets % 8).to(tl.uint8)
    return x * tl.where((bits & 1) == 1, -normalise, normalise)


@triton.jit
def _rotate_rows(
    rows,
    stride,
    spare,
    spare_stride,
    signs,
    limits,
    normalise,
    rest,
    LONGEST: tl.constexpr,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    TWICE: tl.constexpr,
):
    """Registers limit this kernel: never more than one vector of SIZE numbers is held."""
    base = rows + tl.program_id(0).to(tl.int64) * stride
    offsets = tl.arange(0, SIZE)
    # A kernel's arguments are float32 numbers; these two are not.
    bound, unit = tl.load(limits), tl.load(limits + 1)
    inverse = (1.0 / bound).to(tl.float32)
    squares = 0.0
    if TWICE:
        tail = tl.load(base + SIZE + offsets, mask=offsets < rest, other=0.0) * inverse
        squares = tl.sum(tail * tail)
        tl.debug_barrier()
    head = tl.load(base + offsets)
    squares += tl.sum((head * inverse) * (head * inverse))
    length = tl.sqrt(squares.to(tl.float64))
    finite = length < LONGEST
    factor = tl.where(length > 1.0, unit / length, unit).to(tl.float32)
    head = tl.where(finite, head * factor, 0.0)
    head = _butterflies(_signed(head, signs, 0, normalise, offsets), SIZE, 0, STAGES)
    if TWICE:
        keep = spare + tl.program_id(0).to(tl.int64) * spare_stride
        tl.store(keep + offsets, head, mask=offsets < rest)
        head = tl.load(base + SIZE + offsets, mask=offsets < rest, other=head)
        head = tl.where(offsets < rest, tl.where(finite, head * factor, 0.0), head)
        head = _butterflies(_signed(head, signs, max(16, SIZE), normalise, offsets), SIZE, 0, STAGES)
    tl.store(base + offsets, head)


@triton.jit
def _rotate_back(vector, signs, normalise, rest, SIZE: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    head = tl.load(vector + offsets)
    if TWICE:
        head = _signed(_butterflies(head, SIZE, 0, STAGES) * normalise, signs, max(16, SIZE), 1.0, offsets)
        tail = tl.load(vector + SIZE + offsets, mask=offsets < rest, other=0.0)
        # What one thread stores another may still have to load.
        tl.debug_barrier()
        tl.store(vector + SIZE + offsets, head, mask=offsets < rest)
        head = tl.where(offsets < rest, tail, head)
    head = _signed(_butterflies(head, SIZE, 0, STAGES) * normalise, signs, 0, 1.0, offsets)
    tl.store(vector + offsets, head)


@triton.jit
def _pass(rows, stride, FIRST: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr):
    """Stages FIRST, FIRST+1, ... of a long transform, for 2^COLUMNS neighbouring columns of a row."""
    SIZE: tl.constexpr = 1 << (STAGES + COLUMNS)
    base = rows + tl.program_id(1).to(tl.int64) * stride
    block = tl.program_id(0)
    blocks: tl.constexpr = 1 << (FIRST - COLUMNS)
    offsets = tl.arange(0, SIZE)
    place = (offsets >> COLUMNS << FIRST) + (offsets & ((1 << COLUMNS) - 1))
    place += (block // blocks << (FIRST + STAGES)) + (block % blocks << COLUMNS)
    tl.store(base + place, _butterflies(tl.load(base + place), SIZE, COLUMNS, STAGES))


@triton.jit
def _points(x, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Points of the grid plus OFFSET: clipped, and to the nearest integer, ties to even."""
    x = tl.minimum(tl.maximum(x, -1.0 * LIMIT), 1.0 * LIMIT)
    if LIMIT < 4194304:
        # From 2^23 to 2^24 numbers are integers: adding 3 · 2^22 rounds, and the last bits hold the result.
        nearest = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        # From 2^23 on numbers are integers, and adding 2^23 rounds smaller ones.
        size = tl.abs(x)
        size = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
        nearest = tl.where(x < 0.0, -size, size).to(tl.int32)
    return nearest.to(tl.uint32, bitcast=True) + OFFSET


@triton.jit
def _words(key, counters, client, purpose, SIZE: tl.constexpr):
    """The first words of all counters, then the second ones, the third and the fourth."""
    zeros = tl.zeros_like(counters)
    a, b, c, d = tl.philox(key, counters, zeros + client, zeros + purpose, 0)
    words = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (1, 2, 0))
    return tl.reshape(words, [SIZE]).to(tl.uint32)


@triton.jit
def _places(start, steps, SIZE: tl.constexpr, SLABS: tl.constexpr):
    """A program's coordinates and counters, as `plain._slabs` has them; those that take lower halves, with 8 SLABS.

    The program has SIZE // 4 places of a group, and `steps` programs have those that any coordinate takes. `start` is
    the number of the first coordinate of all: those found are relative to it, and some may be negative.
    """
    PLACES: tl.constexpr = SIZE // 4
    group = start // (_SLAB * SLABS) + tl.program_id(0) // steps
    place = tl.program_id(0) % steps * PLACES
    offsets = tl.arange(0, SIZE)
    columns = group * (_SLAB * SLABS) + offsets // PLACES * _SLAB + place + offsets % PLACES - start
    return columns, (group * _SLAB + place + tl.arange(0, PLACES)).to(tl.uint32)


# Triton's interpreter wants loops of constant length: in the three kernels below clients past the last are masked.


@triton.jit(do_not_specialize=["count", "key", "first", "begin", "steps"])
def _round_and_sum(
    rows,
    stride,
    sums,
    dim,
    count,
    key,
    first,
    begin,
    steps,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    FRACTION: tl.constexpr,
    RATE: tl.constexpr,
    SIZE: tl.constexpr,
    CLIENTS: tl.constexpr,
):
    """See `plain._levels`; RATE is 0 where there is none."""
    columns, counters = _places(begin, steps, SIZE, 4)
    inside = (columns >= 0) & (columns < dim)
    total = tl.zeros([SIZE], tl.int32)
    start = tl.program_id(1) * CLIENTS
    for i in range(CLIENTS):
        row = start + i
        x = tl.load(rows + row.to(tl.int64) * stride + columns, mask=inside & (row < count), other=0.0)
        word = _words(key, counters, (first + row).to(tl.uint32), _ROUNDING, SIZE)
        drawn = (_points(x, LIMIT, OFFSET) + ((word & 0xFFFF) >> (16 - FRACTION))) >> FRACTION
        if RATE > 0:
            drawn = tl.where((word >> 16) < RATE, 2 * drawn, 1)
        total += tl.where(row < count, drawn.to(tl.int32), 0)
    tl.atomic_add(sums + columns, total.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["count", "key", "first", "begin", "steps"])
def _toss_and_sum(
    rows,
    stride,
    sums,
    dim,
    count,
    key,
    first,
    begin,
    steps,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    COINS: tl.constexpr,
    SIZE: tl.constexpr,
    CLIENTS: tl.constexpr,
):
    """See `plain._heads`: lower halves of SIZE words for coordinates on the left, upper halves for others."""
    left, counters = _places(begin, steps, SIZE, 8)
    right = left + 4 * _SLAB
    left_inside, right_inside = (left >= 0) & (left < dim), (right >= 0) & (right < dim)
    left_total = tl.zeros([SIZE], tl.uint32)
    right_total = tl.zeros([SIZE], tl.uint32)
    start = tl.program_id(1) * CLIENTS
    for i in range(CLIENTS):
        row = start + i
        base = rows + row.to(tl.int64) * stride
        one = (row < count).to(tl.uint32)
        x = tl.load(base + left, mask=left_inside & (row < count), other=0.0)
        y = tl.load(base + right, mask=right_inside & (row < count), other=0.0)
        left_points, right_points = _points(x, LIMIT, OFFSET), _points(y, LIMIT, OFFSET)
        for coin in range(COINS):
            word = _words(key, counters, (first + row).to(tl.uint32), _TOSSES + coin, SIZE)
            left_total += ((left_points + (word & 0xFFFF)) >> 16) * one
            right_total += ((right_points + (word >> 16)) >> 16) * one
    tl.atomic_add(sums + left, left_total.to(tl.int64), mask=left_inside)
    tl.atomic_add(sums + right, right_total.to(tl.int64), mask=right_inside)


@triton.jit
def _ones(words):
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def _kept(words, left):
    """The first `left` bits of each word; all from 32 on, none below 1."""
    few = (tl.full([1], 1, tl.uint32) << tl.minimum(tl.maximum(left, 0), 31).to(tl.uint32)) - 1
    return tl.where(left >= 32, words, words & few)


@triton.jit(do_not_specialize=["count", "key", "first", "begin", "steps"])
def _toss_many_and_sum(
    rows,
    stride,
    sums,
    dim,
    count,
    key,
    first,
    begin,
    steps,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    COINS: tl.constexpr,
    SIZE: tl.constexpr,
    CLIENTS: tl.constexpr,
):
    """See `plain._many_heads`."""
    columns, counters = _places(begin, steps, SIZE, 4)
    inside = (columns >= 0) & (columns < dim)
    total = tl.zeros([SIZE], tl.int32)
    start = tl.program_id(1) * CLIENTS
    for i in range(CLIENTS):
        row = start + i
        x = tl.load(rows + row.to(tl.int64) * stride + columns, mask=inside & (row < count), other=0.0)
        points = _points(x, LIMIT, OFFSET)
        left = tl.zeros([SIZE], tl.int32) + tl.where(row < count, COINS, 0)
        for digit in range(16):
            ones = tl.zeros([SIZE], tl.int32)
            most = tl.max(left)
            number = 0
            while 32 * number < most:
                word = _words(key, counters, (first + row).to(tl.uint32), _TOSSES + 16 * number + digit, SIZE)
                ones += _ones(_kept(word, left - 32 * number)).to(tl.int32)
                number += 1
            one = ((points >> (15 - digit)) & 1) == 1
            total += tl.where(one, left - ones, 0)
            left = tl.where(one, ones, left - ones)
    tl.atomic_add(sums + columns, total.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["key", "trials"])
def _add_coins(sums, dim, key, trials, SIZE: tl.constexpr, COUNTERS: tl.constexpr):
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.uint32)
    start = tl.program_id(1) * COUNTERS
    for i in range(COUNTERS):
        number = start + i
        left = trials - 128 * number
        zero = tl.zeros([SIZE], tl.uint32)
        a, b, c, d = tl.philox(key, columns.to(tl.uint32), zero + number.to(tl.uint32), zero + _COINS, 0)
        total += _ones(_kept(a.to(tl.uint32), left)) + _ones(_kept(b.to(tl.uint32), left - 32))
        total += _ones(_kept(c.to(tl.uint32), left - 64)) + _ones(_kept(d.to(tl.uint32), left - 96))
    tl.atomic_add(sums + columns, total.to(tl.int64), mask=columns < dim)


def hadamard(rows: torch.Tensor) -> None:
    """The unnormalised Walsh–Hadamard transform of each row, in place."""
    stages = rows.shape[1].bit_length() - 1
    if stages < _SMALLEST:
        plain.hadamard(rows)
        return
    for start in range(0, len(rows), _ROWS):
        _transform(rows[start : start + _ROWS], stages)


def _transform(rows: torch.Tensor, stages: int) -> None:
    first = stages if stages <= _LARGEST else _FIRST_STAGES
    grid = 1 << (stages - first), len(rows)
    _pass[grid](rows, rows.stride(0), 0, first, 0, num_warps=_warps(first), **_EXACT)
    while first < stages:
        step = min(_LATER_STAGES, stages - first)
        grid = 1 << (stages - step - _COLUMN_BITS), len(rows)
        _pass[grid](rows, rows.stride(0), first, step, _COLUMN_BITS, num_warps=_warps(step + _COLUMN_BITS), **_EXACT)
        first += step


def scale_and_rotate(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> plain.Columns:
    """Clips rows to norm `bound`, multiplies them by `unit` and rotates them; see `plain.scale_and_rotate`.

    The last r coordinates of the result come in a tensor of their own: their place in `rows` still holds the input when
    they are known.
    """
    size, rest, normalise = plain.split(rows.shape[1])
    stages = size.bit_length() - 1
    if not _SMALLEST <= stages <= _LARGEST:
        plain.scale(rows, bound, unit)
        plain.rotate(rows, signs, hadamard)
        return [(0, rows)]
    spare = torch.empty((len(rows), -(-rest // 32) * 32), device=rows.device)
    _rotate_rows[(len(rows),)](
        rows,
        rows.stride(0),
        spare,
        spare.stride(0),
        signs,
        _limits(bound, unit, rows.device),
        normalise,
        rest,
        plain.LONGEST,
        size,
        stages,
        rest > 0,
        num_warps=_warps(stages),
        **_EXACT,
    )
    return [(0, rows[:, :size]), (size, spare[:, :rest])] if rest else [(0, rows)]


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """The inverse rotation of one vector, in place."""
    size, rest, normalise = plain.split(len(vector))
    stages = size.bit_length() - 1
    if not _SMALLEST <= stages <= _LARGEST:
        plain.rotate_back(vector, signs, hadamard)
        return
    _rotate_back[(1,)](vector, signs, normalise, rest, size, stages, rest > 0, num_warps=_warps(stages), **_EXACT)


@lru_cache(maxsize=16)
def _limits(bound: float, unit: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([bound, unit], dtype=torch.float64, device=device)


def round_and_sum(columns: plain.Columns, sums: torch.Tensor, *, key: int, first: int, rounding: Rounding) -> None:
    """Turns rows in grid units into integers and adds them to `sums`; see `plain.round_and_sum`."""
    for start, rows in columns:
        _round_part(rows, sums[start:], start, key, first, rounding)


def _round_part(rows: torch.Tensor, sums: torch.Tensor, start: int, key: int, first: int, rounding: Rounding) -> None:
    count, dim = rows.shape
    # What a program adds up fits in 31 bits.
    clients = min(_CLIENTS, (2**31 - 1) // rounding.largest)
    coins, slabs = rounding.coins, 4
    parameters: tuple[int, ...] = (coins or 0,)
    if coins is None:
        kernel, parameters = _round_and_sum, (rounding.fraction_bits, rounding.rate or 0)
    elif coins <= plain.FEW_COINS:
        kernel, slabs = _toss_and_sum, 8
    else:
        kernel = _toss_many_and_sum
    group = plain.SLAB * slabs
    groups = triton.cdiv(start + dim, group) - start // group
    steps = triton.cdiv(min(start + dim, plain.SLAB), _WORDS // 4)
    grid = groups * steps, triton.cdiv(count, clients)
    kernel[grid](
        rows,
        rows.stride(0),
        sums,
        dim,
        count,
        key,
        first,
        start,
        steps,
        rounding.limit,
        rounding.offset,
        *parameters,
        _WORDS,
        clients,
        num_warps=4,
        **_EXACT,
    )


def add_coins(sums: torch.Tensor, *, key: int, trials: int) -> None:
    """Adds Binomial(trials, ½) to each of `sums`; see `plain.add_coins`."""
    grid = triton.cdiv(len(sums), _COIN_COORDINATES), triton.cdiv(trials, 128 * _COUNTERS)
    _add_coins[grid](sums, len(sums), key, trials, _COIN_COORDINATES, _COUNTERS, num_warps=4)


def _warps(stages: int) -> int:
    """Enough threads that each holds at most 32 of 2^stages numbers."""
    return max(1, min(32, 1 << max(0, stages - 10)))
