"""CUDA kernels for samples and gradients against the plain ones, bit for bit: on a GPU, or by the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cpsgd.learning import cuda, dense
from cpsgd.learning.datasets import infinite_digits
from cpsgd.learning.datasets.device_data import DeviceInfinite
from cpsgd.learning.models import mlp
from tests.simulation.device.emulator import emulate

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU the kernels are emulated."""
    if DEVICE.type == "cpu":
        cuda._kernel.cache_clear()
        emulate(monkeypatch)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shift", [0, 1])
def test_samples(shift: int) -> None:
    data = replace(infinite_digits(), shift=shift)
    source = DeviceInfinite(data, DEVICE)
    clients = np.array([0, 1, 7, 12_345, 24_999_999, 10_000_000, 1_526, 1_527])
    source._compiled = False
    plain = source.batch(clients)
    source._compiled = True
    found = source.batch(clients)
    assert torch.equal(found.features, plain.features)
    assert torch.equal(found.labels, plain.labels)
    np.testing.assert_array_equal(plain.features.cpu().numpy(), data.batch(clients).features)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1])
def test_many_samples_many_times(shift: int) -> None:
    data = replace(infinite_digits(), shift=shift)
    source = DeviceInfinite(data, DEVICE)
    clients = np.arange(0, 24_999_999, 997)
    expected = data.batch(clients)
    for compiled in (True, False):
        source._compiled = compiled
        for _ in range(20):
            found = source.batch(clients)
            np.testing.assert_array_equal(found.features.cpu().numpy(), expected.features)
            np.testing.assert_array_equal(found.labels.cpu().numpy(), expected.labels)


@pytest.mark.gpu
def test_more_pixels_than_32_bits_can_number() -> None:
    source = DeviceInfinite(infinite_digits(), DEVICE)
    clients = np.arange(2**25 + 8)  # of 64 pixels each
    found, expected = source.batch(clients), source.batch(clients[-8:])
    assert torch.equal(found.features[-8:], expected.features)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("features", [20, 700])
def test_gradients(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(features, 5, (7,), seed=1).to(DEVICE)
    layers = dense.dense_layers(model, torch.nn.functional.cross_entropy)
    assert layers is not None
    dim = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, features, generator=generator).to(DEVICE)
    y = torch.randint(0, 5, (4,), generator=generator).to(DEVICE)
    found, expected = (torch.full((4, dim + 3), float("nan"), device=DEVICE)[:, :dim] for _ in range(2))
    for out, compiles in ((found, True), (expected, False)):
        monkeypatch.setattr(dense, "compiles", lambda device, answer=compiles: answer)
        dense.write_dense_gradients(layers, x, y, out)
    assert torch.equal(found, expected)
