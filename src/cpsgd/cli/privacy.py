"""`cpsgd privacy`: ε of given parameters, and its theorem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd._numbers import rounded_up
from cpsgd.cli import options, output
from cpsgd.cli.commands import COMMANDS
from cpsgd.cli.frame import WHOLE, command, new_app
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.planner.requirements import Requirements
from cpsgd.registry import parameters_of, required

if TYPE_CHECKING:
    from cpsgd.privacy.guarantees import Guarantee

    Rounds = Any  # made when the program runs
else:
    Rounds = options.from_class(Requirements, "delta", "rounds", "participation", "adjacency", "colluding")

_OUTSIDE = (
    "against anyone who sees only results, if chance assigns clients to equal cohorts, in secret, and no message is "
    "lost because of who sent it"
)

app = new_app("privacy", example=COMMANDS["privacy"].example)


@command(app, "cpsgd privacy theorem --trials 1000000 --dim 1000 --delta 1e-6 --l1 10 --l2 3 --linf 1")
def theorem(
    *,
    trials: Annotated[int, WHOLE, Parameter(help="N, the coin flips behind the noise of each coordinate of the sum.")],
    dim: Annotated[int, WHOLE, Parameter(help="d, coordinates of a vector.")],
    delta: Annotated[float, Parameter(help="δ of the guarantee.")],
    l1: Annotated[float, Parameter(help="Δ₁, L1 sensitivity.")],
    l2: Annotated[float, Parameter(help="Δ₂, L2 sensitivity.")],
    linf: Annotated[float, Parameter(help="Δ∞, L∞ sensitivity.")],
    p: Annotated[float, Parameter(help="Success probability of the coins.")] = 0.5,
    scale: Annotated[float, Parameter(help="s, the quantization scale of the mechanism.")] = 1.0,
    json: options.Json = False,
) -> None:
    """Compute ε of the paper's Theorem 1 for the Binomial mechanism f(D) + s (Binomial(N, p) - Np)."""
    from cpsgd.paper.theorem import Sensitivities, binomial_mechanism_epsilon

    epsilon = binomial_mechanism_epsilon(
        noise_trials=trials, p=p, dim=dim, delta=delta, sensitivities=Sensitivities(l1, l2, linf), scale=scale
    )
    citation = "Agarwal, Suresh, Yu, Kumar, McMahan, “cpSGD”, NeurIPS 2018, Theorem 1"
    note = "as published, for comparison; it fails for neighbours several standard deviations of the noise apart"
    data = {"epsilon": epsilon, "delta": delta, "method": "paper-theorem", "citation": citation, "note": note}
    error = dim * scale * scale * trials * p * (1.0 - p)
    rows = [
        ("ε", f"[bold]{rounded_up(epsilon, 7)}[/bold] at δ = {delta:g}"),
        ("by", citation),
        ("note", note),
        ("error", f"d s² N p(1-p) = {error:.4g}"),
    ]
    output.answer(json, data, output.facts(rows))


@command(
    app,
    "cpsgd privacy epsilon --protocol protocol.json --delta 1e-6",
    everyday=(
        *("--protocol", "--clients", "--dim", "--clip-norm", "--mechanism"),
        *("--delta", "--rounds", "--participation", "--adjacency", "--surviving", "--json"),
    ),
)
def epsilon(
    *,
    parameters: options.Parameters = options.NO_PARAMETERS,
    size: options.Size = options.NO_SIZE,
    rounds: Annotated[Rounds, Parameter(name="*", group=options.PRIVACY)],
    surviving: Annotated[int | None, WHOLE, Parameter(help="Messages a round ends with; all if not given.")] = None,
    json: options.Json = False,
) -> None:
    """Compute the smallest ε proved for a protocol, with the theorem behind it.

    The protocol is a file's, or --clients, --dim, --clip-norm and all parameters of its mechanism are given: of the
    paper's --levels, --trials and --range.
    """
    from cpsgd.privacy.guarantees import guarantee_over_rounds

    # Without defaults: an ε should be about parameters that somebody chose.
    if "--protocol" not in (said := parameters.given):
        chosen = parameters.mechanism
        needed = ["clip_norm", *required(chosen.mechanism, parameters_of(chosen))]
        options_needed = (f"--{name}".replace("_", "-") for name in needed)
        if lacking := ", ".join(option for option in options_needed if option not in said):
            raise ParameterError(f"Missing {lacking}; or give a protocol's file with --protocol.")
    protocol = parameters.sized(size)
    found = guarantee_over_rounds(protocol, **vars(rounds), surviving=surviving)
    rows = guarantee_rows(found)
    if found.rounds > 1:
        rows.insert(1, ("rounds", f"{found.rounds:,}, {found.participation}"))
    rows.append(
        ("bits", f"{protocol.bits_per_coordinate:.3f} per coordinate, {protocol.message_bytes:,} bytes per message")
    )
    rows += output.secrecy(found.participation)
    outside = outsiders(found)
    if outside is not None:
        rows.append(("outsiders", f"ε = {rounded_up(outside)} {_OUTSIDE} (docs/proofs/two-observers.md)"))
    rows += output.caution(protocol)
    if protocol.promise is not None:
        rows.append(("promised", str(protocol.promise)))
    told = None if outside is None else {"epsilon": outside, "condition": _OUTSIDE}
    facts = {**found.to_dict(), "outsiders": told, "bits_per_coordinate": protocol.bits_per_coordinate}
    output.answer(json, facts, output.facts(rows))


def outsiders(found: Guarantee) -> float | None:
    """Returns ε against anyone who sees only results; None unless it is smaller than the guarantee's."""
    from cpsgd.privacy import outsiders_epsilon

    try:
        epsilon = outsiders_epsilon(found.run, found.delta)
    except (ConditionError, ParameterError):  # nothing is proved, or δ / rounds is too small to compute with
        return None
    return epsilon if epsilon < found.epsilon else None


def guarantee_rows(found: Guarantee) -> list[tuple[str, str]]:
    """Returns the rows of a table about a guarantee."""
    rows = [
        ("ε", f"[bold]{rounded_up(found.epsilon)}[/bold] at δ = {found.delta:g}, {found.adjacency} neighbours"),
        ("proved by", escape(found.citation)),
        ("noise of", f"{found.noise_clients:,} clients; {found.tail:.2g} of δ pays for the tails"),
    ]
    if found.assumption is not None:
        rows.append(("assuming", escape(found.assumption)))
    for index, (method, result) in enumerate(found.alternatives):
        text = result if isinstance(result, str) else f"ε = {rounded_up(result)}"
        rows.append(("otherwise" if index == 0 else "", f"[dim]{escape(f'{method}: {text}')}[/dim]"))
    return rows
