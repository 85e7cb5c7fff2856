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
# Statistics whose names are columns, each in its own unit; and pictures beside each other, at most.
_OWN_UNITS, _MOST_PICTURES = ("mean", "sum", "kmeans"), 6


def draw_intervals(result: Statistic, axes: Axes | None = None) -> Axes:
    """Draws one row per value, its label on the vertical axis, and returns the axes.

    Columns in different units have a picture each, side by side, with the groups on one axis; the first is returned.
    Otherwise groups with several names stand together. More than 80 values are cut, and the title says so.

    Args:
        result: The statistic.
        axes: Where to draw; None for a new figure.

    Raises:
        CpsgdError: matplotlib is not installed.
    """
    entries = result.rows()
    several = len(result.names) > 1
    apart = several and axes is None and result.statistic in _OWN_UNITS and len(result.names) <= _MOST_PICTURES
    parts = [[row for row in entries if row[1] == name] for name in result.names] if apart else [entries]
    shown = [part[:_MOST_ROWS] for part in parts]
    if axes is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise CpsgdError("Drawing needs matplotlib, which is not installed: pip install matplotlib.") from error
        size = (max(7.2, 2.0 + 2.6 * len(parts)), max(2.2, 1.0 + 0.28 * len(shown[0])))
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        places = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    else:
        places = np.array([axes])
    for place, part in zip(places, shown, strict=True):
        name = part[0][1] if part and (apart or (not several and result.groups is not None)) else ""
        _draw_part(place, part, result, name, several=several and not apart)
    rest = len(parts[0]) - len(shown[0])
    title = result.title if not rest else f"{result.title} ({rest:,} more)"
    places[0].set_title(title, loc="left", fontsize=10, color=_INK)
    places[0].invert_yaxis()
    families = fonts_for([title, *(label.get_text() for label in places[0].get_yticklabels()), *result.names])
    for text in (places[0].title, *places[0].get_yticklabels(), *(place.xaxis.label for place in places)):
        text.set_fontfamily(families)
    first: Axes = places[0]
    return first


def _draw_part(
    axes: Axes, rows: list[tuple[str | None, str, float, float, float]], result: Statistic, name: str, *, several: bool
) -> None:
    labels = [own if group is None else f"{group} · {own}" if several else group for group, own, *_ in rows]
    place = np.arange(len(rows), dtype=np.float64)
    values, low, high = np.array([row[2:] for row in rows], dtype=np.float64).reshape(len(rows), 3).T
    if result.statistic in ("histogram", "count"):
        axes.barh(place, values, 0.8, color=_BAR)
    # Intervals end where values do; estimates may lie outside.
    reach = np.maximum(0.0, np.vstack([values - low, high - values]))
    axes.errorbar(values, place, xerr=reach, fmt="o", color=_INK, capsize=3, markersize=4)
    axes.set_yticks(place, labels if result.groups is not None or not name else [""] * len(rows))
    axes.set_xlabel(f"{result.statistic} {name}".strip() + f", {100 * result.confidence:g} % intervals")
    axes.grid(True, axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


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
