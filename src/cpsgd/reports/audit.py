"""An audit as a picture: the attacker's two error rates, and the least that the claims allow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpsgd.reports import _plotting
from cpsgd.reports._numbers import rounded_up

if TYPE_CHECKING:
    from cpsgd.audit import AuditReport


def draw_audit(report: AuditReport, path: Path) -> Path:
    """Draws the attacker's misses against its false alarms, over the region that the claims rule out.

    Args:
        report: What to draw.
        path: File to write; its suffix decides the format.
    """
    figure = _plotting.new_figure(6.4, 5.4)
    axes = figure.subplots()
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 400)])
    claimed = report.claimed_misses(alarms)
    axes.fill_between(alarms, claimed, color=_plotting.GRID, zorder=1)
    axes.plot(alarms, claimed, color=_plotting.INK, linewidth=1.4, zorder=2, label="claimed: no attacker is below")
    axes.plot([0, 1], [1, 0], color=_plotting.MUTED, linewidth=0.8, linestyle=":", zorder=2, label="guessing")
    measured = np.array(report.error_rates)
    colour = _plotting.SEQUENCE[1] if report.passed else _plotting.ACCENT
    # Half of the rounds were played in either world: by Dvoretzky, Kiefer, Wolfowitz and Massart the whole curve of
    # misses is this close to the true one with 95 % confidence.
    band = math.sqrt(math.log(2.0 / 0.05) / report.attacked_rounds)
    axes.fill_between(
        measured[:, 0], measured[:, 1] - band, measured[:, 1] + band, color=colour, alpha=0.2, linewidth=0.0, zorder=3
    )
    axes.plot(
        measured[:, 0],
        measured[:, 1],
        color=colour,
        linewidth=2.0,
        zorder=3,
        label=f"measured in {report.attacked_rounds:,} rounds, 95 % band",
    )
    axes.text(0.04, 0.04, "ruled out by the claims", transform=axes.transAxes, fontsize=9, color=_plotting.MUTED)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_aspect("equal")
    claim = report.claimed
    _plotting.tidy(
        axes,
        title=f"{'PASS' if report.passed else 'FAIL'}: claimed ε ≤ {rounded_up(claim.epsilon)}, found "
        f"ε ≥ {int(1e3 * report.lower_bound) / 1e3:g} at δ = {_plotting.power(claim.delta)}",
        xlabel="false alarms: says “one” when it was the other",
        ylabel="misses",
    )
    return _plotting.save(figure, path)
