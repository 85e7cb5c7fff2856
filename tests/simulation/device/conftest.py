"""Where there is no GPU, Triton's interpreter runs the kernels on the CPU; it must be asked for before the import."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


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
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
