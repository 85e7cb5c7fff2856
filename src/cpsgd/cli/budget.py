"""`cpsgd budget`: privacy budgets on a durable ledger."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import new_app
from cpsgd.errors import LedgerAccessError, LedgerError
from cpsgd.ledger import Budget, Ledger
from cpsgd.reports.numbers import rounded_down, rounded_up

if TYPE_CHECKING:
    from cpsgd.ledger import Total

    BudgetFields = Any  # made when the program runs
else:
    BudgetFields = options.from_class(Budget)

app = new_app("budget")

LedgerFile = Annotated[Path, Parameter(name="LEDGER", help="The ledger's file.")]
# Entries shown to people; --json has them all.
_SHOWN = 10


@app.command
def create(ledger: LedgerFile, /, *, budget: Annotated[BudgetFields, options.FLAT], json: options.Json = False) -> None:
    """Open a budget for a population; the file is made where there is none. Budgets are never changed."""
    opened = Budget(**vars(budget))
    book = Ledger(ledger)
    book.create(opened)
    head = str(book.head)
    if json:
        output.show_json({"ledger": ledger, "budget": opened.to_dict(), "head": head})
        return
    rows = [
        ("budget", escape(f"ε = {rounded_up(opened.epsilon)} at δ = {opened.delta:g} for {opened.population}")),
        ("protects", f"one {opened.unit}, {opened.adjacency} neighbours"),
        ("ledger", escape(str(ledger))),
    ]
    output.console().print(output.facts(rows))
    _show_head(head)


@app.command
def show(
    ledger: LedgerFile,
    /,
    *,
    population: Annotated[
        str | None, Parameter(help="Only this population, with its rounds; all if not given.")
    ] = None,
    plot: Annotated[
        Path | None, Parameter(metavar="FILE", help="Draw what was spent over time; needs --population.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show what is spent and what is left, by the accountant, with the theorem behind it."""
    book = Ledger(ledger)
    if plot is not None:
        if population is None:
            raise LedgerError("Missing --population: a plot is of one budget.")
        _files.check_picture(plot)
        _files.check_output(plot, ledger)
    names = [budget.population for budget in book.budgets()] if population is None else [population]
    totals = [book.total(name) for name in names]
    if plot is not None and population is not None:
        from cpsgd.reports.pictures import draw_spending

        draw_spending(book.budget(population), book.events(population), plot)
    if json:
        facts: dict[str, Any] = {
            "ledger": ledger,
            "head": str(book.head),
            "populations": [
                {**total.to_dict(), "entries": [entry.to_dict() for entry in book.events(total.population)]}
                for total in totals
            ],
        }
        if plot is not None:
            facts["plot"] = plot
        output.show_json(facts)
        return
    console = output.console()
    for total in totals:
        console.print(output.facts(_rows(total), title=escape(total.population)))
        if population is not None:
            _show_entries(book, population, total.rounds)
    if plot is not None:
        console.print(output.facts([("written", escape(str(plot)))]))
    _show_head(str(book.head))


@app.command
def verify(
    ledger: LedgerFile,
    /,
    *,
    head: Annotated[
        str | None, Parameter(help="A head printed earlier and kept elsewhere: the chain must contain it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Read all records, check every hash of the chain, every snapshot and the index, and compute all totals anew.

    Other commands read a long ledger from its last snapshot on. Finds records that were changed, removed or inserted.
    That the end was cut off, or the whole file written anew or replaced by an older copy, is found with --head only.
    The exit code is 1 if something is wrong.
    """
    try:
        found = Ledger(ledger).verify(head)
    except LedgerAccessError:
        raise
    except LedgerError as error:
        if json:
            output.show_json({"ledger": ledger, "holds": False, "reason": str(error)})
        else:
            output.complain(f"The ledger does not hold: {error}")
        raise SystemExit(1) from None
    overspent = list(found.overspent)
    if json:
        output.show_json(
            {
                "ledger": ledger,
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
            text = f"{over}ε = {rounded_up(total.epsilon)} of {rounded_up(total.limit)} at δ = {total.delta:g}"
            rows.append((escape(total.population), text))
        output.console().print(output.facts(rows))
        _show_head(str(found.head))
    if overspent:
        raise SystemExit(1)


@app.command
def export(
    ledger: LedgerFile,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(metavar="FILE", help="Where the JSON goes; standard output if not given.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write everything as JSON: all records with their hashes, and what follows from them."""
    if out is not None:
        _files.check_output(out, ledger)
    data = Ledger(ledger).export()
    if out is None:
        output.show_json(data)
        return
    _files.write_bytes(out, (json_module.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
    facts = {"ledger": ledger, "out": out, "records": len(data["records"]), "head": data["head"]}
    if json:
        output.show_json(facts)
        return
    output.console().print(output.facts([("records", f"{facts['records']:,}"), ("written", escape(str(out)))]))
    _show_head(data["head"])


@app.command
def repair(ledger: LedgerFile, /, *, json: options.Json = False) -> None:
    """Check every hash of the chain, and make the index and the snapshot beside the records anew.

    Records are not changed; a new snapshot is added to them.
    """
    head = str(Ledger(ledger).repair())
    if json:
        output.show_json({"ledger": ledger, "head": head})
        return
    output.console().print(output.facts([("repaired", escape(str(ledger)))]))
    _show_head(head)


def _show_head(head: str) -> None:
    """In one piece, however narrow the terminal: a head with a line break in it would not be found again."""
    output.show([("head", head)])


def _rows(total: Total) -> list[tuple[str, str]]:
    unreleased = f", {total.unreleased:,} of them reserved and not released" if total.unreleased else ""
    return [
        (
            "spent",
            f"[bold]ε = {rounded_up(total.epsilon)}[/bold] of {rounded_up(total.limit)} at δ = {total.delta:g}, "
            f"{total.adjacency} neighbours, one {total.unit}",
        ),
        ("left", rounded_down(total.left)),
        ("rounds", f"{total.rounds:,}{unreleased}"),
        ("proved by", escape(total.citation)),
        *(("assuming", escape(text)) for text in total.assumptions),
    ]


def _show_entries(book: Ledger, population: str, count: int) -> None:
    rows = [
        (
            str(entry.number),
            entry.reserved_at[:19].replace("T", " "),
            escape(entry.event.run or "–"),
            str(entry.event.round),
            f"{entry.survivors:,}",
            str(entry.event.taking_part),
            "yes" if entry.released else "no",
            rounded_up(entry.spent),
        )
        for entry in book.events(population, last=_SHOWN)
    ]
    columns = ("entry", "reserved (UTC)", "run", "round", "messages", "who", "released", "ε then")
    title = f"the last {_SHOWN} of {count:,} rounds" if count > _SHOWN else None
    whole = set(columns) - {"run", "who"}
    output.console().print(output.grid(columns, rows, title=title, whole=whole))
