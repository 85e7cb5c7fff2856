"""`cpsgd dashboard` as a program: its address, its token, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dashboard.samples import write_all


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as POSIX does")
def test_a_dashboard_from_its_address_to_ctrl_c(tmp_path: Path) -> None:
    folder = write_all(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "cpsgd", "dashboard", str(folder)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        address = re.fullmatch(r"Dashboard: (http://127\.0\.0\.1:\d+)/\?token=([\w-]{43})\n", line)
        assert address is not None, line
        with httpx.Client(base_url=address[1], follow_redirects=True, timeout=60) as browser:
            assert browser.get("/").status_code == 403
            assert "runs/done" in browser.get("/runs", params={"token": address[2]}).text
            # A plan by the process that computes, and a stream that is still open at the end.
            with browser.stream("GET", "/planner/answer?bits=4") as stream:
                names = (text for text in stream.iter_lines() if text.startswith("event: "))
                assert next(names) == "event: texts"
                assert next(names) == "event: frontier"
                program.send_signal(signal.SIGINT)
                _, complaints = program.communicate(timeout=60)
    assert program.returncode == 0
    assert "Traceback" not in complaints
    assert address[2] not in complaints


def test_a_port_that_is_taken_and_a_folder_that_is_not_there(cpsgd: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cpsgd("dashboard", tmp_path, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr
    cpsgd.refuses("There is no folder", "dashboard", tmp_path / "missing")


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_ports_are_numbers(cpsgd: Any, port: str) -> None:
    assert cpsgd("dashboard", "--port", port).exit_code == 2


def test_what_is_not_installed_is_named(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    cpsgd.refuses("pip install 'cpsgd[dashboard]'", "dashboard")
