"""The server's work between rounds of k-means. All of it is post-processing.

No starting centre comes from the data: they are random points of the public ball, far from each other. Such a start is
often bad, so the first half of the rounds searches with twice as many centres. A centre without points (its noisy size
does not stand out of the noise) is put beside one that has many. Then the server merges the centres, weighted by their
sizes, to the number asked for, and the other half of the rounds improves those.

A centre that moved no further than its noise explains stands still, and the server averages its estimates of several
rounds. Without noise this is exactly Lloyd's algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.statistics.questions import Matrix, Vectors

# Centres in the first half of the rounds, for each that is asked for.
SEEDS_PER_CLUSTER = 2
# Standard deviations from which on a size counts as more than noise.
STANDS_OUT = 4.0
# A centre stands still if it moved by at most this many times the mean square that noise alone would move it by.
_EXPLAINED = 2.0
# A centre without points is put this share of the way from another to the next one.
_SPLIT = 0.25
# Effort of the server's k-means of a few weighted points.
_RESTARTS, _ITERATIONS, _CANDIDATES = 20, 20, 50


def nearest_centre(points: Vectors | Matrix, centres: Matrix) -> NDArray[np.intp]:
    """Returns the index of the centre nearest to each point."""
    # ‖x - c‖² less ‖x‖², which is the same for all centres.
    return np.asarray(np.argmin(np.sum(centres**2, axis=1) - 2.0 * (points @ centres.T), axis=1))


@dataclass(frozen=True, eq=False)
class Centres:
    """The server's state, in units of the radius.

    Attributes:
        places: The centres.
        precisions: 1/E‖error‖² of each; 0 where a centre does not come from the data.
        sizes: Sizes of their clusters; 0 where they seem empty.
    """

    places: Matrix
    precisions: Matrix
    sizes: Matrix

    @classmethod
    def at(cls, places: Matrix) -> Centres:
        """Returns a state with centres at these public places."""
        nothing = np.zeros(len(places))
        return cls(places, nothing, nothing)

    def updated(self, sums: Matrix, sizes: Matrix, deviations: tuple[float, float]) -> Centres:
        """Returns the state after a round, given standard deviations of a coordinate of a sum and of a size."""
        of_sum, of_size = deviations
        # Half a client is fewer than any, where there is no noise.
        alive = sizes > max(STANDS_OUT * of_size, 0.5)
        seen = self.places.copy()
        seen[alive] = _into_ball(sums[alive] / sizes[alive, None])
        variance = sums.shape[1] * of_sum**2 + np.sum(seen**2, axis=1) * of_size**2
        precision = np.where(alive, sizes**2, 0.0) / variance
        total = precision + self.precisions
        moved = np.sum((seen - self.places) ** 2, axis=1)
        # moved <= _EXPLAINED (1/precision + 1/precisions), without dividing by zero.
        still = alive & (self.precisions > 0.0)
        still &= moved * precision * self.precisions <= _EXPLAINED * total
        weight = np.where(still, self.precisions / np.where(total > 0.0, total, 1.0), 0.0)[:, None]
        places = weight * self.places + (1.0 - weight) * seen
        return Centres(places, np.where(still, total, precision), np.where(alive, sizes, 0.0))

    def revived(self, generator: np.random.Generator) -> Centres:
        """Returns the state with each empty centre moved beside a random other one; large clusters are likelier."""
        alive = self.sizes > 0.0
        if alive.all() or not alive.any():
            return self
        places, precisions = self.places.copy(), self.precisions.copy()
        living = places[alive]
        apart = np.sum((living[:, None] - living) ** 2, axis=2)
        np.fill_diagonal(apart, np.inf)
        # A lone centre is as far from the next as the ball is wide.
        step = _SPLIT * np.minimum(np.sqrt(apart.min(axis=1)), 1.0)
        dead = np.flatnonzero(~alive)
        chosen = generator.choice(len(living), size=len(dead), p=self.sizes[alive] / self.sizes[alive].sum())
        places[dead] = _into_ball(
            living[chosen] + step[chosen, None] * _directions(len(dead), places.shape[1], generator)
        )
        precisions[dead] = 0.0
        return Centres(places, precisions, self.sizes)


def _directions(count: int, dim: int, generator: np.random.Generator) -> Matrix:
    """Returns random unit vectors."""
    normal = generator.standard_normal((count, dim))
    return np.asarray(normal / np.linalg.norm(normal, axis=1, keepdims=True))


def _into_ball(places: Matrix) -> Matrix:
    """Moves centres into the ball that all points are in."""
    return np.asarray(places / np.maximum(1.0, np.linalg.norm(places, axis=1, keepdims=True)))


def scattered(count: int, dim: int, generator: np.random.Generator) -> Matrix:
    """Returns random points of the unit ball, each far from those before it."""
    candidates = _directions(_CANDIDATES * count, dim, generator)
    candidates *= generator.random((len(candidates), 1)) ** (1.0 / dim)
    chosen = [candidates[0]]
    nearest = np.full(len(candidates), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, np.sum((candidates - chosen[-1]) ** 2, axis=1))
        chosen.append(candidates[np.argmax(nearest)])
    return np.array(chosen)


def merge(state: Centres, clusters: int, generator: np.random.Generator) -> Matrix:
    """Merges centres weighted by their sizes: k-means++ and Lloyd, the best of several attempts."""
    alive = state.sizes > 0.0
    if np.count_nonzero(alive) <= clusters:
        # All with points, and as many others as are needed: later rounds improve them.
        return state.revived(generator).places[np.argsort(~alive, kind="stable")[:clusters]]
    points, weights = state.places[alive], state.sizes[alive]
    attempts = [_weighted_kmeans(points, weights, clusters, generator) for _ in range(_RESTARTS)]
    return min(attempts, key=lambda found: found[0])[1]


def _weighted_kmeans(
    points: Matrix, weights: Matrix, clusters: int, generator: np.random.Generator
) -> tuple[float, Matrix]:
    """Returns the weighted inertia and the centres of one attempt."""
    centres = points[generator.choice(len(points), size=1, p=weights / weights.sum())]
    while len(centres) < clusters:
        cost = weights * np.sum((points[:, None] - centres) ** 2, axis=2).min(axis=1)
        # Where all points are centres already, any will do.
        odds = cost / cost.sum() if cost.sum() > 0.0 else weights / weights.sum()
        centres = np.vstack([centres, points[generator.choice(len(points), p=odds)]])
    for _ in range(_ITERATIONS):
        member = (nearest_centre(points, centres)[:, None] == np.arange(clusters)) * weights[:, None]
        total = member.sum(axis=0)[:, None]
        centres = np.where(total > 0.0, member.T @ points / np.where(total > 0.0, total, 1.0), centres)
    cost = weights * np.sum((points - centres[nearest_centre(points, centres)]) ** 2, axis=1)
    return float(cost.sum()), centres
