"""Statistics of a table by whoever holds it: users' vectors summed as integers, paid for, and only then released.

Errors are for the holder of the table: no ε covers that a table was refused because of its types or missing values. All
else that is said about the table, also how much was cut off, is estimated privately and within ε. A table, or a
function of the caller, can fail only before anything is paid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.promise import Claim
from cpsgd.statistics.aggregates import Count, Histogram, Mean, Sum
from cpsgd.statistics.charge import Charge, events_of
from cpsgd.statistics.partial import CutUsers, Job, Partial, SumTask
from cpsgd.statistics.questions import Geometry, Matrix
from cpsgd.statistics.ranks import MUCH, Quantiles, Ranges, beyond
from cpsgd.statistics.results import CutOff, Reading, Statistic, shares
from cpsgd.statistics.rows import (
    Bounds,
    Groups,
    Missing,
    RowQuestion,
    Sizes,
    check_bounds,
    check_one_user,
    interval_width,
)
from cpsgd.statistics.selection import CITATION, Selection, Tally
from cpsgd.statistics.table_noise import Neighbours, TableNoise, Wish, allot, laplace_noise, less_reserve, total
from cpsgd.tables import Chunk, DataTable, open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent

# Weights of the counts of what is cut off, beside a question's 1: two percent of ε, or one of the squared shift.
_CUTS = (0.02, 0.1)
# Confidence with which much was cut off before there is a warning.
_SURE = 0.999
# And of the search for bounds.
_SEARCH = (1.0 / 3.0, 1.0 / 3.0)
# Parts of ε and δ that find groups which are not listed.
_SELECTION_EPSILON, _SELECTION_DELTA = 1.0 / 3.0, 0.5


class ClippingWarning(UserWarning):
    """Much was cut off: values beyond bounds, rows of a user beyond the limit, or rows of no group."""


class StatisticOptions(TypedDict):
    """Options of all statistics.

    Attributes:
        epsilon: ε per user, or per row where there is no user column.
        delta: δ; 0 if not given. With a δ the noise may be Gaussian, which is less where there are many values; none
            is spent where Laplace noise is as good. Groups that are not listed need one.
        user: The column that says whose a row is; None where every row is another person's.
        group_by: Columns and their (public) groups, as {"sex": ["f", "m"]}; rows of no group are left out. Or columns
            alone, as "country" or ["country", "sex"]: groups with enough users are then found privately.
        groups_per_user: The most groups that a user is counted in when groups are found.
        missing: What a missing value counts as: "drop" for nothing, "bounds" for the middle of its bounds, or a value.
            If not given, missing values are refused. Every user is kept, with or without values.
        neighbours: "replace-one": one user's rows become others, and the number of users is public. "add-remove": one
            user's rows are there or not, and the number of users is not shown.
        confidence: Of the intervals.
        ledger: Charge the budget on this ledger before anything is released, or refuse.
        population: With a ledger: whose budget pays.
        advance: Called with the number of rows just read, for progress.
    """

    epsilon: float
    delta: NotRequired[float]
    user: NotRequired[str | None]
    group_by: NotRequired[Groups | str | Sequence[str] | None]
    groups_per_user: NotRequired[int]
    missing: NotRequired[Missing]
    neighbours: NotRequired[Neighbours]
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
    made: dict[str, Any] = {"group_by": _listed(options), "missing": options.get("missing")}
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
    made: dict[str, Any] = {"group_by": _listed(options), "missing": options.get("missing")}
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
    asked = Count(columns, rows=rows, group_by=_listed(options), missing=options.get("missing"))
    return _release(table, asked, (), lambda known: asked, options)


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
        counted = Count(rows=rows, missing=options.get("missing"))
        found = _release(table, counted, (), lambda known: counted, options | {"group_by": [column]})
        return _as_histogram(found)
    asked = Histogram(column, edges=edges, categories=categories, group_by=_listed(options), **made)
    return _release(table, asked, (), lambda known: asked, options)


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
    made: dict[str, Any] = {"group_by": _listed(options), "missing": options.get("missing")}
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


def _listed(options: StatisticOptions) -> Groups | None:
    """Returns the groups if they are listed."""
    group_by = options.get("group_by")
    return None if _unlisted(options) else group_by  # type: ignore[return-value]


def _unlisted(options: StatisticOptions) -> tuple[str, ...]:
    """Returns the columns whose groups are to be found."""
    group_by = options.get("group_by")
    if isinstance(group_by, str):
        return (group_by,)
    if isinstance(group_by, Sequence) and group_by and all(isinstance(name, str) for name in group_by):
        return tuple(group_by)
    return ()


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

    unknown = tuple(name for name in columns if name not in stated)
    return _release(table, known(dict.fromkeys(unknown, (0.0, 1.0))), unknown, known, options)


@dataclass(frozen=True, eq=False)
class _Asked:
    """The options of a statistic, checked."""

    source: DataTable
    claim: Claim
    user: str | None
    missing: Missing
    neighbours: Neighbours
    confidence: float
    ledger: Ledger | str | Path | None
    population: str | None
    advance: Callable[[int], object] | None
    label: str

    @classmethod
    def of(cls, table: object, question: RowQuestion, options: StatisticOptions) -> _Asked:
        """Refuses unknown options, for a misspelt `user` would be left out silently, and contradictions."""
        known, said = StatisticOptions.__annotations__.keys(), options.keys()
        if unknown := ", ".join(sorted(said - known)):
            raise ParameterError(f"Unknown {unknown}; there are {', '.join(sorted(known))}.")
        if "epsilon" not in said:
            raise ParameterError("Missing epsilon: a statistic is released with it.")
        user = options.get("user")
        if user is not None and user in (*question.needed, *_unlisted(options)):
            raise ParameterError(f"{user!r} says whose a row is; it cannot be a column that is asked about, too.")
        epsilon = _validate.positive("epsilon", options["epsilon"], high=500.0)
        delta = _validate.fraction("delta", options.get("delta", 0.0))
        neighbours = options.get("neighbours", "replace-one")
        _validate.choice("neighbours", neighbours, ("replace-one", "add-remove"))
        ledger, population = options.get("ledger"), options.get("population")
        Charge.check(ledger, population)
        return cls(
            source=open_table(table),
            claim=Claim(epsilon, delta),
            user=user,
            missing=options.get("missing"),
            neighbours=neighbours,
            confidence=_validate.probability("confidence", options.get("confidence", 0.95)),
            ledger=ledger,
            population=population,
            advance=options.get("advance"),
            label=f"statistics: {question.statistic}",
        )

    def charge(self, noises: Sequence[TableNoise], selection: Selection | None = None) -> Charge:
        """Returns the charge for some of the releases, or refuses it."""
        return Charge.of(self.ledger, self.population, events_for(self.ledger, self.label, noises, selection))


def events_for(
    ledger: object, label: str, noises: Sequence[TableNoise], selection: Selection | None = None
) -> list[RoundEvent]:
    """Returns a ledger's records, dearer than the releases by a trifle; none without a ledger."""
    if ledger is None:
        return []
    found = events_of([noise.record("vectors are made here of rows within bounds") for noise in noises], label)
    if selection is not None:
        # Whatever is (ε, δ)-private is, but for a chance of δ, no worse than a pure ε. To replace a user is to
        # remove one and to add another; a ledger may be about either.
        one = Geometry(1, 1.0, 2.0, "one user", 1.0, 2.0, lattice=1)
        record = laplace_noise(one, selection.claim.epsilon, selection.neighbours).record("one user")
        changes = 1.0 if selection.neighbours == "replace-one" else 2.0
        found += events_of([record], label, overflow=changes * selection.claim.delta)
    return found


Proof = tuple[Claim, str, str]
"""What was proved, the method's name and the theorem."""


@dataclass(frozen=True, eq=False)
class TableQuestion:
    """A question that is ready to be answered from partial sums, on one machine or on many.

    Attributes:
        job: What machines sum; see `cpsgd.statistics.partial`.
        proof: What the release will keep.
        confidence: Of the intervals.
    """

    job: Job
    proof: Proof
    confidence: float = 0.95

    def finish(
        self, partial: Partial, *, ledger: Ledger | str | Path | None = None, population: str | None = None
    ) -> Statistic:
        """Charges the ledger, draws the noise, and returns the statistic. It can be called once.

        Args:
            partial: The sums over all users.
            ledger: Charge the budget on this ledger first, or refuse.
            population: With a ledger: whose budget pays.

        Raises:
            BudgetExceededError: The ledger does not allow it. Nothing was released.
            TableError: There is one user only.
        """
        question = self.job.tasks[0].summed
        assert isinstance(question, RowQuestion)
        if not question.private_users:
            check_one_user(partial.users, "The table")
        events = events_for(ledger, f"statistics: {question.statistic}", self.job.noises())
        Charge.of(ledger, population, events).pay()
        released = self.job.release(partial)
        result = statistic_of(self.job.tasks, released, partial.users, self.job.user, self.confidence, self.proof)
        for caution in result.cautions:
            _warn(caution)
        return result


def prepare(question: RowQuestion, **options: Unpack[StatisticOptions]) -> TableQuestion:
    """Prepares a question with bounds and groups that are known, for machines that each hold some users' rows.

    Args:
        question: `Mean`, `Sum`, `Count`, `Histogram` or `Quantiles`; it has its own `group_by` and `missing`.
        options: Of `StatisticOptions`: epsilon, delta, user, neighbours and confidence.

    Example:
        >>> ready = prepare(Mean({"age": (0, 100)}), user="id", epsilon=8.0)
        >>> parts = [ready.job.partial({"id": ids, "age": [40.0] * 300}) for ids in (range(300), range(300, 600))]
        >>> found = ready.finish(ready.job.merged(parts))
        >>> found.users, bool(abs(found.values[0] - 40) < 2)
        (600, True)
    """
    if extra := ", ".join(sorted(options.keys() - {"epsilon", "delta", "user", "neighbours", "confidence"})):
        raise ParameterError(f"{extra}: say it in the question, or when it is finished.")
    asked = _Asked.of({}, question, options | {"missing": question.missing})
    question = question.central(asked.neighbours, asked.user)
    noises = allot(_wishes(question), asked.claim, asked.neighbours)
    return _prepared(question, noises, asked, _proof(noises, None, asked.claim))


def _wishes(question: RowQuestion) -> list[Wish]:
    """Returns the question's sum, and that of the counts of what it cuts off."""
    found = [Wish(question.geometry)]
    if question.cuts:
        found.append(Wish(CutUsers(question).geometry, *_CUTS, counts=False))
    return found


def _release(
    table: object,
    question: RowQuestion,
    unknown: tuple[str, ...],
    known: Callable[[Mapping[str, tuple[float, float]]], RowQuestion],
    options: StatisticOptions,
) -> Statistic:
    """Releases the statistic; charges the ledger, where there is one, before the noise is drawn.

    Args:
        table: The table.
        question: The question, with any bounds where they are unknown and without groups that are to be found.
        unknown: Columns whose bounds are to be found.
        known: Returns the question for these bounds.
        options: See `StatisticOptions`.
    """
    asked = _Asked.of(table, question, options)
    columns, rest = _unlisted(options), asked.claim
    selection = search = None
    if columns:
        part, rest = _split(rest, _SELECTION_EPSILON, _SELECTION_DELTA)
        selection = Selection(columns, part, asked.neighbours, options.get("groups_per_user", 1))
        # Any groups will do until they are known.
        question = question.among(columns, [("",) * len(columns)] * 2)
    question = question.central(asked.neighbours, asked.user)
    if unknown:
        if asked.neighbours == "add-remove":
            raise ParameterError("Bounds are found only where the number of users is public; state bounds.")
        search = Ranges(unknown, "drop" if asked.missing == "bounds" else asked.missing)
    wish = [] if search is None else [Wish(search.geometry, *_SEARCH, counts=False)]
    # Where both are found, the way of dividing is fixed: the search has its part before the groups are known.
    # An adaptive budget counts shifts: noise of a pure ε would cost it several times what was asked for.
    shifts = asked.claim.delta > 0.0 and Charge.counts_shifts(asked.ledger, asked.population)
    squares = True if shifts or (search is not None and selection is not None) else None
    noises = allot([*_wishes(question), *wish], rest, asked.neighbours, squares=squares)
    found: list[TableNoise] = noises[-1:] if search is not None else []
    advance = asked.advance
    if search is not None or selection is not None:
        job = Job(() if search is None else (SumTask(search, found[0]),), asked.user, asked.missing is not None)
        first, tally = _first_pass(job, asked, question, selection)
        asked.charge(noises, selection)  # refuses if the budget does not pay for all of it
        tail = 0.0 if search is None else beyond(found[0].variance ** 0.5 / first.users, first.users)
        asked.charge(found, selection).pay()
        advance = None  # nothing of the caller's runs after a payment
        bounds = {} if search is None else _bounds(search, job, first)
        if tail > MUCH:
            _warn(
                f"With so few users up to {100.0 * tail:.0f} % of a column's values may be beyond the bounds on either "
                "side; state bounds if you can."
            )
        question = known(bounds)
        if selection is None:
            question = question.central(asked.neighbours, asked.user)
        else:
            kept = selection.select(tally)
            if not kept:
                return _no_groups(asked, question, selection, first.users, found)
            question = question.among(columns, kept).central(asked.neighbours, asked.user)
            noises = allot([*_wishes(question), *wish], rest, asked.neighbours, squares=squares)
    prepared = _prepared(
        question, noises, asked, _proof([*noises[: 1 + bool(question.cuts)], *found], selection, asked.claim)
    )
    partial = prepared.job.partial(asked.source, advance=advance)
    return prepared.finish(partial, ledger=asked.ledger, population=asked.population)


def _prepared(question: RowQuestion, noises: Sequence[TableNoise], asked: _Asked, proof: Proof) -> TableQuestion:
    tasks = [SumTask(question, noises[0])]
    if question.cuts:
        tasks.append(SumTask(CutUsers(question), noises[1]))
    return TableQuestion(Job(tuple(tasks), asked.user, asked.missing is not None), proof, asked.confidence)


def _split(claim: Claim, epsilon: float, delta: float) -> tuple[Claim, Claim]:
    """Returns two claims that add up to no more than this one; the first has these parts of ε and δ."""
    part = Claim(less_reserve(epsilon * claim.epsilon), delta * claim.delta)
    return part, Claim((claim.epsilon - part.epsilon) * (1.0 - 1e-15), (claim.delta - part.delta) * (1.0 - 1e-15))


def _first_pass(job: Job, asked: _Asked, question: RowQuestion, selection: Selection | None) -> tuple[Partial, Tally]:
    """Reads all that will be read, and counts the users of groups.

    The question is tried on all rows, so that they are refused now if at all.
    """
    tally = Tally()

    def check(chunk: Chunk, sizes: Sizes) -> None:
        question.vectors(chunk, sizes)
        if selection is not None:
            tally.update(selection.tally(chunk, sizes, missing=asked.missing is not None))

    partial = job.partial(asked.source, advance=asked.advance, check=check, columns=question.needed)
    if asked.neighbours == "replace-one":
        check_one_user(partial.users, asked.source.title)
    return partial, tally


def _bounds(search: Ranges, job: Job, partial: Partial) -> dict[str, tuple[float, float]]:
    """Releases the bounds of columns."""
    (sums,), users = job.release(partial), partial.users
    found = search.read((sums / users)[None], job.tasks[0].noise.variance / users**2, users, 0.0)
    ends = zip(found.names, found.low[0].tolist(), found.high[0].tolist(), strict=True)
    return {name: (low, high) for name, low, high in ends}


def _proof(noises: Sequence[TableNoise], selection: Selection | None, claim: Claim) -> Proof:
    """Returns what all releases together keep.

    Raises:
        RuntimeError: It is more than was asked for, which would be an error of this library. Nothing is released.
    """
    delta = claim.delta if selection is None else _split(claim, _SELECTION_EPSILON, _SELECTION_DELTA)[1].delta
    found, method, citation = total(noises, delta) if noises else (Claim(0.0, 0.0), "", "")
    if selection is not None:
        both = Claim(found.epsilon + selection.claim.epsilon, found.delta + selection.claim.delta)
        found, method, citation = both, "basic composition", "; ".join(filter(None, [CITATION, citation]))
    if found.epsilon > claim.epsilon or found.delta > claim.delta:
        raise RuntimeError(f"The releases would keep {found}, and {claim} was asked for. Nothing was released.")
    return found, method, citation


def _no_groups(
    asked: _Asked, question: RowQuestion, selection: Selection, users: int, noises: Sequence[TableNoise]
) -> Statistic:
    """Returns a statistic of no group: none had enough users."""
    _warn(
        f"No group was kept: one with {selection.threshold:,} users is kept in half of all cases. Group by fewer or "
        "coarser columns, or allow a larger ε."
    )
    one = question.among(selection.columns, [("",) * len(selection.columns)]).central(asked.neighbours, asked.user)
    nothing = one.read(np.zeros((1, one.geometry.dim)), 1.0, 1.0, 0.0)
    empty = np.empty((0, len(nothing.names)))
    reading = Reading(nothing.names, (), empty, empty, empty)
    proof = _proof(noises, selection, asked.claim)
    return _statistic(one, asked.user, asked.confidence, reading, users, proof, "partition-selection")


def statistic_of(
    tasks: Sequence[SumTask], released: Sequence[Matrix], users: int, user: str | None, confidence: float, proof: Proof
) -> Statistic:
    """Returns the statistic behind the released sums of a question and, if it cuts off, of `CutUsers`."""
    question, noise = tasks[0].summed, tasks[0].noise
    assert isinstance(question, RowQuestion)
    many = 1 if question.private_users else users
    reading = question.read(
        released[0].reshape(question.blocks, -1) / many,
        noise.variance / many**2,
        many,
        interval_width(confidence, pure=noise.is_pure),
    )
    cut_off: tuple[CutOff, ...] = ()
    if len(tasks) > 1:
        counts, deviation = released[1], tasks[1].noise.variance ** 0.5
        reach, far = (deviation * interval_width(each, pure=True) for each in (confidence, _SURE))
        everybody = float(counts[-1]) if question.private_users else float(users)
        cut_off = shares(counts[: len(question.cuts)].tolist(), reach, far, everybody, question.cuts)
    return replace(_statistic(question, user, confidence, reading, users, proof, noise.kind), cut_off=cut_off)


def _statistic(
    question: RowQuestion,
    user: str | None,
    confidence: float,
    reading: Reading,
    users: int,
    proof: Proof,
    mechanism: str,
) -> Statistic:
    claim, method, citation = proof
    return Statistic(
        statistic=question.statistic,
        reading=reading,
        confidence=confidence,
        users=None if question.private_users else users,
        epsilon=claim.epsilon,
        delta=claim.delta,
        unit="row" if user is None else "user",
        adjacency="add-remove" if question.private_users else "replace-one",
        method=method,
        citation=citation,
        assumption=None,
        bits=None,
        dim=question.geometry.dim,
        bounds=dict(question.bounds),
        mechanism=mechanism,
        group_by=question.group_by,
    )


def _warn(text: str) -> None:
    # For whoever called `mean` or one of the others.
    warnings.warn(text, ClippingWarning, stacklevel=5)
