"""A round's kernel in CUDA C++, compiled when it is first used by the NVRTC that comes with PyTorch.

A client's whole vector is clipped, rotated and rounded within one multiprocessor, and the sums of all clients that it
takes on stay there, too, unless their integers are large: nothing is written but sums (`device_cuda.cu`). It is for
GPUs with so much shared memory as Hopper's and for vectors of 2^15 to 2^16 - 1 coordinates. Longer ones are for
`device_long.py`, and `device_fused.py` does the others.

The integers are those of `device_plain.py`, bit for bit, with two exceptions. The last digit of a clipped vector's
factor may be another. And 4 to 15 coins are not tossed: how many show heads is drawn by inversion, with the same law,
exactly, in a fifth of the time.

Gradients of dense layers are products of two numbers each, and need not be written either: see `Products`.

Keys of random numbers are on the device, two 32-bit words each, so that launches can be recorded and replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.mechanisms.base import Rounding
from cpsgd.simulation import device_plain as plain

# What one block holds, and how many bytes of shared memory it takes beside sums and factors; numbers as the kernel's.
_SIZE, _THREADS, _CHUNKS, _CHUNK = 1 << 15, 1024, 4096, 16
_BUFFER = 4 * _SIZE + 4096
# And those of its variables that are always there.
_STATIC = 16
# The largest integers whose sums are bytes.
_LARGEST = 31
# So many coins are not tossed but drawn by inversion, where what it takes fits beside the rest.
_FEWEST_DRAWN, _MOST_DRAWN, _LARGEST_POINT = 4, 15, 4096
# Draws that a block may put off.
_LATE = 3 * _SIZE
# Chunks: nothing to be multiplied, or each coordinate has factors of its own.
_NOTHING, _MIXED = 0xFFFFFFFF, 0xFFFFFFFE


@dataclass(frozen=True)
class Layout:
    """Which products make up a vector: layers' weights, each row by row, followed by their biases.

    Attributes:
        layers: Width and depth of each layer.
    """

    layers: tuple[tuple[int, int], ...]

    @property
    def dim(self) -> int:
        """Coordinates of a vector."""
        return sum(width * depth + width for width, depth in self.layers)

    @property
    def ends(self) -> list[int]:
        """Where factors end: for each layer those that came in, then those that flow back."""
        return list(accumulate(size for width, depth in self.layers for size in (depth, width)))

    @property
    def factors(self) -> int:
        """Factors of a vector; the last is 1, for biases."""
        return self.ends[-1] + 1

    def pairs(self) -> NDArray[np.int64]:
        """The two factors of each coordinate, [dim, 2]: what flows back and what came in."""
        found = []
        one = self.factors - 1
        for (width, depth), middle in zip(self.layers, self.ends[::2], strict=True):
            back, incoming = middle + np.arange(width), middle - depth + np.arange(depth)
            found.append(np.stack(np.meshgrid(back, incoming, indexing="ij"), axis=-1).reshape(-1, 2))
            found.append(np.stack([back, np.full(width, one)], axis=-1))
        return np.concatenate(found)


@dataclass(frozen=True)
class Products:
    """Vectors as products of factors, one row [factors] of float32 per client."""

    layout: Layout
    factors: torch.Tensor


def supports(device: torch.device, dim: int, rounding: Rounding) -> bool:
    """Whether the kernel runs on a device, for vectors of so many coordinates rounded in this way."""
    if not (_SIZE <= dim < 2 * _SIZE and can_draw(rounding) and device.type == "cuda" and compiles(device)):
        return False
    return fits(device, dim, rounding)


def fits(device: torch.device, dim: int, rounding: Rounding, layout: Layout | None = None) -> bool:
    """Whether what a block holds, with the factors of such products, has room in a GPU's shared memory."""
    return shared_bytes(dim, rounding, layout) <= _optional_memory(device) - _STATIC


def shared_bytes(dim: int, rounding: Rounding, layout: Layout | None = None) -> int:
    """Bytes of shared memory that a block of `encode` asks for."""
    names = _definitions(dim, rounding, layout.factors if layout else 0)
    tail = -(-names["REST"] // _THREADS)
    words = 0 if is_wide(rounding) else sum_words(rounding, _SIZE // _THREADS) + sum_words(rounding, tail)
    table = 8 * (rounding.limit + 1) if is_drawn(rounding) else 0
    return int(_BUFFER + 4 * (words * _THREADS + names["FACTORS_END"]) + table)


def can_draw(rounding: Rounding) -> bool:
    """Whether the kernels draw such integers: all but many coins."""
    return rounding.limit < 1 << 22 and (rounding.coins is None or rounding.largest <= _LARGEST)


def is_wide(rounding: Rounding) -> bool:
    """Whether integers are so large that their sums are words: as bytes they would have to leave a block too often."""
    return rounding.largest > _LARGEST


def sum_words(rounding: Rounding, count: int) -> int:
    """How many words hold the sums of `count` coordinates."""
    return count if is_wide(rounding) else -(-count // 4)


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
    """Clips rows to norm `bound`, multiplies them by `unit`, rotates, rounds and adds them to `sums` (int64)."""
    (count, dim), device = rows.shape, rows.device
    scales = torch.empty(count, device=device)
    lengths = _lengths(device, dim, 0)
    lengths(grid=(count, 1, 1), block=(256, 1, 1), args=[rows, rows.stride(0), scales, bound, unit])
    arguments = [rows, rows.stride(0), scales, signs, sums, count, first, keys]
    _launch(_kernel(device, dim, rounding, None), arguments, rows)


def add_products(
    products: Products,
    sums: torch.Tensor,
    signs: torch.Tensor,
    *,
    bound: float,
    unit: float,
    keys: torch.Tensor,
    first: int,
    rounding: Rounding,
) -> None:
    """As `add_rows`, for products."""
    factors, layout = products.factors, products.layout
    device, count = factors.device, len(factors)
    chunks, pairs, ends = _tables(layout, device)
    scales = torch.empty(count, device=device)
    lengths = _lengths(device, layout.dim, layout.factors)
    arguments = [factors, ends, scales, count, len(layout.layers), bound, unit]
    lengths(grid=(-(-count // 8), 1, 1), block=(256, 1, 1), args=arguments)
    arguments = [factors, chunks, pairs, scales, signs, sums, count, first, keys]
    _launch(_kernel(device, layout.dim, rounding, layout), arguments, factors)


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """The inverse rotation of one vector, in place; see `plain.rotate_back`."""
    _back(vector.device, len(vector))(grid=(1, 1, 1), block=(_THREADS, 1, 1), args=[vector, signs], shared_mem=_BUFFER)


def add_coins(sums: torch.Tensor, *, keys: torch.Tensor, trials: int) -> None:
    """Adds Binomial(trials, ½) to each of `sums`; see `plain.add_coins`."""
    grid = -(-len(sums) // 256), -(-trials // (128 * 64)), 1
    _tosser(sums.device)(grid=grid, block=(256, 1, 1), args=[sums, len(sums), trials, keys])


def _launch(kernel: CompiledKernel, arguments: list[Any], vectors: torch.Tensor) -> None:
    device = vectors.device
    blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, len(vectors))
    if kernel.exact is not None:
        arguments = [*arguments, kernel.exact, torch.empty((blocks, _LATE, 2), dtype=torch.int32, device=device)]
    elif kernel.far_words:
        arguments = [*arguments, torch.empty((blocks, kernel.far_words), dtype=torch.int32, device=device)]
    kernel.launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=arguments, shared_mem=kernel.memory)


def _optional_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


@cache
def compiles(device: torch.device) -> bool:
    """Whether there is a compiler, and shared memory enough; the compiler needs a CUDA toolkit's headers."""
    if _optional_memory(device) < 220 << 10 or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    try:
        with torch.cuda.device(device):
            torch.cuda._compile_kernel('extern "C" __global__ void nothing() {}', "nothing")
    except (OSError, RuntimeError):
        return False
    return True


def compiled(device: torch.device, kernel: str, file: str, names: dict[str, Any]) -> Any:
    """One of a file's kernels, with these names defined."""
    names = {kernel.upper(): 1, **names}
    parts = [f"#define {name} {value}\n" for name, value in names.items()]
    for part in ("device_rounding.cu", file):
        parts.append(resources.files("cpsgd.simulation").joinpath(part).read_text(encoding="utf-8"))
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel("".join(parts), kernel)


def definitions(dim: int, rounding: Rounding, *, threads: int, place: str, late: int) -> dict[str, Any]:
    """What `device_rounding.cu` must be told; `place` is the coordinate of a thread's register r."""
    return {
        "THREADS": threads,
        "PLACE(r)": place,
        "LATE": late,
        "NORMALISE": f"{np.float32(plain.split(dim)[2]).view(np.uint32):#x}u",
        "LIMIT": rounding.limit,
        "OFFSET": rounding.offset,
        "FRACTION": rounding.fraction_bits,
        "SAMPLED": int(rounding.rate is not None),
        "RATE": rounding.rate or 0,
        "COINS": rounding.coins or 0,
        "WIDE": int(is_wide(rounding)),
        "FLUSH": (0xFFFFFFFF if is_wide(rounding) else 255) // rounding.largest,
        "ROUNDING": plain.ROUNDING,
        "TOSSES": plain.TOSSES,
        "COIN_WORDS": plain.COINS,
        "LONGEST": plain.LONGEST,
        "QUANTILES": int(is_drawn(rounding)),
        "MASK": f"{coin_bits(rounding.coins or 0):#x}u",
    }


def _definitions(dim: int, rounding: Rounding, factors: int) -> dict[str, Any]:
    size, rest, _ = plain.split(dim)
    assert size == _SIZE
    return {
        **definitions(dim, rounding, threads=_THREADS, place="((r) << 10)", late=_LATE),
        "REST": rest,
        "FAR_SUMS": int(is_wide(rounding)),
        "PRODUCTS": int(factors > 0),
        "FACTORS": max(factors, 32),
        "FACTORS_END": (max(factors, 32) * 36 // 32 + 35) // 4 * 4,
    }


def _compiled(device: torch.device, kernel: str, names: dict[str, Any]) -> Any:
    return compiled(device, kernel, "device_cuda.cu", names)


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, and what it takes.

    Attributes:
        launch: The kernel.
        memory: Bytes of shared memory.
        exact: The table that draws by inversion take; None where there are none.
        far_words: Words of a block's sums in global memory; 0 where they are in shared memory.
    """

    launch: Any
    memory: int
    exact: torch.Tensor | None
    far_words: int


# These are never thrown away: rounds that were recorded know nothing but their addresses.
@cache
def _kernel(device: torch.device, dim: int, rounding: Rounding, layout: Layout | None) -> CompiledKernel:
    names = _definitions(dim, rounding, layout.factors if layout else 0)
    kernel = _compiled(device, "encode", names)
    tail = -(-names["REST"] // _THREADS)
    far = _SIZE + tail * _THREADS if is_wide(rounding) else 0
    memory, exact = shared_bytes(dim, rounding, layout), None
    with torch.cuda.device(device):
        if is_drawn(rounding):
            exact = torch.from_numpy(quantiles(rounding.coins or 0, rounding.limit)).to(device)
        kernel.set_shared_memory_config(memory)
    return CompiledKernel(kernel, memory, exact, far)


def is_drawn(rounding: Rounding) -> bool:
    """Whether heads are drawn by inversion."""
    coins = rounding.coins or 0
    return _FEWEST_DRAWN <= coins <= _MOST_DRAWN and rounding.limit < _LARGEST_POINT


def coin_bits(coins: int) -> int:
    """The bits of a random word that show coins: the first four that are forced, and as many others as it takes."""
    others = [bit for bit in range(32) if 0x3F003F00 >> bit & 1]
    return 0xC000C000 | sum(1 << bit for bit in others[: max(0, coins - 4)])


def quantiles(coins: int, limit: int) -> NDArray[np.int32]:
    """For |g| = 0, ..., limit the chance that at most k = 0, ..., coins - 1 coins are forced: [limit + 1, coins, 8].

    Each coin is with probability |g| / 2^15. A chance is an integer over 2^239, whose first 15 bits and words of 32
    follow each other; with at most 15 coins it is exact.
    """
    sizes = np.arange(limit + 1).astype(object)
    rows, below = [], np.zeros(limit + 1, dtype=object)
    for k in range(coins):
        below = below + math.comb(coins, k) * sizes**k * ((1 << 15) - sizes) ** (coins - k)
        scaled = below << (15 + 7 * 32 - 15 * coins)
        rows.append(np.frombuffer(b"".join(int(chance).to_bytes(32, "big") for chance in scaled), dtype=">u4"))
    found = np.stack([row.reshape(-1, 8) for row in rows], axis=1)
    return np.ascontiguousarray(found.astype(np.uint32)).view(np.int32)


@cache
def _lengths(device: torch.device, dim: int, factors: int) -> Any:
    names = _definitions(dim, Rounding(1, 1, 1), factors)
    return _compiled(device, "lengths", names)


@cache
def _back(device: torch.device, dim: int) -> Any:
    names = _definitions(dim, Rounding(1, 1, 1), 0)
    kernel = _compiled(device, "back", names)
    with torch.cuda.device(device):
        kernel.set_shared_memory_config(_BUFFER)
    return kernel


@cache
def _tosser(device: torch.device) -> Any:
    names = _definitions(_SIZE, Rounding(1, 1, 1), 0)
    return _compiled(device, "toss", names)


@cache
def _tables(layout: Layout, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What the kernel multiplies: for chunks of 16 coordinates, for single ones, and where factors end."""
    chunks, pairs = chunk_tables(layout)
    ends = torch.tensor(layout.ends, dtype=torch.int32, device=device)
    return torch.from_numpy(chunks).to(device), torch.from_numpy(pairs).to(device), ends


def chunk_tables(layout: Layout) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Places of factors in shared memory, left + 2^16 · right, of chunks [4096] and coordinates [16, 4096].

    Of a chunk whose coordinates are one factor times 16 neighbours the places of the first are enough. After each 32
    factors four places are left free, so that threads that read different chunks read different banks.
    """
    factors = layout.pairs()
    places = factors + factors // 32 * 4
    every = np.full((_CHUNKS, _CHUNK), _NOTHING, dtype=np.int64)
    every.reshape(-1)[: layout.dim] = places[:, 0] + (places[:, 1] << 16)
    inside = (every != _NOTHING).all(axis=1)
    first = every[:, 0] >> 16
    neighbours = (every - every[:, :1] == np.arange(_CHUNK) << 16).all(axis=1) & (first % 4 == 0)
    chunks = np.where(inside & neighbours, every[:, 0], _MIXED)
    chunks[(every == _NOTHING).all(axis=1)] = _NOTHING
    return chunks.astype(np.uint32).view(np.int32), np.ascontiguousarray(every.T).astype(np.uint32).view(np.int32)
