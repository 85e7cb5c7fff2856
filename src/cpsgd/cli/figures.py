"""`cpsgd figures`: the paper's figures, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from cpsgd.cli import _options, _output, _render, _training
from cpsgd.errors import CpsgdError, ParameterError

if TYPE_CHECKING:
    from cpsgd.learning import RoundMetrics

app = typer.Typer(help="Draw the paper's figures.", no_args_is_help=True)


@app.callback()
def figures() -> None:
    """Draw the paper's figures."""


@app.command("error-vs-epsilon")
def error_vs_epsilon(
    out: Annotated[Path, typer.Option(help="Folder to write the figure and its data into.")],
    dim: Annotated[int, typer.Option(help="d, coordinates of the query.")] = 1024,
    delta: Annotated[float, typer.Option(help="δ of the guarantees.")] = 1e-9,
    json: _options.Json = False,
) -> None:
    """The paper's Figure 1: error against ε of the Gaussian and Binomial mechanisms, by its theorem and by ours."""
    from cpsgd.reports.error_vs_epsilon import write_figure

    figure = write_figure(out, dim=dim, delta=delta)
    if json:
        _output.show_json(figure.to_dict())
        return
    _render.console().print(_render.facts([("written", escape(str(file))) for file in figure.files]))


@app.command("accuracy")
def accuracy(
    out: Annotated[Path, typer.Option(help="Folder to write the figure and its data into.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Which experiment: digits (minutes) or paper (a day; minutes on a GPU).", show_default="digits"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings from a TOML file, as for cpsgd train.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Another data set than the preset's.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.", show_default="the preset's")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients in a round.", show_default="the preset's")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="ε of a panel; may be given several times.", show_default="4 and 2")
    ] = None,
    bits: Annotated[
        list[float] | None,
        typer.Option(
            help="Bits a coordinate of a line; may be given several times.",
            show_default="2, 3, 4 and 8; by the paper's theorem 6, 8 and 10",
        ),
    ] = None,
    accounting: Annotated[
        str, typer.Option(help="By which proof k, m and X are chosen: ours, or the paper's.")
    ] = "ours",
    device: Annotated[str | None, typer.Option(help=_options.DEVICE_HELP, show_default="cpu")] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between looks at the test set.", show_default="1")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            help="First weights, cohorts and noise follow from it; may be given several times, for a mean and a range.",
            show_default="0",
        ),
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Draw again from accuracy.json in --out, without training.")
    ] = False,
    json: _options.Json = False,
) -> None:
    """The paper's Figure 2: accuracy against communication for several (k, m), ε = 4 and 2, and the baseline.

    One training for each ε, number of bits and seed, and one without privacy. Trainings live in --out under runs/: the
    same command again goes on where it was stopped.
    """
    from rich.console import Console

    from cpsgd.learning.settings import Settings, read_file
    from cpsgd.reports import accuracy as report

    if accounting not in ("ours", "paper"):
        raise ParameterError(f"Unknown accounting {accounting!r}. Known are ours and paper.")
    given: dict[str, Any] = {
        "preset": preset,
        "dataset": dataset,
        "rounds": rounds,
        "cohort": cohort,
        "device": device,
        "evaluate_every": evaluate_every,
    }
    given = {key: value for key, value in given.items() if value is not None}
    settings = Settings.of({**(read_file(config) if config is not None else {}), **given})
    with (
        _training.interrupts() as asked,
        _training.Display(Console(stderr=True, highlight=False)) as display,
    ):
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
                figure = report.redraw(out)
            else:
                display.say(_training.device_text(settings.device))
                figure = report.write_figure(
                    out,
                    settings,
                    epsilons=epsilon or report.EPSILONS,
                    accounting=cast(report.Accounting, accounting),
                    bits=bits,
                    seeds=seed or (settings.seed or 0,),
                    progress=show,
                )
        except ImportError as error:
            raise CpsgdError(str(error)) from None
        except KeyboardInterrupt:
            _output.complain("Interrupted; the same command goes on from here.", style="bold yellow")
            raise typer.Exit(130) from None
    if json:
        _output.show_json(figure.to_dict())
        return
    _render.console().print(_render.facts([("written", escape(str(file))) for file in figure.files]))
