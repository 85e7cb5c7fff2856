"""A SuperLink with a database and its SuperNodes are killed and started again, with real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cpsgd.ledger import Ledger

from .federation import Federation

APP = Path(__file__).parent / "app"
NODES = 4

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="processes as POSIX has them")]


def test_a_federation_goes_on_after_its_superlink_and_a_node_were_killed(tmp_path: Path) -> None:
    """Registered keys are in Flower's database, rounds in our checkpoint and ledger, answers in the nodes' memories."""
    directory, folder = tmp_path / "federation", tmp_path / "results"
    directory.mkdir()
    folder.mkdir()
    with Federation(directory, NODES, database=True) as federation:
        settings = {"folder": str(folder), "dim": 2_000, "rounds": 2, "timeout": 60.0, "roster": str(federation.roster)}
        settings["correlated"] = False
        federation.begin(APP, {**settings, "stop-after": 1})
        federation.kill_server(folder / "waiting", 180.0)
        answered = [federation.memory(node) for node in range(NODES)]
        federation.restart_superlink()
        federation.restart_node(1)
        # The second run is a new one for Flower, and the same course for the strategy.
        federation.run(APP, 240.0, folder / "result.json", settings)
        remembered = [federation.memory(node) for node in range(NODES)]
    assert not federation.living()
    result = json.loads((folder / "result.json").read_text())
    assert [report["round"] for report in result["reports"]] == [1, 2]
    assert [report["released"] for report in result["reports"]] == [True, True], result["reports"]
    # No node is missing after it: the one that was killed takes part again, without being registered again.
    assert result["reports"][1]["survivors"] == NODES
    assert [[round, released] for _, round, released in result["charged"]] == [[1, True], [2, True]]
    assert Ledger(folder / "ledger").verify().overspent == ()
    # Memories go on: nothing that was answered is forgotten, and no stage of a run is answered twice.
    for before, after in zip(answered, remembered, strict=True):
        assert after[: len(before)] == before
        stages = [tuple(line) for line in after if not line[0].startswith("#")]
        assert len(stages) == len(set(stages))


def test_without_a_database_a_superlink_forgets_its_nodes(tmp_path: Path) -> None:
    with Federation(tmp_path, 1) as federation:
        federation.restart_superlink()
        listed = json.loads(federation._flwr("supernode", "list", "local", "--format", "json"))
        assert listed["nodes"] == []
        os.kill(federation.supernodes[0].pid, signal.SIGTERM)
