"""Kernels in CUDA C++ for vectors of 2^16 coordinates and more, in three passes over memory (`device_long.cu`).

A transform's stages commute, so that those over distant coordinates of both transforms are one pass, with the exchange
between the two; the last pass rounds and adds up, and writes sums only. Beside the rows, which are overwritten, it
takes some bytes per row and tile. Integers that the kernel does not draw are left to `device_fused.py`, rotated.

Stages come in another order than in `device_plain.py`, and clipping comes last: a rotated number may differ in its last
digits, and a few in a million of the integers by one. `stages` gives the order, for those who want equality. Random
words are the same, and coins are drawn as `device_cuda.py` says.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.mechanisms.base import Rounding
from cpsgd.simulation import device_cuda as cuda
from cpsgd.simulation import device_plain as plain

_SMALLEST = 16
# Of the kernels: threads of a block, bits of the numbers in a tile, and bits that one pass over distant ones takes.
_THREADS, _TILE_BITS, _MOST_BITS = 256, 13, 10
_TILE = 1 << _TILE_BITS
# Blocks that share a multiprocessor: those of the last pass are more, as they need fewer registers.
_BLOCKS, _LAST_BLOCKS = 2, 3
# Pieces of work for a block of the last pass, and the fewest rows of a piece.
_PIECES, _FEWEST_ROWS = 8, 16
# Draws that a block may put off: a tile's, and some.
_LATE = _TILE + 1024
# Where the coordinates of a thread's registers are when they are rounded.
_PLACE = "(((r) % 8 << 10) + ((r) / 8 << 8))"


def supports(device: torch.device, dim: int) -> bool:
    """Whether the kernels run on a device, for vectors of so many coordinates."""
    return dim >= 1 << _SMALLEST and device.type == "cuda" and cuda.compiles(device)


def stages(dim: int) -> tuple[list[int], list[int]]:
    """In which order the bits of coordinates are transformed, the first time and the second.

    Example:
        >>> stages(1 << 16)
        ([13, 14, 15, 5, 6, 7, 0, 1, 2, 3, 4, 10, 11, 12, 8, 9], [])
    """
    size, rest, _ = plain.split(dim)
    low = [5, 6, 7, 0, 1, 2, 3, 4, 10, 11, 12, 8, 9]
    far = [_far_stages(first, bits) for first, bits in _passes(size.bit_length() - 1)]
    *others, last = far
    after = last[0] + [bit for part in reversed(others) for bit in part[0]] + low
    if not rest:
        return after, []
    return low + [bit for part in others for bit in part[0]] + last[1], after


def add_rows(
    rows: torch.Tensor,
    sums: torch.Tensor,
    signs: torch.Tensor,
    *,
    bound: float,
    unit: float,
    keys: torch.Tensor,
    first: int,
    rounding: Rounding,
) -> None:
    """As `device_cuda.add_rows`. The rows are overwritten."""
    scales = _spread(rows, signs, bound, unit)
    kernel, memory, exact = _finish(rows.device, _log(rows.shape[1]), rounding)
    _last_pass(kernel, memory, rows, scales, sums, first, keys, exact)


def scale_and_rotate(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> plain.Columns:
    """Clips rows to norm `bound`, multiplies them by `unit` and rotates them; see `plain.scale_and_rotate`."""
    scales = _spread(rows, signs, bound, unit)
    nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
    _last_pass(_writer(rows.device, _log(rows.shape[1])), 4 * _TILE, rows, scales, nothing, 0, nothing, None)
    return [(0, rows)]


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """The inverse rotation of one vector, in place; see `plain.rotate_back`."""
    rows, log = vector[None], _log(len(vector))
    *others, last = _passes(log)
    twice = len(vector) > 1 << log
    nothing = torch.empty(0, device=vector.device)

    def low(**names: int) -> None:
        kernel = _pass(vector.device, log, "low", FORWARD=0, **names)
        _launch(kernel, rows, [rows, rows.stride(0), signs, nothing, 0])

    def high(first: int, bits: int, exchange: int) -> None:
        _high(rows, signs, nothing, 0, first, bits, FORWARD=0, ALONE=0, EXCHANGE=exchange)

    if twice:
        low(LAST=0)
        for first, bits in others:
            high(first, bits, 0)
    high(*last, int(twice))
    for first, bits in reversed(others):
        high(first, bits, 0)
    low(LAST=1)


def _spread(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> torch.Tensor:
    """All passes but the last, and what the rows of the result are to be multiplied by."""
    (count, dim), device = rows.shape, rows.device
    log = _log(dim)
    parts = 2 << (log - _TILE_BITS)
    inverse = int(np.float32(1.0 / bound).view(np.int32))
    squares, scales = torch.zeros((count, parts), device=device), torch.empty(count, device=device)
    *others, last = _passes(log)
    twice = dim > 1 << log
    if twice:
        kernel = _pass(device, log, "low", FORWARD=1, LAST=0)
        _launch(kernel, rows, [rows, rows.stride(0), signs, squares, inverse])
        for first, bits in others:
            _high(rows, signs, squares, 0, first, bits, FORWARD=0, ALONE=0, EXCHANGE=0)
    _high(rows, signs, squares, inverse, *last, FORWARD=1, ALONE=int(not twice), EXCHANGE=int(twice))
    for first, bits in reversed(others):
        _high(rows, signs, squares, 0, first, bits, FORWARD=0, ALONE=0, EXCHANGE=0)
    kernel = _pass(device, log, "scales")
    kernel(grid=(-(-count // 8), 1, 1), block=(256, 1, 1), args=[squares, scales, count, parts, bound * unit])
    return scales


def _high(
    rows: torch.Tensor, signs: torch.Tensor, squares: torch.Tensor, inverse: int, first: int, bits: int, **names: int
) -> None:
    dim, log = rows.shape[1], _log(rows.shape[1])
    kernel = _pass(rows.device, log, "high", FIRST=first, BITS=bits, **names)
    memory = 4 * _TILE * (1 + names["EXCHANGE"])
    _launch(kernel, rows, [rows, rows.stride(0), dim - (1 << log), signs, squares, inverse], memory)


def _launch(kernel: Any, rows: torch.Tensor, arguments: list[Any], memory: int = 0) -> None:
    tiles = 1 << (_log(rows.shape[1]) - _TILE_BITS)
    kernel(grid=(len(rows) * tiles, 1, 1), block=(_THREADS, 1, 1), args=arguments, shared_mem=memory)


def _last_pass(
    kernel: Any,
    memory: int,
    rows: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    exact: torch.Tensor | None,
) -> None:
    (count, dim), device = rows.shape, rows.device
    rest = dim - (1 << _log(dim))
    blocks = _LAST_BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
    tiles = -(-dim // _TILE)
    splits = max(1, min(count // _FEWEST_ROWS, -(-_PIECES * blocks // tiles)))
    blocks = min(blocks, tiles * splits)
    late = torch.empty((blocks if exact is not None else 0, _LATE, 2), dtype=torch.int32, device=device)
    arguments = [rows, rows.stride(0), rest, scales, count, splits, sums, first, keys, late if exact is None else exact]
    kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[*arguments, late], shared_mem=memory)


def _log(dim: int) -> int:
    return dim.bit_length() - 1


def _passes(log: int) -> list[tuple[int, int]]:
    """The passes over distant coordinates: their first bits, and how many."""
    bits = log - _TILE_BITS
    if bits <= _MOST_BITS:
        return [(_TILE_BITS, bits)]
    return [(_TILE_BITS, bits // 2), (_TILE_BITS + bits // 2, bits - bits // 2)]


def _far_stages(first: int, bits: int) -> tuple[list[int], list[int]]:
    """The order of bits within a pass: one transform's, and that of a transform before it."""
    columns = _TILE_BITS - bits
    numbers = list(range(max(columns, 8), _TILE_BITS)), list(range(columns, min(8, _TILE_BITS)))
    upper, lower = ([first + number - columns for number in part] for part in numbers)
    return upper + lower, lower + upper


@lru_cache(maxsize=64)
def _pass(device: torch.device, log: int, kernel: str, **names: int) -> Any:
    found = cuda.compiled(device, kernel, "device_long.cu", _definitions(log, Rounding(1, 1, 1), _BLOCKS) | names)
    with torch.cuda.device(device):
        found.set_shared_memory_config(8 * _TILE)
    return found


@lru_cache(maxsize=8)
def _writer(device: torch.device, log: int) -> Any:
    return _pass(device, log, "finish", WRITE=1)


@lru_cache(maxsize=32)
def _finish(device: torch.device, log: int, rounding: Rounding) -> tuple[Any, int, torch.Tensor | None]:
    """The last pass, the bytes of shared memory it takes, and the table that draws by inversion take."""
    names = _definitions(log, rounding, _LAST_BLOCKS) | {"WRITE": 0}
    kernel = cuda.compiled(device, "finish", "device_long.cu", names)
    memory, exact = 4 * (_TILE + cuda.sum_words(rounding, 32) * _THREADS), None
    if cuda.is_drawn(rounding):
        memory += 8 * (rounding.limit + 1)
        exact = torch.from_numpy(cuda.quantiles(rounding.coins or 0, rounding.limit)).to(device)
    with torch.cuda.device(device):
        kernel.set_shared_memory_config(memory)
    return kernel, memory, exact


def _definitions(log: int, rounding: Rounding, blocks: int) -> dict[str, Any]:
    return {"LOG": log, "BLOCKS": blocks} | cuda.definitions(
        1 << log, rounding, threads=_THREADS, place=_PLACE, late=_LATE
    )
