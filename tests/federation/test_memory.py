from __future__ import annotations

import base64
import multiprocessing
import os
import resource
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cpsgd import Plan
from cpsgd.errors import RoundRefusedError, StageError
from cpsgd.federation.client_files import Answered, Memory
from cpsgd.federation.limits import open_client_files
from cpsgd.secagg import Stage

from .local import Client, opening, plain


def test_of_many_who_ask_at_once_a_memory_lets_one(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_text(f"1 1 {'ab' * 16}\n1 1 advertise\n")
    together = threading.Barrier(8)

    def ask() -> bool:
        together.wait()
        try:
            Memory(path).once("1", 1, Stage.CONFIRM)
        except StageError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(asked.result() for asked in [pool.submit(ask) for _ in range(8)]) == 1
    Memory(path).once("1", 2, Stage.CONFIRM)
    Memory(path).once("2", 1, Stage.CONFIRM)
    # Other stages are no rounds.
    assert Memory(path).rounds() == [Answered("1", 1, "ab" * 16)]


def test_a_file_of_release_0_1_0_goes_on_as_a_log(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    stages = "advertise", "share", "confirm", "unmask"
    before = "".join(f"12345678901234567890 1 {word}\n" for word in (*stages[:2], "cd" * 16, *stages[2:]))
    path.write_text(before)
    memory = Memory(path)
    assert memory.rounds() == [Answered("12345678901234567890", 1, "cd" * 16)]
    for stage in stages:
        with pytest.raises(StageError, match=f"'{stage}' of round 1 of this run already"):
            memory.once("12345678901234567890", 1, Stage(stage))
    memory.once("12345678901234567890", 2, Stage.ADVERTISE)
    assert memory.add(Answered("7", 2, "ef" * 16), lambda *before: None, "some kind") == 2
    assert path.read_text().startswith(before)
    lines = [line.split(" #")[0] for line in path.read_text().removeprefix(before).splitlines()]
    assert lines == ["12345678901234567890 2 advertise", f"#kind {'ef' * 16} c29tZSBraW5k", f"7 2 {'ef' * 16}"]
    # A kind is said once.
    assert memory.add(Answered("7", 3, "ef" * 16), lambda *before: None, "some kind") == 3
    assert path.read_text().count("#kind") == 1
    assert memory.history()[1] == {"ef" * 16: "some kind"}


def test_a_record_that_a_crash_left_unfinished_is_forgotten_and_others_are_not(tmp_path: Path) -> None:
    memory, path = Memory(tmp_path / "memory"), tmp_path / "memory"
    memory.add(Answered("7", 2, "ef" * 16), lambda *before: None, "some kind")
    whole = path.read_bytes()
    for torn in (b"7 3 confirm #12", b"7 3"):
        path.write_bytes(whole + torn)
        assert memory.rounds() == [Answered("7", 2, "ef" * 16)]
        memory.once("7", 3, Stage.CONFIRM)
        assert path.read_bytes()[: len(whole) + 13] == whole + b"7 3 confirm #"
        assert path.read_bytes().count(b"\n") == 3
    path.write_bytes(whole.replace(b"7 2", b"7 1"))
    with pytest.raises(RoundRefusedError, match="DamagedFileError"):
        memory.rounds()


@pytest.mark.parametrize(
    "content",
    [
        *(b"a key", b"7 1 advertise", b"#kind ab", bytes(9), b"import os\nprint(7)", b"\xff"),  # other files
        *(b"1 2\n", b"1 2 ab #cd\n", b"1 two ab\n", b"\xff\n", b"1 2 xy\n", b"1 2 done\n"),
        *(b"#kind ab e30=!\n", b"#peers 1 !" + base64.b64encode(bytes(40)) + b"\n", b"#peers 1 AAAA\n"),
    ],
)
def test_a_damaged_memory_refuses(small_plan: Plan, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    client = Client(settings={"cpsgd-memory": str(path)}, secure=False)
    with pytest.raises(RoundRefusedError, match="cannot read or write its memory") as caught:
        client.ask(plain(small_plan))
    assert str(tmp_path) not in str(caught.value)
    assert path.read_bytes() == content
    assert client.trained == 0


def test_a_memory_that_cannot_be_opened_refuses(small_plan: Plan, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "memory"):
        with pytest.raises(RoundRefusedError, match="memory"):
            Client(settings={"cpsgd-memory": str(path)}).ask(opening(small_plan))
    with pytest.raises(RoundRefusedError, match="not the name of a file"):
        Client(settings={"cpsgd-memory": 7}).ask(opening(small_plan))


def test_a_memory_is_the_same_file_in_every_folder(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A train function that changes the working directory must not begin an empty one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RoundRefusedError, match="not a full path"):
        Client(settings={"cpsgd-memory": "memory"}).ask(opening(small_plan))
    assert not (tmp_path / "memory").exists()


def test_a_new_memory_is_there_after_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name is on the disk when its folder is; before that, what is in the file does not help."""
    synced: list[str] = []
    kinds = {True: "folder", False: "file"}
    monkeypatch.setattr("os.fsync", lambda file: synced.append(kinds[stat.S_ISDIR(os.fstat(file).st_mode)]))
    memory = Memory(tmp_path / "memory")
    memory.once("1", 1, Stage.ADVERTISE)
    assert synced == ["folder", "file"]
    memory.once("1", 1, Stage.SHARE)
    assert synced == ["folder", "file", "file"]


def test_a_table_of_counters_that_is_none_refuses(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("#peers 1 AAAA\n")
    with pytest.raises(RoundRefusedError, match="cannot read or write its memory"):
        Memory(tmp_path / "memory").rounds()


def _answers_on_a_full_disk(path: Path, left: int) -> None:
    """In a process of its own: the disk takes so many bytes more, and then part of a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = path.stat().st_size + left
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(RoundRefusedError, match="cannot read or write its memory"):
        Memory(path).once("1", 2, Stage.CONFIRM)


@pytest.mark.parametrize("left", [0, 1, 20, 70])
def test_a_short_write_at_a_full_disk_refuses_one_round_and_not_all(tmp_path: Path, left: int) -> None:
    """The line that was cut off made the memory unreadable for ever."""
    path = tmp_path / "memory"
    Memory(path).once("1", 1, Stage.CONFIRM)
    before = path.read_bytes()
    process = multiprocessing.get_context("fork").Process(target=_answers_on_a_full_disk, args=(path, left))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    # Nothing of it is left, or what is left is mended: the stage was not answered, and may be now, once.
    Memory(path).once("1", 2, Stage.CONFIRM)
    assert path.read_bytes().startswith(before)
    for round in (1, 2):
        with pytest.raises(StageError):
            Memory(path).once("1", round, Stage.CONFIRM)


# ---------------------------------------------------------------------- settings that would protect less in silence


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cpsgd_memory", "cpsgd-memory"),
        ("cpsgd_roster", "cpsgd-roster"),
        ("CPSGD-IDENTITY", "cpsgd-identity"),
        ("cpsgd-memroy", "cpsgd-memory"),
        ("cpsgdroster", "cpsgd-roster"),
    ],
)
def test_a_misspelt_setting_refuses_every_round(small_plan: Plan, tmp_path: Path, name: str, meant: str) -> None:
    client = Client(settings={name: str(tmp_path / "file"), "partition-id": 3})
    with pytest.raises(RoundRefusedError, match=f"Did its operator mean '{meant}'"):
        client.ask(opening(small_plan))


def test_a_required_file_that_is_not_set_refuses_every_round(tmp_path: Path) -> None:
    memory = {"cpsgd-memory": str(tmp_path / "memory")}
    with pytest.raises(RoundRefusedError, match="requires a memory, and cpsgd-memory is not set"):
        open_client_files({"memory": str(tmp_path / "memory")}, require_memory=True)
    with pytest.raises(RoundRefusedError, match="requires a roster"):
        open_client_files(memory, require_memory=True, require_roster=True)
    found, signing = open_client_files(memory, require_memory=True)
    assert found is not None
    assert signing.roster is None
