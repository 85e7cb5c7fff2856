"""Histograms of a column: rows by bin or by category."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.statistics.categories import check_categories, codes
from cpsgd.statistics.questions import Geometry, Matrix
from cpsgd.statistics.results import Reading
from cpsgd.statistics.rows import MOST_ROWS, Groups, Missing, RowQuestion
from cpsgd.tables import Chunk, labels, text_of


class Histogram(RowQuestion):
    """The number of rows, at most `rows` of each user, in each bin or of each category.

    *Distance.* A row is one-hot: norm 1. Two of them in different bins are √2 apart, and one is 1 from zero, which
    stands for a row outside of all bins. With a single bin (and no groups) the distance is 1. Added up it is 2, and 1.

    Args:
        column: The column.
        edges: Edges of the bins in increasing order; a bin holds its lower edge, the last one both.
        categories: Instead of edges: the values to count.
        rows: c, the most rows of a user that count.
        group_by: Columns and their (public) groups.
        missing: What a missing value counts as; "drop" is no bin.

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
        missing: Missing = None,
    ) -> None:
        super().__init__(group_by, None, [column], missing)
        if (edges is None) == (categories is None):
            raise ParameterError("Give the edges of a histogram's bins or its categories; not both.")
        if not isinstance(column, str):
            raise ParameterError("Expected column to be the name of one column.")
        if missing == "bounds":
            raise ParameterError("A histogram has no bounds: missing values are 'drop', or a value.")
        self.rows = self._rows = _validate.integer("rows", rows, low=1, high=MOST_ROWS)
        self._edges = None if edges is None else _check_edges(edges)
        if self._edges is None:
            self._names = check_categories("categories", categories or ())
        else:
            bins = [f"[{low:.12g}, {high:.12g})" for low, high in pairwise(self._edges)]
            self._names = (*bins[:-1], bins[-1][:-1] + "]")

    @property
    def geometry(self) -> Geometry:
        """The vectors' dimension, largest norm and largest distance; the class says why."""
        dim = self.blocks * len(self._names)
        distance, added = (math.sqrt(2.0), 2.0) if dim > 1 else (1.0, 1.0)
        reason = "each vector is made here of one-hot rows and zeros, a mean of them"
        levels = (3, 1.0) if self._rows == 1 and dim > 1 else None
        return Geometry(dim, 1.0, distance, reason, 1.0, added, lattice=self._rows, levels=levels)

    @property
    def listed(self) -> bool:
        """Whether rows may fall outside the listed bins: always true of a histogram."""
        return True

    def outside(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Returns which rows are in no bin or in no group."""
        return super().outside(chunk) | (self._bin_of(chunk) < 0)

    def _bin_of(self, chunk: Chunk) -> NDArray[np.int64]:
        (name,) = self.columns
        if self._edges is None:
            given = self.missing not in (None, "drop")
            code = codes((name,), chunk, [(text,) for text in self._names], missing=self.missing is not None)
            if given and text_of(self.missing) in self._names:
                code[labels(name, chunk[name], missing=True)[1] < 0] = self._names.index(text_of(self.missing))
            return code
        values, there = self.values_of(name, chunk)
        code = np.searchsorted(self._edges, values, side="right") - 1
        code[values == self._edges[-1]] -= 1
        code[(values < self._edges[0]) | (values > self._edges[-1])] = -1
        if there is not None:
            code[~there] = -1
        return code

    def _points(self, chunk: Chunk) -> Matrix:
        code = self._bin_of(chunk)
        points = np.zeros((len(code), len(self._names)))
        inside = np.flatnonzero(code >= 0)
        points[inside, code[inside]] = 1.0
        return points

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns counts with intervals: the mean times the users. Estimates are unbiased, and may be below zero."""
        scale = float(users) * self._rows
        reach, values = scale * width * math.sqrt(variance), scale * mean
        most = math.inf if self.private_users else scale
        low, high = np.clip(values - reach, 0.0, most), np.clip(values + reach, 0.0, most)
        return Reading(self._names, self.group_names(), values, low, high)

    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of a bin's count, in rows."""
        return users * self._rows * deviation


def _check_edges(edges: ArrayLike) -> Matrix:
    """Returns edges in increasing order, or raises `ParameterError`."""
    try:
        checked = np.asarray(edges, dtype=np.float64)
    except (TypeError, ValueError):
        raise ParameterError("Expected edges to be numbers.") from None
    if checked.ndim != 1 or len(checked) < 2 or not np.isfinite(checked).all() or not (np.diff(checked) > 0.0).all():
        raise ParameterError("Expected at least two finite edges in increasing order.")
    return checked
