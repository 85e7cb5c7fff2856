"""`cpsgd figures`: files written, and a clear word where matplotlib is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpsgd.cli.figures import app
from cpsgd.errors import CpsgdError
from cpsgd.reports import error_vs_epsilon


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_vs_epsilon, "EPSILONS", (0.5, 2.0))


def test_files(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    command = ["error-vs-epsilon", "--out", str(out), "--dim", "64", "--delta", "1e-6", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    data = json.loads(result.output)
    assert [Path(file).name for file in data["files"]] == ["error-vs-epsilon.png", "error-vs-epsilon.json"]
    assert (out / "error-vs-epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "error-vs-epsilon.json").read_text()) == data


def test_missing_matplotlib_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["error-vs-epsilon", "--out", str(tmp_path)])
    assert isinstance(result.exception, CpsgdError)
    assert "pip install cpsgd[plot]" in str(result.exception)
