"""What is spent of a budget, reservation by reservation, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cpsgd.reports import _plotting

if TYPE_CHECKING:
    from cpsgd.ledger import Budget, Entry


def draw_spending(budget: Budget, entries: Sequence[Entry], path: Path) -> Path:
    """Draws ε over time as it was when each round was reserved, beside the limit.

    Args:
        budget: Whose.
        entries: The population's entries, in order.
        path: File to write; its suffix decides the format.
    """
    figure = _plotting.new_figure(7.2, 4.2)
    axes = figure.subplots()
    days = [_days(entry.reserved_at) for entry in entries]
    # Clocks may go back; then the rounds are counted instead.
    in_time = len(set(days)) > 1 and days == sorted(days)
    x = days if in_time else [float(i + 1) for i in range(len(entries))]
    spent = [entry.spent for entry in entries]
    axes.axhline(budget.epsilon, color=_plotting.ACCENT, linewidth=1.4)
    axes.annotate(
        f"limit ε = {budget.epsilon:g}",
        (0.0, budget.epsilon),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(4, 4),
        fontsize=9,
        color=_plotting.ACCENT,
    )
    if entries:
        axes.step(x, spent, where="post", color=_plotting.SEQUENCE[1], linewidth=2.0)
        lost = [(place, entry.spent) for place, entry in zip(x, entries, strict=True) if not entry.released]
        if lost:
            places_lost, spent_lost = zip(*lost, strict=True)
            axes.plot(places_lost, spent_lost, "x", color=_plotting.INK, markersize=6, label="reserved, not released")
            axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_ylim(0.0, 1.12 * max(budget.epsilon, *spent, 0.0))
    _plotting.tidy(
        axes,
        title=f"{budget.population}: ε spent at δ = {_plotting.power(budget.delta)}, {budget.adjacency} neighbours, "
        f"unit {budget.unit}",
        xlabel="time (UTC)" if in_time else "round",
        ylabel="ε",
    )
    if in_time:
        axes.xaxis_date()
        figure.autofmt_xdate()
    return _plotting.save(figure, path)


def _days(text: str) -> float:
    """A record's time in days since 1970, as matplotlib counts; 0 if whoever wrote it wrote something else."""
    try:
        return datetime.fromisoformat(text).timestamp() / 86_400.0
    except ValueError:
        return 0.0
