"""`cpsgd mean|sum|count|histogram|quantiles TABLE`: private statistics of a table's columns."""

from __future__ import annotations

import csv
import io
import json as json_module
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from cpsgd._durable import write_file
from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import ParameterError
from cpsgd.planner.requirements import BEST
from cpsgd.reports.numbers import rounded_up

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger
    from cpsgd.statistics.rows import Statistic
    from cpsgd.tables import DataTable

TABLE = Group("Table", sort_key=3)
# Files whose columns have names: never a table of vectors.
_NAMED = (".csv.gz", ".tsv", ".parquet")
# Values that are printed.
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What it may cost.

    Attributes:
        epsilon: ε, per user or per row.
        delta: δ of the guarantee.
        bits: Bits per coordinate. Nothing is sent here: if not given, as many as it takes to be as good as the Gaussian
            mechanism.
    """

    epsilon: float
    delta: float
    bits: float | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Who pays.

    Attributes:
        ledger: Charge the budget on this ledger, or refuse; see `cpsgd budget`.
        population: With --ledger: whose budget pays.
        witness: With --ledger: a file elsewhere that keeps the ledger's heads, which the ledger must contain; see
            `cpsgd budget witness`.
    """

    ledger: Annotated[Path | None, Parameter(metavar="FILE")] = None
    population: str | None = None
    witness: Annotated[Path | None, Parameter(metavar="FILE")] = None

    @property
    def wishes(self) -> dict[str, Any]:
        """For `cpsgd.statistics`."""
        return {"ledger": self.open(), "population": self.population}

    def open(self) -> Ledger | None:
        """The ledger, if there is one."""
        if self.ledger is None:
            if self.witness is not None:
                raise ParameterError("--witness keeps heads of a ledger: give --ledger, too.")
            return None
        from cpsgd.ledger import Ledger

        return Ledger(self.ledger, witness=self.witness)


# Given twice, the second would not add to the first but replace it.
_List = Annotated[str | None, Parameter(allow_repeating=False)]


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Which columns of a table, and whose rows.

    Attributes:
        columns: Names of columns, separated by commas.
        bounds: Public bounds of columns, as age=0:100,income=0:1e5; values beyond are moved to them. Columns without
            bounds get some privately, from a tenth of the budget. Choose them without looking at the data.
        user: The column that says whose a row is; ε is then per user, all their rows together.
        group_by: A column and its groups, as sex=f,m; rows of no group are left out.
    """

    columns: _List = None
    bounds: _List = None
    user: str | None = None
    group_by: _List = None

    @property
    def given(self) -> bool:
        """Whether anything was said of columns."""
        return any(getattr(self, entry.name) is not None for entry in fields(self))

    @property
    def wishes(self) -> dict[str, Any]:
        """For `cpsgd.statistics`."""
        found: dict[str, Any] = {"user": self.user}
        if self.group_by is not None:
            column, _, groups = self.group_by.partition("=")
            if not column or not groups:
                raise ParameterError("Expected --group-by as COLUMN=GROUP,GROUP: groups are public, like bounds.")
            found["group_by"] = {column: split_names(groups)}
        return found

    @property
    def about(self) -> dict[str, Any]:
        """Columns and bounds for `cpsgd.statistics`."""
        bounds: dict[str, tuple[float, float]] | None = None
        if self.bounds is not None:
            bounds = {}
            for entry in split_names(self.bounds):
                name, _, ends = entry.rpartition("=")
                low, colon, high = ends.partition(":")
                if not name or not colon or name in bounds:
                    raise ParameterError("Expected --bounds as COLUMN=LOW:HIGH,COLUMN=LOW:HIGH, each column once.")
                bounds[name] = (_number("--bounds", low), _number("--bounds", high))
        return {"columns": None if self.columns is None else split_names(self.columns), "bounds": bounds}


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What becomes of the result.

    Attributes:
        confidence: Probability with which an interval holds the value without noise.
        out: Where the values go, .json or .csv.
        plot: Draw the values with their intervals, .png, .pdf or .svg.
    """

    confidence: float = 0.95
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None
    plot: Annotated[Path | None, Parameter(metavar="FILE")] = None


NO_COLUMNS, NO_BUDGET, NO_RESULT = ColumnOptions(), BudgetOptions(), ResultOptions()
Costs = Annotated[CostOptions, Parameter(name="*")]
Columns = Annotated[ColumnOptions, Parameter(name="*", group=TABLE)]
Budgets = Annotated[BudgetOptions, Parameter(name="*", group=options.BUDGET)]
Results = Annotated[ResultOptions, Parameter(name="*")]
File = Annotated[
    Path, Parameter(name="TABLE", help="A .csv, .csv.gz, .tsv or .parquet file with named columns, or an .npy table.")
]
MechanismName = Annotated[str, Parameter(help='What a coordinate becomes: "best", or the name of a mechanism.')]
RowsPerUser = Annotated[
    int | None,
    WHOLE,
    Parameter(group=TABLE, help="With --user: how many rows of one user count; further ones are left out."),
]


def is_table(file: Path, columns: ColumnOptions) -> bool:
    """Whether a file is meant as a table of named columns: columns are spoken of, or all such files have names."""
    return columns.given or file.name.lower().endswith(_NAMED)


def sum(
    file: File,
    /,
    *,
    cost: Costs,
    columns: Columns = NO_COLUMNS,
    rows_per_user: RowsPerUser = None,
    mechanism: MechanismName = BEST,
    budget: Budgets = NO_BUDGET,
    result: Results = NO_RESULT,
    json: options.Json = False,
) -> None:
    """Sum a table's columns, so that (ε, δ) protects each user.

    Without --user each row is another person's.
    """
    from cpsgd import statistics

    def ask(table: DataTable, **wishes: Any) -> Statistic:
        return statistics.sum(table, **columns.about, rows_per_user=rows_per_user, **wishes)

    release(ask, file, vars(cost) | {"mechanism": mechanism}, columns, budget, result, json)


def count(
    file: File,
    /,
    *,
    cost: Costs,
    columns: Columns = NO_COLUMNS,
    rows_per_user: RowsPerUser = None,
    mechanism: MechanismName = BEST,
    budget: Budgets = NO_BUDGET,
    result: Results = NO_RESULT,
    json: options.Json = False,
) -> None:
    """Count a table's rows, or the ones in columns of 0 and 1, so that (ε, δ) protects each user.

    The number of users is public among replace-one neighbours: count rows by group, or several rows per user.
    """
    from cpsgd import statistics

    if columns.bounds is not None:
        raise ParameterError("Counts need no --bounds; leave them out.")

    def ask(table: DataTable, **wishes: Any) -> Statistic:
        return statistics.count(table, columns=columns.about["columns"] or (), rows_per_user=rows_per_user, **wishes)

    release(ask, file, vars(cost) | {"mechanism": mechanism}, columns, budget, result, json)


def histogram(
    file: File,
    /,
    *,
    cost: Costs,
    columns: Columns = NO_COLUMNS,
    edges: Annotated[
        # The first one may be below zero.
        str | None, Parameter(help="Edges of the bins, separated by commas.", allow_leading_hyphen=True)
    ] = None,
    categories: Annotated[str | None, Parameter(help="Instead of --edges: values to count, by commas.")] = None,
    rows_per_user: RowsPerUser = None,
    mechanism: MechanismName = BEST,
    budget: Budgets = NO_BUDGET,
    result: Results = NO_RESULT,
    json: options.Json = False,
) -> None:
    """Count the rows with a column's value in each bin or of each category, so that (ε, δ) protects each user."""
    from cpsgd import statistics

    if columns.bounds is not None:
        raise ParameterError("A histogram has --edges or --categories; leave out --bounds.")
    names = columns.about["columns"]
    if names is None or len(names) != 1:
        raise ParameterError("Expected --columns to name the one column of the histogram.")
    bins: dict[str, Any] = {
        "edges": None if edges is None else [_number("--edges", edge) for edge in split_names(edges)],
        "categories": None if categories is None else split_names(categories),
    }

    def ask(table: DataTable, **wishes: Any) -> Statistic:
        return statistics.histogram(table, names[0], **bins, rows_per_user=rows_per_user, **wishes)

    release(ask, file, vars(cost) | {"mechanism": mechanism}, columns, budget, result, json)


def quantiles(
    file: File,
    /,
    *,
    cost: Costs,
    columns: Columns = NO_COLUMNS,
    quantiles: Annotated[str, Parameter(help="Which, separated by commas.")] = "0.25,0.5,0.75",
    bins: Annotated[int, WHOLE, Parameter(help="Bins that the bounds are divided into.")] = 512,
    mechanism: MechanismName = BEST,
    budget: Budgets = NO_BUDGET,
    result: Results = NO_RESULT,
    json: options.Json = False,
) -> None:
    """Find quantiles of a table's columns, so that (ε, δ) protects each user."""
    from cpsgd import statistics

    wanted = [_number("--quantiles", each) for each in split_names(quantiles)]

    def ask(table: DataTable, **wishes: Any) -> Statistic:
        return statistics.quantiles(table, wanted, **columns.about, bins=bins, **wishes)

    release(ask, file, vars(cost) | {"mechanism": mechanism}, columns, budget, result, json)


def mean(
    file: Path, cost: dict[str, Any], columns: ColumnOptions, budget: Any, result: ResultOptions, json: bool
) -> None:
    """`cpsgd mean` of a table; the command itself is in `cpsgd.cli.mean`."""
    from cpsgd import statistics

    def ask(table: DataTable, **wishes: Any) -> Statistic:
        return statistics.mean(table, **columns.about, **wishes)

    release(ask, file, cost, columns, budget, result, json)


def release(
    ask: Callable[..., Statistic],
    file: Path,
    cost: dict[str, Any],
    columns: ColumnOptions,
    budget: Any,
    result: ResultOptions,
    json: bool,
) -> None:
    """Computes a statistic, writes it where it was asked for, and prints it."""
    from cpsgd.tables import open_table

    if result.out is not None:
        if result.out.suffix.lower() not in (".json", ".csv"):
            raise ParameterError(f"Expected --out to end in .json or .csv, got {result.out.name}.")
        _files.check_output(result.out, file)
    _files.check_picture(result.plot)
    if result.plot is not None:
        from cpsgd.reports import plotting

        _files.check_output(result.plot, file)
        plotting.new_figure(1.0, 1.0)  # says so if it cannot draw, before anything is spent
    table = open_table(file)
    wishes = {**cost, **columns.wishes, "confidence": result.confidence, **budget.wishes}
    with output.warnings_told(), output.progress(table.rows, "rows") as advance:
        found = ask(table, **wishes, advance=advance)
    failure: OSError | None = None
    try:
        _save(found, result)
    except OSError as error:
        # The values are paid for: they are shown, whatever became of the files.
        failure, result = error, replace(result, out=None, plot=None)
    if json:
        output.show_json({"file": file, "out": result.out, "plot": result.plot, **found.to_dict()})
    else:
        output.show(_facts(found, result))
    if failure is not None:
        raise failure


def _save(found: Statistic, result: ResultOptions) -> None:
    if result.out is not None:
        write_file(result.out, _written(found, result.out))
    if result.plot is not None:
        from cpsgd.reports.pictures import draw_values

        draw_values(found, result.plot)


def _facts(found: Statistic, result: ResultOptions) -> list[tuple[str, str]]:
    rows = found.rows()
    values = [
        (name if group is None else f"{group} {name}", f"{value:.6g}  [{low:.6g}, {high:.6g}]")
        for group, name, value, low, high in rows[:_SHOWN]
    ]
    if len(rows) > _SHOWN:
        values.append(("…", f"{len(rows) - _SHOWN:,} more; --out or --json has all"))
    bounds = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in found.bounds.items())
    return [
        (found.statistic, f"of {found.users:,} {found.unit}s, intervals hold with {100 * found.confidence:g} %"),
        *values,
        *([("bounds", bounds)] if bounds else []),
        ("message", f"{found.dim:,} coordinate{'s' * (found.dim != 1)} of {found.bits:.4g} bits per {found.unit}"),
        (
            "privacy",
            f"ε = {rounded_up(found.epsilon)} at δ = {found.delta:g} per {found.unit}, {found.adjacency} neighbours",
        ),
        ("proved by", found.citation),
        *([] if found.assumption is None else [("assuming", found.assumption)]),
        *([] if result.out is None else [("values", str(result.out))]),
        *([] if result.plot is None else [("picture", str(result.plot))]),
    ]


def _written(found: Statistic, path: Path) -> bytes:
    if path.suffix.lower() == ".json":
        return (json_module.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n").encode()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    grouped = found.groups is not None
    writer.writerow([*(["group"] if grouped else []), "name", "value", "low", "high"])
    for group, *entries in found.rows():
        writer.writerow([*([group] if grouped else []), *entries])
    return text.getvalue().encode()


def split_names(text: str) -> list[str]:
    """What is between commas, or `ParameterError` where that is nothing."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ParameterError(f"Expected names or numbers separated by commas, got {text!r}.")
    return found


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ParameterError(f"Expected numbers for {option}, got {text!r}.") from None
