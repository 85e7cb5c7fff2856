"""The file under hostile conditions: several names, torn and full disks, read-only files, locks, foreign files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsgd._record_log import RecordLog
from cpsgd.errors import (
    LedgerAccessError,
    LedgerBusyError,
    LedgerChainError,
    LedgerError,
    LedgerFormatError,
    WitnessError,
)
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.ledger import replica as replicas
from cpsgd.ledger.chain import DOMAIN
from cpsgd.protocol import Protocol

from .damage import chained, cut, edit, index_of, unread

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0)
EVENT = RoundEvent(PROTOCOL, survivors=900)


def named(round: int) -> RoundEvent:
    return RoundEvent(PROTOCOL, survivors=900, run="r", round=round)


@pytest.fixture
def spent(ledger: Ledger) -> Ledger:
    """With three rounds on record, the last of them not released."""
    for _ in range(2):
        ledger.release(ledger.reserve("people", EVENT), 950)
    ledger.reserve("people", EVENT)
    return ledger


# ------------------------------------------------------------------ what is on the disk


def test_the_file_is_a_log_with_a_cache_beside_it(spent: Ledger) -> None:
    assert {path.name for path in spent.path.parent.iterdir()} == {"budgets.ledger", "budgets.ledger.index"}
    records = spent.export()["records"]
    assert spent.path.read_text() == "".join(f"{each['body']} #{each['hash']}\n" for each in records)
    assert index_of(spent.path).stat().st_size == 40 * len(records)
    before = spent.verify()
    index_of(spent.path).unlink()
    assert Ledger(spent.path).verify() == before


def test_records_are_on_the_disk_before_a_call_returns(spent: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if os.path.samestat(os.fstat(descriptor), spent.path.stat()):
            synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    entry = spent.reserve("people", EVENT)
    assert synced[-1] == spent.path.stat().st_size
    spent.release(entry, 950)
    assert synced[-1] == spent.path.stat().st_size


def test_appending_does_not_read_the_log_again(spent: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        spent.reserve("people", named(number))
    read, real = 0, OpenLogBytes

    def counted(self: object, place: int, count: int) -> bytes:
        nonlocal read
        data = real(self, place, count)
        read += len(data)
        return data

    monkeypatch.setattr("cpsgd._record_log.OpenLog._bytes", counted)
    spent.release(spent.reserve("people", named(100)), 950)
    assert 0 < read < spent.path.stat().st_size / 4


OpenLogBytes: Callable[[object, int, int], bytes] = vars(sys.modules["cpsgd._record_log"])["OpenLog"]._bytes


# ------------------------------------------------------------------ several names


def test_a_hard_link_is_the_same_ledger(spent: Ledger, tmp_path: Path) -> None:
    link = tmp_path / "other" / "name.ledger"
    link.parent.mkdir()
    os.link(spent.path, link)
    other = Ledger(link)
    entry = other.reserve("people", named(1))
    assert spent.find("people", run="r", round=1) == entry
    spent.release(entry, 950)
    spent.reserve("people", named(2))
    assert sorted(other.rounds("people", "r")) == [1, 2]
    assert Ledger(link).verify() == Ledger(spent.path).verify() == other.verify()
    hasty = Ledger(link, timeout=0.02)
    with spent._replica._opened(writing=True), pytest.raises(LedgerBusyError):
        hasty.reserve("people", EVENT)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_of_the_file_is_the_same_ledger(spent: Ledger, tmp_path: Path) -> None:
    point = tmp_path / "mounted.ledger"
    point.touch()
    if subprocess.run(["mount", "--bind", str(spent.path), str(point)], capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        entry = Ledger(point).reserve("people", named(1))
        assert spent.release(entry, 950) == Ledger(point).find("people", run="r", round=1)
        assert Ledger(point).verify() == spent.verify()
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("name", ["a?mode=memory&#% é.ledger", "-x", "a\nb"])
def test_odd_names(tmp_path: Path, name: str) -> None:
    ledger = Ledger(tmp_path / name)
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    assert ledger.path.stat().st_size > 0
    assert len(Ledger(ledger.path).budgets()) == 1


# ------------------------------------------------------------------ tampering


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (2, b'"survivors":900', b'"survivors":990'),
        (1, b'"epsilon":1.0', b'"epsilon":9.0'),
        (4, b"{", b"\xff{"),
        (4, b"}", b"}" + b"x" * 300_000),
        (6, b" #", b"  "),
        (3, b"\n", b""),
        (3, b"\n", b"\n\n"),
        (0, b'"format":1', b'"format":0'),
    ],
)
def test_edits_are_found_by_everybody_who_opens_the_file(spent: Ledger, line: int, old: bytes, new: bytes) -> None:
    edit(spent.path, old, new, line)
    for remove in (False, True):
        if remove:
            index_of(spent.path).unlink()
        with pytest.raises(LedgerFormatError):
            Ledger(spent.path)
        with pytest.raises(LedgerError):
            spent.verify()


def test_a_cut_end_is_found_with_the_index_or_a_head(spent: Ledger) -> None:
    head = str(spent.head)
    cut(spent.path)
    with pytest.raises(LedgerChainError, match="The end of the ledger is missing"):
        Ledger(spent.path)
    index_of(spent.path).unlink()
    fresh = Ledger(spent.path)
    assert fresh.verify().records == 6  # nothing in the file itself tells
    with pytest.raises(LedgerChainError, match="cut off"):
        fresh.verify(head)


# ------------------------------------------------------------------ files that are no ledgers


@pytest.mark.parametrize(
    "content",
    [
        b"hello, this is no ledger at all, only some text" * 30,
        b"hello\n" * 30,
        os.urandom(5_000),
        b'{"other": "json"}\n',
        b'{"format":1,"kind":"other"}\n',
        b"SQLite format 3\x00" + bytes(200),
    ],
    ids=["text", "lines", "random", "json", "no hash", "header"],
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(LedgerFormatError, match=r"not a ledger|damaged"):
        Ledger(path)
    with pytest.raises(LedgerFormatError):
        unread(path).create(Budget(population="more", epsilon=1.0, delta=1e-6))
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b'{"format":"geojson"}', b'{"format":1,"id":"7"}', b'{"format":1,"kind":'])
def test_half_a_line_that_no_ledger_begins_with_stays(tmp_path: Path, content: bytes) -> None:
    """A file of one line without its end was taken for a first record that a crash had cut, and emptied."""
    path = tmp_path / "x"
    path.write_bytes(content)
    for work in (Ledger, lambda path: unread(path).create(Budget(population="more", epsilon=1.0, delta=1e-6))):
        with pytest.raises(LedgerChainError, match="is it another file"):
            work(path)
    assert path.read_bytes() == content


def test_a_file_that_is_no_witness_stays(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"not a word about heads")
    for book in (ledger.path, tmp_path / "new.ledger"):
        with pytest.raises(WitnessError):
            Ledger(book, witness=path).create(Budget(population="more", epsilon=1.0, delta=1e-6))
    assert path.read_bytes() == b"not a word about heads"


def test_a_newer_release_is_told(spent: Ledger) -> None:
    texts = [record["body"].replace('"format":1', '"format":2') for record in spent.export()["records"]]
    spent.path.write_bytes(chained(texts))
    with pytest.raises(LedgerFormatError, match=r"newer release.*Upgrade"):
        Ledger(spent.path)
    with pytest.raises(LedgerFormatError, match="newer release"):
        spent.reserve("people", EVENT)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=20),
    cut=st.none() | st.integers(0, 2**13),
)
def test_damaged_files_raise_errors_of_our_own(spent: Ledger, damage: list[tuple[int, int]], cut: int | None) -> None:
    content = bytearray(spent.path.read_bytes())
    for place, value in damage:
        content[place % len(content)] = value
    path = spent.path.with_name("damaged.ledger")
    path.write_bytes(content[:cut])
    index_of(path).write_bytes(index_of(spent.path).read_bytes())
    with suppress(LedgerError):
        # Either the damage is found or it is none: all rounds are there.
        assert Ledger(path).total("people").rounds == 3


# ------------------------------------------------------------------ torn tails


def test_a_tail_that_is_torn_at_any_byte(spent: Ledger, tmp_path: Path) -> None:
    """A writer that was killed: its caller was told nothing, so the record is whole or gone, and the ledger goes on."""
    size, rows = spent.path.stat().st_size, index_of(spent.path).read_bytes()
    spent.reserve("people", named(7))
    whole = spent.path.read_bytes()
    for length in range(size, len(whole)):
        path = tmp_path / "torn.ledger"
        path.write_bytes(whole[:length])
        index_of(path).write_bytes(rows)
        kept = length == len(whole) - 1
        reader = Ledger(path)
        assert (reader.find("people", run="r", round=7) is not None) == kept
        assert reader.total("people").rounds == 3 + kept
        assert path.read_bytes() == whole[:length]  # reading writes nothing
        if length % 7 == 0 or kept:
            reader.create(Budget(population="others", epsilon=1.0, delta=1e-6))
            assert Ledger(path).verify().records == 8 + kept
            assert Ledger(path).total("people").rounds == 3 + kept


def test_a_first_record_that_is_torn_at_any_byte(ledger: Ledger, tmp_path: Path) -> None:
    whole = ledger.path.read_bytes()
    for length in range(0, whole.index(b"\n"), 5):
        path = tmp_path / "torn.ledger"
        path.write_bytes(whole[:length])
        torn = Ledger(path)
        with pytest.raises(LedgerAccessError, match="empty"):
            torn.total("people")
        torn.create(Budget(population="people", epsilon=1.0, delta=1e-6))
        assert Ledger(path).verify().records == 2
        index_of(path).unlink()


def killed_at(path: Path, step: int, work: Callable[[Ledger], object]) -> bool:
    """Runs `work` in a process that kills itself before a step that changes a file; whether it came to that.

    A write is two steps: half of the bytes are written before the second.
    """
    ledger = Ledger(path)
    child = os.fork()
    if child == 0:
        seen, write = 0, os.write

        def count() -> None:
            nonlocal seen
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def half(descriptor: int, data: bytes) -> int:
            count()
            written = write(descriptor, memoryview(data)[: len(data) // 2])
            count()
            return written + write(descriptor, memoryview(data)[len(data) // 2 :])

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def step_of(*arguments: object, **options: object) -> object:
                count()
                return real(*arguments, **options)

            return step_of

        os.write = half  # type: ignore[assignment]
        for name in ("fsync", "ftruncate", "replace", "open"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            work(ledger)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


OLD = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    "old", ["", pytest.param("v0_1_0", marks=pytest.mark.thorough), "v0_2_0"], ids=["with a snapshot", "0.1.0", "0.2.0"]
)
def test_killed_at_every_step_of_a_charge(tmp_path: Path, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start.ledger"
    if old:
        shutil.copy(OLD / old / "budgets.ledger", start)
    else:
        monkeypatch.setattr(replicas, "SNAPSHOT_EVERY", 6)
        ledger = Ledger(start)
        ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
        for number in range(5):
            ledger.reserve("people", named(number))
    before = Ledger(start)
    budget = next(each for each in before.budgets() if each.unit == "client" and not each.group_of and not each.expires)
    events, head = before.events(budget.population), str(before.head)
    protocol = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1e4)

    def charge(ledger: Ledger, round: int) -> None:
        event = RoundEvent(protocol, survivors=900, run="steps", round=round)
        ledger.release(ledger.reserve(budget.population, event), 950)

    step, seen, path = 1, set(), tmp_path / "budgets.ledger"
    while True:
        for file in (path, index_of(path)):
            file.unlink(missing_ok=True)
        shutil.copy(start, path)
        killed = killed_at(path, step, lambda ledger: charge(ledger, 0))
        ledger = Ledger(path)
        ledger.verify(head)
        found = ledger.events(budget.population)
        assert found[: len(events)] == events
        assert len(found) - len(events) <= 1
        seen.add((len(found) - len(events), found[-1].released and len(found) > len(events)))
        # And it goes on.
        charge(ledger, 1)
        assert len(Ledger(path).events(budget.population)) == len(found) + 1
        Ledger(path).verify(head)
        if not killed:
            assert found[-1].released
            break
        step += 1
    assert step > 6
    assert seen == {(0, False), (1, False), (1, True)}


# ------------------------------------------------------------------ locks


def test_a_locked_file_is_waited_for_and_then_reported(spent: Ledger) -> None:
    patient, hasty = Ledger(spent.path), Ledger(spent.path, timeout=0.05)
    with RecordLog(spent.path, DOMAIN).opened():
        with pytest.raises(LedgerBusyError, match=r"0\.05 s"):
            hasty.reserve("people", EVENT)
        with pytest.raises(LedgerBusyError):
            hasty.total("people")
        with pytest.raises(LedgerBusyError):
            Ledger(spent.path, timeout=0.0)
    assert patient.total("people").rounds == 3
    with RecordLog(spent.path, DOMAIN).opened(reading=True):
        with pytest.raises(LedgerBusyError):
            hasty.reserve("people", EVENT)
        assert hasty.total("people").rounds == 3  # readers do not wait for each other
    hasty.reserve("people", EVENT)


def test_a_second_writer_waits_before_it_reads_what_is_left(spent: Ledger) -> None:
    hasty = Ledger(spent.path, timeout=0.0)
    with spent._replica.appending(), pytest.raises(LedgerBusyError), hasty._replica.appending():
        pytest.fail("two writers may see the same rest of a budget")


def test_others_may_write_while_a_round_is_priced(spent: Ledger) -> None:
    hasty = Ledger(spent.path, timeout=0.0)
    with spent._replica.latest():
        hasty.reserve("people", EVENT)
    assert spent.total("people").rounds == 4


def test_a_file_that_is_replaced_while_its_lock_is_waited_for(spent: Ledger, tmp_path: Path) -> None:
    """As the first writer does with a ledger of an earlier release."""
    copy = tmp_path / "copy"
    shutil.copy(spent.path, copy)
    begin, ready = os.pipe()
    child = os.fork()  # before there is a lock: a child that inherits its file holds it, too
    if child == 0:
        try:
            os.read(begin, 1)
            Ledger(spent.path).reserve("people", named(1))
        finally:
            os._exit(0)
    with RecordLog(spent.path, DOMAIN).opened():
        os.write(ready, b"x")
        time.sleep(0.05)  # the child comes to the lock; if it does not, there is only less to find
        os.replace(copy, spent.path)
    os.waitpid(child, 0)
    assert Ledger(spent.path).find("people", run="r", round=1) is not None


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
    """A limit on the file's size: writes are short, as on a full disk."""
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
    assert "No space left" in message
    records, entries, marked = map(int, summary.split())
    assert len(released) >= 2
    assert marked == len(released)
    assert entries - marked <= 1
    assert records - (2 + entries + marked) in (0, 1)  # a snapshot


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
    if what == "folder":  # the file can be written, and only its index cannot be made anew
        assert not lines
        assert Ledger(path).verify().records == 3
        return
    assert "must be writable" in lines[0]
    path.chmod(0o644)
    assert path.read_bytes() == before


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(LedgerAccessError):
        Ledger(tmp_path).create(Budget(population="people", epsilon=1.0, delta=1e-6))
