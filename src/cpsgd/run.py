"""`Run`: a protocol and the rounds it is used for; everything that a guarantee depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cpsgd.errors import ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.promise import Conditions, Surviving
from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class Run:
    """Rounds of one protocol. Use the constructor `of`, which makes and checks the conditions.

    Attributes:
        protocol: The parameters of each round, without the promise, which is part of no proof.
        conditions: The rounds, who takes part in them, which data sets are neighbours, and what is protected.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16)
        >>> run = Run.of(protocol, rounds=10, colluding=100)
        >>> run.rounds, run.surviving, run.honest, str(run.participation)
        (10, 10000, 9900, 'every')
    """

    protocol: Protocol
    conditions: Conditions

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, Protocol) or not isinstance(self.conditions, Conditions):
            raise ParameterError("Expected a Protocol and its Conditions; Run.of makes the conditions.")
        if self.protocol.promise is not None:
            object.__setattr__(self, "protocol", replace(self.protocol, promise=None))

    @classmethod
    def of(
        cls,
        protocol: Protocol,
        *,
        rounds: int | None = None,
        participation: str | Participation = "every",
        adjacency: str | Adjacency = Adjacency.REPLACE_ONE,
        surviving: Surviving | None = None,
        colluding: int = 0,
        examples: int | None = None,
    ) -> Self:
        """Returns the run of a protocol on these conditions, checked; `Conditions.of` says what each means.

        Args:
            protocol: The parameters of each round.
            rounds: Number of rounds; by default 1, or as many as `surviving` has entries.
            participation: "once", "every", "apart:ROUNDS", "poisson:RATE", "fixed-size:RATE" or a `Participation`.
            adjacency: "replace-one" or "zero-out".
            surviving: Messages in the sums; all of the protocol's clients by default.
            colluding: Clients per round who may tell their noise.
            examples: The most examples of a client, where one of them is protected.

        Raises:
            ParameterError: One of them is outside its range, or they contradict each other.
        """
        conditions = Conditions.of(
            protocol.clients if surviving is None else surviving,
            rounds=rounds,
            participation=participation,
            adjacency=adjacency,
            colluding=colluding,
            examples=examples,
        )
        return cls(protocol, conditions)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a number of messages in the sum and the number of rounds with that many, rising."""
        return self.conditions.sizes

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.conditions.rounds

    @property
    def surviving(self) -> int:
        """The fewest messages of a round."""
        return self.conditions.surviving

    @property
    def colluding(self) -> int:
        """Clients per round whose noise does not count."""
        return self.conditions.colluding

    @property
    def honest(self) -> int:
        """The smallest number of clients in a round whose noise counts; not positive if nobody is protected."""
        return self.conditions.honest

    @property
    def participation(self) -> Participation:
        """The rounds that a client takes part in."""
        return self.conditions.participation

    @property
    def sampling(self) -> Participation:
        """The participation that proofs account for: `participation` as colluding clients know it."""
        most = max(self.protocol.clients, self.sizes[-1][0])
        return self.participation.known_to(self.colluding, self.surviving, most)

    @property
    def of_one_client(self) -> Self:
        """The run whose rounds all count for one client; where rounds are one event, the run itself."""
        one_event = self.protocol.mechanism.memory.one_event
        return self if one_event else replace(self, conditions=self.conditions.of_one_client)

    @property
    def adjacency(self) -> Adjacency:
        """The kind of neighbouring data sets."""
        return self.conditions.adjacency

    @property
    def examples(self) -> int | None:
        """The most examples of a client where one of them is protected; None where the whole client is."""
        return self.conditions.examples
