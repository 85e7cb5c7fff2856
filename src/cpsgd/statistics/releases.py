"""How a statistic of a table is made: planned, every user's vector added up, paid for, and only then released.

Errors and warnings are for whoever holds the table: that something was refused, or much was clipped, is not covered by
ε. With a ledger there are no warnings. Whatever can go wrong with a table, or in a function of the caller's, does so
before anything is paid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ColumnError, ParameterError, TableError
from cpsgd.planner.requirements import BEST
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics.bounds import MUCH, SHARE, Ranges, beyond
from cpsgd.statistics.charges import Charge, events_of
from cpsgd.statistics.columns import Chunk, DataTable, numbers
from cpsgd.statistics.contributions import People, Rows, size_of
from cpsgd.statistics.histograms import Histogram
from cpsgd.statistics.questions import Groups, Planned, RowQuestion
from cpsgd.statistics.results import Statistic
from cpsgd.statistics.tables import open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger
    from cpsgd.ledger.charging import Total

# Shorter vectors spend their time in the interpreter, where threads only get in each other's way.
_THREADED_DIM = 1 << 14
# Within 2 % of the Gaussian mechanism from some hundreds of users on, and planned and drawn at once.
_BITS = 12
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
        bits: Bits per coordinate of a message. Nothing is sent here, so that with None (and "best") there are as many
            as it takes to be as good as the Gaussian mechanism, 12. With a number the error is that of such messages.
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


@dataclass(frozen=True)
class BoundsSearch:
    """Bounds are to be found first."""

    ranges: Ranges
    known: Callable[[Mapping[str, tuple[float, float]]], RowQuestion]


def release(table: object, question: RowQuestion, search: BoundsSearch | None, wishes: Wishes) -> Statistic:
    """The statistic, or nothing: charged to the ledger, where there is one, before its noise is drawn.

    Args:
        table: Anything `open_table` takes.
        question: What is asked; with a search its bounds are placeholders, which its geometry does not depend on.
        search: Where some bounds are to be found first.
        wishes: What all statistics take.
    """
    _check(wishes, question)
    user, ledger, population = wishes.get("user"), wishes.get("ledger"), wishes.get("population")
    confidence = _validate.probability("confidence", wishes.get("confidence", 0.95))
    Charge.check(ledger, population)
    epsilon, delta, advance = wishes["epsilon"], wishes["delta"], wishes.get("advance")
    source = open_table(table)
    people = People(source, user, question.needed)
    asked, first = _planned(question, search, people.count, epsilon, delta, wishes)
    rounds = [each for each in (first, asked) if each is not None]
    tail = 0.0 if first is None else beyond(first)  # refuses where nothing useful could be found
    charge = Charge.of(ledger, population, [each.protocol for each in rounds], question.statistic)
    watch = _Watch(source, frozenset() if search is None else frozenset(search.ranges.columns), tail)
    if search is None or first is None:
        end = _added_up(people, question, asked.protocol, source, watch, advance)
        watch.complain(quiet=ledger is not None)
        charge.pay()
    else:
        end_first = _added_up(people, search.ranges, first.protocol, source, None, advance)
        # Everything else is read as well before anything is paid, and nothing of the caller's runs after that.
        for chunk in people.chunks(question.needed):
            watch.look(question, chunk)
        watch.complain(quiet=ledger is not None)
        charge.pay()
        found = first.result(end_first(), people.count).reading
        ends = zip(found.names, found.low[0].tolist(), found.high[0].tolist(), strict=True)
        question = search.known({name: (low, high) for name, low, high in ends})
        asked = replace(asked, question=question)
        end = _added_up(people, question, asked.protocol, source, None, None)
    result = replace(asked.result(end(), people.count, confidence=confidence), unit="row" if user is None else "user")
    return result if first is None else replace(result, **_together(rounds, epsilon, delta))


def _check(wishes: Wishes, question: RowQuestion) -> None:
    """Refuses what cannot be meant: a word that is misspelt would be left out silently, `user` among them."""
    known, said = Wishes.__annotations__.keys(), wishes.keys()
    if unknown := ", ".join(sorted(said - known)):
        raise ParameterError(f"Unknown {unknown}; there are {', '.join(sorted(known))}.")
    if missing := " and ".join(sorted({"epsilon", "delta"} - said)):
        raise ParameterError(f"Missing {missing}: a statistic is released with both.")
    if (user := wishes.get("user")) is not None and user in question.needed:
        raise ParameterError(f"{user!r} says whose a row is; it cannot be a column that is asked about, too.")


def _planned(
    question: RowQuestion, search: BoundsSearch | None, clients: int, epsilon: float, delta: float, wishes: Wishes
) -> tuple[Planned[Statistic], Planned[Statistic] | None]:
    """The question's plan, and that of the search for bounds: together within (ε, δ)."""
    chosen: dict[str, Any] = {"bits": wishes.get("bits"), "mechanism": wishes.get("mechanism", BEST)}
    if chosen["bits"] is None and chosen["mechanism"] == BEST:
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
        if _total([first, asked], epsilon, delta).epsilon <= epsilon:
            return asked, first
    return (
        question.plan(clients, (1.0 - SHARE) * epsilon, (1.0 - SHARE) * delta, **chosen),
        search.ranges.plan(clients, SHARE * epsilon, SHARE * delta, **chosen),
    )


def _total(rounds: Sequence[Planned[Statistic]], epsilon: float, delta: float) -> Total:
    from cpsgd.ledger import Budget
    from cpsgd.ledger.charging import total

    return total(
        Budget(population="table", epsilon=epsilon, delta=delta), [], events_of([each.protocol for each in rounds])
    )


def _together(rounds: Sequence[Planned[Statistic]], epsilon: float, delta: float) -> dict[str, Any]:
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


def _added_up(
    people: People,
    question: RowQuestion,
    protocol: Protocol,
    source: DataTable,
    watch: _Watch | None,
    advance: Callable[[int], object] | None,
) -> Callable[[], NDArray[np.float32]]:
    """Has every user's vector added up; what it returns ends the round and gives the mean."""
    threads = 2 if protocol.dim >= _THREADED_DIM else 1
    # Without the promise: it was made just now, for as many users as are counted below.
    simulator = RoundSimulator(replace(protocol, promise=None), 0, threads=threads)

    def write(chunk: Chunk) -> Rows:
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
    """Looks out for bounds, categories or groups that leave nothing of the table.

    Attributes:
        source: The table.
        found: Columns whose bounds are found privately, and not looked at.
        tail: The share of their values that may be beyond those bounds, on either side.
    """

    source: DataTable
    found: frozenset[str]
    tail: float
    seen: int = 0
    placed: bool = False
    inside: dict[str, int] = field(default_factory=dict)

    def look(self, question: RowQuestion, chunk: Chunk, points: Rows | None = None) -> None:
        """Takes some rows into account. Where no points were made of them, all columns are read that points need."""
        self.seen += size_of(chunk)
        if points is not None and isinstance(question, Histogram):
            self.placed = self.placed or bool(points.any())  # a row is zero if it is in no bin
        elif points is None or not self.placed:
            self.placed = question.anybody(chunk) or self.placed
        for name, (low, high) in question.bounds.items():
            if points is None or name not in self.found:
                values = numbers(name, chunk[name], self.source.title)
                within = int(np.count_nonzero((values >= low) & (values <= high)))
                self.inside[name] = self.inside.get(name, 0) + within

    def complain(self, *, quiet: bool) -> None:
        """Refuses what leaves nothing; warns of much that is clipped, unless that is to be kept quiet.

        Raises:
            ColumnError: No value is within its bounds, or no row is in a bin, category or group.
        """
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
    # For whoever called a function of `cpsgd.statistics.home`.
    warnings.warn(text, ClippingWarning, stacklevel=6)
