"""`cpsgd privacy`: what given parameters protect, and by which theorem."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cpsgd.cli import _options, _output, _render

if TYPE_CHECKING:
    from cpsgd.privacy.guarantee import Guarantee

app = typer.Typer(help="What given parameters protect, and by which theorem.", no_args_is_help=True)


class AdjacencyName(StrEnum):
    """Which data sets are neighbours."""

    replace_one = "replace-one"
    zero_out = "zero-out"


@app.command()
def theorem(
    trials: Annotated[int, typer.Option(help="N, the coin flips behind the noise of each coordinate of the sum.")],
    dim: Annotated[int, typer.Option(help="d, coordinates of a vector.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee.")],
    l1: Annotated[float, typer.Option("--l1", help="Δ₁, L1 sensitivity.")],
    l2: Annotated[float, typer.Option("--l2", help="Δ₂, L2 sensitivity.")],
    linf: Annotated[float, typer.Option("--linf", help="Δ∞, L∞ sensitivity.")],
    p: Annotated[float, typer.Option("--p", help="Success probability of the coins.")] = 0.5,
    scale: Annotated[float, typer.Option(help="s, the quantization scale of the mechanism.")] = 1.0,
    json: _options.Json = False,
) -> None:
    """ε of the paper's Theorem 1 for the Binomial mechanism f(D) + s (Binomial(N, p) - Np)."""
    from cpsgd.privacy import Sensitivities, binomial_mechanism_epsilon

    epsilon = binomial_mechanism_epsilon(
        noise_trials=trials, p=p, dim=dim, delta=delta, sensitivities=Sensitivities(l1, l2, linf), scale=scale
    )
    citation = "Agarwal, Suresh, Yu, Kumar, McMahan, “cpSGD”, NeurIPS 2018, Theorem 1"
    note = "as published, for comparison; it fails for neighbours several standard deviations of the noise apart"
    if json:
        facts = {"epsilon": epsilon, "delta": delta, "method": "paper-theorem", "citation": citation, "note": note}
        _output.show_json(facts)
        return
    error = dim * scale * scale * trials * p * (1.0 - p)
    rows = [
        ("ε", f"[bold]{_render.rounded_up(epsilon, 7)}[/bold] at δ = {delta:g}"),
        ("by", citation),
        ("note", note),
        ("error", f"d s² N p(1-p) = {_render.number(error)}"),
    ]
    _render.console().print(_render.facts(rows))


@app.command()
def epsilon(
    clients: Annotated[int, typer.Option(help="n, clients of a round.")],
    dim: Annotated[int, typer.Option(help="d, coordinates of a vector.")],
    levels: Annotated[int, typer.Option(help="k, levels a coordinate is rounded to.")],
    trials: Annotated[int, typer.Option(help="m, coin flips a client adds to each coordinate.")],
    clip_norm: Annotated[float, typer.Option(help="D, bound on a vector's Euclidean norm.")],
    coordinate_range: Annotated[float, typer.Option("--range", help="X, coordinates are clipped to ±X.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee, in total.")],
    p: Annotated[float, typer.Option("--p", help="Success probability of the coins.")] = 0.5,
    adjacency: Annotated[
        AdjacencyName, typer.Option(help="Which data sets are neighbours.")
    ] = AdjacencyName.replace_one,
    rotate: Annotated[bool, typer.Option(help="Whether vectors are rotated first.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds with these parameters.")] = 1,
    participation: Annotated[
        str, typer.Option(help="Who is in which round: once, every, poisson:RATE or fixed-size:RATE.")
    ] = "every",
    surviving: Annotated[int | None, typer.Option(help="Messages a round ends with; all if not given.")] = None,
    colluding: Annotated[int, typer.Option(help="Clients of a round who may tell their noise.")] = 0,
    json: _options.Json = False,
) -> None:
    """The smallest ε proved for a protocol, with the theorem behind it."""
    from cpsgd.privacy.rounds import guarantee_over_rounds
    from cpsgd.protocol import Protocol

    protocol = Protocol(
        clients=clients,
        dim=dim,
        clip_norm=clip_norm,
        coordinate_range=coordinate_range,
        levels=levels,
        trials=trials,
        p=p,
        rotate=rotate,
    )
    found = guarantee_over_rounds(
        protocol,
        delta,
        rounds=rounds,
        participation=participation,
        adjacency=adjacency.value,
        surviving=surviving,
        colluding=colluding,
    )
    if json:
        _output.show_json({**found.to_dict(), "bits_per_coordinate": protocol.bits_per_coordinate})
        return
    rows = guarantee_rows(found)
    if rounds > 1:
        rows.insert(1, ("rounds", f"{rounds:,}, {found.participation}"))
    rows.append(
        ("bits", f"{protocol.bits_per_coordinate:.3f} a coordinate, {protocol.message_bytes:,} bytes a message")
    )
    _render.console().print(_render.facts(rows))


def guarantee_rows(found: Guarantee) -> list[tuple[str, str]]:
    """A guarantee as names and values, for a table."""
    rows = [
        (
            "ε",
            f"[bold]{_render.rounded_up(found.epsilon)}[/bold] at δ = {found.delta:g}, {found.adjacency} neighbours",
        ),
        ("proved by", escape(found.citation)),
        ("noise of", f"{found.noise_clients:,} clients; {found.tail:.2g} of δ pays for the tails"),
    ]
    for index, (method, result) in enumerate(found.alternatives):
        text = result if isinstance(result, str) else f"ε = {_render.rounded_up(result)}"
        rows.append(("otherwise" if index == 0 else "", f"[dim]{escape(f'{method}: {text}')}[/dim]"))
    return rows
