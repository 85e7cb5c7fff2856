"""Clients' points in a public ball, and a round over all of them: shared by k-means and principal components.

A client's point is the mean of its rows, each moved into the ball before. So the point is in the ball, however many
rows there are.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ParameterError, VectorError
from cpsgd.mechanisms import RoundedGaussian
from cpsgd.planner import Plan
from cpsgd.privacy import Guarantee
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.statistics.charge import Charge, events_of, unit_of
from cpsgd.statistics.planned import simulated
from cpsgd.statistics.questions import Matrix, Vectors
from cpsgd.statistics.results import Statistic
from cpsgd.statistics.rows import Bounds, Missing, check_bounds, check_one_user, fill_of, own_rows
from cpsgd.statistics.users import by_user, users_of
from cpsgd.tables import Chunk, maybe_numbers, numbers, open_table

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger

# Coordinates of messages that are held at a time, 16 MiB.
_BLOCK = 1 << 22
# Within these, no step below can overflow.
_RADII = (1e-20, 1e20)
_LARGEST = 1e150


def in_unit_ball(points: ArrayLike, radius: float, origin: ArrayLike | None = None) -> Vectors:
    """Returns the points relative to `origin` in units of `radius`, those outside moved to the ball's surface.

    Args:
        points: One row per client.
        radius: The public bound on a point's distance from `origin`. It must not be read off the data.
        origin: A public point, zero if None.

    Raises:
        VectorError: The points are not a table of finite real numbers; the first bad row is named, not quoted.
        ParameterError: The radius is not positive.
    """
    radius = _validate.positive("radius", radius, low=_RADII[0], high=_RADII[1])
    table = np.asarray(points)
    if table.ndim != 2 or 0 in table.shape:
        raise VectorError(f"Expected a table of points, one row per client, got an array of shape {table.shape}.")
    if table.dtype.kind not in "fiub":
        raise VectorError(f"Expected real numbers, got an array of {table.dtype}.")
    shift = np.zeros(table.shape[1]) if origin is None else np.asarray(origin, dtype=np.float64)
    if shift.shape != table.shape[1:] or not (np.abs(shift) < _LARGEST).all():
        raise VectorError(f"Expected {table.shape[1]} finite numbers as the origin, got an array of {shift.shape}.")
    result = np.empty(table.shape, dtype=np.float32)
    rows = max(1, _BLOCK // table.shape[1])
    for start in range(0, len(table), rows):
        block = table[start : start + rows].astype(np.float64)
        if not (finite := np.isfinite(block)).all():
            row, coordinate = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise VectorError(
                f"Row {start + row} is NaN or infinite at coordinate {coordinate} (both counted from 0). "
                "Repair or drop it."
            )
        block = (np.clip(block, -_LARGEST, _LARGEST) - shift) / radius
        # Divided by the largest coordinate first, so that no square can overflow.
        largest = np.maximum(1.0, np.abs(block).max(axis=1, keepdims=True))
        block /= largest
        length = np.linalg.norm(block, axis=1, keepdims=True)
        result[start : start + rows] = block / np.maximum(length, 1.0 / largest)
    return result


Columns = int | Sequence[str] | Bounds
"""Points' coordinates: names of columns with their bounds; or names or their number, with the radius of a ball."""


@dataclass(frozen=True, eq=False)
class Ball:
    """The public ball that clients' points are in.

    Where columns have bounds, values are moved to them, and a coordinate is the distance from their middle in units of
    half their width. All such points are in the ball of radius √d.

    Attributes:
        columns: The names of the points' coordinates.
        radius: The bound on a point's distance from `origin`.
        origin: The ball's centre, zero if None.
        bounds: The bounds of columns, which `origin` is then the middle of.
        missing: What a missing value counts as; see `cpsgd.statistics.rows.Missing`.
    """

    columns: tuple[str, ...]
    radius: float
    origin: ArrayLike | None = None
    bounds: dict[str, tuple[float, float]] | None = None
    missing: Missing = None

    def __post_init__(self) -> None:
        in_unit_ball(np.zeros((1, self.dim)), self.radius, None if self.bounds else self.origin)  # refuses a bad one
        if self.missing == "drop" or (self.missing == "bounds" and not self.bounds):
            raise ParameterError(
                "A point has all its coordinates: a missing value is the middle of 'bounds', or a value."
            )

    @classmethod
    def of(
        cls, columns: Columns, radius: float | None, origin: ArrayLike | None = None, missing: Missing = None
    ) -> Ball:
        """Returns the ball with these columns; a number n stands for "0" to "n - 1", as an array's columns."""
        if isinstance(columns, Mapping):
            if radius is not None or origin is not None:
                raise ParameterError("Bounds of columns say where points are: leave out radius and mean.")
            bounds = check_bounds(columns)
            middle = np.array([0.5 * low + 0.5 * high for low, high in bounds.values()])
            return cls(tuple(bounds), len(bounds) ** 0.5, middle, bounds, missing)
        if radius is None:
            raise ParameterError("Give bounds of the columns, as {'age': (0, 100)}, or the radius of a ball of points.")
        if isinstance(columns, int) and not isinstance(columns, bool):
            columns = tuple(map(str, range(_validate.integer("columns", columns, low=1))))
        return cls(_names(columns), radius, origin, None, missing)

    @property
    def units(self) -> Matrix:
        """One unit of each coordinate, in the columns' units."""
        ends = (self.bounds or {}).values()
        return np.array([0.5 * high - 0.5 * low for low, high in ends]) if self.bounds else np.ones(self.dim)

    def inside(self, points: ArrayLike) -> Vectors:
        """Returns points of the unit ball."""
        if self.bounds is None:
            return in_unit_ball(points, self.radius, self.origin)
        low, high = np.array(list(self.bounds.values())).T
        moved = np.clip(np.asarray(points, dtype=np.float64), low, high)  # NaN stays, and is refused
        return in_unit_ball((moved - np.asarray(self.origin)) / self.units, self.radius)

    def outside(self, places: Matrix) -> Matrix:
        """Returns points of the unit ball in the columns' units."""
        origin = 0.0 if self.origin is None else np.asarray(self.origin, dtype=np.float64)
        return np.asarray(origin + self.radius * self.units * places)

    @property
    def dim(self) -> int:
        """d, coordinates of a point."""
        return len(self.columns)

    def point(self, value: object) -> Vectors:
        """Returns one client's point in units of the radius, as a table of one row.

        Args:
            value: The point, a list or an array of numbers in the order of the columns, or a mapping of columns to
                numbers; or the client's rows: an array with one per row, or any table with these columns.
        """
        if isinstance(value, list | tuple | np.ndarray):
            rows = self._of_array(value)
        else:
            table = own_rows(value)
            rows = self.of_rows(table.columns(self.columns), table.title)
        point: Vectors = rows.mean(axis=0, keepdims=True).astype(np.float32)
        return point

    def of_rows(self, chunk: Chunk, title: str) -> Matrix:
        """Returns points of the unit ball for rows of the table with this title."""
        return self.inside(np.column_stack([self._column(name, chunk, title) for name in self.columns])).astype(
            np.float64
        )

    def _column(self, name: str, chunk: Chunk, title: str) -> Matrix:
        if self.missing is None:
            return numbers(name, chunk[name], title)
        values, there = maybe_numbers(name, chunk[name], title)
        return np.where(there, values, fill_of(self.missing, (self.bounds or {}).get(name)))

    def _of_array(self, value: ArrayLike) -> Matrix:
        """Returns points in the unit ball from an array."""
        try:
            rows = np.asarray(value)
        except ValueError:
            raise VectorError("Expected a point of single numbers, or rows of equal length.") from None
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise VectorError(f"Expected a point of {self.dim} coordinates, got an array of shape {np.shape(value)}.")
        if np.ma.is_masked(value):
            raise VectorError("Expected a point of numbers, got masked values; fill them in.")
        return self.inside(rows).astype(np.float64)


def people_in_ball(table: object, ball: Ball, user: str | None) -> Vectors:
    """Returns one point of the unit ball per client.

    Args:
        table: Anything `open_table` takes.
        ball: The ball, with named columns.
        user: The column with the user of each row.
    """
    if ball.bounds is None and isinstance(table, np.ndarray | list | tuple) and not (user or _are_mappings(table)):
        rows = np.asarray(table)
        if rows.ndim != 2 or ball.columns == tuple(map(str, range(rows.shape[1]))):
            return ball.inside(rows)
    source = open_table(table)
    if user in ball.columns:
        raise ParameterError(f"{user!r} is the column of users; it cannot be a coordinate, too.")
    points = np.concatenate(
        [
            (by_user(ball.of_rows(chunk, source.title), sizes) / sizes[:, None]).astype(np.float32)
            for chunk, sizes in users_of(source, user, ball.columns, missing=ball.missing is not None)
        ]
    )
    check_one_user(len(points), source.title)
    return points


class PointOptions(TypedDict, total=False):
    """Options of statistics of points.

    Attributes:
        bounds: Public bounds by column, as {"age": (0, 100)}: values beyond are moved to them, and coordinates are in
            units of half their widths, so that each column has equal weight.
        radius: Instead of bounds: public bound on a point's distance from zero, or from a public mean.
        columns: Named columns of a table that are the points' coordinates; those with bounds if None.
        user: The column with the user of each row. A client's point is the mean of their rows.
        missing: What a missing value counts as: "bounds" for the middle of its bounds, or a value.
        confidence: Of the intervals.
        bits: Bits per coordinate; the fewest within 10 % of the Gaussian mechanism's error if None.
        ledger: Charge all rounds to this ledger before the first is released, or refuse.
        population: With a ledger: the population whose budget pays.
        advance: Called with the number of clients that were just heard, in the end all of them in each round.
    """

    bounds: Bounds | None
    radius: float | None
    columns: Sequence[str] | None
    user: str | None
    missing: Missing
    confidence: float
    bits: float | None
    ledger: Ledger | str | Path | None
    population: str | None
    advance: Callable[[int], object] | None


def columns_of(table: object, options: PointOptions) -> Columns:
    """Returns the coordinates that were asked for: columns with bounds, columns, or all of an array of points."""
    known = PointOptions.__annotations__.keys()
    if unknown := ", ".join(sorted(options.keys() - known)):
        raise ParameterError(f"Unknown {unknown}; there are {', '.join(sorted(known))}.")
    columns, bounds = options.get("columns"), options.get("bounds")
    if bounds is not None:
        stated = check_bounds(bounds)
        names = tuple(stated) if columns is None else _names(columns)
        if set(names) != set(stated):
            raise ParameterError("Give bounds for each of the columns, and for no other.")
        return {name: stated[name] for name in names}
    if columns is not None:
        return _names(columns)
    if options.get("user") is not None or not isinstance(table, np.ndarray | list | tuple) or _are_mappings(table):
        raise ParameterError("Name the columns that are coordinates, with bounds: an id would be one, too.")
    shape = np.shape(table)
    if len(shape) != 2 or 0 in shape:
        raise VectorError(f"Expected a table of points, one row per client, got an array of shape {shape}.")
    return int(shape[1])


def ball_of(options: PointOptions) -> dict[str, Any]:
    """Returns the arguments about the ball for `Clusters` and `Components`."""
    return {"radius": options.get("radius"), "missing": options.get("missing")}


class _Planned(typing.Protocol):
    @property
    def protocol(self) -> Protocol: ...


Asked = TypeVar("Asked", bound=_Planned)
"""A planned question."""


def paid(
    name: str, table: object, ball: Ball, plan: Callable[..., Asked], claim: Claim, options: PointOptions, rounds: int
) -> tuple[Vectors, Asked]:
    """Reads the clients' points, plans all rounds and charges them to the ledger; returns points and plan."""
    ledger, population = options.get("ledger"), options.get("population")
    Charge.check(ledger, population)
    people = people_in_ball(table, ball, options.get("user"))
    requirements: dict[str, Any] = {"bits": options.get("bits")}
    if claim.delta and Charge.counts_shifts(ledger, population):
        # An adaptive budget counts Gaussian shifts, for which a pure ε is dear.
        requirements["mechanism"] = RoundedGaussian.name
    asked = plan(len(people), claim.epsilon, claim.delta, **requirements)
    events = (
        []
        if ledger is None
        else events_of([asked.protocol] * rounds, f"statistics: {name}", table_unit=unit_of(options.get("user")))
    )
    Charge.of(ledger, population, events).pay()
    return people, asked


def _are_mappings(table: object) -> bool:
    return isinstance(table, list | tuple) and any(isinstance(row, Mapping) for row in table)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PointStatistic(Statistic):
    """A statistic of points: a `Statistic` with the plan of its rounds.

    Attributes:
        plan: The protocol of every round, with a round's expected error.
        guarantee: The proved (ε, δ) of all rounds together, for replacing all rows of one client.
    """

    plan: Plan
    guarantee: Guarantee

    @property
    def bits_per_client(self) -> int:
        """Bits that one client sends in all rounds, headers included."""
        return self.plan.rounds * self.plan.protocol.bits_per_client


Points = TypeVar("Points", bound=PointStatistic)
"""A kind of statistic of points."""


def of_rows(found: Points, options: PointOptions) -> Points:
    """Returns the statistic; without a user column its unit becomes "row"."""
    return replace(found, unit="row") if options.get("user") is None else found


def _names(columns: object) -> tuple[str, ...]:
    names = () if isinstance(columns, str) or not isinstance(columns, Iterable) else tuple(columns)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ParameterError("Expected columns to be a list of different names.")
    return names


def private_mean(
    protocol: Protocol,
    round: int,
    points: Vectors,
    message: Callable[[Vectors], Vectors],
    advance: Callable[[int], object] | None = None,
) -> Matrix:
    """Returns the mean, noise included, of the messages that `message` makes of the clients' points."""
    simulator = simulated(protocol, round)
    rows = max(1, _BLOCK // protocol.dim)
    for start in range(0, len(points), rows):
        block = points[start : start + rows]
        simulator.add(message(block))
        if advance is not None:
            advance(len(block))
    return simulator.mean().astype(np.float64)
