"""Statistics of a table that is on this machine: every user's vector goes through the question's own protocol.

The same questions as between many machines, with the same messages, error and guarantee; what differs is who could see
the rows. Errors and warnings are for whoever holds the table: that something was refused, or much was clipped, is not
covered by ε. With a ledger there are no such warnings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import ColumnError, ParameterError, TableError
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics.bounds import MUCH, SHARE, Ranges, beyond
from cpsgd.statistics.contributions import People, Rows
from cpsgd.statistics.histograms import Histogram
from cpsgd.statistics.questions import Bounds, Groups, Planned, Question, check_bounds
from cpsgd.statistics.ranks import Quantiles
from cpsgd.statistics.results import Statistic
from cpsgd.statistics.tables import Chunk, DataTable, numbers, open_table
from cpsgd.statistics.totals import Count, Mean, Sum

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent

# Shorter vectors spend their time in the interpreter, where threads only get in each other's way.
_THREADED_DIM = 1 << 14
# Two rounds planned for so much of the shift each cost, by the accountant, no more than was asked for.
_MARGINS = (0.99, 0.97, 0.9, 0.7)
# With a larger share of a column's values beyond its bounds there is a warning.
_MUCH_CLIPPED = 0.2


class ClippingWarning(UserWarning):
    """Many values are beyond their bounds, so that a statistic is of something else than the table's values."""


class Wishes(TypedDict):
    """What all statistics take.

    Attributes:
        epsilon: ε per user, or per row where there is no user column.
        delta: δ.
        user: The column that says whose a row is; None where every row is another person's.
        group_by: One column and its (public) groups, as {"sex": ["f", "m"]}; rows of no group are left out.
        bits: Bits per coordinate of a message; the fewest within 10 % of the Gaussian mechanism's error if None.
        mechanism: "best" or the name of one.
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
        >>> table = {"age": np.arange(3000) % 90}
        >>> found = mean(table, epsilon=1.0, delta=1e-6, bounds={"age": (0, 100)}, bits=8, mechanism="binomial")
        >>> bool(found.low[0] < 44.5 < found.high[0]), found.unit
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
    """The sum of each column over all rows, at most `rows_per_user` of each user; see `Sum` and `mean`."""
    rows, group_by = _rows(rows_per_user, wishes.get("user")), wishes.get("group_by")
    if (rows > 1 or group_by is not None) and (bounds is None or set(columns or ()) - set(bounds)):
        raise ParameterError("Sums by group, or of several rows per user, need bounds of every column.")
    return _ask(table, columns, bounds, lambda known: Sum(known, rows=rows, group_by=group_by), wishes)


def count(
    table: object, *, columns: Sequence[str] = (), rows_per_user: int | None = None, **wishes: Unpack[Wishes]
) -> Statistic:
    """How many rows there are, or in how many each of some columns of 0 and 1 is 1; see `Count`."""
    rows = _rows(rows_per_user, wishes.get("user"))
    return _run(table, Count(columns, rows=rows, group_by=wishes.get("group_by")), None, wishes)


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
        >>> table = {"colour": np.array(["red", "blue"] * 500)}
        >>> asked = {"epsilon": 1.0, "delta": 1e-6, "bits": 8, "mechanism": "binomial"}
        >>> found = histogram(table, "colour", categories=["red", "blue"], **asked)
        >>> found.names, bool((abs(found.values - 500) < 60).all())
        (('red', 'blue'), True)
    """
    rows = _rows(rows_per_user, wishes.get("user"))
    asked = Histogram(column, edges=edges, categories=categories, rows=rows, group_by=wishes.get("group_by"))
    return _run(table, asked, None, wishes)


def quantiles(
    table: object,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    columns: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    bins: int = 512,
    **wishes: Unpack[Wishes],
) -> Statistic:
    """Quantiles of each column over users, each of whom counts once; see `Quantiles` and `mean`."""
    group_by = wishes.get("group_by")
    return _ask(table, columns, bounds, lambda known: Quantiles(known, quantiles, bins=bins, group_by=group_by), wishes)


def _rows(rows_per_user: int | None, user: str | None) -> int:
    if user is None and rows_per_user not in (None, 1):
        raise ParameterError("rows_per_user is for tables with a user column; name it with user.")
    if user is not None and rows_per_user is None:
        raise ParameterError(
            "Missing rows_per_user: how many rows of one user may count. The noise grows with it, and further rows are "
            "left out; choose it without looking at the data."
        )
    return _validate.integer("rows_per_user", 1 if rows_per_user is None else rows_per_user, low=1)


def _ask(
    table: object,
    columns: Sequence[str] | None,
    bounds: Bounds | None,
    make: Callable[[Bounds], Question],
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
    if strange := [name for name in stated if name not in columns]:
        raise ParameterError(f"There are bounds for {', '.join(map(repr, strange))}, which columns does not name.")
    if all(name in stated for name in columns):
        return _run(table, make({name: stated[name] for name in columns}), None, wishes)
    # The geometry does not depend on the bounds, so the plan can be made before they are known.
    missing = [name for name in columns if name not in stated]

    def known(found: Mapping[str, tuple[float, float]]) -> Question:
        return make({name: stated.get(name) or found[name] for name in columns})

    return _run(table, known(dict.fromkeys(missing, (0.0, 1.0))), _Search(Ranges(missing), known), wishes)


@dataclass(frozen=True)
class _Search:
    """Bounds are to be found first."""

    ranges: Ranges
    known: Callable[[Mapping[str, tuple[float, float]]], Question]


def _run(table: object, question: Question, search: _Search | None, wishes: Wishes) -> Statistic:
    source = open_table(table)
    source.chunks(question.needed or source.names[:1])  # complains of missing columns before any work
    user, ledger, population = wishes.get("user"), wishes.get("ledger"), wishes.get("population")
    confidence = _validate.probability("confidence", wishes.get("confidence", 0.95))
    if (ledger is None) != (population is None):
        raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")
    people = People(source, user)
    epsilon, delta = wishes["epsilon"], wishes["delta"]
    asked, first = _planned(question, search, people.count, epsilon, delta, wishes)
    if first is not None:
        beyond(first)  # refuses where nothing useful could be found
    rounds = [each for each in (first, asked) if each is not None]
    charge = _Charge.of(ledger, population, rounds, question.statistic)
    found_here = frozenset() if search is None else frozenset(search.ranges.columns)
    watch = _Watch(source, quiet=ledger is not None, found=found_here)
    advance = wishes.get("advance")
    if first is None:
        release = _simulated(people, asked, source, watch, advance)
        watch.complain()
        charge.pay()
    else:
        assert search is not None
        share = _simulated(people, first, source, None, advance)
        # Everything else is read as well before anything is paid.
        for chunk in source.chunks(question.needed):
            watch.look(question, chunk, question.points(chunk))
        watch.complain()
        charge.pay()
        found = first.reading(share(), people.count)
        bounds = {
            name: (float(low), float(high))
            for name, low, high in zip(found.names, found.low[0], found.high[0], strict=True)
        }
        asked = replace(asked, question=search.known(bounds))
        release = _simulated(people, asked, source, None, advance)
        if (tail := beyond(first)) > MUCH:
            warnings.warn(
                f"With so few users up to {100.0 * tail:.0f} % of a column's values may be beyond the bounds "
                "on either side; state bounds if you can.",
                ClippingWarning,
                stacklevel=4,
            )
    result = asked.result(release(), people.count, confidence=confidence)
    result = replace(result, unit="row" if user is None else "user")
    return result if first is None else replace(result, **_together(rounds, epsilon, delta))


def _planned(
    question: Question, search: _Search | None, clients: int, epsilon: float, delta: float, wishes: Wishes
) -> tuple[Planned, Planned | None]:
    """The question's plan, and that of the search for bounds: together within (ε, δ)."""
    chosen: dict[str, Any] = {"bits": wishes.get("bits"), "mechanism": wishes.get("mechanism", "best")}
    if search is None:
        return question.plan(clients, epsilon, delta, **chosen), None
    mu = gdp_mu(epsilon, delta)
    for margin in _MARGINS:
        shifts = (margin * mu * (1.0 - SHARE) ** 0.5, margin * mu * SHARE**0.5)
        asked, first = (
            each.plan(clients, gdp_epsilon(shift, delta), delta, **chosen)
            for each, shift in zip((question, search.ranges), shifts, strict=True)
        )
        if _total([first, asked], epsilon, delta).epsilon <= epsilon:
            return asked, first
    return (
        question.plan(clients, (1.0 - SHARE) * epsilon, (1.0 - SHARE) * delta, **chosen),
        search.ranges.plan(clients, SHARE * epsilon, SHARE * delta, **chosen),
    )


def _events(rounds: Sequence[Planned], label: str = "") -> list[RoundEvent]:
    from cpsgd.ledger import RoundEvent

    return [
        RoundEvent(each.protocol, survivors=each.protocol.clients, round=0, label=label or each.question.statistic)
        for each in rounds
    ]


def _total(rounds: Sequence[Planned], epsilon: float, delta: float) -> Any:
    from cpsgd.ledger import Budget
    from cpsgd.ledger.totals import total

    return total(Budget(population="table", epsilon=epsilon, delta=delta), [], _events(rounds))


def _together(rounds: Sequence[Planned], epsilon: float, delta: float) -> dict[str, Any]:
    """What both rounds cost: by the accountant, or added up where that is less."""
    found = _total(rounds, epsilon, delta)
    assumption = "; ".join(found.assumptions) or None
    if found.epsilon <= epsilon:
        return {
            "epsilon": found.epsilon,
            "delta": delta,
            "method": found.method,
            "citation": found.citation,
            "assumption": assumption,
        }
    spent = float(np.sum([each.plan.guarantee.epsilon for each in rounds]))
    citation = "ε and δ of both rounds added: Dwork and Roth 2014, Theorem 3.16"
    return {
        "epsilon": spent,
        "delta": delta,
        "method": "basic composition",
        "citation": citation,
        "assumption": assumption,
    }


def _simulated(
    people: People, asked: Planned, source: DataTable, watch: _Watch | None, advance: Callable[[int], object] | None
) -> Callable[[], NDArray[np.float32]]:
    """Has every user's vector added up; what it returns ends the round and gives the mean."""
    question = asked.question
    threads = 2 if asked.protocol.dim >= _THREADED_DIM else 1
    simulator = RoundSimulator(asked.protocol, 0, threads=threads)
    columns = question.needed or source.names[:1]

    def write(chunk: Chunk) -> Rows:
        points = question.points(chunk)
        if watch is not None:
            watch.look(question, chunk, points)
        return points

    for vectors in people.vectors(columns, write, asked.protocol.dim, question.combine, question.rows, advance):
        simulator.add(vectors)
    # A text file is read twice, and with fewer rows the second time there would be less noise than is accounted for.
    if simulator.count != people.count:
        raise TableError(f"{source.title} changed while it was read. Nothing was released; try again.")
    return simulator.mean


@dataclass
class _Watch:
    """Looks out for bounds, categories or groups that leave nothing of the table; not at bounds found privately."""

    source: DataTable
    quiet: bool
    found: frozenset[str] = frozenset()
    seen: int = 0
    placed: bool = False
    inside: dict[str, int] = field(default_factory=dict)

    def look(self, question: Question, chunk: Chunk, points: Rows) -> None:
        """Takes some rows into account."""
        self.seen += len(points)
        if not self.placed:
            # A row of a histogram is zero if it is in no bin.
            self.placed = bool(points.any()) if isinstance(question, Histogram) else question.anybody(chunk)
        for name in question.bounds.keys() - self.found:
            low, high = question.bounds[name]
            values = numbers(name, chunk[name], self.source.title)
            within = int(np.count_nonzero((values >= low) & (values <= high)))
            self.inside[name] = self.inside.get(name, 0) + within

    def complain(self) -> None:
        """Refuses what leaves nothing; warns of much that is clipped.

        Raises:
            ColumnError: No value is within its bounds, or no row is in a bin, category or group.
        """
        for name, within in self.inside.items():
            if within == 0:
                raise ColumnError(
                    f"{self.source.title}: no value of column {name!r} is within its bounds. Check the units and the "
                    "column; nothing was charged."
                )
            if within < (1.0 - _MUCH_CLIPPED) * self.seen and not self.quiet:
                warnings.warn(
                    f"More than {100 * _MUCH_CLIPPED:.0f} % of the values of column {name!r} are beyond its bounds and "
                    "were moved to them: the statistic is of something else than the table's values.",
                    ClippingWarning,
                    stacklevel=5,
                )
        if not self.placed:
            raise ColumnError(
                f"{self.source.title}: no row is in any of the bins, categories or groups that were given. Check how "
                "they are written; nothing was charged."
            )


@dataclass(frozen=True)
class _Charge:
    """Rounds that a population's budget is to pay for, if there is a ledger. Nothing is spent before `pay`."""

    ledger: Ledger | None
    population: str
    events: Sequence[RoundEvent]

    @classmethod
    def of(
        cls, ledger: Ledger | str | Path | None, population: str | None, rounds: Sequence[Planned], label: str
    ) -> _Charge:
        """Refuses what the budget does not allow."""
        if ledger is None or population is None:
            return cls(None, "", ())
        from cpsgd.ledger import Ledger

        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        events = _events(rounds, f"statistics: {label}")
        book.quote(population, events)
        return cls(book, population, events)

    def pay(self) -> None:
        """Charges the rounds, whose results may then be computed."""
        if self.ledger is None:
            return
        for event in self.events:
            entry = self.ledger.reserve(self.population, event)
            self.ledger.release(entry, event.survivors)
