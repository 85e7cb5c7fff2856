"""Clients' points in a public ball, and a round over all of them: shared by k-means and principal components.

A client's point is the mean of its rows, each moved into the ball before. So the point is in the ball, however many
rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ParameterError, VectorError
from cpsgd.protocol import Protocol
from cpsgd.statistics.planned import simulated
from cpsgd.statistics.questions import Matrix, Vectors
from cpsgd.statistics.rows import by_user, check_one_user, own_rows, users_of
from cpsgd.tables import Chunk, numbers, open_table

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


@dataclass(frozen=True, eq=False)
class Ball:
    """The public ball that clients' points are in.

    Attributes:
        columns: The names of the points' coordinates.
        radius: The bound on a point's distance from `origin`.
        origin: The ball's centre, zero if None.
    """

    columns: tuple[str, ...]
    radius: float
    origin: ArrayLike | None = None

    def __post_init__(self) -> None:
        in_unit_ball(np.zeros((1, self.dim)), self.radius, self.origin)  # refuses a bad radius or origin

    @classmethod
    def of(cls, columns: int | Sequence[str], radius: float, origin: ArrayLike | None = None) -> Ball:
        """Returns the ball with columns of these names; a number n stands for "0" to "n - 1", as an array's columns."""
        if isinstance(columns, int) and not isinstance(columns, bool):
            columns = tuple(map(str, range(_validate.integer("columns", columns, low=1))))
        return cls(_names(columns), radius, origin)

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
        rows = np.column_stack([numbers(name, chunk[name], title) for name in self.columns])
        return in_unit_ball(rows, self.radius, self.origin).astype(np.float64)

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
        return in_unit_ball(rows, self.radius, self.origin).astype(np.float64)


def people_in_ball(
    table: object,
    columns: Sequence[str] | None,
    user: str | None,
    radius: float,
    origin: ArrayLike | None = None,
) -> Vectors:
    """Returns one point of the unit ball per client.

    Args:
        table: An array of points, one row per client; with `columns` anything `open_table` takes.
        columns: The named columns that are the points' coordinates; None if the array's columns are.
        user: The column that says whose a row is.
        radius: See `in_unit_ball`.
        origin: See `in_unit_ball`.
    """
    if columns is None:
        if user is not None or not isinstance(table, np.ndarray | list | tuple):
            raise ParameterError("Name the columns that are coordinates: an id would be one, too.")
        return in_unit_ball(table, radius, origin)
    ball, source = Ball(_names(columns), radius, origin), open_table(table)
    points = np.concatenate(
        [
            (by_user(ball.of_rows(chunk, source.title), sizes) / sizes[:, None]).astype(np.float32)
            for chunk, sizes in users_of(source, user, ball.columns)
        ]
    )
    check_one_user(len(points), source.title)
    return points


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
