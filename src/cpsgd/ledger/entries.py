"""The data of a ledger: budgets, the rounds that spend them, and entries, which are rounds on record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, Self, get_args

from cpsgd import _plain, _validate
from cpsgd.codec import wire
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.accountant import LARGEST_EPSILON
from cpsgd.privacy.filters import Filter, best_order
from cpsgd.protocol import MAX_CLIENTS, Protocol

Unit = Literal["client", "example"]
"""The data that may change between neighbours: all that a client holds, or one of its examples."""
TableUnit = Literal["", "user", "row"]
"""The data of a table that may change: all rows of a user, or one row; empty where the round is about no table."""

_LONGEST_NAME = 200
_LONGEST_PERIOD = 36_500


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The privacy that a population may spend. A budget is never changed.

    Attributes:
        population: A name. Everybody whose data is in a round charged to it belongs to the population.
        epsilon: The most ε that all its rounds together may cost.
        delta: δ of that guarantee, in total.
        adjacency: Which data sets are neighbours. All rounds are accounted for these.
        unit: Data in which neighbours differ: "client" for all that a client holds, "example" for one of its examples.
        accounting: How rounds may be chosen. "planned": without looking at earlier results. "adaptive": in any way,
            also by earlier results. "adaptive-renyi:ORDER": the same, by Rényi divergences of this order, which suits
            sampled rounds; "adaptive-renyi" chooses the order for ε and δ.
        group_of: Name of the population that this is a group of. Groups of a population have nobody in common. A round
            of the whole population is charged to each of them.
        expires: The day, as 2027-01-31 (UTC), from which on nothing more is reserved; empty for never.
        renews: Days after which the budget begins anew, counted from its creation; 0 for never. Only for rounds whose
            data is new in each period.

    Example:
        >>> budget = Budget(population="patients", epsilon=4.0, delta=1e-6, expires="2027-01-31")
        >>> budget.expired("2027-01-30T12:00:00+00:00"), budget.expired("2027-02-01T12:00:00+00:00")
        (False, True)
        >>> Budget(population="patients", epsilon=4.0, delta=1e-6, accounting="adaptive-renyi").accounting
        'adaptive-renyi:7'
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
        object.__setattr__(self, "delta", _validate.fraction("delta", self.delta))
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
        """Returns the kind of accounting, with its Rényi order; raises `ParameterError` if it is unknown."""
        kind, colon, order = str(self.accounting).partition(":")
        if kind.startswith("adaptive") and self.delta == 0.0:
            raise ParameterError(
                f"Expected delta above 0 with accounting={self.accounting!r}, got delta=0. Pure ε add up however "
                "rounds are chosen: use accounting='planned'."
            )
        if kind == "adaptive-renyi" and isinstance(self.accounting, str):
            if not colon:
                order = str(best_order(self.epsilon, self.delta))
            try:
                chosen = int(order)
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
        """The privacy filter that decides about rounds chosen adaptively; None where rounds are planned."""
        if self.accounting == "planned":
            return None
        order = self.accounting.partition(":")[2]
        return Filter.of(self.epsilon, self.delta, int(order) if order else None)

    def expired(self, time: str) -> bool:
        """Returns whether nothing more may be reserved at this time (UTC, ISO 8601)."""
        return self.expires != "" and _moment(time).date() >= _moment(self.expires).date()

    def period(self, created: str, time: str) -> int:
        """Returns the number, from 0, of the period that `time` is in."""
        if not self.renews:
            return 0
        return max(0, (_moment(time) - _moment(created)) // timedelta(days=self.renews))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return _plain.to_dict(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the budget that `to_dict` wrote, here or in 0.1.0; raises `ParameterError` for anything else."""
        new = {"accounting": "planned", "group_of": "", "expires": "", "renews": 0}
        if isinstance(data, Mapping) and not new.keys() & data.keys():
            data = {**data, **new}
        return _plain.build(cls, data)


@dataclass(frozen=True)
class RoundEvent:
    """One round, with all that its cost depends on.

    Attributes:
        protocol: The parameters of the round.
        survivors: The fewest messages that the sum will hold if it is released.
        participation: Who takes part: "every", "once", "poisson:RATE", "fixed-size:RATE" or a `Participation`.
        colluding: Number of survivors who may tell their noise.
        round: Number of the round.
        run: Name of the run that the round belongs to. Within a run a round is charged once. Rounds without a run are
            never taken for each other.
        partition: For participation "once": name of a division of the population into disjoint cohorts, one of which is
            this round's. Rounds of one partition cost each client one round only, *because the caller says that no
            client is in two of them*. Without a name the round is charged as if everybody were in it. Where noise is
            correlated over rounds, name the run here: its rounds are then one event, with the cost of the whole run.
            Without a name such a round is a run of its own.
        examples: For populations whose unit is an example: the most examples of a client. The participation is then
            that of an example; with "poisson:RATE" clients draw among their own (docs/proofs/sampled-examples.md).
        overflow: Probability, added to δ, that the noise of a Poisson round depends on the draw, because more clients
            were drawn than there was room for.
        label: Text for people, kept in clear.
        table_unit: For statistics of a table: whether they protect a "user" with all their rows, or one "row". A
            budget pays for one of the two.

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
    table_unit: TableUnit = ""

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
        _validate.choice("table_unit", self.table_unit, get_args(TableUnit))
        if self.survivors <= self.colluding:
            raise ConditionError(
                f"A round of {self.survivors} messages of which {self.colluding} may be colluding protects nobody."
            )
        memory, clients = self.protocol.mechanism.memory, self.protocol.clients
        memory.check_messages(self.survivors, clients)
        memory.check_honest(self.survivors - self.colluding, self.colluding, clients)
        memory.check_run(1, self.taking_part)
        if memory.one_event and self.run and not self.partition:
            # Rounds without a partition are a run each, and those of one run would be charged as if they were not.
            raise ParameterError(
                "Noise is correlated over the rounds of a run, which is one event: give the run's name as partition, "
                "too, with participation 'once'."
            )
        if self.taking_part.scheme == "apart":
            raise ParameterError(
                f"participation={str(self.taking_part)!r}: any {self.taking_part.separation} consecutive rounds are "
                "disjoint; charge them with participation 'once' and a partition of their own."
            )
        if self.partition and self.taking_part.scheme != "once":
            raise ParameterError("A partition is for rounds with participation 'once'; leave it out.")
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1, high=MAX_CLIENTS)
            if self.taking_part.scheme == "fixed-size":
                raise ParameterError(
                    "Example-level privacy is proved for participation 'once', 'every' and 'poisson:RATE', where "
                    f"clients draw among their own examples, not for {self.taking_part}."
                )

    @property
    def taking_part(self) -> Participation:
        """`participation`, parsed."""
        return Participation.parse(self.participation)

    @property
    def most_messages(self) -> int:
        """The most messages that the cost of a fixed-size cohort with colluders is proved for."""
        return max(self.protocol.clients, self.survivors)

    @property
    def unit(self) -> Unit:
        """The data that the event protects: a whole client, or one example."""
        return "client" if self.examples is None else "example"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values, with the protocol's fingerprint for readers."""
        own = {"participation": _plain.plain(self.taking_part), "fingerprint": self.protocol.fingerprint.hex()}
        # Left out where it says nothing, as 0.2.0 writes and reads it.
        return {**_plain.to_dict(self, without=[] if self.table_unit else ["table_unit"]), **own}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the event that `to_dict` wrote; raises `ParameterError` for anything else."""
        values = {"table_unit": "", **data} if isinstance(data, Mapping) else {}
        stated = values.pop("fingerprint", None)
        protocol, fingerprint = read_protocol(values.pop("protocol", None))
        if stated != fingerprint:
            raise ParameterError("The event's protocol does not have the event's fingerprint.")
        return _plain.build(cls, values, protocol=protocol)


@dataclass(frozen=True)
class Entry:
    """A recorded round. It counts as spent from its reservation on, released or not.

    Attributes:
        number: Number of the record of its reservation.
        population: Population whose budget pays.
        event: The round.
        reserved_at: Time of its reservation (UTC, ISO 8601), by the clock of the process that reserved it.
        spent: ε of the population at that time, this round included.
        method: Name of the method that proved it.
        released_at: Time of its release; None if it was never released.
        released_survivors: Messages in the released sum; None if it was never released.
        released_as: Number of the record of its release; None if it was never released.
        abandoned_as: Number of the record by which it was given up; None if it was not.
        octave: For adaptive budgets: which share of δ pays for its tails; see `Filter.tail`.
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
        """Number of the record by which it was released or given up; None while it is open."""
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
        """Number of messages used in the accounting: of the released sum, or else the fewest reserved for."""
        return self.event.survivors if self.released_survivors is None else self.released_survivors

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return _plain.to_dict(self, "released", "abandoned")


def name(field: str, value: object, *, empty: bool) -> str:
    """Returns a checked name that fits one line of text, or raises `ParameterError`."""
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
    """Returns the time in a record, or the beginning of a day."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ParameterError("Expected a time in the form of ISO 8601.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def read_protocol(data: object) -> tuple[Protocol, str]:
    """Returns the protocol with these plain JSON values, and its fingerprint in hexadecimal."""
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
