"""`cpsgd audit`: attack real rounds, and compare what can be learned with what is claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import WHOLE
from cpsgd.mechanisms.options import parameters_of
from cpsgd.planner.problem import Requirements
from cpsgd.reports.numbers import rounded_down, rounded_up

if TYPE_CHECKING:
    from cpsgd.audit import AuditReport, Check
    from cpsgd.protocol import Protocol

_CLAIM = options.from_class(Requirements, "epsilon", "delta", "bits", "adjacency", unset=True)
_NO_CLAIM: Any = _CLAIM()
if TYPE_CHECKING:
    Claim = Any  # made when the program runs
else:
    Claim = Annotated[_CLAIM, Parameter(name="*", group=options.PRIVACY)]

# A round small enough to be played many times, and an ε and δ that so many rounds can see.
_CLIENTS, _DIM, _EPSILON, _DELTA = 4, 16, 2.0, 1e-3


def run(
    *,
    parameters: options.Parameters = options.NO_PARAMETERS,
    size: options.Size = options.NO_SIZE,
    claim: Claim = _NO_CLAIM,
    surviving: Annotated[
        int | None, WHOLE, Parameter(help="Messages of a round; the claim is for as many. All if not given.")
    ] = None,
    rounds: Annotated[int, WHOLE, Parameter(help="Rounds to play: more of them see more.")] = 120_000,
    plot: Annotated[
        Path | None, Parameter(metavar="FILE", help="Draw the attacker's error rates and the claimed ones.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Attack real rounds, and compare what can be learned with the ε that is claimed.

    Vectors as far apart as the protocol lets them be go through encoding, summing and decoding many times, and an
    attacker who knows everything but the noise guesses which was sent. Exit code 1 if more is learned than claimed, or
    if the sums do not follow the protocol's law.

    Without parameters of a protocol one is planned for ε = 2; without a size it is for 4 clients of 16 coordinates. δ
    is 0.001 if not given, and "replace-one" the adjacency.
    """
    from cpsgd.audit import audit

    _files.check_picture(plot)
    claim = replace(claim, **{"delta": _DELTA, "adjacency": "replace-one", **options.given(claim)})
    if parameters.file is None:
        size = replace(size, **{"clients": _CLIENTS, "dim": _DIM, **options.given(size)})
        if claim.epsilon is None and not parameters_of(parameters.mechanism):
            claim = replace(claim, epsilon=_EPSILON)
    chosen = parameters.sized(size, claim)
    with output.progress(rounds, "rounds") as advance:
        asked = {"adjacency": claim.adjacency, "rounds": rounds, "surviving": surviving}
        report = audit(chosen, claim.delta, **asked, progress=advance)
    if json:
        output.show_json({**report.to_dict(), "protocol": chosen.to_dict(), "plot": plot})
    else:
        _show(report, chosen)
    # Last, so that a picture that cannot be drawn does not take the findings with it.
    if plot is not None:
        from cpsgd.reports.pictures import draw_audit

        draw_audit(report, plot)
    if not report.passed:
        raise SystemExit(1)


def _show(report: AuditReport, protocol: Protocol) -> None:
    claimed = report.claimed
    verdict = "[bold green]PASS[/bold green]" if report.passed else "[bold red]FAIL[/bold red]"
    rows = [
        ("verdict", f"{verdict}; honest code fails with probability at most {report.false_alarm:g}"),
        (
            "claimed",
            f"[bold]ε ≤ {rounded_up(claimed.epsilon)}[/bold] at δ = {claimed.delta:g}, {claimed.adjacency} neighbours",
        ),
        ("proved by", escape(claimed.citation)),
        *([] if claimed.assumption is None else [("assuming", escape(claimed.assumption))]),
        (
            "found",
            f"[bold]ε ≥ {rounded_down(report.lower_bound)}[/bold] with confidence {report.confidence:g}, "
            f"≥ {rounded_down(report.claims[0].found)} beyond doubt",
        ),
        (
            "attack",
            f"{report.attacked_rounds:,} rounds with the canary “{report.canary}”; {report.rounds:,} rounds in all, "
            f"{report.surviving:,} messages each",
        ),
        *((name, escape(fact)) for name, fact in output.sent_facts(protocol)[:2]),
    ]
    console = output.console()
    console.print(output.facts(rows))
    claims = [(f"{claim.delta:g}", rounded_up(claim.claimed), rounded_down(claim.found)) for claim in report.claims]
    console.print(output.grid(("δ", "ε claimed ≤", "ε found ≥"), claims, title="\nClaims and findings"))
    console.print(output.facts([(check.name, _said(check)) for check in report.checks], title="Checks"))


def _said(check: Check) -> str:
    if check.limit is None:
        return f"not asked, too few coordinates to tell: {check.question}"
    verdict = "ok" if check.passed else "[bold red]FAILED[/bold red]"
    return f"{verdict}: {check.question} {check.statistic:.3g}, at most {check.limit:g}"
