"""Federated learning with Flower: a client mod and a strategy.

On a client, `@app.train(mods=[cpsgd_mod()])`; on the server, `CpsgdStrategy(plan).start(...)`. See docs/flower.md.
"""

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand
from cpsgd.engines.flower.mod import accepted_round as accepted_round
from cpsgd.engines.flower.mod import cpsgd_mod as cpsgd_mod
from cpsgd.engines.flower.mod import silo_sum as silo_sum
from cpsgd.federation.limits import Limits as Limits

if TYPE_CHECKING:
    from cpsgd.engines.flower.flower_questions import answer_question as answer_question
    from cpsgd.engines.flower.flower_questions import ask_question as ask_question
    from cpsgd.engines.flower.strategy import CpsgdStrategy as CpsgdStrategy
    from cpsgd.federation.sessions import RoundReport as RoundReport

_HOMES = {
    "CpsgdStrategy": "strategy",
    "RoundReport": "strategy",
    "answer_question": "flower_questions",
    "ask_question": "flower_questions",
}
# A client starts a process for every message: what only servers and statistics need is imported on demand.
__getattr__ = on_demand(__name__, _HOMES)
