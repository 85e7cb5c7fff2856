"""The rounds of an audit: vectors by which neighbours differ most, played through the code under audit.

A released mean is taken back to the integers whose sum it is, for there the protocol's law is known exactly. That
lattice is computed apart from the code under audit: plain NumPy, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard

from cpsgd.audit.checks import Played
from cpsgd.audit.sum_law import Array, SumLaw
from cpsgd.codec.clip import Grid, Vector
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol

# The most that float32 may move a coordinate on its way through the codec, relative to the range of the levels.
_FLOAT32 = 4e-6
# Canaries are this many clip norms long. An honest client shortens them; one that forgets to is detected.
_LENGTH = 8.0
# Longer than any clip norm, and its square than any number of single precision; that precision still holds it.
_HUGE = 1e37
# Subnormal: arithmetic does not keep all digits of it.
_TINY = 1e-310
# Rounds between two reports of progress.
_REPORTED = 100


class RoundLattice:
    """A protocol's rotation and levels in one round."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        """Computes the rotation as a matrix."""
        self.protocol = protocol
        self._grid: Grid = protocol.mechanism.grid  # type: ignore[assignment]  # only integers are audited
        self._rotation = np.eye(protocol.dim)
        if protocol.rotate:
            self._rotation = _rotation(protocol.dim, protocol.rotation_signs(round))

    def unrotated(self, vector: Array) -> Array:
        """Returns the vector that the protocol rotates to this one."""
        return self._rotation @ vector

    def points(self, vector: Vector) -> Array:
        """Returns the place of a client's vector between the levels, 0 to k - 1, after both clippings.

        Where rounding is the noise there are two levels, the ends of the range.
        """
        exact = vector.astype(np.float64)
        norm = float(np.linalg.norm(exact))
        clipped = exact * min(1.0, self.protocol.clip_norm / norm) if norm else exact
        reach = self._grid.limit / self._grid.unit
        return (np.clip(clipped @ self._rotation, -reach, reach) + reach) / self.step

    @property
    def step(self) -> float:
        """The distance between neighbouring levels; between integers where noise is added before rounding."""
        mechanism = self.protocol.mechanism
        if mechanism.levels == 0:
            return mechanism.scale
        return 2.0 * self._grid.limit / self._grid.unit / (mechanism.levels - 1)

    def middle(self, count: int) -> float:
        """Returns the expected sum of `count` clients' integers whose coordinate is zero, by the exact law.

        It is not the mechanism's centre. Decoding subtracts that, so adding it again would hide a wrong centre.
        """
        zero = np.array([self._grid.limit / self._grid.unit / self.step])
        return float(SumLaw(self.protocol, [(zero, count)]).mean[0])

    def sums(self, means: NDArray[np.float32], count: int) -> Array:
        """Returns the sums of `count` clients' integers behind released means, one row each; integers up to float32."""
        rotated = means.astype(np.float64) @ self._rotation
        return rotated * (count / self.protocol.mechanism.scale) + self.middle(count)

    def slack(self, count: int) -> float:
        """Returns the most that the codec's grid and float32 may move the expected sum of `count` clients."""
        return count * (1.0 + 2.0 * _FLOAT32 * self._grid.limit) / (self._grid.unit * self.protocol.scale)


def _rotation(dim: int, signs: NDArray[np.uint8]) -> Array:
    """Returns the rotation of `cpsgd.codec.rotate` as a matrix that rows are multiplied by, from its definition."""
    size = 1 << (dim.bit_length() - 1)
    rest = dim - size
    values = 1.0 - 2.0 * np.unpackbits(signs, bitorder="little")
    transform = hadamard(size) / math.sqrt(size)

    def block(first: int) -> Array:
        matrix = np.eye(dim)
        matrix[:size, :size] = values[first : first + size, None] * transform
        return matrix

    if rest == 0:
        return block(0)
    exchange = np.eye(dim)
    exchange[:, [*range(rest), *range(size, dim)]] = exchange[:, [*range(size, dim), *range(rest)]]
    return block(0) @ exchange @ block(max(16, size))


# ---------------------------------------------------------------------- vectors


@dataclass(frozen=True, eq=False)
class Canary:
    """A pair of neighbours: one client's vector in either world."""

    name: str
    zero: Array
    one: Array


def canaries_of(lattice: RoundLattice, adjacency: Adjacency) -> list[Canary]:
    """Returns the pairs of neighbours to attack a protocol with; without rotation, fewer of them.

    The corner is always as far from its opposite as two neighbours can be: its coordinates, all alike, reach the norm's
    or the range's limit, whichever comes first.
    """
    dim = lattice.protocol.dim
    one_hot, corner = np.eye(dim)[0], np.full(dim, 1.0 / math.sqrt(dim))
    directions = {"one coordinate": one_hot, "spread": corner}
    if lattice.protocol.rotate:
        directions |= {
            "one rotated coordinate": lattice.unrotated(one_hot),
            "corner after rotation": lattice.unrotated(corner),
        }
    protocol = lattice.protocol
    clip_norm, l1 = protocol.clip_norm, protocol.replace_one_l1_distance
    found = []
    for name, direction in directions.items():
        length = _LENGTH * clip_norm
        # Neighbours two radii apart are opposite each other, those one radius apart a vector and zero.
        other = (1.0 - adjacency.reach) * length
        if protocol.distance_reason is not None and adjacency is Adjacency.REPLACE_ONE:
            added = float(np.abs(direction).sum())
            apart = min(adjacency.distance(clip_norm, protocol.replace_one_distance), (l1 or math.inf) / added)
            length = clip_norm if l1 is None else min(clip_norm, l1 / added)
            other = length - apart  # this far from the first, which is clipped
            length *= _LENGTH if l1 is None else 1.0
        found.append(Canary(name, other * direction, length * direction))
    return found


def resting(lattice: RoundLattice) -> Array:
    """Returns a vector for clients that are not attacked, on the level next to zero: its rounding adds no randomness.

    Where the norm's bound does not allow that level, it is as near as possible, and too long, as canaries are.
    """
    dim, allowed = lattice.protocol.dim, lattice.protocol.clip_norm
    level = _beside_zero(lattice, 0.0)
    if math.sqrt(dim) * abs(level) > allowed:
        level *= _LENGTH * allowed / (math.sqrt(dim) * abs(level))
    return lattice.unrotated(np.full(dim, level))


def too_long(lattice: RoundLattice) -> Array:
    """Returns a vector in the corner's direction beyond the norm's bound: the mean of such clients shows the bound."""
    dim = lattice.protocol.dim
    return lattice.unrotated(np.full(dim, _LENGTH * lattice.protocol.clip_norm / math.sqrt(dim)))


def rounded(lattice: RoundLattice, offset: float = 0.45) -> Array:
    """Returns a vector well inside the norm's bound that lies `offset` above a level in every coordinate.

    Any rounding but the random one moves the mean of such clients.
    """
    dim, allowed = lattice.protocol.dim, 0.5 * lattice.protocol.clip_norm
    coordinate = _beside_zero(lattice, offset)
    return lattice.unrotated(np.full(dim, coordinate * min(1.0, allowed / (math.sqrt(dim) * abs(coordinate)))))


def peculiar(lattice: RoundLattice) -> dict[str, Vector]:
    """Returns special vectors by name, for example zeros, that code might treat as special cases."""
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


def _beside_zero(lattice: RoundLattice, offset: float) -> float:
    """Returns a coordinate `offset` levels above the level at or below zero."""
    # With an even number of levels zero is halfway between two of them.
    centre = 0.5 if lattice.protocol.mechanism.levels % 2 == 0 else 0.0
    return (offset - centre) * lattice.step


# ---------------------------------------------------------------------- rounds


class ServerHalf(Interface):
    """The server's half of a round, such as `Aggregator`."""

    def add(self, message: Any, /) -> None:
        """Takes one client's message."""

    def mean(self) -> NDArray[np.float32]:
        """Returns the released mean."""


Encode = Callable[[Vector, int], Any]
"""The client's half: from a vector and the round's number to a message, such as `Protocol.encode`."""

Start = Callable[[Protocol, int], ServerHalf]
"""Starts a round, such as `Aggregator` itself."""


class Player:
    """Plays rounds of the code under audit."""

    def __init__(
        self,
        protocol: Protocol,
        round: int,
        encode: Encode,
        start: Start,
        seed: int | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.lattice = RoundLattice(protocol, round)
        self.generator = np.random.default_rng(seed)
        self.played = 0
        self._protocol, self._round = protocol, round
        self._encode, self._start, self._progress = encode, start, progress

    def law(self, clients: Sequence[tuple[Vector, int]]) -> SumLaw:
        """Returns the law of the sums of clients, given as vectors and numbers of clients."""
        return SumLaw(self._protocol, [(self.lattice.points(vector), number) for vector, number in clients])

    def means(self, worlds: Sequence[Sequence[tuple[Vector, int]]]) -> NDArray[np.float32]:
        """Plays one round per world, a list of (vector, number of clients with it); returns one mean per row."""
        released = np.empty((len(worlds), self._protocol.dim), dtype=np.float32)
        for row, clients in zip(released, worlds, strict=True):
            server = self._start(self._protocol, self._round)
            for vector, number in clients:
                for _ in range(number):
                    server.add(self._encode(vector, self._round))
            row[:] = server.mean()
            self.played += 1
            if self._progress is not None and self.played % _REPORTED == 0:
                self._progress(_REPORTED)
        return released

    def play(self, name: str, clients: Sequence[tuple[Vector, int]], rounds: int) -> Played:
        """Plays rounds with the same vectors."""
        times = self.played + np.arange(rounds)
        count = sum(number for _, number in clients)
        exact = self.lattice.sums(self.means([clients] * rounds), count)
        return Played(name, self.law(clients), self.lattice.slack(count), exact, times)
