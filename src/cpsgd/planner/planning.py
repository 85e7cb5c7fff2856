"""`plan`: from what a person wants to a `Protocol` with a proved guarantee."""

from __future__ import annotations

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.planner import modulus
from cpsgd.planner.result import FrontierPoint, Plan
from cpsgd.planner.search import MAX_BITS, best_design
from cpsgd.planner.wishes import Wishes
from cpsgd.privacy.adjacency import Adjacency, check_adjacency
from cpsgd.privacy.participation import Participation

# Without a wish for bits or error: the fewest bits that come this close to the Gaussian mechanism.
_CLOSE_TO_GAUSSIAN = 1.1


def plan(
    clients: int,
    dim: int,
    epsilon: float,
    delta: float,
    clip_norm: float = 1.0,
    *,
    bits: float | None = None,
    max_error: float | None = None,
    rounds: int = 1,
    participation: str | Participation = "every",
    adjacency: Adjacency = "replace-one",
    dropout: float = 0.0,
    colluding: int = 0,
    secure: bool = False,
    rotate: bool = True,
    overflow: float = modulus.DEFAULT_OVERFLOW,
) -> Plan:
    """Chooses k, m, X (and the modulus) with the smallest expected squared error that keep (epsilon, delta).

    Args:
        clients: n, messages a round is planned for.
        dim: d.
        epsilon: ε that all rounds together may cost a client.
        delta: δ of the guarantee.
        clip_norm: D; longer vectors are scaled down to it.
        bits: Bits a coordinate may take, up to 31. Any number: 1.6 allows the three values of k = 2, m = 1.
        max_error: Instead of `bits`: the expected squared error allowed; the fewest whole bits that meet it are taken.
            With neither, the fewest bits within 10 % of the Gaussian mechanism's error, or as near as can be.
        rounds: Rounds that will be run with the protocol.
        participation: "once", "every", "poisson:RATE" or "fixed-size:RATE" (see `Participation`).
        adjacency: "replace-one" or "zero-out".
        dropout: Share of the clients that may fail to answer; the noise of the others alone keeps the guarantee.
        colluding: Clients of a round who may tell their noise to whoever attacks; it does not count.
        secure: Sums are taken modulo the smallest power of two that will do, and `bits` must hold that.
        rotate: Whether vectors are rotated first. Without, nothing is clipped and the error is a worst case.
        overflow: With `secure`, the probability allowed a round that any coordinate of its sum wraps around.

    Returns:
        The plan. Its guarantee comes from the accounting of the returned protocol, and is at most `epsilon`.

    Raises:
        InfeasibleError: No protocol meets the wishes; the message names the nearest that can be met.

    Example:
        >>> best = plan(clients=10_000, dim=65_536, epsilon=2.0, delta=1e-9, bits=4)
        >>> best.protocol.levels, best.protocol.trials, round(best.ratio, 2)
        (3, 13, 1.07)
        >>> best.guarantee.epsilon <= 2.0
        True
    """
    wishes = Wishes.of(
        clients=clients,
        dim=dim,
        epsilon=epsilon,
        delta=delta,
        clip_norm=clip_norm,
        rounds=rounds,
        participation=Participation.parse(participation),
        adjacency=check_adjacency(adjacency),
        dropout=dropout,
        colluding=colluding,
        overflow=_validate.probability("overflow", overflow) if secure else None,
        rotate=rotate,
    )
    return best_plan(wishes, bits=bits, max_error=max_error)


def best_plan(wishes: Wishes, *, bits: float | None = None, max_error: float | None = None) -> Plan:
    """The plan for validated wishes; see `plan`."""
    if bits is not None and max_error is not None:
        raise ParameterError("Give bits or max_error, not both: each determines the other.")
    if bits is not None:
        bits = _validate.positive("bits", bits, high=MAX_BITS + 1e-9)
    if max_error is not None:
        max_error = _validate.positive("max_error", max_error)
    gaussian = wishes.gaussian_squared_error
    designs = wishes.designs(enough=_CLOSE_TO_GAUSSIAN * gaussian if max_error is None else max_error)
    if max_error is not None:
        chosen = next((b for b, design in designs.items() if design.error.total <= max_error), None)
        if chosen is None:
            raise wishes.too_accurate(designs, max_error)
    elif bits is None:
        close = (b for b, design in designs.items() if design.error.total <= _CLOSE_TO_GAUSSIAN * gaussian)
        chosen = next(close, min(designs, key=lambda b: (designs[b].error.total, b), default=None))
    else:
        chosen = bits
        if bits not in designs and (design := best_design(wishes.setting, wishes.target, bits)) is not None:
            designs[bits] = design
    if chosen is None or chosen not in designs:
        raise wishes.too_few_bits(designs, bits)
    designs[chosen], protocol, guarantee = wishes.finish(designs[chosen], chosen)
    frontier = [
        FrontierPoint(b, design.levels, design.trials, design.coordinate_range, design.modulus, error, error / gaussian)
        for b, design in sorted(designs.items())
        for error in [design.error.total]
    ]
    return Plan(
        protocol=protocol,
        guarantee=guarantee,
        wished_epsilon=wishes.target.epsilon,
        bits=chosen,
        error=designs[chosen].error,
        gaussian_squared_error=gaussian,
        frontier=tuple(frontier),
        rounds=wishes.target.rounds,
        participation=wishes.target.participation,
        surviving=wishes.setting.surviving,
        colluding=wishes.colluding,
        overflow_probability=wishes.overflow_probability(protocol),
    )
