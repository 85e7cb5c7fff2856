"""Rows of a table by user: all rows of some users at a time, whatever their order in the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.statistics.spill import whole_users
from cpsgd.tables import CHUNK_ROWS, Chunk, Column, DataTable, labels

Sizes = NDArray[np.int64]
"""Numbers of rows of users whose rows follow each other."""


def users_of(
    table: DataTable,
    user: str | None,
    columns: Sequence[str],
    *,
    missing: bool = False,
    drawn: bool = False,
    advance: Callable[[int], object] | None = None,
) -> Iterator[tuple[Chunk, Sizes]]:
    """Yields all rows of some users at a time, with each user's number of rows.

    Without a user column every row is a user. With one, rows of a user may be anywhere; see `whole_users`.

    Args:
        table: The table.
        user: The column of users, or None.
        columns: The columns that are needed; may be empty if there is a user column.
        missing: Whether rows without a user are left out. Otherwise they are refused.
        drawn: Whether each user's rows are put in a random order. They must be where others' rows may have a part in
            it, as on clusters: which of them count has to depend on that user alone.
        advance: Called with the number of rows that were just read.
    """
    advance = advance or (lambda rows: None)
    if user is None:
        for chunk in table.chunks(columns):
            yield chunk, np.ones(size_of(chunk), dtype=np.int64)
            advance(size_of(chunk))
        return
    for held in whole_users(table, user, columns):
        number = held[user]
        if number.dtype.kind not in "iu":
            _, number = labels(user, number, table.title, missing=missing)
        if drawn:
            mixed = np.random.default_rng().permutation(len(number))
            order = mixed[_in_order(number[mixed])]
        else:
            order = _in_order(number)
        if number is not held[user]:
            order = order[np.count_nonzero(number < 0) :]  # rows of nobody
        own = number[order]
        starts = np.concatenate([[0], np.flatnonzero(own[1:] != own[:-1]) + 1, [len(own)]])[: len(own) + 1]
        begin = 0
        while begin < len(starts) - 1:
            # The users who have at most so many rows together, and at least one user.
            end = int(np.searchsorted(starts, starts[begin] + CHUNK_ROWS, side="right")) - 1
            end = min(max(end, begin + 1), len(starts) - 1)
            own = order[starts[begin] : starts[end]]
            yield {name: column[own] for name, column in held.items()}, np.diff(starts[begin : end + 1])
            advance(len(own))
            begin = end


def _in_order(number: Column) -> NDArray[np.int64]:
    """Returns row indices sorted by user number; rows of one user keep their order."""
    bits = len(number).bit_length()
    if not bits or (int(number.max()) - int(number.min())).bit_length() + bits > 63:
        return np.argsort(number, kind="stable")
    # A user's number and a place share an integer: sorting these is several times faster than sorting places.
    pairs = number.astype(np.int64)
    pairs -= number.min().astype(np.int64)
    pairs <<= bits
    pairs |= np.arange(len(number))
    pairs.sort()
    pairs &= (1 << bits) - 1
    return pairs


def size_of(chunk: Chunk) -> int:
    """Returns the number of rows."""
    return len(next(iter(chunk.values())))


def by_user(rows: NDArray[Any], sizes: Sizes) -> NDArray[Any]:
    """Returns the sum of each user's rows; zero for users without rows."""
    found = np.zeros((len(sizes), *rows.shape[1:]), dtype=rows.dtype)
    some = sizes > 0
    if some.any():
        starts = np.concatenate([[0], np.cumsum(sizes[some])[:-1]])
        found[some] = np.add.reduceat(rows, starts, axis=0)
    return found
