"""What is found in a folder, and what is never read: links, pipes, large files, and anything outside."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cpsgd.dashboard import folder as folders
from cpsgd.dashboard.folder import Folder, read_bytes, read_object
from cpsgd.errors import DataError
from tests.dashboard.samples import write_ledger, write_run

OLD = Path(__file__).parent.parent / "data" / "v0_2_0" / "budgets.ledger"
LINKS = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as POSIX has them")


def test_runs_ledgers_and_reports_are_found_up_to_two_folders_down(folder: Path) -> None:
    write_run(folder / "a" / "b" / "too-deep")
    found = Folder.at(folder)
    assert set(found.runs()) == {"runs/done", "runs/going"}
    assert found.ledgers() == ["study.ledger"]
    assert found.reports() == ["audit.json"]


def test_a_run_itself_may_be_the_folder(folder: Path) -> None:
    assert Folder.at(folder / "runs" / "done").runs() == ["."]


def test_the_run_that_was_begun_last_comes_first(folder: Path) -> None:
    os.utime(folder / "runs" / "done" / "config.json", (1, 1))
    assert Folder.at(folder).runs() == ["runs/going", "runs/done"]


def test_a_baseline_is_no_run_of_its_own(folder: Path) -> None:
    (folder / "runs" / "done" / "baselines" / "no-privacy" / "config.json").write_text("{}")
    assert len(Folder.at(folder / "runs").runs()) == 2


def test_only_a_ledger_is_taken_for_one(folder: Path) -> None:
    import sqlite3

    with sqlite3.connect(folder / "other.ledger") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    (folder / "short.ledger").write_bytes(b"SQLite format 3\0")
    shutil.copy(OLD, folder / "old.ledger")  # of 0.2.0, which was a database
    logged = bytearray(OLD.read_bytes())
    logged[18:20] = (2, 2)  # with a write-ahead log: to read it would make files
    (folder / "logged.ledger").write_bytes(logged)
    write_ledger(folder / "no-suffix")
    assert Folder.at(folder).ledgers() == ["no-suffix", "old.ledger", "study.ledger"]


@LINKS
def test_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write_run(outside / "secret")
    write_ledger(outside / "secret.ledger")
    (outside / "secret.json").write_text("{}")
    for name in ("secret", "secret.ledger", "secret.json"):
        (folder / name).symlink_to(outside / name)
    (folder / "runs" / "all").symlink_to(outside)
    found = Folder.at(folder)
    assert set(found.runs()) == {"runs/done", "runs/going"}
    assert found.ledgers() == ["study.ledger"]
    assert found.reports() == ["audit.json"]
    # Nor where the folder of a run is real and a file in it is a link.
    victim = folder / "runs" / "done"
    (victim / "summary.json").unlink()
    (victim / "summary.json").symlink_to(outside / "secret.json")
    with pytest.raises(DataError, match="is a link"):
        read_object(victim / "summary.json")
    (victim / "config.json").unlink()
    (victim / "config.json").symlink_to(outside / "secret.json")
    assert found.runs() == ["runs/going"]


@LINKS
def test_the_folders_of_baselines_are_not_linked_either(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "outside" / "secret")
    place = folder / "runs" / "linked"
    write_run(place)
    for file in (place / "baselines" / "no-privacy").iterdir():
        file.unlink()
    (place / "baselines" / "no-privacy").rmdir()
    (place / "baselines").rmdir()
    (place / "baselines").symlink_to(tmp_path / "outside")
    assert folders.subfolders(place / "baselines") == []


@LINKS
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        read_bytes(tmp_path / "metrics.jsonl")


def test_large_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(folders.LARGEST_FILE + 1)
    with pytest.raises(DataError, match="files of up to 67,108,864 are read"):
        read_bytes(tmp_path / "large")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../outside", "runs/../runs/done", "/etc", "runs/done/", "runs//done", "runs\\done", "runs/done\0"],
)
def test_only_names_that_were_found_are_taken(folder: Path, name: str) -> None:
    found = Folder.at(folder)
    with pytest.raises(DataError, match="nothing of that name"):
        found.path(name, found.runs())


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"a": ' + "9" * 5_000 + "}"])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError):
        read_object(tmp_path / "x.json")


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(DataError, match="no folder"):
            Folder.at(tmp_path / name)
