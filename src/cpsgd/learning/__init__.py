"""Training with private means, and its data.

Importing this package loads neither PyTorch nor any data; each name loads its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpsgd.learning.estimators import NoPrivacy as NoPrivacy
    from cpsgd.learning.estimators import baselines as baselines
    from cpsgd.learning.metrics import RoundMetrics as RoundMetrics
    from cpsgd.learning.metrics import tensorboard as tensorboard
    from cpsgd.learning.models import mlp as mlp
    from cpsgd.learning.optimization import loss_for as loss_for
    from cpsgd.learning.optimization import squared_error as squared_error
    from cpsgd.learning.option_groups import AccountOptions as AccountOptions
    from cpsgd.learning.option_groups import ClientOptions as ClientOptions
    from cpsgd.learning.option_groups import CohortOptions as CohortOptions
    from cpsgd.learning.option_groups import FolderOptions as FolderOptions
    from cpsgd.learning.option_groups import RunOptions as RunOptions
    from cpsgd.learning.option_groups import ServerOptions as ServerOptions
    from cpsgd.learning.trainer import Trainer as Trainer

_OPTIONS = ("AccountOptions", "ClientOptions", "CohortOptions", "FolderOptions", "RunOptions", "ServerOptions")
_HOMES = {
    **dict.fromkeys(_OPTIONS, "option_groups"),
    "NoPrivacy": "estimators",
    "RoundMetrics": "metrics",
    "Trainer": "trainer",
    "baselines": "estimators",
    "loss_for": "optimization",
    "mlp": "models",
    "squared_error": "optimization",
    "tensorboard": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
