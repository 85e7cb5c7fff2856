"""Losses and what is measured beside them: accuracy of classes, R² of numbers."""

from __future__ import annotations

from cpsgd._torch import torch
from cpsgd.learning.architecture import Loss
from cpsgd.learning.datasets.base import Dataset


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared difference. Outputs [n, 1] go with labels [n], which PyTorch's own would compare all with all.

    Example:
        >>> squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """
    return torch.nn.functional.mse_loss(outputs.reshape(labels.shape), labels)


def loss_for(dataset: Dataset) -> Loss:
    """The usual loss: cross-entropy for classes, `squared_error` for numbers."""
    return squared_error if dataset.classes is None else torch.nn.functional.cross_entropy


class Score:
    """Accuracy where labels are whole numbers, R² where they are not, over several batches.

    R² = 1 - Σ(output - label)² / Σ(label - mean label)²: 1 is perfect, 0 is as good as the mean label for everybody.

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
        """Accuracy or R² of all batches; R² is 0 where all labels are equal."""
        labels = torch.cat(self._labels)
        if not labels.is_floating_point():
            return self._correct / labels.numel()
        spread = float((labels.double() - labels.double().mean(dim=0)).square().sum())
        return 1.0 - self._error / spread if spread > 0.0 else 0.0
