"""What a person wants of a protocol, as plain values: the planner takes them, files and the command line hold them."""

from __future__ import annotations

from dataclasses import dataclass

from cpsgd.planner import modulus
from cpsgd.privacy.adjacency import Adjacency
from cpsgd.privacy.participation import Participation


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a protocol is planned for.

    Attributes:
        clients: n, clients of a round: the messages it is planned for.
        dim: d, coordinates of a vector.
        epsilon: ε that all rounds together may cost a client.
        delta: δ of the guarantee. It should be far below 1 / n.
        clip_norm: D: longer vectors are scaled down to this Euclidean norm. Choose it without looking at the data.
        bits: Bits per coordinate allowed, up to 31. Any number: 1.6 allows the three values of k = 2, m = 1. Where
            neither bits nor an error are asked for: the fewest within 10 % of the Gaussian mechanism's error, or as
            near as can be.
        max_error: Instead of `bits`: the expected squared error allowed; the fewest whole bits that meet it are taken.
        rounds: Rounds that will be run with the protocol.
        participation: Who is in which round: once, every, poisson:RATE or fixed-size:RATE.
        adjacency: Which data sets are neighbours.
        dropout: Share of the clients that may fail to answer; the noise of the others alone keeps the guarantee.
        colluding: Clients of a round who may tell their noise to whoever attacks; it does not count.
        secure: Sums are taken modulo the smallest power of two that will do, and `bits` must hold that.
        rotate: Whether vectors are rotated first. Without, nothing is clipped and the error is a worst case.
        overflow: With `secure`: probability per round, at most, that any coordinate of its sum wraps around.
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
    adjacency: Adjacency = "replace-one"
    dropout: float = 0.0
    colluding: int = 0
    secure: bool = False
    rotate: bool = True
    overflow: float = modulus.DEFAULT_OVERFLOW
