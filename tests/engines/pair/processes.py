"""Both servers as processes on 127.0.0.1, which a test may kill and start again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpsgd import Protocol
from cpsgd.engines.pair.running import environment, free_port, write_task
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
        files = {"task": self.folder / "task.json", "secrets": self.folder / f"{role}.json"}
        words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
        with (self.folder / f"{role}.log").open("a") as log:
            program = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cpsgd", "pair", role, *words),
                    *("--store", self._stores[role], *self._options),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment(), "PYTHONPATH": ":".join(sys.path)},
            )
        self.running[role] = program
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line.startswith(role.capitalize()), (line, (self.folder / f"{role}.log").read_text())

    def stop(self, role: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Ends a server, as kill -9 does if not said otherwise."""
        program = self.running.pop(role)
        program.send_signal(how)
        code = program.wait(timeout=60)
        assert program.stdout is not None
        program.stdout.close()
        return code


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
