"""Questions about rows: a user's rows become one vector, and the sum of these becomes named values with intervals.

Each row becomes a point of a public set V. A user has a convex combination of points of V and zero: the mean of all
their rows, or the sum of their first c rows over c. So two users' vectors are no further apart than two points of V and
zero, however many rows a user has, and ε is per user.

*Proof.* Let x = Σ aᵢ vᵢ and y = Σ bⱼ wⱼ with weights that sum to 1. Then x - y = Σᵢⱼ aᵢ bⱼ (vᵢ - wⱼ), so
‖x - y‖ <= max ‖vᵢ - wⱼ‖ in any norm. Fewer than c rows are c with zeros among them, and so are rows without a value. ∎
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError, TableError, VectorError
from cpsgd.statistics.categories import check_categories, codes
from cpsgd.statistics.questions import Matrix, Question, Vectors
from cpsgd.statistics.results import Reading, Statistic, told
from cpsgd.statistics.users import Sizes, by_user, size_of
from cpsgd.tables import Chunk, DataTable, maybe_numbers, numbers, open_table

if TYPE_CHECKING:
    from cpsgd.privacy import Guarantee
    from cpsgd.statistics.planned import Planned

Bounds = Mapping[str, tuple[float, float]]
Groups = Mapping[str, Sequence[object]]
Combine = Literal["mean", "sum"]
Missing = Literal["drop", "bounds"] | float | str | None
"""A missing value counts as nothing ("drop"), as the middle of its bounds ("bounds"), as a value, or is refused."""

# Coordinates of rows that are held at a time, 16 MiB.
_BLOCK = 1 << 21
MOST_ROWS = 2**32 - 1
"""The most rows of a user that count: a sum of more could not be an integer of 62 bits."""
# Sums of larger bounds may overflow.
_LARGEST = 2.0**1000


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


# ------------------------------------------------------------------ questions


class RowQuestion(Question[Statistic]):
    """A question about everybody's rows.

    Attributes:
        statistic: Its name.
        columns: The columns of numbers or categories that it is about.
        bounds: Public bounds of columns; values beyond are moved to them.
        group_by: The columns that say which group a row is in.
        groups: The groups, each with one text per column of `group_by`; None without groups.
        missing: What a missing value counts as; see `Missing`.
        combine: Whether several rows of a user are averaged or summed.
        rows: c, the most rows of a user that count; None for all.
        private_users: Whether the number of users is not public, so that vectors have to count them.
        one_row: Whether every user is known to have one row.
    """

    statistic: str
    combine: Combine = "mean"
    rows: int | None = None
    private_users: bool = False
    one_row: bool = False

    def __init__(
        self,
        group_by: Groups | None,
        bounds: Bounds | None,
        columns: Sequence[str] = (),
        missing: Missing = None,
    ) -> None:
        """Checks groups and bounds; the question is about `columns`, or the bounded columns if None."""
        self.bounds = {} if bounds is None else check_bounds(bounds)
        self.columns = tuple(self.bounds) or tuple(columns)
        self.missing = missing
        self.group_by: tuple[str, ...] = ()
        self.groups: tuple[tuple[str, ...], ...] | None = None
        if group_by is not None:
            if not isinstance(group_by, Mapping) or not group_by:
                raise ParameterError(
                    "Expected group_by to name columns and their groups, as {'sex': ['f', 'm']}. Groups that nobody "
                    "can list are found privately: group_by='sex', where there is a δ."
                )
            lists = {str(name): check_categories("group_by", given) for name, given in group_by.items()}
            self._grouped(tuple(lists), tuple(product(*lists.values())))

    def central(self, neighbours: str, user: str | None) -> Self:
        """Returns the question for whoever holds the table, for these neighbours and this column of users."""
        found = copy.copy(self)
        found.private_users = neighbours == "add-remove"
        found.one_row = user is None
        return found

    def among(self, group_by: Sequence[str], groups: Sequence[tuple[str, ...]]) -> Self:
        """Returns a copy of the question with these groups, after they were found privately."""
        found = copy.copy(self)
        found._grouped(tuple(group_by), tuple(groups))
        return found

    def _grouped(self, group_by: tuple[str, ...], groups: tuple[tuple[str, ...], ...]) -> None:
        self.group_by, self.groups = group_by, groups

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.columns, *self.group_by)

    @property
    def blocks(self) -> int:
        """Number of groups, 1 without groups."""
        return 1 if self.groups is None else len(self.groups)

    @abstractmethod
    def _points(self, chunk: Chunk) -> Matrix:
        """Returns the points of one block for these rows."""

    @abstractmethod
    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns the values behind a mean of vectors.

        Args:
            mean: The mean, one row per block.
            variance: Of the noise in each of its coordinates.
            users: Number of vectors in the mean. Where it is not public this is 1, and the mean is the sum.
            width: Standard deviations from the middle of an interval to its ends.
        """

    @abstractmethod
    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of a value, in its unit, given the deviation of a coordinate of the mean."""

    def values_of(self, name: str, chunk: Chunk) -> tuple[Matrix, NDArray[np.bool_] | None]:
        """Returns a column's numbers, and a mask of the present ones; None if all are present or filled in."""
        if self.missing is None:
            return numbers(name, chunk[name]), None
        values, there = maybe_numbers(name, chunk[name])
        if self.missing == "drop":
            return np.where(there, values, 0.0), there
        return np.where(there, values, fill_of(self.missing, self.bounds.get(name))), None

    def points(self, chunk: Chunk) -> Matrix:
        """Returns points of V, one per row; zero for rows of no group."""
        points, code = self._points(chunk), self.group_of(chunk)
        if code is None:
            return points
        placed = np.zeros((len(points), self.blocks, points.shape[1]))
        inside = np.flatnonzero(code >= 0)
        placed[inside, code[inside]] = points[inside]
        return placed.reshape(len(points), -1)

    def group_of(self, chunk: Chunk) -> NDArray[np.int64] | None:
        """Returns the number of each row's group, -1 for rows of none; None without groups."""
        if self.groups is None:
            return None
        return codes(self.group_by, chunk, self.groups, missing=self.missing is not None)

    def vectors(self, chunk: Chunk, sizes: Sizes) -> Matrix:
        """Returns the vectors of users whose rows follow each other, one row each."""
        kept = sizes
        if self.rows is not None and sizes.max(initial=0) > self.rows:
            # A row counts if it is fewer than c places behind its user's first.
            starts = np.cumsum(sizes) - sizes
            counts = np.arange(size_of(chunk)) - np.repeat(starts, sizes) < self.rows
            chunk, kept = {name: column[counts] for name, column in chunk.items()}, np.minimum(sizes, self.rows)
        some, ends = max(1, _BLOCK // self.geometry.dim), np.cumsum(kept)
        total = np.zeros((len(kept), self.geometry.dim))
        first = 0
        while first < len(kept):
            # Whole users, or parts of one: where a sum of floats is divided must not depend on how many rows others
            # have, or a user could change the rounding of everybody's vectors.
            start = ends[first] - kept[first]
            last = max(first + 1, int(np.searchsorted(ends, start + some, side="right")))
            for begin in range(start, ends[last - 1], some):
                part = {name: column[begin : min(begin + some, ends[last - 1])] for name, column in chunk.items()}
                own = kept[first:last] if last > first + 1 else np.array([size_of(part)])
                total[first:last] += by_user(self.points(part), own)
            first = last
        weights = np.maximum(kept, 1)[:, None] if self.combine == "mean" else self.rows or 1
        return np.asarray(total / weights)

    # ------------------------------------------------------------------ what is cut off

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the ways in which rows may be cut off."""
        found = []
        if self.rows is not None and not self.one_row:
            found.append("rows left out")
        if self.bounds:
            found.append("values beyond bounds")
        if self.groups is not None or self.listed:
            found.append("rows in no group or bin")
        return tuple(found)

    @property
    def listed(self) -> bool:
        """Whether there are bins or categories that a row may be outside of."""
        return False

    def outside(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Returns which rows are in none of the groups, bins or categories."""
        code = self.group_of(chunk)
        return np.zeros(size_of(chunk), dtype=np.bool_) if code is None else code < 0

    def cut_users(self, chunk: Chunk, sizes: Sizes) -> Matrix:
        """Returns a matrix of users by `cuts`: 1 if something of the user is cut off in this way, else 0."""
        found = []
        for cut in self.cuts:
            if cut == "rows left out":
                found.append(sizes > (self.rows or 1))
                continue
            if cut == "values beyond bounds":
                rows = np.zeros(size_of(chunk), dtype=np.bool_)
                for name, (low, high) in self.bounds.items():
                    values, there = self.values_of(name, chunk)
                    beyond = (values < low) | (values > high)
                    rows |= beyond if there is None else beyond & there
            else:
                rows = self.outside(chunk)
            found.append(by_user(rows.astype(np.int64), sizes) > 0)
        return np.column_stack(found).astype(np.float64)

    # ------------------------------------------------------------------ between machines

    def plan(self, clients: int, epsilon: float, delta: float = 0.0, **requirements: Any) -> Planned[Statistic]:
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
        chunk = table.columns(self.needed or table.names[:1])
        found: Vectors = self.vectors(chunk, np.array([size_of(chunk)]))[0].astype(np.float32)
        return found

    def answer(
        self, planned: Planned[Statistic], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> Statistic:
        """Returns the values with their intervals."""
        width = interval_width(confidence, planned.rate, planned.shape(count))
        reading = self.read(mean.reshape(self.blocks, -1), planned.variance(count), count, width)
        said = told(self.statistic, reading, planned.plan, guarantee, count, confidence, self.bounds)
        return Statistic(**said, group_by=self.group_by)

    def group_names(self) -> tuple[str, ...] | None:
        """Returns one text per group."""
        return None if self.groups is None else tuple(", ".join(group) for group in self.groups)


def interval_width(confidence: float, rate: float | None, shape: float = 1.0) -> float:
    """Returns the standard deviations of noise from the middle of an interval to its ends.

    Args:
        confidence: Of the interval.
        rate: 1/t of discrete Laplace noise; None for others, which are like a Gaussian.
        shape: Shares in the sum, over those that make discrete Laplace noise.
    """
    from scipy.special import ndtri

    confidence = _validate.probability("confidence", confidence)
    width = float(-ndtri(0.5 * (1.0 - confidence)))
    if rate is None:
        return width
    # The first rare enough m is outside, by half a unit.
    if shape == 1.0:  # P(|Z| >= m) = 2 e^(-m/t) / (1 + e^(-1/t))
        outside = math.ceil(math.log(2.0 / ((1.0 - confidence) * (1.0 + math.exp(-rate)))) / rate)
    else:
        outside = _outside(confidence, rate, shape)
    return max(width, (outside - 0.5) * math.sqrt(2.0 / shape) * math.sinh(0.5 * rate))


def _outside(confidence: float, rate: float, shape: float) -> int:
    """Returns the first m with P(|X - Y| >= m) <= 1 - `confidence`, X and Y negative binomial of this shape."""
    from scipy.signal import fftconvolve
    from scipy.stats import nbinom

    k = np.arange(math.ceil((48.0 + 8.0 * max(shape, 1.0)) / rate) + 8)
    one_sided = nbinom.pmf(k, shape, -math.expm1(-rate))
    above = fftconvolve(one_sided, one_sided[::-1])[len(k) :]  # at 1, 2, ...
    # The transform is off by less than 1e-11 over all of them.
    beyond = 2.0 * np.cumsum(above[::-1])[::-1] + 1e-11
    return 1 + int(np.count_nonzero(beyond > 1.0 - confidence))


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


def fill_of(missing: Missing, bounds: tuple[float, float] | None) -> float:
    """Returns the number that a missing value counts as, or raises `ParameterError`."""
    if missing == "bounds":
        low, high = bounds or (0.0, 0.0)
        return 0.5 * low + 0.5 * high
    if isinstance(missing, str):
        raise ParameterError(f"Expected missing to be 'drop', 'bounds' or a number, got {missing!r}.")
    return _validate.finite("missing", missing)


def check_one_user(users: int, title: str) -> None:
    """Refuses a table about a single user, since any statistic of it would be about that user."""
    if users < 2:
        raise TableError(f"{title} is about one user only: any statistic would be that user's own.")
