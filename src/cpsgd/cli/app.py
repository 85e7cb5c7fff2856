"""`cpsgd`: the commands under one name, and what becomes of their errors."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cpsgd.cli import (
    _output,
    aggregate,
    audit,
    budget,
    data,
    encode,
    figures,
    identity,
    kmeans,
    mean,
    pca,
    plan,
    privacy,
    protocol,
    train,
)
from cpsgd.errors import CpsgdError


class _Group(TyperGroup):
    """Turns the errors a person can do something about into one line, for every command and sub-command."""

    # The context's class belongs to click, or to typer itself since it carries its own copy of click.
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read our output went away (`cpsgd ... | head`): ends quietly, as typer does it.
            raise
        except (CpsgdError, OSError, MemoryError) as error:
            _output.complain(f"Error: {_output.reason(error)}")
            raise typer.Exit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from cpsgd import __version__

        typer.echo(f"cpsgd {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="cpsgd",
    cls=_Group,
    # Joins the lines of a paragraph.
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    # A traceback must never show local variables: they hold people's data.
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Private means of many people's vectors, over thin links."""


app.command("train")(train.run)
app.command("plan")(plan.run)
app.add_typer(privacy.app, name="privacy")
app.command("mean")(mean.run)
app.command("kmeans")(kmeans.run)
app.command("pca")(pca.run)
app.command("protocol")(protocol.run)
app.command("encode")(encode.run)
app.command("aggregate")(aggregate.run)
app.command("audit")(audit.run)
app.add_typer(budget.app, name="budget")
app.add_typer(identity.app, name="identity")
app.add_typer(data.app, name="data")
app.add_typer(figures.app, name="figures")


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show ² or σ gets an escape instead of a failure.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="cpsgd")
