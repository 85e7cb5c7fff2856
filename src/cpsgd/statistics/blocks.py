"""A round of k-means: what a client's vector is, and what the server reads off the mean.

**Point against count.** In units of the radius, the block is (x, b) and its norm at most D = √(1 + b²). The new centre,
sum / size, is off by (up to the size) the noise of the sum and c times the noise of the size, c the centre itself: in
squares V(d + ‖c‖²/b²), V the variance in a coordinate. Where messages are of few bits V is proportional to D², the
square of what they must hold. At ‖c‖ = 1, the worst, the error is then smallest at b = d^(-1/4), where it is (√d + 1)².
Where privacy decides, V is proportional to the square of the largest distance of two vectors. That is 2 for every
b <= 1 (`Blocks.distance`), so that b = 1 would be best, and b = d^(-1/4) is at most 21 % above it. We take the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cpsgd.errors import VectorError
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import noise_norm
from cpsgd.statistics.centres import nearest_centre
from cpsgd.statistics.points import Ball, Matrix, Points
from cpsgd.statistics.questions import Geometry, Planned, Question

_REASON = "each vector is made here from a point x of the unit ball, one block (x, b) with b <= 1 and zeros"
# Centres are announced within this many radii: further ones could overflow, and are no centres.
_FARTHEST = 1e100


@dataclass(frozen=True)
class Blocks:
    """How a client's vector holds its point and its cluster, in units of the radius.

    Attributes:
        clusters: Blocks of the vector.
        dim: d, coordinates of a point.
    """

    clusters: int
    dim: int

    @property
    def one(self) -> float:
        """What is written for a count of one: b = d^(-1/4)."""
        return float(self.dim**-0.25)

    @property
    def length(self) -> int:
        """Coordinates of a vector."""
        return self.clusters * (self.dim + 1)

    @property
    def clip_norm(self) -> float:
        """D = √(1 + b²), which no client in the ball exceeds."""
        return float(np.hypot(1.0, self.one))

    @property
    def distance(self) -> float:
        """The largest distance of two clients' vectors: 2, and what float32 adds to it.

        In one block the counts are equal, and two points of the ball are at most 2 apart. In two blocks the squared
        distance is ‖x‖² + ‖x'‖² + 2b² <= 2 + 2b² <= 4. Points and b are each off by 2^-24 of themselves.
        """
        return 2.0 * (1.0 + 2.0**-22)

    def write(self, points: Points, centres: Matrix) -> Points:
        """The clients' vectors: each point and a one in the block of the nearest centre."""
        blocks = np.zeros((len(points), self.clusters, self.dim + 1), dtype=np.float32)
        rows, nearest = np.arange(len(points)), nearest_centre(points, centres)
        blocks[rows, nearest, :-1] = points
        blocks[rows, nearest, -1] = self.one
        return blocks.reshape(len(points), self.length)

    def read(self, mean: Matrix, clients: int) -> tuple[Matrix, Matrix]:
        """The clusters' sums and sizes from the mean of the clients' vectors."""
        blocks = clients * mean.reshape(self.clusters, self.dim + 1)
        return blocks[:, :-1], blocks[:, -1] / self.one

    def deviations(self, protocol: Protocol, clients: int) -> tuple[float, float]:
        """Standard deviations of a coordinate of a sum, and of a size (rounding counted at its largest)."""
        coordinate = clients * noise_norm(protocol, clients) / float(np.sqrt(protocol.dim))
        return coordinate, coordinate / self.one


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """What a round says, in units of the radius, noise included.

    Attributes:
        sums: The sum of the points nearest to each centre.
        sizes: How many those are.
        count: How many clients were heard.
        guarantee: The proved (ε, δ) of all planned rounds together if no round has fewer clients.
    """

    sums: Matrix
    sizes: Matrix
    count: int
    guarantee: Guarantee


class Around(Question[ClusterSums]):
    """What is asked in one round: the clusters around these centres.

    Args:
        ball: Where clients' points are.
        blocks: How a client's vector is laid out.
        centres: The centres that the server announces, at most as many as there are blocks.

    Raises:
        VectorError: The centres are no table of finite numbers with as many coordinates as points have.
    """

    def __init__(self, ball: Ball, blocks: Blocks, centres: ArrayLike) -> None:
        self.ball, self.blocks = ball, blocks
        self.places = places_in("centres", centres, range(1, blocks.clusters + 1), ball)

    @property
    def geometry(self) -> Geometry:
        """See `Blocks`."""
        blocks = self.blocks
        return Geometry(blocks.length, blocks.clip_norm, blocks.distance, _REASON, rounding=1.0)

    def write(self, points: Points) -> Points:
        """The vectors of clients with these points, in units of the radius."""
        return self.blocks.write(points, self.places)

    def vector(self, value: object) -> Points:
        """One client's vector; see `Ball.point` for what a value may be."""
        return self.write(self.ball.point(value)).reshape(-1)

    def found(
        self, planned: Planned[ClusterSums], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> ClusterSums:
        """Sums and sizes; blocks without a centre are left out."""
        sums, sizes = self.blocks.read(mean, count)
        return ClusterSums(sums[: len(self.places)], sizes[: len(self.places)], count, guarantee)


def places_in(name: str, centres: ArrayLike, counts: range, ball: Ball) -> Matrix:
    """Centres in units of the radius, or `VectorError`."""
    try:
        table = np.asarray(centres, dtype=np.float64)
    except (TypeError, ValueError):
        raise VectorError(f"Expected {name} to be a table of numbers.") from None
    if table.ndim != 2 or len(table) not in counts or table.shape[1] != ball.dim:
        many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        raise VectorError(f"Expected {many} {name} of {ball.dim} coordinates, got an array of shape {table.shape}.")
    if not (np.abs(table) < _FARTHEST * ball.radius).all():
        raise VectorError(f"Expected {name} of finite numbers, within {_FARTHEST:g} radii.")
    return np.asarray(table / ball.radius)
