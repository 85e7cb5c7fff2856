"""Several questions about one table: one pass over its rows, one budget, one charge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.promise import Claim
from cpsgd.statistics.charge import Charge
from cpsgd.statistics.partial import Job
from cpsgd.statistics.results import Statistic
from cpsgd.statistics.rows import RowQuestion, check_one_user
from cpsgd.statistics.table_noise import TableNoise, allot, noise_for, total
from cpsgd.statistics.table_options import check_user, events_for
from cpsgd.statistics.table_release import (
    ClippingWarning,
    error_of,
    nearer_of,
    proof_of,
    requests_of,
    statistic_of,
    tasks_of,
)
from cpsgd.statistics.users import users_of
from cpsgd.tables import DataTable, open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger


@dataclass(frozen=True)
class BudgetPart:
    """A question's part of the budget.

    Attributes:
        share: Its part of ε where ε add up, or of the squared Gaussian shift.
        epsilon: ε of this question's release by itself.
        delta: δ of it.
        mechanism: Name of its noise.
        error: Standard error that the noise adds to its values; of quantiles, to their ranks.
        wanted: The error that was asked for, if any.
    """

    share: float
    epsilon: float
    delta: float
    mechanism: str
    error: float
    wanted: float | None


@dataclass(frozen=True, eq=False)
class TableReport:
    """Statistics that share a budget.

    Attributes:
        results: The statistics by name. The ε of each is its own; together they keep `claim`.
        claim: The proved (ε, δ) of all of them.
        method: Name of the method that proved it.
        citation: The theorem behind it.
        split: Each question's part of the budget.
    """

    results: dict[str, Statistic]
    claim: Claim
    method: str
    citation: str
    split: dict[str, BudgetPart]

    def __getitem__(self, name: str) -> Statistic:
        return self.results[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON values."""
        return {
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "method": self.method,
            "citation": self.citation,
            "split": {name: vars(part) for name, part in self.split.items()},
            "results": {name: result.to_dict() for name, result in self.results.items()},
        }

    def __repr__(self) -> str:
        lines = [f"<report of {len(self.results)} questions; {self.claim} together"]
        for name, part in self.split.items():
            wanted = "" if part.wanted is None else f" (wanted {part.wanted:.3g})"
            lines.append(f"  {name}: {100 * part.share:.1f} % of the budget, error {part.error:.3g}{wanted}")
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        whole = escape(f"{len(self.results)} questions; {self.claim} together")
        return f"<p><b>{whole}</b></p>" + "".join(
            f"<h4>{escape(name)}</h4>{result._repr_html_()}" for name, result in self.results.items()
        )


def report(
    table: object,
    questions: Mapping[str, RowQuestion],
    *,
    epsilon: float,
    delta: float = 0.0,
    wanted: Mapping[str, float] | None = None,
    user: str | None = None,
    confidence: float = 0.95,
    ledger: Ledger | str | Path | None = None,
    population: str | None = None,
    advance: Callable[[int], object] | None = None,
) -> TableReport:
    """Answers several questions in one pass, with one budget, for replace-one neighbours.

    Args:
        table: Anything `cpsgd.tables.open_table` takes.
        questions: `Mean`, `Sum`, `Count`, `Histogram` and `Quantiles` by name, with their bounds, groups and rows.
        epsilon: ε of all of them together, per user, or per row where there is no user column.
        delta: δ of all of them together.
        wanted: The standard error wanted of each question, in its unit (of quantiles, of ranks, as a share of the
            users). The budget is split so that all errors are the same multiple of what is wanted. Without it, every
            question gets the same part.
        user: The column with the user of each row.
        confidence: Of the intervals.
        ledger: Charge the budget on this ledger before anything is released, or refuse.
        population: With a ledger: the population whose budget pays.
        advance: Called with the number of rows just read.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        BudgetExceededError: The ledger does not allow it.

    Warns:
        ClippingWarning: Something of many users was cut off, by a private estimate.

    Example:
        >>> from cpsgd.statistics import Count, Mean
        >>> table = {"age": [20.0, 60.0] * 500, "smokes": [0, 1] * 500}
        >>> found = report(table, {"age": Mean({"age": (0, 100)}), "smokers": Count(["smokes"])}, epsilon=4.0)
        >>> round(float(found["age"].values[0])), round(float(found["smokers"].values[0]), -2)
        (40, 500.0)
    """
    if not isinstance(questions, Mapping) or not questions:
        raise ParameterError("Expected questions as a mapping of names to Mean, Sum, Count, Histogram or Quantiles.")
    if strange := [name for name, each in questions.items() if not isinstance(each, RowQuestion)]:
        raise ParameterError(f"Expected a Mean, Sum, Count, Histogram or Quantiles as {', '.join(strange)}.")
    claim = Claim(_validate.positive("epsilon", epsilon, high=500.0), _validate.fraction("delta", delta))
    confidence = _validate.probability("confidence", confidence)
    Charge.check(ledger, population)
    if strange := [name for name in wanted or {} if name not in questions]:
        raise ParameterError(f"There are wanted errors for {', '.join(strange)}, which questions does not name.")
    asked = {name: question.central("replace-one", user) for name, question in questions.items()}
    check_user(user, {name for question in asked.values() for name in question.needed})
    source = open_table(table)
    missing = any(question.missing is not None for question in asked.values())
    goals = {name: _validate.positive(f"wanted error of {name}", goal) for name, goal in (wanted or {}).items()}
    users = _users(source, user, missing=missing) if goals else 1
    weights = _weights(asked, claim, goals, users)
    shifts = claim.delta > 0.0 and Charge.counts_shifts(ledger, population)
    noises = _split(asked, weights, claim, confidence, shifts=shifts)
    proof = proof_of([noise for part in noises.values() for noise in part], None, claim)
    tasks = {name: tasks_of(question, noises[name]) for name, question in asked.items()}
    job = Job(tuple(task for part in tasks.values() for task in part), user, missing)
    partial = job.partial(source, advance=advance)
    check_one_user(partial.users, source.title)
    label = f"statistics: report of {len(asked)} question{'' if len(asked) == 1 else 's'}"
    Charge.of(ledger, population, events_for(ledger, label, user, job.noises())).pay()
    released = iter(job.release(partial))
    results, split = {}, {}
    for name, question in asked.items():
        own = total(noises[name], claim.delta)
        sums = [next(released) for _ in tasks[name]]
        results[name] = statistic_of(tasks[name], sums, partial.users, user, confidence, own)
        noise = noises[name][0]
        error = error_of(question, noise, partial.users)
        share = weights[name] / sum(weights.values())
        split[name] = BudgetPart(share, own[0].epsilon, own[0].delta, noise.kind, error, goals.get(name))
        for caution in results[name].cautions:
            warnings.warn(f"{name}: {caution}", ClippingWarning, stacklevel=2)
    return TableReport(results, *proof, split)


def _users(source: DataTable, user: str | None, *, missing: bool) -> int:
    """Returns the table's number of users, which is public among replace-one neighbours."""
    if user is None:
        return source.rows
    return sum(len(sizes) for _, sizes in users_of(source, user, (), missing=missing))


def _weights(
    asked: Mapping[str, RowQuestion], claim: Claim, goals: Mapping[str, float], users: int
) -> dict[str, float]:
    """Returns weights that make the noise of each question proportional to its wanted error."""
    if not goals:
        return dict.fromkeys(asked, 1.0)
    found = {}
    for name, question in asked.items():
        if name not in goals:
            raise ParameterError(f"Say the error wanted of {name!r}, too, or of no question.")
        # The error if the question had all of the budget, in units of the one that is wanted.
        alone = nearer_of(question, noise_for(question.geometry, claim), claim.epsilon, 0.95)
        found[name] = error_of(question, alone, users) / goals[name]
    return found


def _split(
    asked: Mapping[str, RowQuestion], weights: Mapping[str, float], claim: Claim, confidence: float, *, shifts: bool
) -> dict[str, list[TableNoise]]:
    """Divides the budget in the better of two ways; returns the noise of each question and of its cut-off counts.

    With `shifts` it is divided by Gaussian shifts, which is all that an adaptive budget counts.
    """
    requests = {name: requests_of(question, weights[name]) for name, question in asked.items()}
    flat = [request for part in requests.values() for request in part]
    ways = []
    for squares in (True,) if shifts else (False, True) if claim.delta else (False,):
        noises = iter(allot(flat, claim, "replace-one", squares=squares))
        found = {name: [next(noises) for _ in part] for name, part in requests.items()}
        if not squares:
            pure = iter(allot(flat, Claim(claim.epsilon, 0.0), "replace-one"))
            for name, question in asked.items():
                own, *_ = [next(pure) for _ in requests[name]]
                found[name][0] = nearer_of(question, found[name][0], own.epsilon, confidence)
        # Each question's variance in units of what it would have with the whole budget, by its weight.
        errors = [
            (error_of(question, found[name][0], 1.0) / error_of(question, noise_for(question.geometry, claim), 1.0))
            ** 2
            * weights[name] ** 2
            for name, question in asked.items()
        ]
        ways.append((sum(errors), found))
    return min(ways, key=lambda way: way[0])[1]
