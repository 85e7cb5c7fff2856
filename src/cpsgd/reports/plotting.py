"""The common style of all figures. matplotlib is imported here, and only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd.errors import CpsgdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1f24"
MUTED = "#6b7280"
GRID = "#e5e7eb"
ACCENT = "#c2410c"
# From dark to light blue-green: ordered, and distinct for colour-blind readers and in grey.
SEQUENCE = ("#16425b", "#1f7a8c", "#56b39a", "#d9a441")


def check() -> None:
    """Raises `CpsgdError` if matplotlib is missing, before any work is done."""
    new_figure(1.0, 1.0)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure that belongs to no window and no global state.

    Raises:
        CpsgdError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CpsgdError("Drawing needs matplotlib, which is not installed: pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def note(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Writes text beside a place, `offset` points away."""
    axes.annotate(text, place, textcoords="offset points", xytext=offset, **{"fontsize": 9, **style})


def tidy(axes: Axes, *, title: str, xlabel: str, ylabel: str | None) -> None:
    """Applies the common style: left-aligned title, light grid, no box."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    if ylabel is not None:
        axes.set_ylabel(ylabel, fontsize=10, color=INK)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=9, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure and makes its folder if it is missing. An SVG has the same bytes every time."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "cpsgd"}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path
