"""Data, model and loss of one's own for `cpsgd train`: what a function named `module:function` returns."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError, UserFunctionError
from cpsgd.learning.architecture import Loss
from cpsgd.learning.datasets.base import Dataset
from cpsgd.learning.devices import own_code
from cpsgd.learning.losses import loss_for

_PARTS = ("name", "source", "size", "classes", "feature_dim", "batch", "test_set")


@dataclass(frozen=True)
class Task:
    """What is trained on, the model if it is not one with a name, and the loss."""

    dataset: Dataset
    model: torch.nn.Module | None
    loss: Loss


def load_task(reference: str, *, seed: int) -> Task:
    """Calls the function that "module:function" names; modules in the current folder are found, too.

    It returns a data set, or with it a model, or with both a loss. The first weights of its model follow from the seed.

    Raises:
        ParameterError: There is no such function, or it returns something else.
        UserFunctionError: It fails.
    """
    function = _found(reference)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with own_code(f"{reference}()"):
            returned = function()
    dataset, model, loss = (*(returned if isinstance(returned, tuple) else (returned,)), None, None)[:3]
    missing = [part for part in _PARTS if not hasattr(dataset, part)]
    if missing or (isinstance(returned, tuple) and len(returned) > 3):
        raise ParameterError(
            f"Expected {reference} to return a data set of cpsgd.learning.datasets, or one with a model, or with a "
            f"model and a loss; got {_kinds(returned)}."
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ParameterError(f"Expected {reference} to return a model of torch.nn, got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise ParameterError(f"Expected {reference} to return a function as a loss, got {type(loss).__name__}.")
    return Task(dataset, model, loss or loss_for(dataset))


def _found(reference: str) -> Any:
    name, _, attribute = reference.partition(":")
    if not name or not attribute.isidentifier():
        raise ParameterError(f"Expected data to be module:function, as mypackage.module:function, got {reference!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserFunctionError(f"The module {name}", error) from error
        raise ParameterError(
            f"There is no module {error.name!r}, neither installed nor in the folder where this was called."
        ) from None
    except Exception as error:
        raise UserFunctionError(f"The module {name}", error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ParameterError(f"There is no function {attribute!r} in the module {name}.")
    return function


def _kinds(returned: object) -> str:
    parts = returned if isinstance(returned, tuple) else (returned,)
    return ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
