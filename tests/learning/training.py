"""Shorthands for the tests of training: a trainer from options of any group, and what comes of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.learning import Trainer, mlp
from cpsgd.learning.datasets import Dataset
from cpsgd.learning.estimators import Estimator
from cpsgd.learning.option_groups import (
    AccountOptions,
    ClientOptions,
    CohortOptions,
    FolderOptions,
    RunOptions,
    ServerOptions,
)
from cpsgd.privacy import Guarantee

LOSS = torch.nn.functional.cross_entropy
DIM = 15  # parameters of `linear`


@dataclass(frozen=True, kw_only=True)
class Options(CohortOptions, ClientOptions, ServerOptions, AccountOptions, RunOptions, FolderOptions):
    """All groups at once."""


def linear(seed: int = 0) -> torch.nn.Module:
    """For `blobs`: 4 features and a bias, 3 classes."""
    return mlp(4, 3, (), seed=seed)


def make_trainer(
    data: Dataset,
    mechanism: Estimator,
    model: torch.nn.Module | None = None,
    loss: Any = LOSS,
    callbacks: Any = (),
    **options: Any,
) -> Trainer:
    """Returns a trainer; by default of `linear`, in 3 rounds of 100 clients, with a seed."""
    chosen = Options(**{"cohort": 100, "rounds": 3, "seed": 1, **options})
    groups = dict.fromkeys(("cohorts", "clients", "server", "account", "run", "folder"), chosen)
    return Trainer(model or linear(), loss, data, mechanism, callbacks=callbacks, **groups)


class Crash(BaseException):
    """Stands in for the end of the process: nothing catches it."""


def interrupt(patched: pytest.MonkeyPatch, owner: Any, name: str, afterwards: bool, call: int) -> None:
    """Makes the `call`-th call of a function the last thing that happens, before or after its work."""
    calls, real = itertools.count(), getattr(owner, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) < call:
            return real(*arguments, **options)
        if afterwards:
            real(*arguments, **options)
        raise Crash

    patched.setattr(owner, name, interrupted)


def finish(run: Trainer) -> Trainer:
    for _ in run.run():
        pass
    return run


def spent(run: Trainer) -> Guarantee:
    found = run.guarantee()
    assert found is not None
    return found


def weights(of: Trainer | torch.nn.Module) -> np.ndarray:
    model = of.model if isinstance(of, Trainer) else of
    return np.concatenate([p.detach().cpu().numpy().reshape(-1) for p in model.parameters()])


def gradient(model: torch.nn.Module, data: Dataset, clients: Any, **options: Any) -> np.ndarray:
    """Gradient of the loss of all examples of some clients."""
    batch = data.batch(clients)
    loss = LOSS(model(torch.from_numpy(batch.features)), torch.from_numpy(batch.labels), **options)
    return np.concatenate([slope.numpy().reshape(-1) for slope in torch.autograd.grad(loss, list(model.parameters()))])
