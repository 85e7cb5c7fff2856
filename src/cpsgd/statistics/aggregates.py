"""Means, sums, counts and histograms of columns.

Columns are scaled to their bounds, so that each has equal weight: the error of a column is in proportion to the width
of its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.errors import ColumnError, ParameterError
from cpsgd.protocol import MAX_CLIENTS
from cpsgd.statistics.planned import Geometry, Matrix
from cpsgd.statistics.rows import Bounds, Groups, Reading, RowQuestion, check_categories, codes, size_of
from cpsgd.tables import Chunk, numbers


def _scaled(question: RowQuestion, chunk: Chunk, middle: Matrix, unit: Matrix) -> Matrix:
    """Returns (x - middle)/unit of each column, values moved to their bounds."""
    scaled = np.empty((size_of(chunk), len(question.columns)))
    for i, name in enumerate(question.columns):
        low, high = question.bounds[name]
        # Divided first: bounds may be far apart.
        scaled[:, i] = np.clip(numbers(name, chunk[name]), low, high) / unit[i] - middle[i] / unit[i]
    return scaled


def _centred(question: RowQuestion, chunk: Chunk, middle: Matrix, unit: Matrix) -> Matrix:
    # Clipped once more: where bounds are close together and far from zero, rounding could leave the cube.
    return np.clip(_scaled(question, chunk, middle, unit), -0.5, 0.5)


class Mean(RowQuestion):
    """The mean of each column over the users. Each user counts once, with the mean of their rows.

    *Distance.* A row is v = (x - middle)/width in [-½, ½]^d. Two rows are at most the cube's diagonal apart, √d, and
    the norm is at most half of that. Clipping to that norm enforces the distance already.

    With g groups a row is the block (v, b) of its group, b = √d/2, and zero elsewhere; the second part counts. Two rows
    of one group are at most √d apart, for the b's cancel; of two groups √(2(d/4 + b²)) = √d; and the norm, the distance
    from zero, is √(d/4 + b²) = √(d/2). So groups cost nothing but their smaller size.

    Args:
        bounds: The columns with the bounds of each.
        group_by: One column and its (public) groups.

    Example:
        >>> Mean({"age": (0, 100), "height": (0, 2.5)}).geometry.distance == 2**0.5
        True
    """

    statistic = "mean"

    def __init__(self, bounds: Bounds, *, group_by: Groups | None = None) -> None:
        super().__init__(group_by, bounds)
        low, high = np.array(list(self.bounds.values())).T
        self._middle, self._unit = 0.5 * low + 0.5 * high, high - low
        self._weight = 0.5 * math.sqrt(len(self.columns))  # b

    @property
    def geometry(self) -> Geometry:
        """The vectors' dimension, largest norm and largest distance; the class says why."""
        d = len(self.columns)
        if self.groups is None:
            return Geometry(d, 0.5 * math.sqrt(d), math.sqrt(d), "each vector is in a cube of width 1")
        reason = "each vector is made here from rows of the cube of width 1, one block (v, b) with b = √d/2 per group"
        return Geometry(self.blocks * (d + 1), math.sqrt(0.5 * d), math.sqrt(d), reason)

    def _points(self, chunk: Chunk) -> Matrix:
        points = _centred(self, chunk, self._middle, self._unit)
        return points if self.groups is None else np.hstack([points, np.full((len(points), 1), self._weight)])

    def read(self, mean: Matrix, variance: float, users: int, width: float) -> Reading:
        """Returns the mean of the vectors; with groups the quotient of sum and size, with Fieller's interval.

        With S and N the private sums of a group's v and of its 1's, of variance V and V/b², θ = ES/EN has
        |S - θN| <= z √(V(1 + θ²/b²)) with the probability that z stands for. That is a quadratic inequality in θ.
        """
        if self.groups is None:
            values, reach = mean, width * math.sqrt(variance)
            low, high = values - reach, values + reach
        else:
            sums, sizes, weight = mean[:, :-1], mean[:, -1:] / self._weight, self._weight
            noise = width * width * variance
            a, b, c = sizes**2 - noise / weight**2, -2.0 * sums * sizes, sums**2 - noise
            known = (a > 0.0) & (sizes > 0.0)
            safe = np.where(known, a, 1.0)
            root = np.sqrt(np.maximum(b * b - 4.0 * safe * c, 0.0))
            low = np.where(known, (-b - root) / (2.0 * safe), -0.5)
            high = np.where(known, (-b + root) / (2.0 * safe), 0.5)
            values = np.where(sizes > 0.0, sums / np.where(sizes > 0.0, sizes, 1.0), 0.0)
        low, values, high = (self._middle + self._unit * np.clip(table, -0.5, 0.5) for table in (low, values, high))
        return Reading(self.columns, self.groups, values, low, high)


class Sum(RowQuestion):
    """The sum of each column over all rows, at most `rows` of each user.

    *Distance.* Without groups and for rows = 1 every user has one row in it, and the sum is n times the `Mean`.

    Otherwise a row is v = x/m in the block of its group, m the larger of |low| and |high|, and zero elsewhere: the norm
    is at most √d. Two rows of one group are at most √Σ((high - low)/m)² apart, of two groups √(2d). A row is at most √d
    from zero, which stands for the rows that a user lacks. The distance is the largest of those that apply; for bounds
    from 0 on and one group it is √d.

    Args:
        bounds: The columns with the bounds of each.
        rows: c, the most rows of a user that count.
        group_by: One column and its (public) groups.

    Example:
        >>> asked = Sum({"age": (0, 100)}).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [20.0, 40.0] * 500])
        >>> bool(abs(found.values[0] - 30_000) < 1_000)
        True
    """

    statistic = "sum"
    combine = "sum"

    def __init__(self, bounds: Bounds, *, rows: int = 1, group_by: Groups | None = None) -> None:
        super().__init__(group_by, bounds)
        self._names = self.columns
        self.rows = self._rows = _validate.integer("rows", rows, low=1, high=MAX_CLIENTS)
        low, high = np.array(list(self.bounds.values())).T
        self._is_centred = rows == 1 and self.groups is None
        self._middle = 0.5 * low + 0.5 * high if self._is_centred else np.zeros(len(low))
        self._unit = high - low if self._is_centred else np.maximum(np.abs(low), np.abs(high))
        self._spans = (high - low) / self._unit

    @property
    def geometry(self) -> Geometry:
        """The vectors' dimension, largest norm and largest distance; the class says why."""
        d = len(self._unit)
        if self._is_centred:
            return Geometry(d, 0.5 * math.sqrt(d), math.sqrt(d), "each vector is in a cube of width 1")
        apart = max(math.sqrt(float(self._spans @ self._spans)), math.sqrt(2.0 * d if self.blocks > 1 else d))
        reason = "each vector is made here from rows within their bounds, one block per group and zeros"
        return Geometry(self.blocks * d, math.sqrt(d), apart, reason)

    def _points(self, chunk: Chunk) -> Matrix:
        return (_centred if self._is_centred else _scaled)(self, chunk, self._middle, self._unit)

    def read(self, mean: Matrix, variance: float, users: int, width: float) -> Reading:
        """Returns the mean times the number of users, in the columns' units."""
        scale = float(users) * self._rows
        values = users * self._middle + scale * self._unit * mean
        reach = np.broadcast_to(scale * self._unit * width * math.sqrt(variance), values.shape)
        return Reading(self._names, self.groups, values, values - reach, values + reach)


class Count(Sum):
    """The number of rows, at most `rows` of each user; or the number of ones in columns of 0 and 1.

    It is the `Sum` of those columns, or of a column of ones. The number of *users* is public among replace-one
    neighbours, so counting rows makes sense with groups, or with several rows per user.

    Args:
        columns: Columns of 0 and 1 (or truth values); none to count rows.
        rows: c, the most rows of a user that count.
        group_by: One column and its (public) groups.

    Example:
        >>> asked = Count(["smokes"]).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [0, 1] * 500])
        >>> bool(abs(found.values[0] - 500) < 20)
        True
    """

    statistic = "count"

    def __init__(self, columns: Sequence[str] = (), *, rows: int = 1, group_by: Groups | None = None) -> None:
        if isinstance(columns, str):
            raise ParameterError("Expected columns to be a list of names.")
        super().__init__(dict.fromkeys(columns or ("rows",), (0.0, 1.0)), rows=rows, group_by=group_by)
        if not columns:
            if self._is_centred:
                raise ParameterError(
                    "The number of users is the same in all replace-one neighbours, and is the table's length: name "
                    "columns of 0 and 1 to count in, group_by, or a user column with rows_per_user."
                )
            self.columns, self.bounds = (), {}

    def _points(self, chunk: Chunk) -> Matrix:
        if not self.columns:
            return np.ones((size_of(chunk), 1))
        for name in self.columns:
            if not np.isin(numbers(name, chunk[name]), (0.0, 1.0)).all():
                raise ColumnError(f"Column {name!r} is not of 0 and 1; use a histogram to count other values.")
        return super()._points(chunk)

    def read(self, mean: Matrix, variance: float, users: int, width: float) -> Reading:
        """Returns a sum within 0 and the largest possible count."""
        total, most = super().read(mean, variance, users, width), float(users) * self._rows
        values, low, high = (np.clip(table, 0.0, most) for table in (total.values, total.low, total.high))
        return Reading(total.names, total.groups, values, low, high)


class Histogram(RowQuestion):
    """The number of rows, at most `rows` of each user, in each bin or of each category.

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
        super().__init__(group_by, None, [column])
        if (edges is None) == (categories is None):
            raise ParameterError("Give the edges of a histogram's bins or its categories; not both.")
        if not isinstance(column, str):
            raise ParameterError("Expected column to be the name of one column.")
        self.rows = self._rows = _validate.integer("rows", rows, low=1, high=MAX_CLIENTS)
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
        distance = math.sqrt(2.0) if dim > 1 else 1.0
        return Geometry(dim, 1.0, distance, "each vector is made here of one-hot rows and zeros, a mean of them")

    def _points(self, chunk: Chunk) -> Matrix:
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

    def read(self, mean: Matrix, variance: float, users: int, width: float) -> Reading:
        """Returns the mean times the number of users; estimates are unbiased, and may be below zero."""
        scale = float(users) * self._rows
        reach = scale * width * math.sqrt(variance)
        values = scale * mean
        low, high = np.clip(values - reach, 0.0, scale), np.clip(values + reach, 0.0, scale)
        return Reading(self._names, self.groups, values, low, high)


def _check_edges(edges: ArrayLike) -> Matrix:
    """Returns edges in increasing order, or raises `ParameterError`."""
    try:
        checked = np.asarray(edges, dtype=np.float64)
    except (TypeError, ValueError):
        raise ParameterError("Expected edges to be numbers.") from None
    if checked.ndim != 1 or len(checked) < 2 or not np.isfinite(checked).all() or not (np.diff(checked) > 0.0).all():
        raise ParameterError("Expected at least two finite edges in increasing order.")
    return checked
