"""`Server`: keeps the model, takes a step along each round's mean, and measures the model on test examples.

`check_start` tries the model, the loss and the data before the first round, so that a mistake costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.populations import Dataset
from cpsgd.learning.devices import enough_memory, fixed_draws, one_thread, own_code
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import Loss, trainable
from cpsgd.learning.option_groups import ServerOptions
from cpsgd.planner.workloads import MOMENTUM, rate_factor

_TEST_BATCH = 4096

# In round t the average keeps at most (t + 1)/(t + 10), so that it soon forgets the first weights.
_WARM_UP = 10

_WATCHES_LOSS = torch.optim.lr_scheduler.ReduceLROnPlateau

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("SGD", "Adagrad", "Adam", "AdamW", "Adamax", "Adadelta", "NAdam", "RAdam", "RMSprop")
}
_OPTIMIZERS["momentum"] = partial(torch.optim.SGD, momentum=MOMENTUM)


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error; outputs of shape [n, 1] are compared with labels of shape [n], row by row.

    Example:
        >>> squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """
    return torch.nn.functional.mse_loss(outputs.reshape(labels.shape), labels)


def loss_for(dataset: Dataset) -> Loss:
    """Returns the usual loss: cross-entropy for classes, `squared_error` for numbers.

    Example:
        >>> from cpsgd.learning.datasets import load_digits
        >>> loss_for(load_digits()).__name__
        'cross_entropy'
    """
    return squared_error if dataset.classes is None else torch.nn.functional.cross_entropy


class Score:
    """Accuracy for integer labels and R² for float labels, over several batches.

    R² = 1 - Σ(output - label)² / Σ(label - mean label)²: 1 is perfect, 0 is as good as predicting the mean label.

    Example:
        >>> score = Score()
        >>> score.add(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0]))
        >>> score.value
        0.5
    """

    def __init__(self) -> None:
        self._correct = 0
        self._error = 0.0
        self._labels: list[torch.Tensor] = []

    def add(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Counts a batch; outputs for classes are [n, classes, ...], as cross-entropy takes them."""
        self._labels.append(labels)
        if labels.is_floating_point():
            self._error += float((outputs.reshape(labels.shape) - labels).double().square().sum())
        else:
            self._correct += int((outputs.argmax(dim=1) == labels).sum())

    @property
    def value(self) -> float:
        """Accuracy or R² over all batches; R² is 0 if all labels are equal."""
        labels = torch.cat(self._labels)
        if not labels.is_floating_point():
            return self._correct / labels.numel()
        spread = float((labels.double() - labels.double().mean(dim=0)).square().sum())
        return 1.0 - self._error / spread if spread > 0.0 else 0.0


class MovingAverage:
    """Exponential moving average of a model's parameters: after every round decay × average + (1 − decay) × model.

    It has less of the rounds' noise than the last model. It is computed from released models and costs no privacy.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], decay: float) -> None:
        """Starts with the parameters as they are."""
        self._decay = decay
        self._own = list(parameters)
        self._average = [p.detach().clone() for p in self._own]

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Adds the model after round `number` to the average."""
        keep = min(self._decay, (number + 1) / (number + _WARM_UP))
        torch._foreach_lerp_(self._average, self._own, 1.0 - keep)

    @torch.no_grad()
    def settle(self) -> None:
        """Copies the average into the model."""
        torch._foreach_copy_(self._own, self._average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Sets the model's parameters to the average within the context, and back afterwards."""
        last = [p.detach().clone() for p in self._own]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._own, last)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        for own, saved in zip(self._average, state["average"], strict=True):
            own.copy_(saved)


def make_optimizer(options: ServerOptions, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer that the options name, or calls the options' own function."""
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
    """Calls the options' function that makes a scheduler; returns None for a schedule with a name."""
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
    """The server's part in a run. It sees nothing of the clients but the rounds' means.

    Attributes:
        optimizer: Takes the steps.
        scheduler: Changes the learning rate: of `torch.optim.lr_scheduler`, or None for a schedule with a name.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, options: ServerOptions, rounds: int) -> None:
        """Makes the optimizer; the model must be on its device. Raises `ParameterError` if it does not fit there."""
        self._model = model
        self._loss = loss
        self._rounds = rounds
        self._options = options
        self._parameters = list(trainable(model).values())
        self._sizes = [p.numel() for p in self._parameters]
        with enough_memory("the optimizer", "use a simpler one."):
            self.optimizer = make_optimizer(options, self._parameters)
            self.scheduler = make_scheduler(options, self.optimizer)
            self._average = None if options.averaging is None else MovingAverage(self._parameters, options.averaging)
        self._first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, mean: torch.Tensor, number: int) -> None:
        """Takes the step of round `number` along its mean."""
        schedule = self._options.schedule
        if not callable(schedule) and schedule != "constant":
            factor = rate_factor(schedule, number, self._rounds)
            for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
                group["lr"] = rate * factor
        for p, part in zip(self._parameters, mean.split_with_sizes(self._sizes), strict=True):
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
        """Within the context, sets the model to the one to measure and export: the average, if there is one."""
        return nullcontext() if self._average is None else self._average.in_place()

    def report_loss(self, loss: float) -> None:
        """Passes the test loss to a scheduler that watches it."""
        if isinstance(self.scheduler, _WATCHES_LOSS):
            self.scheduler.step(loss)

    @property
    def config(self) -> dict[str, Any]:
        """Settings that a resumed run must share with the one that was started."""
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
        """Objects whose state a checkpoint holds beside the model, by name."""
        others = {"schedule": self.scheduler, "average": self._average}
        return {"optimizer": self.optimizer} | {name: part for name, part in others.items() if part is not None}

    def is_finite(self) -> bool:
        """Returns whether the model's parameters hold neither NaN nor infinity."""
        # One answer for all, so that a device is waited for once.
        return bool(torch.stack([torch.isfinite(p).all() for p in self._parameters]).all())

    def outputs(self, features: torch.Tensor) -> object:
        """Returns the model's outputs for some examples."""
        self._model.eval()
        with torch.no_grad():
            return self._model(features)

    def evaluate(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Returns the mean loss on test examples, and their accuracy, or R² for labels that are no classes."""
        loss, score = 0.0, Score()
        self._model.eval()
        with self.measured(), torch.no_grad(), one_thread():
            for start in range(0, len(labels), _TEST_BATCH):
                truth = labels[start : start + _TEST_BATCH]
                outputs = self._model(features[start : start + _TEST_BATCH])
                loss += float(self._loss(outputs, truth)) * len(truth)
                score.add(outputs, truth)
        return loss / len(labels), score.value


def check_start(
    updates: ClientUpdates,
    server: Server,
    loss: Loss,
    examples: tuple[torch.Tensor, torch.Tensor],
    classes: int | None,
) -> None:
    """Tries one client's update and measures the test `examples`, before a round costs anything.

    It uses test examples and zeros of their shape only: no guarantee covers an error that clients' examples cause.
    """
    features, labels = examples
    if not len(labels):
        raise ParameterError("The data set has no test examples: without any, nothing can be measured.")
    kind = f"{str(features.dtype).removeprefix('torch.')} of shape {tuple(features.shape[1:])}"
    with one_thread(), fixed_draws(0, features.device):
        with own_code(f"The model, given examples of {kind},", quoted=True):
            outputs = server.outputs(torch.zeros_like(features[:1]))
        _check_outputs(outputs, labels[:1], classes, loss)
        with own_code(f"The loss, or the gradient of the model, for examples of {kind},", quoted=True):
            updates.rehearse(features[:1], labels[:1])
        with own_code("The model or the loss, given the test examples,"):
            found, _ = server.evaluate(features, labels)
    if not math.isfinite(found):
        raise ParameterError(
            "Before the first round the loss of the test examples is NaN or infinite: look at the model, the loss and "
            "the data."
        )


def _check_outputs(outputs: object, labels: torch.Tensor, classes: int | None, loss: Loss) -> None:
    """Checks that the shapes of outputs and labels fit the loss."""
    if not isinstance(outputs, torch.Tensor):
        raise ParameterError(f"Expected the model to return a tensor, got {type(outputs).__name__}.")
    shape, expected = list(outputs.shape[1:]), list(labels.shape[1:])
    if classes is not None:
        entropy = loss is torch.nn.functional.cross_entropy or isinstance(loss, torch.nn.CrossEntropyLoss)
        if outputs.ndim < 2 or shape[1:] != expected or (entropy and shape[0] < classes):
            raise ParameterError(
                f"Expected outputs of shape {['n', classes, *expected]} for labels of {classes} classes, the model's "
                f"are {['n', *shape]}."
            )
    elif outputs.numel() != labels.numel() or (shape != expected and loss is not squared_error):
        raise ParameterError(
            f"The model's outputs are {['n', *shape]} and the labels {['n', *expected]}, which a loss would compare "
            "all with all: give both one shape, or use cpsgd.learning.squared_error, which takes [n, 1] for [n]."
        )
