"""What a ledger is about: budgets, the rounds that spend them, and entries, which are rounds on record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, Self, get_args

from cpsgd import _validate
from cpsgd.codec import wire
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.accountant import LARGEST_EPSILON
from cpsgd.privacy.filters import Filter, best_order
from cpsgd.protocol import MAX_CLIENTS, Protocol

Unit = Literal["client", "example"]
"""Whose data may change between neighbours: all that a client holds, or one of its examples."""

_LONGEST_NAME = 200
_LONGEST_PERIOD = 36_500


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent of a population's privacy, for ever.

    Attributes:
        population: A name. Everybody whose data is in a round charged to it belongs to the population.
        epsilon: The most ε that all its rounds together may cost.
        delta: δ of that guarantee, in total.
        adjacency: Which data sets are neighbours. All rounds are accounted for these.
        unit: What neighbours differ in: a client's data, or one example of it.
        accounting: How rounds may be chosen. "planned": without looking at earlier results; "adaptive": in any way,
            also by results, and "adaptive-renyi:ORDER" the same by Rényi divergences of this order, for rounds that are
            sampled ("adaptive-renyi" chooses an order for ε and δ).
        group_of: Name of the population that this is a group of. Groups of a population have nobody in common; a round
            of the whole population is charged to each of them.
        expires: The day, as 2027-01-31 (UTC), from which on nothing more is reserved; empty for never.
        renews: Days after which the budget begins anew, counted from its creation; 0 for never. Only where the rounds
            of a period are about data of that period.
    """

    population: str
    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    unit: Unit = "client"
    accounting: str = "planned"
    group_of: str = ""
    expires: str = ""
    renews: int = 0

    def __post_init__(self) -> None:
        name("population", self.population, empty=False)
        object.__setattr__(self, "epsilon", _validate.positive("epsilon", self.epsilon, high=LARGEST_EPSILON))
        object.__setattr__(self, "delta", _validate.probability("delta", self.delta))
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        if self.unit not in get_args(Unit):
            raise ParameterError(f"Expected unit to be one of {list(get_args(Unit))}, got {self.unit!r}.")
        object.__setattr__(self, "accounting", self._parsed_accounting())
        name("group_of", self.group_of, empty=True)
        object.__setattr__(self, "renews", _validate.integer("renews", self.renews, low=0, high=_LONGEST_PERIOD))
        if self.group_of == self.population:
            raise ParameterError("A population is no group of itself.")
        if self.group_of and self.renews:
            raise ParameterError("A group has the periods of its population: leave renews out.")
        if self.expires != "" and (not isinstance(self.expires, str) or _day(self.expires) is None):
            raise ParameterError(f"Expected expires to be a day as 2027-01-31, got {self.expires!r}.")

    def _parsed_accounting(self) -> str:
        kind, colon, order = str(self.accounting).partition(":")
        if kind == "adaptive-renyi" and isinstance(self.accounting, str):
            try:
                chosen = int(order) if colon else best_order(self.epsilon, self.delta)
            except ValueError:
                raise ParameterError(f"Expected a whole order in accounting={self.accounting!r}.") from None
            Filter.of(self.epsilon, self.delta, chosen)
            return f"{kind}:{chosen}"
        if self.accounting not in ("planned", "adaptive"):
            raise ParameterError(
                "Expected accounting to be 'planned', 'adaptive' or 'adaptive-renyi:ORDER', got "
                f"{str(self.accounting)[:50]!r}."
            )
        return self.accounting

    @property
    def filter(self) -> Filter | None:
        """What decides about rounds that are chosen adaptively; None where they are planned."""
        if self.accounting == "planned":
            return None
        order = self.accounting.partition(":")[2]
        return Filter.of(self.epsilon, self.delta, int(order) if order else None)

    def expired(self, time: str) -> bool:
        """Whether nothing more may be reserved at this time (UTC, ISO 8601)."""
        return self.expires != "" and _moment(time).date() >= _moment(self.expires).date()

    def period(self, created: str, time: str) -> int:
        """Which period, from 0, this time is in, for a budget that was created at the other."""
        if not self.renews:
            return 0
        return max(0, (_moment(time) - _moment(created)) // timedelta(days=self.renews))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """What `to_dict` gave, here or in 0.1.0; anything else is refused with `ParameterError`."""
        new = {"accounting": "planned", "group_of": "", "expires": "", "renews": 0}
        if isinstance(data, Mapping) and not new.keys() & data.keys():
            data = {**data, **new}
        return cls(**exactly(cls, data))


@dataclass(frozen=True)
class RoundEvent:
    """One round, as far as its cost goes.

    Attributes:
        protocol: The parameters of the round.
        survivors: The fewest messages that the sum will hold if it is released.
        participation: Who takes part: "every", "once", "poisson:RATE", "fixed-size:RATE" or a `Participation`, which
            says what each assumes; see `taking_part`.
        colluding: How many of the survivors may tell their noise.
        round: Number of the round.
        run: Name of the run that the round belongs to; within one run a round is charged once. Rounds without a run are
            never taken for each other.
        partition: For participation "once": name of the division of the population into disjoint cohorts that this
            round's cohort is a part of. Rounds of one partition cost each client one round only, *because the caller
            says that no client is in two of them*. Without a name the round is charged as if everybody were in it.
            Where noise is correlated over rounds, each costs what its whole run does, and the run's name here makes it
            one event, whoever is in which of its rounds: no more of them than the run has. Without a name a round is a
            run of its own.
        examples: For populations whose unit is an example: the most examples of a client (`example_protocol`).
        overflow: Probability, added to δ, that the noise of a Poisson round depends on the draw (more clients drawn
            than there was room for).
        label: Anything a person should read beside the round; kept in clear.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=14)
        >>> event = RoundEvent(protocol, survivors=950, participation="once", partition="spring")
        >>> event.taking_part.scheme, event.unit
        ('once', 'client')
    """

    protocol: Protocol
    survivors: int
    participation: Participation | str = "every"
    colluding: int = 0
    round: int = 0
    run: str = ""
    partition: str = ""
    examples: int | None = None
    overflow: float = 0.0
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, Protocol):
            raise ParameterError(f"Expected protocol to be a Protocol, got {type(self.protocol).__name__}.")
        normal: dict[str, object] = {
            "survivors": _validate.integer("survivors", self.survivors, low=1, high=MAX_CLIENTS),
            "participation": Participation.parse(self.participation),
            "colluding": _validate.integer("colluding", self.colluding, low=0, high=MAX_CLIENTS),
            "round": _validate.integer("round", self.round, low=0, high=wire.MAX_ROUND),
            "overflow": _validate.fraction("overflow", self.overflow),
        }
        for field, value in normal.items():
            object.__setattr__(self, field, value)
        for field in ("run", "partition", "label"):
            name(field, getattr(self, field), empty=True)
        if self.survivors <= self.colluding:
            raise ConditionError(
                f"A round of {self.survivors} messages of which {self.colluding} may be colluding protects nobody."
            )
        mechanism, clients = self.protocol.mechanism, self.protocol.clients
        mechanism.check_messages(self.survivors, clients)
        mechanism.check_honest(self.survivors - self.colluding, self.colluding, clients)
        if mechanism.correlation is not None and self.taking_part.sampled:
            raise ConditionError(
                "Amplification by sampling is not proved for noise that is correlated over rounds; use participation "
                "'once', or independent noise."
            )
        if mechanism.correlation is not None and self.run and not self.partition:
            # Rounds without a partition are a run each, and those of one run would be charged as if they were not.
            raise ParameterError(
                "Noise is correlated over the rounds of a run, which is one event: give the run's name as partition, "
                "too, with participation 'once'."
            )
        if self.partition and self.taking_part.scheme != "once":
            raise ParameterError("A partition is for rounds with participation 'once'; leave it out.")
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1, high=MAX_CLIENTS)
            if self.taking_part.sampled:
                raise ParameterError(
                    "Example-level privacy is proved for participation 'once' and 'every' only: amplification by "
                    "sampling clients speaks of whole clients."
                )

    @property
    def taking_part(self) -> Participation:
        """`participation`, parsed."""
        return Participation.parse(self.participation)

    @property
    def unit(self) -> Unit:
        """What the event protects."""
        return "client" if self.examples is None else "example"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the protocol's fingerprint for readers."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "protocol": self.protocol.to_dict(),
            "fingerprint": self.protocol.fingerprint.hex(),
            "participation": asdict(self.taking_part),
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """What `to_dict` gave; anything else is refused with `ParameterError`."""
        values = exactly(cls, data, "fingerprint")
        fingerprint = values.pop("fingerprint")
        protocol, found = read_protocol(values["protocol"])
        if found != fingerprint:
            raise ParameterError("The event's protocol does not have the event's fingerprint.")
        participation = Participation(**exactly(Participation, values["participation"]))
        return cls(**{**values, "protocol": protocol, "participation": participation})


@dataclass(frozen=True)
class Entry:
    """A round on record. It counts as spent from its reservation on, released or not.

    Attributes:
        number: Number of the record of its reservation.
        population: Whose budget pays.
        event: The round.
        reserved_at: When it was reserved (UTC, ISO 8601), by the clock of whoever did.
        spent: ε of the population at that time, this round included.
        method: What proved it.
        released_at: When it was released; None if it never was.
        released_survivors: Messages that the released sum holds; None if it never was released.
        released_as: Number of the record of its release; None if it never was released.
        abandoned_as: Number of the record by which it was given up; None if it was not.
        octave: For adaptive budgets: which share of δ its tails have; see `Filter.tail`.
    """

    number: int
    population: str
    event: RoundEvent
    reserved_at: str
    spent: float
    method: str
    released_at: str | None = None
    released_survivors: int | None = None
    released_as: int | None = None
    abandoned_as: int | None = None
    octave: int | None = None

    @property
    def closed_as(self) -> int | None:
        """Number of the record by which it was released or given up."""
        return self.released_as if self.abandoned_as is None else self.abandoned_as

    @property
    def abandoned(self) -> bool:
        """Whether it was given up, and costs nothing."""
        return self.abandoned_as is not None

    @property
    def released(self) -> bool:
        """Whether its result may have been handed out."""
        return self.released_at is not None

    @property
    def survivors(self) -> int:
        """Messages it is accounted with: those of the released sum, or the fewest it was reserved for."""
        return self.event.survivors if self.released_survivors is None else self.released_survivors

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "event": self.event.to_dict(), "released": self.released, "abandoned": self.abandoned}


def name(field: str, value: object, *, empty: bool) -> str:
    """Returns a name fit for one line of text, or raises `ParameterError`."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME or not (empty or value) or not value.isprintable():
        raise ParameterError(
            f"Expected {field} to be text of {0 if empty else 1} to {_LONGEST_NAME} printable characters."
        )
    return value


def _day(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return None


def _moment(text: str) -> datetime:
    """A time as records have it, or a day."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ParameterError("Expected a time as ISO 8601 has it.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def read_protocol(data: object) -> tuple[Protocol, str]:
    """A protocol's plain JSON values as the protocol, and its fingerprint in hexadecimal."""
    try:
        text = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise ParameterError("Expected a protocol as plain JSON values.") from None
    return _parsed_protocol(text)


# Most records of a ledger have the protocol of the one before.
@lru_cache(maxsize=64)
def _parsed_protocol(text: str) -> tuple[Protocol, str]:
    protocol = Protocol.from_dict(json.loads(text))
    return protocol, protocol.fingerprint.hex()


def exactly(kind: type[Any], data: object, *others: str) -> dict[str, Any]:
    """The values by name if they are all there and no others are."""
    wanted = {field.name for field in fields(kind)} | set(others)
    if not isinstance(data, Mapping) or set(data) != wanted:
        raise ParameterError(f"Expected an object with the fields {sorted(wanted)} for a {kind.__name__}.")
    return dict(data)
