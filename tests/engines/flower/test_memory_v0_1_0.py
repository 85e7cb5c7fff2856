"""A Flower client that remembers rounds answered with release 0.1.0 counts them on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

import cpsgd
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from tests.federation.local import with_run

from .local import LocalGrid, Node, adds, model

DATA = Path(__file__).resolve().parents[2] / "data" / "v0_1_0"


@pytest.mark.parametrize(("run", "released"), [(1, [False, False]), (2, [True, False])])
def test_rounds_of_the_old_release_count(run: int, released: list[bool], tmp_path: Path) -> None:
    """Of three rounds two were answered, in run 1: one more is, of another run, and none twice."""
    recorded = json.loads((DATA / "flower.json").read_text())
    plan = replace(cpsgd.plan(**recorded["plan"]), protocol=cpsgd.Protocol.from_dict(recorded["protocol"]))
    plan = with_run(plan, colluding=1)
    nodes = []
    for i in range(4):
        path = tmp_path / f"memory-{i}"
        shutil.copyfile(DATA / "flower" / path.name, path)
        node = Node(100 + i, cpsgd_mod(rounds=3), adds(np.zeros(40, np.float32)))
        node.context = Context(run, node.number, {"cpsgd-memory": str(path)}, RecordDict(), {})
        nodes.append(node)
    strategy = CpsgdStrategy(plan)
    strategy.start(LocalGrid(nodes), model(40), num_rounds=2, timeout=1.0)
    assert [report.released for report in strategy.reports] == released
    assert [node.trained for node in nodes] == [sum(released)] * 4
    for i in range(4):
        old = (DATA / "flower" / f"memory-{i}").read_bytes()
        assert (tmp_path / f"memory-{i}").read_bytes().startswith(old)
