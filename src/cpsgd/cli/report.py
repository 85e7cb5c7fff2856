"""`cpsgd table report`: several statistics of a table in one pass, with one budget."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cpsgd.cli import options, output
from cpsgd.cli.columns import (
    NO_BUDGET,
    TABLE,
    Budgets,
    CostOptions,
    File,
    RowsPerUser,
    facts_of,
    split_bounds,
    split_groups,
    split_missing,
    split_names,
    split_numbers,
)
from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.statistics import TableReport
    from cpsgd.statistics.rows import RowQuestion

_QUESTION = re.compile(r"(?P<kind>\w+)(?P<about> .*?)?(?: by (?P<groups>.+?))?(?: within (?P<wanted>\S+))?", re.DOTALL)
_FORMS = {
    "mean": "mean age=0:100",
    "sum": "sum paid=0:500",
    "count": "count smokes",
    "histogram": "histogram age=0,20,40,60 or histogram city in Bern,Basel",
    "quantiles": "quantiles age=0:100 at 0.1,0.5,0.9",
}
Questions = Annotated[
    list[str],
    Parameter(
        name="QUESTION",
        help="""Such as "mean age=0:100", "sum paid=0:500", "count smokes", "histogram age=0,20,40", "histogram city """
        """in Bern,Basel" or "quantiles age=0:100 at 0.5"; then " by sex=f,m" for groups, and " within 0.5" for the """
        """standard error wanted of it.""",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of a report.

    Attributes:
        user: The column with the user of each row; ε is then per user, all their rows together.
        missing: A missing value counts as: drop (nothing), bounds (their middle), or a value.
        confidence: Probability with which an interval holds the value without noise.
        json: Print one JSON object instead of text.
    """

    user: Annotated[str | None, Parameter(group=TABLE)] = None
    missing: Annotated[str | None, Parameter(group=TABLE)] = None
    confidence: float = 0.95
    json: bool = False


def run(
    file: File,
    questions: Questions,
    /,
    *,
    cost: Annotated[CostOptions, options.FLAT],
    chosen: Annotated[ReportOptions, options.FLAT] = ReportOptions(),  # noqa: B008  # frozen
    rows_per_user: RowsPerUser = None,
    budget: Budgets = NO_BUDGET,
) -> None:
    """Answer several questions about a table in one pass, so that (ε, δ) of all together protects each user.

    Without errors that are wanted every question gets the same part of the budget.
    """
    from cpsgd import statistics
    from cpsgd.tables import open_table

    if chosen.user is not None and rows_per_user is None and any(not _averages(text) for text in questions):
        raise ParameterError("Missing --rows-per-user: how many rows of one user may count.")
    asked, wanted = {}, {}
    for text in questions:
        if text in asked:
            raise ParameterError(f"{text!r} is asked twice.")
        asked[text], error = read_question(text, rows_per_user or 1, split_missing(chosen.missing))
        if error is not None:
            wanted[text] = error
    table = open_table(file)
    about: dict[str, Any] = {"user": chosen.user, "confidence": chosen.confidence, "wanted": wanted or None}
    with output.warnings_shown(), output.progress(table.rows, "rows") as advance:
        found = statistics.report(table, asked, **vars(cost), **about, **budget.arguments, advance=advance)
    if chosen.json:
        output.show_json({"file": file, **found.to_dict()})
        return
    output.show(_facts(found))


def read_question(text: str, rows: int, missing: Any) -> tuple[RowQuestion, float | None]:
    """Returns the question that a text asks, and the error that is wanted of it.

    Raises:
        ParameterError: The text is not a question.

    Example:
        >>> question, wanted = read_question("mean age=0:100 by sex=f,m within 0.5", 1, None)
        >>> question.statistic, question.bounds, question.groups, wanted
        ('mean', {'age': (0.0, 100.0)}, (('f',), ('m',)), 0.5)
    """
    from cpsgd.statistics import Count, Histogram, Mean, Quantiles, Sum

    parts = _QUESTION.fullmatch(" ".join(text.split()))
    if parts is None or parts["kind"] not in _FORMS:
        raise ParameterError(f"Expected a question such as {', '.join(map(repr, _FORMS.values()))}; got {text!r}.")
    kind, about = parts["kind"], (parts["about"] or "").strip()
    made: dict[str, Any] = {"group_by": None if parts["groups"] is None else split_groups(parts["groups"])}
    made["missing"] = missing
    if isinstance(made["group_by"], list):
        raise ParameterError(f"List the groups of a report, as 'by sex=f,m'; got {text!r}.")
    question: RowQuestion
    if kind == "count":
        question = Count(split_names(about) if about else (), rows=rows, **made)
    elif kind == "histogram":
        column, word, listed = about.partition(" in ")
        name, _, edges = about.partition("=")
        bins = {"categories": split_names(listed)} if word else {"edges": split_numbers("edges", edges)}
        question = Histogram(column if word else name, **bins, rows=rows, **made)
    else:
        where, _, ranks = about.partition(" at ")
        bounds = split_bounds(where) if where else None
        if bounds is None or (ranks and kind != "quantiles"):
            raise ParameterError(f"Expected bounds, as in {_FORMS[kind]!r}; got {text!r}.")
        if kind == "quantiles":
            question = Quantiles(bounds, split_numbers("quantiles", ranks) if ranks else (0.25, 0.5, 0.75), **made)
        else:
            question = Mean(bounds, **made) if kind == "mean" else Sum(bounds, rows=rows, **made)
    return question, None if parts["wanted"] is None else split_numbers("within", parts["wanted"])[0]


def _averages(text: str) -> bool:
    return text.split()[:1] in (["mean"], ["quantiles"])


def _facts(found: TableReport) -> list[tuple[str, str]]:
    """Returns the rows of a report's table: each question's part and values, and the joint guarantee."""
    rows: list[tuple[str, str]] = []
    for name, result in found.results.items():
        part = found.split[name]
        wanted = "" if part.wanted is None else f", {part.wanted:.3g} wanted"
        rows.append((name, f"{100 * part.share:.3g} % of the budget, error {part.error:.3g}{wanted}, {part.mechanism}"))
        values = len(result.rows())
        rows += [(f"  {label}", text) for label, text in facts_of(replace(result, bounds={}))[1 : 1 + min(values, 61)]]
        rows += [(f"  {cut.cut}", str(cut).partition(": ")[2]) for cut in result.cut_off]
    first = next(iter(found.results.values()))
    together = f"{found.claim} per {first.unit} for all together, {first.adjacency} neighbours"
    return [*rows, ("privacy", together), ("proved by", found.citation)]
