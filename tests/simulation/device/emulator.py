"""Compiles the CUDA kernels for the processor, with `emulator.h` in the place of their instructions.

`emulate(monkeypatch)` has `cpsgd.simulation.device_cuda` launch such kernels, with tensors of the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsgd.simulation import device_cuda, device_kernels, device_long

MULTIPROCESSORS = 2
SHARED_MEMORY = 227 << 10
_HEADER = Path(__file__).with_name("emulator.h")
# By what they are made from, so that workers and later runs find them.
_KERNELS = Path(__file__).parents[3] / "build" / "emulated"
_END = """
void emulator::run_thread() {
  using namespace emulator;
  [&]<class... A>(void (*kernel)(A...)) { apply(kernel, kernel_arguments, std::index_sequence_for<A...>()); }(KERNEL);
  done[running] = true;
}
extern "C" void launch(const u32* grid, const u32* block, void** arguments) {
  emulator::kernel_arguments = arguments;
  gridDim = {grid[0], grid[1], 1}, blockDim = {block[0], 1, 1};
  for (u32 y = 0; y < grid[1]; y++)
    for (u32 x = 0; x < grid[0]; x++) {
      blockIdx = {x, y, 0};
      emulator::run_block();
    }
}
"""


class EmulatedKernel:
    """Is launched as PyTorch's compiled kernels are, and refuses more shared memory than was asked for."""

    def __init__(self, source: str, kernel: str, memory: int) -> None:
        self._memory = memory
        code = f"{source}#define KERNEL {kernel}\n{_END}"
        command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-x", "c++", "-", "-o"]
        path = _KERNELS / f"{hashlib.sha256(' '.join([*command, code]).encode()).hexdigest()[:24]}.so"
        if not path.exists():
            _KERNELS.mkdir(parents=True, exist_ok=True)
            mine = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, str(mine)], input=code, text=True, check=True)
            mine.replace(path)
        self._launch = ctypes.CDLL(str(path)).launch

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any], shared_mem: int = 0
    ) -> None:
        assert shared_mem <= self._memory <= SHARED_MEMORY
        assert block[0] <= 1024
        values: list[Any] = []
        for value in args:
            if isinstance(value, torch.Tensor):
                values.append(ctypes.c_void_p(value.data_ptr()))
            else:
                values.append(ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int(value))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launch((ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), pointers)


def _compiled(_: torch.device, kernel: str, files: tuple[str, ...], names: dict[str, Any], memory: int = 0) -> Any:
    source = "".join(f"#define {name} {value}\n" for name, value in {kernel.upper(): 1, **names}.items())
    # The processor's headers must not see the kernels' names.
    source = _HEADER.read_text() + source
    for file in files:
        source += resources.files("cpsgd").joinpath(file).read_text(encoding="utf-8")
    for name in ("memory", "buffer"):
        source = source.replace(f"extern __shared__ float {name}[];", f"float* const {name} = ::memory;")
    return EmulatedKernel(source, kernel, memory)


def forget() -> None:
    """Has all kernels compiled anew."""
    for function in (device_cuda._fused, device_cuda._lengths, device_cuda._step, device_cuda._summer):
        function.cache_clear()
    for function in (device_cuda._tosser, device_cuda._player, device_long._pass, device_long._last_kernel):
        function.cache_clear()


def emulate(monkeypatch: pytest.MonkeyPatch, shared_memory: int = SHARED_MEMORY) -> None:
    """Has the kernels run on the processor within a test."""
    forget()
    monkeypatch.setattr(device_kernels, "compiled", _compiled)
    monkeypatch.setattr(device_kernels, "compiles", lambda device: True)
    monkeypatch.setattr(device_kernels, "shared_memory", lambda device: shared_memory)
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
