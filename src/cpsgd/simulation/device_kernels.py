"""Compiles kernels in CUDA C++ when they are first used, by the NVRTC that comes with PyTorch.

Kernels take their constants from definitions before the source, and random numbers' keys from the device, two 32-bit
words each, so that launches can be recorded and replayed.

4 to 15 coins are not tossed: the number of heads is drawn by inversion, with the same law, exactly, in a fifth of the
time. `quantiles` has the table, `device_rounding.cu` the draw.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.mechanisms.base import Rounding
from cpsgd.simulation import device_plain as plain

# The largest integers whose sums are bytes.
_LARGEST = 31
# Numbers of coins that are drawn by inversion, for points up to a size whose table fits in shared memory.
_FEWEST_DRAWN, _MOST_DRAWN, _LARGEST_POINT = 4, 15, 4096


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: kernels are launched there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def compiles(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device: an NVIDIA GPU from Ampere on, with NVRTC."""
    if device.type != "cuda" or not torch.version.cuda or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    try:
        with current(device):
            _compile('extern "C" __global__ void nothing() {}', "nothing")
    except (ImportError, OSError, RuntimeError):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def compiled(device: torch.device, kernel: str, files: tuple[str, ...], names: dict[str, Any], memory: int = 0) -> Any:
    """Returns a kernel of some of the package's files, which may ask for `memory` bytes of shared memory.

    Args:
        device: The GPU it is for.
        kernel: Its name. The same in capitals is defined, too, so that other kernels of the files can be left out.
        files: Paths below the package.
        names: What is defined before them.
        memory: Bytes of shared memory.
    """
    source = "".join(f"#define {name} {value}\n" for name, value in {kernel.upper(): 1, **names}.items())
    for file in ("simulation/device_instructions.cu", *files):
        source += resources.files("cpsgd").joinpath(file).read_text(encoding="utf-8")
    with current(device):
        found = _compile(source, kernel)
        found.set_shared_memory_config(memory)
    return found


def _compile(source: str, kernel: str) -> Any:
    """Compiles for the current GPU. PyTorch asks for a CUDA toolkit's headers, of which the kernels need none."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or sys.prefix
    try:
        return torch.cuda._compile_kernel(source, kernel)
    finally:
        cpp_extension.CUDA_HOME = home


def definitions(tile_log: int, log: int, rounding: Rounding) -> dict[str, Any]:
    """The names that `device_rounding.cu` needs, for tiles of 2^tile_log numbers and transforms of 2^log."""
    return {
        "TILE_LOG": tile_log,
        "NORMALISE": f"{np.float32(plain.split(1 << log)[2]).view(np.uint32):#x}u",
        "LIMIT": rounding.limit,
        "OFFSET": rounding.offset,
        "FRACTION": rounding.fraction_bits,
        "SAMPLED": int(rounding.rate is not None),
        "RATE": rounding.rate or 0,
        "COINS": rounding.coins or 0,
        "WIDE": int(is_wide(rounding)),
        "FLUSH": max(1, (0xFFFFFFFF if is_wide(rounding) else 255) // rounding.largest),
        "ROUNDING": plain.ROUNDING,
        "TOSSES": plain.TOSSES,
        "COIN_WORDS": plain.COINS,
        "LONGEST": plain.LONGEST,
        "QUANTILES": int(is_drawn(rounding)),
        "MASK": f"{coin_bits(rounding.coins or 0):#x}u",
    }


def can_draw(rounding: Rounding) -> bool:
    """Whether `device_rounding.cu` draws such integers: all but those of many coins and of very fine grids."""
    return rounding.limit < 1 << 22 and (rounding.coins is None or rounding.largest <= _LARGEST)


def is_wide(rounding: Rounding) -> bool:
    """Whether integers are so large that their sums are words: as bytes they would have to leave a block too often."""
    return rounding.largest > _LARGEST


def sum_words(rounding: Rounding, count: int) -> int:
    """The number of words that hold the sums of `count` coordinates."""
    return count if is_wide(rounding) else -(-count // 4)


def is_drawn(rounding: Rounding) -> bool:
    """Whether heads are drawn by inversion."""
    coins = rounding.coins or 0
    return _FEWEST_DRAWN <= coins <= _MOST_DRAWN and rounding.limit < _LARGEST_POINT


def table_bytes(rounding: Rounding) -> int:
    """Bytes of shared memory for the first bits of `quantiles`."""
    return 8 * (rounding.limit + 1) if is_drawn(rounding) else 0


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


def exact_table(rounding: Rounding, device: torch.device) -> torch.Tensor | None:
    """`quantiles` on a device, where heads are drawn by inversion."""
    if not is_drawn(rounding):
        return None
    return torch.from_numpy(quantiles(rounding.coins or 0, rounding.limit)).to(device)
