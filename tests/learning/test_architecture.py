"""Models by name, and gradients of models of every kind, of all clients together or one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from cpsgd.errors import ParameterError
from cpsgd.learning import models
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.gradients import ClientUpdates, rehearse
from cpsgd.learning.models import check_model, trainable
from cpsgd.learning.option_groups import ClientOptions
from tests.learning.nets import Recurrent, Transformer, cnn, low_rank


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


LOSS = nn.functional.cross_entropy
SHADES, CLASSES = load_digits().images, load_digits().target.astype(np.int64)
IMAGES = (SHADES[:, None] / 16.0).astype(np.float32)
ROWS, FLAT = IMAGES[:, 0], IMAGES.reshape(-1, 64)
TOKENS = SHADES.reshape(-1, 64).astype(np.int64)
KINDS = [
    pytest.param(cnn, IMAGES, True, id="cnn"),
    pytest.param(Transformer, TOKENS, True, id="transformer"),
    pytest.param(Recurrent, ROWS, False, id="gru"),
    pytest.param(low_rank, FLAT, True, id="lora"),
]
Maker = Callable[[], nn.Module]


def by_autograd(model: nn.Module, batch: Batch) -> np.ndarray:
    rows, start = [], 0
    for count in batch.counts:
        part = slice(start, start + count)
        loss = LOSS(model(torch.from_numpy(batch.features[part])), torch.from_numpy(batch.labels[part]))
        slopes = torch.autograd.grad(loss, list(trainable(model).values()))
        rows.append(torch.cat([slope.reshape(-1) for slope in slopes]).numpy())
        start += count
    return np.array(rows)


@pytest.mark.parametrize("memory_limit", [1 << 30, 100_000])
@pytest.mark.parametrize(("make", "features", "together"), KINDS)
def test_each_clients_gradient_is_autograds(
    make: Maker, features: np.ndarray, together: bool, memory_limit: int
) -> None:
    model = make()
    # In one chunk, and with so little memory that clients with five examples are computed in parts.
    batch = Batch(features[:13], CLASSES[:13], np.array([1, 1, 1, 5, 5]))
    updates = ClientUpdates(model, LOSS, memory_limit=memory_limit)
    found = np.concatenate([chunk.copy() for chunk in updates.chunks(batch)])
    np.testing.assert_allclose(found, by_autograd(model, batch), atol=2e-6)
    assert updates.dim == found.shape[1]
    assert rehearse(model, LOSS, torch.from_numpy(features[:1]), torch.from_numpy(CLASSES[:1])).together == together


def test_local_steps_of_a_recurrent_model() -> None:
    batch = Batch(ROWS[:4], CLASSES[:4], np.array([2, 2]))
    updates = ClientUpdates(Recurrent(), LOSS, ClientOptions(local_steps=2, local_lr=0.5))
    found = np.concatenate([chunk.copy() for chunk in updates.chunks(batch)])
    for client in range(2):
        model = Recurrent()
        before = nn.utils.parameters_to_vector(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        part = slice(2 * client, 2 * client + 2)
        for _ in range(2):
            optimizer.zero_grad()
            LOSS(model(torch.from_numpy(ROWS[part])), torch.from_numpy(CLASSES[part])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        moved = before - nn.utils.parameters_to_vector(model.parameters())
        np.testing.assert_allclose(found[client], moved.detach().numpy(), atol=2e-6)


def test_a_look_at_a_model_leaves_no_trace() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(64, 10)
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            found: torch.Tensor = self.out(nn.functional.dropout(x))
            return found

    model = Remembers()
    state = torch.get_rng_state()
    found = rehearse(model, LOSS, torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64))
    assert (model.seen, found.together) == (0, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_model_keeps_is_counted() -> None:
    # Four heads of attention over 64 places: the weights alone are 4 × 64 × 64 numbers, which no layer puts out.
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (64, 1)), nn.Linear(1, 16), layer, nn.Flatten(), nn.Linear(1024, 10))
    found = rehearse(model, LOSS, torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64))
    assert found.activations > 4 * 64 * 64


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(8), nn.SyncBatchNorm(8), nn.InstanceNorm2d(8, track_running_stats=True)]
)
def test_batch_normalisation_is_refused_and_the_replacement_named(layer: nn.Module) -> None:
    with pytest.raises(ParameterError, match=r"layer 1 normalises .* use GroupNorm or LayerNorm"):
        check_model(nn.Sequential(nn.Conv2d(1, 8, 3), layer))


class _Keeps(nn.Module):
    """Remembers the mean of what it saw: in place of a buffer, in a buffer, in a frozen parameter."""

    seen: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how = Recurrent(), how
        if how == "frozen":
            self.seen = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        else:
            self.register_buffer("seen", torch.zeros(8, 8), persistent=how != "hidden")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "anew":
            self.seen = self.seen + x.detach().mean(0)
        else:
            self.seen.add_(x.detach().mean(0))
        found: torch.Tensor = self.out(x)
        return found


@pytest.mark.parametrize("how", ["anew", "inside", "frozen", "hidden"])
def test_a_layer_that_keeps_something_of_its_input_is_refused(how: str) -> None:
    with pytest.raises(ParameterError, match=r"The model's seen changes whenever examples pass"):
        rehearse(_Keeps(how), LOSS, torch.from_numpy(ROWS[:1]), torch.from_numpy(CLASSES[:1]))


def test_what_is_made_once_may_stay() -> None:
    class Makes(nn.Module):
        waves: torch.Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(64, 10)
            self.register_buffer("waves", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.waves is None:
                self.waves = torch.arange(64).sin()
            found: torch.Tensor = self.out(x + self.waves)
            return found

    assert rehearse(Makes(), LOSS, torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64)).together


_BIG = """
import resource
import numpy as np, torch
from cpsgd.learning import AccountOptions, CohortOptions, RunOptions, Trainer
from cpsgd.learning.datasets import from_arrays
from cpsgd.mechanisms import Gaussian
from cpsgd.protocol import Protocol

widths = (64, 980), (980, 945), (945, 10)
model = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in widths])
dim = sum(p.numel() for p in model.parameters())
x, y = np.ones((2001, 64), np.float32), np.arange(2001) % 10
owners = np.r_[np.arange(60), np.full(1940, 60), 61]
data = from_arrays(x[:2000], y[:2000], clients=owners[:2000], test_features=x[2000:], test_labels=y[2000:])
protocol = Protocol(clients=61, dim=dim, clip_norm=1.0, mechanism=Gaussian(sigma=1.0), rotate=False)
cohorts = CohortOptions(cohort=61, rounds=1)
account, run = AccountOptions(delta=1e-5), RunOptions(memory_limit=64)
trainer = Trainer(model, torch.nn.functional.cross_entropy, data, protocol, cohorts=cohorts, account=account, run=run)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trainer.step()
print(dim, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_million_parameters_are_trained_within_the_limit() -> None:
    found = subprocess.run([sys.executable, "-c", _BIG], capture_output=True, text=True, timeout=200, check=True)
    dim, kilobytes = map(int, found.stdout.split())
    assert dim > 1_000_000
    # 61 gradients alone would take 244 MB, and the activations of 1,940 examples 45 MB. Beside the limit there are the
    # round's sum, its noise and its mean, in float64, and the allocator's own waste.
    assert kilobytes < (64 + 48) * 1024
