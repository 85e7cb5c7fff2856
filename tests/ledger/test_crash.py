"""Writers that are killed at random moments or race: nothing released is missing, nothing is overspent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cpsgd.errors import BudgetExceededError
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.protocol import Protocol

SIGMA = 1_000.0
PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=SIGMA)

# A server that imports once and then forks writers, so that two hundred of them do not take two hundred start-ups. Each
# writer reserves, releases, and only then writes its result to a file of its own and waits for the disk.
WRITER = """
import os, signal, sys
from cpsgd.ledger import Ledger, RoundEvent, replica
from cpsgd.protocol import Protocol

*paths, folder = sys.argv[1:]
replica.SNAPSHOT_EVERY = 7  # so that many are killed while they make one
protocol = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1_000.0)
ledgers = [Ledger(path) for path in paths]
ledgers[0].quote("people", [RoundEvent(protocol, survivors=900)])  # imports what is imported late

def write(name):
    ledger = ledgers[int(name) % len(ledgers)]
    with open(os.path.join(folder, name), "w") as results:
        for round in range(10_000):
            entry = ledger.reserve("people", RoundEvent(protocol, survivors=900, run=name, round=round))
            ledger.release(entry, 900 + round % 100)
            results.write(f"{entry.number} {900 + round % 100}\\n")
            results.flush()
            os.fsync(results.fileno())

for line in sys.stdin:
    for ledger in ledgers:
        ledger.budget("people")  # so that a writer need not read it all again
    child = os.fork()
    if child == 0:
        try:
            write(line.strip())
        except BaseException as error:
            print(f"failed: {error!r}", flush=True)
        os._exit(1)
    print(child, flush=True)
    # The children are somebody else's to kill; they are only waited for.
    while True:
        done, _ = os.waitpid(-1, os.WNOHANG)
        if done == 0:
            break
"""


@pytest.mark.parametrize(
    ("kills", "names"), [(40, 1), (25, 2), *(pytest.param(200, names, marks=pytest.mark.thorough) for names in (1, 2))]
)
def test_kill_minus_9_under_two_writers(kills: int, names: int, tmp_path: Path) -> None:
    """With two names each writer uses another one, in another folder, as with a hard link or a container's volume."""
    # The moments differ from run to run on purpose: the claim is about every moment.
    path, folder, script = tmp_path / "budgets.ledger", tmp_path / "results", tmp_path / "writer.py"
    folder.mkdir()
    script.write_text(textwrap.dedent(WRITER))
    Ledger(path).create(Budget(population="people", epsilon=400.0, delta=1e-6))
    paths = [path]
    if names == 2:
        (tmp_path / "other").mkdir()
        paths.append(tmp_path / "other" / "name.ledger")
        os.link(path, paths[1])
    with subprocess.Popen(
        [sys.executable, script, *paths, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def start(name: int) -> int:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{name}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        try:
            writers = [start(0), start(1)]
            for number in range(kills):
                time.sleep(random.uniform(0.0, 0.2))
                victim = writers.pop(0)
                os.kill(victim, signal.SIGKILL)
                writers.append(start(number + 2))
            for writer in writers:
                os.kill(writer, signal.SIGKILL)
        finally:
            server.stdin.close()
            server.wait(timeout=60)
        assert server.stdout.read() == ""  # no writer failed by itself
    ledger = Ledger(path)
    found = ledger.verify()
    assert ledger._replica.state.snapshot > 0  # it was opened from a snapshot
    assert all(Ledger(each).verify() == found for each in paths)
    entries = {entry.number: entry for entry in ledger.events("people")}
    results = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines(keepends=True)]
    assert len(results) > 20  # they really worked, also on a busy machine
    for place, survivors in results:
        entry = entries[int(place)]
        assert entry.released
        assert entry.survivors == int(survivors)
    # Every writer loses at most the round it was killed in, and that stays spent.
    lost = [entry for entry in entries.values() if not entry.released]
    assert len(lost) <= kills + 2
    assert len(entries) >= len(results)
    assert found.totals[0].rounds == len(entries)
    expected = guarantee_over_rounds(PROTOCOL, 1e-6, surviving=[entry.survivors for entry in entries.values()]).epsilon
    assert found.totals[0].epsilon >= expected * (1 - 1e-9)
    # And the ledger is as good as new.
    ledger.release(ledger.reserve("people", RoundEvent(PROTOCOL, survivors=900)), 900)


RACER = """
import sys
from cpsgd.errors import BudgetExceededError
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.protocol import Protocol

path, sigma = sys.argv[1], float(sys.argv[2])
event = RoundEvent(Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=sigma), survivors=1_000)
ledger = Ledger(path)
ledger.quote("people", [event])  # both see that there is room
print("ready", flush=True)
sys.stdin.readline()
try:
    ledger.reserve("people", event)
    print("won", flush=True)
except BudgetExceededError:
    print("lost", flush=True)
"""


def test_two_processes_race_for_the_last_round(tmp_path: Path) -> None:
    protocol = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1.0)
    limit = guarantee_over_rounds(protocol, 1e-6, rounds=3).epsilon * 1.0001
    path = tmp_path / "budgets.ledger"
    ledger = Ledger(path)
    ledger.create(Budget(population="people", epsilon=limit, delta=1e-6))
    for _ in range(2):
        ledger.reserve("people", RoundEvent(protocol, survivors=1_000))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, path, "1.0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        outcomes = []
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for racer in racers:
            outcomes.append(racer.communicate(timeout=60)[0].strip())
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(outcomes) == ["lost", "won"]
    assert ledger.total("people").rounds == 3
    assert ledger.total("people").epsilon <= limit
    with pytest.raises(BudgetExceededError):
        ledger.reserve("people", RoundEvent(protocol, survivors=1_000))
