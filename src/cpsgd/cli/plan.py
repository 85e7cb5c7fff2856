"""`cpsgd plan`: from clients, dimension, ε, δ and bits to the best protocol."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsgd.cli import _options, _output, _render
from cpsgd.cli.privacy import AdjacencyName, guarantee_rows

if TYPE_CHECKING:
    from cpsgd.planner import Plan


def run(
    clients: Annotated[int, typer.Option(help="n, clients of a round.")],
    dim: Annotated[int, typer.Option(help="d, coordinates of a vector.")],
    epsilon: Annotated[float, typer.Option(help="ε that all rounds together may cost.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee.")],
    clip_norm: Annotated[float, typer.Option(help="D, bound on a vector's Euclidean norm.")] = 1.0,
    bits: Annotated[
        float | None,
        typer.Option(help="Bits a coordinate may take. Default: the fewest within 10 % of the Gaussian's error."),
    ] = None,
    max_error: Annotated[float | None, typer.Option(help="Instead of --bits: expected squared error allowed.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds that will be run.")] = 1,
    participation: Annotated[
        str, typer.Option(help="Who is in which round: once, every, poisson:RATE or fixed-size:RATE.")
    ] = "every",
    adjacency: Annotated[
        AdjacencyName, typer.Option(help="Which data sets are neighbours.")
    ] = AdjacencyName.replace_one,
    dropout: Annotated[float, typer.Option(help="Share of the clients that may fail to answer.")] = 0.0,
    colluding: Annotated[int, typer.Option(help="Clients of a round who may tell their noise.")] = 0,
    secure: Annotated[bool, typer.Option("--secure", help="Plan for secure aggregation modulo M.")] = False,
    overflow: Annotated[float, typer.Option(help="With --secure: overflow probability allowed a round.")] = 1e-9,
    rotate: Annotated[bool, typer.Option(help="Whether vectors are rotated first.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier into this file.")] = None,
    json: _options.Json = False,
) -> None:
    """The best protocol for what you want: k, m, X, its proved ε and its expected error."""
    from cpsgd.planner import plan

    found = plan(
        clients,
        dim,
        epsilon,
        delta,
        clip_norm,
        bits=bits,
        max_error=max_error,
        rounds=rounds,
        participation=participation,
        adjacency=adjacency.value,
        dropout=dropout,
        colluding=colluding,
        secure=secure,
        rotate=rotate,
        overflow=overflow,
    )
    if plot is not None:
        from cpsgd.reports.frontier import draw_frontier

        draw_frontier(found, plot)
    if json:
        _output.show_json(found.to_dict())
        return
    console = _render.console()
    console.print(_summary(found))
    console.print(_frontier(found))
    if plot is not None:
        console.print(f"Frontier drawn into {plot}", markup=False)


def _summary(found: Plan) -> object:
    protocol, error, number = found.protocol, found.error, _render.number
    share = {name: f"{100.0 * part / error.total:.1f} %" for name, part in asdict(error).items()}
    rows = [
        (
            "protocol",
            f"[bold]k = {protocol.levels:,}[/bold] levels, [bold]m = {protocol.trials:,}[/bold] coin flips, "
            f"[bold]X = {number(protocol.coordinate_range)}[/bold], s = {number(protocol.scale)}",
        ),
        (
            "message",
            f"{protocol.bits_per_coordinate:.4g} bits a coordinate, {protocol.message_bytes:,} bytes "
            f"(floats: {4 * protocol.dim:,})",
        ),
        (
            "error",
            f"[bold]{number(error.total)}[/bold] expected squared error: noise {share['noise']}, "
            f"rounding {share['rounding']}, clipping {share['clipping']}",
        ),
        ("", f"{found.ratio:.3f} × the exact Gaussian mechanism's {number(found.gaussian_squared_error)}"),
        *guarantee_rows(found.guarantee),
    ]
    if found.rounds > 1:
        rows.append(("rounds", f"{found.rounds:,}, participation {found.participation}"))
        if found.participation.scheme == "once":
            rows.append(("", "[yellow]no client may take part in more than one of them[/yellow]"))
    if found.surviving < protocol.clients:
        rows.append(("dropouts", f"a round that ends with fewer than {found.surviving:,} messages must be refused"))
    if protocol.modulus is not None:
        rows.append(
            ("modulus", f"{protocol.modulus:,}; a round overflows with probability ≤ {found.overflow_probability:.2g}")
        )
    return _render.facts(rows, title=f"Plan for {protocol.clients:,} clients, {protocol.dim:,} coordinates")


def _frontier(found: Plan) -> object:
    rows = [
        (
            f"{'▸ ' if point.bits == found.bits else ''}{point.bits:.4g}",
            f"{point.levels:,}",
            f"{point.trials:,}",
            _render.number(point.coordinate_range),
            _render.number(point.expected_squared_error),
            f"{point.ratio:.3f}",
        )
        for point in found.frontier
    ]
    columns = ("bits", "levels k", "trials m", "range X", "squared error", "× Gaussian")
    return _render.grid(columns, rows, title="\nFrontier: the best for each number of bits")
