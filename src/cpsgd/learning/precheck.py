"""A look at model, loss and data before the first round: what cannot be trained is refused before it costs anything.

Only test examples, and zeros in their shape, are looked at: an error that followed from a client's examples would be an
answer about them that no guarantee covers.
"""

from __future__ import annotations

import math

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.architecture import Loss
from cpsgd.learning.devices import fixed_draws, one_thread, own_code
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.losses import squared_error
from cpsgd.learning.server import Server


def check_start(
    updates: ClientUpdates,
    server: Server,
    loss: Loss,
    examples: tuple[torch.Tensor, torch.Tensor],
    classes: int | None,
) -> None:
    """Tries one client's update and looks at the test examples.

    Raises:
        UserFunctionError: The model or the loss raises.
        ParameterError: They do not fit the data, or the loss is not a number.
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
    if not isinstance(outputs, torch.Tensor):
        raise ParameterError(f"Expected the model to return a tensor, got {type(outputs).__name__}.")
    shape, wanted = list(outputs.shape[1:]), list(labels.shape[1:])
    if classes is not None:
        entropy = loss is torch.nn.functional.cross_entropy or isinstance(loss, torch.nn.CrossEntropyLoss)
        if outputs.ndim < 2 or shape[1:] != wanted or (entropy and shape[0] < classes):
            raise ParameterError(
                f"Expected outputs of shape {['n', classes, *wanted]} for labels of {classes} classes, the model's are "
                f"{['n', *shape]}."
            )
    elif outputs.numel() != labels.numel() or (shape != wanted and loss is not squared_error):
        raise ParameterError(
            f"The model's outputs are {['n', *shape]} and the labels {['n', *wanted]}, which a loss would compare all "
            "with all: give both one shape, or use cpsgd.learning.squared_error, which takes [n, 1] for [n]."
        )
