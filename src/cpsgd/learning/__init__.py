"""Training with private means, and its data.

Importing this package loads neither PyTorch nor any data; each name loads its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand

if TYPE_CHECKING:
    from cpsgd.learning.estimators import NoPrivacy as NoPrivacy
    from cpsgd.learning.estimators import baselines as baselines
    from cpsgd.learning.metrics import RoundMetrics as RoundMetrics
    from cpsgd.learning.metrics import tensorboard as tensorboard
    from cpsgd.learning.models import mlp as mlp
    from cpsgd.learning.models import without_batch_norm as without_batch_norm
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
    **dict.fromkeys(("NoPrivacy", "baselines"), "estimators"),
    **dict.fromkeys(("RoundMetrics", "tensorboard"), "metrics"),
    **dict.fromkeys(("loss_for", "squared_error"), "optimization"),
    "Trainer": "trainer",
    **dict.fromkeys(("mlp", "without_batch_norm"), "models"),
}
__getattr__ = on_demand(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
