"""The walk of a secure round; see `tests.walks`."""

from __future__ import annotations

import numpy as np
from flwr.app import ConfigRecord

from cpsgd import plan
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from tests.walks import walk

from .local import LocalGrid, Node, adds, model


def test_a_secure_round_of_flower() -> None:
    """With Flower's strategy and mods in this process, each client with a limit on ε."""
    best = plan(4, 40, 8.0, 1e-5, rounds=5, secure=True, dropout=0.25, colluding=1, bits=14)

    def start() -> tuple[CpsgdStrategy, LocalGrid]:
        """Makes the terms, which clients check, and runs the first round."""
        vector = np.full(40, 0.01, np.float32)
        strategy, nodes = (
            CpsgdStrategy(best),
            [Node(i, cpsgd_mod(epsilon=8.0, delta=1e-5), adds(vector)) for i in range(4)],
        )
        grid = LocalGrid(nodes)
        strategy.start(grid, model(40), num_rounds=1, timeout=1.0)
        return strategy, grid

    strategy, grid = start()

    def another() -> None:
        strategy.configure_train(0, model(40), ConfigRecord({}), grid)
        strategy.aggregate_train(0, [])
        assert strategy.reports[-1].released

    files, first = walk(another), walk(start)
    assert {"engines/flower/mod.py", "federation/choreography.py", "secagg/coordinator.py"} <= set(files)
    # Neither who plans nor who proves: that was done when the terms were made.
    assert not [name for name in files if name.startswith(("planner/", "privacy/"))]
    assert len(files) <= 30, files
    assert len(first) <= 37, first
