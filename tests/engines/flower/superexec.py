"""Flower's SuperExec as it is, but for how it starts ClientApps: each is a fork of a process that has imported Flower.

Flower starts a Python for every message to a node, and that one imports Flower's servers too, for over a second of
processor time. A fork is a process like any other, in the node's group and with its environment. The process that is
forked leaves SuperExec before SuperExec opens a connection; it has imported cpsgd as well, but no app.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supernode.cli import flwr_clientapp

CLIENT = "flwr-clientapp"


class Forks:
    """Stands in for the module `subprocess` where SuperExec starts processes."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, nursery: int) -> None:
        self._nursery = nursery

    def Popen(self, command: list[str], **streams: Any) -> None:  # noqa: N802  # as it is called there
        """Starts a process; nobody waits for it."""
        if command[0] != CLIENT or streams:
            subprocess.Popen(command, **streams)
        else:
            os.write(self._nursery, json.dumps(command).encode() + b"\n")


def nursery(lines: int) -> None:
    """Forks once per line of its input, which has a ClientApp's arguments, until SuperExec ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no child stays behind as a zombie
    ready = False
    for line in os.fdopen(lines):
        if not ready:  # a server's SuperExec never comes here
            import cpsgd.engines.flower
            import cpsgd.privacy.guarantees  # noqa: F401

            ready = True
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = json.loads(line)
            flwr_clientapp()
            return


if __name__ == "__main__":
    lines, commands = os.pipe()
    if os.fork() == 0:
        os.close(commands)
        nursery(lines)
    else:
        os.close(lines)
        subprocess_executor.subprocess = Forks(commands)  # type: ignore[assignment, attr-defined]
        flower_superexec()
