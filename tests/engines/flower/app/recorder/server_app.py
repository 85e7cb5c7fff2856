"""Runs the strategy and writes every round's model, and what became of the round, to files.

With `stop-after` it waits after that round, for the test to kill it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from cpsgd import plan
from cpsgd.engines.flower import CpsgdStrategy
from cpsgd.engines.pair.in_federation import PairLeader
from cpsgd.errors import PopulationError
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import read_roster

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The whole run."""
    folder, dim = Path(str(context.run_config["folder"])), int(context.run_config["dim"])
    rounds = int(context.run_config["rounds"])
    run: dict[str, Any] = {"rounds": rounds, "participation": "every"}
    if context.run_config["correlated"]:
        run |= {"correlated": 2, "mechanism": str(context.run_config["mechanism"])}
    roster, way = Path(str(context.run_config["roster"])), dict[str, Any](secure=True, bits=14)
    terms: dict[str, Any] = {"roster": read_roster(roster)}
    if context.run_config["pair"]:
        files = Path(str(context.run_config["pair"]))
        names = (files / name for name in ("task.json", "leader.json", "collector.json"))
        terms = {"pair": PairLeader(*names, store=str(files / "leader.db"), roster=roster)}
        way = {"pair": True, "bits": 9, "mechanism": "coins"}
    best = plan(4, dim, 8.0, 1e-5, **run, **way, dropout=0.25, colluding=1)
    (folder / "protocol.json").write_text(best.protocol.to_json())

    def save(round: int, arrays: ArrayRecord) -> MetricRecord:
        np.save(folder / f"model-{round}.npy", arrays["weight"].numpy())
        if round == context.run_config["stop-after"]:
            beside = folder / "waiting.new"
            beside.write_text(str(os.getpid()))
            beside.rename(folder / "waiting")
            time.sleep(600.0)
        return MetricRecord({"round": round})

    with Ledger(folder / "ledger") as ledger:
        with contextlib.suppress(PopulationError):  # a run that goes on has its budget
            ledger.create(Budget(population="nodes", epsilon=8.0, delta=1e-5))
        strategy = CpsgdStrategy(best, checkpoint=folder / "checkpoint", ledger=ledger, population="nodes", **terms)
        result = strategy.start(
            grid,
            ArrayRecord({"weight": Array(np.zeros((dim // 10, 10), np.float32))}),
            num_rounds=rounds,
            timeout=float(context.run_config["timeout"]),
            evaluate_fn=save,
        )
        spent = ledger.total("nodes").epsilon
        charged = [(entry.event.run, entry.event.round, entry.released) for entry in ledger.events("nodes")]
    metrics = {round: dict(record) for round, record in result.train_metrics_clientapp.items()}
    reports = [vars(report) for report in strategy.reports]
    found = {"reports": reports, "metrics": metrics, "surviving": best.surviving, "spent": spent, "charged": charged}
    found["planned"] = best.guarantee.epsilon
    (folder / "result.json").write_text(json.dumps(found))
