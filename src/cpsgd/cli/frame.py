"""The frame of all command lines: layout of the help, errors and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve
from cyclopts import App, CycloptsError, CycloptsPanel, Group, MissingArgumentError, Parameter
from cyclopts.help import DefaultFormatter

from cpsgd.cli import output
from cpsgd.errors import CpsgdError

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_Function = TypeVar("_Function", bound=Callable[..., None])

HELP_FLAGS = ("--help", "--help-all")
"""The help that fits a screen, and the one with every option."""


@dataclass(frozen=True)
class ShortHelp:
    """Shows the options that most people need; `--help-all` shows all of them.

    Attributes:
        everyday: These options, with their dashes.
    """

    everyday: tuple[str, ...]

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Prints the line of usage."""
        DefaultFormatter().render_usage(console, options, usage)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Prints a panel of the help without the other options."""
        entries = [
            entry
            for entry in panel.entries
            if panel.format == "command" or entry.positional_label or {*entry.positive_names} & {*self.everyday}
        ]
        if entries:
            DefaultFormatter()(console, options, evolve(panel, entries=entries))


def new_app(
    name: str, help: str | None = None, version: Callable[[], str] | None = None, *, example: str | None = None
) -> App:
    """Returns an empty command line or group of commands; without `help` it shows its only command's help."""
    return App(
        name=name,
        help=help,
        help_prologue=None if example is None else f"Example: `{example}`",
        version=version,
        version_flags=("--version",) if version is not None else (),
        help_flags=HELP_FLAGS,
        error_formatter=_panel,
        # Joins the lines of a paragraph.
        help_format="markdown",
        group_parameters=Group("Options", sort_key=0),
        # Of an option that is given twice the last one counts, so that a script's options can be added to. Negative
        # flags are made for those switches only that are on by default (see `options.from_class`); that a switch is
        # off goes without saying.
        default_parameter=Parameter(
            negative=(), allow_repeating=True, show_default=lambda default: None if default is False else default
        ),
    )


def command(
    app: App, example: str, *, name: str | None = None, everyday: tuple[str, ...] = ()
) -> Callable[[_Function], _Function]:
    """Returns a decorator that adds a command to a group, with the example that its help begins with.

    Args:
        app: The group.
        example: A command line.
        name: The command's name, if not the function's.
        everyday: The options of its help; all of them if empty. The rest is at `--help-all`.
    """

    def add(function: _Function) -> _Function:
        formatter = short(everyday)
        app.command(
            function,
            name=name,
            help_prologue=f"Example: `{example}`",
            help_epilogue=f"All options: `{' '.join(example.split()[:3])} --help-all`." if formatter else None,
            help_formatter=formatter,
        )
        return function

    return add


def short(everyday: tuple[str, ...]) -> ShortHelp | None:
    """Returns the formatter of a help with these options alone; None, the usual one, if there are none."""
    return ShortHelp(everyday) if everyday and "--help-all" not in sys.argv else None


def _panel(error: CycloptsError) -> object:
    """Returns the panel of a mistake in the command line; options that are missing are named."""
    argument = error.argument
    if not isinstance(error, MissingArgumentError) or argument is None or argument.tokens or error.keyword:
        return CycloptsPanel(error)
    # A class of options is one argument, and each of its fields a child.
    children = [child for child in argument.children if child.required and not child.tokens] or [argument]
    names, command = ", ".join(child.name for child in children), " ".join(error.command_chain or ())
    return CycloptsPanel(f"Missing {names}: see cpsgd {command} --help.")


def launch(app: App, arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process. Errors that a user can fix are one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show ² or σ gets an escape instead of a failure.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(arguments)
    except BrokenPipeError:
        # Whoever read our output went away (`cpsgd ... | head`): ends quietly, also when Python flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CpsgdError, OSError, MemoryError) as error:
        output.complain(f"Error: {_reason(error)}")
        sys.exit(2)


def _reason(error: BaseException) -> str:
    """Returns an error's message as one sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError):
        return f"Not enough memory. {error}".strip()
    return str(error)


def whole(kind: Any, tokens: Sequence[Any]) -> int:
    """Reads a whole number; by itself cyclopts would take 2.5 for 2."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None


WHOLE = Parameter(converter=whole)
"""For options that are whole numbers."""
