"""The paper's Figure 2: accuracy against communication, for several (k, m) and a baseline without privacy.

For every ε and number of bits the planner picks k, m and X; training runs with each, from the same first weights and
cohorts. A line follows one training: bytes sent by all clients so far, and accuracy on the test set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd.reports import _plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.learning.metrics import RoundMetrics
    from cpsgd.learning.settings import Settings

EPSILONS = (4.0, 2.0)
BITS = (2.0, 3.0, 4.0, 8.0)


@dataclass(frozen=True)
class Line:
    """One training.

    Attributes:
        epsilon: ε of its guarantee; None without privacy.
        levels: k; None for floats.
        trials: m; None for floats.
        bits_per_coordinate: What a client sends for a parameter.
        megabytes: Sent by all clients after each evaluation.
        accuracy: On the test set, then.
    """

    epsilon: float | None
    levels: int | None
    trials: int | None
    bits_per_coordinate: float
    megabytes: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class AccuracyFigure:
    """The figure's data and the files that were written; `panels` are keyed by ε."""

    settings: dict[str, Any]
    baseline: Line
    panels: dict[float, tuple[Line, ...]]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "settings": self.settings,
            "baseline": asdict(self.baseline),
            "panels": [
                {"epsilon": epsilon, "lines": [asdict(line) for line in lines]}
                for epsilon, lines in self.panels.items()
            ],
            "files": [str(file) for file in self.files],
        }


def compute(
    settings: Settings,
    *,
    epsilons: Sequence[float],
    bits: Sequence[float],
    progress: Callable[[str, int, RoundMetrics], None] = lambda name, rounds, metrics: None,
) -> AccuracyFigure:
    """Trains once without privacy, and for every ε once with each number of bits.

    Args:
        settings: What is trained; its ε, bits and baselines are replaced.
        epsilons: One panel each.
        bits: One line each.
        progress: Called with a training's name, its rounds in all and each round's figures.
    """
    from cpsgd.learning.experiment import NO_PRIVACY, PRIVATE, Experiment

    def train(experiment: Experiment, which: str, name: str) -> Line:
        trainer = experiment.trainer(which, None, resume=False)
        for metrics in trainer.run():
            progress(name, trainer.rounds, metrics)
        seen = [metrics for metrics in trainer.history if metrics.accuracy is not None]
        protocol = None if which == NO_PRIVACY else experiment.protocol
        guarantee = trainer.guarantee()
        return Line(
            epsilon=None if guarantee is None else guarantee.epsilon,
            levels=None if protocol is None else protocol.levels,
            trials=None if protocol is None else protocol.trials,
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            megabytes=tuple(metrics.bytes_total / 1e6 for metrics in seen),
            accuracy=tuple(metrics.accuracy or 0.0 for metrics in seen),
        )

    # All are planned before any is trained, so that an impossible one is known at once.
    planned = {
        (epsilon, b): Experiment(replace(settings, epsilon=epsilon, bits=b, baselines=False))
        for epsilon in epsilons
        for b in bits
    }
    baseline = train(Experiment(replace(settings, baselines=True)), NO_PRIVACY, NO_PRIVACY)
    panels = {
        epsilon: tuple(train(planned[epsilon, b], PRIVATE, f"ε = {epsilon:g}, {b:g} bits") for b in bits)
        for epsilon in epsilons
    }
    return AccuracyFigure(settings.to_dict(), baseline, panels)


def write_figure(
    out: Path,
    settings: Settings,
    *,
    epsilons: Sequence[float] = EPSILONS,
    bits: Sequence[float] = BITS,
    progress: Callable[[str, int, RoundMetrics], None] = lambda name, rounds, metrics: None,
) -> AccuracyFigure:
    """Trains and draws; writes `accuracy.png` and the numbers behind it as `accuracy.json`."""
    figure = _plotting.new_figure(5.4 * len(epsilons), 4.6)
    data = compute(settings, epsilons=epsilons, bits=bits, progress=progress)
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for index, (axes, (epsilon, lines)) in enumerate(zip(panels, data.panels.items(), strict=True)):
        _panel(axes, lines, data.baseline)
        _plotting.tidy(
            axes,
            title=f"ε = {epsilon:g}",
            xlabel="MB sent by all clients",
            ylabel="test accuracy, %" if index == 0 else None,
        )
    figure.suptitle(
        f"Accuracy against communication: {settings.dataset}, {settings.rounds:,} rounds of {settings.cohort:,} "
        f"clients, δ = {_plotting.power(settings.delta)}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=_plotting.INK,
    )
    picture = _plotting.save(figure, out / "accuracy.png")
    numbers = out / "accuracy.json"
    written = replace(data, files=(picture, numbers))
    numbers.write_text(json.dumps(written.to_dict(), indent=2) + "\n", encoding="utf-8")
    return written


def _panel(axes: Axes, lines: Sequence[Line], baseline: Line) -> None:
    for index, line in enumerate(lines):
        colour = _plotting.SEQUENCE[index % len(_plotting.SEQUENCE)]
        label = f"k = {line.levels}, m = {line.trials}: {line.bits_per_coordinate:.3g} bits"
        _draw(axes, line, colour, label)
    _draw(axes, baseline, _plotting.INK, "no privacy: 32 bits")
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=9, labelcolor=_plotting.INK, loc="lower right")


def _draw(axes: Axes, line: Line, colour: str, label: str) -> None:
    percent = [100.0 * value for value in line.accuracy]
    axes.plot(line.megabytes, percent, color=colour, linewidth=1.8, label=label)
    axes.plot(line.megabytes[-1:], percent[-1:], "o", color=colour, markersize=5)
