"""`cpsgd`: the commands under one name, each imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import App, Parameter

from cpsgd.cli import output
from cpsgd.cli.commands import COMMANDS, GROUPS, RENAMED, TABLE, Command
from cpsgd.cli.frame import HELP_FLAGS, ShortHelp, launch, new_app

_COLUMNS = ("--columns", "--bounds", "--user", "--group-by")
_NAMED = (".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".feather", ".arrow")


def _version() -> str:
    from cpsgd import __version__

    return f"cpsgd {__version__}"


def command_line(*, full: bool = False) -> App:
    """Returns the app.

    Args:
        full: The help of a command shows its whole docstring and every option.
    """
    app = new_app(
        "cpsgd",
        "Statistics and machine learning on private data, over low-bandwidth connections.",
        _version,
        example=TABLE["mean"].example,
    )
    for index, (name, command) in enumerate(COMMANDS.items()):
        if name not in GROUPS:
            _add(app, ("cpsgd", name), command, index, full)
            continue
        group = new_app(name, command.line, example=command.example)
        for place, (inner, member) in enumerate(GROUPS[name][0].items()):
            _add(group, ("cpsgd", name, inner), member, place, full)
        group.sort_key = index
        app.command(group)
    for name in RENAMED:
        app.command(_old_spelling(name), name=name, show=False, help_flags=())
    app.command("cpsgd.cli.figures:app", name="figures", show=False, help="Draw pictures of the repository.")
    return app


def _add(app: App, path: tuple[str, ...], command: Command, index: int, full: bool) -> None:
    """Adds a command, with its example and the help that fits a screen."""
    place = f"cpsgd.cli.{command.place}"
    if place.endswith(":app"):
        app.command(place, name=path[-1], sort_key=index, help=command.line)
        return
    shortened = bool(command.everyday) and not full
    app.command(
        place,
        name=path[-1],
        sort_key=index,
        help=None if full else command.line,
        help_prologue=f"Example: `{command.example}`",
        help_epilogue=f"All options: `{' '.join(path)} --help-all`." if shortened else None,
        help_formatter=ShortHelp(command.everyday) if shortened else None,
    )


def _old_spelling(name: str) -> Callable[..., None]:
    """Returns a command for an old name, which prints the new name and runs that command."""

    def forward(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        group = "table" if name == "mean" and _is_of_columns(tokens) else "round" if name == "mean" else RENAMED[name]
        output.complain(f"`cpsgd {name}` is now `cpsgd {group} {name}`.")
        command_line(full=HELP_FLAGS[1] in tokens)([group, name, *tokens])

    return forward


def _is_of_columns(tokens: Sequence[str]) -> bool:
    """Returns whether these arguments of the old `cpsgd mean` name columns, in place of vectors."""
    return any(token.partition("=")[0] in _COLUMNS or token.lower().endswith(_NAMED) for token in tokens)


app = command_line()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the console script."""
    arguments = sys.argv[1:] if arguments is None else arguments
    launch(command_line(full=HELP_FLAGS[1] in arguments), arguments)
