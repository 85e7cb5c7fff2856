"""Tables, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from cpsgd.reports._numbers import rounded_up as rounded_up


def console() -> Console:
    """Standard output as it is now, so that redirections are respected."""
    return Console(highlight=False)


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True, min_width=13)
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
