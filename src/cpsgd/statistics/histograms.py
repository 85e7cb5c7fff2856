"""Histograms: how many rows are in each bin, or of each category."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.protocol import MAX_CLIENTS
from cpsgd.statistics.columns import Chunk, numbers
from cpsgd.statistics.contributions import Rows
from cpsgd.statistics.questions import Geometry, Groups, RowQuestion, categories, codes
from cpsgd.statistics.results import Reading


class Histogram(RowQuestion):
    """How many rows, at most `rows` of each user, have a value in each bin or of each category.

    *Distance.* A row is one-hot: norm 1. Two of them in different bins are √2 apart, and one is 1 from zero, which
    stands for a row outside of all bins. With a single bin (and no groups) the distance is 1.

    Args:
        column: The column.
        edges: Edges of the bins in increasing order; a bin holds its lower edge, the last one both.
        categories: Instead of edges: the values to count.
        rows: c, the most rows of a user that count.
        group_by: One column and its (public) groups.

    Example:
        >>> colours = Histogram("colour", categories=["red", "green"])
        >>> colours.points({"colour": np.array(["green", "blue"])}).tolist()
        [[0.0, 1.0], [0.0, 0.0]]
    """

    statistic = "histogram"
    combine = "sum"

    def __init__(
        self,
        column: str,
        *,
        edges: ArrayLike | None = None,
        categories: Sequence[object] | None = None,
        rows: int = 1,
        group_by: Groups | None = None,
    ) -> None:
        super().__init__(group_by)
        if (edges is None) == (categories is None):
            raise ParameterError("Give the edges of a histogram's bins or its categories; not both.")
        if not isinstance(column, str):
            raise ParameterError("Expected column to be the name of one column.")
        self.columns, self.bounds = (column,), {}
        self.rows = _validate.integer("rows", rows, low=1, high=MAX_CLIENTS)
        self._edges = None if edges is None else check_edges(edges)
        if self._edges is None:
            self._names = _categories(categories or ())
        else:
            ends = [f"{edge:.12g}" for edge in self._edges]
            pairs = list(pairwise(ends))
            self._names = tuple(
                f"[{low}, {high}{']' if i == len(pairs) - 1 else ')'}" for i, (low, high) in enumerate(pairs)
            )

    @property
    def geometry(self) -> Geometry:
        """See the class."""
        dim = self.blocks * len(self._names)
        distance = math.sqrt(2.0) if dim > 1 else 1.0
        return Geometry(dim, 1.0, distance, "each vector is made here of one-hot rows and zeros, a mean of them")

    def _points(self, chunk: Chunk) -> Rows:
        (name,) = self.columns
        if self._edges is None:
            code = codes(name, chunk[name], self._names)
        else:
            values = numbers(name, chunk[name])
            code = np.searchsorted(self._edges, values, side="right") - 1
            code[values == self._edges[-1]] -= 1
            code[(values < self._edges[0]) | (values > self._edges[-1])] = -1
        points = np.zeros((len(code), len(self._names)))
        inside = np.flatnonzero(code >= 0)
        points[inside, code[inside]] = 1.0
        return points

    def read(self, mean: NDArray[np.float64], variance: float, users: int, width: float) -> Reading:
        """The mean times the number of users; estimates are unbiased, and may be below zero."""
        assert self.rows is not None
        scale = float(users) * self.rows
        reach = scale * width * math.sqrt(variance)
        values = scale * mean
        low, high = np.clip(values - reach, 0.0, scale), np.clip(values + reach, 0.0, scale)
        return Reading(self._names, self.groups, values, low, high)


def _categories(given: Sequence[object]) -> tuple[str, ...]:
    return categories("categories", given)


def check_edges(edges: ArrayLike) -> NDArray[np.float64]:
    """Edges in increasing order, or `ParameterError`."""
    try:
        found = np.asarray(edges, dtype=np.float64)
    except (TypeError, ValueError):
        raise ParameterError("Expected edges to be numbers.") from None
    if found.ndim != 1 or len(found) < 2 or not np.isfinite(found).all() or not (np.diff(found) > 0.0).all():
        raise ParameterError("Expected at least two finite edges in increasing order.")
    return found
