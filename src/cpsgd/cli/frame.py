"""The frame of all command lines: layout of the help, errors and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App, Group, Parameter

from cpsgd.cli import output
from cpsgd.errors import CpsgdError


def new_app(name: str, help: str | None = None, version: Callable[[], str] | None = None) -> App:
    """Returns an empty command line, or a group of commands; without `help` it shows that of its only command."""
    return App(
        name=name,
        help=help,
        version=version,
        version_flags=("--version",) if version is not None else (),
        help_flags=("--help",),
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
    """Returns the message of an error in one sentence."""
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
