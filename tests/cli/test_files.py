"""Files appear whole or not at all, and devices stay devices."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cpsgd.cli import _files
from cpsgd.errors import ParameterError


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
