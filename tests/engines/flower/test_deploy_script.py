"""The example's script ends all it has started, whatever ends the script: here with stand-ins for Flower's programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .federation import free_ports

SCRIPT = Path(__file__).parents[3] / "examples" / "flower-digits" / "deploy.sh"

# Each leaves a child behind that has left its session, as some of Flower's processes do.
STUBS = {
    "openssl": "exit 0",
    "ssh-keygen": "exit 0",
    "cpsgd": "echo ssh-ed25519 key",
    "flower-superlink": f'setsid sleep 600 & exec {sys.executable} -m http.server "$4" --bind 127.0.0.1',
    "flower-supernode": "setsid sleep 600 & sleep 600",
    "flwr": '[ "$1" = run ] || exit 0; touch "$STARTED"; setsid sleep 600 & [ -z "$LASTING" ] || sleep 600; exit 3',
}


def left_behind(folder: Path) -> list[int]:
    """Processes that the script started: its folder is in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"FLWR_HOME={folder}/".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    yield scratch
    for pid in left_behind(scratch):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def deploy(folder: Path, *, lasting: bool) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "PORT": str(free_ports(1)[0]),
        "STARTED": str(folder.parent / "started"),
        "LASTING": "yes" if lasting else "",
    }
    # A shell cannot trap a signal that was ignored when it began, as under nohup.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        command = ["bash", str(SCRIPT)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_nothing_outlives_a_run_that_fails(folder: Path) -> None:
    assert deploy(folder, lasting=False).wait(120) == 3
    assert left_behind(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_a_script_that_is_ended(folder: Path, number: signal.Signals) -> None:
    script = deploy(folder, lasting=True)
    deadline = time.monotonic() + 120
    while not (folder.parent / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(left_behind(folder)) > 20
    script.send_signal(number)
    assert script.wait(120) == 128 + number
    assert left_behind(folder) == []
    assert list(folder.iterdir()) == []
