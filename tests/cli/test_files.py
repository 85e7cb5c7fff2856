"""Files appear whole or not at all, and devices stay devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from cpsgd.cli import _files
from cpsgd.errors import ParameterError


def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "mean.npy"
    path.write_bytes(b"old")

    def body(file: IO[bytes]) -> None:
        file.write(b"new, but only hal")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _files.write(path, body)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        _files.write_bytes(path, b"new")
        # Whoever opened it before still reads all of the old.
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _files.write_bytes(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    _files.write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _files.write_bytes(path, b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_full_disk_is_told_of_by_the_name_of_the_file(tmp_path: Path) -> None:
    def body(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as full:
        _files.write(tmp_path / "mean.npy", body)
    assert full.value.filename == str(tmp_path / "mean.npy")
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_is_paid_for_and_lost_is_told_of(tmp_path: Path) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "mean.npy")

    with pytest.raises(OSError, match="charged to the ledger all the same") as full, _files.paid(charged=True):
        write()
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "mean.npy")
    with pytest.raises(OSError, match="No space left on device") as full, _files.paid(charged=False):
        write()
    assert "charged" not in str(full.value)


def test_a_folder_that_takes_no_file_is_told_of_before_the_work(tmp_path: Path) -> None:
    # Where there is no /proc the folder does not exist, and is refused as well.
    with pytest.raises(ParameterError, match=r"Cannot write /proc/mean\.npy"):
        _files.check_output(Path("/proc/mean.npy"))
    _files.check_output(tmp_path / "mean.npy")
    assert not list(tmp_path.iterdir())
