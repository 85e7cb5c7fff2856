"""Updates that are replayed from a recording are those that are computed step by step."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from cpsgd.learning.gradients import ClientUpdates, rehearse
from cpsgd.learning.option_groups import ClientOptions
from tests.learning.nets import Transformer, cnn, low_rank

LOSS = nn.functional.cross_entropy


class Counting(nn.Module):
    """Counts its calls, and does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.layer(x) * self.calls
        return found


class Random(nn.Module):
    """Draws from a generator that PyTorch knows nothing of."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 3), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.draw()
        return found


@pytest.mark.parametrize(
    ("model", "same"),
    [
        (nn.Linear(4, 3), True),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), False),
        (Counting(), False),
        (Random(random.random), False),
        (Random(lambda: np.random.rand()), False),  # noqa: NPY002
        (Random(np.random.default_rng(0).random), False),
    ],
    ids=["linear", "dropout", "counting", "random", "numpy", "own generator"],
)
def test_which_models_do_the_same_every_time(model: nn.Module, same: bool) -> None:
    traits = rehearse(model, LOSS, torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
    assert traits.repeats is same


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.rand(count, 1, 8, 8, generator=generator, device="cuda")
    return x, torch.randint(0, 10, (count,), generator=generator, device="cuda")


def updates_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, each: int, **options: object) -> torch.Tensor:
    """What a fresh object computes, which has recorded nothing."""
    fresh = ClientUpdates(model, LOSS, ClientOptions(**options))
    return torch.cat([chunk.clone() for chunk in fresh.tensors(x, y, np.full(len(y) // each, each))])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cnn", "transformer", "lora", "local steps"])
def test_recorded_updates(kind: str) -> None:
    makers: dict[str, Callable[[], nn.Module]] = {"transformer": Transformer, "lora": low_rank}
    model = makers.get(kind, cnn)().cuda()
    options = {"local_steps": 3, "local_lr": 0.1} if kind == "local steps" else {}
    updates = ClientUpdates(model, LOSS, ClientOptions(**options))
    for number, clients in enumerate([60, 60, 60, 64, 50, 90, 90]):
        x, y = images(3 * clients)
        if kind == "transformer":
            x = (16 * x).long().flatten(1)
        elif kind == "lora":
            x = x.flatten(1)
        found = torch.cat([chunk.clone() for chunk in updates.tensors(x, y, np.full(clients, 3))])
        assert (updates._recorded is not None) == (number > 0)
        torch.testing.assert_close(found, updates_of(model, x, y, 3, **options), rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.01 * torch.randn_like(p))


@pytest.mark.gpu
def test_parameters_that_move() -> None:
    """A callback may put other tensors in their place."""
    model = cnn().cuda()
    updates = ClientUpdates(model, LOSS)
    x, y = images(64)
    for _ in range(4):
        found = torch.cat([chunk.clone() for chunk in updates.tensors(x, y, np.ones(64, dtype=int))])
        torch.testing.assert_close(found, updates_of(model, x, y, 1), rtol=1e-4, atol=1e-6)
        for p in model.parameters():
            p.data = p.data + 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [8, 64, 256])
def test_memory_limit(limit: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    model = model.cuda()
    x, y = images(2_000)
    # The library of matrices takes 32 MiB for each stream and thread, and recordings have a stream of their own.
    others = ClientUpdates(model, LOSS, memory_limit=limit << 20)
    for _ in range(3):
        for _ in others.tensors(x, y, np.ones(2_000, dtype=int)):
            pass
    del others
    gc.collect()
    updates = ClientUpdates(model, LOSS, memory_limit=limit << 20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        chunks = [len(chunk) for chunk in updates.tensors(x, y, np.ones(2_000, dtype=int))]
        assert len(chunks) > 1
        assert sum(chunks) == 2_000
    # It may take some of that anew.
    assert torch.cuda.max_memory_allocated() - before < (limit + 40) << 20
