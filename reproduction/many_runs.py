"""Many trainings of one small network at once, for selecting settings.

A stand-in for `Trainer`. Every client's gradient is clipped exactly; the noise is Gaussian, in floats, and correlated
over rounds where asked for, with the size that the guarantee needs. There is no rotation and no rounding: of messages
of a few bits, rounding is part of the noise. All trainings share cohorts and first weights, and each has its own
setting and noise.

The gradient of a dense layer for one example is the product of what flows back, d, and what came in, h, so its squared
norm is |d|²(|h|² + 1), the 1 for the bias; the sum of clipped gradients is a product of matrices with the rows of d
scaled. Neither needs a gradient per client in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cpsgd.learning import CohortOptions, mlp
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.device_data import on_device
from cpsgd.learning.datasets.populations import Dataset
from cpsgd.learning.option_groups import Schedule
from cpsgd.planner.workloads import rate_factor

Optimizer = Literal["sgd", "momentum", "adam"]

_ADAM = (0.9, 0.999, 1e-8)
_MOMENTUM = 0.9
# Rounds whose cohorts are drawn together.
_BLOCK = 16
# Usual mean and standard deviation of MNIST's pixels over 255.
_MEAN, _DEVIATION = 0.1307, 0.3081


@dataclass(frozen=True)
class Setting:
    """Settings to choose: the server's optimizer, its schedule, and the clip norm of updates.

    Attributes:
        optimizer: One of the trainer's.
        rate: The server's learning rate.
        schedule: One of the trainer's.
        clip_norm: D; infinite where nothing is clipped.
        weight_decay: As the trainer's.
        averaging: Decay of a moving average of the models, which is what is measured; 0 measures the last.
        normalised: Whether shades have the mean of MNIST's subtracted and are divided by their standard deviation.
    """

    optimizer: Optimizer
    rate: float
    schedule: Schedule
    clip_norm: float
    weight_decay: float = 0.0
    averaging: float = 0.0
    normalised: bool = False


@dataclass(frozen=True)
class Noise:
    """Noise of a round's mean, Σ g_k z_{t−k} and what no other round shares, for a clip norm of 1.

    Attributes:
        deviation: Standard deviation of z per coordinate; 0 without privacy.
        weights: g₀, g₁, …; (1.0,) where rounds are independent.
        left: Standard deviation of the rest, such as the rounding of messages of few bits.
    """

    deviation: float = 0.0
    weights: Sequence[float] = (1.0,)
    left: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Accuracy and loss at the end of a training."""

    accuracy: float
    loss: float


def train(
    data: Dataset,
    settings: Sequence[Setting],
    noises: Sequence[Noise],
    *,
    cohort: int,
    rounds: int,
    seed: int,
    device: torch.device,
) -> list[Outcome]:
    """Trains a network with two hidden layers of 60 once for each setting.

    Args:
        data: Whose clients train, and on whose test set is measured.
        settings: One per training.
        noises: One per training.
        cohort: Clients per round.
        rounds: Rounds in all; every client takes part once.
        seed: First weights, cohorts and noise follow from it.
        device: Where it is computed.
    """
    cohorts = _cohorts(data.size, cohort, rounds, seed)
    assert data.classes is not None
    network = _Networks(data.feature_dim, data.classes, settings, seed, device)
    steps = _Steps(settings, network.parameters, rounds)
    noise = _Draws(settings, noises, network.parameters.shape[1], seed, device)
    clip = torch.tensor([s.clip_norm for s in settings], device=device)
    on = on_device(data, device)
    for number in range(rounds):
        batch = on.batch(cohorts[number])
        mean = network.clipped_sum(batch.features, batch.labels, clip) / cohort
        steps.take(mean + noise.draw(), number)
    return network.measured(steps.averaged, on.test.features, on.test.labels)


@lru_cache(maxsize=1)
def _cohorts(population: int, cohort: int, rounds: int, seed: int) -> list[NDArray[np.int64]]:
    """Returns the cohorts of all rounds, drawn together: drawing one takes longer than a round on a GPU."""
    options = CohortOptions(cohort=cohort, rounds=rounds)
    cohorts = Cohorts.plan(options, population=population, key=seed, delta=1e-6)
    blocks = [range(start, min(start + _BLOCK, rounds)) for start in range(0, rounds, _BLOCK)]
    with ThreadPoolExecutor() as threads:
        return [clients for block in threads.map(cohorts.several, blocks) for clients in block]


class _Networks:
    """Networks of one shape: a row of parameters each, laid out as the trainer's."""

    def __init__(
        self, features: int, classes: int, settings: Sequence[Setting], seed: int, device: torch.device
    ) -> None:
        # A network sees (x − centre)·scale; x is shared.
        self._centre = torch.tensor([_MEAN * s.normalised for s in settings], device=device)[:, None, None]
        self._scale = torch.tensor([1.0 / _DEVIATION if s.normalised else 1.0 for s in settings], device=device)
        self._scale = self._scale[:, None, None]
        model = mlp(features, classes, seed=seed)
        self._layers = [tuple(p.shape) for p in model.parameters() if p.ndim == 2]
        first = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).to(device)
        self.parameters = first.repeat(len(settings), 1)

    def _parts(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns weights [count, out, in] and biases [count, 1, out] of the layers."""
        parts, start = [], 0
        for out, into in self._layers:
            middle, end = start + out * into, start + out * into + out
            parts.append((rows[:, start:middle].reshape(-1, out, into), rows[:, None, middle:end]))
            start = end
        return parts

    def _forward(self, rows: torch.Tensor, features: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns the inputs of each layer after the first, [count, examples, in], and the outputs."""
        incoming: list[torch.Tensor] = []
        (weight, bias), *following = self._parts(rows)
        value = features @ weight.flatten(0, 1).T
        value = value.reshape(len(features), *weight.shape[:2]).transpose(0, 1)
        value = self._scale * (value - self._centre * weight.sum(-1)[:, None]) + bias
        for weight, bias in following:
            incoming.append(value.relu_())
            value = torch.matmul(incoming[-1], weight.transpose(1, 2)) + bias
        return incoming, value

    def clipped_sum(self, features: torch.Tensor, labels: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the examples' clipped gradients, one row per network."""
        incoming, outputs = self._forward(self.parameters, features)
        back = outputs.softmax(-1)
        back[:, torch.arange(len(labels), device=labels.device), labels] -= 1.0
        parts, backs = self._parts(self.parameters), []
        squared = torch.zeros(back.shape[:2], device=back.device)
        for (weight, _), into in zip(reversed(parts[1:]), reversed(incoming), strict=True):
            backs.append(back)
            squared += back.square().sum(-1) * (into.square().sum(-1) + 1.0)
            back = torch.matmul(back, weight) * (into > 0.0)
        moments = features.square().sum(-1), features.sum(-1), features.shape[1]
        centre, scale = self._centre[..., 0], self._scale[..., 0]
        squared += back.square().sum(-1) * (
            scale**2 * (moments[0] - 2.0 * centre * moments[1] + centre**2 * moments[2]) + 1.0
        )
        factors = (clip[:, None] / squared.sqrt()).clamp(max=1.0)[..., None]
        scaled = back * factors
        bias = scaled.sum(1)
        weight = scaled.transpose(1, 2).flatten(0, 1) @ features
        weight = self._scale * (weight.reshape(*bias.shape, -1) - self._centre * bias[..., None])
        gradients = [weight.flatten(1), bias]
        for back, into in zip(reversed(backs), incoming, strict=True):
            scaled = back * factors
            gradients += [torch.matmul(scaled.transpose(1, 2), into).flatten(1), scaled.sum(1)]
        return torch.cat(gradients, dim=1)

    def measured(self, rows: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> list[Outcome]:
        """Returns accuracy and mean loss of networks with these parameters."""
        outputs = self._forward(rows, features)[1]
        right = (outputs.argmax(-1) == labels).double().mean(-1).tolist()
        losses = -outputs.double().log_softmax(-1)[:, torch.arange(len(labels)), labels].mean(-1)
        return [Outcome(a, b if math.isfinite(b) else math.inf) for a, b in zip(right, losses.tolist(), strict=True)]


class _Steps:
    """The servers' optimizers, as those of `torch.optim`, and the moving averages of their models."""

    def __init__(self, settings: Sequence[Setting], parameters: torch.Tensor, rounds: int) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=parameters.device)[:, None]

        self._settings, self._rounds = settings, rounds
        self._parameters = parameters
        self._first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._adam = column([float(s.optimizer == "adam") for s in settings]) > 0.0
        self._keep = column([{"sgd": 0.0, "momentum": _MOMENTUM, "adam": _ADAM[0]}[s.optimizer] for s in settings])
        self._take = torch.where(self._adam, 1.0 - self._keep, torch.ones_like(self._keep))
        self._decay = column([s.weight_decay for s in settings])
        self._average = column([s.averaging for s in settings])
        self._column = column
        self.averaged = parameters.clone()

    def take(self, mean: torch.Tensor, number: int) -> None:
        """Makes a step along a round's means."""
        beta, epsilon = _ADAM[1], _ADAM[2]
        gradient = mean + self._decay * self._parameters
        self._first.mul_(self._keep).add_(self._take * gradient)
        self._second.mul_(beta).addcmul_(gradient, gradient, value=1.0 - beta)
        root = (self._second / (1.0 - beta ** (number + 1))).sqrt_().add_(epsilon)
        adam = self._first / (1.0 - _ADAM[0] ** (number + 1)) / root
        rates = self._column([s.rate * rate_factor(s.schedule, number, self._rounds) for s in self._settings])
        self._parameters -= rates * torch.where(self._adam, adam, self._first)
        # In the first rounds the average is over all rounds so far.
        keep = self._average.clamp(max=(number + 1) / (number + 10))
        self.averaged.lerp_(self._parameters, 1.0 - keep)


class _Draws:
    """Draws the noise of the rounds' means."""

    def __init__(
        self, settings: Sequence[Setting], noises: Sequence[Noise], dim: int, seed: int, device: torch.device
    ) -> None:
        def scaled(values: Sequence[float]) -> torch.Tensor:
            """Multiplies by the clip norms, which are infinite where nothing is added."""
            pairs = zip(values, settings, strict=True)
            return torch.tensor([value * s.clip_norm if value else 0.0 for value, s in pairs], device=device)[:, None]

        self._generator = torch.Generator(device).manual_seed(seed)
        self._scales, self._left = scaled([n.deviation for n in noises]), scaled([n.left for n in noises])
        bands = max(len(n.weights) for n in noises)
        weights = np.array([[*n.weights, *[0.0] * (bands - len(n.weights))] for n in noises], dtype=np.float32)
        columns = torch.tensor(weights, device=device)
        self._weights = {age: columns[:, age, None] for age in range(bands) if weights[:, age].any()}
        self._kept = torch.zeros((bands, len(settings), dim), device=device)
        self._round, self._rest = 0, any(n.left for n in noises)

    def draw(self) -> torch.Tensor:
        """Returns the noise of the next round."""
        bands = len(self._kept)
        self._kept[self._round % bands].normal_(generator=self._generator).mul_(self._scales)
        total = torch.zeros_like(self._kept[0])
        if self._rest:
            total.normal_(generator=self._generator).mul_(self._left)
        for age, weight in self._weights.items():
            total.addcmul_(self._kept[(self._round - age) % bands], weight)
        self._round += 1
        return total
