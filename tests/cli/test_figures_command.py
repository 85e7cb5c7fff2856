"""`cpsgd figures`: files written, and a clear word where matplotlib is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cpsgd.reports import error_vs_epsilon


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_vs_epsilon, "EPSILONS", (0.5, 2.0))


def test_files(cpsgd: Any) -> None:
    pytest.importorskip("matplotlib")
    result = cpsgd("figures", "error-vs-epsilon", "--out", "figures", "--dim", 64, "--delta", 1e-6, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert [Path(file).name for file in data["files"]] == ["error-vs-epsilon.png", "error-vs-epsilon.json"]
    assert Path("figures/error-vs-epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("figures/error-vs-epsilon.json").read_text()) == data


def test_missing_matplotlib_names_the_remedy(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = cpsgd("figures", "error-vs-epsilon", "--out", "figures")
    assert result.exit_code == 2
    assert "pip install cpsgd[plot]" in result.stderr
    assert not Path("figures").exists()
