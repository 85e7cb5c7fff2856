"""Means, sums and counts of columns.

Columns are scaled to their bounds, so that each has equal weight: the error of a column is in proportion to the width
of its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from cpsgd import _validate
from cpsgd.errors import ColumnError, ParameterError
from cpsgd.statistics.questions import Geometry, Matrix
from cpsgd.statistics.results import Reading
from cpsgd.statistics.rows import MOST_ROWS, Bounds, Groups, Missing, RowQuestion
from cpsgd.statistics.users import size_of
from cpsgd.tables import Chunk

# The count of one where every column has its own.
_OWN_COUNT = 0.5


def _scaled(question: RowQuestion, chunk: Chunk, middle: Matrix, unit: Matrix) -> tuple[Matrix, Matrix | None]:
    """Returns (x - middle)/unit per column, values moved to their bounds, and 1 for present values, else 0.

    The second is None where every value is there.
    """
    scaled = np.empty((size_of(chunk), len(question.columns)))
    present = np.ones_like(scaled) if question.missing == "drop" else None
    for i, name in enumerate(question.columns):
        low, high = question.bounds[name]
        values, there = question.values_of(name, chunk)
        # Divided first: bounds may be far apart.
        scaled[:, i] = np.clip(values, low, high) / unit[i] - middle[i] / unit[i]
        if there is not None and present is not None:
            present[:, i] = there
    return scaled if present is None else scaled * present, present


class Mean(RowQuestion):
    """The mean of each column over the users. Each user counts once, with the mean of their rows.

    *Distance.* A row is v = (x - middle)/width in [-½, ½]^d. Two rows are at most the cube's diagonal apart, √d, and
    the norm is at most half of that; added up over the columns it is d, and d/2. Clipping to the norm enforces the
    distance already.

    With g groups, or where the number of users is not public, a row is the block (v, b) of its group, b = √d/2, and
    zero elsewhere; the second part counts. Two rows of one group are at most √d apart, for the b's cancel; of two
    groups √(2(d/4 + b²)) = √d; and the norm, the distance from zero, is √(d/4 + b²) = √(d/2). So groups cost nothing
    but their smaller size. (Added up it is d in one group and d + 2b between two.)

    With missing="drop" every column has a count of its own: it is (v, ½), or (0, 0) where there is no value. Two of
    these are at most 1 apart in either norm, in one group; so are users who did not answer. A user counts with the
    share of their rows that have a value.

    Args:
        bounds: The columns with the bounds of each.
        group_by: Columns and their (public) groups.
        missing: What a missing value counts as.

    Example:
        >>> asked = Mean({"age": (0, 100)}).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [20.0, 40.0] * 500])
        >>> round(float(found.values[0]), -1)
        30.0
    """

    statistic = "mean"

    def __init__(self, bounds: Bounds, *, group_by: Groups | None = None, missing: Missing = None) -> None:
        super().__init__(group_by, bounds, missing=missing)
        low, high = np.array(list(self.bounds.values())).T
        self._middle, self._unit = 0.5 * low + 0.5 * high, high - low

    @property
    def _counted(self) -> bool:
        """Whether vectors count the users in them."""
        return self.groups is not None or self.private_users or self.missing == "drop"

    @property
    def _weight(self) -> float:
        """Coordinate b of a vector, the entry that counts one user."""
        return _OWN_COUNT if self.missing == "drop" else 0.5 * math.sqrt(len(self.columns))

    @property
    def geometry(self) -> Geometry:
        """The vectors' dimension, largest norm and largest distance; the class says why."""
        d, b, several = len(self.columns), self._weight, self.blocks > 1
        if not self._counted:
            return Geometry(d, 0.5 * math.sqrt(d), math.sqrt(d), "each vector is in a cube of width 1", 0.5 * d, d)
        if self.missing == "drop":
            reason = "each vector is made here from rows of the cube of width 1, a pair (v, b) with b = ½ per column"
            return Geometry(self.blocks * 2 * d, math.sqrt(0.5 * d), math.sqrt(d), reason, d, 2 * d if several else d)
        reason = "each vector is made here from rows of the cube of width 1, one block (v, b) with b = √d/2 per group"
        apart = d + 2.0 * b if several else max(d, 0.5 * d + b)
        return Geometry(self.blocks * (d + 1), math.sqrt(0.5 * d), math.sqrt(d), reason, 0.5 * d + b, apart)

    def _points(self, chunk: Chunk) -> Matrix:
        points, present = _scaled(self, chunk, self._middle, self._unit)
        # Clipped once more: where bounds are close together and far from zero, rounding could leave the cube.
        points = np.clip(points, -0.5, 0.5)
        if present is not None:
            return np.hstack([points, self._weight * present])
        return np.hstack([points, np.full((len(points), 1), self._weight)]) if self._counted else points

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns the mean of the vectors, or the quotient of sum and count, with Fieller's interval.

        With S and N the private sums of a group's v and of its 1's, of variance V and V/b², θ = ES/EN has
        |S - θN| <= z √(V(1 + θ²/b²)) with the probability that z stands for. That is a quadratic inequality in θ.
        """
        d = len(self.columns)
        if not self._counted:
            values, reach = mean, width * math.sqrt(variance)
            low, high = values - reach, values + reach
        else:
            sums, sizes, weight = mean[:, :d], mean[:, d:] / self._weight, self._weight
            noise = width * width * variance
            a, b, c = sizes**2 - noise / weight**2, -2.0 * sums * sizes, sums**2 - noise
            known = (a > 0.0) & (sizes > 0.0)
            safe = np.where(known, a, 1.0)
            root = np.sqrt(np.maximum(b * b - 4.0 * safe * c, 0.0))
            low = np.where(known, (-b - root) / (2.0 * safe), -0.5)
            high = np.where(known, (-b + root) / (2.0 * safe), 0.5)
            values = np.where(sizes > 0.0, sums / np.where(sizes > 0.0, sizes, 1.0), 0.0)
        low, values, high = (self._middle + self._unit * np.clip(table, -0.5, 0.5) for table in (low, values, high))
        return Reading(self.columns, self.group_names(), values, low, high)

    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of the widest column's mean, in a group of average size."""
        return float(self._unit.max()) * deviation * self.blocks


class Sum(RowQuestion):
    """The sum of each column over all rows, at most `rows` of each user.

    *Distance.* Without groups and for rows = 1 every user has one row in it, and the sum is n times the `Mean`.

    Otherwise a row is v = x/m in the block of its group, m the larger of |low| and |high|, and zero elsewhere: the norm
    is at most √d. Two rows of one group are at most √Σ((high - low)/m)² apart, of two groups √(2d). A row is at most √d
    from zero, which stands for the rows that a user lacks and for missing values. The distance is the largest of those
    that apply; for bounds from 0 on and one group it is √d. Added up over the columns it is Σ(high - low)/m, 2d and d.
    Where single values may be missing, (high - low)/m counts as 1 if it is less.

    Args:
        bounds: The columns with the bounds of each.
        rows: c, the most rows of a user that count.
        group_by: Columns and their (public) groups.
        missing: What a missing value counts as; "drop" is 0.

    Example:
        >>> asked = Sum({"age": (0, 100)}).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [20.0, 40.0] * 500])
        >>> round(float(found.values[0]), -4)
        30000.0
    """

    statistic = "sum"
    combine = "sum"

    def __init__(
        self, bounds: Bounds, *, rows: int = 1, group_by: Groups | None = None, missing: Missing = None
    ) -> None:
        super().__init__(group_by, bounds, missing=missing)
        self._names = self.columns
        self.rows = self._rows = _validate.integer("rows", rows, low=1, high=MOST_ROWS)
        self._low, self._high = np.array(list(self.bounds.values())).T

    @property
    def _is_centred(self) -> bool:
        return self.rows == 1 and self.groups is None and not self.private_users and self.missing != "drop"

    @property
    def _middle(self) -> Matrix:
        return 0.5 * self._low + 0.5 * self._high if self._is_centred else np.zeros(len(self._low))

    @property
    def _unit(self) -> Matrix:
        found: Matrix = self._high - self._low if self._is_centred else np.maximum(-self._low, self._high)
        return found

    @property
    def geometry(self) -> Geometry:
        """The vectors' dimension, largest norm and largest distance; the class says why."""
        d, spans = len(self._low), (self._high - self._low) / self._unit
        if self.missing == "drop":
            spans = np.maximum(spans, 1.0)  # any column may be zero beside others that are not
        if self._is_centred:
            return Geometry(d, 0.5 * math.sqrt(d), math.sqrt(d), "each vector is in a cube of width 1", 0.5 * d, d)
        apart = max(math.sqrt(float(spans @ spans)), math.sqrt(2.0 * d if self.blocks > 1 else d))
        reason = "each vector is made here from rows within their bounds, one block per group and zeros"
        added = max(float(spans.sum()), 2.0 * d if self.blocks > 1 else d)
        return Geometry(self.blocks * d, math.sqrt(d), apart, reason, d, added)

    def _points(self, chunk: Chunk) -> Matrix:
        points, _ = _scaled(self, chunk, self._middle, self._unit)
        return np.clip(points, -0.5, 0.5) if self._is_centred else points

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns the mean times the number of users, in the columns' units."""
        scale = float(users) * self._rows
        values = users * self._middle + scale * self._unit * mean
        reach = np.broadcast_to(scale * self._unit * width * math.sqrt(variance), values.shape)
        return Reading(self._names, self.group_names(), values, values - reach, values + reach)

    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of the sum whose column has the widest bounds."""
        return float(users * self._rows * self._unit.max() * deviation)


class Count(Sum):
    """The number of rows, at most `rows` of each user; or the number of ones in columns of 0 and 1.

    It is the `Sum` of those columns, or of a column of ones. The number of *users* is public among replace-one
    neighbours, so counting rows makes sense with groups, with several rows per user, or for add-remove neighbours.

    Args:
        columns: Columns of 0 and 1 (or truth values); none to count rows.
        rows: c, the most rows of a user that count.
        group_by: Columns and their (public) groups.
        missing: What a missing value counts as; "drop" is 0.

    Example:
        >>> asked = Count(["smokes"]).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [0, 1] * 500])
        >>> round(float(found.values[0]), -2)
        500.0
    """

    statistic = "count"
    # On one machine noise is of whole rows, not of halves around the middle.
    _whole = False

    def __init__(
        self,
        columns: Sequence[str] = (),
        *,
        rows: int = 1,
        group_by: Groups | None = None,
        missing: Missing = None,
    ) -> None:
        if isinstance(columns, str):
            raise ParameterError("Expected columns to be a list of names.")
        super().__init__(dict.fromkeys(columns or ("rows",), (0.0, 1.0)), rows=rows, group_by=group_by, missing=missing)
        self.bounds = {}  # those of 0 and 1 are not the caller's
        if not columns:
            self.columns = ()  # rows are counted by a column of ones, which no table needs to have

    @property
    def _is_centred(self) -> bool:
        return super()._is_centred and not self._whole

    @property
    def geometry(self) -> Geometry:
        """The geometry of `Sum`, with levels, or a lattice: vectors times `rows` are whole."""
        found = super().geometry
        if self._is_centred:
            return replace(found, levels=(2, 0.5))
        levels = (3, 1.0) if self._rows == 1 and self.blocks > 1 else None
        return replace(found, lattice=self._rows, levels=levels)

    def central(self, neighbours: str, user: str | None) -> Self:
        """Returns the question for whoever holds the table; see `RowQuestion.central`."""
        if neighbours == "replace-one":
            self._check_not_users()
        found = super().central(neighbours, user)
        found._whole = True
        return found

    def plan(self, clients: int, epsilon: float, delta: float = 0.0, **requirements: Any) -> Any:
        """Plans a round; see `RowQuestion.plan`."""
        self._check_not_users()
        return super().plan(clients, epsilon, delta, **requirements)

    @property
    def _of_users(self) -> bool:
        """Whether it counts users: one row of each user, whatever the row holds."""
        return not self.columns and self.groups is None and self._rows == 1

    @property
    def cuts(self) -> tuple[str, ...]:
        """Returns the ways in which rows may be cut off; a number of users leaves out no further rows."""
        return () if self._of_users else super().cuts

    def _check_not_users(self) -> None:
        if self._of_users:
            raise ParameterError(
                "The number of users is the same in all replace-one neighbours, and is the table's length: name "
                "columns of 0 and 1 to count in, group_by, a user column with rows_per_user, or hide the number of "
                "users with neighbours='add-remove'."
            )

    def _points(self, chunk: Chunk) -> Matrix:
        if not self.columns:
            return np.ones((size_of(chunk), 1)) - self._middle
        points = np.empty((size_of(chunk), len(self.columns)))
        for i, name in enumerate(self.columns):
            values, _ = self.values_of(name, chunk)
            if not np.isin(values, (0.0, 1.0)).all():
                if self.missing is None:
                    raise ColumnError(f"Column {name!r} is not of 0 and 1; use a histogram to count other values.")
                values = np.isin(values, (1.0,)).astype(np.float64)
            points[:, i] = values
        return points - self._middle

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns a sum within 0 and the largest possible count."""
        total = super().read(mean, variance, users, width)
        most = math.inf if self.private_users else float(users) * self._rows
        values, low, high = (np.clip(table, 0.0, most) for table in (total.values, total.low, total.high))
        return Reading(
            ("users",) if self._of_users and not self.one_row else total.names, total.groups, values, low, high
        )
