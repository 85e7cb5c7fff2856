"""Two servers over HTTP: clients send one message each, and only the sum of all comes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand
from cpsgd.errors import ParameterError, RoundRefusedError
from cpsgd.federation.client_files import TASK_KEY

if TYPE_CHECKING:
    from cpsgd.engines.pair.parties import Collector as Collector
    from cpsgd.engines.pair.parties import Sender as Sender
    from cpsgd.engines.pair.task import PairTask as PairTask
    from cpsgd.engines.pair.task import Secrets as Secrets
    from cpsgd.engines.pair.task import create_task as create_task

__all__ = ["Collector", "PairTask", "Secrets", "Sender", "create_task"]
_HOMES = {
    **dict.fromkeys(("Collector", "Sender"), "parties"),
    **dict.fromkeys(("PairTask", "Secrets", "create_task"), "task"),
}
__getattr__ = on_demand(__name__, _HOMES)


def task_of(path: object) -> PairTask:
    """Returns the task of two servers that a federation's client has from its operator, in this file.

    Raises:
        RoundRefusedError: There is no file with a task.
    """
    from cpsgd.engines.pair.task import PairTask

    if not isinstance(path, str) or not Path(path).is_absolute():
        raise RoundRefusedError(f"This client's {TASK_KEY} is not a full path, which begins at the root.")
    try:
        return PairTask.read(Path(path))
    except (OSError, ParameterError):
        raise RoundRefusedError(f"This client's {TASK_KEY} holds no task of two servers.") from None
