"""What people do with private means: training and its data.

Importing this package loads neither PyTorch nor any data; the names below load what they need when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpsgd.learning.callbacks import tensorboard as tensorboard
    from cpsgd.learning.history import RoundMetrics as RoundMetrics
    from cpsgd.learning.losses import loss_for as loss_for
    from cpsgd.learning.losses import squared_error as squared_error
    from cpsgd.learning.mechanisms import NoPrivacy as NoPrivacy
    from cpsgd.learning.mechanisms import baselines as baselines
    from cpsgd.learning.models import mlp as mlp
    from cpsgd.learning.options import AccountOptions as AccountOptions
    from cpsgd.learning.options import ClientOptions as ClientOptions
    from cpsgd.learning.options import CohortOptions as CohortOptions
    from cpsgd.learning.options import FolderOptions as FolderOptions
    from cpsgd.learning.options import RunOptions as RunOptions
    from cpsgd.learning.options import ServerOptions as ServerOptions
    from cpsgd.learning.trainer import Trainer as Trainer

_OPTIONS = ("AccountOptions", "ClientOptions", "CohortOptions", "FolderOptions", "RunOptions", "ServerOptions")
_HOMES = {
    **dict.fromkeys(_OPTIONS, "options"),
    "NoPrivacy": "mechanisms",
    "RoundMetrics": "history",
    "Trainer": "trainer",
    "baselines": "mechanisms",
    "loss_for": "losses",
    "mlp": "models",
    "squared_error": "losses",
    "tensorboard": "callbacks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
