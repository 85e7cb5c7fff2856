"""The picture of a budget shows what was spent, also by a single round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpsgd.ledger import Budget, Entry, RoundEvent
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol
from cpsgd.reports import pictures, plotting

pytest.importorskip("matplotlib")

PROTOCOL = Protocol.rotated_binomial(clients=10, dim=5, clip_norm=1.0, levels=2, trials=14)
BUDGET = Budget(population="us", epsilon=4.0, delta=1e-6, adjacency=Adjacency.REPLACE_ONE)


def drawn(monkeypatch: pytest.MonkeyPatch, spent: list[float]) -> Any:
    """The axes of the picture of so many rounds."""
    figures: list[Any] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure) or path)
    event = RoundEvent(PROTOCOL, survivors=10)
    entries = [
        Entry(i + 1, "us", event, f"2026-01-{i + 1:02}T00:00:00+00:00", epsilon, "method")
        for i, epsilon in enumerate(spent)
    ]
    pictures.draw_spending(BUDGET, entries, Path("b.png"))
    return figures[0].axes[0]


@pytest.mark.parametrize("spent", [[0.5], [0.5, 0.75], [0.1 * i for i in range(1, 20)]])
def test_every_round_has_a_mark(monkeypatch: pytest.MonkeyPatch, spent: list[float]) -> None:
    axes = drawn(monkeypatch, spent)
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in marks] == [spent]
    assert all(line.get_markersize() > 1 for line in marks)
    low, high = axes.get_xlim()
    assert all(low <= x <= high for x in marks[0].get_xdata())
    assert low < high


def test_a_single_round_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, [0.123456])
    assert "ε = 0.1235" in [text.get_text() for text in axes.texts]


def test_nothing_spent_is_the_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, [])
    assert len(axes.lines) == 1
