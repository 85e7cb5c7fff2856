"""Draws the error of every mechanism against bits per coordinate, by our accounting and as its authors published it.

Errors are divided by that of the exact Gaussian mechanism at the same (ε, δ), whose messages are real numbers.

    python -m reproduction.frontier --out DIR
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from cpsgd._numbers import power, rounded_up
from cpsgd.cli import options, output
from cpsgd.cli.frame import launch, new_app
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.mechanisms.law import Array
from cpsgd.planner import plan
from cpsgd.planner.problem import Problem
from cpsgd.planner.requirements import Requirements
from cpsgd.registry import MECHANISMS
from cpsgd.reports import plotting
from reproduction.published_designs import PublishedProblem, published_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PUBLISHED = "ours", "published"

NAME = "frontier"
"""Name of the files, without suffix."""

# Bits allowed to a plan. It may need fewer; the next plan is then allowed fewer than those.
_BITS = {
    False: (0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, math.log2(3), 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0),
    True: (
        *(4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 8.5, 9.0, 9.5, 10.0, 10.5, 11.0, 11.5),
        12.0,
        13.0,
        14.0,
        16.0,
        20.0,
    ),
}
_PUBLISHED_BITS = (1.0, math.log2(3), *(0.5 * half for half in range(4, 13)), *(float(bits) for bits in range(7, 29)))
# Ends of the vertical axis, which shows log(ratio - 0.9): that spreads ratios near 1.
_LOWEST, _HIGHEST, _ORIGIN = 0.985, 12.0, 0.9
# Ends of the horizontal axis. With secure aggregation no sum fits fewer bits.
_LEAST_BITS, _MOST_BITS = {False: 0.018, True: 3.6}, 36.0

# Colours of Okabe and Ito, which colour-blind readers can tell apart, and a marker for each mechanism.
_STYLES = {
    "coins": ("#d55e00", "o"),
    "sampled-coins": ("#e69f00", "D"),
    "lazy-coins": ("#882255", "X"),
    "binomial": ("#0072b2", "s"),
    "skellam": ("#009e73", "^"),
    "discrete-gaussian": ("#cc79a7", "v"),
    "rounded-gaussian": ("#56b4e9", "P"),
}
_OTHER = ("#999999", "*")
_OUR_NAMES = {
    "coins": "coins (the rounding is the noise)",
    "sampled-coins": "sampled coins (not for secure sums)",
    "lazy-coins": "lazy coins (for secure sums)",
    "binomial": "rounding + Binomial noise (cpSGD)",
    "skellam": "rounding + Skellam noise",
    "discrete-gaussian": "rounding + discrete Gaussian noise",
    "rounded-gaussian": "Gaussian noise before rounding",
}
_PUBLISHED_NAMES = {
    "coins": "Poisson binomial (ICML 2022)",
    "binomial": "cpSGD (NeurIPS 2018)",
    "skellam": "Skellam (NeurIPS 2021)",
    "discrete-gaussian": "distributed discrete Gaussian (ICML 2021)",
}


@dataclass(frozen=True)
class Scene:
    """The size of a problem and its (ε, δ), for one round and replace-one neighbours."""

    clients: int
    dim: int
    epsilon: float
    delta: float


SCENES = (
    Scene(10_000, 65_536, 2.0, 1e-9),
    Scene(100, 10_000, 2.0, 1e-6),
    Scene(1_000, 2**20, 2.0, 1e-6),
)


@dataclass(frozen=True)
class RivalPoint(Scene):
    """One point of the picture.

    Attributes:
        secure: Whether sums are taken by secure aggregation; bits are then those of the modulus.
        mechanism: Name of the mechanism.
        accounting: "ours", or "published" for its authors' design and accounting.
        bits: Bits per coordinate.
        ratio: Expected squared error over that of the exact Gaussian mechanism.
    """

    secure: bool
    mechanism: str
    accounting: str
    bits: float
    ratio: float


def compute(
    scenes: Iterable[Scene] = SCENES,
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> list[RivalPoint]:
    """Returns the points of all curves; everything takes a quarter of an hour.

    Args:
        scenes: Problems to solve.
        mechanisms: Names of the mechanisms to compare.
        progress: Called with the number of curves done, the number of curves, and the name of the last one.
    """
    curves = [
        (scene, secure, name, accounting)
        for scene in scenes
        for secure in (False, True)
        for name in mechanisms
        for accounting in (OURS, *([PUBLISHED] if name in _PUBLISHED_NAMES else []))
    ]
    found: list[RivalPoint] = []
    for done, (scene, secure, name, accounting) in enumerate(curves, start=1):
        curve = (_ours if accounting == OURS else _published)(scene, secure, name)
        found += [
            RivalPoint(**vars(scene), secure=secure, mechanism=name, accounting=accounting, bits=bits, ratio=ratio)
            for bits, ratio in curve
        ]
        how = ", secure aggregation" if secure else ""
        progress(done, len(curves), f"{scene.clients:,} clients{how}: {name}, {accounting}, {len(curve)} points")
    return found


def _ours(scene: Scene, secure: bool, name: str) -> list[tuple[float, float]]:
    """Returns (bits, ratio) of plans, each with its own guarantee, down to the fewest bits that the picture shows."""
    found: dict[float, float] = {}
    needed = math.inf
    fewest = math.log2(MECHANISMS[name].fewest_values)
    for bits in reversed(_BITS[secure]):
        if bits < fewest - 1e-9:
            break
        if bits >= needed:
            continue  # the last plan fits these, too
        try:
            best = plan(**vars(scene), bits=bits, secure=secure, mechanism=name)
        except (InfeasibleError, ParameterError):
            break  # too few bits; or there is nothing to plan, or no secure aggregation
        needed = best.protocol.bits_per_coordinate
        found[needed] = best.ratio
        if best.ratio > _HIGHEST:
            break
    return sorted(found.items())


def _published(scene: Scene, secure: bool, name: str) -> list[tuple[float, float]]:
    """Returns (bits, ratio) of the authors' designs, the fewest bits where more bring nothing."""
    gaussian = Problem.of(Requirements(**vars(scene))).gaussian_squared_error
    found: dict[float, float] = {}
    for bits in reversed(_PUBLISHED_BITS):
        error = published_error(name, PublishedProblem(**vars(scene), bits=bits, secure=secure))
        if error is None:
            break
        found[error / gaussian] = bits
        if error > _HIGHEST * gaussian:
            break
    return sorted((bits, ratio) for ratio, bits in found.items())


def write(folder: Path, points: Sequence[RivalPoint]) -> list[Path]:
    """Writes the picture as SVG and PNG, and the numbers as CSV; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{NAME}.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(RivalPoint)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(
            {**asdict(point), "bits": f"{point.bits:.6g}", "ratio": f"{point.ratio:.6g}"} for point in points
        )
    return [*(draw(points, folder / f"{NAME}{suffix}") for suffix in (".svg", ".png")), table]


def draw(points: Sequence[RivalPoint], path: Path) -> Path:
    """Draws a column of panels per scene: without secure aggregation above, with it below."""
    scenes = list(dict.fromkeys(Scene(p.clients, p.dim, p.epsilon, p.delta) for p in points))
    figure = plotting.new_figure(2.0 + 3.3 * len(scenes), 8.6)
    figure.set_layout_engine(None)
    panels = figure.subplots(2, len(scenes), sharex="row", sharey=True, squeeze=False)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.885, bottom=0.245, wspace=0.07, hspace=0.17)
    for column, scene in enumerate(scenes):
        for row, secure in enumerate((False, True)):
            axes = panels[row, column]
            shown = [p for p in points if Scene(p.clients, p.dim, p.epsilon, p.delta) == scene and p.secure == secure]
            _panel(axes, shown, secure)
            size = f"{scene.clients:,} clients, d = {scene.dim:,}, δ = {power(scene.delta)}"
            how = "with secure aggregation" if secure else "without secure aggregation"
            plotting.tidy(
                axes,
                title=size if row == 0 else "",
                xlabel="bits per coordinate",
                ylabel=f"{how}\nsquared error ÷ the exact Gaussian's" if column == 0 else None,
            )
    _legends(figure, panels[0, 0])
    epsilons = ", ".join(rounded_up(epsilon) for epsilon in dict.fromkeys(scene.epsilon for scene in scenes))
    figure.suptitle(
        f"What a bit buys: the error of a private mean (ε = {epsilons}) against the size of a message",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=plotting.INK,
    )
    return plotting.save(figure, path)


def _legends(figure: Figure, axes: Axes) -> None:
    """Adds the legend of our curves to the left, that of published ones to the right."""
    groups = (
        ("solid: designed and proved by this package", OURS, _OUR_NAMES, 0.08),
        ("dashed: as designed and accounted by the authors", PUBLISHED, _PUBLISHED_NAMES, 0.62),
    )
    for title, accounting, names, left in groups:
        lines = [axes.plot([], [], **_line(name, accounting))[0] for name in names]
        labels = list(names.values())
        if accounting == PUBLISHED:
            lines.append(axes.plot([], [], **_EXACT)[0])
            labels.append("exact Gaussian noise, 32-bit floats")
        legend = figure.legend(
            lines,
            labels,
            title=title,
            title_fontproperties={"weight": "bold", "size": 10.5},
            alignment="left",
            loc="upper left",
            bbox_to_anchor=(left, 0.185),
            ncols=2 if accounting == OURS else 1,
            frameon=False,
            fontsize=10,
            labelcolor=plotting.INK,
            handlelength=3.0,
        )
        legend.get_title().set_color(plotting.INK)


def _panel(axes: Axes, points: Sequence[RivalPoint], secure: bool) -> None:
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(_stretch, lambda height: np.exp(height) + _ORIGIN))
    axes.minorticks_off()
    axes.set_xlim(_LEAST_BITS[secure], _MOST_BITS)
    axes.set_ylim(_LOWEST, _HIGHEST)
    ticks = (4, 6, 8, 12, 16, 24, 32) if secure else (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    heights = (1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10)
    axes.set_yticks(heights, [f"{height:g}" for height in heights])
    axes.axhline(1.0, color=plotting.INK, linewidth=1.0, zorder=1)
    axes.plot([32.0], [1.0], **_EXACT)
    for accounting in (PUBLISHED, OURS):
        for name in MECHANISMS:
            curve = [p for p in points if (p.mechanism, p.accounting) == (name, accounting)]
            if curve:
                x, y = [p.bits for p in curve], [p.ratio for p in curve]
                axes.plot(x, y, **_line(name, accounting))


_EXACT: dict[str, Any] = {
    "linestyle": "none",
    "marker": "*",
    "color": plotting.INK,
    "markersize": 11,
    "zorder": 5,
    "clip_on": False,
}


def _stretch(ratio: Array) -> Array:
    return np.asarray(np.log(np.maximum(ratio, _ORIGIN + 1e-6) - _ORIGIN))


def _line(name: str, accounting: str) -> dict[str, Any]:
    color, marker = _STYLES.get(name, _OTHER)
    if accounting == PUBLISHED:
        # Two curves almost coincide: one is drawn broader, and the other's dashes lie on it.
        broad = name == "discrete-gaussian"
        return {
            "color": color,
            "linewidth": 4.0 if broad else 1.8,
            "alpha": 0.55 if broad else 1.0,
            "linestyle": (0, (4, 2)),
            "zorder": 2 if broad else 3,
        }
    return {
        "color": color,
        "linewidth": 2.6 if name.endswith("coins") else 1.6,
        "marker": marker,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "zorder": 4,
    }


app = new_app("frontier.py")


@app.default
def main(
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="Folder for the files.")] = Path("figures"),
    json: options.Json = False,
) -> None:
    """Draws the error of every mechanism against bits, ours and as published: SVG, PNG and CSV.

    At three settings, with and without secure aggregation. Takes a quarter of an hour or so.
    """
    plotting.check()  # before minutes are spent
    console = Console(stderr=True, highlight=False)

    def show(done: int, of: int, what: str) -> None:
        console.print(f"{done:>3}/{of}  {what}", markup=False, soft_wrap=True)

    points = compute(progress=show)
    files = write(out, points)
    written = output.facts([("written", escape(str(file))) for file in files])
    output.answer(json, {"files": files, "points": [asdict(point) for point in points]}, written)


if __name__ == "__main__":
    launch(app)
