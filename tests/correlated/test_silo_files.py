"""The file of a silo's rows: used where it is the memory's last round, and neither an older nor a foreign one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd._durable import seal, unseal
from cpsgd.correlated.batons import Place
from cpsgd.correlated.silo_files import SiloFile
from cpsgd.errors import RoundRefusedError

PLACE = Place("77", bytes(range(16)), bands=3, round=5)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here."""
    monkeypatch.setattr("os.fsync", lambda file: None)


class Rounds:
    """A memory that answered these rounds, of any run."""

    def __init__(self, *answered: int) -> None:
        self.rounds = list(answered)

    def answered(self, run: str) -> list[int]:
        return self.rounds if run == PLACE.run else []

    @contextlib.contextmanager
    def lock(self) -> Iterator[Rounds]:
        yield self


def rows_of(silo: SiloFile, place: Place, number: int, *, last: bool = False) -> dict[int, Any]:
    return {round: row.tolist() for round, row in silo.state(place, number, last).rows.items()}


def keep(silo: SiloFile, place: Place, number: int, rows: dict[int, list[int]], *, last: bool = False) -> None:
    state = silo.state(place, number, last)
    state.rows = {round: np.array(row) for round, row in rows.items()}
    assert state.keep is not None
    state.keep(state)


def test_rows_come_back_in_the_next_round(tmp_path: Path) -> None:
    memory = Rounds(5)
    silo = SiloFile(tmp_path / "rows", memory.lock)
    keep(silo, PLACE, 4, {3: [1, -2], 4: [1 << 60, 7]})
    later = replace(PLACE, round=6)
    assert rows_of(silo, later, 5) == {3: [1, -2], 4: [1 << 60, 7]}
    # Rows of this round or of a later one are none that it takes away.
    assert rows_of(silo, later, 4) == {3: [1, -2]}
    memory.rounds.append(6)
    assert rows_of(silo, later, 5) == {3: [1, -2], 4: [1 << 60, 7]}
    for other in (replace(later, run="78"), replace(later, fingerprint=bytes(16))):
        assert rows_of(silo, other, 5) == {}


def test_the_last_round_removes_the_file_if_there_is_one(tmp_path: Path) -> None:
    silo = SiloFile(tmp_path / "rows", Rounds(5).lock)
    keep(silo, PLACE, 4, {4: [1]}, last=True)
    assert os.listdir(tmp_path) == []
    keep(silo, PLACE, 4, {4: [1]})
    assert len(os.listdir(tmp_path)) == 1
    keep(silo, replace(PLACE, round=6), 5, {5: [1]}, last=True)
    assert os.listdir(tmp_path) == []


def test_files_of_the_oldest_federations_are_removed_and_no_others(tmp_path: Path) -> None:
    silo, others = SiloFile(tmp_path / "[1].rows", Rounds(5).lock), {"[1].rows-backup", "1.rows-" + "0" * 32}
    for name in others:
        (tmp_path / name).touch()
    kept: list[str] = []
    for number in range(6):
        before = set(os.listdir(tmp_path))
        keep(silo, replace(PLACE, fingerprint=bytes([number]) * 16), 4, {4: [1]})
        (new,) = set(os.listdir(tmp_path)) - before
        os.utime(tmp_path / new, (number + 1, number + 1))
        kept = [*kept, new][-4:]
        assert set(os.listdir(tmp_path)) == {*kept, *others}


def test_an_older_file_is_left_aside_and_a_newer_one_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Rounds(5)
    silo = SiloFile(tmp_path / "rows", memory.lock)
    keep(silo, PLACE, 4, {4: [1]})
    memory.rounds = [5, 6]
    assert rows_of(silo, replace(PLACE, round=7), 6) == {}
    assert "older than its memory" in caplog.text
    for rounds in ([], [4], [5]):
        memory.rounds = rounds
        with pytest.raises(RoundRefusedError, match="was set back"):
            silo.state(replace(PLACE, round=5), 4, last=False)


@pytest.mark.parametrize("change", [{"format": "cpsgd silo 2"}, {"federation": "00" * 32}, {"dim": 3}, {"used": "x"}])
def test_a_file_that_is_no_such_file_is_left_aside(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silo = SiloFile(tmp_path / "rows", Rounds(5).lock)
    keep(silo, PLACE, 4, {3: [1, 2], 4: [3, 4]})
    (path,) = tmp_path.iterdir()
    head, _, body = unseal("rows", path.read_bytes()).partition(b"\n")
    later = replace(PLACE, round=6)
    assert len(rows_of(silo, later, 5)) == 2
    assert caplog.text == ""
    path.write_bytes(seal("rows", json.dumps(json.loads(head) | change).encode() + b"\n" + body))
    assert rows_of(silo, later, 5) == {}
    assert "damaged" in caplog.text
