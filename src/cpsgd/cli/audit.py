"""`cpsgd audit`: attack real rounds, and compare what can be learned with what is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd._numbers import rounded_down, rounded_up
from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import ParameterError
from cpsgd.planner.requirements import Requirements
from cpsgd.registry import parameters_of

if TYPE_CHECKING:
    from cpsgd.audit import AuditReport, Check, Survey
    from cpsgd.protocol import Protocol

_CLAIM = options.from_class(Requirements, "epsilon", "delta", "bits", "adjacency", unset=True)
_NO_CLAIM: Any = _CLAIM()
if TYPE_CHECKING:
    Claim = Any  # made when the program runs
else:
    Claim = Annotated[_CLAIM, Parameter(name="*", group=options.PRIVACY)]

# A round small enough to be played many times, with an ε and δ that this many rounds can detect.
_CLIENTS, _DIM, _EPSILON, _DELTA = 4, 16, 2.0, 1e-3
# Rounds of an attack: on one protocol, and on each of all there are.
_ROUNDS, _ROUNDS_OF_EACH = 120_000, 3_000
# Two servers check a proof with every message: so few rounds, of so few messages.
_ROUNDS_OF_TASK, _MESSAGES_OF_TASK = 1_000, 4


def run(
    *,
    parameters: options.Parameters = options.NO_PARAMETERS,
    size: options.Size = options.NO_SIZE,
    claim: Claim = _NO_CLAIM,
    surviving: Annotated[
        int | None, WHOLE, Parameter(help="Messages of a round; the claim is for as many. All if not given.")
    ] = None,
    rounds: Annotated[
        int | None,
        WHOLE,
        Parameter(help="Rounds to attack: more of them see more. 120,000 of one protocol, 3,000 of each if not given."),
    ] = None,
    task: Annotated[
        Path | None,
        options.file_option("Audit a task of two servers instead: 1,000 rounds of 4 messages if not given otherwise."),
    ] = None,
    model: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="Audit the trained model in this folder instead, by its canaries."),
    ] = None,
    plot: Annotated[Path | None, options.file_option("Draw the attacker's error rates and the claimed ones.")] = None,
    json: options.Json = False,
) -> None:
    """Attack real rounds, and compare what can be learned with the ε that is claimed.

    Vectors as far apart as the protocol lets them be go through encoding, summing and decoding many times, and an
    attacker who knows everything but the noise guesses which was sent. Exit code 1 if more is learned than claimed, or
    if the sums do not follow the protocol's law: in several rounds, even and odd, at every SIMD level of this machine.

    Without a protocol, a size or an ε, every mechanism and sampler is audited, in one to two minutes. With an ε or a
    size one protocol is planned: for ε = 2, 4 clients and 16 coordinates where these are not given. δ is 0.001 if not
    given, and "replace-one" the adjacency.

    With --task, the messages are split, proved and checked as two servers do it, and the claim is for as many as are
    played.

    With --model, the model of `cpsgd train --canaries 1000`, or that `private.export` wrote after
    `make_private(..., canaries=1000)`: made-up updates, of which half were trained on, are told apart by the released
    means.
    """
    if model is not None:
        _audit_model(model, json=json)
        return
    from cpsgd.audit import Case, all_cases, survey
    from cpsgd.audit.cases import left_out
    from cpsgd.audit.levels import others

    _files.check_picture(plot)
    named = parameters != options.NO_PARAMETERS or bool(options.given(size))
    named = named or any(name in options.given(claim) for name in ("epsilon", "bits"))
    if task is not None and named:
        raise ParameterError("The task already fixes the protocol: leave its parameters, size, ε and bits out.")
    claim = replace(claim, **{"delta": _DELTA, "adjacency": "replace-one", **options.given(claim)})
    made = None
    if task is not None:
        from cpsgd.audit.pair_rounds import two_servers
        from cpsgd.engines.pair.task import PairTask

        chosen, made, named = PairTask.read(task).protocol, two_servers, True
        cases: tuple[Case, ...] = (Case(chosen.mechanism.name, chosen),)
        surviving = min(_MESSAGES_OF_TASK, chosen.clients) if surviving is None else surviving
    elif named:
        if parameters.file is None:
            size = replace(size, **{"clients": _CLIENTS, "dim": _DIM, **options.given(size)})
            if claim.epsilon is None and not parameters_of(parameters.mechanism):
                claim = replace(claim, epsilon=_EPSILON)
        chosen = parameters.sized(size, claim)
        cases = (Case(chosen.mechanism.name, chosen),)
    else:
        if surviving is not None:
            raise ParameterError("--surviving is for one protocol: name it, or leave --surviving out.")
        cases = all_cases()
    usual = _ROUNDS_OF_EACH if not named else _ROUNDS if task is None else _ROUNDS_OF_TASK
    at_levels = others() if made is None else ()
    with output.progress(len(cases) * (1 + len(at_levels)), "protocols and levels") as advance:
        found = survey(
            cases,
            claim.delta,
            adjacency=claim.adjacency,
            rounds=usual if rounds is None else rounds,
            surviving=surviving,
            made=made,
            progress=advance,
        )
    # The first of all is the one that is planned by default.
    report = found.covered[0].report
    assert report is not None
    not_covered = {} if named else left_out()
    single = {**report.to_dict(), "protocol": cases[0].protocol.to_dict()} if named else {}
    data = {**single, **found.to_dict(), "left_out": not_covered, "plot": plot}
    output.answer(json, data, *_tables(report, cases[0].protocol, found, not_covered, whole=not named))
    # Last, so that a picture that cannot be drawn does not take the findings with it.
    if plot is not None:
        from cpsgd.reports.pictures import draw_audit

        draw_audit(report, plot)
    if not found.passed:
        raise SystemExit(1)


def _audit_model(folder: Path, *, json: bool) -> None:
    """Audits a trained model; exit code 1 if its claim is refuted."""
    from cpsgd.learning.canaries import audit_folder

    found = audit_folder(folder)
    verdict = "[bold green]PASS[/bold green]" if found.passed else "[bold red]FAIL[/bold red]"
    honest = f"honest code fails with probability at most {1.0 - found.confidence:.2g}"
    rows = [
        ("verdict", f"{verdict}; {honest}"),
        ("claimed", f"[bold]ε ≤ {rounded_up(found.claimed)}[/bold] at δ = {found.delta:g}, one {found.unit}"),
        ("found", f"[bold]{found.finding}[/bold]"),
        ("attack", f"{found.right:,} of {found.guesses:,} guesses right, {found.canaries:,} canaries"),
        ("method", "Steinke, Nasr and Jagielski, “Privacy Auditing with One (1) Training Run”, NeurIPS 2023"),
    ]
    output.answer(json, found.to_dict(), output.facts(rows))
    if not found.passed:
        raise SystemExit(1)


def _tables(
    report: AuditReport, protocol: Protocol, found: Survey, not_covered: dict[str, str], *, whole: bool
) -> Iterator[object]:
    verdict = "[bold green]PASS[/bold green]" if found.passed else "[bold red]FAIL[/bold red]"
    rows = [("verdict", f"{verdict}; honest code fails with probability at most {found.false_alarm:g}")]
    yield output.facts([*rows, *([] if whole else _facts(report, protocol))])
    if not whole:
        claims = [(f"{claim.delta:g}", rounded_up(claim.claimed), rounded_down(claim.found)) for claim in report.claims]
        yield output.grid(("δ", "ε claimed ≤", "ε found ≥"), claims, title="\nClaims and findings")
        yield output.facts([(check.name, _verdict(check)) for check in found.covered[0].checks], title="Checks")
    yield from _covered(found)
    if whole:
        yield output.facts(list(not_covered.items()), title="Not covered")


def _facts(report: AuditReport, protocol: Protocol) -> list[tuple[str, str]]:
    claimed = report.claimed
    return [
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


def _covered(found: Survey) -> Iterator[object]:
    """Yields tables: a line for every protocol, the SIMD levels and round numbers, and failures."""
    lines, failures = [], []
    for case in dict.fromkeys(each.case for each in found.covered):
        covered = [each for each in found.covered if each.case is case]
        report = covered[0].report
        lines.append(
            (
                case.name,
                str(case.protocol.dim),
                f"{sum(each.rounds for each in covered):,}",
                "" if report is None else rounded_up(report.claimed.epsilon),
                "" if report is None else rounded_down(report.lower_bound),
                "ok" if all(each.passed for each in covered) else "FAILED",
            )
        )
        failures += [
            (f"{case.name}, {each.level}", _verdict(check))
            for each in covered
            for check in each.checks
            if not check.passed
        ]
    if not found.agreement.passed:
        failures.append(("levels", _verdict(found.agreement)))
    numbers = sorted({number for each in found.covered for number in each.numbers})
    columns = ("protocol", "d", "rounds", "claimed ε ≤", "found ε ≥", "verdict")
    yield output.grid(columns, lines, title="\nCovered", whole=("protocol", "rounds", "verdict"))
    rows = [("SIMD levels", ", ".join(found.levels)), ("round numbers", ", ".join(f"{n:,}" for n in numbers))]
    yield output.facts(rows)
    if failures:
        yield output.facts(failures, title="\nFailures")


def _verdict(check: Check) -> str:
    if check.limit is None:
        return f"not asked, too few coordinates to tell: {check.question}"
    verdict = "ok" if check.passed else "[bold red]FAILED[/bold red]"
    return f"{verdict}: {check.question} {check.statistic:.3g}, at most {check.limit:g}"
