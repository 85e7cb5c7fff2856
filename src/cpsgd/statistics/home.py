"""Statistics of a table that is on this machine; `cpsgd.statistics.releases` has every user's vector go its way.

The same questions as between many machines, with the same messages, error and guarantee; what differs is who could see
the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.statistics.bounds import Ranges
from cpsgd.statistics.histograms import Histogram
from cpsgd.statistics.questions import Bounds, RowQuestion, check_bounds
from cpsgd.statistics.ranks import Quantiles
from cpsgd.statistics.releases import BoundsSearch, Wishes, release
from cpsgd.statistics.results import Statistic
from cpsgd.statistics.totals import Count, Mean, Sum


def mean(
    table: object, *, columns: Sequence[str] | None = None, bounds: Bounds | None = None, **wishes: Unpack[Wishes]
) -> Statistic:
    """The mean of each column over users, each of whom counts once; see `Mean`.

    Args:
        table: Anything `open_table` takes.
        columns: Which columns; those with bounds if None.
        bounds: Public bounds by column. Columns without any get bounds privately, from a tenth of the budget.
        wishes: See `Wishes`.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        ParameterError: A parameter is out of range.
        InfeasibleError: No protocol keeps (ε, δ).
        BudgetExceededError: The ledger does not allow it.

    Example:
        >>> table = {"age": [i % 90 for i in range(3000)]}
        >>> found = mean(table, epsilon=1.0, delta=1e-6, bounds={"age": (0, 100)}, bits=8, mechanism="binomial")
        >>> bool(abs(found.values[0] - 44.5) < 3.0), found.unit
        (True, 'row')
    """
    group_by = wishes.get("group_by")
    return _ask(table, columns, bounds, lambda known: Mean(known, group_by=group_by), wishes)


def sum(
    table: object,
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    rows_per_user: int | None = None,
    **wishes: Unpack[Wishes],
) -> Statistic:
    """The sum of each column over all rows, at most `rows_per_user` of each user; see `Sum` and `mean`.

    Example:
        >>> table = {"age": [20.0, 40.0] * 500, "smokes": [0, 1] * 500}
        >>> asked = {"epsilon": 4.0, "delta": 1e-6}
        >>> found = sum(table, bounds={"age": (0, 100)}, **asked)
        >>> bool(abs(found.values[0] - 30_000) < 1_000)
        True
    """
    rows, group_by = _rows(rows_per_user, wishes.get("user")), wishes.get("group_by")
    if (rows > 1 or group_by is not None) and (bounds is None or set(columns or ()) - set(bounds)):
        raise ParameterError("Sums by group, or of several rows per user, need bounds of every column.")
    return _ask(table, columns, bounds, lambda known: Sum(known, rows=rows, group_by=group_by), wishes)


def count(
    table: object, *, columns: Sequence[str] = (), rows_per_user: int | None = None, **wishes: Unpack[Wishes]
) -> Statistic:
    """How many rows there are, or in how many each of some columns of 0 and 1 is 1; see `Count`.

    Example:
        >>> table = {"age": [20.0, 40.0] * 500, "smokes": [0, 1] * 500}
        >>> asked = {"epsilon": 4.0, "delta": 1e-6}
        >>> found = count(table, columns=["smokes"], **asked)
        >>> bool(abs(found.values[0] - 500) < 20)
        True
    """
    rows = _rows(rows_per_user, wishes.get("user"))
    return release(table, Count(columns, rows=rows, group_by=wishes.get("group_by")), None, wishes)


def histogram(
    table: object,
    column: str,
    *,
    edges: ArrayLike | None = None,
    categories: Sequence[object] | None = None,
    rows_per_user: int | None = None,
    **wishes: Unpack[Wishes],
) -> Statistic:
    """How many rows have a value in each bin or of each category; see `Histogram`.

    Example:
        >>> table = {"colour": ["red", "blue"] * 500}
        >>> asked = {"epsilon": 1.0, "delta": 1e-6, "bits": 8, "mechanism": "binomial"}
        >>> found = histogram(table, "colour", categories=["red", "blue"], **asked)
        >>> found.names, bool((abs(found.values - 500) < 60).all())
        (('red', 'blue'), True)
    """
    rows = _rows(rows_per_user, wishes.get("user"))
    asked = Histogram(column, edges=edges, categories=categories, rows=rows, group_by=wishes.get("group_by"))
    return release(table, asked, None, wishes)


def quantiles(
    table: object,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    bins: int = 512,
    **wishes: Unpack[Wishes],
) -> Statistic:
    """Quantiles of each column over users, each of whom counts once; see `Quantiles` and `mean`.

    Example:
        >>> table = {"age": [20.0, 40.0] * 500, "smokes": [0, 1] * 500}
        >>> asked = {"epsilon": 4.0, "delta": 1e-6}
        >>> found = quantiles(table, [0.9], bounds={"age": (0, 100)}, bins=50, **asked)
        >>> bool(abs(found.values[0] - 40) < 3)
        True
    """
    group_by = wishes.get("group_by")
    return _ask(table, columns, bounds, lambda known: Quantiles(known, quantiles, bins=bins, group_by=group_by), wishes)


def _rows(rows_per_user: int | None, user: str | None) -> int:
    if user is None and rows_per_user not in (None, 1):
        raise ParameterError("rows_per_user is for tables with a user column; name it with user.")
    if user is not None and rows_per_user is None:
        raise ParameterError(
            "Missing rows_per_user (--rows-per-user): how many rows of one user may count. The noise grows with it, "
            "and further rows are left out; choose it without looking at the data."
        )
    return _validate.integer("rows_per_user", 1 if rows_per_user is None else rows_per_user, low=1)


def _ask(
    table: object,
    columns: Sequence[str] | None,
    bounds: Bounds | None,
    make: Callable[[Bounds], RowQuestion],
    wishes: Wishes,
) -> Statistic:
    """Asks about columns, of which some may have no bounds yet."""
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
    if all(name in stated for name in columns):
        return release(table, make({name: stated[name] for name in columns}), None, wishes)
    # The geometry does not depend on the bounds, so the plan can be made before they are known.
    missing = [name for name in columns if name not in stated]

    def known(found: Mapping[str, tuple[float, float]]) -> RowQuestion:
        return make({name: stated.get(name) or found[name] for name in columns})

    return release(table, known(dict.fromkeys(missing, (0.0, 1.0))), BoundsSearch(Ranges(missing), known), wishes)
