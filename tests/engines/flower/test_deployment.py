"""A whole federation of processes with TLS, node authentication and a roster, and noise that later rounds take away.

In its first round a node lies. After it the server, the SuperLink and a node are killed, and go on: registered keys are
in Flower's database, rounds in our checkpoint and ledger, answers in the nodes' memories. In the third round, which the
second has prepared, a node is killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.ledger import Ledger

from .federation import Federation

pytestmark = pytest.mark.slow
NODES = 4
DIM = 20_000
SURVIVORS = {1: (0, 1, 3), 2: (0, 1, 2, 3), 3: (0, 2, 3)}
APP = Path(__file__).parent / "app"


@dataclass
class Outcome:
    """What a run left behind."""

    folder: Path
    result: dict[str, Any]
    protocol: Protocol
    logs: str
    memories: list[list[list[str]]]
    answered: list[list[list[str]]]
    lineages: list[str]
    rows: list[int]

    def seeds(self, round: int, node: int) -> list[str | None]:
        """The seeds of a round and of the one before; with shaped rounding, hashes of what a silo takes away."""
        found: list[str | None] = json.loads((self.folder / f"seeds-{round}-{node}.json").read_text())
        return found

    def sent(self, round: int, node: int) -> np.ndarray:
        return np.load(self.folder / f"round-{round}-node-{node}.npy")

    def model(self, round: int) -> np.ndarray:
        return np.load(self.folder / f"model-{round}.npy").reshape(-1)


@pytest.mark.parametrize(
    "mechanism", ["shaped-gaussian", pytest.param("correlated-gaussian", marks=pytest.mark.thorough)]
)
def test_a_federation_of_processes(mechanism: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test and not several of one fixture, which parallel workers would each make: a federation fills a machine."""
    # The first is what a plan takes for silos that stay, when nobody names a mechanism.
    asked = "best" if mechanism == "shaped-gaussian" else mechanism
    outcome = run_federation(tmp_path_factory.mktemp("federation"), tmp_path_factory.mktemp("outcome"), asked)
    assert outcome.protocol.mechanism.name == mechanism
    the_model_is_that_of_the_protocol_in_process(outcome)
    a_killed_and_a_lying_node_cost_nobody_else_the_round(outcome)
    uploads_take_the_packed_bits_and_little_more(outcome)
    train_functions_run_once_a_round_and_their_metrics_stay(outcome)
    a_killed_server_went_on_and_each_round_is_charged_once(outcome)
    clients_have_confirmed_the_survivors(outcome)
    nodes_remember_the_rounds_also_one_that_was_killed_in_it(outcome)
    memories_go_on_after_a_restart(outcome)
    rounds_take_away_the_noise_of_the_round_before_in_the_same_run(outcome)


def run_federation(directory: Path, folder: Path, mechanism: str) -> Outcome:
    with Federation(directory, NODES, database=True) as federation:
        stop = threading.Event()

        def kill_the_sleeper() -> None:
            while not (folder / "trained-3-1").exists():
                if stop.wait(0.2):
                    return
            federation.kill_node(1)

        settings = {"folder": str(folder), "dim": DIM, "roster": str(federation.roster), "mechanism": mechanism}
        federation.begin(APP, {**settings, "stop-after": 1})
        federation.kill_server(folder / "waiting", 180.0)
        answered = [federation.memory(node) for node in range(NODES)]
        federation.restart_superlink()
        federation.restart_node(1)
        watcher = threading.Thread(target=kill_the_sleeper)
        watcher.start()
        try:
            logs = federation.run(APP, 300.0, folder / "result.json", settings)
        finally:
            stop.set()
            watcher.join(15.0)
        assert federation.supernodes[1].ended()
    assert not federation.living()
    protocol = Protocol.from_json((folder / "protocol.json").read_text())
    memories = [federation.memory(node) for node in range(NODES)]
    lineages = [path.read_text() for path in sorted(directory.glob("memory-*.lineages"))]
    rows = [len(list(directory.glob(f"memory-{node}.rows-*"))) for node in range(NODES)]
    result = json.loads((folder / "result.json").read_text())
    return Outcome(folder, result, protocol, logs, memories, answered, lineages, rows)


def the_model_is_that_of_the_protocol_in_process(outcome: Outcome) -> None:
    """Bit for bit: the sum of the integers that the surviving nodes' protocol made, decoded here."""
    model = np.zeros(DIM, np.float32)
    for round, survivors in SURVIVORS.items():
        sums = np.sum([outcome.sent(round, node) for node in survivors], axis=0, dtype=np.uint64)
        assert outcome.protocol.modulus is not None
        number = outcome.protocol.mechanism.memory.number(round)
        mean = outcome.protocol.decode_sum(sums % np.uint64(outcome.protocol.modulus), len(survivors), number)
        model = model + mean
        np.testing.assert_array_equal(outcome.model(round), model)


def a_killed_and_a_lying_node_cost_nobody_else_the_round(outcome: Outcome) -> None:
    first, second, third = outcome.result["reports"]
    assert [report["released"] for report in (first, second, third)] == [True] * 3
    assert [report["survivors"] for report in (first, second, third)] == [3, 4, 3]
    assert outcome.result["surviving"] == 3
    (lie,) = first["dropped"].values()
    assert "Error" in lie
    assert list(first["faults"]) == list(first["dropped"])
    assert not second["dropped"]
    assert list(third["dropped"].values()) == ["no answer in time"]
    assert not third["faults"]


def uploads_take_the_packed_bits_and_little_more(outcome: Outcome) -> None:
    assert outcome.protocol.modulus is not None
    bits = outcome.protocol.modulus.bit_length() - 1
    for report in outcome.result["reports"]:
        for uploaded in report["upload_bytes"].values():
            assert uploaded <= bits * DIM / 8 + 32_000


def train_functions_run_once_a_round_and_their_metrics_stay(outcome: Outcome) -> None:
    trained = sorted(path.name for path in outcome.folder.glob("trained-*"))
    assert trained == [f"trained-{round}-{node}" for round in (1, 2, 3) for node in range(NODES)]
    for metrics in outcome.result["metrics"].values():
        assert set(metrics) == {"cpsgd-released", "cpsgd-survivors", "cpsgd-upload-bytes"}
    # Longer than chance can put into the numbers of nodes.
    assert "471108154711" not in json.dumps(outcome.result["reports"])


def a_killed_server_went_on_and_each_round_is_charged_once(outcome: Outcome) -> None:
    """Flower's run is another one, and the course goes on under its name: noise that is correlated is paid for once."""
    assert [report["round"] for report in outcome.result["reports"]] == [1, 2, 3]
    assert list(outcome.result["metrics"]) == ["2", "3"]
    charged = outcome.result["charged"]
    assert charged == [[charged[0][0], round, True] for round in (1, 2, 3)]
    assert outcome.result["spent"] == pytest.approx(outcome.result["planned"], rel=1e-3)
    assert Ledger(outcome.folder / "ledger").verify().overspent == ()


def clients_have_confirmed_the_survivors(outcome: Outcome) -> None:
    confirmed = sorted(path.name for path in outcome.folder.glob("confirmed-*"))
    assert confirmed == [f"confirmed-{round}-{node}" for round, nodes in SURVIVORS.items() for node in nodes]


def nodes_remember_the_rounds_also_one_that_was_killed_in_it(outcome: Outcome) -> None:
    for node, lines in enumerate(outcome.memories):
        memory = [line for line in lines if not line[0].startswith("#")]
        assert sum(line[0] == "#kind" for line in lines) == 1  # one kind of round, said once
        # The others' counters, whenever it has seen their keys.
        assert sum(line[0] == "#peers" for line in lines) == sum(line[2].endswith("share") for line in memory)
        answered = [line for line in memory if len(line[2]) == 32]
        assert [line[1] for line in answered] == ["1", "2", "3"]
        assert len({line[2] for line in answered}) == 1
        (one, _, _), (other, _, _), (last, _, _) = answered
        assert one != other == last
        stages = [" ".join(line[1:]) for line in memory if line not in answered]
        # Each round prepares the next one. What was prepared before the server was killed is forgotten.
        first = ["1 advertise", "1 share"]
        if node != 2:
            first += ["1 confirm", "2 ahead-advertise", "1 unmask", "2 ahead-share"]
        second = ["2 advertise", "2 share", "2 confirm", "3 ahead-advertise", "2 unmask", "3 ahead-share"]
        assert stages == first + second + ([] if node == 1 else ["3 confirm", "3 unmask"])


def memories_go_on_after_a_restart(outcome: Outcome) -> None:
    """Nothing that was answered is forgotten, and no stage of a run is answered twice."""
    for before, after in zip(outcome.answered, outcome.memories, strict=True):
        assert after[: len(before)] == before
        stages = [tuple(line) for line in after if not line[0].startswith("#")]
        assert len(stages) == len(set(stages))


def rounds_take_away_the_noise_of_the_round_before_in_the_same_run(outcome: Outcome) -> None:
    """A server that was killed goes on under another name, with lineages that begin anew."""
    for node in range(NODES):
        for begun in (1, 2):
            own, before = outcome.seeds(begun, node)
            assert own is not None
            assert before is None
    for node in SURVIVORS[3]:
        own, before = outcome.seeds(3, node)
        assert own is not None
        assert before is not None
        assert before == outcome.seeds(2, node)[0] != own
    # What no later round can need is forgotten.
    if outcome.protocol.mechanism.name == "shaped-gaussian":
        # The file of the killed run, and of the run that a node did not see the end of.
        assert outcome.rows == [1, 2, 1, 1]
        assert not outcome.lineages
        return
    assert outcome.rows == [0] * NODES
    for node in SURVIVORS[3]:
        own, before = outcome.seeds(3, node)
        assert str(own) in outcome.lineages[node]
        assert str(before) not in outcome.lineages[node]


@pytest.mark.thorough
def test_without_a_database_a_superlink_forgets_its_nodes(tmp_path: Path) -> None:
    with Federation(tmp_path, 1) as federation:
        federation.restart_superlink()
        listed = json.loads(federation._flwr("supernode", "list", "local", "--format", "json"))
        assert listed["nodes"] == []
        os.kill(federation.supernodes[0].pid, signal.SIGTERM)
