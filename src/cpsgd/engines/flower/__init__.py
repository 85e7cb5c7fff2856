"""Federated learning with Flower: a client mod and a strategy.

On a client, `@app.train(mods=[cpsgd_mod()])`; on the server, `CpsgdStrategy(plan).start(...)`. See docs/flower.md.
"""

from typing import TYPE_CHECKING, Any

from cpsgd.engines.flower.mod import accepted_round as accepted_round
from cpsgd.engines.flower.mod import cpsgd_mod as cpsgd_mod
from cpsgd.engines.flower.mod import silo_sum as silo_sum
from cpsgd.federation.limits import Limits as Limits

if TYPE_CHECKING:
    from cpsgd.engines.flower.questions import answer_question as answer_question
    from cpsgd.engines.flower.questions import ask_question as ask_question
    from cpsgd.engines.flower.strategy import CpsgdStrategy as CpsgdStrategy
    from cpsgd.federation.sessions import RoundReport as RoundReport


_MODULES = {
    "CpsgdStrategy": "strategy",
    "RoundReport": "strategy",
    "answer_question": "questions",
    "ask_question": "questions",
}


def __getattr__(name: str) -> Any:
    """The server's names and those of statistics, on demand: a client starts a process for every message."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
