"""What a run writes is on the disk before it is relied on: files before they are moved, and then their names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cpsgd._durable import write_file
from cpsgd.learning.metrics import MetricsFile, RoundMetrics


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was waited for, in order, beside what was moved."""
    order: list[str] = []
    real = os.replace

    def fsync(file: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

    def replace(source: Path, target: Path) -> None:
        order.append("moved")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return order


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, synced: list[str]) -> None:
    write_file(tmp_path / "checkpoint.bin", b"state")
    assert (tmp_path / "checkpoint.bin").read_bytes() == b"state"
    assert synced == ["file", "moved", "folder"]


def test_a_new_history_has_its_name_first_and_then_its_rounds(tmp_path: Path, synced: list[str]) -> None:
    metrics = RoundMetrics(0, True, 9, None, None, 0.5, 1e-5, "m", 9, 81, None, 0.1)
    history = MetricsFile(tmp_path / "metrics.jsonl")
    history.append([metrics])
    assert synced == ["folder", "file"]
    history.append([metrics, metrics])
    assert synced == ["folder", "file", "file"]
