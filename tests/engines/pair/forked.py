"""What a fork of the server of forks runs, which imports this module by its full name."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from cpsgd.cli.app import app
from cpsgd.cli.frame import launch

NEEDED = (__name__, "cpsgd.cli.pair", "cpsgd.engines.pair.intake", "cpsgd.engines.pair.service", "uvicorn")
"""Modules that are imported once for all forks."""


def command(words: list[str], output: Connection, log: Path) -> None:
    """Becomes the command, with its output to where the test reads it."""
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    launch(app, words)
