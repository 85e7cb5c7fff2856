"""`example_sum`: the sum of clipped gradients that a silo sends where single examples are protected.

Where examples are drawn for a round, what the sum is made of must not be seen from outside. So as many gradients are
computed in every round as may ever be drawn: the time it takes does not depend on the draw.

The last bits of a gradient may depend on its place among those that are computed together. A server that chooses the
model's parameters can make them decide about everything. So places are drawn, too: whether one example is drawn says
nothing about the others' places (docs/proofs/sampled-examples.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.federation.messages import unflatten
from cpsgd.neighbours import Participation
from cpsgd.randomness import Keystream

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
    rate: float,
) -> dict[str, NDArray[Any]]:
    """Returns the sum of the examples' clipped gradients, named like the model's trainable parameters.

    Args:
        model: The model with the server's parameters in it.
        loss: From a model's outputs and the labels to their mean loss.
        features: The silo's examples, one per row.
        labels: Their classes.
        clip_norm: Of the protocol that the client has accepted.
        examples: The most examples that count: of more of them the first ones.
        rate: The probability with which each of them is drawn; 1 takes all.
    """
    from cpsgd.learning.example_sums import ExampleSums
    from cpsgd.learning.gradients import ClientUpdates
    from cpsgd.learning.models import trainable
    from cpsgd.privacy.one_example import most_drawn

    count, most = min(len(labels), examples), most_drawn(examples, Participation("poisson", rate))
    chosen = drawn(count, rate)[:most]
    places = shuffled(most)[: len(chosen)] if count and rate < 1.0 else np.arange(len(chosen))
    rows = np.zeros(most if count and rate < 1.0 else len(chosen), dtype=np.int64)
    counted = np.zeros(len(rows), dtype=bool)
    rows[places], counted[places] = chosen, True
    sums = ExampleSums(ClientUpdates(model, loss), _validate.positive("clip_norm", clip_norm), most)
    vector = sums.of_client(features[rows], labels[rows], counted)
    like = {name: np.empty(parameter.shape, np.float32) for name, parameter in trainable(model).items()}
    return unflatten(vector, like)


def drawn(count: int, rate: float) -> NDArray[np.int64]:
    """Returns the numbers below `count` that are drawn, each by itself with probability `rate`, rounded down.

    Draws are secret: they come from a fresh cryptographic stream, and nothing of them is kept.

    Example:
        >>> drawn(4, 1.0), len(drawn(1000, 0.5)) < 1000
        (array([0, 1, 2, 3]), True)
    """
    if rate >= 1.0:
        return np.arange(count)
    return np.flatnonzero(Keystream().take(8 * count).view("<u8") < np.uint64(int(rate * 2.0**64)))


def shuffled(count: int) -> NDArray[np.int64]:
    """Returns the numbers below `count` in a secret order; every order is equally likely."""
    while True:
        keys = Keystream().take(8 * count).view("<u8")
        order = np.argsort(keys)
        if (np.diff(keys[order]) > 0).all():  # else two are equal, and their order is not by chance
            return order
