"""`Server`: it keeps the model, takes a step along each round's mean, and looks at test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.architecture import Loss, trainable
from cpsgd.learning.averaging import MovingAverage
from cpsgd.learning.devices import enough_memory, one_thread, own_code
from cpsgd.learning.losses import Score
from cpsgd.learning.options import ServerOptions
from cpsgd.planner.workloads import MOMENTUM
from cpsgd.planner.workloads import rate_factor as rate_factor

_TEST_BATCH = 4096

_WATCHES_LOSS = torch.optim.lr_scheduler.ReduceLROnPlateau

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=MOMENTUM),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
}


def make_optimizer(options: ServerOptions, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the options name, or what their function makes (with settings of its own)."""
    if callable(options.optimizer):
        with own_code("The function that makes the optimizer"):
            made = options.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer) or isinstance(made, torch.optim.LBFGS):
            raise ParameterError(
                f"Expected an optimizer of torch.optim that takes one step per gradient, got {type(made).__name__}."
            )
        return made
    return _OPTIMIZERS[options.optimizer](parameters, lr=options.lr, weight_decay=options.weight_decay)


def make_scheduler(options: ServerOptions, optimizer: torch.optim.Optimizer) -> Any:
    """What the options' function makes of the optimizer; None where the schedule has a name."""
    if not callable(options.schedule):
        return None
    with own_code("The function that makes the schedule"):
        made = options.schedule(optimizer)
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler) or made.optimizer is not optimizer:
        raise ParameterError(
            f"Expected a scheduler of torch.optim.lr_scheduler for the optimizer given, got {type(made).__name__}."
        )
    return made


class Server:
    """The server's part in a run. All it knows of clients are the rounds' means.

    Attributes:
        optimizer: What takes the steps.
        scheduler: What changes its learning rate: of `torch.optim.lr_scheduler`, or None for a schedule with a name.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, options: ServerOptions, rounds: int) -> None:
        """Makes the optimizer of a model that is where it is trained; `ParameterError` if it does not fit there."""
        self._model = model
        self._loss = loss
        self._rounds = rounds
        self._options = options
        with enough_memory("the optimizer", "use a simpler one."):
            self.optimizer = make_optimizer(options, trainable(model).values())
            self.scheduler = make_scheduler(options, self.optimizer)
            self._average = None if options.averaging is None else MovingAverage(model, options.averaging)
        self._first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, mean: torch.Tensor, number: int) -> None:
        """The step of a round along its mean."""
        if not callable(self._options.schedule):
            for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
                group["lr"] = rate * rate_factor(self._options.schedule, number, self._rounds)
        parameters = trainable(self._model).values()
        for p, part in zip(parameters, mean.split_with_sizes([p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and not isinstance(self.scheduler, _WATCHES_LOSS):
            self.scheduler.step()
        if self._average is not None:
            self._average.update(number)
            if number + 1 == self._rounds:
                self._average.settle()

    def measured(self) -> AbstractContextManager[None]:
        """Within, the model is the one that is measured and comes out: the average, where there is one."""
        return nullcontext() if self._average is None else self._average.in_place()

    def heard(self, loss: float) -> None:
        """Tells a schedule that waits for the loss to stop falling what it is on the test examples."""
        if isinstance(self.scheduler, _WATCHES_LOSS):
            self.scheduler.step(loss)

    @property
    def config(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that was started."""
        options = self._options
        if callable(options.schedule):
            schedule = type(self.scheduler).__name__
        else:
            schedule = options.schedule
            schedule += "" if schedule == "constant" else f" over {self._rounds} rounds"
        return {
            "optimizer": type(self.optimizer).__name__ if callable(options.optimizer) else options.optimizer,
            "learning_rate": options.lr,
            "weight_decay": options.weight_decay,
            "schedule": schedule,
            # Runs of earlier releases do not have it.
            **({} if self._average is None else {"averaging": options.averaging}),
        }

    @property
    def parts(self) -> dict[str, Any]:
        """What must be kept of it beside the model, by the names in checkpoints."""
        others = {"schedule": self.scheduler, "average": self._average}
        return {"optimizer": self.optimizer} | {name: part for name, part in others.items() if part is not None}

    def is_finite(self) -> bool:
        """Whether all parameters of the model are numbers."""
        # One answer for all, so that a device is waited for once.
        return bool(torch.stack([torch.isfinite(p).all() for p in trainable(self._model).values()]).all())

    def outputs(self, features: torch.Tensor) -> object:
        """What the model makes of examples."""
        self._model.eval()
        with torch.no_grad():
            return self._model(features)

    def evaluate(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Mean loss on test examples, and their accuracy, or R² where labels are no classes."""
        loss, score = 0.0, Score()
        self._model.eval()
        with self.measured(), torch.no_grad(), one_thread():
            for start in range(0, len(labels), _TEST_BATCH):
                truth = labels[start : start + _TEST_BATCH]
                outputs = self._model(features[start : start + _TEST_BATCH])
                loss += float(self._loss(outputs, truth)) * len(truth)
                score.add(outputs, truth)
        return loss / len(labels), score.value
