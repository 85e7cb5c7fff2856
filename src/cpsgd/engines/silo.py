"""`example_sum`: the sum of clipped gradients that a silo sends where single examples are protected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.federation.messages import unflatten

if TYPE_CHECKING:
    import torch

    from cpsgd.learning.models import Loss


def example_sum(
    model: torch.nn.Module,
    loss: Loss,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    clip_norm: object,
    examples: int,
) -> dict[str, NDArray[Any]]:
    """Returns the sum of the examples' clipped gradients, named like the model's trainable parameters.

    Args:
        model: The model with the server's parameters in it.
        loss: From a model's outputs and the labels to their mean loss.
        features: The silo's examples, one per row.
        labels: Their classes.
        clip_norm: Of the protocol that the client has accepted.
        examples: The most examples that count: of more of them the first ones.
    """
    from cpsgd.learning.datasets.populations import Batch
    from cpsgd.learning.example_sums import ExampleSums
    from cpsgd.learning.gradients import ClientUpdates
    from cpsgd.learning.models import trainable

    sums = ExampleSums(ClientUpdates(model, loss), _validate.positive("clip_norm", clip_norm), examples)
    batch = Batch(features, labels, np.array([len(labels)], dtype=np.int64))
    (vector,) = next(iter(sums.chunks(batch)))
    like = {name: np.empty(parameter.shape, np.float32) for name, parameter in trainable(model).items()}
    return unflatten(vector, like)
