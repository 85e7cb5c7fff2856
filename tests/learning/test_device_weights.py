# mypy: disable-error-code="no-untyped-call"
"""The kernel for weighted sums against plain PyTorch: on a GPU, or by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsgd.learning import device_noise, device_weights
from cpsgd.learning.clipped_sums import ClippedSums
from tests.learning.test_layers import COUNT, MODELS, examples
from tests.simulation.device.emulator import emulate

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU the kernel is emulated."""
    if DEVICE.type == "cpu":
        device_weights._kernels.cache_clear()
        device_noise._prepared.cache_clear()
        emulate(monkeypatch)


def folded(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, compiled: bool, count: int
) -> tuple[torch.Tensor, ...]:
    sums = ClippedSums(model)
    sums._compiled = compiled
    for _ in range(2):  # sums go on
        functional.cross_entropy(model(x), y).backward()
        norms = sums.fold(0.7, scale=COUNT, count=count)
    sums.detach()
    return norms, sums.total


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        pytest.param(name, bad, marks=() if bad is None or place < 3 else pytest.mark.thorough)
        for place, name in enumerate(name for name in MODELS if "attention" not in name or name == "attention")
        for bad in (None, float("nan"), float("inf"), 3e38)
    ],
)
def test_norms_and_sums_equal_those_of_plain_pytorch(
    name: str, bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    make, kind, _ = MODELS[name]
    model, (x, y) = make().to(DEVICE), (each.to(DEVICE) for each in examples(kind))
    if bad is not None and kind != "numbers":
        x[2] = bad
    launched = []
    honest = device_weights.add_weighted
    monkeypatch.setattr(
        device_weights,
        "add_weighted",
        lambda *given, **options: launched.append(1) or honest(*given, **options),
    )
    expected, total = folded(model, x, y, compiled=False, count=COUNT - 1)
    assert not launched
    norms, found = folded(model, x, y, compiled=True, count=COUNT - 1)
    assert launched
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0.0, equal_nan=True)
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-12)
    assert bool(torch.isfinite(found).all())


@pytest.mark.usefixtures("kernels")
def test_more_layers_than_one_launch_takes_go_by_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_weights, "MOST_PIECES", 1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).to(DEVICE)
    x, y = torch.randn(COUNT, 3, device=DEVICE), torch.zeros(COUNT, dtype=torch.int64, device=DEVICE)
    plain, tried = (folded(model, x, y, compiled=compiled, count=COUNT) for compiled in (False, True))
    assert torch.equal(plain[1], tried[1])


@pytest.mark.usefixtures("kernels")
def test_tiles_and_slices_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_weights, "SLICE", 35)
    device_weights._kernels.cache_clear()
    compared(count=72, widths=(33, 65, 10))
    device_weights._kernels.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3000])
def test_many_examples_of_wide_layers(count: int) -> None:
    compared(count=count, widths=(784, 300, 10))


def compared(*, count: int, widths: tuple[int, int, int]) -> None:
    """Checks norms and sums of a dense network, some of whose examples are not finite."""
    torch.manual_seed(6)
    wide, middle, narrow = widths
    model = nn.Sequential(nn.Linear(wide, middle), nn.LayerNorm(middle), nn.ReLU(), nn.Linear(middle, narrow)).to(
        DEVICE
    )
    x, y = torch.randn(count, wide, device=DEVICE), torch.randint(0, narrow, (count,), device=DEVICE)
    x[1::40] = float("nan")
    plain, fused = (folded(model, x, y, compiled=compiled, count=count) for compiled in (False, True))
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-12, atol=0.0, equal_nan=True)
    torch.testing.assert_close(fused[1], plain[1], rtol=1e-9, atol=1e-10)
