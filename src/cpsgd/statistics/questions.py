"""A question to many people: what a client's rows become, and what the server reads off the mean of it.

A client sends a vector of a public set that a question describes (`Geometry`), the server gets the private mean of the
clients' vectors. Each question derives how far apart two such vectors are, and the planner is told
(`replace_one_distance`).

Of most questions (`RowQuestion`) each row becomes a point of a public set V, and a client sends a convex combination of
such points and zero (`cpsgd.statistics.contributions`). Clients' vectors are at most as far apart as two points of V
and zero.

A question that is planned (`Planned`) is the whole protocol: `encode` on the clients, `aggregate` on the server. Other
transports (secure aggregation, Flower, NVFlare) carry `vector`, with the protocol of `plan`, and give the mean to
`result`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from cpsgd import _validate
from cpsgd.aggregator import Aggregator
from cpsgd.errors import ParameterError, VectorError
from cpsgd.mechanisms import RoundedGaussian
from cpsgd.planner import Plan, plan
from cpsgd.privacy import Guarantee
from cpsgd.protocol import Protocol
from cpsgd.statistics.columns import Chunk, DataTable, labels, text_of
from cpsgd.statistics.contributions import Combine, Rows, Vectors, combined, parts
from cpsgd.statistics.results import Reading, Statistic
from cpsgd.statistics.tables import open_table

Bounds = Mapping[str, tuple[float, float]]
Groups = Mapping[str, Sequence[object]]
Found = TypeVar("Found")
"""What a question's answer is."""

# What float64 on the way and float32 at its end can add to a distance or a norm, relative to it.
_ROUNDING = 1.0 + 2.0**-20
MOST_COORDINATES = 1 << 24
"""Coordinates that a question may have."""
# Sums of what is larger may be no floats.
_LARGEST = 2.0**1000
# Unless something else is asked for.
_MECHANISM = RoundedGaussian.name
# Coordinates of a client's rows that are held at a time, 16 MiB.
_BLOCK = 1 << 21


@dataclass(frozen=True)
class Geometry:
    """The set of a question's vectors.

    Attributes:
        dim: Coordinates of a vector.
        norm: The largest norm.
        distance: The largest distance of two vectors and zero.
        reason: Why, for whoever reads the guarantee.
        rounding: What floating point can add to both, relative to them; 1 where they count it already.
    """

    dim: int
    norm: float
    distance: float
    reason: str
    rounding: float = _ROUNDING

    def stated(self) -> dict[str, Any]:
        """The planner's arguments."""
        norm = self.norm * self.rounding
        distance = max(norm, self.distance * self.rounding)
        if distance >= 2.0 * norm:
            return {"dim": self.dim, "clip_norm": norm}
        return {"dim": self.dim, "clip_norm": norm, "replace_one_distance": distance, "distance_reason": self.reason}


class Question(ABC, Generic[Found]):
    """What is asked of everybody in one round."""

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The set that clients' vectors are of."""

    @abstractmethod
    def vector(self, value: object) -> Vectors:
        """One client's vector."""

    @abstractmethod
    def found(self, planned: Planned[Found], mean: Rows, count: int, guarantee: Guarantee, confidence: float) -> Found:
        """The answer behind a private mean.

        Args:
            planned: The question with its plan.
            mean: The mean of the clients' vectors.
            count: How many there were.
            guarantee: What is proved of this release.
            confidence: Of the intervals, where the answer has some.
        """

    def plan(self, clients: int, epsilon: float, delta: float, **wishes: Any) -> Planned[Found]:
        """Plans a round in which every client answers.

        Args:
            clients: How many clients there are.
            epsilon: ε, for replacing all rows of one client.
            delta: δ.
            wishes: What else `cpsgd.plan` takes: `bits`, `mechanism`, `dropout`, `colluding`, `secure`, ... Without
                bits and mechanism it is noise before rounding, with the fewest bits within 10 % of the Gaussian
                mechanism: planned at once, where the best of all may take a minute to find.

        Raises:
            ParameterError: A parameter is out of range.
            InfeasibleError: No protocol keeps (ε, δ).
        """
        clients = _validate.integer("clients", clients, low=2)
        if not wishes.keys() & {"bits", "max_error", "mechanism"}:
            wishes["mechanism"] = _MECHANISM
        geometry = self.geometry
        if geometry.dim > MOST_COORDINATES:
            raise ParameterError(
                f"Expected at most {MOST_COORDINATES:,} values, got {geometry.dim:,}: ask for fewer columns, bins, "
                "clusters or groups."
            )
        return Planned(self, plan(clients, epsilon=epsilon, delta=delta, **geometry.stated(), **wishes))


class RowQuestion(Question[Statistic]):
    """What is asked of everybody's rows.

    Attributes:
        statistic: Its name.
        columns: The columns of numbers or categories that it is about.
        bounds: Public bounds of columns; values beyond are moved to them.
        group_by: The column that says who is in which group; None without groups.
        groups: The groups' names.
        combine: What becomes of several rows of a user.
        rows: c, the most rows of a user that count; None for all.
    """

    statistic: str
    columns: tuple[str, ...]
    bounds: dict[str, tuple[float, float]]
    combine: Combine = "mean"
    rows: int | None = None

    def __init__(self, group_by: Groups | None) -> None:
        self.group_by: str | None = None
        self.groups: tuple[str, ...] | None = None
        if group_by is not None:
            if not isinstance(group_by, Mapping) or len(group_by) != 1:
                raise ParameterError(
                    "Expected group_by to name one column and its groups, as {'sex': ['f', 'm']}: the groups are "
                    "public, and must not be read off the data."
                )
            ((self.group_by, given),) = group_by.items()
            self.groups = categories("group_by", given)

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.columns, *(() if self.group_by is None else (self.group_by,)))

    @property
    def blocks(self) -> int:
        """How many groups there are, 1 without."""
        return 1 if self.groups is None else len(self.groups)

    @abstractmethod
    def _points(self, chunk: Chunk) -> Rows:
        """Points of one block for these rows."""

    @abstractmethod
    def read(self, mean: NDArray[np.float64], variance: float, users: int, width: float) -> Reading:
        """The values behind a mean of vectors.

        Args:
            mean: The mean, one row per block.
            variance: Of the noise in each of its coordinates.
            users: How many vectors it is the mean of.
            width: Standard deviations from the middle of an interval to its ends.
        """

    def points(self, chunk: Chunk) -> Rows:
        """Points of V for these rows, one row each; zero for those in none of the groups."""
        points = self._points(chunk)
        if self.group_by is None or self.groups is None:
            return points
        code = codes(self.group_by, chunk[self.group_by], self.groups)
        placed = np.zeros((len(points), self.blocks, points.shape[1]))
        inside = np.flatnonzero(code >= 0)
        placed[inside, code[inside]] = points[inside]
        return placed.reshape(len(points), -1)

    def anybody(self, chunk: Chunk) -> bool:
        """Whether any of these rows is in one of the groups."""
        if self.group_by is None or self.groups is None:
            return True
        return bool((codes(self.group_by, chunk[self.group_by], self.groups) >= 0).any())

    def plan(self, clients: int, epsilon: float, delta: float, **wishes: Any) -> Planned[Statistic]:
        """See `Question.plan`.

        Raises:
            ParameterError: There are more groups than clients, or a parameter is out of range.
            InfeasibleError: No protocol keeps (ε, δ).
        """
        clients = _validate.integer("clients", clients, low=2)
        if self.blocks > clients:
            raise ParameterError(
                f"Expected at most as many groups as clients, got {self.blocks:,} groups and {clients:,} clients: ask "
                "for fewer groups."
            )
        return super().plan(clients, epsilon, delta, **wishes)

    def vector(self, value: object) -> Vectors:
        """One client's vector.

        Args:
            value: The client's row, a mapping of columns to values, or its rows: a mapping of columns to lists, or any
                table. For one column without groups also the bare value or a list of them.

        Raises:
            ColumnError: A column is missing, or holds what it should not.
            VectorError: There is no row.
        """
        if not isinstance(value, Mapping) and len(self.needed) == 1 and not hasattr(value, "columns"):
            value = {self.needed[0]: value}
        table = own_rows(value)
        some = max(1, _BLOCK // self.geometry.dim)
        rows = (part for chunk in table.chunks(self.needed or table.names[:1]) for part in parts(chunk, some))
        return combined(map(self.points, rows), self.combine, self.rows)

    def found(
        self, planned: Planned[Statistic], mean: Rows, count: int, guarantee: Guarantee, confidence: float
    ) -> Statistic:
        """The values with their intervals."""
        confidence = _validate.probability("confidence", confidence)
        width = float(-ndtri(0.5 * (1.0 - confidence)))
        protocol = planned.protocol
        return Statistic(
            statistic=self.statistic,
            reading=self.read(mean.reshape(self.blocks, -1), planned.variance(count), count, width),
            confidence=confidence,
            users=count,
            epsilon=guarantee.epsilon,
            delta=guarantee.delta,
            unit="user",
            adjacency=guarantee.adjacency,
            method=guarantee.method,
            citation=guarantee.citation,
            assumption=guarantee.assumption,
            bits=protocol.bits_per_coordinate,
            dim=protocol.dim,
            bounds=dict(self.bounds),
        )


def own_rows(value: object) -> DataTable:
    """The table of a client's rows, or of its one row as a mapping of columns to values.

    Raises:
        TableError: It is no table.
        VectorError: There is no row.
    """
    if isinstance(value, Mapping):
        value = {name: entry if _many(entry) else [entry] for name, entry in value.items()}
    table = open_table(value)
    if table.rows == 0:
        raise VectorError("A client without a row has nothing to send.")
    return table


def _many(entry: object) -> bool:
    return isinstance(entry, list | tuple) or (hasattr(entry, "__len__") and not isinstance(entry, str | bytes))


@dataclass(frozen=True, eq=False)
class Planned(Generic[Found]):
    """A question with the protocol that answers it.

    Attributes:
        question: What is asked.
        plan: The protocol, its guarantee and its expected error.

    Example:
        >>> from cpsgd.statistics import Mean
        >>> asked = Mean({"age": (0, 100)}).plan(clients=1000, epsilon=1.0, delta=1e-6, bits=8, mechanism="binomial")
        >>> messages = [asked.encode(age) for age in [20, 60] * 500]
        >>> found = asked.aggregate(messages)
        >>> found.names, bool(abs(found.values[0] - 40) < 3), found.epsilon <= 1.0
        (('age',), True, True)
    """

    question: Question[Found]
    plan: Plan

    @property
    def protocol(self) -> Protocol:
        """The protocol of the round."""
        return self.plan.protocol

    def vector(self, value: object) -> Vectors:
        """One client's vector, for transports that encode it themselves; see `Question.vector`."""
        return self.question.vector(value)

    def encode(self, value: object, round: int = 0) -> bytes:
        """One client's message; see `Question.vector` for what a value may be. Send one per client and round."""
        return self.protocol.encode(self.vector(value), round)

    def aggregate(
        self,
        messages: Iterable[bytes],
        round: int = 0,
        *,
        confidence: float = 0.95,
        accept_epsilon: float | None = None,
    ) -> Found:
        """The answer from the clients' messages.

        Args:
            messages: One per client.
            round: Which round they were encoded for.
            confidence: Of the intervals, where the answer has some.
            accept_epsilon: Releases fewer messages than were planned for if the ε that is true is at most this; the
                answer says which.

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
    ) -> Found:
        """The answer from the private mean of `count` clients' vectors; see `aggregate`."""
        found: Guarantee | None = self.plan.guarantee
        if count < self.plan.surviving or accept_epsilon is not None:
            found = self.protocol.release(count, accept_epsilon=accept_epsilon)
        assert found is not None  # a plan's protocol promises something
        values = np.asarray(mean, dtype=np.float64)
        if values.shape != (self.protocol.dim,) or not np.isfinite(values).all():
            raise VectorError(
                f"Expected a mean of {self.protocol.dim:,} finite numbers, got a shape of {values.shape}."
            )
        return self.question.found(self, values, count, found, confidence)

    def variance(self, count: int) -> float:
        """Of a coordinate of the mean of `count` messages, rounding at its largest and clipping included.

        The rotation spreads noise and rounding evenly over the coordinates. What clipping to the range does is a bias;
        its square, at the worst that the planner assumes, is spread by the rotation as well.
        """
        mechanism = self.protocol.mechanism
        spread = mechanism.scale**2 * (mechanism.noise.variance + mechanism.largest_rounding_variance) / count
        return spread + self.plan.error.clipping / self.protocol.dim


def check_bounds(bounds: Bounds) -> dict[str, tuple[float, float]]:
    """Bounds of named columns, or `ParameterError`."""
    if not isinstance(bounds, Mapping) or not bounds:
        raise ParameterError("Expected bounds as a mapping of columns to (low, high).")
    found = {}
    for name, pair in bounds.items():
        try:
            low, high = pair
        except (TypeError, ValueError):
            raise ParameterError(f"Expected (low, high) as the bounds of {name!r}.") from None
        low, high = (_validate.finite(f"bound of {name!r}", end) for end in (low, high))
        if max(-low, high) > _LARGEST:
            raise ParameterError(f"Expected bounds of {name!r} within ±{_LARGEST:.3g}, got ({low:g}, {high:g}).")
        if not low < high:
            raise ParameterError(f"Expected bounds of {name!r} with low < high, got ({low:g}, {high:g}).")
        if high - low < 2.0**-40 * max(abs(low), abs(high)):
            raise ParameterError(f"Expected bounds of {name!r} that floats can tell apart, got ({low!r}, {high!r}).")
        found[str(name)] = (low, high)
    return found


def categories(name: str, given: Iterable[object]) -> tuple[str, ...]:
    """Different categories as texts, or `ParameterError`."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ParameterError(f"Expected {name} to list categories.")
    found = tuple(text_of(entry) for entry in given)
    if not found or len(set(found)) < len(found):
        raise ParameterError(f"Expected {name} to list at least one category, each once.")
    return found


def codes(name: str, column: NDArray[Any], known: Sequence[str]) -> NDArray[np.int64]:
    """The number of each row's category among those known, -1 for others."""
    texts, number = labels(name, column)
    place = {text: i for i, text in enumerate(known)}
    return np.array([place.get(text, -1) for text in texts], dtype=np.int64)[number]
