"""k-means of people's points: Lloyd's algorithm, each round one private mean.

Every client holds one point x in a public ball. In each round the server sends its centres, and each client answers
with a vector that is zero but for the block of the centre nearest to it. There it writes its point and a one: the sums
of the blocks are the sums and the sizes of the clusters, which is all that Lloyd's algorithm asks of the data.

**Point against count.** In units of the radius, the block is (x, b) and its norm at most D = √(1 + b²). The new centre,
sum / size, is off by (up to the size) the noise of the sum and c times the noise of the size, c the centre itself: in
squares V(d + ‖c‖²/b²), V the variance in a coordinate. Where messages are of few bits V is proportional to D², the
square of what they must hold. At ‖c‖ = 1, the worst, the error is then smallest at b = d^(-1/4), where it is (√d + 1)².
Where privacy decides, V is proportional to the square of the largest distance of two vectors. That is 2 for every
b <= 1 (`Blocks.distance`), so that b = 1 would be best, and b = d^(-1/4) is at most 21 % above it. We take the latter.

**Where it begins.** No starting centre comes from the data. They are random points of the public ball, far from each
other, and such a start is often a bad one. So the first half of the rounds runs with twice as many centres as were
asked for; those that nobody is near (their noisy size does not stand out of the noise) are put beside one that has
many. Then the server merges the centres by weights to as many as were asked for, and the other half of the rounds
improves those. All rounds are paid for alike, as rounds that every client takes part in. What the server does
between rounds is post-processing and costs nothing.

**Where it ends.** A centre that moved no further than its noise explains stands still, and the server averages what
the rounds say about it. Without noise no move is explained by noise and this is Lloyd's algorithm to the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError, ParameterError, VectorError
from cpsgd.planner import Plan, plan
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import noise_norm
from cpsgd.statistics.charges import Charge
from cpsgd.statistics.points import Matrix, Points, people_in_ball, private_mean

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger

# Centres the first half of the rounds works with, for each that is asked for.
_SEEDS_PER_CLUSTER = 2
# A size counts as more than noise from this many standard deviations on.
_STANDS_OUT = 4.0
# A centre stands still if it moved by at most this many times the mean square that noise alone would move it by.
_EXPLAINED = 2.0
# A centre that nobody is near is put this share of the way from another to the next one.
_SPLIT = 0.25
_REASON = "each vector is made here from a point x of the unit ball, one block (x, b) with b <= 1 and zeros"
# Server-side work on a handful of weighted points, where being thorough costs nothing.
_RESTARTS, _ITERATIONS, _CANDIDATES = 20, 20, 50


@dataclass(frozen=True, eq=False)
class KMeansResult:
    """The centres, and what finding them cost and promises.

    Attributes:
        centres: One row per cluster.
        sizes: The clusters' sizes as the last round saw them, noise included; 0 where a size was all noise.
        deviations: √E‖error‖² of each centre's estimate, from the noise of the rounds it rests on; infinite where it
            rests on none.
        plan: The protocol of every round, with the guarantee of all of them together and a round's expected error.
    """

    centres: Matrix
    sizes: Matrix
    deviations: Matrix
    plan: Plan

    @property
    def guarantee(self) -> Guarantee:
        """The proved (ε, δ) of all rounds together, for replacing one client's point."""
        return self.plan.guarantee

    @property
    def bits_per_client(self) -> int:
        """What one client sends in all rounds, headers included."""
        return self.plan.rounds * self.plan.protocol.bits_per_client


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


def kmeans(
    points: object,
    clusters: int,
    epsilon: float,
    delta: float,
    *,
    radius: float,
    columns: Sequence[str] | None = None,
    user: str | None = None,
    rounds: int = 8,
    bits: float | None = None,
    initial: ArrayLike | None = None,
    seed: int = 0,
    ledger: Ledger | str | Path | None = None,
    population: str | None = None,
    advance: Callable[[int], object] | None = None,
) -> KMeansResult:
    """Finds the centres of clusters so that (epsilon, delta) protects each client's point.

    Args:
        points: One row per client; with `columns` anything `cpsgd.statistics.mean` takes. A simulation: every client's
            message goes through the protocol on this machine.
        clusters: K.
        epsilon: ε of all rounds together, for replacing one client's point (replace-one neighbours).
        delta: δ of the guarantee.
        radius: Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without
            looking at the data.
        columns: Named columns of a table that are the points' coordinates.
        user: With `columns`: the column that says whose a row is. A client's point is the mean of their rows.
        rounds: Rounds of Lloyd's algorithm. More find better clusters, with more noise in each round.
        bits: Bits per coordinate; the fewest within 10 % of the Gaussian mechanism's error if None.
        initial: Public centres to begin with, which must not come from the data. Then all rounds improve them, and
            messages are half as long. None for random ones and a search (see the module).
        seed: Public seed of the random centres and of the search. The noise that protects has none.
        ledger: Charge all rounds to this ledger before the first is released, or refuse.
        population: With a ledger: whose budget pays.
        advance: Called with the number of clients that were just heard, `rounds` times all clients in the end.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        BudgetExceededError: The ledger does not allow it.
        ParameterError: More clusters than clients, or a parameter out of range.
        VectorError: A point is not finite; its row is named.
        InfeasibleError: The budget is so small that sizes of clusters would drown in noise. Nothing was sent.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> points = np.repeat([[0.5, 0.5], [-0.5, 0.5], [0.0, -0.5]], 500, axis=0)
        >>> points += generator.normal(scale=0.05, size=points.shape)
        >>> found = kmeans(points, 3, epsilon=16.0, delta=1e-6, radius=1.0)
        >>> found.guarantee.epsilon <= 16.0
        True
        >>> nearest = np.abs(found.centres[:, None] - [[0.5, 0.5], [-0.5, 0.5], [0.0, -0.5]]).max(axis=2).min(axis=1)
        >>> bool(nearest.max() < 0.2)
        True
    """
    Charge.check(ledger, population)
    ball = people_in_ball(points, columns, user, radius)
    clients, dim = ball.shape
    clusters = _validate.integer("clusters", clusters, low=1)
    if clusters > clients:
        raise ParameterError(f"Expected at most as many clusters as clients, got {clusters} for {clients} clients.")
    rounds = _validate.integer("rounds", rounds, low=1)
    generator = np.random.default_rng(_validate.integer("seed", seed, low=0))
    search = rounds // 2 if initial is None else 0
    blocks = Blocks(clusters * _SEEDS_PER_CLUSTER if search else clusters, dim)
    start = _scattered(blocks.clusters, dim, generator) if initial is None else _public(initial, radius, clusters, dim)
    planned = plan(
        clients,
        blocks.length,
        epsilon,
        delta,
        blocks.clip_norm,
        bits=bits,
        rounds=rounds,
        participation="every",
        replace_one_distance=blocks.distance,
        distance_reason=_REASON,
    )
    _check_budget(planned, blocks, clients, clusters)
    Charge.of(ledger, population, [planned.protocol] * rounds, "kmeans").pay()
    state = _Centres.at(start)
    for number in range(rounds):
        if search and number == search:
            state = _Centres.at(_merge(state, clusters, generator))
        elif number > 0:
            state = state.revived(generator)
        sums, sizes = lloyd_round(planned.protocol, number, ball, state.places, blocks, advance)
        state = state.updated(sums, sizes, blocks.deviations(planned.protocol, clients))
    with np.errstate(divide="ignore"):
        deviations = radius / np.sqrt(state.precisions)
    return KMeansResult(radius * state.places, state.sizes, deviations, planned)


def lloyd_round(
    protocol: Protocol,
    round: int,
    points: Points,
    centres: Matrix,
    blocks: Blocks,
    advance: Callable[[int], object] | None = None,
) -> tuple[Matrix, Matrix]:
    """One round: the sums and sizes of the clusters around these centres, noise included, in units of the radius.

    Args:
        protocol: The round's parameters, made for `blocks`.
        round: Its number.
        points: One row per client, of norm at most 1.
        centres: At most `blocks.clusters` of them.
        blocks: How a client's vector is laid out; blocks without a centre stay zero.
        advance: Called with the number of clients that were just heard.
    """
    mean = private_mean(protocol, round, points, lambda block: blocks.write(block, centres), advance)
    sums, sizes = blocks.read(mean, len(points))
    return sums[: len(centres)], sizes[: len(centres)]


def inertia(points: ArrayLike, centres: ArrayLike) -> float:
    """The sum of the points' squared distances from their nearest centres.

    An exact figure about the points: it is for those who hold all of them, and no part of what is released.
    """
    table, places = np.asarray(points, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    return float(np.sum((table - places[nearest_centre(table, places)]) ** 2))


def nearest_centre(points: Points | Matrix, centres: Matrix) -> NDArray[np.intp]:
    """The index of the centre nearest to each point."""
    # ‖x - c‖² less ‖x‖², which is the same for all centres.
    return np.asarray(np.argmin(np.sum(centres**2, axis=1) - 2.0 * (points @ centres.T), axis=1))


@dataclass(frozen=True, eq=False)
class _Centres:
    """What the server knows, in units of the radius.

    Attributes:
        places: Where the centres are.
        precisions: 1/E‖error‖² of each; 0 where a place says nothing about the data.
        sizes: Sizes of their clusters; 0 where nobody seems to be near.
    """

    places: Matrix
    precisions: Matrix
    sizes: Matrix

    @classmethod
    def at(cls, places: Matrix) -> _Centres:
        nothing = np.zeros(len(places))
        return cls(places, nothing, nothing)

    def updated(self, sums: Matrix, sizes: Matrix, deviations: tuple[float, float]) -> _Centres:
        """After a round. The deviations are those of a coordinate of a sum and of a size."""
        of_sum, of_size = deviations
        # Half a client is fewer than any, where there is no noise.
        alive = sizes > max(_STANDS_OUT * of_size, 0.5)
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
        return _Centres(places, np.where(still, total, precision), np.where(alive, sizes, 0.0))

    def revived(self, generator: np.random.Generator) -> _Centres:
        """With the centres nobody is near put beside others, the larger the likelier."""
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
        return _Centres(places, precisions, self.sizes)


def _directions(count: int, dim: int, generator: np.random.Generator) -> Matrix:
    """Random unit vectors."""
    normal = generator.standard_normal((count, dim))
    return np.asarray(normal / np.linalg.norm(normal, axis=1, keepdims=True))


def _into_ball(places: Matrix) -> Matrix:
    """The clusters' centres lie in the ball as the points do: whatever is outside is noise."""
    return np.asarray(places / np.maximum(1.0, np.linalg.norm(places, axis=1, keepdims=True)))


def _scattered(count: int, dim: int, generator: np.random.Generator) -> Matrix:
    """Random points of the unit ball, each far from those before it."""
    candidates = _directions(_CANDIDATES * count, dim, generator)
    candidates *= generator.random((len(candidates), 1)) ** (1.0 / dim)
    chosen = [candidates[0]]
    nearest = np.full(len(candidates), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, np.sum((candidates - chosen[-1]) ** 2, axis=1))
        chosen.append(candidates[np.argmax(nearest)])
    return np.array(chosen)


def _public(initial: ArrayLike, radius: float, clusters: int, dim: int) -> Matrix:
    centres = np.asarray(initial, dtype=np.float64)
    if centres.shape != (clusters, dim) or not np.isfinite(centres).all():
        raise VectorError(f"Expected {clusters} finite initial centres of {dim} coordinates, got {centres.shape}.")
    return centres / radius


def _merge(state: _Centres, clusters: int, generator: np.random.Generator) -> Matrix:
    """The best centres of the centres, weighted by their sizes: k-means++ and Lloyd, the best of several attempts."""
    alive = state.sizes > 0.0
    if np.count_nonzero(alive) <= clusters:
        # The living, and as many of the others: what they lack is found in the rounds to come.
        return state.revived(generator).places[np.argsort(~alive, kind="stable")[:clusters]]
    points, weights = state.places[alive], state.sizes[alive]
    attempts = [_weighted_kmeans(points, weights, clusters, generator) for _ in range(_RESTARTS)]
    return min(attempts, key=lambda found: found[0])[1]


def _weighted_kmeans(
    points: Matrix, weights: Matrix, clusters: int, generator: np.random.Generator
) -> tuple[float, Matrix]:
    """The weighted inertia and the centres of one attempt, on the server's few points."""
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


def _check_budget(planned: Plan, blocks: Blocks, clients: int, clusters: int) -> None:
    """Refuses before the first round what would be clustering of noise.

    Raises:
        InfeasibleError: A cluster of average size would not stand out of the noise.
    """
    _, of_size = blocks.deviations(planned.protocol, clients)
    average, needed = clients / clusters, _STANDS_OUT * of_size
    if needed < average:
        return
    # Noise grows with the root of the number of rounds.
    bought = int(planned.rounds * (average / needed) ** 2)
    buys = f"{bought} rounds would do" if bought else f"about {round(clients * needed / average):,} clients would do"
    raise InfeasibleError(
        f"ε={rounded_up(planned.wished_epsilon)} is too little for {planned.rounds} rounds with {clients:,} clients: "
        f"the size of a cluster would be off by {of_size:,.0f} (one standard deviation), and clusters have "
        f"{average:,.0f} clients on average. {buys}, or a larger epsilon or fewer clusters."
    )
