"""The command line as the tests call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from cpsgd.cli.app import app

Cpsgd = Callable[..., Any]


@pytest.fixture
def cpsgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cpsgd:
    """Runs a command in an empty folder; gives the result with `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def run(*arguments: object) -> Any:
        result = runner.invoke(app, [str(argument) for argument in arguments])
        # A command ends by itself or through an exit code; anything else would be a traceback.
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    """40 clients' vectors of 500 coordinates, of norm about 1."""
    generator = np.random.default_rng(7)
    return generator.normal(0.02, 500**-0.5, size=(40, 500)).astype(np.float32)
