"""The vectors a round is attacked with: neighbours as far apart as the protocol lets them be, in several directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cpsgd.adjacency import Adjacency
from cpsgd.audit.lattice import Array, RoundLattice
from cpsgd.codec.clip import Vector

# Canaries are this many clip norms long. An honest client shortens them; one that forgets to is found out.
_LENGTH = 8.0
# Where the rounding is looked at, clients lie this far above a level: any rounding but the random one moves the mean.
_OFFSET = 0.45
# Longer than any clip norm, and its square than any number of single precision; that precision still holds it.
_HUGE = 1e37
# Subnormal: shorter than what arithmetic keeps all digits of.
_TINY = 1e-310


@dataclass(frozen=True, eq=False)
class Canary:
    """A pair of neighbours: one client's vector in either world."""

    name: str
    zero: Array
    one: Array


def canaries_of(lattice: RoundLattice, adjacency: Adjacency) -> list[Canary]:
    """The canaries of a protocol. Without rotation the rotated ones are the others, and left out.

    The corner is always as far from its opposite as two neighbours can be: its coordinates, all alike, reach the norm's
    and the range's limit together or whichever comes first.
    """
    dim = lattice.protocol.dim
    one_hot, corner = np.eye(dim)[0], np.full(dim, 1.0 / math.sqrt(dim))
    directions = {"one coordinate": one_hot, "spread": corner}
    if lattice.protocol.rotate:
        directions |= {
            "one rotated coordinate": lattice.unrotated(one_hot),
            "corner after rotation": lattice.unrotated(corner),
        }
    length = _LENGTH * lattice.protocol.clip_norm
    return [
        # Neighbours two radii apart are opposite each other, those one radius apart a vector and zero.
        Canary(name, (1.0 - adjacency.reach) * length * direction, length * direction)
        for name, direction in directions.items()
    ]


def resting(lattice: RoundLattice) -> Array:
    """A vector for the clients who are not attacked: on the level next to zero, so that rounding hides nobody.

    Zero itself, where that level is out of the norm's reach.
    """
    return _beside_zero(lattice, 0.0, within=1.0)


def rounded(lattice: RoundLattice) -> Array:
    """A vector well inside the norm's bound that lies between levels in every coordinate."""
    return _beside_zero(lattice, _OFFSET, within=0.5)


def peculiar(lattice: RoundLattice) -> dict[str, Vector]:
    """Vectors by name that code may treat in a way of its own, and must not."""
    dim, clip_norm = lattice.protocol.dim, lattice.protocol.clip_norm
    constant = np.full(dim, clip_norm / math.sqrt(dim))
    alternating = np.where(np.arange(dim) % 2, -1.0, 1.0)
    last = np.eye(dim)[-1]
    return {
        "between levels": rounded(lattice),
        "on levels": resting(lattice),
        "zero": np.zeros(dim),
        "constant, of the largest norm": constant,
        "one-hot": clip_norm * last,
        "one-hot after rotation": _LENGTH * clip_norm * lattice.unrotated(last),
        "subnormal": _TINY * alternating,
        "huge": lattice.unrotated(np.full(dim, _HUGE / math.sqrt(dim))),
        "single precision": (0.5 * alternating * constant).astype(np.float32),
    }


def _beside_zero(lattice: RoundLattice, offset: float, within: float) -> Array:
    """All rotated coordinates `offset` levels above the level at or below zero, if that is short enough."""
    protocol = lattice.protocol
    # With an even number of levels zero is halfway between two of them.
    centre = 0.5 if protocol.mechanism.levels % 2 == 0 else 0.0
    coordinate = (offset - centre) * protocol.scale
    norm = abs(coordinate) * math.sqrt(protocol.dim)
    allowed = within * protocol.clip_norm
    if norm > allowed:
        coordinate *= allowed / norm if offset else 0.0
    return lattice.unrotated(np.full(protocol.dim, coordinate))
