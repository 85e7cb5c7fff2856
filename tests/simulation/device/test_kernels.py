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
        kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double)
        values = [ctypes.cast(given[9][k], ctypes.POINTER(kind))[0] for k, kind in enumerate(kinds)]
        seen.append((given[:9], values, given[10]))
        return 0

    monkeypatch.setattr(device_kernels, "_library", lambda: SimpleNamespace(cuLaunchKernel=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(_as_parameter_="stream"))
    rows = torch.zeros(3)
    kernel = device_kernels._Launcher(SimpleNamespace(func="kernel"))
    kernel(grid=(1, 2, 3), block=(4, 5, 6), args=[rows, -7, 2.5], shared_mem=9)
    assert seen == [(("kernel", 1, 2, 3, 4, 5, 6, 9, "stream"), [rows.data_ptr(), -7, 2.5], None)]
