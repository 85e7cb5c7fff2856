"""Which two data sets are neighbours, and how far apart one client's vector can be in lattice units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, cast, get_args

from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Adjacency = Literal["replace-one", "zero-out"]
"""Neighbouring data sets.

"replace-one": one client's vector is replaced by any other (the paper's notion). "zero-out": one client's vector
is replaced by the zero vector; the client still answers and still adds its noise. A client that vanished
altogether would take its noise along, so plain add/remove is not what the mechanism offers.
"""

# Four float operations, each within 2^-53 of the exact result; one spare.
_ROUNDING = 1.0 + 5 * 2.0**-53


def check_adjacency(adjacency: str) -> Adjacency:
    """Returns the adjacency, or raises `ParameterError` with the known names."""
    if adjacency in get_args(Adjacency):
        return cast(Adjacency, adjacency)
    raise ParameterError(f"Expected adjacency to be one of {list(get_args(Adjacency))}, got {adjacency!r}.")


def distance(adjacency: Adjacency, clip_norm: float) -> float:
    """Largest Euclidean distance of two neighbours' vectors: 2D for replace-one, D for zero-out."""
    return 2.0 * clip_norm if check_adjacency(adjacency) == "replace-one" else clip_norm


def lattice_sensitivity(protocol: Protocol, adjacency: Adjacency) -> float:
    """S, the largest Euclidean distance of two neighbours' vectors in units of the scale s, rounded up.

    S = 2D/s for replace-one and D/s for zero-out, but never more than the diagonal of the cube the coordinates are
    clipped to (√d (k - 1), half of it for zero-out). Rotation keeps distances and clipping coordinates is a
    projection on a convex set, so neither increases S. The encoder's finite resolution does not either: it rounds
    on a fixed grid of fractions of s, and shrinks a vector whose norm *on that grid* exceeds D/s, so that S bounds
    what is really rounded and sent. Rounding is then exact on the grid.

    Args:
        protocol: A Binomial protocol.
        adjacency: "replace-one" or "zero-out".

    Returns:
        S, an upper bound.
    """
    if protocol.sigma is not None:
        raise ParameterError("The Gaussian protocol sends floats: it has no lattice and no lattice sensitivity.")
    ball = distance(adjacency, protocol.clip_norm) * (protocol.levels - 1) / (2.0 * protocol.coordinate_range)
    side = float(protocol.levels - 1) if adjacency == "replace-one" else 0.5 * (protocol.levels - 1)
    return min(ball, math.sqrt(protocol.dim) * side) * _ROUNDING
