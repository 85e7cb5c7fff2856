"""Pictures of statistics: values with their intervals, groups or names on the axis. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd.errors import CpsgdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.statistics.results import Statistic

_INK, _MUTED, _BAR = "#16425b", "#6b7280", "#a9c6cf"
# Rows of a picture; more would not be read.
_MOST_ROWS = 80


def draw_intervals(result: Statistic, axes: Axes | None = None) -> Axes:
    """Draws one row per value, its label on the vertical axis, and returns the axes.

    Groups with several names stand together, under the group's label. More than 80 values are cut, and the title says
    so.

    Raises:
        CpsgdError: matplotlib is not installed.
    """
    entries = result.rows()
    shown = entries[:_MOST_ROWS]
    if axes is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise CpsgdError("Drawing needs matplotlib, which is not installed: pip install matplotlib.") from error
        figure = Figure(figsize=(7.2, max(2.2, 1.0 + 0.28 * len(shown))), layout="constrained", facecolor="white")
        axes = figure.subplots()
    labels = [
        name if group is None else group if len(result.names) == 1 else f"{group} · {name}" for group, name, *_ in shown
    ]
    place = np.arange(len(shown), dtype=np.float64)
    table = np.array([entry[2:] for entry in shown], dtype=np.float64).reshape(len(shown), 3)
    values, low, high = table.T
    if result.statistic in ("histogram", "count"):
        axes.barh(place, values, 0.8, color=_BAR)
    # Intervals end where values do; estimates may lie outside.
    reach = np.maximum(0.0, np.vstack([values - low, high - values]))
    axes.errorbar(values, place, xerr=reach, fmt="o", color=_INK, capsize=3, markersize=4)
    axes.set_yticks(place, labels)
    axes.invert_yaxis()
    rest = len(entries) - len(shown)
    title = result.title if not rest else f"{result.title} ({rest:,} more)"
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    single = result.names[0] if len(result.names) == 1 and result.groups is not None else ""
    axes.set_xlabel(f"{result.statistic} {single}".strip() + f", {100 * result.confidence:g} % intervals")
    axes.grid(True, axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    families = fonts_for([*labels, title])
    for text in (*axes.get_yticklabels(), axes.title, axes.xaxis.label):
        text.set_fontfamily(families)
    return axes


def fonts_for(texts: Iterable[str]) -> list[str]:
    """Returns the names of fonts that together have the texts' characters, as far as the system's fonts have them."""
    from matplotlib import font_manager, rcParams
    from matplotlib.ft2font import FT2Font

    usual = font_manager.findfont(font_manager.FontProperties())
    lacking = {ord(letter) for text in texts for letter in text} - _characters(FT2Font(usual))
    found = list(rcParams["font.family"])
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda each: (each.style != "normal", each.name)):
        if not lacking:
            break
        try:
            had = lacking & _characters(FT2Font(entry.fname))
        except (OSError, RuntimeError):
            continue  # a font that was removed, or that freetype cannot read
        if had and entry.name not in found:
            found.append(entry.name)
            lacking -= had
    return found


def _characters(font: Any) -> set[int]:
    return set(font.get_charmap())
