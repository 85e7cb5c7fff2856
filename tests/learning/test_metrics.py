"""The file of a run's metrics, which is on the disk before it is relied on."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cpsgd._durable import write_file
from cpsgd.errors import CheckpointError
from cpsgd.learning.metrics import MetricsFile, RoundMetrics


def rows(*numbers: int) -> list[RoundMetrics]:
    fixed: dict[str, Any] = {"released": True, "loss": 1.0, "accuracy": None, "epsilon": 0.5, "delta": 1e-5}
    fixed |= {"method": "m", "bytes_per_client": 9, "bytes_total": 9, "noise_to_signal": None, "seconds": 0.1}
    return [RoundMetrics(round=number, survivors=90 + number, **fixed) for number in numbers]


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(rows(0, 1))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row.to_dict() for row in rows(0, 1)]


def test_a_file_of_others_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for content in (b"loss,accuracy\n", b'{"round": 1, "accuracy": 0.5}\n'):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no metrics of a run"):
            MetricsFile(path).begin()
    path.unlink()
    MetricsFile(path).begin()
    MetricsFile(path).append(rows(0, 1))
    MetricsFile(path).begin()
    MetricsFile(path).append(rows(0))  # a run that was stopped before its first checkpoint begins anew
    assert len(path.read_bytes().splitlines()) == 1


def test_only_new_rounds_are_written_and_all_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsFile(path)
    history.append(rows(0, 1))
    first = path.read_bytes()
    # A round that was written before is not looked at again.
    extent = history.append([*rows(8, 9), *rows(2, 3)])
    assert path.read_bytes()[: len(first)] == first
    assert MetricsFile(path).restore(extent) == rows(0, 1, 2, 3)
    assert history.append(rows(0, 1, 2, 3)) == extent


def test_what_came_after_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsFile(path)
    extent = history.append(rows(0, 1))
    history.append(rows(0, 1, 2, 3))
    path.write_bytes(path.read_bytes() + b'{"round": 4, "surv')
    resumed = MetricsFile(path)
    assert resumed.restore(extent) == rows(0, 1)
    resumed.append(rows(0, 1, 5))
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [0, 1, 5]


def test_every_change_of_the_past_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    extent = MetricsFile(path).append(rows(0, 1))
    good = path.read_bytes()
    for bad in (b"", good[:-1], good[1:], good.replace(b"90", b"91"), b"\n" + good):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl does not hold the rounds"):
            MetricsFile(path).restore(extent)
    for size in (-1, "9", None):
        with pytest.raises(CheckpointError, match="does not say"):
            MetricsFile(path).restore({**extent, "bytes": size})
    path.unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No such file or directory.*restore it"):
        MetricsFile(path).restore(extent)


def test_a_file_that_is_cut_short_while_the_run_goes_on_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = MetricsFile(path)
    history.append(rows(0, 1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        history.append(rows(0, 1, 2))


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
    history = MetricsFile(tmp_path / "metrics.jsonl")
    history.append(rows(0))
    assert synced == ["folder", "file"]
    history.append(rows(0, 1))
    assert synced == ["folder", "file", "file"]
