"""A whole federation of processes with TLS, node authentication and a roster.

After the first round its server is killed, and goes on; in its third round, which the second has prepared, nodes fail.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol

from .federation import Federation

pytestmark = pytest.mark.slow
NODES = 6
DIM = 20_000
APP = Path(__file__).parent / "app"


@dataclass
class Outcome:
    """What a run left behind."""

    folder: Path
    result: dict[str, Any]
    protocol: Protocol
    logs: str
    memories: list[list[list[str]]]

    def sent(self, round: int, node: int) -> np.ndarray:
        return np.load(self.folder / f"round-{round}-node-{node}.npy")

    def model(self, round: int) -> np.ndarray:
        return np.load(self.folder / f"model-{round}.npy").reshape(-1)


def test_a_federation_of_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test and not several of one fixture, which parallel workers would each make: a federation fills a machine."""
    outcome = run_federation(tmp_path_factory.mktemp("federation"), tmp_path_factory.mktemp("outcome"))
    the_model_is_that_of_the_protocol_in_process(outcome)
    a_killed_and_a_lying_node_cost_nobody_else_the_round(outcome)
    uploads_take_the_packed_bits_and_little_more(outcome)
    train_functions_run_once_a_round_and_their_metrics_stay(outcome)
    a_killed_server_went_on_and_each_round_is_charged_once(outcome)
    clients_have_confirmed_the_survivors(outcome)
    nodes_remember_the_rounds_also_one_that_was_killed_in_it(outcome)


def run_federation(directory: Path, folder: Path) -> Outcome:
    with Federation(directory, NODES) as federation:
        stop = threading.Event()

        def kill_the_sleeper() -> None:
            while not (folder / "trained-3-1").exists():
                if stop.wait(0.2):
                    return
            federation.kill_node(1)

        settings = {"folder": str(folder), "dim": DIM, "roster": str(federation.roster)}
        federation.begin(APP, {**settings, "stop-after": 1})
        federation.kill_server(folder / "waiting", 180.0)
        watcher = threading.Thread(target=kill_the_sleeper)
        watcher.start()
        try:
            logs = federation.run(APP, 300.0, folder / "result.json", settings)
        finally:
            stop.set()
            watcher.join(15.0)
        assert federation.supernodes[1].poll() is not None
    assert not federation.living()
    protocol = Protocol.from_json((folder / "protocol.json").read_text())
    memories = [federation.memory(node) for node in range(NODES)]
    return Outcome(folder, json.loads((folder / "result.json").read_text()), protocol, logs, memories)


def the_model_is_that_of_the_protocol_in_process(outcome: Outcome) -> None:
    """Bit for bit: the sum of the integers that the surviving nodes' protocol made, decoded here."""
    model = np.zeros(DIM, np.float32)
    for round, survivors in ((1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2, 3, 4, 5]), (3, [0, 3, 4, 5])):
        sums = np.sum([outcome.sent(round, node) for node in survivors], axis=0, dtype=np.uint64)
        assert outcome.protocol.modulus is not None
        mean = outcome.protocol.decode_sum(sums % np.uint64(outcome.protocol.modulus), len(survivors), round)
        model = model + mean
        np.testing.assert_array_equal(outcome.model(round), model)


def a_killed_and_a_lying_node_cost_nobody_else_the_round(outcome: Outcome) -> None:
    first, second, third = outcome.result["reports"]
    for report in (first, second):
        assert (report["released"], report["survivors"], report["dropped"]) == (True, 6, {})
    assert (third["released"], third["survivors"]) == (True, 4)
    assert outcome.result["surviving"] == 4
    reasons = sorted(third["dropped"].values())
    assert len(reasons) == 2
    assert any(reason == "no answer in time" for reason in reasons)
    assert any("Error" in reason for reason in reasons)


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
    """Under another name, for it is another run of Flower's; its reports and models are those of one run."""
    assert [report["round"] for report in outcome.result["reports"]] == [1, 2, 3]
    assert list(outcome.result["metrics"]) == ["2", "3"]
    (before, *_), (after, *_), _ = charged = outcome.result["charged"]
    assert before != after
    assert charged == [[before, 1, True], [after, 2, True], [after, 3, True]]
    assert 0.0 < outcome.result["spent"] <= 8.0


def clients_have_confirmed_the_survivors(outcome: Outcome) -> None:
    confirmed = sorted(path.name for path in outcome.folder.glob("confirmed-*"))
    survivors = {1: range(NODES), 2: range(NODES), 3: (0, 3, 4, 5)}
    assert confirmed == [f"confirmed-{round}-{node}" for round, nodes in survivors.items() for node in nodes]


def nodes_remember_the_rounds_also_one_that_was_killed_in_it(outcome: Outcome) -> None:
    for lines in outcome.memories:
        memory = [line for line in lines if line[0] != "#kind"]
        assert len(memory) == len(lines) - 1  # one kind of round, said once
        answered = [line for line in memory if len(line[2]) == 32]
        assert [line[1] for line in answered] == ["1", "2", "3"]
        assert len({line[2] for line in answered}) == 1
        (one, _, _), (other, _, _), (last, _, _) = answered
        assert one != other == last
        stages = [" ".join(line[1:]) for line in memory if line not in answered]
        # Each round prepares the next one. What was prepared before the server was killed is forgotten.
        assert stages[:6] == ["1 advertise", "1 share", "1 confirm", "2 ahead-advertise", "1 unmask", "2 ahead-share"]
        assert stages[6:12] == ["2 advertise", "2 share", "2 confirm", "3 ahead-advertise", "2 unmask", "3 ahead-share"]
        assert stages[12:] in ([], ["3 confirm", "3 unmask"])
