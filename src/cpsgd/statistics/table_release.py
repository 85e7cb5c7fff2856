"""The release of a statistic: what is summed, what it costs, one charge, noise drawn once, and the result.

Bounds and groups that nobody stated are found in a first pass, and paid for before the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from cpsgd.errors import ParameterError
from cpsgd.promise import Claim
from cpsgd.statistics.charge import Charge, unit_of
from cpsgd.statistics.partial import CutUsers, Job, Partial, SumTask
from cpsgd.statistics.questions import Matrix
from cpsgd.statistics.rank_choice import RankChoice, RankTask
from cpsgd.statistics.ranks import MUCH, Quantiles, Ranges, beyond
from cpsgd.statistics.results import CutOff, Reading, Statistic, shares
from cpsgd.statistics.rows import RowQuestion, check_one_user, interval_width
from cpsgd.statistics.selection import CITATION, Selection, Tally
from cpsgd.statistics.table_noise import SumRequest, TableNoise, allot, less_reserve, total
from cpsgd.statistics.table_options import Asked, StatisticOptions, events_for, unlisted
from cpsgd.statistics.users import Sizes
from cpsgd.tables import Chunk

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger

# Weights of the counts of what is cut off, beside a question's 1: two percent of ε, or one of the squared shift.
_CUTS = (0.02, 0.1)
# Confidence with which much was cut off before there is a warning.
_SURE = 0.999
# And of the search for bounds.
_SEARCH = (1.0 / 3.0, 1.0 / 3.0)
# Parts of ε and δ that find groups which are not listed.
_SELECTION_EPSILON, _SELECTION_DELTA = 1.0 / 3.0, 0.5


class ClippingWarning(UserWarning):
    """Warning that much was cut off: values beyond bounds, rows of a user beyond the limit, or rows of no group."""


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

    @property
    def question(self) -> RowQuestion:
        """The question that is asked."""
        question = self.job.tasks[0].summed
        assert isinstance(question, RowQuestion)
        return question

    def finish(
        self, partial: Partial, *, ledger: Ledger | str | Path | None = None, population: str | None = None
    ) -> Statistic:
        """Charges the ledger, draws the noise, and returns the statistic. It can be called once.

        Args:
            partial: The sums over all users.
            ledger: Charge the budget on this ledger first, or refuse.
            population: With a ledger: the population whose budget pays.

        Raises:
            BudgetExceededError: The ledger does not allow it. Nothing was released.
            TableError: There is one user only.
        """
        if not self.question.private_users:
            check_one_user(partial.users, "The table")
        self.charge(ledger, population).pay()
        released = self.job.release(partial)
        result = statistic_of(self.job.tasks, released, partial.users, self.job.user, self.confidence, self.proof)
        for caution in result.cautions:
            _warn(caution)
        return result

    def charge(self, ledger: Ledger | str | Path | None, population: str | None) -> Charge:
        """Returns the charge for the release, of which nothing is paid yet.

        Raises:
            BudgetExceededError: The ledger does not allow it.
        """
        label = f"statistics: {self.question.statistic}"
        return Charge.of(ledger, population, events_for(ledger, label, self.job.user, self.job.noises()))


def prepare(question: RowQuestion, **options: Unpack[StatisticOptions]) -> TableQuestion:
    """Prepares a question for a table that is split by user over several machines.

    Nothing is read or charged yet. The question must state its bounds and groups.

    Args:
        question: `Mean`, `Sum`, `Count`, `Histogram` or `Quantiles`; it has its own `group_by` and `missing`.
        options: Of `StatisticOptions`: epsilon, delta, user, neighbours and confidence.

    Example:
        >>> from cpsgd.statistics import Mean
        >>> ready = prepare(Mean({"age": (0, 100)}), user="id", epsilon=8.0)
        >>> parts = [ready.job.partial({"id": ids, "age": [40.0] * 300}) for ids in (range(300), range(300, 600))]
        >>> found = ready.finish(ready.job.merged(parts))
        >>> found.users, bool(abs(found.values[0] - 40) < 2)
        (600, True)
    """
    if not isinstance(question, RowQuestion):
        raise ParameterError("Expected a Mean, Sum, Count, Histogram or Quantiles as the question.")
    if extra := ", ".join(sorted(options.keys() - {"epsilon", "delta", "user", "neighbours", "confidence"})):
        raise ParameterError(f"{extra}: say it in the question, or when it is finished.")
    asked = Asked.of({}, question, options | {"missing": question.missing})
    question = question.central(asked.neighbours, asked.user)
    noises = noises_for(question, asked, asked.claim)
    return _prepared(question, noises, asked, proof_of(noises, None, asked.claim))


def requests_of(question: RowQuestion, weight: float = 1.0) -> list[SumRequest]:
    """Returns the requests for the question's sum and for the counts of users who are cut off."""
    found = [SumRequest(question.geometry, weight, weight)]
    if question.cuts:
        added, squared = (part * weight for part in _CUTS)
        found.append(SumRequest(CutUsers(question).geometry, added, squared, counts=False))
    return found


def release(
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
    asked = Asked.of(table, question, options)
    columns, rest = unlisted(options), asked.claim
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
    request = [] if search is None else [SumRequest(search.geometry, *_SEARCH, counts=False)]
    # Where both are found, the way of dividing is fixed: the search has its part before the groups are known.
    # An adaptive budget counts shifts: noise of a pure ε would cost it several times what was asked for.
    shifts = asked.claim.delta > 0.0 and Charge.counts_shifts(asked.ledger, asked.population)
    squares = True if shifts or (search is not None and selection is not None) else None
    noises = noises_for(question, asked, rest, request, squares=squares)
    found: list[TableNoise] = noises[-1:] if search is not None else []
    advance = asked.advance
    if search is not None or selection is not None:
        job = Job(() if search is None else (SumTask(search, found[0]),), asked.user, asked.missing is not None)
        first, tally = _first_pass(job, asked, question, selection)
        asked.charge(noises, selection)  # refuses if the budget does not pay for all of it
        tail = 0.0 if search is None else beyond(unknown, found[0].variance ** 0.5 / first.users, first.users)
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
            noises = noises_for(question, asked, rest, request, squares=squares)
    prepared = _prepared(
        question, noises, asked, proof_of([*noises[: 1 + bool(question.cuts)], *found], selection, asked.claim)
    )
    partial = prepared.job.partial(asked.source, advance=advance)
    return prepared.finish(partial, ledger=asked.ledger, population=asked.population)


def _prepared(question: RowQuestion, noises: Sequence[TableNoise], asked: Asked, proof: Proof) -> TableQuestion:
    job = Job(tuple(tasks_of(question, noises)), asked.user, asked.missing is not None)
    return TableQuestion(job, proof, asked.confidence)


def tasks_of(question: RowQuestion, noises: Sequence[TableNoise]) -> list[SumTask]:
    """Returns a question's sums, each with the noise that was allotted to it; ordered as in `requests_of`."""
    summed: list[RowQuestion | CutUsers] = [question, *([CutUsers(question)] if question.cuts else [])]
    # The noise may have been chosen before bounds were known: the question is the one that is asked now.
    return [
        RankTask(each, noise) if isinstance(noise, RankChoice) and isinstance(each, Quantiles) else SumTask(each, noise)
        for each, noise in zip(summed, noises, strict=False)
    ]


def noises_for(
    question: RowQuestion, asked: Asked, claim: Claim, others: Sequence[SumRequest] = (), *, squares: bool | None = None
) -> list[TableNoise]:
    """Returns the noise of a question's sums (`requests_of`) and of `others`, with the least error of the question.

    For quantiles, a private choice of bins (`RankChoice`) may replace the noise if its error is smaller; all noise then
    has pure ε. `squares` is that of `allot`; if it is True, there is no choice of bins.
    """
    requests = [*requests_of(question), *others]
    noises = allot(requests, claim, asked.neighbours, squares=squares)
    if squares:
        return noises
    pure = allot(requests, Claim(claim.epsilon, 0.0), asked.neighbours)
    nearest = nearer_of(question, noises[0], pure[0].epsilon, asked.confidence)
    return noises if nearest is noises[0] else [nearest, *pure[1:]]


def nearer_of(question: RowQuestion, noise: TableNoise, epsilon: float, confidence: float) -> TableNoise:
    """Returns the noise, or a private choice of bins at this ε where its error is smaller."""
    if not isinstance(question, Quantiles) or not question.public:
        return noise
    choice = RankChoice.of(question, epsilon, confidence)
    return choice if error_of(question, choice, 1.0) < error_of(question, noise, 1.0) else noise


def error_of(question: RowQuestion, noise: TableNoise, users: float) -> float:
    """Returns the standard error of a value; for quantiles, that of their ranks."""
    deviation = noise.variance**0.5 / users
    return deviation if isinstance(noise, RankChoice) else question.error(deviation, users)


def _split(claim: Claim, epsilon: float, delta: float) -> tuple[Claim, Claim]:
    """Splits a claim into two; the first gets the given fractions of ε and δ."""
    part = Claim(less_reserve(epsilon * claim.epsilon), delta * claim.delta)
    return part, Claim((claim.epsilon - part.epsilon) * (1.0 - 1e-15), (claim.delta - part.delta) * (1.0 - 1e-15))


def _first_pass(job: Job, asked: Asked, question: RowQuestion, selection: Selection | None) -> tuple[Partial, Tally]:
    """Reads the table once: counts the users of groups, and tries the question on all rows. Bad rows fail."""
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
    """Releases noisy sums of the first pass, and returns the bounds of columns that follow from them."""
    (sums,), users = job.release(partial), partial.users
    found = search.read((sums / users)[None], job.tasks[0].noise.variance / users**2, users, 0.0)
    ends = zip(found.names, found.low[0].tolist(), found.high[0].tolist(), strict=True)
    return {name: (low, high) for name, low, high in ends}


def proof_of(noises: Sequence[TableNoise], selection: Selection | None, claim: Claim) -> Proof:
    """Returns the (ε, δ) that all releases together keep, with its proof.

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
    asked: Asked, question: RowQuestion, selection: Selection, users: int, noises: Sequence[TableNoise]
) -> Statistic:
    """Returns a statistic without rows, for a table in which no group had enough users."""
    _warn(
        f"No group was kept: one with {selection.threshold:,} users is kept in half of all cases. Group by fewer or "
        "coarser columns, or allow a larger ε."
    )
    one = question.among(selection.columns, [("",) * len(selection.columns)]).central(asked.neighbours, asked.user)
    nothing = one.read(np.zeros((1, one.geometry.dim)), 1.0, 1.0, 0.0)
    empty = np.empty((0, len(nothing.names)))
    reading = Reading(nothing.names, (), empty, empty, empty)
    proof = proof_of(noises, selection, asked.claim)
    return _statistic(one, asked.user, asked.confidence, reading, users, proof, "partition-selection")


def statistic_of(
    tasks: Sequence[SumTask], released: Sequence[Matrix], users: int, user: str | None, confidence: float, proof: Proof
) -> Statistic:
    """Returns the statistic computed from the released sums of a question, and from `CutUsers` if it cuts off rows."""
    question = tasks[0].summed
    assert isinstance(question, RowQuestion)
    reading = tasks[0].read(released[0], users, confidence)
    cut_off: tuple[CutOff, ...] = ()
    if len(tasks) > 1:
        counts, noise = released[1], tasks[1].noise
        reach, far = (noise.variance**0.5 * interval_width(each, noise.rate) for each in (confidence, _SURE))
        everybody = float(counts[-1]) if question.private_users else float(users)
        cut_off = shares(counts[: len(question.cuts)].tolist(), reach, far, everybody, question.cuts)
    return replace(_statistic(question, user, confidence, reading, users, proof, tasks[0].noise.kind), cut_off=cut_off)


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
        unit=unit_of(user),
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
