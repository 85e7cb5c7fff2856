"""k-means of people's points: Lloyd's algorithm, each round one private mean.

Every client holds one point x in a public ball. In each round the server sends its centres, and each client answers
with a vector that is zero but for the block of the centre nearest to it. There it writes its point and a one: the sums
of the blocks are the sums and the sizes of the clusters, which is all that Lloyd's algorithm asks of the data
(`cpsgd.statistics.blocks`).

**Rounds.** All of them are planned at once, as rounds that every client takes part in, each around centres that may
depend on what the rounds before released. What the server does in between (`cpsgd.statistics.centres`) is
post-processing and costs nothing. How far apart two clients' vectors are does not depend on the centres.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner import Plan
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.statistics.blocks import Around, Blocks, ClusterSums, places_in
from cpsgd.statistics.centres import SEEDS_PER_CLUSTER, STANDS_OUT, Centres, merge, nearest_centre, scattered
from cpsgd.statistics.charges import Charge
from cpsgd.statistics.points import Ball, Matrix, people_in_ball, private_mean
from cpsgd.statistics.questions import Planned

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger


# Of how far centres are apart, noise may explain this much before one is warned.
_MOST_NOISE = 0.75
# So far off, in radii, a centre of a cluster of average size may be after the last round.
_FARTHEST_OFF = 0.5


class NoiseWarning(UserWarning):
    """What was found is hardly more than noise. It follows from what was released, and tells nobody more than that."""


@dataclass(frozen=True, eq=False)
class KMeansResult:
    """The centres, and what finding them cost and promises.

    Attributes:
        centres: One row per cluster.
        sizes: The clusters' sizes as the last round saw them, noise included; 0 where a size was all noise.
        deviations: √E‖error‖² of each centre's estimate, from the noise of the rounds it rests on; infinite where it
            rests on none.
        plan: The protocol of every round, with what all of them together promised and a round's expected error.
        guarantee: The proved (ε, δ) of all rounds together, for replacing one client's point.
    """

    centres: Matrix
    sizes: Matrix
    deviations: Matrix
    plan: Plan
    guarantee: Guarantee

    @property
    def bits_per_client(self) -> int:
        """What one client sends in all rounds, headers included."""
        return self.plan.rounds * self.plan.protocol.bits_per_client

    @property
    def noise_share(self) -> float:
        """How much of the centres' spread around their mean noise explains, by squares; 1 where one centre is left.

        Noise of the same size in the spread of points around their centres is what clustering costs. So beyond about
        one half the centres may well describe the points worse than a single one does.
        """
        alive = self.sizes > 0.0
        sizes, centres = self.sizes[alive], self.centres[alive]
        if len(sizes) < 2:
            return 1.0
        spread = float(sizes @ np.sum((centres - np.average(centres, axis=0, weights=sizes)) ** 2, axis=1))
        noise = float(sizes @ self.deviations[alive] ** 2)
        return 1.0 if noise >= spread else noise / spread


class Clusters:
    """The centres of clusters of the clients' points, by a fixed number of rounds.

    Each client holds a point of a public ball; a client with several rows has their mean. What is sent, and how far
    apart two clients' vectors are, is `Blocks`'s.

    Args:
        columns: The points' coordinates: names of columns, or how many there are.
        clusters: K.
        radius: Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without
            looking at the data.
        rounds: Rounds of Lloyd's algorithm. More find better clusters, with more noise in each round.
        initial: Public centres to begin with, which must not come from the data. Then all rounds improve them, and
            messages are half as long. None for random ones and a search (see `cpsgd.statistics.centres`).
        seed: Public seed of the random centres and of the search. The noise that protects has none.

    Raises:
        ParameterError: A parameter is out of range.
        VectorError: The initial centres are not K times a finite number per coordinate.

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
        >>> found.guarantee.epsilon <= 16.0, bool(np.abs(found.centres - [[0.5, 0.5], [-0.5, 0.5]]).max() < 0.2)
        (True, True)
    """

    def __init__(
        self,
        columns: int | Sequence[str],
        clusters: int,
        *,
        radius: float,
        rounds: int = 8,
        initial: ArrayLike | None = None,
        seed: int = 0,
    ) -> None:
        self.ball = Ball.of(columns, radius)
        self.clusters = _validate.integer("clusters", clusters, low=1)
        self.rounds = _validate.integer("rounds", rounds, low=1)
        self.seed = _validate.integer("seed", seed, low=0)
        # Rounds of the search.
        self.search = self.rounds // 2 if initial is None else 0
        self.blocks = Blocks(self.clusters * SEEDS_PER_CLUSTER if self.search else self.clusters, self.ball.dim)
        exactly = range(self.clusters, self.clusters + 1)
        self.initial = None if initial is None else places_in("initial centres", initial, exactly, self.ball)

    def plan(self, clients: int, epsilon: float, delta: float, **wishes: Any) -> PlannedClusters:
        """Plans all rounds, in each of which every client answers.

        Args:
            clients: How many clients there are.
            epsilon: ε of all rounds together, for replacing all rows of one client.
            delta: δ.
            wishes: What else `cpsgd.plan` takes: `bits`, `mechanism`, `dropout`, `colluding`, `secure`, ...

        Raises:
            ParameterError: More clusters than clients, or a parameter out of range.
            InfeasibleError: The budget is so small that sizes of clusters would drown in noise.
        """
        clients = _validate.integer("clients", clients, low=2)
        if self.clusters > clients:
            raise ParameterError(
                f"Expected at most as many clusters as clients, got {self.clusters} for {clients} clients."
            )
        # Any centres will do: the plan does not depend on them.
        anywhere = Around(self.ball, self.blocks, np.zeros((1, self.ball.dim)))
        rounds = {"rounds": self.rounds, "participation": "every"}
        planned = anywhere.plan(clients, epsilon, delta, **rounds, **wishes).plan
        _check_budget(planned, self, clients)
        return PlannedClusters(self, planned)


@dataclass(frozen=True, eq=False)
class PlannedClusters:
    """k-means with the protocol of its rounds.

    Attributes:
        question: What is asked.
        plan: The protocol of every round, with the guarantee of all of them together.
    """

    question: Clusters
    plan: Plan

    @property
    def protocol(self) -> Protocol:
        """The protocol of each round."""
        return self.plan.protocol

    def around(self, centres: ArrayLike) -> Planned[ClusterSums]:
        """A round around announced centres, for transports that encode vectors themselves."""
        return Planned(Around(self.question.ball, self.question.blocks, centres), self.plan)

    def encode(self, value: object, centres: ArrayLike, round: int) -> bytes:
        """One client's message; see `Ball.point` for what a value may be.

        Args:
            value: The client's point or rows.
            centres: What the server has announced for this round.
            round: Its number, from 0 on. Answer each round once: the guarantee counts no more.

        Raises:
            ParameterError: There is no such round.
            VectorError: The value or the centres cannot be used.
        """
        round = _validate.integer("round", round, low=0, high=self.question.rounds - 1)
        return self.around(centres).encode(value, round)

    def start(self) -> Lloyd:
        """The server's side, before the first round."""
        return Lloyd(self)


class Lloyd:
    """The server's side of k-means, from round to round.

    Attributes:
        asked: What is asked, with its plan.
        round: The number of the next round, from 0 on.
    """

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

    @property
    def centres(self) -> Matrix:
        """What to announce for the next round; after the last one, the centres that were found."""
        return self.asked.question.ball.radius * self._state.places

    def aggregate(self, messages: Iterable[bytes], *, accept_epsilon: float | None = None) -> Matrix:
        """Ends the round with the clients' messages, and returns the next centres.

        Args:
            messages: One per client, of this round.
            accept_epsilon: See `Planned.aggregate`; ε is of all rounds, as if each had so few messages.

        Raises:
            GuaranteeError: There are fewer messages than the guarantee was planned for. The round is not over.
            WireError: A message is refused.
            ParameterError: All rounds are over.
        """
        self._check_open()
        asked = self.asked.around(self.centres)
        return self.update(asked.aggregate(messages, self.round, accept_epsilon=accept_epsilon))

    def update(self, found: ClusterSums) -> Matrix:
        """Ends the round with what it says, `around(centres).result(mean, count)`; returns the next centres.

        Raises:
            ParameterError: All rounds are over.
        """
        self._check_open()
        question, protocol = self.asked.question, self.asked.protocol
        deviations = question.blocks.deviations(protocol, found.count)
        self._state = self._state.updated(found.sums, found.sizes, deviations)
        # That of the round with the fewest clients, whose noise is the least, holds for all.
        if self._guarantee is None or found.guarantee.epsilon > self._guarantee.epsilon:
            self._guarantee = found.guarantee
        self.round += 1
        if self.round == question.search:
            self._state = Centres.at(merge(self._state, question.clusters, self._generator))
        elif self.round < question.rounds:
            self._state = self._state.revived(self._generator)
        return self.centres

    def result(self) -> KMeansResult:
        """The clusters, after the last round; or what is known of them, where the last ones were withheld.

        Raises:
            ParameterError: There was no round yet, or none after the search.
        """
        question = self.asked.question
        if self.round <= question.search or self._guarantee is None:
            raise ParameterError(f"{self.round} of {question.rounds} rounds are over: run the others first.")
        with np.errstate(divide="ignore"):
            deviations = self.asked.question.ball.radius / np.sqrt(self._state.precisions)
        return KMeansResult(self.centres, self._state.sizes, deviations, self.asked.plan, self._guarantee)

    def _check_open(self) -> None:
        rounds = self.asked.question.rounds
        if self.round >= rounds:
            raise ParameterError(f"All {rounds} rounds are over: the guarantee covers no more.")


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
        InfeasibleError: The budget is so small that clusters would drown in noise. Nothing was sent.

    Warns:
        NoiseWarning: Centres were found that hardly differ by more than their noise (`KMeansResult.noise_share`).

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
    question = Clusters(columns or dim, clusters, radius=radius, rounds=rounds, initial=initial, seed=seed)
    asked = question.plan(clients, epsilon, delta, bits=bits)
    Charge.of(ledger, population, [asked.protocol] * question.rounds, "kmeans").pay()
    server = asked.start()
    for number in range(question.rounds):
        around = Around(question.ball, question.blocks, server.centres)
        mean = private_mean(asked.protocol, number, ball, around.write, advance)
        server.update(Planned(around, asked.plan).result(mean, clients))
    found = server.result()
    if clusters > 1 and found.noise_share > _MOST_NOISE:
        many = int(np.count_nonzero(found.sizes))
        warnings.warn(
            f"ε={rounded_up(epsilon)} is hardly enough for {clusters} clusters of {clients:,} clients in {dim} "
            f"dimensions: {many} stood out of the noise, and noise explains {found.noise_share:.0%} of how far these "
            "are apart. One cluster may describe the points better. Allow a larger epsilon, or ask for fewer clusters.",
            NoiseWarning,
            stacklevel=2,
        )
    return found


def inertia(points: ArrayLike, centres: ArrayLike) -> float:
    """The sum of the points' squared distances from their nearest centres.

    An exact figure about the points: it is for those who hold all of them, and no part of what is released.
    """
    table, places = np.asarray(points, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    return float(np.sum((table - places[nearest_centre(table, places)]) ** 2))


def _check_budget(planned: Plan, asked: Clusters, clients: int) -> None:
    """Refuses before the first round what would be clustering of noise.

    Raises:
        InfeasibleError: A cluster of average size would not stand out of the noise, or its centre would be anywhere.
    """
    of_sum, of_size = asked.blocks.deviations(planned.protocol, clients)
    average, needed = clients / asked.clusters, STANDS_OUT * of_size
    # What the rounds after the search say of a centre that stands still is averaged.
    off = math.sqrt((asked.ball.dim * of_sum**2 + of_size**2) / (asked.rounds - asked.search)) / average
    if needed < average and off < _FARTHEST_OFF:
        return
    told = (
        f"the size of a cluster would be off by {of_size:,.0f} (one standard deviation), and clusters have "
        f"{average:,.0f} clients on average"
    )
    # Noise grows with the root of the number of rounds.
    bought = int(planned.rounds * (average / needed) ** 2)
    if needed < average:
        told = f"the centre of a cluster of {average:,.0f} clients would be off by {off:.2g} times the radius"
        bought = 0  # as much as that, it is averaged over more of them
    enough = round(clients * max(needed / average, off / _FARTHEST_OFF))
    buys = f"{bought} rounds would do" if bought else f"about {enough:,} clients would do"
    raise InfeasibleError(
        f"ε={rounded_up(planned.wished_epsilon)} is too little for {planned.rounds} rounds with {clients:,} clients: "
        f"{told}. {buys}, or a larger epsilon or fewer clusters."
    )
