"""`Server`: it keeps the model, takes a step along each round's mean, and looks at test examples."""

from __future__ import annotations

from cpsgd._torch import torch
from cpsgd.learning import devices, optimizers
from cpsgd.learning.gradients import Loss, trainable
from cpsgd.learning.repeatable import one_thread

_TEST_BATCH = 4096


class Server:
    """The server's part in a run. All it knows of clients are the rounds' means.

    Attributes:
        optimizer: What takes the steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        optimizer: str | optimizers.Factory,
        *,
        learning_rate: float,
        weight_decay: float,
        schedule: optimizers.Schedule,
        rounds: int,
    ) -> None:
        """Makes the optimizer of a model that is where it is trained; the arguments are the trainer's.

        Raises:
            ParameterError: There is no such optimizer or schedule, or the GPU has too little memory for it.
        """
        self._model = model
        self._loss = loss
        self._rounds = rounds
        with devices.enough_memory("the optimizer", "use a simpler one."):
            self.optimizer = optimizers.make(optimizer, trainable(model).values(), learning_rate, weight_decay)
        self._schedule = optimizers.check_schedule(schedule)
        self._first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, mean: torch.Tensor, number: int) -> None:
        """The step of a round along its mean."""
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = rate * optimizers.factor(self._schedule, number, self._rounds)
        start = 0
        for p in trainable(self._model).values():
            p.grad = mean[start : start + p.numel()].view(p.shape)
            start += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def is_finite(self) -> bool:
        """Whether all parameters of the model are numbers."""
        # One answer for all, so that a device is waited for once.
        return bool(torch.stack([torch.isfinite(p).all() for p in trainable(self._model).values()]).all())

    def evaluate(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Mean loss and accuracy on test examples."""
        loss, correct = 0.0, 0
        self._model.eval()
        with torch.no_grad(), one_thread():
            for start in range(0, len(labels), _TEST_BATCH):
                truth = labels[start : start + _TEST_BATCH]
                outputs = self._model(features[start : start + _TEST_BATCH])
                loss += float(self._loss(outputs, truth)) * len(truth)
                correct += int((outputs.argmax(dim=-1) == truth).sum())
        return loss / len(labels), correct / len(labels)
