"""Noise that cancels over rounds, and passes: accuracy against rounds and ε for several numbers of bands and passes.

Each setting that `select_settings.py` chose on held-back training images is trained by the real protocol on all
training images, once for every seed and number of bits, and measured on the test set; nothing is selected here. With
several passes cohorts are as many times as large as `--cohort`.

    python -m reproduction.correlated --chosen docs/results/correlated/chosen.json --out docs/results/correlated

Each training is a line of `runs.jsonl` in `--out`, and those already there are not repeated. `summary.csv` and the
picture are made of all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from cpsgd.learning import CohortOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets.infinite import InfiniteDataset
from cpsgd.planner.passes import schedule
from cpsgd.reports import plotting
from reproduction.select_settings import add_size, data_set, few_bits, size_of

# Clip norm where nothing is clipped: no gradient of these networks is as long.
UNCLIPPED = 1e6
# About the time of one pass on one H200.
_PASS_SECONDS = 4.5
RUNS, SUMMARY, PICTURE = "runs.jsonl", "summary.csv", "accuracy.png"


Kind = tuple[float | None, int, int, float | None]
"""ε, bands, passes and bits of trainings that differ only by their seeds; without privacy ε and bits are None."""


def kind_of(row: dict[str, Any], bits: float | None) -> Kind:
    """Returns the kind of a training with these settings and bits."""
    return row["epsilon"], row["bands"], row.get("passes", 1), None if row["epsilon"] is None else bits


def of_run(run: dict[str, Any]) -> Kind:
    """Returns the kind of a finished training; those of earlier releases had 12 bits, or 4 with independent noise."""
    return kind_of(run, run.get("bits", 12.0 if run["bands"] > 1 else 4.0))


def trained(
    data: InfiniteDataset, row: dict[str, Any], kind: Kind, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One training: its accuracy at regular rounds, its ε and its time."""
    model = mlp(data.feature_dim, data.classes, scaled=row["normalised"], seed=seed)
    size, clip_norm = size_of(options, data), row["clip_norm"] or UNCLIPPED
    epsilon, bands, passes, bits = kind
    who, cohort = schedule(size.rounds * size.cohort, size.rounds, passes)
    mechanism: Any = NoPrivacy(clip_norm)
    if epsilon is not None:
        requirements = {"bits": bits, "participation": who, "correlated": bands if bands > 1 else None}
        requirements = few_bits(bands, row["bits"]) if "bits" in row else requirements
        mechanism = size.plan(epsilon, clip_norm, cohort=cohort, **requirements)
    begun = time.perf_counter()
    trainer = Trainer(
        model,
        torch.nn.functional.cross_entropy,
        data,
        mechanism,
        cohorts=CohortOptions(cohort=cohort, rounds=size.rounds, participation=who.scheme),
        server=ServerOptions(
            optimizer=row["optimizer"],
            lr=row["rate"],
            weight_decay=row["weight_decay"],
            schedule=row["schedule"],
            averaging=row["averaging"] or None,
        ),
        run=RunOptions(
            seed=seed,
            evaluate_every=max(1, size.rounds // 50),
            device=options.device,
            memory_limit=options.memory_limit,
        ),
    )
    curve = [(m.round + 1, m.accuracy) for m in trainer.run() if m.accuracy is not None]
    guarantee = trainer.guarantee()
    return {
        "epsilon": epsilon,
        "bands": bands,
        "passes": passes,
        "bits": bits,
        "seed": seed,
        "proved_epsilon": None if guarantee is None else guarantee.epsilon,
        "bytes_per_client": trainer.history[-1].bytes_per_client,
        "seconds": round(time.perf_counter() - begun, 2),
        "curve": curve,
    }


def write_summary(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Writes a row for each kind of training: accuracy after the last round over the seeds, and bytes of a message."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        names = ("epsilon", "bands", "passes", "bits", "seeds", "accuracy_mean", "accuracy_min", "accuracy_max")
        table.writerow([*names, "proved_epsilon", "bytes_per_client", "seconds"])
        for kind, group in grouped(runs).items():
            ends = [run["curve"][-1][1] for run in group]
            proved = max((run["proved_epsilon"] for run in group), key=lambda value: value or 0.0)
            size, seconds = group[0]["bytes_per_client"], fmean(run["seconds"] for run in group)
            figures = [f"{value:.4f}" for value in (fmean(ends), min(ends), max(ends))]
            table.writerow([*kind, len(ends), *figures, proved, size, f"{seconds:.1f}"])


def grouped(runs: Sequence[dict[str, Any]]) -> dict[Kind, list[dict[str, Any]]]:
    """Groups runs that differ only by their seeds: without privacy first, then by falling ε."""

    def order(run: dict[str, Any]) -> tuple[float, int, int, float, int]:
        epsilon, bands, passes, bits = of_run(run)
        return -(epsilon or float("inf")), bands, passes, bits or 0.0, run["seed"]

    found = defaultdict(list)
    for run in sorted(runs, key=order):
        found[of_run(run)].append(run)
    return dict(found)


def label_of(bands: int, passes: int, bits: float | None) -> str:
    """Returns the words for a line of the picture."""
    noise = f"{bands} bands" if bands > 1 else "independent noise"
    return f"{noise}, {bits:g} bits" + (f", {passes} passes" if passes > 1 else "")


def draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws accuracy against rounds at the smallest ε, and after the last round against ε."""
    groups = grouped(runs)
    epsilons = sorted({kind[0] for kind in groups if kind[0] is not None})
    # Few bits at one ε are points of `accuracy_vs_bytes`.
    private = [kind[1:] for kind in groups if kind[0] is not None]
    lines = sorted({line for line in private if private.count(line) > 1 or len(epsilons) == 1})
    figure = plotting.new_figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    for index, line in enumerate(lines):
        colour, label = plotting.SEQUENCE[index % len(plotting.SEQUENCE)], label_of(*line)
        known = [epsilon for epsilon in epsilons if (epsilon, *line) in groups]
        ends = [[100 * run["curve"][-1][1] for run in groups[epsilon, *line]] for epsilon in known]
        right.plot(known, [fmean(values) for values in ends], "o-", color=colour, label=label)
        right.fill_between(known, [min(v) for v in ends], [max(v) for v in ends], color=colour, alpha=0.2, linewidth=0)
        if known[0] == epsilons[0]:
            _draw_curve(left, groups[epsilons[0], *line], colour, label)
    if (None, 1, 1, None) in groups:
        best = fmean(100 * run["curve"][-1][1] for run in groups[None, 1, 1, None])
        for axes in (left, right):
            axes.axhline(best, color=plotting.INK, linewidth=1.2, label="no privacy, tuned by itself, at the end")
    plotting.tidy(left, title=f"While training, ε = {epsilons[0]:g}", xlabel="rounds", ylabel="test accuracy, %")
    left.set_ylim(90.0, 99.5)
    plotting.tidy(right, title="After the epoch", xlabel="ε", ylabel=None)
    right.set_xscale("log")
    right.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9, labelcolor=plotting.INK, loc="lower right")
    plotting.save(figure, path)


def _draw_curve(axes: Any, group: list[dict[str, Any]], colour: str, label: str) -> None:
    rounds = [point[0] for point in group[0]["curve"]]
    mean = [100 * fmean(run["curve"][i][1] for run in group) for i in range(len(rounds))]
    axes.plot(rounds, mean, color=colour, linewidth=1.8, label=label)


def wanted(row: dict[str, Any], options: argparse.Namespace) -> bool:
    """Returns whether the options ask for these settings."""
    asked = ((options.epsilon, row["epsilon"] or 0.0), (options.bands, row["bands"]))
    return all(names is None or value in names for names, value in (*asked, (options.passes, row.get("passes", 1))))


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size(arguments)
    arguments.add_argument("--chosen", type=Path, help="settings, as select_settings.py writes them; none: draw only")
    arguments.add_argument("--bits", type=float, nargs="+", default=[12.0], help="of messages with correlated noise")
    arguments.add_argument("--independent-bits", type=float, nargs="+", default=[4.0], help="with independent noise")
    arguments.add_argument("--epsilon", type=float, nargs="+", help="only settings for these; 0 for no privacy")
    arguments.add_argument("--bands", type=int, nargs="+", help="only settings with so many bands")
    arguments.add_argument("--passes", type=int, nargs="+", help="only settings with so many passes")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--memory-limit", type=int, help="MiB of clients at a time; more is faster for many passes")
    arguments.add_argument("--no-draw", action="store_true", help="numbers only, without matplotlib")
    options = arguments.parse_args(arguments_given)
    until = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    path, console = options.out / RUNS, Console(highlight=False)
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(of_run(run), run["seed"]) for run in runs}
    rows = [row for row in json.loads(options.chosen.read_text()) if wanted(row, options)] if options.chosen else []
    for seed, row in product(range(options.seeds), rows):
        for bits in [row["bits"]] if "bits" in row else options.bits if row["bands"] > 1 else options.independent_bits:
            kind = kind_of(row, bits)
            if (kind, seed) in known:
                continue
            name = "no privacy" if kind[0] is None else f"ε = {kind[0]:g}, {label_of(*kind[1:])}"
            # As long as the last of its kind, or by its passes.
            expected = [run["seconds"] for run in runs if of_run(run) == kind][-1:] or [_PASS_SECONDS * kind[2]]
            if time.monotonic() + expected[0] > until:
                console.print(f"{name}, seed {seed}: no time left")
                continue
            run = trained(data_set(options.dataset), row, kind, seed, options)
            known.add((kind, seed))
            runs.append(run)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            console.print(f"{name}, seed {seed}: {run['curve'][-1][1]:.2%}, {run['seconds']:.1f} s")
    write_summary(options.out / SUMMARY, runs)
    if not options.no_draw:
        draw(options.out / PICTURE, runs)


if __name__ == "__main__":
    main()
