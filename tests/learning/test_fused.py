"""Triton's kernels for samples and gradients against the plain ones, bit for bit."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpsgd.learning import dense
from cpsgd.learning.datasets import infinite_digits
from cpsgd.learning.datasets.device import DeviceInfinite
from cpsgd.learning.models import mlp

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its interpreter runs the kernels on the CPU

fused = pytest.importorskip("cpsgd.learning.fused", reason="Triton is for Linux")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
def test_samples(shift: int) -> None:
    data = replace(infinite_digits(), shift=shift)
    source = DeviceInfinite(data, DEVICE)
    clients = np.array([0, 1, 7, 12_345, 24_999_999, 10_000_000, 1_526, 1_527])
    source._fused = None
    plain = source.batch(clients)
    source._fused = fused
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
    for kernels in (fused, None):
        source._fused = kernels
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


def test_gradients() -> None:
    model = mlp(20, 5, (7,), seed=1).to(DEVICE)
    layers = dense.dense_layers(model, torch.nn.functional.cross_entropy)
    assert layers is not None
    dim = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 20, generator=generator).to(DEVICE)
    y = torch.randint(0, 5, (4,), generator=generator).to(DEVICE)
    found, expected = (torch.full((4, dim + 3), float("nan"), device=DEVICE)[:, :dim] for _ in range(2))
    dense.write_dense_gradients(layers, x, y, expected)
    dense.write_dense_gradients(layers, x, y, found, fused)
    assert torch.equal(found, expected)
