"""Compiles kernels in CUDA C++ at first use, by the NVRTC that comes with PyTorch.

Kernels take their constants from definitions before the source. They read random numbers' keys on the device, two
32-bit words each, so that launches can be recorded and replayed.

4 to 15 coins are not tossed: the number of heads is drawn by inversion, with exactly the same law, in a fifth of the
time. `quantiles` returns the table, and `device_rounding.cu` draws.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import resources
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.mechanisms.interface import Rounding
from cpsgd.simulation import device_plain as plain

# The largest integer whose sums are bytes.
_LARGEST = 31
# Fewest and most coins that are drawn by inversion, and the bound on points whose table fits in shared memory.
_FEWEST_DRAWN, _MOST_DRAWN, _LARGEST_POINT = 4, 15, 4096


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, on which kernels are launched wherever their tensors are."""
    cuda: Any = torch.cuda
    already = cuda.is_initialized() and device.index == cuda.current_device()
    return nullcontext() if already or device.type != "cuda" else torch.cuda.device(device)


@cache
def compiles(device: torch.device) -> bool:
    """Returns whether kernels can be compiled for a device: an NVIDIA GPU from Ampere on, with NVRTC."""
    if device.type != "cuda" or not torch.version.cuda or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    try:
        with current(device):
            _compile('extern "C" __global__ void nothing() {}', "nothing")
    except (ImportError, OSError, RuntimeError):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a block may use."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def compiled(device: torch.device, kernel: str, files: tuple[str, ...], names: dict[str, Any], memory: int = 0) -> Any:
    """Returns a kernel compiled from some of the package's files, with at most `memory` bytes of shared memory.

    Args:
        device: The GPU it is for.
        kernel: Its name. The name in capitals is defined, so that other kernels of the files are left out.
        files: Paths below the package.
        names: Definitions before them.
        memory: Bytes of shared memory.
    """
    source = "".join(f"#define {name} {value}\n" for name, value in {kernel.upper(): 1, **names}.items())
    for file in ("simulation/device_instructions.cu", *files):
        source += resources.files("cpsgd").joinpath(file).read_text(encoding="utf-8")
    with current(device):
        function = _compile(source, kernel)
        function.set_shared_memory_config(memory)
    return _Launcher(function)


class _Launcher:
    """Launches a compiled kernel as PyTorch does, which however opens CUDA's library anew for every launch."""

    def __init__(self, function: Any) -> None:
        self._function = function
        # By the arguments' types: their layout in memory, the memory, and the address of each argument there.
        self._layouts: dict[tuple[type, ...], tuple[struct.Struct, Any, Any]] = {}
        self._lock = Lock()

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any], shared_mem: int = 0
    ) -> None:
        """Launches on the current stream; tensors go as addresses, integers as int and floats as double."""
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args]
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
        with self._lock:  # CUDA copies the arguments before it returns
            layout, memory, places = self._layout(tuple(map(type, args)))
            layout.pack_into(memory, 0, *values)
            error = _library().cuLaunchKernel(self._function.func, *grid, *block, shared_mem, stream, places, None)
        if error:
            torch.cuda._utils._check_cuda(error)

    def _layout(self, kinds: tuple[type, ...]) -> tuple[struct.Struct, Any, Any]:
        if kinds not in self._layouts:
            codes = [
                "P" if issubclass(kind, torch.Tensor) else "d" if issubclass(kind, float) else "i" for kind in kinds
            ]
            layout = struct.Struct("".join(codes))
            memory = ctypes.create_string_buffer(layout.size)
            ends = [struct.calcsize("".join(codes[: k + 1])) for k in range(len(codes))]
            starts = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
            places = (ctypes.c_void_p * len(codes))(*(ctypes.addressof(memory) + start for start in starts))
            self._layouts[kinds] = layout, memory, places
        return self._layouts[kinds]


@cache
def _library() -> Any:
    return torch.cuda._utils._get_gpu_runtime_library()


def _compile(source: str, kernel: str) -> Any:
    """Compiles for the current GPU. PyTorch looks for a CUDA toolkit's headers, which the kernels do not need."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or sys.prefix
    try:
        return torch.cuda._compile_kernel(source, kernel)
    finally:
        cpp_extension.CUDA_HOME = home


def definitions(tile_log: int, log: int, rounding: Rounding) -> dict[str, Any]:
    """Returns the definitions for `device_rounding.cu`, for tiles of 2^tile_log numbers and transforms of 2^log."""
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
    """Returns whether `device_rounding.cu` can round this way: it has limits on coins and on grid points."""
    return rounding.limit < 1 << 22 and (rounding.coins is None or rounding.largest <= _LARGEST)


def is_wide(rounding: Rounding) -> bool:
    """Returns whether integers are too large for sums in bytes, so that sums are words."""
    return rounding.largest > _LARGEST


def sum_words(rounding: Rounding, count: int) -> int:
    """Returns the number of words that hold the sums of `count` coordinates."""
    return count if is_wide(rounding) else -(-count // 4)


def is_drawn(rounding: Rounding) -> bool:
    """Returns whether heads are drawn by inversion."""
    coins = rounding.coins or 0
    return _FEWEST_DRAWN <= coins <= _MOST_DRAWN and rounding.limit < _LARGEST_POINT


def table_bytes(rounding: Rounding) -> int:
    """Returns the bytes of shared memory for the first bits of `quantiles`."""
    return 8 * (rounding.limit + 1) if is_drawn(rounding) else 0


def coin_bits(coins: int) -> int:
    """Returns the mask of the bits of a random word that serve as coins.

    Bits 14, 15, 30 and 31 are always in it; of the others, the lowest are added until there are `coins`.
    """
    others = [bit for bit in range(32) if 0x3F003F00 >> bit & 1]
    return 0xC000C000 | sum(1 << bit for bit in others[: max(0, coins - 4)])


def quantiles(coins: int, limit: int) -> NDArray[np.int32]:
    """Returns the probability that at most k of `coins` coins are forced, for each grid point: [limit + 1, coins, 8].

    The first index is |g| = 0, ..., limit, the second k = 0, ..., coins - 1. Each coin is forced with probability
    |g| / 2^15. Probabilities are integers over 2^239, as 15 bits and seven words of 32; up to 15 coins they are exact.
    """
    sizes = np.arange(limit + 1).astype(object)
    rows, below = [], np.zeros(limit + 1, dtype=object)
    for k in range(coins):
        below = below + math.comb(coins, k) * sizes**k * ((1 << 15) - sizes) ** (coins - k)
        scaled = below << (15 + 7 * 32 - 15 * coins)
        rows.append(np.frombuffer(b"".join(int(chance).to_bytes(32, "big") for chance in scaled), dtype=">u4"))
    table = np.stack([row.reshape(-1, 8) for row in rows], axis=1)
    return np.ascontiguousarray(table.astype(np.uint32)).view(np.int32)


def exact_table(rounding: Rounding, device: torch.device) -> torch.Tensor | None:
    """Returns `quantiles` on a device, or None if heads are not drawn by inversion."""
    if not is_drawn(rounding):
        return None
    return torch.from_numpy(quantiles(rounding.coins or 0, rounding.limit)).to(device)
