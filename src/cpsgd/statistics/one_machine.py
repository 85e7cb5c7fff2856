"""Statistics of a table by whoever holds it: users' vectors summed as integers, paid for, and only then released.

Errors are for the holder of the table: no ε covers that a table was refused because of its types or missing values. All
else that is said about the table, also how much was cut off, is estimated privately and within ε. A table, or a
function of the caller, can fail only before anything is paid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.statistics.aggregates import Count, Mean, Sum
from cpsgd.statistics.histograms import Histogram
from cpsgd.statistics.ranks import Quantiles
from cpsgd.statistics.results import Reading, Statistic
from cpsgd.statistics.rows import Bounds, RowQuestion, check_bounds
from cpsgd.statistics.table_options import StatisticOptions, listed
from cpsgd.statistics.table_release import release


def mean(
    table: object,
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    **options: Unpack[StatisticOptions],
) -> Statistic:
    """Returns the mean of each column over users, each of whom counts once; see `Mean`.

    Args:
        table: Anything `cpsgd.tables.open_table` takes.
        columns: Which columns; those with bounds if None.
        bounds: Public bounds by column. Columns without any get bounds privately, from a part of the budget.
        options: See `StatisticOptions`.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        ParameterError: A parameter is out of range.
        InfeasibleError: No noise keeps (ε, δ).
        BudgetExceededError: The ledger does not allow it.

    Warns:
        ClippingWarning: Something of many users was cut off, by a private estimate.

    Example:
        >>> table = {"age": [i % 90 for i in range(3000)]}
        >>> found = mean(table, epsilon=1.0, bounds={"age": (0, 100)})
        >>> bool(abs(found.values[0] - 44.5) < 1.0), found.unit, found.delta
        (True, 'row', 0.0)
    """
    made: dict[str, Any] = {"group_by": listed(options), "missing": options.get("missing")}
    return _ask(table, columns, bounds, lambda known: Mean(known, **made), options)


def sum(
    table: object,
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    rows_per_user: int | None = None,
    **options: Unpack[StatisticOptions],
) -> Statistic:
    """Returns the sum of each column over all rows, at most `rows_per_user` of each user; see `Sum` and `mean`.

    Example:
        >>> found = sum({"age": [20.0, 40.0] * 500}, bounds={"age": (0, 100)}, epsilon=4.0)
        >>> round(float(found.values[0]), -3)
        30000.0
    """
    made: dict[str, Any] = {"group_by": listed(options), "missing": options.get("missing")}
    rows = _rows(rows_per_user, options.get("user"))
    if (rows > 1 or options.get("group_by") is not None or options.get("missing") == "drop") and (
        bounds is None or set(columns or ()) - set(bounds)
    ):
        raise ParameterError("Sums by group, of several rows per user, or of values that may be missing need bounds.")
    return _ask(table, columns, bounds, lambda known: Sum(known, rows=rows, **made), options)


def count(
    table: object, *, columns: Sequence[str] = (), rows_per_user: int | None = None, **options: Unpack[StatisticOptions]
) -> Statistic:
    """Returns the number of rows, or the number of ones in columns of 0 and 1; see `Count`.

    Example:
        >>> found = count({"smokes": [0, 1] * 500}, columns=["smokes"], epsilon=4.0)
        >>> round(float(found.values[0]), -2)
        500.0
        >>> users = count({"id": list(range(1000))}, user="id", rows_per_user=1, neighbours="add-remove", epsilon=8.0)
        >>> print(users.users, round(float(users.values[0]), -2))
        None 1000.0
    """
    rows = _rows(rows_per_user, options.get("user"))
    asked = Count(columns, rows=rows, group_by=listed(options), missing=options.get("missing"))
    return release(table, asked, (), lambda known: asked, options)


def histogram(
    table: object,
    column: str,
    *,
    edges: ArrayLike | None = None,
    categories: Sequence[object] | None = None,
    rows_per_user: int | None = None,
    **options: Unpack[StatisticOptions],
) -> Statistic:
    """Returns the number of rows in each bin or of each category; see `Histogram`.

    Without edges and categories, categories with enough users are found privately, as groups are.

    Example:
        >>> table = {"colour": ["red", "blue"] * 500}
        >>> found = histogram(table, "colour", categories=["red", "blue"], epsilon=1.0)
        >>> found.names, bool((abs(found.values - 500) < 60).all())
        (('red', 'blue'), True)
    """
    rows = _rows(rows_per_user, options.get("user"))
    made: dict[str, Any] = {"rows": rows, "missing": options.get("missing")}
    if edges is None and categories is None:
        if options.get("group_by") is not None:
            raise ParameterError("Categories that are not listed are groups: count them with group_by and no column.")
        if not options.get("delta"):
            raise ParameterError("Give edges or categories, or delta: categories that are not listed need a δ.")
        counted = Count(rows=rows, missing=options.get("missing"))
        found = release(table, counted, (), lambda known: counted, options | {"group_by": [column]})
        return _as_histogram(found)
    asked = Histogram(column, edges=edges, categories=categories, group_by=listed(options), **made)
    return release(table, asked, (), lambda known: asked, options)


def quantiles(
    table: object,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    bins: int = 512,
    **options: Unpack[StatisticOptions],
) -> Statistic:
    """Returns quantiles of each column over users, each of whom counts once; see `Quantiles` and `mean`.

    Example:
        >>> cost = {"epsilon": 4.0, "delta": 1e-6}
        >>> found = quantiles({"age": [20.0, 40.0] * 500}, [0.9], bounds={"age": (0, 100)}, bins=50, **cost)
        >>> round(float(found.values[0]), -1)
        40.0
    """
    made: dict[str, Any] = {"group_by": listed(options), "missing": options.get("missing")}
    ask = lambda known: Quantiles(known, quantiles, bins=bins, **made)  # noqa: E731
    return _ask(table, columns, bounds, ask, options)


def _rows(rows_per_user: int | None, user: str | None) -> int:
    """Returns the most rows of a user that count."""
    if user is None and rows_per_user not in (None, 1):
        raise ParameterError("rows_per_user is for tables with a user column; name it with user.")
    if user is not None and rows_per_user is None:
        raise ParameterError(
            "Missing rows_per_user (--rows-per-user): how many rows of one user may count. The noise grows with it, "
            "and further rows are left out; choose it without looking at the data."
        )
    return _validate.integer("rows_per_user", 1 if rows_per_user is None else rows_per_user, low=1)


def _as_histogram(found: Statistic) -> Statistic:
    """Returns counts by group as a histogram by category."""
    rows = found.reading
    flat = Reading(rows.groups or (), None, *(each.reshape(1, -1) for each in (rows.values, rows.low, rows.high)))
    return replace(found, statistic="histogram", reading=flat, group_by=())


def _ask(
    table: object,
    columns: Sequence[str] | None,
    bounds: Bounds | None,
    make: Callable[[Bounds], RowQuestion],
    options: StatisticOptions,
) -> Statistic:
    """Releases a statistic of columns; columns without bounds get private ones first."""
    stated = {} if not bounds else check_bounds(bounds)
    if columns is None:
        if not stated:
            raise ParameterError("Name the columns: an id or a code has a mean, too, but it is of no use to anybody.")
        columns = tuple(stated)
    if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
        raise ParameterError("Expected columns to be a list of different names.")
    columns = tuple(map(str, columns))  # an array's columns are counted
    if strange := [name for name in stated if name not in columns]:
        raise ParameterError(f"There are bounds for {', '.join(map(repr, strange))}, which columns does not name.")

    def known(found: Mapping[str, tuple[float, float]]) -> RowQuestion:
        return make({name: stated.get(name) or found[name] for name in columns})

    unknown = tuple(name for name in columns if name not in stated)
    return release(table, known(dict.fromkeys(unknown, (0.0, 1.0))), unknown, known, options)
