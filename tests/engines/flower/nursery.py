"""Flower's programs as they are, but for how they start: each is a fork of a process that has imported Flower.

An import of Flower takes over a second of processor time, and a federation's run starts dozens of processes. A fork is
a process like any other, in its own session or its starter's group, and with its environment. A process with threads
cannot be forked safely: before a program opens a connection, it leaves behind a nursery of its own. No app is imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PROGRAMS = {entry.name: entry for entry in entry_points(group="console_scripts") if entry.value.startswith("flwr.")}
STARTERS = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supernode.start_client_internal",
    "flwr.supercore.superexec.executor.subprocess_executor",
)
"""Flower's modules that start Flower's programs."""
OFTEN = ("cpsgd.engines.flower", "cpsgd.privacy.guarantees", "httpcore", "scipy.special")
"""Modules that most programs import once they run."""


class Forks:
    """Stands in for the module `subprocess` where Flower starts its own programs. Nobody waits for these."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, nursery: int) -> None:
        self._nursery = nursery

    def Popen(self, command: list[str], *, start_new_session: bool = False, **streams: int) -> None:  # noqa: N802
        """Starts a process, with its streams where ours go or nowhere."""
        asked = {"command": command, "session": start_new_session, "output": os.devnull if streams else None}
        os.write(self._nursery, json.dumps(asked).encode() + b"\n")


def serve(requests: int, *, answers: bool = False) -> dict[str, Any]:
    """Forks once per line of its input and returns the line in the fork; `answers` prints each process's number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no child stays behind as a zombie
    for line in os.fdopen(requests):
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked: dict[str, Any] = json.loads(line)
            return asked
        if answers:
            print(pid, flush=True)
    os._exit(0)


def become(asked: dict[str, Any]) -> None:
    """Turns this process, which has no threads, into one of Flower's programs."""
    if asked["session"]:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if asked["output"]:
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
    if asked["command"][0].startswith("flower-"):  # one that starts others
        requests, starts = os.pipe()
        if os.fork() == 0:
            os.close(starts)
            return become(serve(requests))
        os.close(requests)
        for name in STARTERS:
            import_module(name).subprocess = Forks(starts)  # type: ignore[attr-defined]
    sys.argv = asked["command"]
    with status_in(asked.get("status")):
        sys.exit(PROGRAMS[sys.argv[0]].load()())


@contextmanager
def status_in(path: str | None) -> Iterator[None]:
    """Leaves the status that the process ends with in a file."""
    try:
        yield
    except SystemExit as end:
        if path is not None:
            Path(path).write_text(str(end.code or 0))
        raise


if __name__ == "__main__":
    for module in (*STARTERS, *(entry.module for entry in PROGRAMS.values()), *OFTEN):
        import_module(module)
    become(serve(os.dup(0), answers=True))
