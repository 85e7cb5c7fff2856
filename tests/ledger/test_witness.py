"""Witnesses: a ledger that went back in time, or was written anew, is found out by what was seen of it elsewhere."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from cpsgd._durable import append
from cpsgd.errors import (
    EntryError,
    LedgerAccessError,
    LedgerBusyError,
    LedgerChainError,
    LedgerStorageError,
    ParameterError,
    PopulationError,
    WitnessError,
)
from cpsgd.ledger import Budget, Entry, Ledger, Line, RoundEvent, Witness, replica
from cpsgd.ledger import witness as witness_module
from cpsgd.ledger.chain import Head
from cpsgd.protocol import Protocol

from .damage import KEY, OTHER_PUBLIC, PUBLIC, index_of

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=10.0)
EVENT = RoundEvent(PROTOCOL, survivors=900)
HEAD = Head(7, "ab" * 32)


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere" / "heads.txt"


@pytest.fixture
def watched(tmp_path: Path, witness: Path) -> Ledger:
    """With a round, and a witness from the beginning."""
    ledger = Ledger(tmp_path / "budgets.ledger", witness=witness)
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    ledger.release(ledger.reserve("people", EVENT), 950)
    return ledger


def test_every_head_is_with_the_witness_when_a_call_returns(watched: Ledger, witness: Path) -> None:
    assert [line.head.number for line in Witness(witness).lines()] == [1, 2, 3]
    assert len(witness.read_text().splitlines()) == 3
    assert Witness(witness).newest() == watched.head
    watched.abandon(watched.reserve("people", EVENT), "nobody was asked")
    assert Witness(witness).newest() == watched.head
    assert Ledger(watched.path).verify(witness=witness).records == 6
    assert Ledger(watched.path, witness=witness).verify().records == 6


def test_an_older_copy_is_refused(watched: Ledger, witness: Path) -> None:
    old = watched.path.read_bytes()
    watched.reserve("people", EVENT)
    watched.path.write_bytes(old)
    index_of(watched.path).unlink()
    Ledger(watched.path)  # nothing in the file itself tells
    with pytest.raises(WitnessError, match="has seen"):
        Ledger(watched.path, witness=witness)
    with pytest.raises(WitnessError, match="has seen"):
        Ledger(watched.path).verify(witness=witness)
    watched.path.unlink()
    with pytest.raises(WitnessError, match="no ledger"):
        Ledger(watched.path, witness=witness)


def test_a_chain_that_was_written_anew_is_refused(watched: Ledger, witness: Path, tmp_path: Path) -> None:
    forged = Ledger(tmp_path / "forged.ledger")
    forged.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    for _ in range(3):
        forged.reserve("people", EVENT)
    os.replace(forged.path, watched.path)
    with pytest.raises(WitnessError):
        Ledger(watched.path, witness=witness)
    with pytest.raises(LedgerChainError):
        watched.total("people")


def test_a_witness_behind_the_ledger_is_no_alarm(watched: Ledger, witness: Path) -> None:
    """A process that dies between the two, or one that does not know of the witness."""
    Ledger(watched.path).reserve("people", EVENT)
    again = Ledger(watched.path, witness=witness)
    again.reserve("people", EVENT)
    assert Witness(witness).newest() == again.head
    assert again.verify().records == 6


def test_the_newest_head_is_found_whatever_the_order(watched: Ledger, witness: Path) -> None:
    lines = witness.read_text().splitlines()
    witness.write_text("\n".join([lines[2], lines[0], lines[1]]) + "\n")
    assert Witness(witness).newest() == watched.head


@pytest.mark.parametrize("rest", ["cpsgd-witness 1 4 abcd", "x", "\0\0\0", "\n\0", "cpsgd-witness 1 9 " + "0" * 63])
def test_half_a_line_after_a_crash(watched: Ledger, witness: Path, rest: str) -> None:
    with witness.open("a") as file:
        file.write(rest)
    again = Ledger(watched.path, witness=witness)
    again.reserve("people", EVENT)
    assert Witness(witness).newest() == again.head
    assert again.verify().records == 5
    for torn in ("", "x"):
        witness.write_text(torn)
        Witness(witness).append(Line(HEAD, "now"))
        assert witness.read_text() == (torn and "x\n") + f"{Line(HEAD, 'now')}\n"


def test_files_that_are_no_witness(watched: Ledger, tmp_path: Path) -> None:
    with pytest.raises(LedgerAccessError, match="cpsgd budget witness"):
        Ledger(watched.path, witness=tmp_path / "none.txt")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(WitnessError, match="no witness"):
        Ledger(watched.path, witness=tmp_path / "text")


def test_a_witness_that_cannot_be_written_stops_the_round(watched: Ledger, witness: Path) -> None:
    witness.unlink()
    witness.mkdir()
    with pytest.raises(LedgerAccessError, match="Nothing was recorded"):
        watched.reserve("people", EVENT)
    assert Ledger(watched.path).total("people").rounds == 1


# ---------------------------------------------------------------------- forks


def test_of_two_copies_only_one_goes_on(watched: Ledger, witness: Path, tmp_path: Path) -> None:
    """Both are open, and each by itself is whole: only the witness can tell."""
    copy = tmp_path / "copy.ledger"
    shutil.copy(watched.path, copy)
    forked = Ledger(copy, witness=witness)
    entry = watched.reserve("people", EVENT)
    for call in (
        lambda: forked.reserve("people", EVENT),
        lambda: forked.release(2, 950),
        lambda: forked.create(Budget(population="others", epsilon=1.0, delta=1e-6)),
        forked.repair,
    ):
        with pytest.raises(WitnessError, match="two copies went on apart"):
            call()
    assert Ledger(copy).verify().records == 4
    watched.release(entry, 950)
    assert watched.verify().records == 6


@pytest.mark.parametrize("records", [1, 2])
def test_a_witness_that_began_after_a_ledger_was_opened_counts(tmp_path: Path, witness: Path, records: int) -> None:
    """Two copies are open, and neither has seen the witness that the other one begins."""
    path, copy = tmp_path / "budgets.ledger", tmp_path / "copy.ledger"
    Ledger(path).create(Budget(population="people", epsilon=1.0, delta=1e-6))
    for each in (path, copy):
        each.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:records]))
        index_of(each).unlink(missing_ok=True)
    first, second = Ledger(path), Ledger(copy)
    first._replica.witness = second._replica.witness = Witness(witness)
    first.create(Budget(population="young", epsilon=1.0, delta=1e-6))
    with pytest.raises(WitnessError, match="two copies went on apart"):
        second.create(Budget(population="old", epsilon=1.0, delta=1e-6))
    assert Ledger(copy).verify().records == records
    with pytest.raises(WitnessError, match="has seen"):
        Ledger(copy, witness=witness)
    witness.unlink()
    with pytest.raises(LedgerAccessError, match="cpsgd budget witness"):
        first.create(Budget(population="old", epsilon=1.0, delta=1e-6))


def test_a_call_that_writes_nothing_is_no_line(watched: Ledger, witness: Path) -> None:
    before = witness.read_bytes()
    watched.repair()
    watched.verify()
    Ledger(watched.path, witness=witness).repair()
    assert witness.read_bytes() == before
    assert witness.stat().st_mode & 0o133 == 0


def test_of_a_long_witness_the_last_lines_are_read(tmp_path: Path) -> None:
    long = Witness(tmp_path / "long.txt")
    long.path.write_text("".join(f"{Line(Head(number, 'ab' * 32), 'now')}\n" for number in range(1_000)))
    last = long.lines(last=True)
    assert 180 < len(last) < 190  # 16 KiB
    assert len(long.lines()) == 1_000
    assert last[-1].head == long.newest() == Head(999, "ab" * 32)


def test_a_fork_that_the_witness_has_seen_stops_everybody(watched: Ledger, witness: Path, tmp_path: Path) -> None:
    """Heads of both copies are there, and the newest is the copy's: 0.2.0 went on with it."""
    copy = tmp_path / "copy.ledger"
    shutil.copy(watched.path, copy)
    forked = Ledger(copy)
    watched.reserve("people", EVENT)
    for _ in range(2):
        # Another event: two records of the same second and content would be the same record, and no fork.
        forked.reserve("people", replace(EVENT, survivors=901))
        Witness(witness).append(forked.seen())
    for path in (watched.path, copy):
        with pytest.raises(WitnessError):
            Ledger(path, witness=witness)
    with pytest.raises(WitnessError):
        watched.reserve("people", EVENT)


def test_a_witness_that_another_process_holds(watched: Ledger, witness: Path) -> None:
    hasty = Ledger(watched.path, witness=witness, timeout=0.05)
    with Witness(witness).held(1.0), pytest.raises(LedgerBusyError, match="has held it"):
        hasty.reserve("people", EVENT)
    assert hasty.total("people").rounds == 1


# ---------------------------------------------------------------------- a full disk


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Fills the disk of the witness, or makes room."""

    def fails(file: IO[bytes], data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda on: monkeypatch.setattr(witness_module, "append", fails if on else append)


NAMED = RoundEvent(PROTOCOL, survivors=900, run="run", round=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.reserve("people", EVENT),
        lambda ledger: ledger.reserve("people", NAMED),
        lambda ledger: ledger.release(4, 950),
        lambda ledger: ledger.abandon(4, "nobody was asked"),
        lambda ledger: ledger.create(Budget(population="others", epsilon=1.0, delta=1e-6)),
    ],
    ids=["reserve", "reserve a run's round", "release", "abandon", "create"],
)
@pytest.mark.parametrize("between", [False, True])
def test_a_call_that_failed_half_way_can_be_repeated(
    watched: Ledger,
    witness: Path,
    full: Callable[[bool], None],
    call: Callable[[Ledger], Entry | Budget],
    between: bool,
) -> None:
    watched.reserve("people", EVENT)
    full(True)
    for _ in range(3):
        with pytest.raises(LedgerStorageError, match="repeat the same call"):
            call(watched)
    assert watched.head.number == 5
    full(False)
    if between and watched.find("people", run="run", round=3) is None:
        # Something else comes first.
        watched.reserve("people", RoundEvent(PROTOCOL, survivors=901))
    result = call(watched)
    assert watched.verify().head == Witness(witness).newest() == watched.head
    if isinstance(result, Entry):
        number = 5 if result.closed_as is None else result.closed_as
        assert (number, result) == (5, watched.events("people")[1 if result.number == 4 else 2])
    else:
        assert result in watched.budgets()


def test_a_release_that_was_reported_is_not_repeated(
    watched: Ledger, witness: Path, full: Callable[[bool], None]
) -> None:
    entry = watched.reserve("people", EVENT)
    full(True)
    with pytest.raises(LedgerStorageError):
        watched.release(entry, 950)
    full(False)
    with pytest.raises(EntryError, match="released before"):
        watched.release(entry, 951)  # another result
    assert watched.release(entry, 950).released_as == 5
    with pytest.raises(EntryError, match="released before"):
        watched.release(entry, 950)


def test_commands_that_failed_half_way_can_be_repeated(
    tmp_path: Path, witness: Path, full: Callable[[bool], None]
) -> None:
    """By another process, which knows only what the witness has not seen."""
    path, budget = tmp_path / "new.ledger", Budget(population="people", epsilon=1.0, delta=1e-6)
    full(True)
    ledger = Ledger(path, witness=witness)
    with pytest.raises(LedgerStorageError):
        ledger.create(budget)
    assert not witness.exists()
    full(False)
    assert ledger.create(budget) == budget
    other = replace(budget, population="others")
    full(True)
    with pytest.raises(LedgerStorageError):
        Ledger(path, witness=witness).create(other)
    full(False)
    assert Ledger(path, witness=witness).create(other) == other
    with pytest.raises(PopulationError):
        Ledger(path, witness=witness).create(other)
    entry = Ledger(path, witness=witness).reserve("people", EVENT)
    full(True)
    with pytest.raises(LedgerStorageError):
        Ledger(path, witness=witness).abandon(entry, "nobody was asked")
    full(False)
    another = Ledger(path, witness=witness)
    full(True)
    with pytest.raises(LedgerStorageError):
        another.abandon(entry, "nobody was asked")
    full(False)
    assert another.abandon(entry, "nobody was asked").abandoned
    with pytest.raises(EntryError):
        Ledger(path, witness=witness).abandon(entry, "nobody was asked")
    assert Ledger(path, witness=witness).verify().records == 5


def test_signed_lines(watched: Ledger, tmp_path: Path) -> None:
    line = watched.seen(KEY)
    assert Line.parse(str(line)) == line
    line.check([OTHER_PUBLIC, PUBLIC])
    with pytest.raises(WitnessError, match="not signed by whom"):
        line.check([OTHER_PUBLIC])
    with pytest.raises(WitnessError, match="not signed by whom"):
        watched.seen().check([PUBLIC])
    # Neither head nor time can be changed, nor a signature be moved.
    for forged in (
        Line(HEAD, line.time, line.key, line.signature),
        Line(line.head, "2020-01-01", line.key, line.signature),
        Line(line.head, line.time, OTHER_PUBLIC, line.signature),
        Line(line.head, line.time, line.key, bytes(64)),
        Line(line.head, line.time, line.key, b"short"),
    ):
        with pytest.raises(WitnessError, match="wrong"):
            forged.check([PUBLIC, OTHER_PUBLIC])
    file = tmp_path / "signed.txt"
    Witness(file).append(line)
    assert watched.verify(witness=file, signers=[PUBLIC]).records == 4
    with pytest.raises(WitnessError):
        watched.verify(witness=file, signers=[OTHER_PUBLIC])
    Witness(file).append(watched.seen())
    with pytest.raises(WitnessError):
        watched.verify(witness=file, signers=[PUBLIC])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpsgd-witness",
        f"cpsgd-witness 2 7 {'ab' * 32} now",
        f"cpsgd-witness 1 -7 {'ab' * 32} now",
        f"cpsgd-witness 1 07 {'ab' * 32} now",
        f"cpsgd-witness 1 7 {'ab' * 31} now",
        f"cpsgd-witness 1 7 {'zz' * 32} now",
        f"cpsgd-witness 1 7 {'ab' * 32} now x",
        f"cpsgd-witness 1 7 {'ab' * 32} now é é",
        f"cpsgd-witness 1 7 {'ab' * 32} now ab!cd abcd",
        f"cpsgd-witness 1 7 {'ab' * 32} now\t",
        f"cpsgd-witness 1 {'9' * 5000} {'ab' * 32} now",
    ],
)
def test_what_is_no_line(text: str) -> None:
    with pytest.raises(ParameterError):
        Line.parse(text)


def test_killed_between_the_record_and_the_witness(
    watched: Ledger, witness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 2)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Witness, "append", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            watched.reserve("people", EVENT)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    again = Ledger(watched.path, witness=witness)
    assert again.total("people").rounds == 2
    again.reserve("people", EVENT)
    assert Ledger(watched.path, witness=witness).verify().totals[0].rounds == 3


def test_a_ledger_that_was_emptied_is_missed_by_its_witness(watched: Ledger, witness: Path) -> None:
    for empty in (lambda: watched.path.write_bytes(b""), watched.path.unlink):
        empty()
        with pytest.raises(WitnessError, match="Restore it from a copy"):
            Ledger(watched.path, witness=witness)
