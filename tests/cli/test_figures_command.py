"""`python -m reproduction.frontier`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.cli import figures
from reproduction import frontier
from reproduction.frontier import RivalPoint


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation, which takes minutes, is another test's."""

    def compute(progress: Callable[[int, int, str], None]) -> list[RivalPoint]:
        progress(1, 1, "100 clients: coins, ours, 1 points")
        return [RivalPoint(100, 10_000, 2.0, 1e-6, False, "coins", "ours", 1.0, 1.01)]

    monkeypatch.setattr(frontier, "compute", compute)


@pytest.mark.usefixtures("computed")
def test_writes_picture_and_numbers(cpsgd: Any, tmp_path: Path) -> None:
    result = cpsgd.succeeds("figures", "frontier", "--out", "here")
    assert "1/1  100 clients: coins" in result.stderr
    for suffix in ("svg", "png", "csv"):
        assert (tmp_path / "here" / f"frontier.{suffix}").stat().st_size > 0
        assert f"frontier.{suffix}" in result.stdout


@pytest.mark.usefixtures("computed")
def test_as_json(cpsgd: Any) -> None:
    found = cpsgd.json("figures", "frontier")
    assert [Path(file).name for file in found["files"]] == ["frontier.svg", "frontier.png", "frontier.csv"]
    assert found["points"][0]["mechanism"] == "coins"
    assert found["points"][0]["ratio"] == 1.01


def test_an_installed_package_names_the_checkout(cpsgd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "__file__", str(tmp_path / "a/b/c/figures.py"))
    result = cpsgd("figures", "frontier")
    assert result.exit_code == 2
    assert "python -m reproduction.frontier" in result.stderr
