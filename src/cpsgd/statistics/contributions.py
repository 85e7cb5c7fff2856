"""Whose rows are whose: the rows of one user are combined on the way, so that ε is per user.

A row becomes a point of a public set V (see `cpsgd.statistics.questions`). What a user sends is a convex combination of
points of V and zero: the mean of all their rows, or the sum of their first c rows over c. The distance of two points of
a convex hull is at most the diameter of the set itself, so that however many rows a user has, two users' vectors are no
further apart than two points of V and zero.

*Proof.* Let x = Σ aᵢ vᵢ and y = Σ bⱼ wⱼ with weights that sum to 1. Then x - y = Σᵢⱼ aᵢ bⱼ (vᵢ - wⱼ), so
‖x - y‖ <= max ‖vᵢ - wⱼ‖. Fewer than c rows are c with zeros among them. ∎
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import TableError
from cpsgd.statistics.columns import CHUNK_ROWS, Chunk, DataTable, labels

Vectors = NDArray[np.float32]
Rows = NDArray[np.float64]
Combine = Literal["mean", "sum"]

# Coordinates of rows that are held at a time, 16 MiB.
_BLOCK = 1 << 21


class People:
    """The users of a table, and their vectors.

    Without a user column every row is a user. With one, the table's needed columns are held in memory, since rows of
    one user may be anywhere. They are read together with the users, once: of a file that changes meanwhile, a later
    reading could give one user's rows to another.
    """

    def __init__(self, table: DataTable, user: str | None, columns: Sequence[str]) -> None:
        """Finds out how many users there are.

        Args:
            table: The table.
            user: The column of users, or None.
            columns: All columns that will be asked for; there may be none if there is a user column.

        Raises:
            TableError: There is one user only, whose own answer any statistic would be.
        """
        self._table = table
        self._held: Chunk | None = None
        if user is None:
            table.chunks(columns)  # complains of missing columns and of an empty table
            self.count = table.rows
        else:
            self._held = _held(table, (*columns, user))
            _, number = labels(user, self._held[user], table.title)
            self._order = np.argsort(number, kind="stable")
            sizes = np.bincount(number)
            self._starts = np.concatenate([[0], np.cumsum(sizes)])
            self.count = len(sizes)
        if self.count < 2:
            raise TableError(f"{table.title} is about one user only: any statistic would be that user's own.")

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        """All rows, some at a time."""
        if self._held is None:
            yield from self._table.chunks(columns)
            return
        for start in range(0, len(self._order), CHUNK_ROWS):
            yield {name: self._held[name][start : start + CHUNK_ROWS] for name in columns or self._held}

    def vectors(
        self,
        columns: Sequence[str],
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
        if self._held is None:
            scale = 1.0 if combine == "mean" or most is None else 1.0 / most
            for chunk in self._table.chunks(columns):
                for part in parts(chunk, rows):
                    yield (scale * write(part)).astype(np.float32)
                if advance is not None:
                    advance(size_of(chunk))
            return
        held = {name: self._held[name] for name in columns or self._held}
        begin = 0
        while begin < self.count:
            # As many users as have `rows` rows together, and at least one.
            end = int(np.searchsorted(self._starts, self._starts[begin] + rows, side="right")) - 1
            end = min(max(end, begin + 1), self.count)
            if end == begin + 1:
                own = self._order[self._starts[begin] : self._starts[end]][:most]
                alone = {name: column[own] for name, column in held.items()}
                yield combined(map(write, parts(alone, rows)), combine, most)[None]
            else:
                yield self._combined(held, write, combine, most, begin, end)
            if advance is not None:
                advance(int(self._starts[end] - self._starts[begin]))
            begin = end

    def _combined(
        self, held: Chunk, write: Callable[[Chunk], Rows], combine: Combine, most: int | None, begin: int, end: int
    ) -> Vectors:
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


def size_of(chunk: Chunk) -> int:
    """How many rows there are."""
    return len(next(iter(chunk.values())))


def parts(chunk: Chunk, rows: int) -> Iterator[Chunk]:
    """The same rows, at most so many at a time."""
    for start in range(0, size_of(chunk), rows):
        yield {name: column[start : start + rows] for name, column in chunk.items()}


def combined(points: Iterable[Rows], combine: Combine, most: int | None) -> Vectors:
    """The vector of one user whose rows became these points, some at a time."""
    total, count = np.zeros(()), 0
    for some in points:
        kept = some if most is None else some[: most - count]
        total, count = total + kept.sum(axis=0), count + len(kept)
    return np.asarray(total / (count if combine == "mean" else most or 1), dtype=np.float32)


def _held(table: DataTable, columns: Iterable[str]) -> Chunk:
    found: dict[str, list[NDArray[np.generic]]] = {name: [] for name in columns}
    for chunk in table.chunks(found):
        for name, column in chunk.items():
            found[name].append(column)
    # A column at a time, so that only one of them is there twice.
    return {name: np.concatenate(found.pop(name)) for name in list(found)}
