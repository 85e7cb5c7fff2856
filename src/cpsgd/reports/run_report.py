"""A run's curves as a picture, and sentences about a run. Its page is `cpsgd.dashboard.run_view`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd._numbers import rounded_up
from cpsgd.learning.settings import NO_SEED
from cpsgd.reports import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.learning.experiment import Result

CURVES = "curves.png"
"""Name of the picture in a run's folder."""

_STYLES: dict[str, dict[str, Any]] = {
    # Broad and below the others, so that equal curves are all visible.
    "private": {"color": plotting.ACCENT, "linewidth": 5.0, "alpha": 0.5, "solid_capstyle": "butt", "zorder": 1},
    "4 bits": {"color": plotting.SEQUENCE[2], "linewidth": 1.4},
    "no privacy": {"color": plotting.INK, "linewidth": 1.4},
    "gaussian": {"color": plotting.SEQUENCE[1], "linewidth": 1.4, "linestyle": (0, (4, 2))},
    "quantized": {"color": plotting.SEQUENCE[3], "linewidth": 1.4, "linestyle": (0, (1, 1.5))},
}


def draw(path: Path, results: Sequence[Result]) -> Path:
    """Draws test accuracy, or R², and loss against rounds."""
    last = results[0].to_dict()
    percent = last["accuracy"] is not None
    figure = plotting.new_figure(10.4, 4.2)
    left, right = figure.subplots(1, 2)
    _curves(left, results, "accuracy" if percent else "r_squared", 100.0 if percent else 1.0)
    _curves(right, results, "loss", 1.0)
    plotting.tidy(left, title=f"Test {score_name(last)}", xlabel="round", ylabel="%" if percent else None)
    plotting.tidy(right, title="Test loss", xlabel="round", ylabel=None)
    left.legend(frameon=False, fontsize=9, labelcolor=plotting.INK, loc="lower right")
    return plotting.save(figure, path)


def score_name(result: Mapping[str, Any]) -> str:
    """Returns the name of the measure beside the loss."""
    return "accuracy" if result.get("r_squared") is None else "R²"


def score_text(result: Mapping[str, Any]) -> str:
    """Returns a run's accuracy, or R², as text; "-" if the model is no longer finite."""
    if result.get("r_squared") is not None:
        return f"{result['r_squared']:.4f}"
    return f"{result['accuracy']:.2%}" if result["accuracy"] is not None else "-"


def _curves(axes: Axes, results: Sequence[Result], figure: str, factor: float) -> None:
    """Draws one curve per result: the metric named `figure`, times `factor`, against the round."""
    from matplotlib.ticker import MaxNLocator

    for result in results:
        measured = ((metrics.round + 1, getattr(metrics, figure)) for metrics in result.history)
        points = [(round, value * factor) for round, value in measured if value is not None]
        axes.plot(*zip(*points, strict=True), label=result.name, **_STYLES.get(result.name, {}))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def unit_text(summary: Mapping[str, Any]) -> str:
    """Returns the unit that the guarantee protects, in words."""
    unit = "all that one client holds"
    if summary["unit"] != "client":
        unit = f"one example of a client, who sends at most {summary['settings']['examples']:,}"
    repeatable = is_simulation(summary["settings"], summary["device"])
    return f"nobody, since the noise can be repeated; with secret noise {unit}" if repeatable else unit


NOBODY = "protects nobody"
"""Stands beside the ε of a run whose noise can be repeated."""


def is_simulation(settings: Mapping[str, Any], device: str | None = None) -> bool:
    """Returns whether the noise of a run with these settings, as plain values, follows from a seed or a counter.

    `device` is the kind of device where it is known; settings may leave its choice open.
    """
    return settings.get("seed") != NO_SEED or (device or settings.get("device")) not in ("cpu", None)


def seed_text(summary: Mapping[str, Any]) -> str:
    """Returns the source of the noise, in words, and whether it protects anybody."""
    if summary["device"] != "cpu":
        start = f"seed {summary['settings']['seed']}" if summary["seeded"] else "a seed that was not kept"
        return (
            f"a simulation that {NOBODY}: on a GPU random numbers come from a counter (Philox), here with "
            f"{start}, and the noise of a round's sum is one draw per coordinate"
        )
    if summary["seeded"]:
        return f"a simulation that {NOBODY}, since its noise follows from seed {summary['settings']['seed']}"
    return "not seeded, the noise came from the operating system"


def published_text(bound: Mapping[str, Any]) -> str:
    """Returns the ε of a run by the published accounting of its mechanism, in words."""
    if bound["epsilon"] is not None:
        return f"ε = {rounded_up(bound['epsilon'])} for the same protocol, by {bound['method']}"
    text = f"none for this protocol: {bound['reason']}"
    if bound.get("epsilon_at_paper_range") is not None:
        text += (
            f" With the paper's X = {bound['paper_range']:.4g} and the same k and m: "
            f"ε = {rounded_up(bound['epsilon_at_paper_range'])}."
        )
    return text
