"""Draws test accuracy against the bytes that a client sends in the whole training.

    python -m reproduction.accuracy_vs_bytes

`accuracy-vs-bytes.png` has every ε and kind of noise. The front page's picture is one panel that a phone can show: for
three ε, the best accuracy for so many bytes, beside the paper's own design. The points are the trainings in
`docs/results`; nothing is trained here.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cpsgd.reports import plotting
from reproduction.correlated import RUNS, grouped

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, HOME = DOCS / "results", DOCS / "images" / "home.svg"
DIM = 51_370
_LOWEST = 93.0
_MARKERS = {
    "independent noise": "o",
    "independent noise, many passes": "^",
    "cancelling noise": "s",
    "cancelling noise, many passes": "D",
}


@dataclass(frozen=True)
class Point:
    """A training: ε (None without privacy), kind of noise, bytes up per client, and mean accuracy in per cent."""

    epsilon: float | None
    kind: str
    bytes_up: float
    accuracy: float


def points(results: Path = RESULTS) -> list[Point]:
    """Returns all trainings of the paper's network on the infinite MNIST."""
    found = []
    for folder in ("correlated", "passes"):
        path = results / folder / RUNS
        runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for (epsilon, bands, passes, _), group in grouped(runs).items():
            kind = "cancelling noise" if bands > 1 else "independent noise"
            kind += ", many passes" if passes > 1 else ""
            accuracy = 100 * fmean(run["curve"][-1][1] for run in group)
            found.append(Point(epsilon, kind, passes * group[0]["bytes_per_client"], accuracy))
    with (results / "one-bit" / "summary.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] in ("sampled-coins", "coins"):
                sent = float(row["bits_per_coordinate"]) * DIM / 8
                found.append(Point(2.0, "independent noise", sent, 100 * float(row["accuracy_mean"])))
    return found


def papers_own(results: Path = RESULTS) -> list[Point]:
    """Returns the paper's design, with the ε that its own theorem gives."""
    with (results / "paper-accounting" / "summary.csv").open(newline="") as file:
        return [
            Point(float(row["panel_epsilon"]), "paper", float(row["bits_per_coordinate"]) * DIM / 8, 100 * accuracy)
            for row in csv.DictReader(file)
            if row["method"] == "binomial" and (accuracy := float(row["accuracy_mean"]))
        ]


def draw(path: Path, results: Path = RESULTS) -> None:
    """Draws one panel: a colour for each ε, a mark for each kind of noise."""
    figure = plotting.new_figure(6.4, 4.6)
    axes = figure.subplots()
    lines = defaultdict(list)
    for point in points(results):
        if point.epsilon is None:
            axes.axhline(point.accuracy, color=plotting.INK, linewidth=1.2, label="no privacy (205 kB)")
        else:
            lines[point.epsilon, point.kind].append(point)
    epsilons = sorted({epsilon for epsilon, _ in lines}, reverse=True)
    for (epsilon, kind), line in sorted(lines.items(), key=lambda item: (-item[0][0], item[0][1])):
        # Of several numbers of bands with messages of one length, the best.
        best = {point.bytes_up: point for point in sorted(line, key=lambda point: point.accuracy)}
        line = sorted(best.values(), key=lambda point: point.bytes_up)
        colour = plotting.SEQUENCE[epsilons.index(epsilon) % len(plotting.SEQUENCE)]
        across, up = [point.bytes_up / 1000 for point in line], [point.accuracy for point in line]
        axes.plot(across, up, _MARKERS[kind], color=colour, linestyle=":", linewidth=1, markersize=6)
    for epsilon in epsilons:
        axes.plot([], [], color=plotting.SEQUENCE[epsilons.index(epsilon)], linewidth=4, label=f"ε = {epsilon:g}")
    for kind, marker in _MARKERS.items():
        axes.plot([], [], marker, color=plotting.MUTED, label=kind)
    _draw_paper(axes, results, "x", plotting.ACCENT, "the paper's own design and ε")
    plotting.tidy(axes, title="Accuracy against bytes", xlabel="kB sent per client in all", ylabel="test accuracy, %")
    axes.set_xscale("log")
    axes.set_ylim(_LOWEST, 99.2)
    axes.legend(frameon=False, fontsize=8, labelcolor=plotting.INK, loc="lower left")
    plotting.save(figure, path)


def best(shown: Iterable[Point]) -> list[Point]:
    """Returns the points that no other with at most as many bytes beats."""
    found: list[Point] = []
    for point in sorted(shown, key=lambda point: (point.bytes_up, -point.accuracy)):
        if not found or point.accuracy > found[-1].accuracy:
            found.append(point)
    return found


def draw_home(path: Path = HOME, results: Path = RESULTS) -> None:
    """Draws the picture of the front page."""
    from matplotlib import rc_context

    figure = plotting.new_figure(5.2, 5.0)
    axes = figure.subplots()
    known = points(results)
    limit = max(point.accuracy for point in known if point.epsilon is None)
    axes.axhline(limit, color=plotting.INK, linewidth=1.4, label=f"no privacy, 205 kB: {limit:.2f} %")
    for epsilon, colour in zip((2.0, 1.0, 0.5), (plotting.ACCENT, *plotting.SEQUENCE[1:4:2]), strict=True):
        line = best(point for point in known if point.epsilon == epsilon)
        across, up = [point.bytes_up / 1000 for point in line], [point.accuracy for point in line]
        axes.plot(across, up, "o-", color=colour, linewidth=2.2, markersize=5, label=f"this package, ε = {epsilon:g}")
    _draw_paper(axes, results, "X", plotting.SEQUENCE[0], "cpSGD (2018), its own ε")
    ticks = (0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(_LOWEST, 99.2)
    title = "Handwritten digits, each client hidden"
    plotting.tidy(axes, title=title, xlabel="kB that a client sends in all", ylabel=None)
    axes.set_ylabel("test accuracy, %", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.1, -0.16), ncols=2)
    with rc_context({"svg.hashsalt": "home", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _draw_paper(axes: Any, results: Path, marker: str, colour: str, label: str) -> None:
    paper = [point for point in papers_own(results) if point.accuracy > _LOWEST]
    across, up = [point.bytes_up / 1000 for point in paper], [point.accuracy for point in paper]
    axes.plot(across, up, marker, color=colour, markersize=8, label=label)
    for point in paper:
        plotting.note(axes, f"ε = {point.epsilon:g}", (point.bytes_up / 1000, point.accuracy), (8, -3), fontsize=8)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=RESULTS / "accuracy-vs-bytes.png")
    arguments.add_argument("--home", type=Path, default=HOME)
    options = arguments.parse_args()
    draw(options.out)
    draw_home(options.home)


if __name__ == "__main__":
    main()
