"""The frontier of a plan as a picture: the best error for each number of bits, over the Gaussian mechanism's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpsgd.reports import _plotting

if TYPE_CHECKING:
    from cpsgd.planner import Plan


def draw_frontier(plan: Plan, path: Path) -> Path:
    """Draws the best error for each number of bits beside the Gaussian mechanism's, and marks the plan's choice.

    Args:
        plan: What to draw.
        path: File to write; its suffix decides the format.
    """
    figure = _plotting.new_figure(7.2, 4.2)
    axes = figure.subplots()
    points = plan.frontier
    bits = [point.bits for point in points]
    excess = [point.ratio for point in points]
    axes.axhline(1.0, color=_plotting.INK, linewidth=1.2)
    axes.annotate(
        "exact Gaussian mechanism, real numbers for messages",
        (bits[-1], 1.0),
        textcoords="offset points",
        xytext=(0, -6),
        ha="right",
        va="top",
        fontsize=9,
        color=_plotting.INK,
    )
    axes.plot(bits, excess, color=_plotting.SEQUENCE[1], linewidth=2.0, marker="o", markersize=5, zorder=3)
    for point in points:
        if point.ratio < 1.005:
            continue  # on the line already
        axes.annotate(
            _times(point.ratio),
            (point.bits, point.ratio),
            textcoords="offset points",
            xytext=(4, 7),
            fontsize=8,
            color=_plotting.MUTED,
        )
    axes.plot([plan.bits], [plan.ratio], "o", color=_plotting.ACCENT, markersize=10, zorder=4)
    protocol = plan.protocol
    axes.text(
        0.99,
        0.93,
        f"chosen: {plan.bits:.4g} bits, k = {protocol.levels:,}, m = {protocol.trials:,}\n"
        f"{_times(plan.ratio)} × the Gaussian's error",
        transform=axes.transAxes,
        ha="right",
        va="top",
        linespacing=1.5,
        fontsize=10,
        fontweight="bold",
        color=_plotting.ACCENT,
    )
    largest = max(excess)
    if largest > 4.0:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_ylim((largest * 1.4) ** -0.14, largest * 1.4)  # room for the words under the Gaussian's line
        ticks = [mantissa * 10.0**decade for decade in range(9) for mantissa in (1, 1.5, 2, 3, 5)]
        ticks = [tick for tick in ticks if tick <= largest * 1.4]
        ticks = ticks if len(ticks) < 10 else [tick for tick in ticks if f"{tick:e}".startswith("1.0")]
        axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    else:
        axes.set_ylim(1.0 - 0.12 * (largest - 1.0), largest + 0.15 * (largest - 1.0))
    axes.set_xticks(bits, [f"{b:.3g}" for b in bits])
    secure = "" if protocol.modulus is None else ", secure aggregation"
    rounds = "" if plan.rounds == 1 else f", {plan.rounds:,} rounds ({plan.participation})"
    _plotting.tidy(
        axes,
        title=f"What a bit buys: n = {protocol.clients:,}, d = {protocol.dim:,}, "
        f"ε ≤ {plan.wished_epsilon:g}, δ = {_plotting.power(plan.guarantee.delta)}{rounds}{secure}",
        xlabel="bits a coordinate",
        ylabel="expected squared error ÷ Gaussian's",
    )
    return _plotting.save(figure, path)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
