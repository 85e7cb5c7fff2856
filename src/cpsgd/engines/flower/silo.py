"""`silo_sum`: what a silo's train function returns where single examples are protected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.engines.flower.records import RECORD, make_arrays
from cpsgd.errors import ParameterError
from cpsgd.federation.vectors import unflatten

if TYPE_CHECKING:
    import torch

    from cpsgd.learning.gradients import Loss


def silo_sum(
    message: Message,
    model: torch.nn.Module,
    loss: Loss,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> ArrayRecord:
    """The sum of the examples' clipped gradients, for a train function under `cpsgd_mod(examples=...)`.

    What each gradient is clipped to follows from the protocol that the mod has accepted. Of more examples than
    `examples` the first ones count.

    Args:
        message: The train function's message, as the mod hands it over.
        model: The model with the server's parameters in it.
        loss: From a model's outputs and the labels to their mean loss.
        features: The silo's examples, one a row.
        labels: Their classes.

    Returns:
        The sum, named like the model's trainable parameters: the reply's one ArrayRecord, and nothing else's.

    Raises:
        ParameterError: The train function does not run under `cpsgd_mod(examples=...)`.
    """
    from cpsgd.learning.datasets.base import Batch
    from cpsgd.learning.examples import ExampleSums
    from cpsgd.learning.gradients import ClientUpdates, trainable

    accepted = message.content.config_records.get(RECORD) or ConfigRecord()
    examples, clip_norm = accepted.get("examples"), accepted.get("clip-norm")
    if not isinstance(examples, int) or examples < 1:
        raise ParameterError("silo_sum needs a train function with mods=[cpsgd_mod(examples=...)].")
    sums = ExampleSums(ClientUpdates(model, loss), _validate.positive("clip_norm", clip_norm), examples)
    batch = Batch(features, labels, np.array([len(labels)], dtype=np.int64))
    (vector,) = next(iter(sums.chunks(batch)))
    like = {name: np.empty(parameter.shape, np.float32) for name, parameter in trainable(model).items()}
    return make_arrays(unflatten(vector, like))
