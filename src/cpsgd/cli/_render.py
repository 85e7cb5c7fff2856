"""What the commands print: JSON for programs, tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, Context
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def console() -> Console:
    """Standard output as it is now, so that redirections and tests are respected."""
    return Console(highlight=False)


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on standard output; numbers that JSON has no name for become null."""
    typer.echo(json.dumps(_finite(data), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def grid(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> Table:
    """A table of numbers, right-aligned; a row that begins with an arrow is shown in bold."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", header_style="cyan")
    for row in rows:
        cells = list(row)
        table.add_row(*cells, style="bold" if cells[0].startswith("▸") else "")
    return table


def number(value: float, digits: int = 4) -> str:
    """Few digits, without an exponent where that reads well."""
    return f"{value:.{digits}g}"


def rounded_up(value: float, digits: int = 4) -> str:
    """The same for ε: never shown smaller than it is."""
    return f"{Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value).normalize():f}"
