"""`reproduction/error_vs_epsilon.py`: files written, and a clear word where matplotlib is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproduction import error_vs_epsilon


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_vs_epsilon, "EPSILONS", (0.5, 2.0))


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(error_vs_epsilon.app, *arguments)


@pytest.mark.slow
def test_files(figure: Any) -> None:
    pytest.importorskip("matplotlib")
    result = figure("--out", "figures", "--dim", 64, "--delta", 1e-6, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert [Path(file).name for file in data["files"]] == ["error-vs-epsilon.png", "error-vs-epsilon.json"]
    assert Path("figures/error-vs-epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("figures/error-vs-epsilon.json").read_text()) == data


def test_missing_matplotlib_names_the_remedy(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = figure("--out", "figures")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert not Path("figures").exists()
