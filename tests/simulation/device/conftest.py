"""Where there is no GPU, the CUDA kernels are emulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .emulator import emulate


def pytest_itemcollected(item: pytest.Item) -> None:
    """On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too."""
    if torch.cuda.is_available():
        item.add_marker("gpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other in so small tensors only cost time, a great deal on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that the CUDA kernels run on: a GPU, or the emulator's CPU."""
    if device.type == "cpu":
        emulate(monkeypatch)
    return device
