from __future__ import annotations

import numpy as np
import pytest
import torch

from cpsgd.learning import dense
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import Scaled, mlp

LOSS = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("hidden", [(), (7,), (9, 6), (5, 4, 3)])
def test_gradients_equal_those_of_torch_func(hidden: tuple[int, ...]) -> None:
    model = mlp(12, 5, hidden, seed=1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 12, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    updates = ClientUpdates(model, LOSS)
    general = torch.cat([rows.clone() for rows in updates.tensors(x, y, np.ones(40, dtype=np.int64))])
    layers = dense.dense_layers(model, LOSS)
    assert layers is not None
    rows = torch.full((40, updates.dim + 3), float("nan"))[:, : updates.dim]  # every coordinate must be written
    dense.write_dense_gradients(layers, x, y, rows)
    torch.testing.assert_close(rows, general, rtol=1e-5, atol=1e-6)


def test_scaled_features_come_before_the_layers() -> None:
    model, plain = mlp(12, 5, (7,), scaled=True, seed=1), mlp(12, 5, (7,), seed=1)
    layers, first = dense.dense_layers(model, LOSS), dense.scaling(model)
    assert layers is not None
    assert first is not None
    assert dense.scaling(plain) is None
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 12, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    updates = ClientUpdates(model, LOSS)
    general = torch.cat([rows.clone() for rows in updates.tensors(x, y, np.ones(40, dtype=np.int64))])
    rows = torch.empty(40, updates.dim)
    dense.write_dense_gradients(layers, (x - 0.1307) / 0.3081, y, rows)
    torch.testing.assert_close(rows, general, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), plain((x - 0.1307) / 0.3081))


def frozen() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    next(model.parameters()).requires_grad_(False)
    return model


def shared() -> torch.nn.Module:
    layer = torch.nn.Linear(4, 4)
    return torch.nn.Sequential(layer, torch.nn.ReLU(), layer)


def hooked() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    next(model.children()).register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def hooked_as_a_whole() -> torch.nn.Module:
    model = mlp(4, 2, (3,), seed=0)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(4, 2),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.Linear(4, 3), Scaled(), torch.nn.Linear(3, 2)),
        frozen(),
        shared(),
        hooked(),
        hooked_as_a_whole(),
    ],
)
def test_other_models_take_the_general_way(model: torch.nn.Module) -> None:
    assert dense.dense_layers(model, LOSS) is None


def test_other_losses_take_the_general_way() -> None:
    assert dense.dense_layers(mlp(4, 2), torch.nn.functional.mse_loss) is None
    assert dense.dense_layers(mlp(4, 2), LOSS) is not None
