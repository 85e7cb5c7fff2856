"""One message to two servers through Flower and NVFlare: the server is the leader, the helper a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, plan
from cpsgd.engines.pair import task_of
from cpsgd.engines.pair.in_federation import PairLeader
from cpsgd.engines.pair.parties import ask
from cpsgd.engines.pair.running import write_task
from cpsgd.engines.pair.task import create_task
from cpsgd.errors import ParameterError, RoundRefusedError, StageError

from .processes import Servers

pytestmark = pytest.mark.slow
DIM, ROUNDS = 40, 3
VECTORS = np.random.default_rng(3).normal(size=(6, DIM)).astype(np.float32) * 0.1
PLAN = {"dropout": 0.2, "bits": 5, "mechanism": "coins"}


@lru_cache(maxsize=1)
def planned() -> Plan:
    """Five clients of whom one may drop out, and one may tell its noise."""
    return plan(5, DIM, 8.0, 1e-5, rounds=ROUNDS, colluding=1, pair=True, **PLAN)  # type: ignore[arg-type]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path / "pair", rounds=ROUNDS, planned=planned().protocol)
    found.start("helper")
    yield found
    for role in list(found.running):
        found.stop(role)


def files(running: Servers) -> dict[str, str]:
    folder = running.folder
    names = {"task": "task.json", "secrets": "leader.json", "collector": "collector.json", "store": "leader.db"}
    return {name: str(folder / file) for name, file in names.items()}


def flower_run(running: Servers, members: list[Any], rounds: int = ROUNDS) -> tuple[Any, np.ndarray]:
    from cpsgd.engines.flower import CpsgdStrategy
    from tests.engines.flower.local import LocalGrid, model

    pair = PairLeader(**files(running))
    try:
        strategy = CpsgdStrategy(planned(), pair=pair, node_timeout=0.5, grace=0.0)
        result = strategy.start(LocalGrid(members), model(DIM), num_rounds=rounds, timeout=20.0)
    finally:
        pair.close()
    arrays = result.arrays or model(DIM)
    return strategy, np.concatenate([array.numpy().reshape(-1) for array in arrays.values()])


def flower_nodes(running: Servers, **settings: str) -> list[Any]:
    from cpsgd.engines.flower import cpsgd_mod
    from tests.engines.flower.local import Node, adds

    found = [Node(100 + i, cpsgd_mod(), adds(VECTORS[i])) for i in range(5)]
    for node in found:
        node.context.node_config.update({"cpsgd-task": files(running)["task"], **settings})
    return found


def test_flower_moves_the_model_by_the_mean_in_one_exchange(running: Servers) -> None:
    from tests.engines.flower.local import task

    with task():
        members = flower_nodes(running)
        strategy, after = flower_run(running, members)
    assert [(report.released, report.survivors) for report in strategy.reports] == [(True, 5)] * ROUNDS
    assert [node.trained for node in members] == [ROUNDS] * 5
    error = np.sum((after - ROUNDS * VECTORS[:5].mean(axis=0)) ** 2)
    # Sums of 40 coordinates' squared noise exceed 9 times their mean with P < 1e-60.
    assert 0.0 < error < 9 * ROUNDS * planned().error.total
    size = running.task.shape(0).upload_bytes
    assert all(size < sent < size + 2000 for sent in strategy.reports[0].upload_bytes.values())


def test_flower_drops_a_node_whose_message_is_changed(running: Servers) -> None:
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    from cpsgd.engines.flower.records import RECORD, UPLOAD
    from tests.engines.flower.local import task

    def damaged(reply: Message) -> Message:
        if reply.has_error():
            return reply
        data = bytearray(reply.content.array_records[RECORD][UPLOAD].data)
        data[200] ^= 1  # of the helper's part, which the leader's is bound to
        array = Array(dtype="uint8", shape=(len(data),), stype="cpsgd.bytes", data=bytes(data))
        return Message(RecordDict({RECORD: ArrayRecord({UPLOAD: array})}), reply_to=reply)

    with task():
        members = flower_nodes(running)
        members[2].tamper = damaged
        strategy, _ = flower_run(running, members, rounds=1)
    [report] = strategy.reports
    assert (report.released, report.survivors) == (True, 4)
    assert list(report.faults) == [102]
    assert "does not open" in report.faults[102]


def test_clients_without_the_task_or_with_another_refuse(running: Servers, tmp_path: Path) -> None:
    """The server cannot name keys of its own: a client's task is its operator's file."""
    from tests.engines.flower.local import task

    other, _ = create_task(planned().protocol, leader="http://a", helper="http://b", rounds=ROUNDS, admission="open")
    (tmp_path / "other.json").write_text(json.dumps(other.to_dict()))
    with task():
        members = flower_nodes(running)
        del members[0].context.node_config["cpsgd-task"]
        members[1].context.node_config["cpsgd-task"] = str(tmp_path / "other.json")
        strategy, _ = flower_run(running, members, rounds=1)
    [report] = strategy.reports
    assert not report.released
    assert {100, 101} <= report.dropped.keys()
    assert all("no such task" in report.dropped[node] for node in (100, 101))
    assert [node.trained for node in members[:2]] == [0, 0]
    assert not report.faults.keys() & {100, 101}


def test_a_client_with_a_task_takes_part_in_no_other_rounds(running: Servers) -> None:
    """A server that asks for secure sums instead could play all other clients itself."""
    from cpsgd.engines.flower import CpsgdStrategy
    from tests.engines.flower.local import LocalGrid, model, task

    with task():
        members = flower_nodes(running)
        for secure in (True, False):
            other = plan(5, DIM, 8.0, 1e-5, rounds=ROUNDS, colluding=1, secure=secure, **PLAN)  # type: ignore[arg-type]
            strategy = CpsgdStrategy(other, secure=secure, node_timeout=0.5, grace=0.0)
            strategy.start(LocalGrid(members), model(DIM), num_rounds=1, timeout=20.0)
            [report] = strategy.reports
            assert not report.released
            assert all("two servers of that task" in reason for reason in report.dropped.values())
    assert [node.trained for node in members] == [0] * 5


def test_with_a_task_an_identity_needs_no_roster(tmp_path: Path) -> None:
    from cpsgd.federation.client_files import Signing
    from cpsgd.secagg import create_identity

    key = create_identity(tmp_path / "key")
    settings = {"cpsgd-task": "/task.json", "cpsgd-identity": str(tmp_path / "key")}
    found = Signing.of(settings)
    assert found.roster is None
    assert found.identity is not None
    assert found.identity.private_bytes_raw() == key.private_bytes_raw()
    for wrong, said in (
        ({"cpsgd-roster": "/roster"}, "drop cpsgd-roster"),
        ({"cpsgd-identity": "/none"}, "cannot use"),
    ):
        with pytest.raises(RoundRefusedError, match=said):
            Signing.of({**settings, **wrong})


@pytest.mark.parametrize("path", ["task.json", 7, "/nowhere/task.json", ""])
def test_a_setting_that_names_no_task_is_refused(path: object) -> None:
    with pytest.raises(RoundRefusedError, match="cpsgd-task"):
        task_of(path)


def test_nvflare_moves_the_model_by_the_mean_in_one_exchange(running: Servers, tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from cpsgd.engines.nvflare import CpsgdController
    from tests.engines.nvflare.local import Site, adds, run

    pace = {"nodes": 0.2, "stage": 20.0, "grace": 0.0}
    server = CpsgdController(5, ROUNDS, 8.0, 1e-5, plan=PLAN, pace=pace, pair=files(running))
    members = [Site(tmp_path, f"site-{i}", adds(VECTORS[i]), limits={"rounds": ROUNDS}) for i in range(5)]
    for site in members:
        (site.folder / "local" / "cpsgd.json").write_text(json.dumps({"cpsgd-task": files(running)["task"]}))
    after = run(server, members, tmp_path / "server")
    assert [(report.released, report.survivors) for report in server.reports] == [(True, 5)] * ROUNDS
    error = np.sum((after - ROUNDS * VECTORS[:5].mean(axis=0)) ** 2)
    assert 0.0 < error < 9 * ROUNDS * planned().error.total


def test_a_leader_that_stops_settles_what_it_kept_and_goes_on(running: Servers) -> None:
    pair, task = PairLeader(**files(running)), running.task
    one = np.ones(DIM, dtype=np.uint32)
    uploads = [task.upload(one, 0) for _ in range(5)]
    assert pair.settle([pair.read(upload) for upload in uploads[:3]]) == [""] * 3
    lost = pair.read(uploads[3])
    pair._leader.evaluate([lost])  # on disk, and then the process is gone
    pair.close()
    pair = PairLeader(**files(running))
    assert pair.accepted(0) == 4
    with pytest.raises(Exception, match="sent before"):
        pair.read(uploads[0])
    request = pair._leader.evaluate([pair.read(uploads[4])])
    ask(pair._verifying, "POST", "/verify", content=request)  # the helper counts it, and its answer is lost
    sums, count = pair.finish(0)
    assert count == 5
    assert np.array_equal(sums, 5 * one)
    again, _ = pair.finish(0)
    assert np.array_equal(again, sums)
    with pytest.raises(StageError, match="ended already"):
        pair.begin(0)
    # A round that the federation withheld is passed over at both servers.
    pair.begin(2)
    assert pair.settle([pair.read(task.upload(one, 2))]) == [""]
    pair.close()


def test_what_does_not_fit_is_refused(running: Servers, tmp_path: Path) -> None:
    from cpsgd.federation.terms import Terms

    pair = PairLeader(**files(running))
    other = plan(5, DIM, 7.0, 1e-5, rounds=ROUNDS, colluding=1, pair=True, **PLAN)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="another protocol"):
        Terms(plan=other, pair=pair)
    pair.close()
    task, secrets = create_task(
        planned().protocol, leader="http://127.0.0.1:1", helper="http://127.0.0.1:2", rounds=3, admission="tokens"
    )
    write_task(tmp_path / "tokens", task, secrets, tokens=2)
    given = {name: str(tmp_path / "tokens" / Path(path).name) for name, path in files(running).items()}
    with pytest.raises(ParameterError, match="tokens"):
        PairLeader(**given, tokens=str(tmp_path / "tokens" / "leader-tokens.txt"))
