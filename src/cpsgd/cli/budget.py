"""`cpsgd budget`: privacy budgets on a durable ledger."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd._durable import write_file
from cpsgd._numbers import rounded_down, rounded_up
from cpsgd.cli import _files, options, output
from cpsgd.cli.commands import COMMANDS
from cpsgd.cli.frame import command, new_app
from cpsgd.cli.options import file_option
from cpsgd.errors import LedgerAccessError, LedgerError, ParameterError, ReportError
from cpsgd.ledger import Budget, Ledger, Witness
from cpsgd.ledger import check_report as verify_report
from cpsgd.ledger.book import FORGET_FUTURE

if TYPE_CHECKING:
    from cpsgd.ledger import Entry, Total

    BudgetFields = Any  # made when the program runs
else:
    BudgetFields = options.from_class(Budget)

app = new_app("budget", example=COMMANDS["budget"].example)

LedgerFile = Annotated[Path, Parameter(name="LEDGER", help="The ledger's file.")]
Witnesses = Annotated[
    Path | None,
    file_option(
        "A file elsewhere that keeps the ledger's heads: the ledger must contain them, and a new one is added.",
        name="--witness",
    ),
]
Signers = Annotated[
    Path | None, file_option("Public keys, one per line as in KEYFILE.pub: one of them must have signed.")
]
_LONGEST_REPORT = 1 << 26
_CHOICE = {
    "planned": "planned: not chosen by looking at earlier results",
    "adaptive": "adaptive: chosen in any way, also by earlier results",
}
# Entries shown to people; --json has them all.
_SHOWN = 10


@command(
    app,
    "cpsgd budget create budget.ledger --population patients --epsilon 4 --delta 1e-6",
    everyday=("--population", "--epsilon", "--delta", "--adjacency", "--unit", "--accounting", "--expires", "--json"),
)
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
    rows = [
        ("budget", escape(f"ε = {rounded_up(opened.epsilon)} at δ = {opened.delta:g} for {opened.population}")),
        ("protects", f"one {opened.unit}, {opened.adjacency} neighbours"),
        ("rounds", _CHOICE[opened.accounting.partition("-")[0]]),
        *_policy(opened),
        ("ledger", escape(str(ledger))),
    ]
    _answer(json, {"ledger": ledger, "budget": opened.to_dict(), "head": str(book.head)}, output.facts(rows))


@command(app, "cpsgd budget show budget.ledger")
def show(
    ledger: LedgerFile,
    /,
    *,
    population: Annotated[
        str | None, Parameter(help="Only this population, with its rounds; all if not given.")
    ] = None,
    plot: Annotated[Path | None, file_option("Draw what was spent over time; needs --population.")] = None,
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
    entries = [book.events(name) for name in names]
    if plot is not None and population is not None:
        from cpsgd.reports.pictures import draw_spending

        draw_spending(book.budget(population), book.events(population), plot)
    data = {
        "ledger": ledger,
        "head": str(book.head),
        "populations": [
            {**total.to_dict(), "entries": [entry.to_dict() for entry in own]}
            for total, own in zip(totals, entries, strict=True)
        ],
        **({} if plot is None else {"plot": plot}),
    }
    tables: list[object] = []
    for total, own in zip(totals, entries, strict=True):
        rows = [*_rows(total, own), *_budget_rows(book, total)]
        tables.append(output.facts(rows, title=escape(total.population)))
        if population is not None:
            tables.append(_entries(book, population, total.rounds))
    if plot is not None:
        tables.append(output.facts([("written", escape(str(plot)))]))
    _answer(json, data, *tables)


@command(app, "cpsgd budget verify budget.ledger")
def verify(
    ledger: LedgerFile,
    /,
    *,
    head: Annotated[
        str | None, Parameter(help="A head printed earlier and kept elsewhere: the chain must contain it.")
    ] = None,
    witness: Annotated[
        Path | None, file_option("Lines of a witness, kept elsewhere: the chain must contain all their heads.")
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
        raise _does_not_hold("ledger", ledger, error, json) from None
    overspent, known = list(found.overspent), head is not None or witness is not None
    data = {
        "ledger": ledger,
        "holds": not overspent,
        "reason": f"More was spent than the budget allows: {overspent}." if overspent else None,
        "records": found.records,
        "head": str(found.head),
        "head_checked": known,
        "populations": [total.to_dict() for total in found.totals],
        **({"ahead": found.ahead} if found.ahead else {}),
    }
    rows = [
        ("chain", f"{found.records:,} records, every hash holds"),
        ("known head", "contained" if known else "none was given: a cut end would not be noticed"),
    ]
    if found.ahead:
        rows.append(("clock", escape(f"the last record is dated {found.ahead}, in the future. {FORGET_FUTURE}")))
    for total in found.totals:
        over = "[bold red]more than the budget[/bold red] " if total.population in overspent else ""
        rows.append((escape(total.population), f"{over}{_spent(total)}"))
    _answer(json, data, output.facts(rows))
    if overspent:
        raise SystemExit(1)


@command(app, "cpsgd budget export budget.ledger --out ledger.json")
def export(
    ledger: LedgerFile,
    /,
    *,
    out: Annotated[Path | None, file_option("Where the JSON goes; standard output if not given.")] = None,
    json: options.Json = False,
) -> None:
    """Write everything as JSON: all records with their hashes, and what follows from them."""
    if out is None:
        output.show_json(Ledger(ledger).export())
        return
    _files.check_output(out, ledger)
    data = Ledger(ledger).export()
    _write(out, data)
    count = len(data["records"])
    rows = [("records", f"{count:,}"), ("written", escape(str(out)))]
    _answer(json, {"ledger": ledger, "out": out, "records": count, "head": data["head"]}, output.facts(rows))


@command(app, "cpsgd budget repair budget.ledger")
def repair(
    ledger: LedgerFile,
    /,
    *,
    forget_future: Annotated[
        str | None,
        Parameter(
            help="A record is dated in the future: set the ledger's time back, for this reason.", name="--forget-future"
        ),
    ] = None,
    witness: Witnesses = None,
    json: options.Json = False,
) -> None:
    """Check every hash of the chain, and make the index beside the ledger anew.

    Records are not changed. With --forget-future REASON one more record sets the
    ledger's time back to this machine's clock. Rounds that were dated later count in the present period as well.
    """
    book = Ledger(ledger, witness=witness)
    head = str(book.repair())
    rows = [("repaired", escape(str(ledger)))]
    if forget_future is not None:
        head = str(book.forget_future(forget_future))
        rows.append(("clock", "set back; the reason is on record"))
    _answer(json, {"ledger": ledger, "head": head}, output.facts(rows))


@command(app, 'cpsgd budget abandon budget.ledger 17 --reason "the server stopped"')
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
    data = {"ledger": ledger, "entry": gone.to_dict(), "budget": total.to_dict(), "head": head}
    _answer(json, data, output.facts([("given up", f"entry {entry}"), *_rows(total)]))


@command(app, "cpsgd budget witness budget.ledger", name="witness")
def show_line(
    ledger: LedgerFile,
    /,
    *,
    out: Annotated[Path | None, file_option("Append the line to this file, elsewhere, and print it, too.")] = None,
    identity: Annotated[
        Path | None, file_option("Sign with this identity; see `cpsgd round identity create`.", metavar="KEYFILE")
    ] = None,
    json: options.Json = False,
) -> None:
    """Print the ledger's head as a line to be kept elsewhere, signed if you like, for `verify --witness`.

    With --witness FILE other commands add such lines to FILE by themselves, and refuse a ledger that does not contain
    the newest head in it.
    """
    from cpsgd.secagg import read_identity

    if out is not None:
        _files.check_output(out, ledger)
    book = Ledger(ledger, witness=out if out is not None and out.exists() else None)
    seen = book.seen(None if identity is None else read_identity(identity))
    if out is not None:
        Witness(out).append(seen)
    if json:
        output.show_json({"ledger": ledger, "head": str(seen.head), "line": str(seen), "out": out})
    else:
        print(seen)


@command(app, "cpsgd budget report budget.ledger --identity office.key --out report.json")
def report(
    ledger: LedgerFile,
    /,
    *,
    identity: Annotated[Path, file_option("Sign with this identity.", metavar="KEYFILE")],
    out: Annotated[Path, file_option("Where the report goes, as JSON.")],
    json: options.Json = False,
) -> None:
    """Write a signed report of what is spent, which somebody outside can verify without the ledger or the data.

    It holds budgets, numbers of rounds of each kind, and the head; no names of runs, and no labels.
    """
    from cpsgd.secagg import read_identity

    _files.check_output(out, ledger)
    data = Ledger(ledger).report(read_identity(identity))
    _write(out, data)
    facts = {"ledger": ledger, "out": out, "head": data["head"], "key": data["key"]}
    _answer(json, facts, output.facts([("written", escape(str(out)))]))


@command(app, "cpsgd budget check-report report.json")
def check_report(
    file: Annotated[Path, Parameter(name="REPORT", help="The file that `cpsgd budget report` wrote.")],
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
        raise _does_not_hold("report", file, error, json) from None
    data = {
        "report": file,
        "holds": True,
        "reason": None,
        "head": str(found.head),
        "time": found.time,
        "signer_checked": keys is not None,
        "populations": [total.to_dict() for total in found.totals],
    }
    signed = "by a key that was given" if keys is not None else "but by whom was not checked: give --signers"
    tables = [output.facts([("signed", signed), ("made", escape(found.time))])]
    tables += [output.facts(_rows(total), title=escape(total.population)) for total in found.totals]
    _answer(json, data, *tables)


def _answer(json: bool, data: dict[str, Any], *tables: object) -> None:
    """Prints JSON, or tables for people with the ledger's head below them."""
    output.answer(json, data, *tables)
    if not json:
        # In one piece, however narrow the terminal: a head with a line break in it would not be found again.
        output.show([("head", data["head"])])


def _does_not_hold(what: str, file: Path, error: Exception, json: bool) -> SystemExit:
    """Prints why the verification of a ledger or report failed, and returns exit code 1."""
    if json:
        output.show_json({what: file, "holds": False, "reason": str(error)})
    else:
        output.complain(f"The {what} does not hold: {error}")
    return SystemExit(1)


def _write(out: Path, data: dict[str, Any]) -> None:
    write_file(out, (json_module.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _read_report(path: Path) -> object:
    with path.open("rb") as file:
        text = file.read(_LONGEST_REPORT + 1)
    if len(text) > _LONGEST_REPORT:
        raise ReportError("It is too long to be a report.")
    try:
        return json_module.loads(text)
    except (ValueError, RecursionError):
        raise ReportError("It is not JSON.") from None


def _keys(path: Path | None) -> frozenset[bytes] | None:
    """Returns the public keys in a file, if one is given."""
    from cpsgd.secagg.identity_files import read_roster

    return None if path is None else read_roster(path)


def _budget_rows(book: Ledger, total: Total) -> list[tuple[str, str]]:
    """Returns the rows about a budget: its policy, the cost of all its periods, and how its rounds are chosen."""
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
    """Returns the rows of a budget's policy that are set."""
    policy = [
        ("group of", budget.group_of and escape(budget.group_of)),
        ("expires", budget.expires),
        ("renews", f"every {budget.renews} days" if budget.renews else None),
    ]
    return [(name, text) for name, text in policy if text]


def _spent(total: Total) -> str:
    """Returns the ε and δ spent, their sense, and the limit, as text."""
    spent, limit = f"[bold]ε = {rounded_up(total.epsilon)}[/bold]", rounded_up(total.limit)
    if total.claim.sense != "ex post":
        return f"{spent} of {limit} at δ = {total.delta:g}"
    return f"{spent} at δ = {total.delta:g} (ex post), of {limit} at δ = {total.limit_delta:g}"


def _rows(total: Total, entries: Sequence[Entry] = ()) -> list[tuple[str, str]]:
    """Returns the rows of a total's table; with its entries, statistics of tables apart from rounds."""
    sums = [entry.event for entry in entries if entry.event.table_unit]
    # A statistic may have several sums with noise, numbered from 0.
    asked = Counter(event.label.removeprefix("statistics: ") for event in sums if event.round == 0)
    names = [name if count == 1 else f"{count:,} × {name}" for name, count in asked.items()]
    told = f"{escape(', '.join(names))} ({len(sums):,} sums with noise)"
    rounds = total.rounds - len(sums)
    unreleased = f", {total.unreleased:,} of them reserved and not released" if total.unreleased else ""
    return [
        (
            "spent",
            f"{_spent(total)}, {total.adjacency} neighbours, one {total.unit}",
        ),
        ("left", rounded_down(total.left)),
        *([("statistics", told)] if sums else []),
        *([("rounds", f"{rounds:,}{unreleased}")] if rounds or not sums or unreleased else []),
        ("proved by", escape(total.citation)),
        *(("assuming", escape(text)) for text in total.assumptions),
    ]


def _entries(book: Ledger, population: str, count: int) -> object:
    """Returns the table of a population's last entries."""
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
    return output.grid(columns, rows, title=title, whole=set(columns) - {"run", "who"})
