"""The paper's Figure 2: accuracy against communication, for several (k, m) and a baseline without privacy.

For every ε and number of bits the planner picks k, m and X; training runs with each, from the same first weights and
cohorts. A line follows one training, or the mean of several with different seeds: bytes sent by all clients so far, and
accuracy on the test set.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from cpsgd.errors import DataError, ParameterError
from cpsgd.reports import _plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.learning.metrics import RoundMetrics
    from cpsgd.learning.settings import Settings

EPSILONS = (4.0, 2.0)
BITS = (2.0, 3.0, 4.0, 8.0)
PICTURE, NUMBERS, TABLE, RUNS = "accuracy.png", "accuracy.json", "accuracy.csv", "runs"

Progress = Callable[[str, int, "RoundMetrics"], None]
"""Called with a training's name, its rounds in all and each round's figures."""


@dataclass(frozen=True)
class Line:
    """One way of training.

    Attributes:
        epsilon: ε of its guarantee, of several seeds the largest; None without privacy.
        levels: k; None for floats.
        trials: m; None for floats.
        bits_per_coordinate: What a client sends for a parameter.
        megabytes: Sent by all clients after each evaluation.
        accuracy: On the test set, then; a row a seed.
    """

    epsilon: float | None
    levels: int | None
    trials: int | None
    bits_per_coordinate: float
    megabytes: tuple[float, ...]
    accuracy: tuple[tuple[float, ...], ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The line that `asdict` took apart."""
        rows = tuple(tuple(row) for row in values["accuracy"])
        return cls(**{**values, "megabytes": tuple(values["megabytes"]), "accuracy": rows})


@dataclass(frozen=True)
class AccuracyFigure:
    """The figure's data and the files that were written; `panels` are keyed by ε."""

    settings: dict[str, Any]
    seeds: tuple[int, ...]
    baseline: Line
    panels: dict[float, tuple[Line, ...]]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "settings": self.settings,
            "seeds": list(self.seeds),
            "baseline": asdict(self.baseline),
            "panels": [
                {"epsilon": epsilon, "lines": [asdict(line) for line in lines]}
                for epsilon, lines in self.panels.items()
            ],
            "files": [str(file) for file in self.files],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The figure that `to_dict` took apart."""
        return cls(
            settings=dict(values["settings"]),
            seeds=tuple(values["seeds"]),
            baseline=Line.from_dict(values["baseline"]),
            panels={
                float(panel["epsilon"]): tuple(Line.from_dict(line) for line in panel["lines"])
                for panel in values["panels"]
            },
        )


def compute(
    settings: Settings,
    *,
    epsilons: Sequence[float],
    bits: Sequence[float],
    seeds: Sequence[int],
    runs: Path,
    progress: Progress,
) -> AccuracyFigure:
    """Trains without privacy, and for every ε with each number of bits, once for every seed.

    Each training has a folder of its own under `runs`. What is there already is not trained again, and what was
    interrupted goes on.

    Args:
        settings: What is trained; its ε, bits, seed and baselines are replaced.
        epsilons: One panel each.
        bits: One line each.
        seeds: One training of every line each.
        runs: Folder for the trainings.
        progress: Called with a training's name, its rounds in all and each round's figures.
    """
    from cpsgd.learning.datasets import load
    from cpsgd.learning.experiment import NO_PRIVACY, PRIVATE, Experiment

    def train(experiment: Experiment, which: str, name: str, folder: str) -> Line:
        histories, spent = [], []
        for seed in seeds:
            trainer = experiment.with_seed(seed).trainer(which, runs / f"{folder}-seed-{seed}", resume=True)
            label = name if len(seeds) == 1 else f"{name}, seed {seed}"
            for metrics in trainer.run():
                progress(label, trainer.rounds, metrics)
            histories.append([metrics for metrics in trainer.history if metrics.accuracy is not None])
            if (guarantee := trainer.guarantee()) is not None:
                spent.append(guarantee.epsilon)
        protocol = None if which == NO_PRIVACY else experiment.protocol
        return Line(
            epsilon=max(spent, default=None),
            levels=None if protocol is None else protocol.levels,
            trials=None if protocol is None else protocol.trials,
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            megabytes=tuple(metrics.bytes_total / 1e6 for metrics in histories[0]),
            accuracy=tuple(tuple(metrics.accuracy or 0.0 for metrics in history) for history in histories),
        )

    if settings.explicit:
        raise ParameterError(
            "The figure's protocols are planned for its ε and bits: leave levels, trials and range out."
        )
    # All are planned before any is trained, so that an impossible one is known at once.
    dataset = load(settings.dataset, clients=settings.clients)
    planned = {
        (epsilon, b): Experiment(replace(settings, epsilon=epsilon, bits=b, baselines=True), dataset)
        for epsilon in epsilons
        for b in bits
    }
    baseline = train(planned[epsilons[0], bits[0]], NO_PRIVACY, NO_PRIVACY, "no-privacy")
    panels = {
        epsilon: tuple(
            train(planned[epsilon, b], PRIVATE, f"ε = {epsilon:g}, {b:g} bits", f"epsilon-{epsilon:g}-bits-{b:g}")
            for b in bits
        )
        for epsilon in epsilons
    }
    return AccuracyFigure(settings.to_dict(), tuple(seeds), baseline, panels)


def write_figure(
    out: Path,
    settings: Settings,
    *,
    epsilons: Sequence[float] = EPSILONS,
    bits: Sequence[float] = BITS,
    seeds: Sequence[int] = (0,),
    progress: Progress = lambda name, rounds, metrics: None,
) -> AccuracyFigure:
    """Trains and draws: `accuracy.png`, and the numbers behind it as `accuracy.json` and `accuracy.csv`."""
    _plotting.new_figure(1.0, 1.0)  # raises where nothing could be drawn, before a long run
    return _write(
        out,
        compute(settings, epsilons=epsilons, bits=bits, seeds=seeds, runs=out / RUNS, progress=progress),
    )


def redraw(out: Path) -> AccuracyFigure:
    """Draws again from the numbers in a folder, without any training.

    Raises:
        DataError: There is no `accuracy.json` of this release.
    """
    path = out / NUMBERS
    try:
        return _write(out, AccuracyFigure.from_dict(json.loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        raise DataError(f"There is no {path} to draw from.") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} does not hold the numbers of this figure.") from None


def _write(out: Path, data: AccuracyFigure) -> AccuracyFigure:
    settings = data.settings
    figure = _plotting.new_figure(5.4 * len(data.panels), 4.6)
    panels = figure.subplots(1, len(data.panels), sharey=True, squeeze=False)[0]
    for index, (axes, (epsilon, lines)) in enumerate(zip(panels, data.panels.items(), strict=True)):
        _panel(axes, lines, data.baseline)
        _plotting.tidy(
            axes,
            title=f"ε = {epsilon:g}",
            xlabel="MB sent by all clients",
            ylabel="test accuracy, %" if index == 0 else None,
        )
    seeds = "" if len(data.seeds) == 1 else f"; mean and range of {len(data.seeds)} seeds"
    figure.suptitle(
        f"Accuracy against communication: {settings['dataset']}, {settings['rounds']:,} rounds of "
        f"{settings['cohort']:,} clients, δ = {_plotting.power(settings['delta'])}{seeds}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=_plotting.INK,
    )
    picture = _plotting.save(figure, out / PICTURE)
    written = replace(data, files=(picture, out / NUMBERS, out / TABLE))
    (out / NUMBERS).write_text(json.dumps(written.to_dict(), indent=2) + "\n", encoding="utf-8")
    (out / TABLE).write_text(_table(data), encoding="utf-8")
    return written


def _table(data: AccuracyFigure) -> str:
    """A row for each seed and evaluation of each line."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["panel_epsilon", "epsilon", "k", "m", "bits_per_coordinate", "seed", "megabytes", "accuracy"])
    lines = [("", data.baseline), *((f"{epsilon:g}", line) for epsilon, panel in data.panels.items() for line in panel)]
    for panel, line in lines:
        for seed, accuracies in zip(data.seeds, line.accuracy, strict=True):
            for megabytes, accuracy in zip(line.megabytes, accuracies, strict=True):
                # The csv module leaves cells of None empty.
                which = [panel, line.epsilon, line.levels, line.trials, line.bits_per_coordinate, seed]
                rows.writerow([*which, megabytes, accuracy])
    return text.getvalue()


def _panel(axes: Axes, lines: Sequence[Line], baseline: Line) -> None:
    for index, line in enumerate(lines):
        colour = _plotting.SEQUENCE[index % len(_plotting.SEQUENCE)]
        label = f"k = {line.levels}, m = {line.trials}: {line.bits_per_coordinate:.3g} bits"
        _draw(axes, line, colour, label)
    _draw(axes, baseline, _plotting.INK, "no privacy: 32 bits")
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=9, labelcolor=_plotting.INK, loc="lower right")


def _draw(axes: Axes, line: Line, colour: str, label: str) -> None:
    percent = [tuple(100.0 * value for value in values) for values in zip(*line.accuracy, strict=True)]
    mean = [fmean(values) for values in percent]
    axes.plot(line.megabytes, mean, color=colour, linewidth=1.8, label=label)
    axes.plot(line.megabytes[-1:], mean[-1:], "o", color=colour, markersize=5)
    if len(line.accuracy) > 1:
        low, high = [min(values) for values in percent], [max(values) for values in percent]
        axes.fill_between(line.megabytes, low, high, color=colour, alpha=0.2, linewidth=0.0)
