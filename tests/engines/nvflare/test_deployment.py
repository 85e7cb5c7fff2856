"""A whole federation of processes with mutual TLS and a roster; in its second round a site is killed."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cpsgd import Protocol
from cpsgd.engines.nvflare import CpsgdController
from cpsgd.engines.nvflare.controller import REPORTS_FILE
from cpsgd.ledger import Budget, Ledger

APP = Path(__file__).parent / "app"
EXAMPLE = Path(__file__).parents[3] / "examples" / "nvflare-digits"
SITES = [f"site-{number}" for number in range(1, 6)]
# Below the ports that systems give to outgoing connections, which could take one between the choice and its use.
PORTS = range(20_000, 30_000)


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"nvflare_test_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("No port is free.")


def listening(pids: list[int]) -> set[str]:
    """Addresses that these processes listen on, in the kernel's spelling."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            sockets |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


@contextmanager
def federation_of(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """Starts and ends a federation in the example's own way; yields it with an empty folder that has a ledger."""
    helper = load(EXAMPLE / "federation.py")
    directory, folder = tmp_path / "federation", tmp_path / "outcome"
    directory.mkdir()
    folder.mkdir()
    with Ledger(folder / "ledger") as ledger:
        ledger.create(Budget(population="sites", epsilon=8.0, delta=1e-5))
        ledger.create(Budget(population="examples", epsilon=8.0, delta=1e-5, adjacency="zero-out", unit="example"))
    with helper.Federation(directory, SITES, free_port()) as federation:
        yield federation, folder
    assert not federation.living()


def submit(federation: Any, folder: Path, *more: str) -> None:
    """Submits the job, and returns when site-2 is in the second round."""
    arguments = [str(folder), str(federation.admin_kit), federation.admin_kit.name, str(federation.roster), *more]
    command = [sys.executable, str(APP / "job.py"), *arguments]
    done = subprocess.run(command, env=federation.environment(), check=False, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: (folder / "trained-1-site-2").exists(), federation)


def test_a_federation_of_processes(tmp_path: Path) -> None:
    """A job whose numbers are known."""
    job, directory = load(APP / "job.py"), tmp_path / "federation"
    with federation_of(tmp_path) as (federation, folder):
        submit(federation, folder)
        addresses = listening(federation.living())
        federation.kill("site-2")
        wait_for(lambda: len(rounds(directory)) == 2, federation)
    assert addresses == {"0100007F"}  # 127.0.0.1
    reports = rounds(directory)
    check_reports(reports)
    protocol = CpsgdController(**job.SETTINGS).make_plan(job.DIM).protocol
    the_model_is_that_of_the_protocol_in_process(protocol, folder, directory)
    everybody_trained_once_a_round_and_remembers_it(federation, folder)
    everybody_drew_its_examples_once_a_round(folder)
    assert "471108154711" not in json.dumps(reports)
    with Ledger(folder / "ledger") as ledger:
        assert len(ledger.events("examples")) == 2
        assert 6.0 < ledger.total("examples").epsilon <= 8.0  # 8 with one site less in both rounds


def check_reports(reports: list[dict[str, Any]]) -> None:
    """All sites were in the first round, and all but the killed one in the second."""
    first, second = reports
    assert (first["round"], first["released"], first["survivors"], first["dropped"]) == (1, True, 5, {})
    assert (second["round"], second["released"], second["survivors"]) == (2, True, 4)
    assert second["dropped"] == {"site-2": "no answer in time"}


def rounds(directory: Path) -> list[dict[str, Any]]:
    """What the server has written about its rounds so far."""
    for path in directory.rglob(REPORTS_FILE):
        with suppress(ValueError):  # half written
            found: list[dict[str, Any]] = json.loads(path.read_text())
            return found
    return []


def wait_for(condition: Any, federation: Any) -> None:
    deadline = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < deadline, federation.logs()
        time.sleep(0.1)


def the_model_is_that_of_the_protocol_in_process(protocol: Protocol, folder: Path, directory: Path) -> None:
    """Bit for bit: the sum of the integers that the surviving sites' protocol made, decoded here."""
    assert protocol.modulus is not None
    model = np.zeros(protocol.dim, np.float32)
    for round, survivors in ((1, SITES), (2, [site for site in SITES if site != "site-2"])):
        sent = [np.load(folder / f"sent-{round}-{site}.npy") for site in survivors]
        sums = np.sum(sent, axis=0, dtype=np.uint64) % np.uint64(protocol.modulus)
        model = model + protocol.decode_sum(sums, len(survivors), round)
    (saved,) = directory.rglob("server.npy")
    np.testing.assert_array_equal(np.load(saved).reshape(-1), model)


def everybody_trained_once_a_round_and_remembers_it(federation: Any, folder: Path) -> None:
    trained = sorted(path.name for path in folder.glob("trained-*"))
    assert trained == [f"trained-{round}-{site}" for round in (0, 1) for site in SITES]
    for site in SITES:
        lines = [line.split() for line in federation.memory(site).read_text().splitlines()]
        # The site that was killed had counted its round before it began to train.
        assert [line[1] for line in lines if len(line[2]) == 32] == ["1", "2"]


def everybody_drew_its_examples_once_a_round(folder: Path) -> None:
    """Anew in each round, and nobody as another."""
    draws = []
    for site in SITES:
        lines = [line.split() for line in (folder / f"drawn-{site}").read_text().splitlines()]
        # The site that is killed in the second round sleeps before it draws.
        assert len(lines) == (1 if site == "site-2" else 2)
        assert {(count, rate) for count, rate, *_ in lines} == {("100", "0.2")}
        draws += [tuple(chosen) for _, _, *chosen in lines]
    # Two of nine draws of 100 coins are alike with a probability of 36 · 0.68^100, below 1e-15.
    assert len(set(draws)) == 9
