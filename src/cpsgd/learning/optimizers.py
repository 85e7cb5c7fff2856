"""The server's optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, cast, get_args

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError

Factory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for some parameters, such as `functools.partial(torch.optim.RMSprop, lr=0.01)`."""

Schedule = Literal["constant", "linear", "late"]
"""How the learning rate changes over a run: not at all, or linearly towards 0 after the last round, all the time or in
the last three tenths."""

# The part of a run in which the schedule "late" lowers the rate.
_LATE = 0.3

_KNOWN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}

NAMES = tuple(_KNOWN)
"""Optimizers that have a name here."""


def make(
    optimizer: str | Factory, parameters: Iterable[torch.nn.Parameter], learning_rate: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer of this name with this learning rate, or what the factory makes (with settings of its own).

    Args:
        optimizer: A name, or a function from parameters to any optimizer.
        parameters: What is trained.
        learning_rate: Of the named ones.
        weight_decay: Of the named ones: so much of each parameter is added to its gradient. Noise piles up in
            directions in which the loss is flat; this takes it away again.

    Example:
        >>> make("nadam", [], 0.1)
        Traceback (most recent call last):
        cpsgd.errors.ParameterError: Unknown optimizer 'nadam'. Known are sgd, momentum, adagrad, adam; any other ...
    """
    if callable(optimizer):
        return optimizer(parameters)
    if optimizer not in _KNOWN:
        raise ParameterError(
            f"Unknown optimizer {optimizer!r}. Known are {', '.join(NAMES)}; any other of torch.optim can be given as "
            "a function from parameters to the optimizer."
        )
    decay = _validate.positive("weight_decay", weight_decay, low=-1e-300)
    return _KNOWN[optimizer](parameters, lr=_validate.positive("learning_rate", learning_rate), weight_decay=decay)


def check_schedule(name: str) -> Schedule:
    """The name, if it is known."""
    if name not in get_args(Schedule):
        raise ParameterError(f"Unknown schedule {name!r}. Known are {', '.join(get_args(Schedule))}.")
    return cast(Schedule, name)


def factor(schedule: Schedule, round: int, rounds: int) -> float:
    """What the learning rate is multiplied by in a round, a pure function of its number so that runs can be resumed.

    Example:
        >>> [factor("linear", round, 4) for round in range(4)]
        [1.0, 0.75, 0.5, 0.25]
        >>> [round_ for round_ in range(10) if factor("late", round_, 10) < 1.0]
        [8, 9]
    """
    left = 1.0 - round / rounds
    return {"constant": 1.0, "linear": left, "late": min(1.0, left / _LATE)}[schedule]
