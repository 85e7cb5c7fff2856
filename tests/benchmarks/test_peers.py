"""`benchmarks/peers.py`: who is installed is measured, and who is not is said to be missing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from benchmarks import peers

MISSING = "no-such-package"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Short vectors, and no peer but NumPy's."""
    never: Any = pytest.fail
    chosen = ((None, peers.own, False), (None, peers.numpy_peers, True), ("flwr", never, False), (MISSING, never, True))
    monkeypatch.setattr(peers, "PEERS", chosen)
    monkeypatch.setattr(peers, "installed", lambda package: None)
    monkeypatch.setattr(peers, "ROUNDS", 2)
    return peers.measure(turns=1, dim=64, short_dim=32, neighbours=4)


def test_rows_are_of_what_is_installed(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["coordinates"] for row in report["noise"].values()] == [64, 64, 64, 32, 32]
    assert all(row["ns"] > 0 for row in report["noise"].values())
    assert set(report["accounting"]) == set(report["masking"]["seconds"]) == {"cpsgd"}
    assert json.loads(json.dumps(report)) == report
    peers.print_report(report)
    printed = capsys.readouterr().out
    assert all(f"{package}: not installed" in printed for package in ("flwr", MISSING, "dp-accounting"))


def test_versions() -> None:
    assert peers.installed(MISSING) is None
    assert peers.installed("numpy")


def test_the_shortest_time_counts() -> None:
    waits = iter([0.02, 0.0, 0.02, 0.02])

    def work() -> None:
        end = time.process_time() + next(waits)
        while time.process_time() < end:
            pass

    assert peers.best_times({"work": work}, turns=2, runs=2)["work"] < 0.01
