"""One round of k-means: what a client sends around the server's centres, and the clusters' sums and sizes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cpsgd.errors import VectorError
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import noise_norm
from cpsgd.statistics.centres import nearest_centre
from cpsgd.statistics.planned import Planned
from cpsgd.statistics.points import Ball
from cpsgd.statistics.questions import Geometry, Matrix, Question, Vectors

_REASON = "each vector is made here from a point x of the unit ball, one block (x, b) with b <= 1 and zeros"
# Centres are announced within this many radii: further ones could overflow.
_FARTHEST = 1e100


@dataclass(frozen=True)
class Blocks:
    """Layout of a client's vector: one block per cluster, of a point's d coordinates and a count."""

    clusters: int
    dim: int

    @property
    def one(self) -> float:
        """Entry b = d^(-1/4) of a vector, which counts one client."""
        return float(self.dim**-0.25)

    @property
    def length(self) -> int:
        """Number of coordinates of a vector."""
        return self.clusters * (self.dim + 1)

    @property
    def clip_norm(self) -> float:
        """D = √(1 + b²), which no client in the ball exceeds."""
        return float(np.hypot(1.0, self.one))

    @property
    def distance(self) -> float:
        """The largest distance between two clients' vectors: 2, and the rounding of float32.

        In one block the counts are equal, and two points of the ball are at most 2 apart. In two blocks the squared
        distance is ‖x‖² + ‖x'‖² + 2b² <= 2 + 2b² <= 4. Points and b are each off by 2^-24 of themselves.
        """
        return 2.0 * (1.0 + 2.0**-22)

    def write(self, points: Vectors, centres: Matrix) -> Vectors:
        """Returns the clients' vectors: each point and a count in the block of the nearest centre."""
        blocks = np.zeros((len(points), self.clusters, self.dim + 1), dtype=np.float32)
        rows, nearest = np.arange(len(points)), nearest_centre(points, centres)
        blocks[rows, nearest, :-1] = points
        blocks[rows, nearest, -1] = self.one
        return blocks.reshape(len(points), self.length)

    def read(self, mean: Matrix, clients: int) -> tuple[Matrix, Matrix]:
        """Returns the clusters' sums and sizes from the mean of the clients' vectors."""
        blocks = clients * mean.reshape(self.clusters, self.dim + 1)
        return blocks[:, :-1], blocks[:, -1] / self.one

    def deviations(self, protocol: Protocol, clients: int) -> tuple[float, float]:
        """Returns standard deviations of a coordinate of a sum, and of a size (rounding at its largest)."""
        coordinate = clients * noise_norm(protocol, clients) / float(np.sqrt(protocol.dim))
        return coordinate, coordinate / self.one


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """The result of a round: the sum and the number of the points nearest to each centre, and the number of clients.

    In units of the radius, noise included. The guarantee is of all planned rounds if no round has fewer clients.
    """

    sums: Matrix
    sizes: Matrix
    count: int
    guarantee: Guarantee


class Around(Question[ClusterSums]):
    """The question of one round: the clusters around the centres that the server announces, at most one per block."""

    def __init__(self, ball: Ball, blocks: Blocks, centres: ArrayLike) -> None:
        """Checks the centres, and raises `VectorError` if they are not a table of finite numbers."""
        self.ball, self.blocks = ball, blocks
        self.places = places_in("centres", centres, range(1, blocks.clusters + 1), ball)

    @property
    def geometry(self) -> Geometry:
        """Size, norm and distance of the clients' vectors; `Blocks` says why."""
        return Geometry.round(self.blocks.length, self.blocks.clip_norm, self.blocks.distance, _REASON, rounding=1.0)

    def write(self, points: Vectors) -> Vectors:
        """Returns the vectors of clients with these points, in units of the radius."""
        return self.blocks.write(points, self.places)

    def vector(self, value: object) -> Vectors:
        """Returns one client's vector; see `Ball.point` for what a value may be."""
        return self.write(self.ball.point(value)).reshape(-1)

    def answer(
        self, planned: Planned[ClusterSums], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> ClusterSums:
        """Returns sums and sizes; blocks without a centre are left out."""
        sums, sizes = self.blocks.read(mean, count)
        return ClusterSums(sums[: len(self.places)], sizes[: len(self.places)], count, guarantee)


def places_in(name: str, centres: ArrayLike, counts: range, ball: Ball) -> Matrix:
    """Returns centres in units of the radius, or raises `VectorError`."""
    try:
        table = np.asarray(centres, dtype=np.float64)
    except (TypeError, ValueError):
        raise VectorError(f"Expected {name} to be a table of numbers.") from None
    if table.ndim != 2 or len(table) not in counts or table.shape[1] != ball.dim:
        many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        raise VectorError(f"Expected {many} {name} of {ball.dim} coordinates, got an array of shape {table.shape}.")
    places = (table - ball.outside(np.zeros(ball.dim))) / (ball.radius * ball.units)
    if not (np.abs(places) < _FARTHEST).all():
        raise VectorError(f"Expected {name} of finite numbers, within {_FARTHEST:g} radii.")
    return np.asarray(places)
