"""Both servers as processes on 127.0.0.1, which a test may kill and start again.

They are forks of one that has imported what they need: a start from nothing takes a second of processor time. Tests of
deployed federations and of the examples start them as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from cpsgd import Protocol
from cpsgd.engines.pair.running import free_port, write_task
from cpsgd.engines.pair.task import Admission, create_task
from tests.engines.pair import forked

from .local import protocol

_FORKS = multiprocessing.get_context("forkserver")
_SECONDS = 60.0


class Servers:
    """A task with its files, and two processes."""

    def __init__(
        self,
        folder: Path,
        *,
        admission: Admission = "open",
        rounds: int = 2,
        scheme: str = "http",
        stores: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
        planned: Protocol | None = None,
    ) -> None:
        urls = {role: f"{scheme}://127.0.0.1:{free_port()}" for role in ("leader", "helper")}
        self.task, self.secrets = create_task(
            planned or protocol(), leader=urls["leader"], helper=urls["helper"], rounds=rounds, admission=admission
        )
        self.folder, self._options = folder, options
        self._stores = stores or {role: str(folder / f"{role}.db") for role in urls}
        self.running: dict[str, BaseProcess] = {}
        write_task(folder, self.task, self.secrets)

    def start(self, role: str) -> None:
        """Starts a server and returns when it listens."""
        words = ["--task", str(self.folder / "task.json"), "--secrets", str(self.folder / f"{role}.json")]
        words = ["pair", role, *words, "--store", self._stores[role], *self._options]
        _FORKS.set_forkserver_preload(list(forked.NEEDED))
        said, output = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=forked.command, args=(words, output, self.folder / f"{role}.log"))
        process.start()
        output.close()
        with said:
            listens = os.read(said.fileno(), 1000).startswith(role.capitalize().encode())
        self.running[role] = process
        assert listens, (self.folder / f"{role}.log").read_text()

    def stop(self, role: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Ends a server, as kill -9 does if not said otherwise, and returns its exit code."""
        process = self.running.pop(role)
        assert process.pid is not None
        os.kill(process.pid, how)
        process.join(_SECONDS)
        assert process.exitcode is not None
        return process.exitcode


@contextmanager
def servers(folder: Path, **options: object) -> Iterator[Servers]:
    """Both servers, ended in any case."""
    found = Servers(folder, **options)  # type: ignore[arg-type]
    try:
        for role in ("helper", "leader"):
            found.start(role)
        yield found
    finally:
        for role in list(found.running):
            found.stop(role)
