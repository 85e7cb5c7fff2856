from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import Timeout

from cpsgd import _durable


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    _durable.write_file(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
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
    """Only where a file is imported on demand, on systems that have it."""
    root = Path(_durable.__file__).parent
    missing = re.compile(r"^\s*(import|from) (fcntl|resource|pwd|grp|termios)\b", re.MULTILINE)
    wanted = [path for path in root.rglob("*.py") if missing.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(root)) for path in wanted] == []
