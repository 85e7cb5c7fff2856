"""Flower's SuperExec as it is, but for how it starts ClientApps: each is a fork of a process that has imported Flower.

Flower starts a Python for every message to a node, and that one imports Flower's servers too, for over a second of
processor time. A fork is a process like any other, in the node's group and with its environment; the app, and with it
cpsgd, it imports by itself.

Run as a script: it takes SuperExec's arguments, or `nursery` for the process that is forked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

CLIENT = "flwr-clientapp"


class Forks:
    """Stands in for the module `subprocess` where SuperExec starts processes."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[str] | None = None

    def Popen(self, command: list[str], **streams: Any) -> None:  # noqa: N802  # as it is called there
        """Starts a process; nobody waits for it."""
        if command[0] != CLIENT or streams:
            subprocess.Popen(command, **streams)
            return
        if self._nursery is None:
            self._nursery = subprocess.Popen([sys.executable, __file__, "nursery"], stdin=subprocess.PIPE, text=True)
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(command) + "\n")
        self._nursery.stdin.flush()


def nursery() -> None:
    """Forks once per line of its input, which has a ClientApp's arguments, until SuperExec ends."""
    from flwr.supernode.cli import flwr_clientapp

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no child stays behind as a zombie
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = json.loads(line)
            flwr_clientapp()
            return


def superexec() -> None:
    """SuperExec itself."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    subprocess_executor.subprocess = Forks()  # type: ignore[assignment, attr-defined]
    flower_superexec()


if __name__ == "__main__":
    nursery() if sys.argv[1:] == ["nursery"] else superexec()
