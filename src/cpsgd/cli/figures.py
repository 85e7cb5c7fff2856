"""`cpsgd figures`: the paper's figures, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cpsgd.cli import _options, _output, _render

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
