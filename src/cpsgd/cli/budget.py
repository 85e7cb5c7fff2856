"""`cpsgd budget`: privacy budgets on a durable ledger."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd._durable import write_file
from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import new_app
from cpsgd.errors import LedgerAccessError, LedgerError, ParameterError, ReportError
from cpsgd.ledger import Budget, Ledger, Witness
from cpsgd.ledger import check_report as verify_report
from cpsgd.reports.numbers import rounded_down, rounded_up

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from cpsgd.ledger import Total

    BudgetFields = Any  # made when the program runs
else:
    BudgetFields = options.from_class(Budget)

app = new_app("budget")

Witnesses = Annotated[
    Path | None,
    Parameter(
        name="--witness",
        metavar="FILE",
        help="A file elsewhere that keeps the ledger's heads: the ledger must contain them, and a new one is added.",
    ),
]
Signers = Annotated[
    Path | None,
    Parameter(metavar="FILE", help="Public keys, one per line as in KEYFILE.pub: one of them must have signed."),
]
Identity = Annotated[
    Path | None, Parameter(metavar="KEYFILE", help="Sign with this identity; see `cpsgd identity create`.")
]
LedgerFile = Annotated[Path, Parameter(name="LEDGER", help="The ledger's file.")]
_LONGEST_REPORT = 1 << 26
_CHOICE = {
    "planned": "planned: not chosen by looking at earlier results",
    "adaptive": "adaptive: chosen in any way, also by earlier results",
}
# Entries shown to people; --json has them all.
_SHOWN = 10


@app.command
def create(
    ledger: LedgerFile,
    /,
    *,
    budget: Annotated[BudgetFields, options.FLAT],
    witness: Witnesses = None,
    json: options.Json = False,
) -> None:
    """Open a budget for a population; the file is made where there is none. Budgets are never changed."""
    opened = Budget(**vars(budget))
    book = Ledger(ledger, witness=witness)
    book.create(opened)
    head = str(book.head)
    if json:
        output.show_json({"ledger": ledger, "budget": opened.to_dict(), "head": head})
        return
    rows = [
        ("budget", escape(f"ε = {rounded_up(opened.epsilon)} at δ = {opened.delta:g} for {opened.population}")),
        ("protects", f"one {opened.unit}, {opened.adjacency} neighbours"),
        ("rounds", _CHOICE[opened.accounting.partition("-")[0]]),
        *_policy(opened),
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
        console.print(output.facts([*_rows(total), *_more(book, total)], title=escape(total.population)))
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
    witness: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Lines of a witness, kept elsewhere: the chain must contain all their heads."),
    ] = None,
    signers: Signers = None,
    json: options.Json = False,
) -> None:
    """Read all records, check every hash of the chain, every snapshot and the index, and compute all totals anew.

    Other commands read a long ledger from its last snapshot on. Finds records that were changed, removed or inserted.
    That the end was cut off, or the whole file written anew or replaced by an older copy, is found with --head or
    --witness only. The exit code is 1 if something is wrong.
    """
    if signers is not None and witness is None:
        raise ParameterError("--signers say who signed the lines of a witness: give --witness, too.")
    keys = _keys(signers)
    try:
        found = Ledger(ledger).verify(head, witness=witness, signers=keys)
    except LedgerAccessError:
        raise
    except LedgerError as error:
        if json:
            output.show_json({"ledger": ledger, "holds": False, "reason": str(error)})
        else:
            output.complain(f"The ledger does not hold: {error}")
        raise SystemExit(1) from None
    overspent, known = list(found.overspent), head is not None or witness is not None
    if json:
        output.show_json(
            {
                "ledger": ledger,
                "holds": not overspent,
                "reason": f"More was spent than the budget allows: {overspent}." if overspent else None,
                "records": found.records,
                "head": str(found.head),
                "head_checked": known,
                "populations": [total.to_dict() for total in found.totals],
            }
        )
    else:
        rows = [
            ("chain", f"{found.records:,} records, every hash holds"),
            ("known head", "contained" if known else "none was given: a cut end would not be noticed"),
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
    write_file(out, (json_module.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
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


@app.command
def abandon(
    ledger: LedgerFile,
    entry: Annotated[int, Parameter(name="ENTRY", help="Number of the entry, as `cpsgd budget show` has it.")],
    /,
    *,
    reason: Annotated[str, Parameter(help="Why nothing of the round was shown to anybody; kept on the ledger.")],
    witness: Witnesses = None,
    json: options.Json = False,
) -> None:
    """Give up a round that was reserved and of which nothing was shown to anybody: it costs nothing any more.

    The ledger takes your word for it. A round that was released cannot be given up.
    """
    book = Ledger(ledger, witness=witness)
    gone = book.abandon(entry, reason)
    total, head = book.total(gone.population), str(book.head)
    if json:
        output.show_json({"ledger": ledger, "entry": gone.to_dict(), "budget": total.to_dict(), "head": head})
        return
    output.console().print(output.facts([("given up", f"entry {entry}"), *_rows(total)]))
    _show_head(head)


@app.command(name="witness")
def show_line(
    ledger: LedgerFile,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(metavar="FILE", help="Append the line to this file, elsewhere, and print it, too.")
    ] = None,
    identity: Identity = None,
    json: options.Json = False,
) -> None:
    """Print the ledger's head as a line to be kept elsewhere, signed if you like, for `verify --witness`.

    With --witness FILE other commands add such lines to FILE by themselves, and refuse a ledger that does not contain
    the newest head in it.
    """
    if out is not None:
        _files.check_output(out, ledger)
    seen = Ledger(ledger, witness=out if out is not None and out.exists() else None).seen(_identity(identity))
    if out is not None:
        Witness(out).append(seen)
    if json:
        output.show_json({"ledger": ledger, "head": str(seen.head), "line": str(seen), "out": out})
    else:
        print(seen)


@app.command
def report(
    ledger: LedgerFile,
    /,
    *,
    identity: Annotated[Path, Parameter(metavar="KEYFILE", help="Sign with this identity.")],
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the report goes, as JSON.")],
    json: options.Json = False,
) -> None:
    """Write a signed report of what is spent, which somebody outside can verify without the ledger or the data.

    It holds budgets, numbers of rounds of each kind, and the head; no names of runs, and no labels.
    """
    _files.check_output(out, ledger)
    signer = _identity(identity)
    assert signer is not None
    data = Ledger(ledger).report(signer)
    write_file(out, (json_module.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
    if json:
        output.show_json({"ledger": ledger, "out": out, "head": data["head"], "key": data["key"]})
        return
    output.console().print(output.facts([("written", escape(str(out)))]))
    _show_head(data["head"])


@app.command
def check_report(
    file: Annotated[Path, Parameter(name="REPORT", help="What `cpsgd budget report` wrote.")],
    /,
    *,
    signers: Signers = None,
    json: options.Json = False,
) -> None:
    """Verify a report: its signature, and that every ε in it follows from the rounds it names.

    Neither the ledger nor the data is needed. The exit code is 1 if something is wrong.
    """
    keys = _keys(signers)
    try:
        found = verify_report(_read_report(file), keys)
    except ReportError as error:
        if json:
            output.show_json({"report": file, "holds": False, "reason": str(error)})
        else:
            output.complain(f"The report does not hold: {error}")
        raise SystemExit(1) from None
    if json:
        output.show_json(
            {
                "report": file,
                "holds": True,
                "reason": None,
                "head": str(found.head),
                "time": found.time,
                "signer_checked": keys is not None,
                "populations": [total.to_dict() for total in found.totals],
            }
        )
        return
    console = output.console()
    signed = "by a key that was given" if keys is not None else "but by whom was not checked: give --signers"
    console.print(output.facts([("signed", signed), ("made", escape(found.time))]))
    for total in found.totals:
        console.print(output.facts(_rows(total), title=escape(total.population)))
    _show_head(str(found.head))


def _read_report(path: Path) -> object:
    with path.open("rb") as file:
        text = file.read(_LONGEST_REPORT + 1)
    if len(text) > _LONGEST_REPORT:
        raise ReportError("It is too long to be a report.")
    try:
        return json_module.loads(text)
    except (ValueError, RecursionError):
        raise ReportError("It is not JSON.") from None


def _identity(path: Path | None) -> Ed25519PrivateKey | None:
    if path is None:
        return None
    from cpsgd.secagg import read_identity

    return read_identity(path)


def _keys(path: Path | None) -> frozenset[bytes] | None:
    if path is None:
        return None
    from cpsgd.secagg.identity import read_roster

    return read_roster(path)


def _more(book: Ledger, total: Total) -> list[tuple[str, str]]:
    """What else there is to say of a budget."""
    budget = book.budget(total.population)
    rows = _policy(budget)
    if budget.renews:
        over = book.lifetime(total.population)
        cost = f"ε = {rounded_up(over.epsilon)}, δ = {over.delta:g}"
        rows.append(("all periods", f"{cost} for who was in all {over.rounds:,} rounds"))
    if budget.accounting != "planned":
        rows.append(("chosen", _CHOICE["adaptive"]))
    return rows


def _policy(budget: Budget) -> list[tuple[str, str]]:
    return [
        *([("group of", escape(budget.group_of))] if budget.group_of else []),
        *([("expires", budget.expires)] if budget.expires else []),
        *([("renews", f"every {budget.renews} days")] if budget.renews else []),
    ]


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
            "yes" if entry.released else "given up" if entry.abandoned else "no",
            rounded_up(entry.spent),
        )
        for entry in book.events(population, last=_SHOWN)
    ]
    columns = ("entry", "reserved (UTC)", "run", "round", "messages", "who", "released", "ε then")
    title = f"the last {_SHOWN} of {count:,} rounds" if count > _SHOWN else None
    whole = set(columns) - {"run", "who"}
    output.console().print(output.grid(columns, rows, title=title, whole=whole))
