"""`cpsgd._record_log`: records stay as they were written, torn tails are mended, and one writes at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest

from cpsgd._record_log import End, RecordLog
from cpsgd.errors import DamagedFileError, ParameterError

DOMAIN = b"cpsgd test 1\n"


@pytest.fixture
def log(tmp_path: Path) -> RecordLog:
    return RecordLog(tmp_path / "log", DOMAIN)


def read(log: RecordLog) -> list[str]:
    with log.opened() as records:
        return records.records()


def write(log: RecordLog, *texts: str) -> End:
    with log.opened() as records:
        return records.append(*texts)


def test_records_come_back_in_order(log: RecordLog) -> None:
    assert read(log) == []
    end = write(log, "one 1 a", "two #2")
    assert read(log) == ["one 1 a", "two #2"]
    assert end.records == 2
    assert end.size == log.path.stat().st_size
    first = hashlib.sha256(DOMAIN + bytes(32) + b"one 1 a")
    assert log.path.read_text().startswith(f"one 1 a #{first.hexdigest()}\n")
    assert end.hash == hashlib.sha256(DOMAIN + first.digest() + b"two #2").hexdigest()
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_only_what_is_new_is_read(log: RecordLog) -> None:
    end = write(log, "one", "two")
    with log.opened() as records:
        assert records.records(after=end) == []
        last = records.append("three")
        assert records.records(after=end) == ["three"]
        assert records.end == last
    whole = log.path.read_bytes()[: end.size]
    for mended in (whole[:-1], whole[:-1] + b"x"):
        log.path.write_bytes(mended)
        with log.opened(reading=True) as records:
            assert records.records(after=end) == []
        with log.opened() as records:
            assert records.records(after=end) == []
        assert log.path.read_bytes() == mended
        write(log, "three")
        assert log.path.read_bytes().startswith(whole)
        assert read(log) == ["one", "two", "three"]
    log.path.write_bytes(whole[:-2])
    with log.opened() as records, pytest.raises(DamagedFileError, match="records are gone"):
        records.records(after=end)
    log.path.unlink()
    write(log, "uno", "dos")
    with log.opened() as records, pytest.raises(DamagedFileError, match="records are gone"):
        records.records(after=end)


@pytest.mark.parametrize("text", ["", "two\nlines", "a\ttab", "ε", "\x00"])
def test_a_record_is_one_line_of_text(log: RecordLog, text: str) -> None:
    with pytest.raises(ParameterError, match="printable ASCII"):
        write(log, "good", text)
    assert read(log) == []


def test_every_changed_bit_is_noticed_or_changes_nothing(log: RecordLog) -> None:
    texts = ["first 1 J*", "second", "third #3"]
    write(log, *texts)
    whole = log.path.read_bytes()
    mended = 0
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        log.path.write_bytes(changed)
        try:
            assert read(log) == texts  # the newline at the end, which is put back
            mended += 1
            write(log, "fourth")
            assert log.path.read_bytes().startswith(whole)
            assert read(log) == [*texts, "fourth"]
        except DamagedFileError:
            pass
    assert mended == 8


@pytest.mark.parametrize("change", [(1, 0), (0,), (0, 0, 1), (1,)])
def test_records_that_are_moved_missing_or_repeated_are_noticed(log: RecordLog, change: tuple[int, ...]) -> None:
    write(log, "one", "two")
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[place] for place in change))
    if change == (0,):
        assert read(log) == ["one"]  # a log that is cut at a record's end needs an End kept elsewhere
        return
    with pytest.raises(DamagedFileError, match="does not follow"):
        read(log)


def test_records_of_another_kind_of_journal_are_refused(log: RecordLog) -> None:
    write(log, "one")
    with pytest.raises(DamagedFileError):
        read(RecordLog(log.path, b"cpsgd other 1\n"))


def test_a_torn_tail_is_cut_off_wherever_it_is_torn(log: RecordLog) -> None:
    end = write(log, "one", "two")
    write(log, "three")
    whole = log.path.read_bytes()
    for size in range(end.size, len(whole)):
        log.path.write_bytes(whole[:size])
        # All but the newline is there in the end, and then the record is kept.
        kept = ["three"] if size == len(whole) - 1 else []
        assert read(log) == ["one", "two", *kept]
        write(log, "four")
        assert read(log) == ["one", "two", *kept, "four"]
    log.path.write_bytes(whole + bytes(100))
    assert read(log) == ["one", "two", "three"]


FIRST = b'{"format":0,"id":"00"} #' + b"0" * 64 + b"\n"


@pytest.mark.parametrize(("first", "ours"), [(b"", b""), (FIRST, FIRST.replace(b"00", b"7e"))])
def test_a_file_without_a_whole_line_stays_unless_it_begins_as_ours_do(
    tmp_path: Path, first: bytes, ours: bytes
) -> None:
    """One that was named by mistake, a key say, was taken for a first record that a crash had cut, and emptied."""
    log = RecordLog(tmp_path / "file", DOMAIN, first=first)
    for content in (b"secret", bytes(9), b'{"format":1,"id":"7"}', b'{"format":1,"id":"7f",', FIRST[:-1] + b"00"):
        log.path.write_bytes(content)
        for work in (read, lambda log: write(log, "one")):
            with pytest.raises(DamagedFileError, match="another file"):
                work(log)
            assert log.path.read_bytes() == content
    for size in range(len(ours)):
        log.path.write_bytes(ours[:size])
        assert read(log) == []
        assert log.path.read_bytes() == ours[:size]
        write(log, "one")
        assert read(log) == ["one"]


def test_lines_of_earlier_releases_are_kept_and_then_protected(log: RecordLog) -> None:
    log.path.write_bytes(b"run 1 ab\nrun 2 cd\nrun 3 e")
    assert read(log) == ["run 1 ab", "run 2 cd"]
    write(log, "run 3 ef")
    assert read(log) == ["run 1 ab", "run 2 cd", "run 3 ef"]
    whole = log.path.read_bytes()
    for damaged in (whole.replace(b"run 1", b"run 7"), whole[9:], whole + b"run 4 00\n"):
        log.path.write_bytes(damaged)
        with pytest.raises(DamagedFileError):
            read(log)


def test_a_full_disk_leaves_the_journal_as_it_was(log: RecordLog, monkeypatch: pytest.MonkeyPatch) -> None:
    write(log, "one")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write(log, "two")
    assert read(log) == ["one"]
    write(log, "two")
    assert read(log) == ["one", "two"]


def test_others_wait_by_whichever_name(log: RecordLog, tmp_path: Path) -> None:
    write(log, "one")
    (tmp_path / "link").hardlink_to(log.path)
    other = RecordLog(tmp_path / "link", DOMAIN, timeout=0.02)
    with log.opened(), pytest.raises(TimeoutError), other.opened():
        pass
    write(other, "two")
    assert read(log) == ["one", "two"]


def _count_up(path: Path, times: int) -> None:
    log = RecordLog(path, DOMAIN)
    for _ in range(times):
        with log.opened() as records:
            records.append(str(len(records.records())))


def test_processes_lose_nothing_of_each_other(log: RecordLog) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count_up, args=(log.path, 20)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert read(log) == [str(number) for number in range(60)]
