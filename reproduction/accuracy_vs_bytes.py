"""Draws test accuracy against the bytes that a client sends in the whole training, for every ε and kind of noise.

    python -m reproduction.accuracy_vs_bytes --out docs/results/accuracy-vs-bytes.png

The points are the trainings in `docs/results`; nothing is trained here.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cpsgd.reports import plotting
from reproduction.correlated import RUNS, grouped

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
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
    for folder in ("correlated", "passes", "few-bits"):
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
    paper = [point for point in papers_own(results) if point.accuracy > _LOWEST]
    axes.plot(
        [point.bytes_up / 1000 for point in paper],
        [point.accuracy for point in paper],
        "x",
        color=plotting.ACCENT,
        label="the paper's own design and ε",
    )
    for point in paper:
        plotting.note(axes, f"ε = {point.epsilon:g}", (point.bytes_up / 1000, point.accuracy), (6, -3), fontsize=8)
    plotting.tidy(axes, title="Accuracy against bytes", xlabel="kB sent per client in all", ylabel="test accuracy, %")
    axes.set_xscale("log")
    axes.set_ylim(_LOWEST, 99.2)
    axes.legend(frameon=False, fontsize=8, labelcolor=plotting.INK, loc="lower left")
    plotting.save(figure, path)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=RESULTS / "accuracy-vs-bytes.png")
    draw(arguments.parse_args().out)


if __name__ == "__main__":
    main()
