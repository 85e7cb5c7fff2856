"""`cpsgd._durable`: what is written is whole and on the disk, and one writes at a time."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from filelock import Timeout

from cpsgd import _durable
from cpsgd.errors import DamagedFileError


def failing_fsync(descriptor: int) -> None:
    raise OSError("the disk is full")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    _durable.write_file(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_fsync)
        with pytest.raises(OSError, match="full"):
            _durable.write_file(path, b"new")
    assert path.read_bytes() == b"old"
    _durable.write_file(path, b"new")  # what the failure left beside is no obstacle
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_only_one_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with _durable.locked(path):
        with pytest.raises(Timeout):
            _durable.lock_of(path).acquire(blocking=False)
        other = f"from pathlib import Path; from cpsgd._durable import lock_of; lock_of(Path({str(path)!r})).acquire(0)"
        assert subprocess.run([sys.executable, "-c", other], capture_output=True).returncode != 0
    _durable.lock_of(path).acquire(blocking=False)
    with pytest.raises(FileNotFoundError), _durable.locked(tmp_path / "none" / "state"):
        pass


@pytest.mark.skipif(os.name == "nt", reason="folders are not synchronised on Windows")
def test_the_folder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that the name of a new file may be gone after a loss of power."""
    waited: list[bool] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (waited.append(os.path.isdir(f"/proc/self/fd/{d}")), real(d))[1])
    _durable.write_file(tmp_path / "file", b"new")
    assert waited == [False, True]


def test_the_core_needs_no_module_that_windows_lacks() -> None:
    """But for the lock of an open file, which has a way for either system; or where the module is not needed."""
    root = Path(_durable.__file__).parent
    missing = re.compile(
        r"(?<!suppress\(ImportError, ValueError, OSError\):)\n\s*(import|from) (fcntl|resource|pwd|grp|termios)\b"
    )
    needing = [path for path in root.rglob("*.py") if missing.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(root)) for path in needing] == ["_durable.py"]
    text = Path(_durable.__file__).read_text(encoding="utf-8")
    assert text.index('if sys.platform == "win32":') < text.index("\nelse:\n    import fcntl\n")


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "mean.npy"
    path.write_bytes(b"old")

    def body(file: IO[bytes]) -> None:
        file.write(b"new, but only hal")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _durable.write_file(path, body)
    assert path.read_bytes() == b"old"
    with path.open("rb") as reader:
        _durable.write_file(path, b"new")
        assert reader.read() == b"old"  # whoever opened it before still reads all of the old
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_drafts_of_killed_writers_are_removed(tmp_path: Path) -> None:
    old, fresh, other = (tmp_path / name for name in (".file.0.tmp", ".file.1.tmp", ".files.0.tmp"))
    for draft in (old, fresh, other):
        draft.write_bytes(b"half")
    for draft in (old, other):
        os.utime(draft, (0, 0))
    _durable.write_file(tmp_path / "file", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.1.tmp", ".files.0.tmp", "file"]


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _durable.write_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    _durable.write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _durable.write_file(path, b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    def body(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as full:
        _durable.write_file(tmp_path / "mean.npy", body)
    assert full.value.filename == str(tmp_path / "mean.npy")
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    _durable.create_file(path, b"first", mode=0o600)
    with pytest.raises(FileExistsError):
        _durable.create_file(path, b"second")
    assert path.read_bytes() == b"first"
    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(OSError, match="full"):
        _durable.create_file(tmp_path / "other", b"half")
    assert list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_appended_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    monkeypatch.setattr(os, "fsync", failing_fsync)
    with path.open("r+b") as file, pytest.raises(OSError, match="full"):
        _durable.append(file, b"two\n")
    assert path.read_bytes() == b"one\n"


def test_a_seal_notices_every_changed_bit() -> None:
    sealed = _durable.seal("seeds", b"some\ncontent")
    assert _durable.is_sealed(sealed)
    assert _durable.unseal("seeds", sealed) == b"some\ncontent"
    for place in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedFileError):
            _durable.unseal("seeds", bytes(changed))
    for other in (b"", sealed[:-1], sealed + b"x", b"{}", _durable.seal("seed", b"some\ncontent")):
        with pytest.raises(DamagedFileError):
            _durable.unseal("seeds", other)


def test_a_lock_on_an_open_file_holds_by_every_name(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    path.touch()
    link.hardlink_to(path)
    with path.open("r+b") as file, link.open("r+b") as other:
        _durable.hold(file)
        with pytest.raises(TimeoutError):
            _durable.hold(other, timeout=0.02)
    with link.open("r+b") as other:
        _durable.hold(other, timeout=0.0)
