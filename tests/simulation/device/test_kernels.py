"""The launcher of compiled kernels: what it hands to CUDA's library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsgd.simulation import device_kernels


def test_tensors_go_as_addresses_and_numbers_as_int_and_double(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def launch(*given: Any) -> int:
        kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_int)
        values = [ctypes.cast(given[9][k], ctypes.POINTER(kind))[0] for k, kind in enumerate(kinds)]
        seen.append((given[:8], given[8].value, values, given[10]))
        return 0

    monkeypatch.setattr(device_kernels, "_library", lambda: SimpleNamespace(cuLaunchKernel=launch))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    rows = torch.zeros(3)
    kernel = device_kernels._Launcher(SimpleNamespace(func="kernel"))
    for number in (-7, 8):
        kernel(grid=(1, 2, 3), block=(4, 5, 6), args=[rows, number, 2.5, 2**31 - 1], shared_mem=9)
    sizes = ("kernel", 1, 2, 3, 4, 5, 6, 9)
    assert seen == [(sizes, 1003, [rows.data_ptr(), number, 2.5, 2**31 - 1], None) for number in (-7, 8)]
