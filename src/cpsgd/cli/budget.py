"""`cpsgd budget`: privacy budgets on a durable ledger."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cpsgd.cli import _files, _options, _output, _render
from cpsgd.cli.privacy import AdjacencyName
from cpsgd.errors import LedgerAccessError, LedgerError

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, Total

app = typer.Typer(help="Privacy budgets on a durable ledger.", no_args_is_help=True)

LedgerFile = Annotated[Path, typer.Argument(metavar="LEDGER", help="The ledger's file.")]
# Entries shown to people; --json has them all.
_SHOWN = 10


class UnitName(StrEnum):
    """What neighbours differ in."""

    client = "client"
    example = "example"


@app.command()
def create(
    ledger: LedgerFile,
    population: Annotated[str, typer.Option(help="Name of the people whose privacy is budgeted.")],
    epsilon: Annotated[float, typer.Option(help="ε that all rounds together may cost, for ever.")],
    delta: Annotated[float, typer.Option(help="δ of that guarantee.")],
    adjacency: Annotated[
        AdjacencyName, typer.Option(help="Which data sets are neighbours.")
    ] = AdjacencyName.replace_one,
    unit: Annotated[UnitName, typer.Option(help="What neighbours differ in.")] = UnitName.client,
    json: _options.Json = False,
) -> None:
    """Open a budget for a population; the file is made where there is none. Budgets are never changed."""
    from cpsgd.ledger import Budget, Ledger

    budget = Budget(population=population, epsilon=epsilon, delta=delta, adjacency=adjacency.value, unit=unit.value)
    book = Ledger(ledger)
    book.create(budget)
    head = str(book.head)
    if json:
        _output.show_json({"ledger": str(ledger), "budget": budget.to_dict(), "head": head})
        return
    rows = [
        ("budget", escape(f"ε = {epsilon:g} at δ = {delta:g} for {population}")),
        ("protects", f"one {budget.unit}, {budget.adjacency} neighbours"),
        ("ledger", escape(str(ledger))),
    ]
    _render.console().print(_render.facts(rows))
    _show_head(head)


@app.command()
def show(
    ledger: LedgerFile,
    population: Annotated[
        str | None, typer.Option(help="Only this population, with its rounds.", show_default="all")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what was spent over time; needs --population.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Show what is spent and what is left, by the accountant, with the theorem behind it."""
    book = _open(ledger)
    if plot is not None:
        if population is None:
            raise LedgerError("Missing --population: a plot is of one budget.")
        _files.check_output(plot, ledger)
    names = [budget.population for budget in book.budgets()] if population is None else [population]
    totals = [book.total(name) for name in names]
    if plot is not None and population is not None:
        from cpsgd.reports.spending import draw_spending

        draw_spending(book.budget(population), book.events(population), plot)
    if json:
        facts: dict[str, Any] = {
            "ledger": str(ledger),
            "head": str(book.head),
            "populations": [
                {**total.to_dict(), "entries": [entry.to_dict() for entry in book.events(total.population)]}
                for total in totals
            ],
        }
        if plot is not None:
            facts["plot"] = str(plot)
        _output.show_json(facts)
        return
    console = _render.console()
    for total in totals:
        console.print(_render.facts(_rows(total), title=escape(total.population)))
        if population is not None:
            _show_entries(book, population)
    if plot is not None:
        console.print(_render.facts([("written", escape(str(plot)))]))
    _show_head(str(book.head))


@app.command()
def verify(
    ledger: LedgerFile,
    head: Annotated[
        str | None, typer.Option(help="A head printed earlier and kept elsewhere: the chain must contain it.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Check every hash of the chain, and compute all totals anew.

    Finds records that were changed, removed or inserted. That the end was cut off, or the whole file written anew or
    replaced by an older copy, is found with --head only. The exit code is 1 if something is wrong.
    """
    try:
        found = _open(ledger).verify(head)
    except LedgerAccessError:
        raise
    except LedgerError as error:
        if json:
            _output.show_json({"ledger": str(ledger), "holds": False, "reason": str(error)})
        else:
            _output.complain(f"The ledger does not hold: {error}")
        raise typer.Exit(1) from None
    overspent = list(found.overspent)
    if json:
        _output.show_json(
            {
                "ledger": str(ledger),
                "holds": not overspent,
                "reason": f"More was spent than the budget allows: {overspent}." if overspent else None,
                "records": found.records,
                "head": str(found.head),
                "head_checked": head is not None,
                "populations": [total.to_dict() for total in found.totals],
            }
        )
    else:
        rows = [
            ("chain", f"{found.records:,} records, every hash holds"),
            ("known head", "contained" if head is not None else "none was given: a cut end would not be noticed"),
        ]
        for total in found.totals:
            over = "[bold red]more than the budget[/bold red] " if total.population in overspent else ""
            text = f"{over}ε = {_render.rounded_up(total.epsilon)} of {total.limit:g} at δ = {total.delta:g}"
            rows.append((escape(total.population), text))
        _render.console().print(_render.facts(rows))
        _show_head(str(found.head))
    if overspent:
        raise typer.Exit(1)


@app.command()
def export(
    ledger: LedgerFile,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the JSON goes.", show_default="standard output")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Write everything as JSON: all records with their hashes, and what follows from them."""
    if out is not None:
        _files.check_output(out, ledger)
    data = _open(ledger).export()
    if out is None:
        _output.show_json(data)
        return
    _files.write_bytes(out, (json_module.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
    facts = {"ledger": str(ledger), "out": str(out), "records": len(data["records"]), "head": data["head"]}
    if json:
        _output.show_json(facts)
        return
    _render.console().print(_render.facts([("records", f"{facts['records']:,}"), ("written", escape(str(out)))]))
    _show_head(data["head"])


def _open(path: Path) -> Ledger:
    from cpsgd.ledger import Ledger

    return Ledger(path)


def _show_head(head: str) -> None:
    """In one piece, however narrow the terminal: a head with a line break in it would not be found again."""
    _output.show([("head", head)])


def _rows(total: Total) -> list[tuple[str, str]]:
    unreleased = f", {total.unreleased:,} of them reserved and not released" if total.unreleased else ""
    return [
        (
            "spent",
            f"[bold]ε = {_render.rounded_up(total.epsilon)}[/bold] of {total.limit:g} at δ = {total.delta:g}, "
            f"{total.adjacency} neighbours, one {total.unit}",
        ),
        ("left", f"{total.left:.4g}"),
        ("rounds", f"{total.rounds:,}{unreleased}"),
        ("proved by", escape(total.citation)),
    ]


def _show_entries(book: Ledger, population: str) -> None:
    entries = book.events(population)
    rows = [
        (
            str(entry.number),
            entry.reserved_at[:19],
            escape(entry.event.run or "–"),
            str(entry.event.round),
            f"{entry.survivors:,}",
            str(entry.event.taking_part),
            "yes" if entry.released else "no",
            _render.rounded_up(entry.spent),
        )
        for entry in entries[-_SHOWN:]
    ]
    columns = ("entry", "reserved (UTC)", "run", "round", "messages", "participation", "released", "ε then")
    title = f"the last {_SHOWN} of {len(entries):,} rounds" if len(entries) > _SHOWN else None
    _render.console().print(_render.grid(columns, rows, title=title))
