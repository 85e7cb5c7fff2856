from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import CheckpointError
from cpsgd.learning.checkpoints import ChargeLog, load, save, write_lines

STATE: dict[str, Any] = {
    "round": 3,
    "model": {"weight": torch.arange(6.0)},
    "history": [{"loss": None, "accuracy": 0.5}],
}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    found = load(path)
    assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
    assert found["history"] == STATE["history"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.bin"]


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    good = path.read_bytes()
    for position in [0, 5, 20, 40, 60, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError):
            load(path)
    for size in (0, 10, 40, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            load(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, {**STATE, "round": 4})
    assert load(path)["round"] == 3


def test_charges_survive_in_order(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    log = ChargeLog(path)
    log.append(0, 100)
    log.append(1, 99)
    assert ChargeLog(path).survivors == {0: 100, 1: 99}


def test_an_unfinished_line_is_no_charge_and_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    ChargeLog(path).append(0, 100)
    whole = path.read_bytes()
    for size in range(1, len(whole)):
        path.write_bytes(whole + whole[:size])
        log = ChargeLog(path)
        assert log.survivors == {0: 100}
        assert path.read_bytes() == whole
    log.append(1, 98)
    assert ChargeLog(path).survivors == {0: 100, 1: 98}


def test_a_damaged_charge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    log = ChargeLog(path)
    log.append(0, 100)
    log.append(1, 100)
    path.write_bytes(path.read_bytes().replace(b"100", b"900", 1))
    with pytest.raises(CheckpointError, match="Line 1"):
        ChargeLog(path)


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    first, second = ChargeLog(path), ChargeLog(path)
    first.append(0, 100)
    with pytest.raises(CheckpointError, match="twice at once"):
        second.append(0, 100)
    first.append(1, 100)
    assert ChargeLog(path).survivors == {0: 100, 1: 100}


HOLD = """
import sys, time
import os
import subprocess
import sys
from pathlib import Path
from cpsgd.learning.checkpoints import ChargeLog
log = ChargeLog(Path(sys.argv[1]))
log.append(0, 100)
print("open", flush=True)
time.sleep(600)
"""


def test_another_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        before = path.read_bytes()
        with pytest.raises(CheckpointError, match="Another process is at work"):
            ChargeLog(path)
        assert path.read_bytes() == before
        holder.kill()
    log = ChargeLog(path)
    assert log.survivors == {0: 100}
    # The lock is on the open log: once it is closed the file is free.
    command = [sys.executable, "-c", HOLD.split("log.append")[0], path]
    assert b"Another process" in subprocess.run(command, capture_output=True, env=environment, check=False).stderr
    del log
    subprocess.run(command, check=True, env=environment)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"round": 0}, {"round": 1}])
    assert path.read_text() == '{"round": 0}\n{"round": 1}\n'
