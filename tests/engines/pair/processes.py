"""Both servers as processes on 127.0.0.1, which a test may kill and start again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpsgd import Protocol
from cpsgd.engines.pair.running import free_port, start_server, stop_server, write_task
from cpsgd.engines.pair.task import Admission, create_task

from .local import protocol


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
        self.running: dict[str, subprocess.Popen[str]] = {}
        write_task(folder, self.task, self.secrets)

    def start(self, role: str) -> None:
        """Starts a server and returns when it listens."""
        self.running[role] = start_server(
            role, self.folder, store=self._stores[role], options=self._options, log=self.folder / f"{role}.log"
        )

    def stop(self, role: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Ends a server, as kill -9 does if not said otherwise."""
        return stop_server(self.running.pop(role), how)


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
