"""Quantiles, and bounds of columns that nobody has stated, from a private distribution function.

Let p be the distribution of values over B bins. The distribution function is M p, M the lower triangle of ones. A
client could send its one-hot row and the server sum up, at a cost of t variances for the first t bins; a tree of
histograms needs log B of them. Better still is the square root of M: R, the lower triangle of the Toeplitz matrix with
entries f₀ = 1, f_k = f_{k-1}(2k - 1)/(2k), for which R R = M (the binomial series of (1 - x)^(-1/2), squared). A client
in bin j sends column j of R; the server multiplies the mean of these by R. The noise of the t-th value is then
V Σ_{k<=t} f_k², about V ln(t)/π, and a column's squared norm is as small. No factorization of M is better by more than
a constant near 1 (Fichtenberger, Henzinger and Upadhyay, "Constant matters", ICML 2023; Henzinger, Upadhyay and
Upadhyay, SODA 2023).

*Distance.* That of two columns of R, the largest of all pairs, is computed; zero stands for rows in none of the groups,
at most the largest norm away. Columns of different groups do not overlap: their squared distance is the sum of their
squared norms. d columns of the table multiply squares by d.

*Bounds* (`Ranges`). The bins' edges are powers of √2, of both signs, from 2^-20 to 2^40, and beyond that of 2^20. From
the median outwards, the bounds are the first edges beyond which only a small share of the values seems to lie: half a
percent on either side, or three standard deviations of the noise where that is more. (From the ends inwards, one of the
many empty bins would often seem to hold that much.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from cpsgd import _validate
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.statistics.questions import Geometry, Matrix
from cpsgd.statistics.results import Reading
from cpsgd.statistics.rows import Bounds, Groups, Missing, RowQuestion
from cpsgd.tables import Chunk

_MOST_BINS = 1 << 12
_REASON = "each vector is made here of columns of the square root of the summation matrix, a mean of them"

MUCH = 0.05
"""Users are warned if a larger share of the values may be beyond the bounds, on either side."""
_TOO_MUCH = 0.25
# Share of the values on either side that may be beyond the bounds, where noise is small; standard deviations where not.
# With fewer of them empty bins often seem to hold values, and bounds are too wide by orders of magnitude.
_TAIL, _DEVIATIONS = 0.005, 3.0
# Few values are as large as the last edge; but to count them as smaller would be an error that nobody sees.
_SIZES = 2.0 ** np.concatenate([0.5 * np.arange(-40, 81), np.arange(60.0, 1001.0, 20.0)])
_EDGES: Matrix = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])


@lru_cache(maxsize=8)
def root(bins: int) -> Matrix:
    """Returns R, the lower triangular square root of the summation matrix.

    Example:
        >>> bool(np.allclose(root(5) @ root(5), np.tril(np.ones((5, 5)))))
        True
    """
    k = np.arange(1, bins)
    series = np.concatenate([[1.0], np.cumprod((2.0 * k - 1.0) / (2.0 * k))])
    lag = np.subtract.outer(np.arange(bins), np.arange(bins))
    matrix = np.where(lag >= 0, series[np.abs(lag)], 0.0)
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=8)
def _root_geometry(bins: int) -> tuple[float, float, float]:
    """Returns the largest norm, pairwise distance and sum of R's columns."""
    gram = root(bins).T @ root(bins)
    squares = np.diag(gram)
    apart = squares[:, None] + squares[None, :] - 2.0 * gram
    # A column's entries are positive and the first column has all that others have.
    added = float(root(bins)[:, 0].sum())
    return math.sqrt(float(squares.max())), math.sqrt(max(0.0, float(apart.max()))), added


def _geometry(columns: int, bins: int, groups: int = 1) -> Geometry:
    """Returns the set of users' vectors: a column of R per column of the table.

    Sums of absolute differences are at most twice the largest sum of a column of R.
    """
    norm, apart, added = _root_geometry(bins)
    apart = max(norm, apart, math.sqrt(2.0) * norm if groups > 1 else 0.0)
    side = math.sqrt(columns)
    return Geometry(groups * columns * bins, side * norm, side * apart, _REASON, columns * added, 2 * columns * added)


def _points_of(question: RowQuestion, name: str, edges: Matrix, chunk: Chunk) -> Matrix:
    """Returns the column of R of each value's bin; values beyond the edges are in the end bins, missing ones zero."""
    values, there = question.values_of(name, chunk)
    bins = len(edges) - 1
    code = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1)
    found = np.ascontiguousarray(root(bins).T)[code]
    return found if there is None else found * there[:, None]


class Quantiles(RowQuestion):
    """Quantiles of each column over the users: each counts once, their rows in equal shares.

    A quantile is found up to the width of a bin, and to the noise of its rank. The interval holds the quantile of the
    table within the bounds (values beyond them moved to them).

    Args:
        bounds: The columns with the bounds of each, which are divided into bins.
        quantiles: Which, each between 0 and 1.
        bins: Bins of equal width.
        group_by: Columns and their (public) groups.
        missing: What a missing value counts as.

    Example:
        >>> asked = Quantiles({"age": (0, 100)}, [0.9], bins=50).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [20.0, 40.0] * 500])
        >>> round(float(found.values[0]), -1)
        40.0
    """

    statistic = "quantiles"

    def __init__(
        self,
        bounds: Bounds,
        quantiles: Sequence[float] = (0.25, 0.5, 0.75),
        *,
        bins: int = 512,
        group_by: Groups | None = None,
        missing: Missing = None,
    ) -> None:
        super().__init__(group_by, bounds, missing=missing)
        if isinstance(quantiles, float | int | str) or not len(quantiles):
            raise ParameterError("Expected quantiles to be a list of numbers between 0 and 1.")
        self.quantiles = tuple(_validate.probability("quantiles", each) for each in quantiles)
        if len(set(self.quantiles)) < len(self.quantiles):
            raise ParameterError(
                "Expected each of quantiles once: a second answer would cost the first one's accuracy."
            )
        self.bins = _validate.integer("bins", bins, low=2, high=_MOST_BINS)
        self._edges = {name: np.linspace(low, high, self.bins + 1) for name, (low, high) in self.bounds.items()}

    @property
    def geometry(self) -> Geometry:
        """Dimension, norms and distances of the users' vectors of R's columns; the module derives them."""
        return _geometry(len(self.columns), self.bins, self.blocks)

    def _points(self, chunk: Chunk) -> Matrix:
        return np.hstack([_points_of(self, name, self._edges[name], chunk) for name in self.columns])

    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of a rank, as a share of the users."""
        last = root(self.bins)[-1]
        return deviation * float(np.linalg.norm(last)) * self.blocks

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns where the noisy distribution function reaches q times its end; see `_quantile`."""
        parts = mean.reshape(self.blocks, len(self.columns), self.bins)
        table = [
            [
                _quantile(self._edges[name], part, q, variance, width, whole=1.0 if self.public else None)
                for name, part in zip(self.columns, block, strict=True)
                for q in self.quantiles
            ]
            for block in parts
        ]
        values, low, high = np.moveaxis(np.array(table), -1, 0)
        return Reading(self.names, self.group_names(), values, low, high)

    @property
    def public(self) -> bool:
        """Whether the number of users behind each quantile is public."""
        return self.groups is None and not self.private_users and self.missing != "drop"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the quantiles."""
        single = len(self.columns) == 1
        return tuple(f"{q:g}" if single else f"{name} {q:g}" for name in self.columns for q in self.quantiles)


def _quantile(
    edges: Matrix, mean: Matrix, q: float, variance: float, width: float, *, whole: float | None
) -> tuple[float, float, float]:
    """Returns a quantile and the ends of its interval, from the mean of columns of R.

    Let F(t) be the share of the users' rows in the bins up to t, W the share in all of them (1 unless there are groups)
    and G(t) = F(t) - qW, estimated with the standard deviation s(t) that follows from R. The quantile is in the bin t*
    with G(t* - 1) < 0 <= G(t*).

    The interval needs two facts: the estimate of G(t*) is at least -z s(t*), and that of G(t* - 1) is at most
    z s(t* - 1). Each fails with half of the probability that z leaves out. Hence t* is not before the first t whose
    estimate is at least -z s(t), and at most one after the last t whose estimate is at most z s(t). Both are checked
    on estimates that were first made non-decreasing. These are nearer to G than s says: 97 to 99 of 100 intervals hold.

    Where bins are wide, intervals always hold. Clients report their bins only, so an interval that is to hold a
    quantile anywhere in a bin must contain the whole bin. Where G changes by many s within t*, the estimate is almost
    certainly in t*. Fewer intervals would hold only if some left out the estimate's own bin.

    Args:
        edges: Edges of the bins.
        mean: The mean of the users' columns.
        q: The quantile, from 0 to 1.
        variance: V, the variance of each coordinate of the mean.
        width: z.
        whole: W where it is public; None where it is the last value of the distribution function.
    """
    matrix = root(len(mean))
    weights = matrix if whole is not None else matrix - q * matrix[-1]
    gap = weights @ mean - (0.0 if whole is None else q * whole)
    slack = width * np.sqrt(variance * np.einsum("ij,ij->i", weights, weights))
    # Between the largest so far and the smallest still to come: a distribution function does not fall.
    rising = 0.5 * (np.maximum.accumulate(gap) + np.minimum.accumulate(gap[::-1])[::-1])
    reached = np.flatnonzero(rising >= -slack)
    first = int(reached[0]) if reached.size else len(mean) - 1
    below = np.flatnonzero(rising <= slack)
    last = min(int(below[-1]) + 1 if below.size else 0, len(mean) - 1)
    place = min(int(np.searchsorted(rising, 0.0)), len(mean) - 1)
    before = rising[place - 1] if place else -q * (1.0 if whole is None else whole)
    share = float(np.clip(-before / (rising[place] - before), 0.0, 1.0)) if rising[place] > before else 0.5
    value = edges[place] + share * (edges[place + 1] - edges[place])
    low, high = float(edges[min(first, place)]), float(edges[max(last, place) + 1])
    return float(value), low, high


class Ranges(RowQuestion):
    """The question for private bounds: powers of √2 between which most values of each column lie."""

    statistic = "ranges"

    def __init__(self, columns: Sequence[str], missing: Missing = None) -> None:
        super().__init__(None, None, columns, missing)

    @property
    def geometry(self) -> Geometry:
        """Dimension, norms and distances of the users' vectors; the module derives them."""
        return _geometry(len(self.columns), len(_EDGES) - 1)

    def _points(self, chunk: Chunk) -> Matrix:
        return np.hstack([_points_of(self, name, _EDGES, chunk) for name in self.columns])

    def error(self, deviation: float, users: float) -> float:
        """Returns the standard error of a rank, as a share of the users."""
        return _deviation(deviation**2)

    def read(self, mean: Matrix, variance: float, users: float, width: float) -> Reading:
        """Returns the private bounds of each column, as the low and high ends of an interval."""
        bins = len(_EDGES) - 1
        ends = []
        for part in mean.reshape(len(self.columns), bins):
            share = root(bins) @ part  # of the values in bins up to each
            # Where values may be missing, of those that are there; at least a tenth, or there would be noise alone.
            whole = max(float(share[-1]), 0.1) if self.missing == "drop" else 1.0
            share, tail = share / whole, _tail(variance / whole**2)
            median = min(int(np.searchsorted(np.maximum.accumulate(share), 0.5)), bins - 1)
            few = np.flatnonzero(share[:median] <= tail)
            most = np.flatnonzero(share[median:-1] >= 1.0 - tail)
            first = int(few[-1]) + 1 if few.size else 0
            last = median + int(most[0]) if most.size else bins - 1
            ends.append((_EDGES[first], _EDGES[last + 1]))
        low, high = np.array(ends).T[:, None, :]
        return Reading(self.columns, None, 0.5 * (low + high), low, high)


def _tail(variance: float) -> float:
    return max(_TAIL, _DEVIATIONS * _deviation(variance))


def _deviation(variance: float) -> float:
    """Returns the standard deviation of the noise in the distribution function, at its largest."""
    last = root(len(_EDGES) - 1)[-1]
    return math.sqrt(variance * float(last @ last))


def beyond(columns: Sequence[str], deviation: float, users: float) -> float:
    """Returns the share of the values that may be beyond the bounds that are found, on either side.

    It is the share that seems to be beyond them, and two standard deviations.

    Args:
        columns: The columns without bounds.
        deviation: Of a coordinate of the mean.
        users: Number of users.

    Raises:
        InfeasibleError: The share is so large that the bounds would be useless.
    """
    share = _tail(deviation**2) + 2.0 * _deviation(deviation**2)
    if share > _TOO_MUCH:
        raise InfeasibleError(
            f"There are no bounds for {', '.join(columns)}, and {users:,.0f} users at this ε are too few to choose "
            "them privately; state bounds that you know without the data."
        )
    return share
