from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cpsgd.learning.datasets import infinite_digits, load_digits
from cpsgd.learning.datasets.device_data import DeviceInfinite, on_device

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
def test_infinite_samples_are_the_same_bit_for_bit(shift: int) -> None:
    data = replace(infinite_digits(), shift=shift)
    source = on_device(data, CPU)
    assert isinstance(source, DeviceInfinite)
    clients = np.concatenate([np.arange(2_000), np.random.default_rng(0).integers(0, data.size, 2_000)])
    found, expected = source.batch(clients), data.batch(clients)
    np.testing.assert_array_equal(found.features.numpy(), expected.features)
    np.testing.assert_array_equal(found.labels.numpy(), expected.labels)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(source.test.features.numpy(), data.test_set().features)


def test_any_other_data_set_is_carried() -> None:
    data = load_digits()
    source = on_device(data, CPU)
    found, expected = source.batch(np.array([3, 1])), data.batch([3, 1])
    np.testing.assert_array_equal(found.features.numpy(), expected.features)
    np.testing.assert_array_equal(found.labels.numpy(), expected.labels)
