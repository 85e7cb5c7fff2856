"""Kernels in CUDA C++ for vectors of 2^14 coordinates and more, in three passes over memory (`device_long.cu`).

A transform's stages commute, so that those over distant coordinates of both transforms are one pass, with the exchange
between the two; the last pass rounds and adds up, and writes sums only. Beside the rows, which are overwritten, it
takes some bytes per row and tile.

Stages come in another order than in `device_plain.py`, and clipping comes last: a rotated number may differ in its last
digits, and a few in a million of the integers by one. `stages` gives the order, for those who want equality. Random
words are the same, and coins are drawn as `device_kernels.py` says.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.mechanisms.interface import Rounding
from cpsgd.simulation import device_kernels as kernels
from cpsgd.simulation import device_plain as plain

_FILES = "simulation/device_rounding.cu", "simulation/device_long.cu"
# Bits of a tile's coordinates, threads of a block, and the most bits that one pass over distant coordinates takes.
_TILE_BITS, _THREADS, _MOST_BITS = 13, 256, 10
_TILE = 1 << _TILE_BITS
# Blocks that share a multiprocessor; more in the last pass, which needs fewer registers.
_BLOCKS, _LAST_BLOCKS = 2, 3
# Pieces of work for a block of the last pass, and the fewest rows of a piece.
_PIECES, _FEWEST_ROWS = 8, 16
# Draws that a block may postpone.
_LATE = _TILE + 1024
# The kernel of the last pass, its bytes of shared memory, and the table for draws by inversion.
_Last = tuple[Any, int, torch.Tensor | None]


def supports(dim: int) -> bool:
    """Returns whether vectors of this length are long enough for these kernels."""
    return dim >= 2 * _TILE


def stages(dim: int) -> tuple[list[int], list[int]]:
    """Returns the order of the Hadamard stages of `device_long.cu`, for the first and the second transform.

    b stands for the stage at distance 2^b. The second is empty if `dim` is a power of two.

    Example:
        >>> stages(1 << 16)
        ([13, 14, 15, 5, 6, 7, 0, 1, 2, 3, 4, 10, 11, 12, 8, 9], [])
    """
    size, rest, _ = plain.split(dim)
    low = [5, 6, 7, 0, 1, 2, 3, 4, 10, 11, 12, 8, 9]  # within a tile, as `device_long.cu` goes
    *others, (last, last_before) = (_far_stages(first, bits) for first, bits in _passes(size.bit_length() - 1))
    alone = [order for order, _ in others]
    final = last + [bit for order in reversed(alone) for bit in order] + low
    if not rest:
        return final, []
    return low + [bit for order in alone for bit in order] + last_before, final


def add_rows(rows: torch.Tensor, sums: torch.Tensor, encoding: plain.Encoding, first: int) -> None:
    """Adds rows to `sums` as `device_plain.add_rows` does, with a rotation. The rows are overwritten."""
    assert encoding.signs is not None
    scales = _spread(rows, encoding.signs, encoding.bound, encoding.unit)
    last = _last_kernel(rows.device, _log(rows.shape[1]), encoding.rounding)
    _last_pass(last, rows, scales, sums, first, encoding.keys)


def scale_and_rotate(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> None:
    """Clips rows to norm `bound`, multiplies them by `unit` and rotates them, in place."""
    scales = _spread(rows, signs, bound, unit)
    nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
    kernel = _pass(rows.device, _log(rows.shape[1]), "finish", WRITE=1)
    _last_pass((kernel, 4 * _TILE, None), rows, scales, nothing, 0, nothing)


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """Rotates one vector back, in place."""
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
    """Does all passes of the rotation but the last, in place, and returns the factor of each row.

    The factor clips the row to norm `bound` and multiplies it by `unit`; the last pass applies it. A dimension that is
    no power of two takes two transforms: of the first coordinates, and of the last ones.
    """
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
    last: _Last, rows: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, first: int, keys: torch.Tensor
) -> None:
    """Launches the last pass: it ends the rotation, rounds, and adds to `sums`."""
    (count, dim), device, (kernel, memory, exact) = rows.shape, rows.device, last
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
    """Returns the first bit and the number of bits of each pass over distant coordinates."""
    bits = log - _TILE_BITS
    if bits <= _MOST_BITS:
        return [(_TILE_BITS, bits)]
    return [(_TILE_BITS, bits // 2), (_TILE_BITS + bits // 2, bits - bits // 2)]


def _far_stages(first: int, bits: int) -> tuple[list[int], list[int]]:
    """Returns the order of bits within a pass, for one transform and for a transform before it."""
    columns = _TILE_BITS - bits
    numbers = list(range(max(columns, 8), _TILE_BITS)), list(range(columns, min(8, _TILE_BITS)))
    upper, lower = ([first + number - columns for number in part] for part in numbers)
    return upper + lower, lower + upper


@lru_cache(maxsize=64)
def _pass(device: torch.device, log: int, kernel: str, **names: int) -> Any:
    names = _definitions(log, Rounding(1, 1, 1), _BLOCKS) | names
    return kernels.compiled(device, kernel, _FILES, names, 8 * _TILE)


@lru_cache(maxsize=32)
def _last_kernel(device: torch.device, log: int, rounding: Rounding) -> _Last:
    """Returns the kernel of the last pass, its shared memory in bytes, and the table that its noise is drawn from."""
    names = _definitions(log, rounding, _LAST_BLOCKS) | {"WRITE": 0}
    memory = 4 * (_TILE + kernels.sum_words(rounding, 32) * _THREADS) + kernels.table_bytes(rounding)
    kernel = kernels.compiled(device, "finish", _FILES, names, memory)
    return kernel, memory, kernels.exact_table(rounding, device)


def _definitions(log: int, rounding: Rounding, blocks: int) -> dict[str, Any]:
    return {"LOG": log, "BLOCKS": blocks, "LATE": _LATE} | kernels.definitions(_TILE_BITS, log, rounding)
