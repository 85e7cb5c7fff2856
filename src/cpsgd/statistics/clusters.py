"""k-means of clients' points: Lloyd's algorithm, each round one private mean.

Every client holds one point x in a public ball. In each round the server sends its centres. A client answers with a
vector that holds, in the block of the centre nearest to it, its point and a count b (both in units of the radius), and
zeros elsewhere. The sums of the blocks are the sums and the sizes of the clusters, which is all that Lloyd's algorithm
needs. docs/other-uses.md derives b.

All rounds are planned at once, as rounds that every client takes part in, each around centres that may depend on
earlier releases: the distance between two clients' vectors does not depend on the centres. The server's work in between
(`cpsgd.statistics.centres`) is post-processing and costs nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner import Plan
from cpsgd.privacy import Guarantee
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.statistics.centres import SEEDS_PER_CLUSTER, STANDS_OUT, Centres, merge, nearest_centre, scattered
from cpsgd.statistics.cluster_sums import Around, Blocks, ClusterSums, places_in
from cpsgd.statistics.planned import Planned
from cpsgd.statistics.points import (
    Ball,
    Columns,
    PointOptions,
    PointStatistic,
    ball_of,
    columns_of,
    of_rows,
    paid,
    private_mean,
)
from cpsgd.statistics.questions import Matrix
from cpsgd.statistics.results import Reading, told
from cpsgd.statistics.rows import Missing, interval_width

# Noise may explain this share of how far centres are apart before there is a warning.
_MOST_NOISE = 0.75
# A centre of a cluster of average size may be off by this many radii after the last round.
_FARTHEST_OFF = 0.5


class NoiseWarning(UserWarning):
    """The centres are hardly more than noise. The warning follows from the released centres and costs nothing."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KMeansResult(PointStatistic):
    """The centres: groups are clusters, names are columns.

    Intervals say how far noise alone may have moved a centre from the mean of the points nearest to it; they are the
    whole ball for a cluster that was all noise.

    Attributes:
        sizes: The clusters' sizes as the last round saw them, noise included; 0 where a size was all noise.
        deviations: √E‖error‖² of each centre in units of the ball's, from the noise of the rounds it comes from;
            infinite without any.
    """

    sizes: Matrix
    deviations: Matrix

    @property
    def centres(self) -> Matrix:
        """One row per cluster: `values`."""
        return self.values

    @property
    def details(self) -> dict[str, Any]:
        """Sizes of clusters, deviations of centres (None where infinite) and the share of noise."""
        deviations = [each if math.isfinite(each) else None for each in self.deviations.tolist()]
        return {"sizes": self.sizes.tolist(), "deviations": deviations, "noise_share": self.noise_share}

    @property
    def noise_share(self) -> float:
        """Share of the centres' squared spread around their mean that noise explains; 1 where one centre is left.

        The same noise adds to the spread of points around their centres. So beyond about one half, the centres may
        describe the points worse than a single centre does.
        """
        alive = self.sizes > 0.0
        widths = [0.5 * high - 0.5 * low for low, high in self.bounds.values()] or 1.0
        sizes, centres = self.sizes[alive], self.centres[alive] / np.array(widths)
        if len(sizes) < 2:
            return 1.0
        spread = float(sizes @ np.sum((centres - np.average(centres, axis=0, weights=sizes)) ** 2, axis=1))
        noise = float(sizes @ self.deviations[alive] ** 2)
        return 1.0 if noise >= spread else noise / spread


class Clusters:
    """The centres of clusters of the clients' points, by a fixed number of rounds.

    Each client holds a point of a public ball; a client with several rows has their mean. `Blocks` says what is sent.

    Args:
        columns: The points' coordinates: names of columns with their bounds, in units of which distances are. Or names,
            or their number, with a radius.
        clusters: K, the number of clusters.
        radius: Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it, and bounds,
            without looking at the data.
        rounds: Rounds of Lloyd's algorithm. More find better clusters, with more noise in each round.
        initial: Public centres to begin with, which must not come from the data. Then all rounds improve them, and
            messages are half as long. None for random ones and a search (see `cpsgd.statistics.centres`).
        seed: Public seed of the random centres and of the search. The noise that protects has none.
        missing: What a missing value counts as: "bounds" for the middle of its bounds, or a value.

    Example:
        >>> asked = Clusters(2, 2, radius=1.0, rounds=2, initial=[[0.1, 0], [-0.1, 0]]).plan(
        ...     clients=300, epsilon=16.0, delta=1e-6, bits=8
        ... )
        >>> points = np.repeat([[0.5, 0.5], [-0.5, 0.5]], 150, axis=0)
        >>> server = asked.start()
        >>> for number in range(2):
        ...     centres = server.centres  # announced to all clients
        ...     messages = [asked.encode(point, centres, number) for point in points]
        ...     centres = server.aggregate(messages)
        >>> found = server.result()
        >>> (2 * found.centres).round()
        array([[ 1.,  1.],
               [-1.,  1.]])
    """

    def __init__(
        self,
        columns: Columns,
        clusters: int,
        *,
        radius: float | None = None,
        missing: Missing = None,
        rounds: int = 8,
        initial: ArrayLike | None = None,
        seed: int = 0,
    ) -> None:
        self.ball = Ball.of(columns, radius, missing=missing)
        self.clusters = _validate.integer("clusters", clusters, low=1)
        self.rounds = _validate.integer("rounds", rounds, low=1)
        self.seed = _validate.integer("seed", seed, low=0, high=2**128 - 1)
        # Rounds of the search.
        self.search = self.rounds // 2 if initial is None else 0
        self.blocks = Blocks(self.clusters * SEEDS_PER_CLUSTER if self.search else self.clusters, self.ball.dim)
        exactly = range(self.clusters, self.clusters + 1)
        self.initial = None if initial is None else places_in("initial centres", initial, exactly, self.ball)

    def plan(self, clients: int, epsilon: float, delta: float = 0.0, **requirements: Any) -> PlannedClusters:
        """Plans all rounds, in each of which every client answers.

        ε is of all rounds together, for replacing all rows of one client; `Question.plan` says the rest.

        Raises:
            InfeasibleError: The budget is so small that noise would hide the sizes of clusters.
        """
        clients = _validate.integer("clients", clients, low=2)
        if self.clusters > clients:
            raise ParameterError(f"Expected at most one cluster per client, got {self.clusters} for {clients} clients.")
        # Any centres will do: the plan does not depend on them.
        anywhere = Around(self.ball, self.blocks, np.zeros((1, self.ball.dim)))
        rounds = {"rounds": self.rounds, "participation": "every"}
        planned = anywhere.plan(clients, epsilon, delta, **rounds, **requirements).plan
        _check_budget(planned, self, clients)
        return PlannedClusters(self, planned)


@dataclass(frozen=True, eq=False)
class PlannedClusters:
    """k-means with the plan of its rounds: the protocol of each, and the guarantee of all of them together."""

    question: Clusters
    plan: Plan

    @property
    def protocol(self) -> Protocol:
        """The protocol of each round."""
        return self.plan.protocol

    def around(self, centres: ArrayLike) -> Planned[ClusterSums]:
        """Returns the question of a round around announced centres, for transports that encode vectors themselves."""
        return Planned(Around(self.question.ball, self.question.blocks, centres), self.plan)

    def encode(self, value: object, centres: ArrayLike, round: int) -> bytes:
        """Returns one client's message; see `Ball.point` for what a value may be.

        Args:
            value: The client's point or rows.
            centres: The centres that the server has announced for this round.
            round: Its number, from 0 on. Answer each round once: the guarantee counts no more.
        """
        round = _validate.integer("round", round, low=0, high=self.question.rounds - 1)
        return self.around(centres).encode(value, round)

    def start(self) -> Lloyd:
        """Returns the server's side, before the first round."""
        return Lloyd(self)


class Lloyd:
    """The server's side of k-means, from round to round; `round` is the number of the next one."""

    def __init__(self, asked: PlannedClusters) -> None:
        """Begins at the public centres, or at random ones."""
        question = asked.question
        self.asked, self.round = asked, 0
        self._generator = np.random.default_rng(question.seed)
        start = question.initial
        if start is None:
            start = scattered(question.blocks.clusters, question.ball.dim, self._generator)
        self._state = Centres.at(start)
        self._guarantee: Guarantee | None = None
        self._users = 0

    @property
    def centres(self) -> Matrix:
        """The centres to announce for the next round; after the last round, the result."""
        return self.asked.question.ball.outside(self._state.places)

    def aggregate(self, messages: Iterable[bytes], *, accept_epsilon: float | None = None) -> Matrix:
        """Ends the round with the clients' messages, and returns the next centres.

        Args:
            messages: One per client, of this round.
            accept_epsilon: See `Planned.aggregate`; ε is of all rounds, as if each had as few messages.

        Raises:
            GuaranteeError: There are fewer messages than the guarantee was planned for. The round is not over.
            WireError: A message is refused.
            ParameterError: All rounds are over.
        """
        self._check_open()
        return self.update(
            self.asked.around(self.centres).aggregate(messages, self.round, accept_epsilon=accept_epsilon)
        )

    def update(self, found: ClusterSums) -> Matrix:
        """Ends the round with `around(centres).result(mean, count)`, and returns the next centres."""
        self._check_open()
        question = self.asked.question
        deviations = question.blocks.deviations(self.asked.protocol, found.count)
        self._state = self._state.updated(found.sums, found.sizes, deviations)
        # That of the round with the fewest clients, whose noise is the least, holds for all.
        if self._guarantee is None or found.guarantee.epsilon > self._guarantee.epsilon:
            self._guarantee = found.guarantee
        self._users = found.count
        self.round += 1
        if self.round == question.search:
            self._state = Centres.at(merge(self._state, question.clusters, self._generator))
        elif self.round < question.rounds:
            self._state = self._state.revived(self._generator)
        return self.centres

    def result(self, confidence: float = 0.95) -> KMeansResult:
        """Returns the clusters after the last round, or what is known of them if the last rounds were withheld."""
        question = self.asked.question
        if self.round <= question.search or self._guarantee is None:
            raise ParameterError(f"{self.round} of {question.rounds} rounds are over: run the others first.")
        ball = question.ball
        with np.errstate(divide="ignore"):
            deviations = ball.radius / np.sqrt(self._state.precisions)
        width = interval_width(confidence, self.asked.around(self.centres).rate)
        reach = np.minimum(deviations * (width / math.sqrt(ball.dim)), 2.0 * ball.radius)[:, None] * ball.units
        names = tuple(f"cluster {i + 1}" for i in range(question.clusters))
        ends = (ball.outside(np.full(ball.dim, -1.0)), ball.outside(np.ones(ball.dim)))
        if ball.bounds:
            ends = tuple(np.array(list(ball.bounds.values())).T)
        low, high = np.maximum(self.centres - reach, ends[0]), np.minimum(self.centres + reach, ends[1])
        reading = Reading(ball.columns, names, self.centres, low, high)
        said = told("kmeans", reading, self.asked.plan, self._guarantee, self._users, confidence, ball.bounds)
        said |= {"plan": self.asked.plan, "guarantee": self._guarantee, "group_by": ("cluster",)}
        return KMeansResult(**said, sizes=self._state.sizes, deviations=deviations)

    def _check_open(self) -> None:
        rounds = self.asked.question.rounds
        if self.round >= rounds:
            raise ParameterError(f"All {rounds} rounds are over: the guarantee covers no more.")


def kmeans(
    points: object,
    clusters: int,
    epsilon: float,
    delta: float = 0.0,
    *,
    rounds: int = 8,
    initial: ArrayLike | None = None,
    seed: int = 0,
    **options: Unpack[PointOptions],
) -> KMeansResult:
    """Finds the centres of clusters so that (epsilon, delta) protects each client's point.

    Args:
        points: Any table that `mean` takes, or an array with one point per row. Every client's message is simulated.
        clusters: K, the number of clusters.
        epsilon: ε of all rounds together, for replacing one client's point (replace-one neighbours).
        delta: δ of the guarantee.
        rounds: Rounds of Lloyd's algorithm. More find better clusters, with more noise in each round.
        initial: Public centres to begin with; see `Clusters`.
        seed: Public seed of the random centres and of the search. The noise that protects has none.
        options: See `PointOptions`: bounds or radius, columns, user, missing and others.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        BudgetExceededError: The ledger does not allow it.
        ParameterError: More clusters than clients, or a parameter out of range.
        VectorError: A point is not finite; its row is named.
        InfeasibleError: The budget is so small that noise would hide the clusters. Nothing was sent.

    Warns:
        NoiseWarning: Centres were found that hardly differ by more than their noise (`KMeansResult.noise_share`).

    Example:
        >>> points = np.repeat([[0.5, 0.5], [-0.5, 0.5], [0.0, -0.5]], 500, axis=0)
        >>> found = kmeans(points, 3, epsilon=16.0, delta=1e-6, radius=1.0, seed=3)
        >>> sorted(((2 * found.centres).round() + 0.0).tolist()), round(inertia(points, found.centres), -2)
        ([[-1.0, 1.0], [0.0, -1.0], [1.0, 1.0]], 0.0)
    """
    chosen = columns_of(points, options)
    search = {"rounds": rounds, "initial": initial, "seed": seed, **ball_of(options)}
    question = Clusters(chosen, clusters, **search)
    claim = Claim(epsilon, delta)
    people, asked = paid("kmeans", points, question.ball, question.plan, claim, options, question.rounds)
    server = asked.start()
    for number in range(question.rounds):
        around = Around(question.ball, question.blocks, server.centres)
        mean = private_mean(asked.protocol, number, people, around.write, options.get("advance"))
        server.update(Planned(around, asked.plan).result(mean, len(people)))
    found = of_rows(server.result(options.get("confidence", 0.95)), options)
    if clusters > 1 and found.noise_share > _MOST_NOISE:
        many = int(np.count_nonzero(found.sizes))
        warnings.warn(
            f"ε={rounded_up(epsilon)} is hardly enough for {clusters} clusters of {len(people):,} clients in "
            f"{question.ball.dim} dimensions: {many} stood out of the noise, and noise explains "
            f"{found.noise_share:.0%} of how far these are apart. One cluster may describe the points better. Allow a "
            "larger epsilon, or ask for fewer clusters.",
            NoiseWarning,
            stacklevel=2,
        )
    return found


def inertia(points: ArrayLike, centres: ArrayLike) -> float:
    """Returns the sum of the points' squared distances from their nearest centres.

    This is an exact figure, for those who hold all points. It is not released.
    """
    table, places = np.asarray(points, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    return float(np.sum((table - places[nearest_centre(table, places)]) ** 2))


def _check_budget(planned: Plan, asked: Clusters, clients: int) -> None:
    """Refuses a budget with which a cluster of average size is hidden by noise, or its centre could be anywhere."""
    of_sum, of_size = asked.blocks.deviations(planned.protocol, clients)
    average, needed = clients / asked.clusters, STANDS_OUT * of_size
    # A centre that stands still is averaged over the rounds after the search.
    off = math.sqrt((asked.ball.dim * of_sum**2 + of_size**2) / (asked.rounds - asked.search)) / average
    if needed < average and off < _FARTHEST_OFF:
        return
    reason = (
        f"the size of a cluster would be off by {of_size:,.0f} (one standard deviation), and clusters have "
        f"{average:,.0f} clients on average"
    )
    # Noise grows with the root of the number of rounds.
    bought = int(planned.rounds * (average / needed) ** 2)
    if needed < average:
        reason = f"the centre of a cluster of {average:,.0f} clients would be off by {off:.2g} times the radius"
        bought = 0  # fewer rounds do not help: the centre is averaged over them
    enough = round(clients * max(needed / average, off / _FARTHEST_OFF))
    buys = f"{bought} rounds would do" if bought else f"about {enough:,} clients would do"
    raise InfeasibleError(
        f"ε={rounded_up(planned.target_epsilon)} is too little for {planned.rounds} rounds with {clients:,} clients: "
        f"{reason}. {buys}, or a larger epsilon or fewer clusters."
    )
