"""`Requirements`: what a person wants of a protocol."""

from __future__ import annotations

from dataclasses import dataclass

from cpsgd.adjacency import Adjacency
from cpsgd.planner.modulus import DEFAULT_OVERFLOW
from cpsgd.privacy.participation import Participation


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a protocol must do. Checked by `plan`.

    Attributes:
        clients: n, messages per round.
        dim: d, coordinates of a vector.
        epsilon: ε that all rounds together may cost a client; the smaller, the more private.
        delta: δ of the guarantee, which should be far below 1 / clients.
        clip_norm: D, longer vectors are scaled down to this Euclidean norm.
        bits: Bits per coordinate of a message, up to 31; fractions, too: 1.6 allows the three values of k = 2, m = 1.
        max_error: Instead of `bits`: the expected squared error allowed; the fewest whole bits that meet it are taken.
            With neither, the fewest bits within 10 % of the Gaussian mechanism's error, or as near as can be.
        rounds: Rounds that will be run with the protocol.
        participation: In which rounds a client takes part: "once" (in one at most), "every" (in all), "poisson:RATE" or
            "fixed-size:RATE" (in those it is drawn for, a share RATE of all).
        adjacency: Which data sets are neighbours: "replace-one" (a client's vector becomes any other) or "zero-out" (it
            becomes zero).
        dropout: Share of the clients that may fail to answer; the noise of the others alone keeps the guarantee.
        colluding: Clients per round who may tell their noise to whoever attacks; it does not count.
        secure: For secure aggregation: sums are taken modulo the smallest power of two that will do, and `bits` must
            hold that.
        rotate: Whether vectors are rotated first. Without, nothing is clipped and the error is a worst case.
        overflow: With `secure`, the probability allowed per round that any coordinate of its sum wraps around.
        mechanism: Name of the mechanism (see `cpsgd.mechanisms`) whose parameters are chosen.
    """

    clients: int
    dim: int
    epsilon: float
    delta: float
    clip_norm: float = 1.0
    bits: float | None = None
    max_error: float | None = None
    rounds: int = 1
    participation: str | Participation = "every"
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE
    dropout: float = 0.0
    colluding: int = 0
    secure: bool = False
    rotate: bool = True
    overflow: float = DEFAULT_OVERFLOW
    mechanism: str = "binomial"
