"""`cpsgd audit`: attack real rounds, and compare what can be learned with what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cpsgd.cli import _options, _output, _render
from cpsgd.cli.privacy import AdjacencyName
from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.audit import AuditReport, Check
    from cpsgd.protocol import Protocol

# A round small enough to be played many times, and an ε and δ that so many rounds can see.
_CLIENTS, _DIM, _EPSILON, _DELTA = 4, 16, 2.0, 1e-3
_ROUNDS = 120_000
_PICTURES = (".png", ".pdf", ".svg")


def run(
    clients: Annotated[
        int | None, typer.Option(help="n: clients the round is planned for.", show_default=str(_CLIENTS))
    ] = None,
    dim: Annotated[int | None, typer.Option(help="d: coordinates of a vector.", show_default=str(_DIM))] = None,
    protocol: _options.ProtocolFile = None,
    clip_norm: _options.ClipNorm = None,
    levels: _options.Levels = None,
    trials: _options.Trials = None,
    p: _options.SuccessProbability = None,
    coordinate_range: _options.CoordinateRange = None,
    rotate: _options.Rotate = None,
    seed: _options.Seed = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="ε the planner may spend, where no parameters are given.",
            show_default=f"{_EPSILON:g}",
            rich_help_panel="Privacy",
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of the claim.", rich_help_panel="Privacy")] = _DELTA,
    bits: _options.Bits = None,
    adjacency: Annotated[
        AdjacencyName, typer.Option(help="Which data sets are neighbours.", rich_help_panel="Privacy")
    ] = AdjacencyName.replace_one,
    surviving: Annotated[
        int | None, typer.Option(help="Messages of a round; the claim is for as many.", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds to play: more of them see more.")] = _ROUNDS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the attacker's error rates and the claimed ones.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Attack real rounds, and compare what can be learned with the ε that is claimed.

    Vectors as far apart as the protocol lets them be go through encoding, summing and decoding many times, and an
    attacker who knows everything but the noise guesses which was sent. Exit code 1 if more is learned than claimed, or
    if the sums do not follow the protocol's law.
    """
    from cpsgd.audit import audit

    if plot is not None and plot.suffix.lower() not in _PICTURES:
        raise ParameterError(f"Expected --plot to name a file ending in {', '.join(_PICTURES)}, got {plot}.")
    given = (protocol, levels, trials, p, coordinate_range)
    parameters = _options.Parameters(
        file=protocol,
        clip_norm=clip_norm,
        levels=levels,
        trials=trials,
        p=p,
        coordinate_range=coordinate_range,
        rotate=rotate,
        seed=seed,
        epsilon=_EPSILON if epsilon is None and all(value is None for value in given) else epsilon,
        delta=delta,
        bits=bits,
    )
    if protocol is not None and (clients, dim) != (None, None):
        raise ParameterError("The protocol file already fixes --clients and --dim; leave them out.")
    chosen = parameters.protocol(clients=_CLIENTS if clients is None else clients, dim=_DIM if dim is None else dim)
    with _output.progress(rounds, "rounds") as advance:
        report = audit(chosen, delta, adjacency=adjacency.value, rounds=rounds, surviving=surviving, progress=advance)
    if json:
        _output.show_json(
            {**report.to_dict(), "protocol": chosen.to_dict(), "plot": None if plot is None else str(plot)}
        )
    else:
        _show(report, chosen)
    # Last, so that a picture that cannot be drawn does not take the findings with it.
    if plot is not None:
        from cpsgd.reports.audit import draw_audit

        draw_audit(report, plot)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: AuditReport, protocol: Protocol) -> None:
    claimed = report.claimed
    verdict = "[bold green]PASS[/bold green]" if report.passed else "[bold red]FAIL[/bold red]"
    rows = [
        ("verdict", f"{verdict}; an honest carrier fails with probability at most {report.false_alarm:g}"),
        (
            "claimed",
            f"[bold]ε ≤ {_render.rounded_up(claimed.epsilon)}[/bold] at δ = {claimed.delta:g}, "
            f"{claimed.adjacency} neighbours",
        ),
        ("proved by", escape(claimed.citation)),
        (
            "found",
            f"[bold]ε ≥ {_below(report.lower_bound)}[/bold] with confidence {report.confidence:g}, "
            f"≥ {_below(report.claims[0].found)} beyond doubt",
        ),
        (
            "attack",
            f"{report.attacked_rounds:,} rounds with the canary “{report.canary}”; {report.rounds:,} rounds in all, "
            f"{report.surviving:,} messages each",
        ),
        *((name, escape(fact)) for name, fact in _output.sent_facts(protocol)[:2]),
    ]
    console = _render.console()
    console.print(_render.facts(rows))
    claims = [(f"{claim.delta:g}", _render.rounded_up(claim.claimed), _below(claim.found)) for claim in report.claims]
    console.print(_render.grid(("δ", "ε claimed ≤", "ε found ≥"), claims, title="\nClaims and findings"))
    console.print(_render.facts([(check.name, _said(check)) for check in report.checks], title="Checks"))


def _said(check: Check) -> str:
    if check.limit is None:
        return f"not asked, too few coordinates to tell: {check.question}"
    verdict = "ok" if check.passed else "[bold red]FAILED[/bold red]"
    return f"{verdict}: {check.question} {check.statistic:.3g}, at most {check.limit:g}"


def _below(epsilon: float) -> str:
    """Three digits of a lower bound, never more than it is."""
    return f"{int(1e3 * epsilon) / 1e3:g}"
