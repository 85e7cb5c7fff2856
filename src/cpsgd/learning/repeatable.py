"""What makes PyTorch repeat itself: one thread, and fixed draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpsgd._torch import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: results do not depend on the machine's cores, and none is spinning while we round."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fixed_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Fixes what layers such as dropout draw, and leaves PyTorch's generators as they were."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # Not torch.manual_seed, which also queues work for kinds of devices that nobody uses.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
