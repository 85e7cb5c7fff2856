"""Runs the strategy and writes every round's model, and what became of the round, to files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from cpsgd import plan
from cpsgd.engines.flower import CpsgdStrategy
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import read_roster

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The whole run."""
    folder, dim = Path(str(context.run_config["folder"])), int(context.run_config["dim"])
    rounds = int(context.run_config["rounds"])
    best = plan(6, dim, 8.0, 1e-5, rounds=rounds, secure=True, dropout=0.333, colluding=1, bits=14)
    roster = read_roster(Path(str(context.run_config["roster"])))
    (folder / "protocol.json").write_text(best.protocol.to_json())

    def save(round: int, arrays: ArrayRecord) -> MetricRecord:
        np.save(folder / f"model-{round}.npy", arrays["weight"].numpy())
        return MetricRecord({"round": round})

    with Ledger(folder / "ledger") as ledger:
        ledger.create(Budget(population="nodes", epsilon=8.0, delta=1e-5))
        strategy = CpsgdStrategy(best, ledger=ledger, population="nodes", roster=roster)
        result = strategy.start(
            grid,
            ArrayRecord({"weight": Array(np.zeros((dim // 10, 10), np.float32))}),
            num_rounds=rounds,
            timeout=float(context.run_config["timeout"]),
            evaluate_fn=save,
        )
        spent = ledger.total("nodes").epsilon
    metrics = {round: dict(record) for round, record in result.train_metrics_clientapp.items()}
    reports = [vars(report) for report in strategy.reports]
    found = {"reports": reports, "metrics": metrics, "spent": spent, "surviving": best.surviving}
    (folder / "result.json").write_text(json.dumps(found))
