"""Statistics of a table on one machine: planned, every user's vector added up, paid for, and only then released.

The questions, messages, errors and guarantees are the same as between many machines; what differs is who could see the
rows. Errors and warnings are for the holder of the table: no ε covers that a table was refused, or that many values
were clipped. With a ledger there are no warnings. A table, or a function of the caller, can fail only before anything
is paid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ColumnError, ParameterError, TableError
from cpsgd.planner.requirements import BEST
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.statistics.aggregates import Count, Histogram, Mean, Sum
from cpsgd.statistics.planned import Charge, Matrix, Planned, Vectors, events_of, simulated
from cpsgd.statistics.ranks import MUCH, SHARE, Quantiles, Ranges, beyond
from cpsgd.statistics.rows import Bounds, Groups, People, RowQuestion, Statistic, check_bounds, size_of
from cpsgd.tables import Chunk, DataTable, numbers, open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger
    from cpsgd.ledger.charging import Total

# Within 2 % of the Gaussian mechanism from some hundreds of users on, and planned and drawn at once.
_BITS = 12
# Two rounds planned for this part of the shift each should cost, by the accountant, no more than was asked for.
_MARGINS = (0.99, 0.97, 0.9, 0.7)
# With a larger share of a column's values beyond its bounds there is a warning.
_MUCH_CLIPPED = 0.2


class ClippingWarning(UserWarning):
    """Many values are beyond their bounds, so that a statistic is not about the table's values."""


class StatisticOptions(TypedDict):
    """Options of all statistics.

    Attributes:
        epsilon: ε per user, or per row where there is no user column.
        delta: δ.
        user: The column that says whose a row is; None where every row is another person's.
        group_by: One column and its (public) groups, as {"sex": ["f", "m"]}; rows of no group are left out.
        bits: Bits per coordinate of a message. Nothing is sent on one machine: None (with "best") takes 12, as good as
            the Gaussian mechanism. With a number the error is that of such messages.
        mechanism: "best" or the name of a mechanism.
        confidence: Of the intervals.
        ledger: Charge the budget on this ledger before anything is released, or refuse.
        population: With a ledger: whose budget pays.
        advance: Called with the number of rows just read, for progress.
    """

    epsilon: float
    delta: float
    user: NotRequired[str | None]
    group_by: NotRequired[Groups | None]
    bits: NotRequired[float | None]
    mechanism: NotRequired[str]
    confidence: NotRequired[float]
    ledger: NotRequired[Ledger | str | Path | None]
    population: NotRequired[str | None]
    advance: NotRequired[Callable[[int], object] | None]


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
        bounds: Public bounds by column. Columns without any get bounds privately, from a tenth of the budget.
        options: See `StatisticOptions`.

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
    group_by = options.get("group_by")
    return _ask(table, columns, bounds, lambda known: Mean(known, group_by=group_by), options)


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
        >>> found = sum({"age": [20.0, 40.0] * 500}, bounds={"age": (0, 100)}, epsilon=4.0, delta=1e-6)
        >>> bool(abs(found.values[0] - 30_000) < 1_000)
        True
    """
    rows, group_by = _rows(rows_per_user, options.get("user")), options.get("group_by")
    if (rows > 1 or group_by is not None) and (bounds is None or set(columns or ()) - set(bounds)):
        raise ParameterError("Sums by group, or of several rows per user, need bounds of every column.")
    return _ask(table, columns, bounds, lambda known: Sum(known, rows=rows, group_by=group_by), options)


def count(
    table: object, *, columns: Sequence[str] = (), rows_per_user: int | None = None, **options: Unpack[StatisticOptions]
) -> Statistic:
    """Returns the number of rows, or the number of ones in columns of 0 and 1; see `Count`.

    Example:
        >>> found = count({"smokes": [0, 1] * 500}, columns=["smokes"], epsilon=4.0, delta=1e-6)
        >>> bool(abs(found.values[0] - 500) < 20)
        True
    """
    rows = _rows(rows_per_user, options.get("user"))
    return _release(table, Count(columns, rows=rows, group_by=options.get("group_by")), None, options)


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

    Example:
        >>> table = {"colour": ["red", "blue"] * 500}
        >>> found = histogram(table, "colour", categories=["red", "blue"], epsilon=1.0, delta=1e-6)
        >>> found.names, bool((abs(found.values - 500) < 60).all())
        (('red', 'blue'), True)
    """
    rows = _rows(rows_per_user, options.get("user"))
    asked = Histogram(column, edges=edges, categories=categories, rows=rows, group_by=options.get("group_by"))
    return _release(table, asked, None, options)


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
        >>> bool(abs(found.values[0] - 40) < 3)
        True
    """
    group_by = options.get("group_by")
    ask = lambda known: Quantiles(known, quantiles, bins=bins, group_by=group_by)  # noqa: E731
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


@dataclass(frozen=True)
class _BoundsSearch:
    """The first of two rounds, which finds bounds: its question, and the second question for given bounds."""

    ranges: Ranges
    known: Callable[[Mapping[str, tuple[float, float]]], RowQuestion]


def _ask(
    table: object,
    columns: Sequence[str] | None,
    bounds: Bounds | None,
    make: Callable[[Bounds], RowQuestion],
    options: StatisticOptions,
) -> Statistic:
    """Releases a statistic of columns, some of which may have no bounds yet."""
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

    # The geometry does not depend on the bounds, so the plan can be made before they are known.
    missing = [name for name in columns if name not in stated]
    question = known(dict.fromkeys(missing, (0.0, 1.0)))
    return _release(table, question, _BoundsSearch(Ranges(missing), known) if missing else None, options)


def _release(
    table: object, question: RowQuestion, search: _BoundsSearch | None, options: StatisticOptions
) -> Statistic:
    """Releases the statistic; charges the ledger, where there is one, before the noise is drawn.

    With a search the question's bounds are placeholders, which its geometry does not depend on.
    """
    _check(options, question)
    user, ledger, population = options.get("user"), options.get("ledger"), options.get("population")
    confidence = _validate.probability("confidence", options.get("confidence", 0.95))
    Charge.check(ledger, population)
    advance, source = options.get("advance"), open_table(table)
    people = People(source, user, question.needed)
    target = Claim(options["epsilon"], options["delta"])
    asked, first = _planned(question, search, people.count, target, options)
    rounds = [each for each in (first, asked) if each is not None]
    tail = 0.0 if first is None else beyond(first)  # refuses where no useful bounds could be found
    charge = Charge.of(ledger, population, [each.protocol for each in rounds], f"statistics: {question.statistic}")
    watch = _Watch(source, frozenset() if search is None else frozenset(search.ranges.columns), tail)
    if search is None or first is None:
        end = _add_all(people, question, asked.protocol, source, watch, advance)
        watch.complain(quiet=ledger is not None)
        charge.pay()
    else:
        end_first = _add_all(people, search.ranges, first.protocol, source, None, advance)
        # All other columns are read before anything is paid, too, and none of the caller's functions runs after that.
        for chunk in people.chunks(question.needed):
            watch.look(question, chunk)
        watch.complain(quiet=ledger is not None)
        charge.pay()
        found = first.result(end_first(), people.count).reading
        ends = zip(found.names, found.low[0].tolist(), found.high[0].tolist(), strict=True)
        question = search.known({name: (low, high) for name, low, high in ends})
        asked = replace(asked, question=question)
        end = _add_all(people, question, asked.protocol, source, None, None)
    result = replace(asked.result(end(), people.count, confidence=confidence), unit="row" if user is None else "user")
    return result if first is None else replace(result, **_together(rounds, target))


def _check(options: StatisticOptions, question: RowQuestion) -> None:
    """Refuses unknown options, for a misspelt `user` would be left out silently, and contradictions."""
    known, said = StatisticOptions.__annotations__.keys(), options.keys()
    if unknown := ", ".join(sorted(said - known)):
        raise ParameterError(f"Unknown {unknown}; there are {', '.join(sorted(known))}.")
    if missing := " and ".join(sorted({"epsilon", "delta"} - said)):
        raise ParameterError(f"Missing {missing}: a statistic is released with both.")
    if (user := options.get("user")) is not None and user in question.needed:
        raise ParameterError(f"{user!r} says whose a row is; it cannot be a column that is asked about, too.")


def _planned(
    question: RowQuestion, search: _BoundsSearch | None, clients: int, target: Claim, options: StatisticOptions
) -> tuple[Planned[Statistic], Planned[Statistic] | None]:
    """Returns the question's plan and that of the search for bounds, together within the target."""
    epsilon, delta = target.epsilon, target.delta
    chosen: dict[str, Any] = {"bits": options.get("bits"), "mechanism": options.get("mechanism", BEST)}
    if options["delta"] and chosen["bits"] is None and chosen["mechanism"] == BEST:
        chosen = {"bits": _BITS, "mechanism": "binomial"}
    if search is None:
        return question.plan(clients, epsilon, delta, **chosen), None
    mu = gdp_mu(epsilon, delta)
    for margin in _MARGINS:
        shifts = (margin * mu * (1.0 - SHARE) ** 0.5, margin * mu * SHARE**0.5)
        asked, first = (
            each.plan(clients, gdp_epsilon(shift, delta), delta, **chosen)
            for each, shift in zip((question, search.ranges), shifts, strict=True)
        )
        if _total([first, asked], target).epsilon <= epsilon:
            return asked, first
    return (
        question.plan(clients, (1.0 - SHARE) * epsilon, (1.0 - SHARE) * delta, **chosen),
        search.ranges.plan(clients, SHARE * epsilon, SHARE * delta, **chosen),
    )


def _total(rounds: Sequence[Planned[Statistic]], target: Claim) -> Total:
    from cpsgd.ledger import Budget
    from cpsgd.ledger.charging import total

    budget = Budget(population="table", epsilon=target.epsilon, delta=target.delta)
    return total(budget, [], events_of([each.protocol for each in rounds]))


def _together(rounds: Sequence[Planned[Statistic]], target: Claim) -> dict[str, Any]:
    """Returns the guarantee of both rounds: by the accountant, or added up where that is less."""
    found = _total(rounds, target)
    proof = (found.epsilon, found.method, found.citation)
    if found.epsilon > target.epsilon:
        spent = float(np.sum([each.plan.guarantee.epsilon for each in rounds]))
        citation = "ε and δ of both rounds added: Dwork and Roth 2014, Theorem 3.16"
        proof = (spent, "basic composition", citation)
    assumption = "; ".join(found.assumptions) or None
    return dict(zip(("epsilon", "method", "citation"), proof, strict=True)) | {
        "delta": target.delta,
        "assumption": assumption,
    }


def _add_all(
    people: People,
    question: RowQuestion,
    protocol: Protocol,
    source: DataTable,
    watch: _Watch | None,
    advance: Callable[[int], object] | None,
) -> Callable[[], Vectors]:
    """Adds up every user's vector. Returns a function that ends the round and returns the mean."""
    # Without the promise: it was made just now, for the number of users that is checked below.
    simulator = simulated(replace(protocol, promise=None))

    def write(chunk: Chunk) -> Matrix:
        points = question.points(chunk)
        if watch is not None:
            watch.look(question, chunk, points)
        return points

    for vectors in people.vectors(question.needed, write, protocol.dim, question.combine, question.rows, advance):
        simulator.add(vectors)
    # A text file is read twice, and with fewer rows the second time there would be less noise than is accounted for.
    if simulator.count != people.count:
        raise TableError(f"{source.title} changed while it was read. Nothing was released; try again.")
    return simulator.mean


@dataclass
class _Watch:
    """Counts the rows within their bounds, categories and groups, to refuse those that leave nothing of the table.

    Attributes:
        source: The table.
        found: Columns whose bounds are found privately. These are not counted.
        tail: The share of their values that may be beyond those bounds, on either side.
    """

    source: DataTable
    found: frozenset[str]
    tail: float
    seen: int = 0
    placed: bool = False
    inside: dict[str, int] = field(default_factory=dict)

    def look(self, question: RowQuestion, chunk: Chunk, points: Matrix | None = None) -> None:
        """Counts some rows. Without their points, all columns that points need are read."""
        self.seen += size_of(chunk)
        if points is not None and isinstance(question, Histogram):
            self.placed = self.placed or bool(points.any())  # a row in no bin is zero
        elif points is None or not self.placed:
            self.placed = question.anybody(chunk) or self.placed
        for name, (low, high) in question.bounds.items():
            if points is None or name not in self.found:
                values = numbers(name, chunk[name], self.source.title)
                within = int(np.count_nonzero((values >= low) & (values <= high)))
                self.inside[name] = self.inside.get(name, 0) + within

    def complain(self, *, quiet: bool) -> None:
        """Refuses a table of which nothing is left; warns of much clipping, unless quiet."""
        stated = {name: within for name, within in self.inside.items() if name not in self.found}
        for name, within in stated.items():
            if within == 0:
                raise ColumnError(
                    f"{self.source.title}: no value of column {name!r} is within its bounds. Check the units and the "
                    "column; nothing was charged."
                )
        if not self.placed:
            raise ColumnError(
                f"{self.source.title}: no row is in any of the bins, categories or groups that were given. Check how "
                "they are written; nothing was charged."
            )
        if self.tail > MUCH:
            # Known without the data.
            _warn(
                f"With so few users up to {100.0 * self.tail:.0f} % of a column's values may be beyond the bounds "
                "on either side; state bounds if you can."
            )
        for name, within in stated.items():
            if within < (1.0 - _MUCH_CLIPPED) * self.seen and not quiet:
                _warn(
                    f"More than {100 * _MUCH_CLIPPED:.0f} % of the values of column {name!r} are beyond its bounds and "
                    "were moved to them: the statistic is of something else than the table's values."
                )


def _warn(text: str) -> None:
    # For whoever called `mean` or one of the others.
    warnings.warn(text, ClippingWarning, stacklevel=6)
