"""Draws the picture of the front page from a file of results: `python docs/_site/home.py`. Needs matplotlib.

One panel that a phone can show: the error of a private mean against the bits of a message, under secure aggregation.
The file is that of `python -m reproduction.frontier`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib as mpl

from cpsgd.reports import plotting

RESULTS = Path(__file__).parents[1] / "results" / "frontier" / "frontier.csv"
OUT = Path(__file__).parents[1] / "images" / "home.svg"
SETTING = ("10000", "65536", "True")
LINES = (
    ("this package", None, "ours", plotting.ACCENT, "-"),
    ("discrete Gaussian (2021), Skellam (2021)", "skellam", "published", plotting.SEQUENCE[1], "--"),
    ("Poisson binomial (2022)", "coins", "published", plotting.SEQUENCE[3], "--"),
    ("cpSGD (2018)", "binomial", "published", plotting.SEQUENCE[0], "--"),
)
"""Label, mechanism (None: the best of all), accounting, colour and style."""


def points(results: Path, mechanism: str | None, accounting: str) -> list[tuple[float, float]]:
    """Returns the smallest error for each number of bits, without points that a smaller message beats."""
    best: dict[float, float] = {}
    with results.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["clients"], row["dim"], row["secure"]) != SETTING or row["accounting"] != accounting:
                continue
            if mechanism in (None, row["mechanism"]):
                bits, ratio = float(row["bits"]), float(row["ratio"])
                best[bits] = min(ratio, best.get(bits, ratio))
    found: list[tuple[float, float]] = []
    for bits, ratio in sorted(best.items()):
        if not found or ratio < found[-1][1]:
            found.append((bits, ratio))
    return found


def draw(results: Path = RESULTS, out: Path = OUT) -> None:
    """Draws the picture."""
    figure = plotting.new_figure(5.2, 5.0)
    axes = figure.subplots()
    for label, mechanism, accounting, colour, style in LINES:
        shown = [(bits, ratio) for bits, ratio in points(results, mechanism, accounting) if ratio < 40]
        width = 2.6 if accounting == "ours" else 1.6
        axes.plot(*zip(*shown, strict=True), style, color=colour, label=label, linewidth=width)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1×", "2×", "5×", "10×", "20×"])
    axes.minorticks_off()
    axes.set_xlim(8, 28)
    axes.set_xticks(range(8, 29, 4))
    plotting.tidy(axes, title="Error of a private mean, lower is better", xlabel="bits per coordinate", ylabel=None)
    axes.set_ylabel("error over exact Gaussian noise", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.1, -0.16))
    with mpl.rc_context({"svg.hashsalt": "home", "svg.fonttype": "none"}):
        figure.savefig(out, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
