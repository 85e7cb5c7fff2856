"""The command line as the tests call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd.cli.app import app


class Cpsgd:
    """Runs commands such as `"table sum"`; a call returns the result with `exit_code`, `stdout` and `stderr`."""

    def __init__(self, invoke: Callable[..., Any]) -> None:
        self._invoke = invoke

    def __call__(self, command: object, *arguments: object) -> Any:
        return self._invoke(app, *str(command).split(), *arguments)

    def succeeds(self, *arguments: object) -> Any:
        """Runs a command that ends with exit code 0."""
        result = self(*arguments)
        assert result.exit_code == 0, result.stderr
        return result

    def json(self, *arguments: object) -> Any:
        """Runs a command that succeeds, and returns the JSON that it prints."""
        return json.loads(self.succeeds(*arguments, "--json").stdout)

    def refuses(self, words: str, *arguments: object) -> Any:
        """Runs a command that is refused with these words on stderr and exit code 2."""
        result = self(*arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.replace("│", "").split())
        return result


@pytest.fixture
def cpsgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Cpsgd:
    """Commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Cpsgd(invoke)


@pytest.fixture(scope="session")
def vectors() -> NDArray[np.float32]:
    """40 clients' vectors of 500 coordinates, of norm about 1."""
    generator = np.random.default_rng(7)
    return generator.normal(0.02, 500**-0.5, size=(40, 500)).astype(np.float32)
