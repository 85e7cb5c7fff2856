"""Federated learning with Flower: a client mod and a strategy.

On a client, `@app.train(mods=[cpsgd_mod()])`; on the server, `CpsgdStrategy(plan).start(...)`. See docs/flower.md.
"""

from cpsgd.engines.flower.limits import Limits as Limits
from cpsgd.engines.flower.mod import cpsgd_mod as cpsgd_mod
from cpsgd.engines.flower.silo import silo_sum as silo_sum
from cpsgd.engines.flower.strategy import CpsgdStrategy as CpsgdStrategy
from cpsgd.engines.flower.strategy import RoundReport as RoundReport
