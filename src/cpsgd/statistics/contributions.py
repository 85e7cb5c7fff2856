"""Whose rows are whose: the rows of one user are combined on the way, so that ε is per user.

A row becomes a point of a public set V (see `cpsgd.statistics.questions`). What a user sends is a convex combination of
points of V and zero: the mean of all their rows, or the sum of their first c rows over c. The distance of two points of
a convex hull is at most the diameter of the set itself, so that however many rows a user has, two users' vectors are no
further apart than two points of V and zero.

*Proof.* Let x = Σ aᵢ vᵢ and y = Σ bⱼ wⱼ with weights that sum to 1. Then x - y = Σᵢⱼ aᵢ bⱼ (vᵢ - wⱼ), so
‖x - y‖ <= max ‖vᵢ - wⱼ‖. Fewer than c rows are c with zeros among them. ∎
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import TableError
from cpsgd.statistics.tables import Chunk, DataTable, labels

Vectors = NDArray[np.float32]
Rows = NDArray[np.float64]
Combine = Literal["mean", "sum"]

# Coordinates of rows that are held at a time.
_BLOCK = 1 << 21


class People:
    """The users of a table, and their vectors.

    Without a user column every row is a user. With one, the table's needed columns are held in memory, since rows of
    one user may be anywhere.
    """

    def __init__(self, table: DataTable, user: str | None) -> None:
        """Finds out how many users there are.

        Raises:
            TableError: There is one user only, whose own answer any statistic would be.
        """
        self._table, self._user = table, user
        self._order: NDArray[np.int64] | None = None
        if user is None:
            table.chunks(table.names[:1])  # complains of an empty table
            self.count = table.rows
        else:
            column = np.concatenate([chunk[user] for chunk in table.chunks([user])])
            _, number = labels(user, column, table.title)
            self._order = np.argsort(number, kind="stable")
            sizes = np.bincount(number)
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
            self.count = len(sizes)
        if self.count < 2:
            raise TableError(f"{table.title} is about one user only: any statistic would be that user's own.")

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._table.rows

    def vectors(
        self,
        columns: tuple[str, ...],
        write: Callable[[Chunk], Rows],
        dim: int,
        combine: Combine,
        most: int | None,
        advance: Callable[[int], object] | None = None,
    ) -> Iterator[Vectors]:
        """The users' vectors, some at a time, one row per user.

        Args:
            columns: What `write` needs.
            write: From some rows to their points of V.
            dim: Coordinates of a point.
            combine: Whether a user's rows are averaged, or summed and divided by `most`.
            most: c, of how many rows of a user the first ones count; None for all of them.
            advance: Called with the number of rows that were just read.
        """
        rows = max(1, _BLOCK // dim)
        if self._order is None:
            scale = 1.0 if combine == "mean" or most is None else 1.0 / most
            for chunk in self._table.chunks(columns):
                size = len(next(iter(chunk.values())))
                for start in range(0, size, rows):
                    part = {name: column[start : start + rows] for name, column in chunk.items()}
                    yield (scale * write(part)).astype(np.float32)
                if advance is not None:
                    advance(size)
            return
        held = _held(self._table, columns)
        begin = 0
        while begin < self.count:
            # As many users as have `rows` rows together, and at least one.
            end = int(np.searchsorted(self._starts, self._starts[begin] + rows, side="right")) - 1
            end = min(max(end, begin + 1), self.count)
            yield self._combined(held, write, combine, most, begin, end)
            if advance is not None:
                advance(int(self._starts[end] - self._starts[begin]))
            begin = end

    def _combined(
        self, held: Chunk, write: Callable[[Chunk], Rows], combine: Combine, most: int | None, begin: int, end: int
    ) -> Vectors:
        assert self._order is not None
        starts = self._starts[begin : end + 1]
        sizes = np.diff(starts)
        place = np.arange(starts[0], starts[-1])
        kept = sizes
        if most is not None:
            # How far a row is behind its user's first.
            place = place[place - np.repeat(starts[:-1], sizes) < most]
            kept = np.minimum(sizes, most)
        chosen = self._order[place]
        points = write({name: column[chosen] for name, column in held.items()})
        sums = np.add.reduceat(points, np.concatenate([[0], np.cumsum(kept)[:-1]]), axis=0)
        weights = kept[:, None] if combine == "mean" else most
        return np.asarray(sums / weights, dtype=np.float32)


def _held(table: DataTable, columns: tuple[str, ...]) -> Chunk:
    parts: dict[str, list[NDArray[np.generic]]] = {name: [] for name in columns}
    for chunk in table.chunks(columns):
        for name, column in chunk.items():
            parts[name].append(column)
    # A column at a time, so that only one of them is there twice.
    return {name: np.concatenate(parts.pop(name)) for name in columns}


def combined(points: Rows, combine: Combine, most: int | None) -> Vectors:
    """The vector of one user with these rows."""
    kept = points if most is None else points[:most]
    total = kept.sum(axis=0) / (len(kept) if combine == "mean" else most or 1)
    return np.asarray(total, dtype=np.float32)
