"""A PostgreSQL of our own on 127.0.0.1, where Debian's is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cpsgd.engines.pair.running import free_port


class Postgres:
    """A database server that a test may kill and start again."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder, self.port = programs, folder, free_port()
        self._user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        self._run("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "tester", "-E", "UTF8")
        self.start()

    def _run(self, program: str, *words: str) -> None:
        words = (str(self._programs / program), *words)
        subprocess.run(words, check=True, capture_output=True, cwd=self._folder, timeout=120, **self._user)

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        words = ["-D", str(self._folder / "data"), "-p", str(self.port), "-k", str(self._folder)]
        words += ["-c", "listen_addresses=127.0.0.1"]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), *words], stderr=log, stdout=log, cwd=self._folder, **self._user
            )
        deadline = time.monotonic() + 60.0
        while True:
            try:
                return self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port))
            except subprocess.CalledProcessError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        """Ends it as kill -9 does, with all of its processes."""
        first = self._process.pid
        children = subprocess.run(["pgrep", "-P", str(first)], capture_output=True, text=True, check=False).stdout
        for process in [first, *map(int, children.split())]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait(timeout=60)
        time.sleep(0.2)

    def stop(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)

    def url(self, name: str) -> str:
        """The address of a new, empty database."""
        words = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "tester", name]
        self._run("createdb", *words)
        return f"postgresql://tester@127.0.0.1:{self.port}/{name}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The database server; skipped where there is none."""
    pytest.importorskip("psycopg")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs PostgreSQL, as Debian's package postgresql brings it")
    folder = Path(tempfile.mkdtemp(prefix="cpsgd-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    server = Postgres(found[-1].parent, folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
