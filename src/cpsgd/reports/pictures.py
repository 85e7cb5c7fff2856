"""Draws the frontier of a plan, the findings of an audit, the spending of a budget, the values of a statistic.

The suffix of a picture's file decides its format.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd._numbers import power, rounded_down, rounded_up
from cpsgd.reports import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.audit import AuditReport
    from cpsgd.ledger import Budget, Entry
    from cpsgd.planner import FrontierPoint, Plan
    from cpsgd.statistics.results import Statistic

# With more rounds than this, marks are small.
_FEW_ROUNDS = 40


def draw_frontier(plan: Plan, path: Path) -> Path:
    """Draws the best error for each number of bits beside the Gaussian mechanism's, and marks the plan's choice."""
    figure = plotting.new_figure(7.2, 4.2)
    axes = figure.subplots()
    points = plan.frontier
    bits = [point.bits for point in points]
    excess = [_excess(point) for point in points]
    axes.axhline(1.0, color=plotting.INK, linewidth=1.2)
    words = "exact Gaussian mechanism, real numbers for messages"
    if plan.prefix is not None:
        words = "independent Gaussian noise, real numbers for messages"
    plotting.note(axes, words, (bits[-1], 1.0), (0, -6), ha="right", va="top", color=plotting.INK)
    axes.plot(bits, excess, color=plotting.SEQUENCE[1], linewidth=2.0, marker="o", markersize=5, zorder=3)
    for place in zip(bits, excess, strict=True):
        if abs(place[1] - 1.0) >= 0.005:  # otherwise on the line already
            plotting.note(axes, _times(place[1]), place, (4, 7), fontsize=8, color=plotting.MUTED)
    axes.plot([plan.bits], [_excess(plan)], "o", color=plotting.ACCENT, markersize=10, zorder=4)
    compared = "the Gaussian's error" if plan.prefix is None else "the model's error with independent noise"
    chosen = textwrap.wrap(f"chosen: {plan.bits:.4g} bits, {plan.protocol.mechanism.describe()}", 64)
    text = "\n".join([*chosen, f"{_times(_excess(plan))} × {compared}"])
    style: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "linespacing": 1.5}
    axes.text(0.99, 0.93, text, **style, fontsize=10, fontweight="bold", color=plotting.ACCENT)
    _error_axis(axes, max(excess), correlated=plan.prefix is not None)
    axes.set_xticks(bits, [f"{b:.3g}" for b in bits])
    protocol = plan.protocol
    secure = "" if protocol.modulus is None else ", secure aggregation"
    rounds = "" if plan.rounds == 1 else f",\n{plan.rounds:,} rounds ({plan.participation})"
    errors = "expected squared error ÷ Gaussian's"
    if plan.prefix is not None:
        errors = "squared error of the model ÷ independent noise's"
    plotting.tidy(
        axes,
        title=f"What a bit buys: n = {protocol.clients:,}, d = {protocol.dim:,}, "
        f"ε ≤ {rounded_up(plan.target_epsilon)}, δ = {power(plan.guarantee.delta)}{rounds}{secure}",
        xlabel="bits per coordinate",
        ylabel=errors,
    )
    return plotting.save(figure, path)


def _error_axis(axes: Axes, largest: float, *, correlated: bool) -> None:
    """Scales the axis of errors up to `largest`, with room for text."""
    if largest > 4.0:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_ylim((largest * 1.4) ** -0.14, largest * 1.4)
        ticks = [mantissa * 10.0**decade for decade in range(9) for mantissa in (1, 1.5, 2, 3, 5)]
        ticks = [tick for tick in ticks if tick <= largest * 1.4]
        ticks = ticks if len(ticks) < 10 else [tick for tick in ticks if f"{tick:e}".startswith("1.0")]
        axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    elif correlated:
        axes.set_ylim(0.0, 1.6 * max(largest, 1.0))
    else:
        axes.set_ylim(1.0 - 0.12 * (largest - 1.0), largest + 0.15 * (largest - 1.0))


def _excess(point: Plan | FrontierPoint) -> float:
    """Returns the error over the Gaussian mechanism's: that of the model if noise is correlated over rounds."""
    return point.ratio if point.prefix is None else 1.0 / point.prefix.gain


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def draw_audit(report: AuditReport, path: Path) -> Path:
    """Draws the attacker's misses against its false alarms, over the region that the claims rule out."""
    figure = plotting.new_figure(6.4, 5.4)
    axes = figure.subplots()
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 400)])
    claimed = report.claimed_misses(alarms)
    axes.fill_between(alarms, claimed, color=plotting.GRID, zorder=1)
    axes.plot(alarms, claimed, color=plotting.INK, linewidth=1.4, zorder=2, label="claimed: no attacker is below")
    axes.plot([0, 1], [1, 0], color=plotting.MUTED, linewidth=0.8, linestyle=":", zorder=2, label="guessing")
    alarmed, missed = np.array(report.error_rates).T
    colour = plotting.SEQUENCE[1] if report.passed else plotting.ACCENT
    # Half of the rounds are of either input: by Dvoretzky, Kiefer, Wolfowitz and Massart the whole curve of misses is
    # this close to the true one with 95 % confidence.
    band = math.sqrt(math.log(2.0 / 0.05) / report.attacked_rounds)
    label = f"measured in {report.attacked_rounds:,} rounds, 95 % band"
    axes.fill_between(alarmed, missed - band, missed + band, color=colour, alpha=0.2, linewidth=0.0, zorder=3)
    axes.plot(alarmed, missed, color=colour, linewidth=2.0, zorder=3, label=label)
    axes.text(0.04, 0.04, "ruled out by the claims", transform=axes.transAxes, fontsize=9, color=plotting.MUTED)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0), aspect="equal")
    claim = report.claimed
    plotting.tidy(
        axes,
        title=f"{'PASS' if report.passed else 'FAIL'}: claimed ε ≤ {rounded_up(claim.epsilon)}, found "
        f"ε ≥ {rounded_down(report.lower_bound)} at δ = {power(claim.delta)}",
        xlabel="false alarms: says “one” when it was the other",
        ylabel="misses",
    )
    return plotting.save(figure, path)


def draw_spending(budget: Budget, entries: Sequence[Entry], path: Path) -> Path:
    """Draws ε over time as it was when each of a population's entries, in order, was reserved, beside the limit."""
    figure = plotting.new_figure(7.2, 4.2)
    axes = figure.subplots()
    days = [_days(entry.reserved_at) for entry in entries]
    # If a clock went back, rounds are counted instead.
    in_time = len(set(days)) > 1 and days == sorted(days)
    x = days if in_time else [float(i + 1) for i in range(len(entries))]
    spent = [entry.spent for entry in entries]
    axes.axhline(budget.epsilon, color=plotting.ACCENT, linewidth=1.4)
    limit, across = f"limit ε = {rounded_up(budget.epsilon)}", ("axes fraction", "data")
    plotting.note(axes, limit, (0.0, budget.epsilon), (4, 4), xycoords=across, color=plotting.ACCENT)
    if entries:
        axes.step(x, spent, where="post", color=plotting.SEQUENCE[1], linewidth=2.0)
        # A single round would be a step of no length, which is invisible.
        axes.plot(x, spent, "o", color=plotting.SEQUENCE[1], markersize=5 if len(x) <= _FEW_ROUNDS else 2)
        if len(x) == 1:
            plotting.note(axes, f"ε = {rounded_up(spent[0])}", (x[0], spent[0]), (8, 4))
            axes.set_xlim(0.0, 2.0)
            axes.set_xticks([1.0])
        if lost := [(place, entry.spent) for place, entry in zip(x, entries, strict=True) if not entry.released]:
            axes.plot(*zip(*lost, strict=True), "x", color=plotting.INK, markersize=6, label="reserved, not released")
            axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_ylim(0.0, 1.12 * max(budget.epsilon, *spent, 0.0))
    plotting.tidy(
        axes,
        title=f"{budget.population}: ε spent at {_delta(budget)}, {budget.adjacency} neighbours, unit {budget.unit}",
        xlabel="time (UTC)" if in_time else "round",
        ylabel="ε",
    )
    if in_time:
        axes.xaxis_date()
        figure.autofmt_xdate()
    return plotting.save(figure, path)


def _delta(budget: Budget) -> str:
    """Returns the δ at which the spent ε holds; it is larger for readings of adaptive budgets."""
    from cpsgd.privacy.filters import READING_DELTAS

    if budget.filter is None:
        return f"δ = {power(budget.delta)}"
    return f"δ = {power(READING_DELTAS * budget.delta)} (ex post)"


def _days(text: str) -> float:
    """Returns a record's time in days since 1970, as matplotlib counts; 0 if the text is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp() / 86_400.0
    except ValueError:
        return 0.0


def draw_values(result: Statistic, path: Path) -> Path:
    """Draws a statistic's values with their intervals; see `Statistic.plot`."""
    figure = result.plot().get_figure(root=True)
    assert figure is not None  # new axes have one
    return plotting.save(figure, path)
