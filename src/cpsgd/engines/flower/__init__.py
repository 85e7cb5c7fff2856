"""Federated learning with Flower: a client mod and a strategy.

On a client, `@app.train(mods=[cpsgd_mod()])`; on the server, `CpsgdStrategy(plan).start(...)`. See docs/flower.md.
"""

from typing import TYPE_CHECKING, Any

from cpsgd.engines.flower.mod import cpsgd_mod as cpsgd_mod
from cpsgd.engines.flower.mod import silo_sum as silo_sum
from cpsgd.federation.limits import Limits as Limits

if TYPE_CHECKING:
    from cpsgd.engines.flower.strategy import CpsgdStrategy as CpsgdStrategy
    from cpsgd.federation.server import RoundReport as RoundReport


def __getattr__(name: str) -> Any:
    """The server's names, on demand: a client starts a process for every message and needs none of them."""
    if name not in ("CpsgdStrategy", "RoundReport"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cpsgd.engines.flower import strategy

    return getattr(strategy, name)
