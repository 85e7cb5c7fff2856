"""The command line as the tests call it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App
from numpy.typing import NDArray

from cpsgd.cli.app import app
from cpsgd.cli.frame import launch

Cpsgd = Callable[..., Any]


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(command_line: App, *arguments: object) -> Result:
    """Runs a command in this process. It ends through an exit code; any other exception is a traceback, and raised."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as end:
        launch(command_line, [str(argument) for argument in arguments])
    return Result(end.value.code or 0, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def cpsgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cpsgd:
    """Runs a command in an empty folder; gives the result with `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(app, *arguments)


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    """40 clients' vectors of 500 coordinates, of norm about 1."""
    generator = np.random.default_rng(7)
    return generator.normal(0.02, 500**-0.5, size=(40, 500)).astype(np.float32)
