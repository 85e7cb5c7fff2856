"""The paper's Figure 2: accuracy against communication and rounds, for several numbers of bits and baselines.

For every ε and number of bits the planner picks a mechanism and its parameters, or the paper's own theorem and range
do; training runs with each, from the same first weights and cohorts. A line follows one training, or the mean of
several with different seeds: bytes sent by all clients so far, and accuracy on the test set.

    python reproduction/accuracy.py --out DIR
"""

from __future__ import annotations

import csv
import io
import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from cpsgd._numbers import power
from cpsgd.cli import options, output
from cpsgd.cli.frame import launch, new_app
from cpsgd.errors import CpsgdError, DataError, ParameterError
from cpsgd.learning.settings import Settings, read_file
from cpsgd.reports import live, plotting
from reproduction.paper_design import paper_design

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cpsgd.learning import RoundMetrics

Accounting = Literal["ours", "paper"]
"""The proof that chooses k, m and X: the planner's certificates, or the paper's Theorem 1 and X^max."""

EPSILONS = (4.0, 2.0)
BITS: dict[Accounting, tuple[float, ...]] = {"ours": (2.0, 3.0, 4.0, 8.0), "paper": (6.0, 8.0, 10.0)}
PICTURE, NUMBERS, SUMMARY, RUNS = "accuracy.png", "accuracy.json", "summary.csv", "runs"

_WHICH = ("panel_epsilon", "method", "epsilon", "k", "m", "bits_per_coordinate")
_ENDS = ("accuracy_mean", "accuracy_min", "accuracy_max", "below_gaussian", "standard_error", "seconds", "parameters")
_PROOFS: dict[Accounting, str] = {"ours": "planned by our accounting", "paper": "k, m and X by the paper's theorem"}
_GAUSSIAN = "gaussian"

Progress = Callable[[str, int, "RoundMetrics"], None]
"""Function of a training's name, its number of rounds and a round's metrics."""


@dataclass(frozen=True)
class Line:
    """One way of training.

    Attributes:
        method: Name of the mechanism, or "no privacy".
        epsilon: ε that is proved for it, of several seeds the largest; None without privacy.
        levels: k; None for floats.
        trials: m, coins per coordinate; None where there are no such.
        bits_per_coordinate: What a client sends for a parameter.
        rounds: Rounds done at each evaluation.
        megabytes: Sent by all clients until then.
        accuracy: On the test set, then; a row a seed.
        seconds: That the training took; one for each seed.
        parameters: The mechanism's own, in words.
    """

    method: str
    epsilon: float | None
    levels: int | None
    trials: int | None
    bits_per_coordinate: float
    rounds: tuple[int, ...]
    megabytes: tuple[float, ...]
    accuracy: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    parameters: str = ""

    @property
    def ends(self) -> tuple[float, ...]:
        """Accuracy after the last round, one per seed."""
        return tuple(values[-1] for values in self.accuracy)

    @property
    def label(self) -> str:
        """Label in the picture."""
        bits = f"{self.bits_per_coordinate:.3g} bit{'s' if self.bits_per_coordinate > 1.0 else ''}"
        if self.method == _GAUSSIAN:
            return f"Gaussian noise: {bits}"
        if self.method == "binomial":
            return f"k = {self.levels}, m = {self.trials}: {bits}"
        return f"{self.method.replace('-', ' ')}: {bits}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the line that `asdict` made a dictionary of."""
        lists = {name: tuple(values[name]) for name in ("rounds", "megabytes", "seconds")}
        return cls(**{**values, **lists, "accuracy": tuple(tuple(row) for row in values["accuracy"])})


@dataclass(frozen=True)
class AccuracyFigure:
    """The figure's data and the files that were written; `panels` are keyed by ε."""

    settings: dict[str, Any]
    accounting: Accounting
    seeds: tuple[int, ...]
    baseline: Line
    panels: dict[float, tuple[Line, ...]]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {
            "settings": self.settings,
            "accounting": self.accounting,
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
        """Returns the figure that `to_dict` made a dictionary of."""
        return cls(
            settings=dict(values["settings"]),
            accounting="paper" if values["accounting"] == "paper" else "ours",
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
    accounting: Accounting,
    epsilons: Sequence[float],
    bits: Sequence[float],
    seeds: Sequence[int],
    runs: Path,
    progress: Progress,
) -> AccuracyFigure:
    """Trains without privacy, and for every ε with each number of bits and with Gaussian noise, once for every seed.

    Each training has a folder of its own under `runs`. What is there already is not trained again, and what was
    interrupted goes on.

    Args:
        settings: What is trained; its ε, bits, seed and baselines are replaced.
        accounting: By which proof the protocols are chosen. Gaussian noise is always calibrated exactly.
        epsilons: One panel each.
        bits: One line each.
        seeds: One training of every line each.
        runs: Folder for the trainings.
        progress: Called with a training's name, its number of rounds and each round's metrics.
    """
    from cpsgd.learning.datasets import load
    from cpsgd.learning.experiment import NO_PRIVACY, PRIVATE, Experiment

    def train(experiment: Experiment, which: str, name: str, folder: str) -> Line:
        histories, spent, seconds = [], [], []
        for seed in seeds:
            trainer = experiment.with_seed(seed).trainer(which, runs / f"{folder}-seed-{seed}", resume=True)
            label = name if len(seeds) == 1 else f"{name}, seed {seed}"
            for metrics in trainer.run():
                progress(label, trainer.rounds, metrics)
            histories.append([metrics for metrics in trainer.history if metrics.accuracy is not None])
            seconds.append(sum(metrics.seconds for metrics in trainer.history))
            if (guarantee := trainer.guarantee()) is not None:
                spent.append(guarantee.epsilon)
        if len({tuple(metrics.round for metrics in history) for history in histories}) > 1:
            raise ParameterError(
                f"Trainings of “{name}” looked at the test set after other rounds than before: use the same "
                "evaluate_every for all seeds, or another folder."
            )
        protocol = experiment.protocol if which == PRIVATE else None
        mechanism = None if protocol is None else protocol.mechanism
        return Line(
            method=which if mechanism is None else mechanism.name,
            epsilon=max(spent, default=None),
            levels=None if mechanism is None else mechanism.levels,
            trials=getattr(mechanism, "trials", getattr(mechanism, "coins", None)),
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            rounds=tuple(metrics.round + 1 for metrics in histories[0]),
            megabytes=tuple(metrics.bytes_total / 1e6 for metrics in histories[0]),
            accuracy=tuple(tuple(metrics.accuracy or 0.0 for metrics in history) for history in histories),
            seconds=tuple(seconds),
            parameters="" if mechanism is None else mechanism.describe(),
        )

    if settings.explicit:
        raise ParameterError(
            "The figure's protocols are planned for its ε and bits: leave levels, trials and range out."
        )
    # All are planned before any is trained, so that an impossible plan is refused at once.
    dataset = load(settings.dataset, clients=settings.clients)
    known = Experiment(replace(settings, epsilon=epsilons[0], baselines=True), dataset)

    def designed(epsilon: float, b: float) -> Experiment:
        asked = replace(settings, epsilon=epsilon, bits=b, baselines=True)
        if accounting == "ours":
            return Experiment(asked, dataset)
        if b != int(b):
            raise ParameterError(f"By the paper's theorem k + m is a power of two: give whole bits, not {b:g}.")
        design = paper_design(settings.cohort, known.dim, epsilon, settings.delta, settings.clip_norm, bits=int(b))
        parameters: dict[str, Any] = {
            "levels": design.levels,
            "trials": design.trials,
            "range": design.coordinate_range,
        }
        return Experiment(replace(asked, bits=None, baselines=False, **parameters), dataset)

    planned = {(epsilon, b): designed(epsilon, b) for epsilon in epsilons for b in bits}
    gaussian = {
        epsilon: planned[epsilon, bits[0]]
        if accounting == "ours"
        else Experiment(replace(settings, epsilon=epsilon, baselines=True), dataset)
        for epsilon in epsilons
    }
    baseline = train(known, NO_PRIVACY, NO_PRIVACY, "no-privacy")
    panels = {
        epsilon: (
            *(
                train(planned[epsilon, b], PRIVATE, f"ε = {epsilon:g}, {b:g} bits", f"epsilon-{epsilon:g}-bits-{b:g}")
                for b in bits
            ),
            train(gaussian[epsilon], _GAUSSIAN, f"ε = {epsilon:g}, gaussian", f"epsilon-{epsilon:g}-gaussian"),
        )
        for epsilon in epsilons
    }
    return AccuracyFigure(settings.to_dict(), accounting, tuple(seeds), baseline, panels)


def write_figure(
    out: Path,
    settings: Settings,
    *,
    accounting: Accounting = "ours",
    epsilons: Sequence[float] = EPSILONS,
    bits: Sequence[float] | None = None,
    seeds: Sequence[int] = (0,),
    draw: bool = True,
    progress: Progress = lambda name, rounds, metrics: None,
) -> AccuracyFigure:
    """Trains and draws: `accuracy.png`, the numbers behind it (`accuracy.json`), and `summary.csv`."""
    if draw:
        plotting.new_figure(1.0, 1.0)  # raises where nothing could be drawn, before a long run
    found = compute(
        settings,
        accounting=accounting,
        epsilons=epsilons,
        bits=bits or BITS[accounting],
        seeds=seeds,
        runs=out / RUNS,
        progress=progress,
    )
    return _write(out, found, draw=draw)


def drawn_again(out: Path) -> AccuracyFigure:
    """Draws again from the numbers in a folder, without any training.

    Raises:
        DataError: There is no `accuracy.json` of this release.
    """
    path = out / NUMBERS
    try:
        return _write(out, AccuracyFigure.from_dict(json_module.loads(path.read_text(encoding="utf-8"))), draw=True)
    except FileNotFoundError:
        raise DataError(f"There is no {path} to draw from.") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} does not hold the numbers of this figure.") from None


def _write(out: Path, data: AccuracyFigure, *, draw: bool) -> AccuracyFigure:
    files = tuple(out / name for name in (*((PICTURE,) if draw else ()), NUMBERS, SUMMARY))
    written = replace(data, files=files)
    (out / NUMBERS).write_text(json_module.dumps(written.to_dict(), indent=2) + "\n", encoding="utf-8")
    (out / SUMMARY).write_text(_summary(data), encoding="utf-8")
    if draw:
        plotting.save(_picture(data), out / PICTURE)
    return written


def _picture(data: AccuracyFigure) -> Figure:
    settings = data.settings
    figure = plotting.new_figure(5.4 * len(data.panels), 8.4)
    grid = figure.subplots(2, len(data.panels), sharey=True, squeeze=False)
    for index, (epsilon, lines) in enumerate(data.panels.items()):
        for row, against in enumerate(("megabytes", "rounds")):
            _panel(grid[row][index], lines, data.baseline, against)
            plotting.tidy(
                grid[row][index],
                title=f"ε = {epsilon:g}" if row == 0 else "",
                xlabel="MB sent by all clients" if row == 0 else "rounds",
                ylabel="test accuracy, %" if index == 0 else None,
            )
    seeds = "" if len(data.seeds) == 1 else f"; mean and range of {len(data.seeds)} seeds"
    figure.suptitle(
        f"{settings['dataset']}, {settings['rounds']:,} rounds of {settings['cohort']:,} clients, "
        f"δ = {power(settings['delta'])}; {_PROOFS[data.accounting]}{seeds}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=plotting.INK,
    )
    return figure


def _summary(data: AccuracyFigure) -> str:
    """Returns a row per line: final accuracy, its distance below Gaussian noise, and seconds per training."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_WHICH, "seeds", *_ENDS])
    gaussian = {
        f"{epsilon:g}": line for epsilon, lines in data.panels.items() for line in lines if line.method == _GAUSSIAN
    }
    for which, line in _lines(data):
        ends = line.ends
        below = _below(line, gaussian[which[0]]) if which[0] in gaussian else (None, None)
        seconds = fmean(line.seconds)
        rows.writerow([*which, len(ends), fmean(ends), min(ends), max(ends), *below, seconds, line.parameters])
    return text.getvalue()


def _below(line: Line, gaussian: Line) -> tuple[float, float | None]:
    """Returns the mean difference of two lines' final accuracies, and its standard error if there are several seeds.

    Trainings of one seed have their first weights and cohorts in common.
    """
    gaps = [other - own for own, other in zip(line.ends, gaussian.ends, strict=True)]
    return fmean(gaps), stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None


def _lines(data: AccuracyFigure) -> list[tuple[list[Any], Line]]:
    """Returns the lines with the cells that identify them; the csv module leaves cells of None empty."""
    panels = [(None, data.baseline)] + [(f"{e:g}", line) for e, lines in data.panels.items() for line in lines]
    return [
        ([panel, line.method, line.epsilon, line.levels, line.trials, line.bits_per_coordinate], line)
        for panel, line in panels
    ]


def _panel(axes: Axes, lines: Sequence[Line], baseline: Line, against: str) -> None:
    planned = [line for line in lines if line.method != _GAUSSIAN]
    for index, line in enumerate(planned):
        _draw(axes, line, against, plotting.SEQUENCE[index % len(plotting.SEQUENCE)], line.label)
    for line in lines:
        if line.method == _GAUSSIAN:
            _draw(axes, line, against, plotting.MUTED, line.label)
    _draw(axes, baseline, against, plotting.INK, "no privacy: 32 bits")
    if against == "megabytes":
        axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=9, labelcolor=plotting.INK, loc="lower right")


def _draw(axes: Axes, line: Line, against: str, colour: str, label: str) -> None:
    places = line.megabytes if against == "megabytes" else line.rounds
    percent = [tuple(100.0 * value for value in values) for values in zip(*line.accuracy, strict=True)]
    mean = [fmean(values) for values in percent]
    axes.plot(places, mean, color=colour, linewidth=1.8, label=label)
    axes.plot(places[-1:], mean[-1:], "o", color=colour, markersize=5)
    if len(line.accuracy) > 1:
        low, high = [min(values) for values in percent], [max(values) for values in percent]
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0.0)


app = new_app("accuracy.py")

_OPTIONS = "preset", "dataset", "rounds", "cohort", "mechanism", "device", "evaluate_every"
_GIVEN = options.from_class(Settings, *_OPTIONS, unset=True)
_NOTHING: Any = _GIVEN()
if TYPE_CHECKING:
    Given = Any  # made when the program runs
else:
    Given = Annotated[_GIVEN, Parameter(name="*", group="Settings")]


@app.default
def main(
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="Where the figure and its data go.")],
    given: Given = _NOTHING,
    config: Annotated[
        Path | None, Parameter(metavar="FILE", help="Settings from a TOML file, as for cpsgd train.")
    ] = None,
    epsilon: Annotated[
        list[float] | None, Parameter(help="ε of a panel; may be given several times. 4 and 2 if not given.")
    ] = None,
    bits: Annotated[
        list[float] | None,
        Parameter(
            help="Bits per coordinate of a line; may be given several times. If not given 2, 3, 4 and 8; by the "
            "paper's theorem 6, 8 and 10."
        ),
    ] = None,
    accounting: Annotated[
        Accounting, Parameter(help="By which proof k, m and X are chosen: ours, or the paper's.")
    ] = "ours",
    seed: Annotated[
        list[int] | None,
        Parameter(
            help="First weights, cohorts and noise follow from it; may be given several times, for a mean and a range. "
            "0 if not given."
        ),
    ] = None,
    no_draw: Annotated[bool, Parameter(help="Numbers only, without matplotlib; --redraw draws them later.")] = False,
    redraw: Annotated[bool, Parameter(help="Draw again from accuracy.json in --out, without training.")] = False,
    json: options.Json = False,
) -> None:
    """Draws the paper's Figure 2: accuracy against communication for several numbers of bits and ε, and the baseline.

    One training for each ε, number of bits and seed, and one without privacy: minutes for the preset digits, a day for
    the preset paper, or minutes on a GPU. Trainings live in --out under runs/: the same command again goes on where it
    was stopped.
    """
    settings = Settings.of({**(read_file(config) if config is not None else {}), **options.given(given)})
    with live.interrupts() as asked, live.Display(Console(stderr=True, highlight=False)) as display:
        current: list[str] = []

        def show(name: str, rounds: int, metrics: RoundMetrics) -> None:
            if current != [name]:
                current[:] = [name]
                display.start(name, rounds, metrics.round)
            display.show(metrics)
            if asked():
                raise KeyboardInterrupt

        try:
            if redraw:
                figure = drawn_again(out)
            else:
                display.say(live.device_text(settings.device))
                figure = write_figure(
                    out,
                    settings,
                    epsilons=epsilon or EPSILONS,
                    accounting=accounting,
                    bits=bits,
                    seeds=seed or (settings.seed or 0,),
                    draw=not no_draw,
                    progress=show,
                )
        except ImportError as error:
            raise CpsgdError(str(error)) from None
        except KeyboardInterrupt:
            output.complain("Interrupted; the same command goes on from here.", style="bold yellow")
            raise SystemExit(130) from None
    if json:
        output.show_json(figure.to_dict())
        return
    output.console().print(output.facts([("written", escape(str(file))) for file in figure.files]))


if __name__ == "__main__":
    launch(app)
