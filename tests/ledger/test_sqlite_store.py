"""The file under hostile conditions: full disks, read-only files, locks, foreign and tampered databases."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerChainError, LedgerError, LedgerFormatError
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.protocol import Protocol

from .damage import execute, tamper, unread

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0)
EVENT = RoundEvent(PROTOCOL, survivors=900)


@pytest.fixture
def spent(ledger: Ledger) -> Ledger:
    """With three rounds on record, the last of them not released."""
    for _ in range(2):
        ledger.release(ledger.reserve("people", EVENT), 950)
    ledger.reserve("people", EVENT)
    return ledger


# ------------------------------------------------------------------ what is on the disk


def test_the_file_is_one_file_in_the_promised_mode(spent: Ledger) -> None:
    assert [path.name for path in spent.path.parent.iterdir()] == ["budgets.ledger"]
    with closing(sqlite3.connect(spent.path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    with spent._replica.store.writing() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA


def test_a_second_name_is_refused(spent: Ledger, tmp_path: Path) -> None:
    """SQLite's journal lies beside one name; by the other, what a killed writer left would be taken for the whole."""
    before, link = spent.verify(), tmp_path / "other" / "name.ledger"
    link.parent.mkdir()
    os.link(spent.path, link)
    for ask in (
        lambda: Ledger(link),
        lambda: Ledger(spent.path),
        lambda: spent.total("people"),
        lambda: spent.reserve("people", EVENT),
        lambda: spent.create(Budget(population="others", epsilon=1.0, delta=1e-6)),
        spent.verify,
        spent.repair,
    ):
        with pytest.raises(LedgerAccessError, match=r"2 names.*Remove the other links"):
            ask()
    link.unlink()
    assert spent.verify() == before
    # A symbolic link is no second name: SQLite follows it.
    link.symlink_to(spent.path)
    Ledger(link).reserve("people", EVENT)
    assert spent.verify().records == before.records + 1


def test_a_mount_of_the_file_itself_is_refused(spent: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's volume of one file is. On the same disk only the list of mounts tells."""
    real = Path.read_bytes
    spaced = tmp_path / "a name.ledger"
    os.rename(spent.path, spaced)

    def mounts(path: Path) -> bytes:
        if str(path) != "/proc/self/mountinfo":
            return real(path)
        point = os.fsencode(spaced.resolve()).replace(b" ", b"\\040")
        return b"22 1 8:1 / / rw - ext4 /dev/a rw\n31 22 8:1 /data/x " + point + b" rw - ext4 /dev/a rw\n"

    assert len(Ledger(spaced).budgets()) == 1
    monkeypatch.setattr(Path, "read_bytes", mounts)
    with pytest.raises(LedgerAccessError, match="mount the folder"):
        Ledger(spaced)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_real_mount_of_the_file_is_refused(spent: Ledger, tmp_path: Path) -> None:
    point = tmp_path / "mounted.ledger"
    point.touch()
    if subprocess.run(["mount", "--bind", str(spent.path), str(point)], capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        with pytest.raises(LedgerAccessError, match="mount of a single file"):
            Ledger(point)
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_names_that_a_uri_would_misread(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a?mode=memory&#% é.ledger")
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    assert ledger.path.stat().st_size > 0
    assert len(Ledger(ledger.path).budgets()) == 1


# ------------------------------------------------------------------ tampering


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET body = '{}' WHERE number = 2",
        "DELETE FROM records WHERE number = 6",
        "INSERT INTO records VALUES (9, '{}', '')",
        "INSERT OR REPLACE INTO records VALUES (2, '{}', '')",
        "REPLACE INTO records VALUES (6, '{}', '')",
    ],
)
def test_accidents_with_a_database_tool_are_refused(spent: Ledger, statement: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="records of a ledger"):
        execute(spent.path, statement)
    assert spent.verify().records == 7


@pytest.mark.parametrize(
    "statement",
    [
        """UPDATE records SET body = replace(body, '"survivors":900', '"survivors":990') WHERE number = 2""",
        """UPDATE records SET body = replace(body, '"epsilon":1.0', '"epsilon":9.0') WHERE number = 1""",
        "UPDATE records SET hash = upper(hash) WHERE number = 6",
        "DELETE FROM records WHERE number = 3",
        "DELETE FROM records WHERE number < 2",
        "UPDATE records SET number = number + 1 WHERE number = 6",
        "INSERT INTO records SELECT 7, body, hash FROM records WHERE number = 6",
        "UPDATE records SET body = CAST(body AS BLOB) WHERE number = 4",
        "UPDATE records SET body = CAST(x'ff7b7d' AS TEXT) WHERE number = 4",
        "UPDATE records SET body = printf('%.*c', 300000, 'x') WHERE number = 4",
    ],
)
def test_edits_are_found_by_everybody_who_opens_the_file(spent: Ledger, statement: str) -> None:
    tamper(spent.path, statement)
    with pytest.raises(LedgerFormatError):
        Ledger(spent.path)
    with pytest.raises(LedgerError):
        spent.verify()


def test_a_cut_end_is_found_with_a_head(spent: Ledger) -> None:
    head = str(spent.head)
    tamper(spent.path, "DELETE FROM records WHERE number = 6")
    with pytest.raises(LedgerChainError, match="The end of the ledger is missing"):
        Ledger(spent.path)  # by somebody who did not know where the head is noted
    tamper(
        spent.path,
        *(f"DROP TABLE {table}" for table in ("entries", "buckets", "snapshot", "head")),
        "PRAGMA user_version = 1",  # as 0.1.0 had it
    )
    fresh = Ledger(spent.path)
    assert fresh.verify().records == 6  # nothing in the file itself tells
    with pytest.raises(LedgerChainError, match="cut off"):
        fresh.verify(head)


# ------------------------------------------------------------------ files that are no ledgers


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello, this is no database at all, only some text" * 30, "not a database"),
        (b"SQLite format 3\x00" + bytes(200), "not a ledger|damaged"),
        (os.urandom(5_000), "not a ledger|damaged"),
    ],
    ids=["text", "header", "random"],
)
def test_other_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(LedgerFormatError, match=words):
        Ledger(path)
    assert path.read_bytes() == content


def test_other_databases(spent: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    execute(path, "CREATE TABLE t (x)")
    with pytest.raises(LedgerFormatError, match="not a ledger"):
        Ledger(path)
    for number, statements in enumerate(
        [
            ["PRAGMA application_id = 5"],
            ["PRAGMA user_version = 0"],
            ["DROP TRIGGER records_stay"],
            ["CREATE TABLE more (x)"],
            ["CREATE TRIGGER quiet AFTER INSERT ON records BEGIN SELECT 1; END"],
            ["ALTER TABLE records RENAME TO old", "CREATE VIEW records AS SELECT * FROM old"],
            ["CREATE INDEX some ON records (hash)"],
        ]
    ):
        copy = tmp_path / f"{number}.ledger"
        shutil.copy(spent.path, copy)
        execute(copy, *statements)
        with pytest.raises(LedgerFormatError, match=r"not a ledger|not as a ledger"):
            Ledger(copy)
        with pytest.raises(LedgerFormatError):
            Ledger.create(unread(copy), Budget(population="more", epsilon=1.0, delta=1e-6))


def test_a_newer_release_is_told(spent: Ledger) -> None:
    execute(spent.path, "PRAGMA user_version = 4")
    with pytest.raises(LedgerFormatError, match=r"newer release.*Upgrade"):
        Ledger(spent.path)
    with pytest.raises(LedgerFormatError, match="newer release"):
        spent.reserve("people", EVENT)


# Anywhere, or in the header of a page, where the records on it are counted.
PLACES = st.integers(0, 2**16) | st.builds(
    lambda page, place: 4096 * page + place, st.integers(0, 8), st.integers(0, 7)
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=20),
    cut=st.none() | st.integers(0, 2**15),
)
@example(damage=[(3595, 128)], cut=None)  # a schema that is not text
def test_damaged_files_raise_errors_of_our_own(spent: Ledger, damage: list[tuple[int, int]], cut: int | None) -> None:
    content = bytearray(spent.path.read_bytes())
    for place, value in damage:
        content[place % len(content)] = value
    check_damaged(spent, bytes(content[:cut]))


def test_damage_does_not_make_records_vanish(spent: Ledger) -> None:
    content = spent.path.read_bytes()
    for page in range(1, len(content) // 4096):
        for count in range(1, 10):
            # The number of cells on a page of the table's tree.
            changed = bytearray(content)
            changed[4096 * page + 4] = count
            check_damaged(spent, bytes(changed))


def check_damaged(ledger: Ledger, content: bytes) -> None:
    """Either the damage is found or it is none: all rounds are there."""
    path = ledger.path.with_name("damaged.ledger")
    path.write_bytes(content)
    try:
        rounds = Ledger(path).total("people").rounds
    except LedgerError:
        return
    finally:
        path.unlink()
    assert rounds == 3


# ------------------------------------------------------------------ locks


def test_a_locked_file_is_waited_for_and_then_reported(spent: Ledger) -> None:
    patient, hasty = Ledger(spent.path), Ledger(spent.path, timeout=0.05)
    with closing(sqlite3.connect(spent.path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerBusyError, match=r"0\.05 s"):
            hasty.reserve("people", EVENT)
        with pytest.raises(LedgerBusyError):
            hasty.total("people")
        with pytest.raises(LedgerBusyError):
            Ledger(spent.path, timeout=0.0)
        connection.execute("ROLLBACK")
    assert patient.total("people").rounds == 3
    with closing(sqlite3.connect(spent.path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerBusyError):
            hasty.reserve("people", EVENT)
        assert hasty.total("people").rounds == 3  # reading goes on beside a writer
        connection.execute("ROLLBACK")
    hasty.reserve("people", EVENT)


def test_a_second_writer_waits_before_it_reads_what_is_left(spent: Ledger) -> None:
    hasty = Ledger(spent.path, timeout=0.0)
    with spent._replica.store.writing(), pytest.raises(LedgerBusyError), hasty._replica.store.writing():
        pytest.fail("two writers may see the same rest of a budget")


# ------------------------------------------------------------------ disks and permissions, for real

PREAMBLE = """
import os, resource, sys
import scipy.optimize, scipy.special, scipy.stats  # who has no permission may not be able to read the library
from cpsgd.errors import *
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.protocol import Protocol

event = RoundEvent(Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0), survivors=900)
path = sys.argv[1]

def spend():
    released = 0
    while True:
        ledger = Ledger(path)
        ledger.release(ledger.reserve("people", event), 900)
        released += 1
        print(released, flush=True)
"""


def run(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_file_that_may_not_grow(ledger: Ledger) -> None:
    """A limit on the file's size: writes fail in the middle of a transaction, as on a full disk."""
    script = """
        size = os.path.getsize(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, size + 10_000))
        try:
            spend()
        except LedgerStorageError as error:
            print(error)
    """
    result = run(script, ledger.path)
    assert result.returncode == 0, result.stderr
    *released, message = result.stdout.splitlines()
    assert "Nothing may be released" in message
    # Whatever was released is on record; the one that failed may be, as reserved.
    fresh = Ledger(ledger.path)
    fresh.verify()
    entries = fresh.events("people")
    assert len(released) >= 2
    assert sum(entry.released for entry in entries) == len(released)
    assert len(entries) - len(released) <= 1
    # With room again it goes on.
    fresh.release(fresh.reserve("people", EVENT), 900)


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 64 kB in memory, mounted in a name space of its own."""
    script = """
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", os.path.dirname(path)], check=True)
        Ledger(path).create(Budget(population="people", epsilon=1.0, delta=1e-6))
        try:
            spend()
        except LedgerStorageError as error:
            print(error)
        entries = Ledger(path).events("people")
        print(Ledger(path).verify().records, len(entries), sum(entry.released for entry in entries))
    """
    unshare = shutil.which("unshare")
    prefix = (unshare or "", "--map-root-user", "--mount")
    if unshare is None or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs user name spaces; the file that may not grow is tested in any case")
    result = run(script, tmp_path / "budgets.ledger", prefix=prefix)
    assert result.returncode == 0, result.stderr
    *released, message, summary = result.stdout.splitlines()
    assert "disk is full" in message
    records, entries, marked = map(int, summary.split())
    assert len(released) >= 2
    assert marked == len(released)
    assert entries - marked <= 1
    assert records == 2 + entries + marked


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that an unprivileged user can reach, since root may write to whatever is read-only."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder", "secret"])
def test_without_permission(public_folder: Path, what: str) -> None:
    path = public_folder / "budgets.ledger"
    ledger = Ledger(path)
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    before = path.read_bytes()
    path.chmod({"file": 0o444, "folder": 0o666, "secret": 0o000}[what])
    if what == "folder":
        public_folder.chmod(0o555)
    script = """
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            ledger = Ledger(path)
            print(ledger.total("people").rounds, ledger.verify().records)
            ledger.reserve("people", event)
        except LedgerAccessError as error:
            print(error)
    """
    result = run(script, path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if what != "secret":
        assert lines.pop(0) == "0 2"  # reading is allowed
    assert "must be writable" in lines[0]
    path.chmod(0o644)
    assert path.read_bytes() == before


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(LedgerAccessError):
        Ledger(tmp_path).create(Budget(population="people", epsilon=1.0, delta=1e-6))


def test_text_that_is_none(spent: Ledger) -> None:
    # SQLite's message quotes the damaged schema, and is then no text itself.
    whole = spent.path.read_bytes()
    spent.path.write_bytes(whole.replace(b"triggerrecords_", b"trigger\xffecords_", 1))
    assert spent.path.read_bytes() != whole
    with pytest.raises(LedgerFormatError, match="not text"):
        Ledger(spent.path)
