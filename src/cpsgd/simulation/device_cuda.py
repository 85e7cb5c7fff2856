"""The kernels of `device_plain.py` in CUDA C++, for NVIDIA GPUs from Ampere on.

* From 2^15 to 2^16 - 1 coordinates one kernel clips, rotates and rounds a client's vector within one multiprocessor
  (`device_fused.cu`), and from 2^13 on if coins are tossed or vectors are products. Small integers are added up there,
  too, and only sums are written. It was written for the paper's network of 51,370 parameters. The other kernels take
  vectors that do not fit in shared memory, or integers of many coins.
* Longer vectors take several passes over memory (`device_long.py`).
* All other vectors are processed step by step (`device_steps.cu`).

The integers are those of `device_plain.py`, bit for bit, with three exceptions. The last digit of a clipped vector's
factor may differ. 4 to 15 coins may be drawn by inversion (`device_kernels.py`). Long vectors are added up in another
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from cpsgd._torch import torch
from cpsgd.mechanisms.interface import Rounding
from cpsgd.simulation import device_kernels as kernels
from cpsgd.simulation import device_long as long
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.device_plain import Encoding
from cpsgd.simulation.products import Layout, Products, chunk_tables

_FUSED = "simulation/device_rounding.cu", "simulation/device_fused.cu"
_STEPS = "simulation/device_rounding.cu", "simulation/device_steps.cu"
# Smallest transform that the fused kernel takes and largest that one block takes, as powers of two.
_SMALLEST_FUSED, _LARGEST = 13, 15
# Bytes of shared memory that the fused kernel takes beside its numbers: to align them, and for its variables.
_ALIGNMENT, _STATIC = 4096, 16
# Threads and rows of a block that rounds.
_SUM_THREADS, _SUM_ROWS = 128, 128
# Rounding for kernels that do not round.
_NONE = Rounding(1, 1, 1)


def runs_on(device: torch.device) -> bool:
    """Returns whether the kernels run on a device."""
    return kernels.compiles(device)


def takes(device: torch.device, dim: int, rounding: Rounding, layout: Layout | None = None) -> bool:
    """Returns whether the fused kernel takes vectors of `dim` coordinates, or products, with this rounding."""
    if not (_SMALLEST_FUSED <= _log(dim) <= _LARGEST and kernels.can_draw(rounding)):
        return False
    return fused_memory(dim, rounding, layout) <= kernels.shared_memory(device) - _STATIC


def is_fused_faster(rounding: Rounding) -> bool:
    """Returns whether the fused kernel adds rows that it takes faster than `device_steps.cu` does.

    It does where heads are drawn by inversion (`benchmarks/gpu.py`). Products it always adds: their vectors are nowhere
    in memory.
    """
    return kernels.is_drawn(rounding)


def fused_memory(dim: int, rounding: Rounding, layout: Layout | None = None) -> int:
    """Returns the bytes of shared memory that a block of the fused kernel needs."""
    size, rest, _ = plain.split(dim)
    words = 0 if kernels.is_wide(rounding) else kernels.sum_words(rounding, 32) + _tail_words(rounding, rest, size)
    places = words * (size // 32) + _factor_places(layout)
    return _ALIGNMENT + 4 * (size + places) + kernels.table_bytes(rounding)


def add_rows(rows: torch.Tensor, sums: torch.Tensor, encoding: Encoding, first: int) -> None:
    """Adds rows to `sums` as `device_plain.add_rows` does. The rows are overwritten."""
    (count, dim), device, rounding = rows.shape, rows.device, encoding.rounding
    if encoding.signs is not None and takes(device, dim, rounding) and is_fused_faster(rounding):
        scales = torch.empty(count, device=device)
        arguments = [rows, rows.stride(0), scales, encoding.bound, encoding.unit]
        _lengths(device, dim, None)(grid=(count, 1, 1), block=(256, 1, 1), args=arguments)
        _encode([rows, rows.stride(0)], scales, sums, encoding, first, None)
    elif encoding.signs is not None and is_long(device, dim) and kernels.can_draw(rounding):
        long.add_rows(rows, sums, encoding, first)
    else:
        to_grid(rows, encoding)
        round_and_sum(rows, sums, keys=encoding.keys, first=first, rounding=rounding)


def to_grid(rows: torch.Tensor, encoding: Encoding) -> None:
    """Clips and rotates clients' rows in place, to grid units."""
    if encoding.signs is None:
        plain.scale(rows, encoding.bound, encoding.unit)
    else:
        scale_and_rotate(rows, encoding.signs, encoding.bound, encoding.unit)


def add_products(products: Products, sums: torch.Tensor, encoding: Encoding, first: int) -> None:
    """Adds vectors that are products to `sums`, as `add_rows` does."""
    factors, layout = products.factors, products.layout
    device, count = factors.device, len(factors)
    chunks, pairs, ends = _tables(layout, device)
    scales = torch.empty(count, device=device)
    arguments = [factors, ends, scales, count, len(layout.layers), encoding.bound, encoding.unit]
    _lengths(device, layout.dim, layout)(grid=(-(-count // 8), 1, 1), block=(256, 1, 1), args=arguments)
    _encode([factors, chunks, pairs], scales, sums, encoding, first, layout)


def scale_and_rotate(rows: torch.Tensor, signs: torch.Tensor, bound: float, unit: float) -> None:
    """Clips rows to norm `bound`, multiplies them by `unit` and rotates them, in place."""
    (count, dim), device = rows.shape, rows.device
    if is_long(device, dim):
        long.scale_and_rotate(rows, signs, bound, unit)
        return
    size, rest, _ = plain.split(dim)
    staged = step_memory(_log(dim)) + 4 * rest <= kernels.shared_memory(device) - _STATIC
    step = _step(device, "rotate", _log(dim), staged)
    memory = step_memory(_log(dim)) + (4 * rest * step.rows if staged else 0)
    grid = -(-count // step.rows), 1, 1
    arguments = [rows, rows.stride(0), dim - size, count, signs, bound, unit]
    step.launch(grid=grid, block=(step.threads * step.rows, 1, 1), args=arguments, shared_mem=memory)


def round_and_sum(
    rows: torch.Tensor, sums: torch.Tensor, *, keys: torch.Tensor, first: int, rounding: Rounding
) -> None:
    """Turns rows in grid units into integers and adds them to `sums` (int64)."""
    count, dim = rows.shape
    # A thread's sums fit in 31 bits.
    clients = min(_SUM_ROWS, (2**31 - 1) // rounding.largest)
    group = plain.SLAB * (8 if 0 < (rounding.coins or 0) <= plain.FEW_COINS else 4)
    blocks = -(-(-(-dim // group) * min(dim, plain.SLAB)) // _SUM_THREADS)
    arguments = [rows, rows.stride(0), dim, count, clients, sums, first, keys]
    grid = blocks * -(-count // clients), 1, 1
    _summer(rows.device, rounding)(grid=grid, block=(_SUM_THREADS, 1, 1), args=arguments)


@dataclass(frozen=True)
class PlayedLineages:
    """Noise parameters of a round for `device_clients.cu`, whose clients also add noise of earlier rounds.

    Attributes:
        keys: Those of the earlier rounds' noise, of this round's, and of rounding.
        deviations: Of the earlier rounds' noise and of this round's, in steps.
        limit: Grid points are clipped to plus or minus this.
        unit: Distance of grid points, in steps.
        inherited: The noise of earlier rounds is clipped to plus or minus this.
        largest: Integers are at most twice this.
    """

    keys: torch.Tensor
    deviations: torch.Tensor
    limit: int
    unit: float
    inherited: float
    largest: float

    def add(self, points: torch.Tensor, sums: torch.Tensor, first: int) -> None:
        """Adds the integers of clients `first`, `first` + 1, ... to `sums`, given their rows in grid units."""
        count, dim = points.shape
        grid = -(-dim // (8 * _SUM_THREADS)), -(-count // _SUM_ROWS), 1
        sizes = [points, points.stride(0), dim, count, _SUM_ROWS, sums, first, self.keys, self.deviations]
        arguments = [*sizes, len(self.deviations) - 1, self.unit, self.inherited, self.largest]
        _player(points.device, self.limit)(grid=grid, block=(_SUM_THREADS, 1, 1), args=arguments)


def rotate_back(vector: torch.Tensor, signs: torch.Tensor) -> None:
    """Rotates one vector back, in place."""
    device, dim = vector.device, len(vector)
    if is_long(device, dim):
        long.rotate_back(vector, signs)
        return
    step = _step(device, "back", _log(dim))
    arguments = [vector, dim - (1 << _log(dim)), signs]
    step.launch(grid=(1, 1, 1), block=(step.threads, 1, 1), args=arguments, shared_mem=step.memory)


def add_coins(sums: torch.Tensor, *, keys: torch.Tensor, trials: int) -> None:
    """Adds Binomial(trials, ½) to each of `sums`."""
    grid = -(-len(sums) // 256), -(-trials // (128 * 64)), 1
    _tosser(sums.device)(grid=grid, block=(256, 1, 1), args=[sums, len(sums), trials, keys])


def is_long(device: torch.device, dim: int) -> bool:
    """Returns whether vectors are too long for one block or its shared memory, and so for `device_long.py`."""
    return _log(dim) > _LARGEST or (long.supports(dim) and 4 << _log(dim) > kernels.shared_memory(device))


def _encode(
    vectors: list[Any], scales: torch.Tensor, sums: torch.Tensor, encoding: Encoding, first: int, layout: Layout | None
) -> None:
    """Adds rows to `sums` with the fused kernel."""
    device, count = sums.device, len(scales)
    kernel = _fused(device, len(sums), encoding.rounding, layout)
    blocks = min(torch.cuda.get_device_properties(device).multi_processor_count * kernel.blocks, count)
    arguments = [*vectors, scales, encoding.signs, sums, count, first, encoding.keys]
    if kernel.exact is not None:
        late = torch.empty((blocks, 3 * kernel.threads * 32, 2), dtype=torch.int32, device=device)
        arguments += [kernel.exact, late]
    elif kernel.far_words:
        arguments.append(torch.empty((blocks, kernel.far_words), dtype=torch.int32, device=device))
    kernel.launch(grid=(blocks, 1, 1), block=(kernel.threads, 1, 1), args=arguments, shared_mem=kernel.memory)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel with the sizes of its launches.

    Attributes:
        launch: The kernel.
        threads: Threads of a row in a block.
        memory: Bytes of shared memory of a block.
        rows: Rows of a block.
        blocks: Blocks that share a multiprocessor, of the fused kernel.
        exact: The table for draws by inversion; None if there are none.
        far_words: Words of a block's sums in global memory; 0 if they are in shared memory.
    """

    launch: Any
    threads: int
    memory: int
    rows: int = 1
    blocks: int = 0
    exact: torch.Tensor | None = None
    far_words: int = 0


# Kernels are kept forever, as recorded rounds refer to them by address.
@cache
def _fused(device: torch.device, dim: int, rounding: Rounding, layout: Layout | None) -> Kernel:
    """Compiles the fused kernel for one shape; returns it with the threads, memory and blocks of its launches."""
    size, rest, _ = plain.split(dim)
    threads, memory = size // 32, fused_memory(dim, rounding, layout)
    launch = kernels.compiled(device, "encode", _FUSED, _fused_names(dim, rounding, layout), memory)
    far = (32 + _tail_words(rounding, rest, size)) * threads if kernels.is_wide(rounding) else 0
    blocks = min(1024 // threads, max(1, kernels.shared_memory(device) // (memory + 1024)))
    exact = kernels.exact_table(rounding, device)
    return Kernel(launch, threads, memory, blocks=blocks, exact=exact, far_words=far)


@cache
def _lengths(device: torch.device, dim: int, layout: Layout | None) -> Any:
    return kernels.compiled(device, "lengths", _FUSED, _fused_names(dim, _NONE, layout))


def _fused_names(dim: int, rounding: Rounding, layout: Layout | None) -> dict[str, Any]:
    """Returns the definitions for `device_fused.cu`."""
    size, rest, _ = plain.split(dim)
    return kernels.definitions(_log(dim), _log(dim), rounding) | {
        "REST": rest,
        "LATE": 3 * size,
        "FAR_SUMS": int(kernels.is_wide(rounding)),
        "PRODUCTS": int(layout is not None),
        "FACTORS": max(layout.factors, 32) if layout else 32,
        "FACTORS_END": _factor_places(layout),
    }


def _factor_places(layout: Layout | None) -> int:
    """Returns the places of factors in shared memory, four of them free after each 32."""
    return (max(layout.factors if layout else 0, 32) * 36 // 32 + 35) // 4 * 4


def _tail_words(rounding: Rounding, rest: int, size: int) -> int:
    """Returns the words of a thread's sums of the coordinates beyond the first 2^j, the kernel's TAIL_WORDS."""
    whole = 32 if rest and size < 1 << _LARGEST else -(-rest // (size // 32))
    return kernels.sum_words(rounding, whole)


def step_memory(log: int) -> int:
    """Returns the bytes of shared memory in which a block of `device_steps.cu` exchanges 2^log numbers."""
    return 4 << log if log > 10 else 0


@cache
def _step(device: torch.device, kernel: str, log: int, staged: bool = False) -> Kernel:
    """Compiles a kernel of `device_steps.cu` for transforms of 2^log numbers."""
    tile, memory = max(log, 10), step_memory(log)
    # Rows of one warp share a block.
    rows = 4 if kernel == "rotate" and log <= 10 else 1
    names = {"LOG": log, "REGISTERS": 1 << min(5, max(0, log - 5)), "PACK": rows, "STAGED": int(staged)}
    names = kernels.definitions(tile, log, _NONE) | names
    most = min(memory + (4 * rows << log), kernels.shared_memory(device) - _STATIC) if staged else memory
    return Kernel(kernels.compiled(device, kernel, _STEPS, names, most), 1 << (tile - 5), memory, rows)


@cache
def _summer(device: torch.device, rounding: Rounding) -> Any:
    names = kernels.definitions(13, 0, rounding) | {"LOG": 0, "FEW_COINS": plain.FEW_COINS}
    return kernels.compiled(device, "sum", _STEPS, names)


@cache
def _tosser(device: torch.device) -> Any:
    return kernels.compiled(device, "toss", _STEPS, kernels.definitions(13, 0, _NONE) | {"LOG": 0})


@cache
def _player(device: torch.device, limit: int) -> Any:
    names = kernels.definitions(13, 0, _NONE) | {"LIMIT": limit}
    files = "simulation/device_rounding.cu", "simulation/device_clients.cu"
    return kernels.compiled(device, "messages", files, names)


@cache
def _tables(layout: Layout, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns the layout's tables on the device: places of factors per chunk and per coordinate, and ends of groups."""
    chunks, pairs = chunk_tables(layout)
    ends = torch.tensor(layout.ends, dtype=torch.int32, device=device)
    return torch.from_numpy(chunks).to(device), torch.from_numpy(pairs).to(device), ends


def _log(dim: int) -> int:
    return dim.bit_length() - 1
