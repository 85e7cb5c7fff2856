"""Ledgers of 0.1.0 and 0.2.0, which were databases: read as they are, and taken over by the first writer."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerChainError, LedgerError, LedgerFormatError
from cpsgd.ledger import Budget, Ledger, RoundEvent, sqlite_files
from cpsgd.protocol import Protocol

DATA = Path(__file__).parent.parent / "data"
EVENT = RoundEvent(
    Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1e4), survivors=900, run="taken over", round=1
)
OTHERS = Budget(population="others", epsilon=1.0, delta=1e-6)


@pytest.fixture(params=["v0_1_0", "v0_2_0"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "old").mkdir()
    return Path(shutil.copy(DATA / request.param / "budgets.ledger", tmp_path / "old"))


def execute(path: Path, *statements: str) -> None:
    """Runs statements on the file, without the triggers, which are put back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for statement in (
            *(f"DROP TRIGGER {name}" for name, _ in triggers),
            *statements,
            *(sql for _, sql in triggers),
        ):
            connection.execute(statement)


def everything(ledger: Ledger) -> dict[str, object]:
    return {key: value for key, value in ledger.export().items() if key != "format"}


def test_reading_changes_nothing(old: Path) -> None:
    before = old.read_bytes()
    ledger = Ledger(old)
    assert ledger.verify().records == len(ledger.export()["records"])
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["budgets.ledger"]


def test_the_first_writer_takes_it_over(old: Path) -> None:
    reader, writer = Ledger(old), Ledger(old)
    before = everything(reader)
    mode = old.stat().st_mode
    writer.create(OTHERS)
    assert old.read_bytes().startswith(b'{"format":1')
    assert old.stat().st_mode == mode
    assert {path.name for path in old.parent.iterdir()} == {"budgets.ledger", "budgets.ledger.index"}
    after = everything(Ledger(old))
    assert isinstance(before["records"], list)
    assert isinstance(after["records"], list)
    assert after["records"][:-1] == before["records"]
    assert after["populations"][:-1] == before["populations"]  # type: ignore[index]
    # Who had it open goes on, too, and a head from before is in it.
    assert reader.budget("others") == OTHERS
    entry = reader.reserve("others", EVENT)
    assert writer.release(entry, 950).released
    assert Ledger(old).verify(str(before["head"])).records == len(before["records"]) + 3


def test_earlier_releases_refuse_what_became_a_log(old: Path) -> None:
    """They open it as a database. One that waited for the lock has the database still, and finds its version."""
    with closing(sqlite3.connect(old, isolation_level=None, timeout=0.0)) as waiting:
        assert waiting.execute("PRAGMA user_version").fetchone()[0] < 4
        Ledger(old).create(OTHERS)
        waiting.execute("BEGIN IMMEDIATE")
        assert waiting.execute("PRAGMA user_version").fetchone() == (4,)  # "written by a newer release"
        waiting.execute("ROLLBACK")
    with closing(sqlite3.connect(old)) as connection, pytest.raises(sqlite3.DatabaseError, match="not a database"):
        connection.execute("PRAGMA user_version")


def test_a_writer_of_an_earlier_release_is_waited_for(old: Path) -> None:
    hasty = Ledger(old, timeout=0.05)
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerBusyError, match="another process"):
            hasty.create(OTHERS)
        assert hasty.budgets()  # reading goes on beside a writer
        connection.execute("ROLLBACK")
        assert sqlite_files.is_database(old)
    hasty.create(OTHERS)


def test_two_processes_take_it_over_at_once(old: Path) -> None:
    script = """
import sys
from cpsgd.ledger import Budget, Ledger
ledger = Ledger(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(5):
    ledger.create(Budget(population=f"{sys.argv[2]} {number}", epsilon=1.0, delta=1e-6))
"""
    before = Ledger(old).verify().records
    racers = [
        subprocess.Popen([sys.executable, "-c", script, old, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0
    assert Ledger(old).verify().records == before + 10


@pytest.mark.parametrize("name", ["link", "mount"])
def test_a_second_name_is_refused_until_it_is_a_log(old: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal belongs to one name; and the other would go on with a database of its own."""
    link = old.with_name("link.ledger")
    if name == "link":
        os.link(old, link)
    else:
        real = Path.read_bytes
        point = os.fsencode(old.resolve())
        mounts = b"22 1 8:1 / / rw - ext4 /dev/a rw\n31 22 8:1 /x " + point + b" rw - ext4 /dev/a rw\n"
        monkeypatch.setattr(
            Path, "read_bytes", lambda path: mounts if str(path) == "/proc/self/mountinfo" else real(path)
        )
    with pytest.raises(LedgerAccessError, match="by its only name"):
        Ledger(old)
    link.unlink(missing_ok=True)
    monkeypatch.undo()
    Ledger(old).create(OTHERS)
    os.link(old, link)
    assert Ledger(link).budget("others") == OTHERS


@pytest.mark.parametrize(
    "statement",
    [
        """UPDATE records SET body = replace(body, '"epsilon":', '"epsilon":1') WHERE number = 1""",
        "UPDATE records SET hash = upper(hash) WHERE number = 2",
        "DELETE FROM records WHERE number = 3",
        "DELETE FROM records WHERE number < 2",
        "UPDATE records SET body = CAST(x'ff7b7d' AS TEXT) WHERE number = 4",
        "UPDATE records SET body = CAST(body AS BLOB) WHERE number = 4",
        "UPDATE records SET body = body || char(10) WHERE number = 4",
        "PRAGMA application_id = 5",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = 9",
    ],
)
def test_a_database_that_was_tampered_with_is_refused_and_left_alone(old: Path, statement: str) -> None:
    ledger = Ledger(old)
    execute(old, statement)
    before = old.read_bytes()
    with pytest.raises(LedgerFormatError):
        Ledger(old)
    with pytest.raises(LedgerError):
        ledger.create(OTHERS)
    assert old.read_bytes() == before


def test_a_cut_end_of_release_2_is_noticed(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "v0_2_0" / "budgets.ledger", tmp_path))
    execute(path, "DELETE FROM records WHERE number = (SELECT max(number) FROM records)")
    with pytest.raises(LedgerChainError, match=r"end of .* is missing"):
        Ledger(path)


def test_other_databases(old: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x)")
    with pytest.raises(LedgerFormatError, match="not a ledger"):
        Ledger(other)
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE records RENAME TO old")
        connection.execute("CREATE VIEW records AS SELECT * FROM old")
    with pytest.raises(LedgerFormatError):
        Ledger(old)


@pytest.mark.parametrize("more", [0, 1 << 8, 7 << 8])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *((code, LedgerBusyError) for code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)),
        *(
            (code, LedgerAccessError)
            for code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
        ),
        *((code, OSError) for code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)),
        *((code, LedgerFormatError) for code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)),
    ],
)
def test_errors_of_the_database_are_the_ledgers_own(
    tmp_path: Path, code: int, more: int, expected: type[Exception]
) -> None:
    path = tmp_path / "database"
    sqlite3.connect(path).close()
    path.touch()
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code | more
    with pytest.raises(expected), sqlite_files._opened(path, 1.0):
        raise error


def test_its_mode_and_its_odd_folder_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a folder\twith\nall that a list of mounts writes as numbers\\"
    folder.mkdir()
    old = Path(shutil.copy(DATA / "v0_2_0" / "budgets.ledger", folder))
    old.chmod(0o640)
    Ledger(old).create(OTHERS)
    assert old.read_bytes().startswith(b'{"format":1')
    assert os.name == "nt" or old.stat().st_mode & 0o777 == 0o640
    assert Ledger(old).budget("others") == OTHERS


def test_a_longer_text_than_any_record_is_not_read(tmp_path: Path) -> None:
    old = Path(shutil.copy(DATA / "v0_2_0" / "budgets.ledger", tmp_path))
    execute(old, f"UPDATE records SET body = '{'x' * 300_000}' WHERE number = 1")
    with pytest.raises(LedgerFormatError, match="too big"):
        Ledger(old)


def test_where_there_is_no_list_of_mounts_a_file_of_its_folders_device_is_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Path) -> bytes:
        raise FileNotFoundError(self)

    path = Path(shutil.copy(DATA / "v0_2_0" / "budgets.ledger", tmp_path))
    found, other = path.stat(), SimpleNamespace(st_dev=path.stat().st_dev + 1)
    monkeypatch.setattr(Path, "read_bytes", missing)
    assert not sqlite_files._is_mounted(path, found)
    assert os.name == "nt" or sqlite_files._is_mounted(path, cast(os.stat_result, other))
