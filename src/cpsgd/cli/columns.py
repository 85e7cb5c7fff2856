"""`cpsgd table mean|sum|count|histogram|quantiles TABLE`: private statistics of a table's named columns."""

from __future__ import annotations

import csv
import io
import json as json_module
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from cpsgd._durable import write_file
from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger
    from cpsgd.statistics.results import Statistic

TABLE = Group("Table", sort_key=3)
# Values that are printed.
_SHOWN = 60
# Given twice, the second list would not add to the first but replace it.
_List = Annotated[str | None, Parameter(allow_repeating=False)]


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The cost of a statistic.

    Attributes:
        epsilon: ε, per user or per row.
        delta: δ of the guarantee; none is spent where it does not help.
    """

    epsilon: float
    delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The budget that pays for a statistic.

    Attributes:
        ledger: Charge a budget of this ledger, or refuse.
        population: With --ledger: the population whose budget pays.
        witness: With --ledger: a file elsewhere that keeps the ledger's heads, which the ledger must contain; see
            `cpsgd budget witness`.
    """

    ledger: Annotated[Path | None, Parameter(metavar="FILE")] = None
    population: str | None = None
    witness: Annotated[Path | None, Parameter(metavar="FILE")] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `cpsgd.statistics`."""
        return {"ledger": self.open(), "population": self.population}

    def open(self) -> Ledger | None:
        """Opens the ledger, if there is one."""
        if self.ledger is None:
            if self.witness is not None:
                raise ParameterError("--witness keeps heads of a ledger: give --ledger, too.")
            return None
        from cpsgd.ledger import Ledger

        return Ledger(self.ledger, witness=self.witness)


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """The columns of a table, and whose rows they are.

    Attributes:
        columns: Names of columns, separated by commas.
        bounds: Public bounds, as age=0:100,income=0:1e5, chosen without looking at the data; values beyond are moved
            to them. By default they are found privately, from a part of the budget.
        user: The column of users: ε is then for all rows of a user.
        group_by: Columns and groups, as "sex=f,m;city=Bern,Basel". With columns alone, as city, groups are
            found privately, which needs --delta.
        groups_per_user: With --user and groups that are found: the most groups that a user is counted in.
        missing: Missing values count as drop (nothing), bounds (middle) or a value.
        neighbours: replace-one (the number of users is public) or add-remove (it is not shown).
    """

    columns: _List = None
    bounds: _List = None
    user: str | None = None
    group_by: _List = None
    groups_per_user: Annotated[int, WHOLE] = 1
    missing: str | None = None
    neighbours: Literal["replace-one", "add-remove"] = "replace-one"

    @property
    def names(self) -> list[str] | None:
        """The columns, if given."""
        return None if self.columns is None else split_names(self.columns)

    @property
    def whose(self) -> dict[str, Any]:
        """Arguments for `cpsgd.statistics`: the user, the groups and the neighbours."""
        found: dict[str, Any] = {
            "user": self.user,
            "missing": split_missing(self.missing),
            "neighbours": self.neighbours,
        }
        if self.group_by is None:
            return found
        groups = split_groups(self.group_by)
        more = {"groups_per_user": self.groups_per_user} if isinstance(groups, list) else {}
        return found | {"group_by": groups} | more

    @property
    def about(self) -> dict[str, Any]:
        """Arguments for `cpsgd.statistics`: columns and bounds."""
        return {"columns": self.names, "bounds": split_bounds(self.bounds)}


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Output of the result.

    Attributes:
        confidence: Probability with which an interval holds the value without noise.
        out: File for the values, .json or .csv.
        plot: Draw values and intervals: .png, .pdf or .svg.
    """

    confidence: float = 0.95
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None
    plot: Annotated[Path | None, Parameter(metavar="FILE")] = None


NO_COLUMNS, NO_BUDGET, NO_RESULT = ColumnOptions(), BudgetOptions(), ResultOptions()
Columns = Annotated[ColumnOptions, Parameter(name="*", group=TABLE)]
Budgets = Annotated[BudgetOptions, Parameter(name="*", group=options.BUDGET)]
File = Annotated[
    Path,
    Parameter(
        name="TABLE",
        help="A .csv, .csv.gz, .tsv, .parquet or .feather file with named columns, a folder of such files, or an .npy "
        "table.",
    ),
]
RowsPerUser = Annotated[
    int | None,
    WHOLE,
    Parameter(group=TABLE, help="With --user: the most rows of a user that count."),
]


@dataclass(frozen=True, kw_only=True)
class StatisticChoice:
    """Options of every statistic.

    Attributes:
        json: Print one JSON object instead of text.
    """

    cost: Annotated[CostOptions, options.FLAT]
    columns: Columns = NO_COLUMNS
    budget: Budgets = NO_BUDGET
    result: Annotated[ResultOptions, options.FLAT] = NO_RESULT
    json: bool = False


Choice = Annotated[StatisticChoice, options.FLAT]


def mean(file: File, /, *, chosen: Choice) -> None:
    """Average a table's columns, so that (ε, δ) protects each user.

    Each column has its own bounds. Without --user each row is another person's.
    """
    release("mean", file, chosen, **chosen.columns.about)


def sum(file: File, /, *, chosen: Choice, rows_per_user: RowsPerUser = None) -> None:
    """Sum a table's columns, so that (ε, δ) protects each user.

    Without --user each row is another person's.
    """
    release("sum", file, chosen, rows_per_user=rows_per_user, **chosen.columns.about)


def count(file: File, /, *, chosen: Choice, rows_per_user: RowsPerUser = None) -> None:
    """Count a table's rows, or the ones in columns of 0 and 1, so that (ε, δ) protects each user.

    The number of users is public among replace-one neighbours: count rows by group, or several rows per user.
    """
    if chosen.columns.bounds is not None:
        raise ParameterError("Counts need no --bounds; leave them out.")
    release("count", file, chosen, columns=chosen.columns.names or (), rows_per_user=rows_per_user)


def histogram(
    file: File,
    /,
    *,
    chosen: Choice,
    edges: Annotated[
        # The first one may be below zero.
        str | None, Parameter(help="Edges of the bins, separated by commas.", allow_leading_hyphen=True)
    ] = None,
    categories: Annotated[str | None, Parameter(help="Instead of --edges: values to count, by commas.")] = None,
    rows_per_user: RowsPerUser = None,
) -> None:
    """Count rows by bins or categories, so that (ε, δ) protects each user."""
    if chosen.columns.bounds is not None:
        raise ParameterError("A histogram has --edges or --categories; leave out --bounds.")
    names = chosen.columns.names
    if names is None or len(names) != 1:
        raise ParameterError("Expected --columns to name the one column of the histogram.")
    bins: dict[str, Any] = {
        "edges": None if edges is None else split_numbers("--edges", edges),
        "categories": None if categories is None else split_names(categories),
    }
    release("histogram", file, chosen, column=names[0], **bins, rows_per_user=rows_per_user)


def quantiles(
    file: File,
    /,
    *,
    chosen: Choice,
    quantiles: Annotated[str, Parameter(help="Quantiles to find, separated by commas.")] = "0.25,0.5,0.75",
    bins: Annotated[int, WHOLE, Parameter(help="Bins that the bounds are divided into.")] = 512,
) -> None:
    """Find quantiles of a table's columns, so that (ε, δ) protects each user."""
    ranks = split_numbers("--quantiles", quantiles)
    release("quantiles", file, chosen, quantiles=ranks, **chosen.columns.about, bins=bins)


def release(statistic: str, file: Path, chosen: StatisticChoice, **about: Any) -> None:
    """Computes a statistic of a table, writes it to the files that options name, and prints it."""
    from cpsgd import statistics
    from cpsgd.tables import open_table

    result = chosen.result
    if result.out is not None:
        if result.out.suffix.lower() not in (".json", ".csv"):
            raise ParameterError(f"Expected --out to end in .json or .csv, got {result.out.name}.")
        _files.check_output(result.out, file)
    _files.check_picture(result.plot)
    if result.plot is not None:
        from cpsgd.reports import plotting

        _files.check_output(result.plot, file)
        plotting.new_figure(1.0, 1.0)  # refuses if it cannot draw, before anything is spent
    about |= {**vars(chosen.cost), **chosen.columns.whose}
    table = open_table(file)
    ask: Callable[..., Statistic] = getattr(statistics, statistic)
    with output.warnings_shown(), output.progress(table.rows, "rows") as advance:
        found = ask(table, **about, confidence=result.confidence, **chosen.budget.arguments, advance=advance)
    failure: OSError | None = None
    try:
        _save(found, result)
    except OSError as error:
        # The values are paid for: they are shown even if no file could be written.
        failure, result = error, replace(result, out=None, plot=None)
    if chosen.json:
        output.show_json({"file": file, "out": result.out, "plot": result.plot, **found.to_dict()})
    else:
        output.show(facts_of(found, result))
    if failure is not None:
        raise failure


def _save(found: Statistic, result: ResultOptions) -> None:
    if result.out is not None:
        write_file(result.out, written(found, result.out))
    if result.plot is not None:
        from cpsgd.reports.pictures import draw_values

        draw_values(found, result.plot)


def facts_of(found: Statistic, result: ResultOptions = NO_RESULT) -> list[tuple[str, str]]:
    """Returns the rows of a result's table."""
    rows = found.rows()
    values = [
        (name if group is None else f"{group} · {name}", f"{value:.6g}  [{low:.6g}, {high:.6g}]")
        for group, name, value, low, high in rows[:_SHOWN]
    ]
    if len(rows) > _SHOWN:
        values.append(("…", f"{len(rows) - _SHOWN:,} more; --out or --json has all"))
    bounds = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in found.bounds.items())
    return [
        (found.statistic, f"of {_many(found)}, intervals {_held(found)}"),
        *values,
        *([("bounds", bounds)] if bounds else []),
        *[
            (cut.cut, f"{100 * cut.share:.3g} % of {found.unit}s  [{100 * cut.low:.3g}, {100 * cut.high:.3g}]")
            for cut in found.cut_off
        ],
        ("noise", found.mechanism),
        ("privacy", f"{found.claim} per {found.unit}, {found.adjacency} neighbours"),
        ("proved by", found.citation),
        *([] if found.assumption is None else [("assuming", found.assumption)]),
        *([] if result.out is None else [("values", str(result.out))]),
        *([] if result.plot is None else [("picture", str(result.plot))]),
    ]


def _held(found: Statistic) -> str:
    return f"{'are estimates for' if found.details else 'hold with'} {100 * found.confidence:g} %"


def _many(found: Statistic) -> str:
    return f"all {found.unit}s" if found.users is None else f"{found.users:,} {found.unit}s"


def written(found: Statistic, path: Path) -> bytes:
    """Returns the values as the text of a JSON or CSV file."""
    if path.suffix.lower() == ".json":
        return (json_module.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n").encode()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = found.to_columns()
    writer.writerows([tuple(columns), *zip(*columns.values(), strict=True)])
    return text.getvalue().encode()


def split_bounds(text: str | None) -> dict[str, tuple[float, float]] | None:
    """Returns the bounds of columns, or raises `ParameterError`."""
    bounds: dict[str, tuple[float, float]] = {}
    for entry in [] if text is None else split_names(text):
        name, _, ends = entry.rpartition("=")
        low, colon, high = ends.partition(":")
        if not name or not colon or name in bounds:
            raise ParameterError(f"Expected bounds as COLUMN=LOW:HIGH, as age=0:100, each column once; not {entry!r}.")
        bounds[name] = (_number("--bounds", low), _number("--bounds", high))
    return bounds or None


def split_groups(text: str) -> dict[str, list[str]] | list[str]:
    """Returns columns with their groups, or columns alone, or raises `ParameterError`."""
    parts = [part.partition("=") for part in text.split(";")]
    columns = [column.strip() for column, _, _ in parts]
    listed = [bool(equals) for _, equals, _ in parts]
    if not all(columns) or len(set(columns)) < len(columns) or (any(listed) and not all(listed)):
        raise ParameterError(
            "Expected --group-by as COLUMN=GROUP,GROUP;COLUMN=GROUP,GROUP where groups are known, or COLUMN;COLUMN "
            "where they are to be found, each column once."
        )
    if not all(listed):
        return columns
    return {column: split_names(names) for column, (_, _, names) in zip(columns, parts, strict=True)}


def split_missing(text: str | None) -> str | float | None:
    """Parses the option `missing`: a word, or a number that missing values count as."""
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def split_names(text: str) -> list[str]:
    """Returns the texts between commas, or raises `ParameterError` if one is empty."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ParameterError(f"Expected names or numbers separated by commas, got {text!r}.")
    return names


def split_numbers(option: str, text: str) -> list[float]:
    """Returns the numbers between commas, or raises `ParameterError`."""
    return [_number(option, each) for each in split_names(text)]


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ParameterError(f"Expected numbers for {option}, got {text!r}.") from None
