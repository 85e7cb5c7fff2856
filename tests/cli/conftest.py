"""The command line as the tests call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd.cli.app import app

Cpsgd = Callable[..., Any]


@pytest.fixture
def cpsgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Cpsgd:
    """Runs a command in an empty folder; gives the result with `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(app, *arguments)


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    """40 clients' vectors of 500 coordinates, of norm about 1."""
    generator = np.random.default_rng(7)
    return generator.normal(0.02, 500**-0.5, size=(40, 500)).astype(np.float32)
