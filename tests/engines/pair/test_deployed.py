"""One message to two servers in deployed federations: real nodes, and a helper that is a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cpsgd import Plan, plan
from cpsgd.engines.pair.running import free_port, start_server, stop_server, write_task
from cpsgd.engines.pair.task import create_task

pytestmark = pytest.mark.slow


@contextmanager
def helper(folder: Path, planned: Plan, rounds: int, roster: Path) -> Iterator[None]:
    """Makes the task's files in the folder, and runs the helper with them."""
    task, secrets = create_task(
        planned.protocol, leader="http://127.0.0.1:1", helper=f"http://127.0.0.1:{free_port()}", rounds=rounds
    )
    write_task(folder, task, secrets)
    running = start_server("helper", folder, options=("--roster", str(roster)), log=folder / "helper.log")
    try:
        yield
    finally:
        stop_server(running)


def test_flowers_superlink_and_supernodes(tmp_path: Path) -> None:
    """Two rounds of four SuperNodes, one of which sends garbage first. The model is that of the integers."""
    pytest.importorskip("flwr")
    from tests.engines.flower.federation import Federation
    from tests.engines.flower.test_deployment import APP

    dim, rounds, pair, outcome, directory = 2000, 2, tmp_path / "pair", tmp_path / "outcome", tmp_path / "federation"
    outcome.mkdir()
    directory.mkdir()
    planned = plan(4, dim, 8.0, 1e-5, rounds=rounds, pair=True, dropout=0.25, colluding=1, bits=9, mechanism="coins")
    with (
        Federation(directory, 4, task=pair / "task.json") as federation,
        helper(pair, planned, rounds, federation.roster),
    ):
        settings = {"folder": str(outcome), "dim": dim, "roster": str(federation.roster), "pair": str(pair)}
        run = {"rounds": rounds, "correlated": False, "stop-after": -1}
        federation.run(APP, 240.0, outcome / "result.json", {**settings, **run})
    first, second = json.loads((outcome / "result.json").read_text())["reports"]
    assert [(each["released"], each["survivors"]) for each in (first, second)] == [(True, 3), (True, 4)]
    assert len(first["faults"]) == 1
    model = np.zeros(dim, np.float32)
    for round, nodes in ((1, (0, 1, 3)), (2, (0, 1, 2, 3))):
        sent = [np.load(outcome / f"round-{round + 1}-node-{node}.npy") for node in nodes]
        sums = np.sum(sent, axis=0, dtype=np.uint64) % np.uint64(planned.protocol.modulus or 0)
        model = model + planned.protocol.decode_sum(sums, len(sent), round)
        np.testing.assert_array_equal(np.load(outcome / f"model-{round}.npy").reshape(-1), model)


@pytest.mark.thorough
def test_nvflares_server_and_sites(tmp_path: Path) -> None:
    """Two rounds of five sites, one of which is killed in the second.

    `make test` has the parts: these rounds with sites in one process, and such sites in rounds of secure aggregation.
    """
    pytest.importorskip("nvflare")
    from cpsgd.engines.nvflare import CpsgdController
    from tests.engines.nvflare import test_deployment as nvflare

    job, pair, directory = nvflare.load(nvflare.APP / "job.py"), tmp_path / "pair", tmp_path / "federation"
    planned = CpsgdController(**job.PAIR_SETTINGS, pair={}).make_plan(job.DIM)
    with (
        nvflare.federation_of(tmp_path) as (federation, folder),
        helper(pair, planned, 2, federation.roster),
    ):
        for site in nvflare.SITES:
            names = {"memory": f"{site}.memory", "identity": f"{site}.identity"}
            files = {f"cpsgd-{name}": str(directory / file) for name, file in names.items()}
            local = federation.admin_kit.parent / site / "local" / "cpsgd.json"
            local.write_text(json.dumps({**files, "cpsgd-task": str(pair / "task.json")}))
        nvflare.submit(federation, folder, str(pair))
        federation.kill("site-2")
        nvflare.wait_for(lambda: len(nvflare.rounds(directory)) == 2, federation)
    nvflare.check_reports(nvflare.rounds(directory))
    nvflare.the_model_is_that_of_the_protocol_in_process(planned.protocol, folder, directory)
