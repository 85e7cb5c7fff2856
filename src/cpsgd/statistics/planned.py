"""A question that is asked of everybody in one round, with the plan that answers it and the charge for it.

Each client sends a vector of a public set that the question describes (`Geometry`), and the server gets the private
mean of these vectors. The question derives how far apart two such vectors are, and tells the planner
(`replace_one_distance`).

A `Planned` question is the whole protocol: `encode` runs on the clients and `aggregate` on the server. Other transports
(secure aggregation, Flower, NVFlare) carry `vector` by the protocol of `plan`, and give the mean to `result`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.aggregator import Aggregator
from cpsgd.errors import ParameterError, VectorError
from cpsgd.mechanisms import RoundedGaussian
from cpsgd.planner import Plan, plan
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import RoundSimulator

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent

Vectors = NDArray[np.float32]
Matrix = NDArray[np.float64]
Answer = TypeVar("Answer")
"""Type of a question's answer."""

# Relative error that float64 in between and float32 at the end can add to a distance or a norm.
_ROUNDING = 1.0 + 2.0**-20
MOST_COORDINATES = 1 << 24
"""The most coordinates of a question."""
# Shorter vectors spend their time in the interpreter, where threads only wait for each other.
_THREADED_DIM = 1 << 14


@dataclass(frozen=True)
class Geometry:
    """The set of a question's vectors.

    Attributes:
        dim: Number of coordinates.
        norm: The largest norm.
        distance: The largest distance between two vectors, and between a vector and zero.
        reason: Why the distance holds, for readers of the guarantee.
        rounding: Factor by which floating point can enlarge both; 1 where they include it already.
    """

    dim: int
    norm: float
    distance: float
    reason: str
    rounding: float = _ROUNDING

    def stated(self) -> dict[str, Any]:
        """Returns the planner's arguments."""
        norm = self.norm * self.rounding
        distance = max(norm, self.distance * self.rounding)
        if distance >= 2.0 * norm:
            return {"dim": self.dim, "clip_norm": norm}
        return {"dim": self.dim, "clip_norm": norm, "replace_one_distance": distance, "distance_reason": self.reason}


class Question(ABC, Generic[Answer]):
    """A question that is asked of everybody in one round."""

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The set that clients' vectors are from."""

    @abstractmethod
    def vector(self, value: object) -> Vectors:
        """Returns one client's vector."""

    @abstractmethod
    def answer(
        self, planned: Planned[Answer], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> Answer:
        """Returns the answer behind the private mean of `count` vectors, released with this guarantee."""

    def plan(self, clients: int, epsilon: float, delta: float, **requirements: Any) -> Planned[Answer]:
        """Plans a round in which every client answers.

        Args:
            clients: Number of clients.
            epsilon: ε, for replacing all rows of one client.
            delta: δ.
            requirements: Others of `cpsgd.plan`: `bits`, `mechanism`, `dropout`, `colluding`, `secure`, `pair`.
                Without bits and mechanism it is noise before rounding, with the fewest bits within 10 % of the Gaussian
                mechanism's error. That is planned at once; a search through all mechanisms may take a minute.

        Raises:
            InfeasibleError: No protocol keeps (ε, δ).
        """
        clients = _validate.integer("clients", clients, low=2)
        if not requirements.keys() & {"bits", "max_error", "mechanism"}:
            requirements["mechanism"] = RoundedGaussian.name
        geometry = self.geometry
        if geometry.dim > MOST_COORDINATES:
            raise ParameterError(
                f"Expected at most {MOST_COORDINATES:,} values, got {geometry.dim:,}: ask for fewer columns, bins, "
                "clusters or groups."
            )
        return Planned(self, plan(clients, epsilon=epsilon, delta=delta, **geometry.stated(), **requirements))


@dataclass(frozen=True, eq=False)
class Planned(Generic[Answer]):
    """A question, and the plan of the protocol that answers it.

    Example:
        >>> from cpsgd.statistics import Mean
        >>> asked = Mean({"age": (0, 100)}).plan(clients=1000, epsilon=1.0, delta=1e-6, bits=8, mechanism="binomial")
        >>> messages = [asked.encode(age) for age in [20, 60] * 500]
        >>> found = asked.aggregate(messages)
        >>> found.names, bool(abs(found.values[0] - 40) < 3), found.epsilon <= 1.0
        (('age',), True, True)
    """

    question: Question[Answer]
    plan: Plan

    @property
    def protocol(self) -> Protocol:
        """The protocol of the round."""
        return self.plan.protocol

    def vector(self, value: object) -> Vectors:
        """Returns one client's vector, for transports that encode it themselves; see `Question.vector`."""
        return self.question.vector(value)

    def encode(self, value: object, round: int = 0) -> bytes:
        """Returns one client's message, to be sent once per round; see the question's `vector` for values."""
        return self.protocol.encode(self.vector(value), round)

    def aggregate(
        self,
        messages: Iterable[bytes],
        round: int = 0,
        *,
        confidence: float = 0.95,
        accept_epsilon: float | None = None,
    ) -> Answer:
        """Returns the answer from the clients' messages.

        Args:
            messages: One per client.
            round: The round they were encoded for.
            confidence: Of the intervals, if the answer has intervals.
            accept_epsilon: Releases fewer messages than planned if their true ε is at most this; the answer says which.

        Raises:
            GuaranteeError: There are fewer messages than the guarantee was planned for. Nothing is released.
            WireError: A message is refused.
        """
        aggregator = Aggregator(self.protocol, round, max_dim=MOST_COORDINATES)
        for message in messages:
            aggregator.add(message)
        mean = aggregator.mean(accept_epsilon=accept_epsilon)
        return self.result(mean, aggregator.count, confidence=confidence, accept_epsilon=accept_epsilon)

    def result(
        self, mean: ArrayLike, count: int, *, confidence: float = 0.95, accept_epsilon: float | None = None
    ) -> Answer:
        """Returns the answer from the private mean of `count` clients' vectors; see `aggregate`."""
        guarantee: Guarantee | None = self.plan.guarantee
        if count < self.plan.surviving or accept_epsilon is not None:
            guarantee = self.protocol.release(count, accept_epsilon=accept_epsilon)
        assert guarantee is not None  # a plan's protocol promises something
        values = np.asarray(mean, dtype=np.float64)
        if values.shape != (self.protocol.dim,) or not np.isfinite(values).all():
            raise VectorError(
                f"Expected a mean of {self.protocol.dim:,} finite numbers, got a shape of {values.shape}."
            )
        return self.question.answer(self, values, count, guarantee, confidence)

    def variance(self, count: int) -> float:
        """Returns the variance of a coordinate of the mean of `count` messages, at its largest.

        The rotation spreads noise and rounding evenly over the coordinates. Clipping to the range is a bias: its
        square, at the worst that the planner assumes, is spread by the rotation as well.
        """
        mechanism = self.protocol.mechanism
        spread = mechanism.scale**2 * (mechanism.noise.variance + mechanism.largest_rounding_variance) / count
        return spread + self.plan.error.clipping / self.protocol.dim


def simulated(protocol: Protocol, round: int = 0) -> RoundSimulator:
    """Returns a round on this machine, with two threads where vectors are long."""
    return RoundSimulator(protocol, round, threads=2 if protocol.dim >= _THREADED_DIM else 1)


def events_of(
    protocols: Sequence[Protocol], label: str = "", *, survivors: int | None = None, round: int = 0
) -> list[RoundEvent]:
    """Returns one event for the accountant per protocol: a round that everybody takes part in."""
    from cpsgd.ledger import RoundEvent

    return [
        RoundEvent(protocol, survivors=survivors or protocol.clients, round=number, label=label)
        for number, protocol in enumerate(protocols, start=round)
    ]


@dataclass(frozen=True)
class Charge:
    """Rounds that a population's budget is to pay for, if there is a ledger. Nothing is spent before `pay`."""

    ledger: Ledger | None
    population: str
    events: Sequence[RoundEvent]

    @staticmethod
    def check(ledger: Ledger | str | Path | None, population: str | None) -> None:
        """Refuses a ledger without a population, and a population without a ledger."""
        if (ledger is None) != (population is None):
            raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")

    @classmethod
    def of(
        cls,
        ledger: Ledger | str | Path | None,
        population: str | None,
        protocols: Sequence[Protocol],
        label: str,
        **rounds: Any,
    ) -> Charge:
        """Returns the charge for these rounds; `rounds` are further arguments of `events_of`.

        Raises:
            BudgetExceededError: Too little of the budget is left.
        """
        cls.check(ledger, population)
        if ledger is None or population is None:
            return cls(None, "", ())
        from cpsgd.ledger import Ledger

        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        events = events_of(protocols, label, **rounds)
        book.quote(population, events)
        return cls(book, population, events)

    def pay(self) -> None:
        """Charges the rounds. Their results may be computed afterwards."""
        if self.ledger is not None:
            for entry in [self.ledger.reserve(self.population, event) for event in self.events]:
                self.ledger.release(entry, entry.event.survivors)
