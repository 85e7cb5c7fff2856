"""`Server`: it keeps the model, takes a step along each round's mean, and looks at test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cpsgd._torch import torch
from cpsgd.learning.devices import enough_memory, one_thread
from cpsgd.learning.gradients import Loss, trainable
from cpsgd.learning.options import Schedule, ServerOptions

_TEST_BATCH = 4096

# The part of a run in which the schedule "late" lowers the rate.
_LATE = 0.3

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}


def make_optimizer(options: ServerOptions, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the options name, or what their function makes (with settings of its own)."""
    if callable(options.optimizer):
        made: torch.optim.Optimizer = options.optimizer(parameters)
        return made
    return _OPTIMIZERS[options.optimizer](parameters, lr=options.lr, weight_decay=options.weight_decay)


def rate_factor(schedule: Schedule, round: int, rounds: int) -> float:
    """What the learning rate is multiplied by in a round, a pure function of its number so that runs can be resumed.

    Example:
        >>> [rate_factor("linear", round, 4) for round in range(4)]
        [1.0, 0.75, 0.5, 0.25]
        >>> [round_ for round_ in range(10) if rate_factor("late", round_, 10) < 1.0]
        [8, 9]
    """
    left = 1.0 - round / rounds
    return {"constant": 1.0, "linear": left, "late": min(1.0, left / _LATE)}[schedule]


class Server:
    """The server's part in a run. All it knows of clients are the rounds' means.

    Attributes:
        optimizer: What takes the steps.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, options: ServerOptions, rounds: int) -> None:
        """Makes the optimizer of a model that is where it is trained; `ParameterError` if it does not fit there."""
        self._model = model
        self._loss = loss
        self._rounds = rounds
        self._schedule = options.schedule
        with enough_memory("the optimizer", "use a simpler one."):
            self.optimizer = make_optimizer(options, trainable(model).values())
        self._parameters = list(trainable(model).values())
        self._first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, mean: torch.Tensor, number: int) -> None:
        """The step of a round along its mean."""
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = rate * rate_factor(self._schedule, number, self._rounds)
        sizes = [p.numel() for p in self._parameters]
        for p, part in zip(self._parameters, mean.split_with_sizes(sizes), strict=True):
            p.grad = part.view(p.shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def is_finite(self) -> bool:
        """Whether all parameters of the model are numbers."""
        # One answer for all, so that a device is waited for once.
        return bool(torch.stack([torch.isfinite(p).all() for p in self._parameters]).all())

    def evaluate(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Mean loss and accuracy on test examples."""
        losses, correct = [], []
        self._model.eval()
        with torch.no_grad(), one_thread():
            for start in range(0, len(labels), _TEST_BATCH):
                truth = labels[start : start + _TEST_BATCH]
                outputs = self._model(features[start : start + _TEST_BATCH])
                losses.append(self._loss(outputs, truth))
                correct.append((outputs.argmax(dim=-1) == truth).sum())
        # A device is waited for twice, however many batches there are.
        sizes = [len(labels[start : start + _TEST_BATCH]) for start in range(0, len(labels), _TEST_BATCH)]
        loss = sum(value * size for value, size in zip(torch.stack(losses).tolist(), sizes, strict=True))
        return loss / len(labels), sum(torch.stack(correct).tolist()) / len(labels)
