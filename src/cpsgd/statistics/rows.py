"""Questions about rows: a user's rows become one vector, and the mean of these becomes named values with intervals.

Each row becomes a point of a public set V. A user sends a convex combination of points of V and zero: the mean of all
their rows, or the sum of their first c rows over c. So two users' vectors are no further apart than two points of V and
zero, however many rows a user has, and ε is per user.

*Proof.* Let x = Σ aᵢ vᵢ and y = Σ bⱼ wⱼ with weights that sum to 1. Then x - y = Σᵢⱼ aᵢ bⱼ (vᵢ - wⱼ), so
‖x - y‖ <= max ‖vᵢ - wⱼ‖. Fewer than c rows are c with zeros among them. ∎
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError, TableError, VectorError
from cpsgd.neighbours import Adjacency
from cpsgd.privacy import Guarantee
from cpsgd.promise import Claim
from cpsgd.statistics.planned import Matrix, Planned, Question, Vectors
from cpsgd.tables import CHUNK_ROWS, Chunk, DataTable, labels, open_table, text_of

Bounds = Mapping[str, tuple[float, float]]
Groups = Mapping[str, Sequence[object]]
Combine = Literal["mean", "sum"]

# Coordinates of rows that are held at a time, 16 MiB.
_BLOCK = 1 << 21
# Sums of larger bounds may overflow.
_LARGEST = 2.0**1000
# Values in a statistic's short text.
_SHOWN = 4


# ------------------------------------------------------------------ users


class People:
    """The users of a table, and their vectors.

    Without a user column every row is a user. With one, the columns are held in memory, since rows of one user may be
    anywhere. They are read once, together with the users: if a file changed in between, a second reading could give one
    user's rows to another.
    """

    def __init__(self, table: DataTable, user: str | None, columns: Sequence[str]) -> None:
        """Counts the users.

        Args:
            table: The table.
            user: The column of users, or None.
            columns: All columns that will be read; may be empty if there is a user column.

        Raises:
            TableError: There is only one user, whose own answer any statistic would be.
        """
        self._table = table
        self._held: Chunk | None = None
        if user is None:
            table.chunks(columns)  # refuses missing columns and an empty table
            self.count = table.rows
        else:
            self._held = table.columns((*columns, user))
            _, number = labels(user, self._held[user], table.title)
            self._order = np.argsort(number, kind="stable")
            sizes = np.bincount(number)
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
            self.count = len(sizes)
        if self.count < 2:
            raise TableError(f"{table.title} is about one user only: any statistic would be that user's own.")

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        """Yields all rows, a chunk at a time."""
        if self._held is None:
            return self._table.chunks(columns)
        return parts({name: self._held[name] for name in columns or self._held}, CHUNK_ROWS)

    def vectors(
        self,
        columns: Sequence[str],
        write: Callable[[Chunk], Matrix],
        dim: int,
        combine: Combine,
        most: int | None,
        advance: Callable[[int], object] | None = None,
    ) -> Iterator[Vectors]:
        """Yields the users' vectors, some at a time, one row per user.

        Args:
            columns: The columns that `write` needs.
            write: Turns rows into their points of V.
            dim: Number of coordinates of a point.
            combine: Whether a user's rows are averaged, or summed and divided by `most`.
            most: c, the number of a user's first rows that count; None for all of them.
            advance: Called with the number of rows that were just read.
        """
        rows = max(1, _BLOCK // dim)
        advance = advance or (lambda rows: None)
        if self._held is None:
            scale = 1.0 if combine == "mean" or most is None else 1.0 / most
            for chunk in self._table.chunks(columns):
                for part in parts(chunk, rows):
                    yield (scale * write(part)).astype(np.float32)
                advance(size_of(chunk))
            return
        held = {name: self._held[name] for name in columns or self._held}
        begin = 0
        while begin < self.count:
            # The users who have at most `rows` rows together, and at least one user.
            end = int(np.searchsorted(self._starts, self._starts[begin] + rows, side="right")) - 1
            end = min(max(end, begin + 1), self.count)
            if end == begin + 1:
                own = self._order[self._starts[begin] : self._starts[end]][:most]
                alone = {name: column[own] for name, column in held.items()}
                yield combined(map(write, parts(alone, rows)), combine, most)[None]
            else:
                yield self._combined(held, write, combine, most, self._starts[begin : end + 1])
            advance(int(self._starts[end] - self._starts[begin]))
            begin = end

    def _combined(
        self,
        held: Chunk,
        write: Callable[[Chunk], Matrix],
        combine: Combine,
        most: int | None,
        starts: NDArray[np.int64],
    ) -> Vectors:
        """Returns the vectors of users whose rows begin at these places of `_order`, and end at the last."""
        sizes = kept = np.diff(starts)
        place = np.arange(starts[0], starts[-1])
        if most is not None:
            # A row counts if it is fewer than `most` places behind its user's first.
            place = place[place - np.repeat(starts[:-1], sizes) < most]
            kept = np.minimum(sizes, most)
        chosen = self._order[place]
        points = write({name: column[chosen] for name, column in held.items()})
        sums = np.add.reduceat(points, np.concatenate([[0], np.cumsum(kept)[:-1]]), axis=0)
        weights = kept[:, None] if combine == "mean" else most
        return np.asarray(sums / weights, dtype=np.float32)


def size_of(chunk: Chunk) -> int:
    """Returns the number of rows."""
    return len(next(iter(chunk.values())))


def parts(chunk: Chunk, rows: int) -> Iterator[Chunk]:
    """Yields the same rows, at most `rows` at a time."""
    for start in range(0, size_of(chunk), rows):
        yield {name: column[start : start + rows] for name, column in chunk.items()}


def combined(points: Iterable[Matrix], combine: Combine, most: int | None) -> Vectors:
    """Returns the vector of one user whose rows became these points, given some at a time."""
    total, count = np.zeros(()), 0
    for some in points:
        kept = some if most is None else some[: most - count]
        total, count = total + kept.sum(axis=0), count + len(kept)
    return np.asarray(total / (count if combine == "mean" else most or 1), dtype=np.float32)


def own_rows(value: object) -> DataTable:
    """Returns the table of a client's rows, or of its one row as a mapping of columns to values."""
    if isinstance(value, Mapping):
        value = {name: entry if _is_column(entry) else [entry] for name, entry in value.items()}
    table = open_table(value)
    if table.rows == 0:
        raise VectorError("A client without a row has nothing to send.")
    return table


def _is_column(entry: object) -> bool:
    return isinstance(entry, list | tuple) or (hasattr(entry, "__len__") and not isinstance(entry, str | bytes))


# ------------------------------------------------------------------ answers


@dataclass(frozen=True, eq=False)
class Reading:
    """Values with their intervals, one row per group.

    Attributes:
        names: Names of the values: columns, bins, categories, or quantiles.
        groups: Names of the groups; None without groups, and then there is one row.
        values: The estimates.
        low: Lower ends of the intervals.
        high: Upper ends.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    values: Matrix
    low: Matrix
    high: Matrix


@dataclass(frozen=True, eq=False)
class Statistic:
    """A released statistic.

    Attributes:
        statistic: "mean", "sum", "count", "histogram" or "quantiles".
        reading: The values.
        confidence: Probability, over the noise, that an interval holds the table's value without noise (values beyond
            their bounds moved to them). It does not cover that the table may be a sample.
        users: Number of users. Public: replace-one neighbours have equally many.
        epsilon: ε, proved.
        delta: δ.
        unit: "user" if neighbours differ in all rows of a user, "row" if they differ in one row.
        adjacency: Which tables are neighbours.
        method: Name of the method that proved ε.
        citation: The theorem behind it.
        assumption: The distance that the proof relies on, with the reason; None if there is no such assumption.
        bits: Bits per coordinate of a message.
        dim: Coordinates of a message.
        bounds: The bounds of the columns, given or chosen privately.
    """

    statistic: str
    reading: Reading
    confidence: float
    users: int
    epsilon: float
    delta: float
    unit: str
    adjacency: Adjacency
    method: str
    citation: str
    assumption: str | None
    bits: float
    dim: int
    bounds: dict[str, tuple[float, float]]

    @property
    def claim(self) -> Claim:
        """The proved (ε, δ)."""
        return Claim(self.epsilon, self.delta)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values."""
        return self.reading.names

    @property
    def groups(self) -> tuple[str, ...] | None:
        """Names of the groups, if there are groups."""
        return self.reading.groups

    @property
    def values(self) -> Matrix:
        """The estimates: by name, or with groups one row of them per group."""
        return self._shaped(self.reading.values)

    @property
    def low(self) -> Matrix:
        """Lower ends of the intervals, shaped like `values`."""
        return self._shaped(self.reading.low)

    @property
    def high(self) -> Matrix:
        """Upper ends of the intervals."""
        return self._shaped(self.reading.high)

    def _shaped(self, table: Matrix) -> Matrix:
        return table[0] if self.groups is None else table

    def rows(self) -> list[tuple[str | None, str, float, float, float]]:
        """Returns all values as (group, name, value, low, high)."""
        values, low, high = self.reading.values, self.reading.low, self.reading.high
        return [
            (group, name, float(values[i, j]), float(low[i, j]), float(high[i, j]))
            for i, group in enumerate(self.groups or (None,))
            for j, name in enumerate(self.names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON values."""
        plain = {name: value for name, value in vars(self).items() if name != "reading"}
        entries = [
            {**({} if group is None else {"group": group}), "name": name, "value": value, "low": low, "high": high}
            for group, name, value, low, high in self.rows()
        ]
        bounds = {name: list(ends) for name, ends in self.bounds.items()}
        return plain | {"adjacency": str(self.adjacency), "bounds": bounds, "values": entries}

    def __repr__(self) -> str:
        shown = [
            f"{name if group is None else f'{group}/{name}'} {value:.4g} [{low:.4g}, {high:.4g}]"
            for group, name, value, low, high in self.rows()[:_SHOWN]
        ]
        more = ", …" if self.reading.values.size > _SHOWN else ""
        return (
            f"<{self.statistic} of {self.users:,} {self.unit}s: {', '.join(shown)}{more}; "
            f"{self.claim}, {self.adjacency}>"
        )


# ------------------------------------------------------------------ questions


class RowQuestion(Question[Statistic]):
    """A question about everybody's rows.

    Attributes:
        statistic: Its name.
        columns: The columns of numbers or categories that it is about.
        bounds: Public bounds of columns; values beyond are moved to them.
        group_by: The column that says which group a row is in; None without groups.
        groups: Names of the groups.
        combine: Whether several rows of a user are averaged or summed.
        rows: c, the most rows of a user that count; None for all.
    """

    statistic: str
    combine: Combine = "mean"
    rows: int | None = None

    def __init__(self, group_by: Groups | None, bounds: Bounds | None, columns: Sequence[str] = ()) -> None:
        """Checks the groups and the bounds, whose columns the question is about, or others without bounds."""
        self.bounds = {} if bounds is None else check_bounds(bounds)
        self.columns = tuple(self.bounds) or tuple(columns)
        self.group_by: str | None = None
        self.groups: tuple[str, ...] | None = None
        if group_by is not None:
            if not isinstance(group_by, Mapping) or len(group_by) != 1:
                raise ParameterError(
                    "Expected group_by to name one column and its groups, as {'sex': ['f', 'm']}: the groups are "
                    "public, and must not be read off the data."
                )
            ((self.group_by, given),) = group_by.items()
            self.groups = check_categories("group_by", given)

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.columns, *(() if self.group_by is None else (self.group_by,)))

    @property
    def blocks(self) -> int:
        """Number of groups, 1 without groups."""
        return 1 if self.groups is None else len(self.groups)

    @abstractmethod
    def _points(self, chunk: Chunk) -> Matrix:
        """Returns the points of one block for these rows."""

    @abstractmethod
    def read(self, mean: Matrix, variance: float, users: int, width: float) -> Reading:
        """Returns the values behind a mean of vectors.

        Args:
            mean: The mean, one row per block.
            variance: Of the noise in each of its coordinates.
            users: Number of vectors in the mean.
            width: Standard deviations from the middle of an interval to its ends.
        """

    def points(self, chunk: Chunk) -> Matrix:
        """Returns points of V, one per row; zero for rows of no group."""
        points, code = self._points(chunk), self._group(chunk)
        if code is None:
            return points
        placed = np.zeros((len(points), self.blocks, points.shape[1]))
        inside = np.flatnonzero(code >= 0)
        placed[inside, code[inside]] = points[inside]
        return placed.reshape(len(points), -1)

    def anybody(self, chunk: Chunk) -> bool:
        """Returns whether any of these rows is in one of the groups."""
        code = self._group(chunk)
        return code is None or bool((code >= 0).any())

    def _group(self, chunk: Chunk) -> NDArray[np.int64] | None:
        if self.group_by is None or self.groups is None:
            return None
        return codes(self.group_by, chunk[self.group_by], self.groups)

    def plan(self, clients: int, epsilon: float, delta: float, **requirements: Any) -> Planned[Statistic]:
        """Plans a round, with at most one group per client; see `Question.plan`."""
        clients = _validate.integer("clients", clients, low=2)
        if self.blocks > clients:
            raise ParameterError(
                f"Expected at most as many groups as clients, got {self.blocks:,} groups and {clients:,} clients: ask "
                "for fewer groups."
            )
        return super().plan(clients, epsilon, delta, **requirements)

    def vector(self, value: object) -> Vectors:
        """Returns one client's vector.

        Args:
            value: The client's row as a mapping of columns to values, or its rows: a mapping of columns to lists, or
                any table. For one column without groups also a single value or a list of values.

        Raises:
            ColumnError: A column is missing, or its values cannot be used.
            VectorError: There is no row.
        """
        if not isinstance(value, Mapping) and len(self.needed) == 1 and not hasattr(value, "columns"):
            value = {self.needed[0]: value}
        table = own_rows(value)
        some = max(1, _BLOCK // self.geometry.dim)
        rows = (part for chunk in table.chunks(self.needed or table.names[:1]) for part in parts(chunk, some))
        return combined(map(self.points, rows), self.combine, self.rows)

    def answer(
        self, planned: Planned[Statistic], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> Statistic:
        """Returns the values with their intervals."""
        from scipy.special import ndtri

        confidence = _validate.probability("confidence", confidence)
        width = float(-ndtri(0.5 * (1.0 - confidence)))
        if planned.protocol.mechanism.pure:
            # Laplace noise has heavier tails: beyond w deviations lies e^(-√2 w).
            width = max(width, -math.log(1.0 - confidence) / math.sqrt(2.0))
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


def check_bounds(bounds: Bounds) -> dict[str, tuple[float, float]]:
    """Returns the bounds of named columns, or raises `ParameterError`."""
    if not isinstance(bounds, Mapping) or not bounds:
        raise ParameterError("Expected bounds as a mapping of columns to (low, high).")
    checked = {}
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
        checked[str(name)] = (low, high)
    return checked


def check_categories(name: str, given: Iterable[object]) -> tuple[str, ...]:
    """Returns different categories as texts, or raises `ParameterError`."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ParameterError(f"Expected {name} to list categories.")
    texts = tuple(text_of(entry) for entry in given)
    if not texts or len(set(texts)) < len(texts):
        raise ParameterError(f"Expected {name} to list at least one category, each once.")
    return texts


def codes(name: str, column: NDArray[Any], known: Sequence[str]) -> NDArray[np.int64]:
    """Returns the number of each row's category among those known, -1 for others."""
    texts, number = labels(name, column)
    place = {text: i for i, text in enumerate(known)}
    return np.array([place.get(text, -1) for text in texts], dtype=np.int64)[number]
