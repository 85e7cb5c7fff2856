from __future__ import annotations

import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import models


def test_a_seed_repeats_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = models.mlp(4, 2, seed=3), models.mlp(4, 2, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(next(models.mlp(4, 2, seed=4).parameters()), next(first.parameters()))


def test_models_by_name() -> None:
    assert sum(p.numel() for p in models.by_name("mlp-60-60", 784, 10).parameters()) == 51_370
    assert [type(layer).__name__ for layer in models.by_name("mlp-7", 3, 2).children()] == ["Linear", "ReLU", "Linear"]
    scaled = [type(layer).__name__ for layer in models.by_name("scaled-linear", 3, 2).children()]
    assert scaled == ["Scaled", "Linear"]
    for wrong in ("resnet", "scaled", "scaled-resnet", "mlp-x", "linear-3", "mlp-0"):
        with pytest.raises(ParameterError):
            models.by_name(wrong, 3, 2)
