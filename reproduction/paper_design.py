"""Designs by the paper's own accounting, its Theorem 1 and its range, for a number of bits.

For comparison only: the planner needs less noise for the same ε, and the theorem does not hold for all parameters
(docs/proofs/paper-theorem.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError, InfeasibleError
from cpsgd.paper import bounds
from cpsgd.paper.theorem import rounded_epsilon


@dataclass(frozen=True)
class PaperDesign:
    """k, m and X^max of a rotated Binomial protocol."""

    levels: int
    trials: int
    coordinate_range: float


def paper_design(
    clients: int, dim: int, epsilon: float, delta: float, clip_norm: float = 1.0, *, bits: int
) -> PaperDesign:
    """Returns the rotated Binomial protocol with k + m = 2^bits that the paper's theorem allows for one round.

    With the paper's X^max, more levels mean less noise and a larger ε. Takes the largest k that keeps (epsilon, delta),
    and m = 2^bits - k.

    Raises:
        InfeasibleError: Even k = 2 does not keep it.

    Example:
        >>> found = paper_design(10_000, 51_370, 4.0, 1e-9, bits=8)
        >>> found.levels, found.trials
        (13, 243)
    """
    size = 1 << _validate.integer("bits", bits, low=2, high=24)
    reach = bounds.coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)

    of_size = partial(
        rounded_epsilon, clients=clients, dim=dim, clip_norm=clip_norm, coordinate_range=reach, delta=delta
    )

    def kept(levels: int) -> bool:
        try:
            return of_size(levels=levels, trials=size - levels, p=0.5, rotate=True) <= epsilon
        except ConditionError:
            return False

    if not kept(2):
        raise InfeasibleError(
            f"By the paper's Theorem 1 no k and m with {bits} bits per coordinate keep ε={rounded_up(epsilon)} at "
            f"δ={delta:g}."
        )
    most, over = 2, size
    while over - most > 1:
        middle = (most + over) // 2
        most, over = (middle, over) if kept(middle) else (most, middle)
    return PaperDesign(most, size - most, reach)
