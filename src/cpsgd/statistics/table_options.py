"""Options that all statistics of a table share, checked, and their charge to a ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.promise import Claim
from cpsgd.statistics.charge import Charge, events_of, unit_of
from cpsgd.statistics.rows import Groups, Missing, RowQuestion
from cpsgd.statistics.selection import Selection
from cpsgd.statistics.table_noise import Neighbours, TableNoise
from cpsgd.tables import DataTable, open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent


class StatisticOptions(TypedDict):
    """Options of all statistics.

    Attributes:
        epsilon: ε per user, or per row where there is no user column.
        delta: δ; 0 if not given. With a δ the noise may be Gaussian, which is less where there are many values; none
            is spent where Laplace noise is as good. Groups that are not listed need one.
        user: The column with the user of each row; None where every row is another person's.
        group_by: Columns and their (public) groups, as {"sex": ["f", "m"]}; rows of no group are left out. Or columns
            alone, as "country" or ["country", "sex"]: groups with enough users are then found privately.
        groups_per_user: The most groups that a user is counted in when groups are found.
        missing: What a missing value counts as: "drop" for nothing, "bounds" for the middle of its bounds, or a value.
            If not given, missing values are refused. Every user is kept, with or without values.
        neighbours: "replace-one": one user's rows become others, and the number of users is public. "add-remove": one
            user's rows are there or not, and the number of users is not shown.
        confidence: Of the intervals.
        ledger: Charge the budget on this ledger before anything is released, or refuse.
        population: With a ledger: the population whose budget pays.
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


def listed(options: StatisticOptions) -> Groups | None:
    """Returns the groups if the options list them, else None."""
    group_by = options.get("group_by")
    return None if unlisted(options) else group_by  # type: ignore[return-value]


def unlisted(options: StatisticOptions) -> tuple[str, ...]:
    """Returns the columns whose groups must be found privately, none if groups are listed."""
    group_by = options.get("group_by")
    if isinstance(group_by, str):
        return (group_by,)
    if isinstance(group_by, Sequence) and group_by and all(isinstance(name, str) for name in group_by):
        return tuple(group_by)
    return ()


def check_user(user: object, asked: Collection[str]) -> None:
    """Refuses a column of users that is no name, or one of the columns that are asked about."""
    if user is not None and not isinstance(user, str):
        raise ParameterError(f"Expected user to be the name of one column, got {user!r}.")
    if user in asked:
        raise ParameterError(f"{user!r} is the column of users; no question can be about it, too.")


@dataclass(frozen=True, eq=False)
class Asked:
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
    def of(cls, table: object, question: RowQuestion, options: StatisticOptions) -> Asked:
        """Refuses unknown options, for a misspelt `user` would be left out silently, and contradictions."""
        known, said = StatisticOptions.__annotations__.keys(), options.keys()
        if unknown := ", ".join(sorted(said - known)):
            raise ParameterError(f"Unknown {unknown}; there are {', '.join(sorted(known))}.")
        if "epsilon" not in said:
            raise ParameterError("Missing epsilon: a statistic is released with it.")
        user, found = options.get("user"), unlisted(options)
        check_user(user, (*question.needed, *found))
        if len(set(found)) < len(found):
            raise ParameterError("Expected group_by to name each column once.")
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
        return Charge.of(
            self.ledger, self.population, events_for(self.ledger, self.label, self.user, noises, selection)
        )


def events_for(
    ledger: object, label: str, user: str | None, noises: Sequence[TableNoise], selection: Selection | None = None
) -> list[RoundEvent]:
    """Returns the ledger's records, which cost slightly more than the releases; none without a ledger."""
    if ledger is None:
        return []
    records = [noise.record("vectors are made here of rows within bounds") for noise in noises]
    found = events_of(records, label, table_unit=unit_of(user))
    if selection is not None:
        # Whatever is (ε, δ)-private is, but for a chance of δ, no worse than a pure ε. To replace a user is to
        # remove one and to add another; a ledger may be about either.
        changes = 1 if selection.neighbours == "replace-one" else 2
        loss = changes * Fraction(selection.claim.epsilon) / 2
        record = TableNoise("discrete-laplace", 1, 1, 2.0, 1.0, selection.neighbours, loss).record("one user")
        rare = changes * selection.claim.delta
        found += events_of([record], label, round=len(found), overflow=rare, table_unit=unit_of(user))
    return found
