"""Quantiles, from a private distribution function.

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
squared norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.statistics.columns import Chunk, numbers
from cpsgd.statistics.contributions import Rows
from cpsgd.statistics.questions import Bounds, Geometry, Groups, RowQuestion, check_bounds
from cpsgd.statistics.results import Reading

_MOST_BINS = 1 << 12
_REASON = "each vector is made here of columns of the square root of the summation matrix, a mean of them"


@lru_cache(maxsize=8)
def root(bins: int) -> NDArray[np.float64]:
    """R, the lower triangular square root of the matrix that sums up.

    Example:
        >>> bool(np.allclose(root(5) @ root(5), np.tril(np.ones((5, 5)))))
        True
    """
    k = np.arange(1, bins)
    series = np.concatenate([[1.0], np.cumprod((2.0 * k - 1.0) / (2.0 * k))])
    lag = np.subtract.outer(np.arange(bins), np.arange(bins))
    found = np.where(lag >= 0, series[np.abs(lag)], 0.0)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=8)
def root_geometry(bins: int) -> tuple[float, float]:
    """The largest norm of R's columns, and the largest distance of two of them."""
    matrix = root(bins)
    gram = matrix.T @ matrix
    squares = np.diag(gram)
    apart = squares[:, None] + squares[None, :] - 2.0 * gram
    return math.sqrt(float(squares.max())), math.sqrt(max(0.0, float(apart.max())))


def rank_points(edges: NDArray[np.float64], values: NDArray[np.float64]) -> Rows:
    """What rows with these values send: the column of R of their bin; values beyond the edges are in the end bins."""
    bins = len(edges) - 1
    code = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1)
    return np.ascontiguousarray(root(bins).T)[code]


class Quantiles(RowQuestion):
    """Quantiles of each column, over the users: each counts once, their rows in equal shares.

    A quantile is found up to the width of a bin, and to the noise of its rank. The interval holds the quantile of the
    table within the bounds (values beyond them moved to them).

    Args:
        bounds: The columns with the bounds of each, which are divided into bins.
        quantiles: Which, each between 0 and 1.
        bins: Bins of equal width.
        group_by: One column and its (public) groups.

    Example:
        >>> asked = Quantiles({"age": (0, 100)}, [0.9], bins=50).plan(
        ...     clients=1000, epsilon=4.0, delta=1e-6, mechanism="rounded-gaussian"
        ... )
        >>> found = asked.aggregate([asked.encode(value) for value in [20.0, 40.0] * 500])
        >>> bool(abs(found.values[0] - 40) < 3)
        True
    """

    statistic = "quantiles"

    def __init__(
        self,
        bounds: Bounds,
        quantiles: Sequence[float] = (0.25, 0.5, 0.75),
        *,
        bins: int = 512,
        group_by: Groups | None = None,
    ) -> None:
        super().__init__(group_by)
        self.bounds = check_bounds(bounds)
        self.columns = tuple(self.bounds)
        if isinstance(quantiles, float | int | str) or not len(quantiles):
            raise ParameterError("Expected quantiles to be a list of numbers between 0 and 1.")
        self.quantiles = tuple(_validate.probability("quantiles", each) for each in quantiles)
        self._bins = _validate.integer("bins", bins, low=2, high=_MOST_BINS)
        self._edges = {name: np.linspace(low, high, self._bins + 1) for name, (low, high) in self.bounds.items()}

    @property
    def geometry(self) -> Geometry:
        """See the module; d columns multiply squares by d."""
        norm, apart = root_geometry(self._bins)
        if self.blocks > 1:
            apart = max(apart, math.sqrt(2.0) * norm)
        d = len(self.columns)
        return Geometry(self.blocks * d * self._bins, math.sqrt(d) * norm, math.sqrt(d) * max(norm, apart), _REASON)

    def _points(self, chunk: Chunk) -> Rows:
        return np.hstack([rank_points(self._edges[name], numbers(name, chunk[name])) for name in self.columns])

    def read(self, mean: NDArray[np.float64], variance: float, users: int, width: float) -> Reading:
        """Where the noisy distribution function reaches q times its end; see `quantile`."""
        parts = mean.reshape(self.blocks, len(self.columns), self._bins)
        found = [
            [
                quantile(self._edges[name], part, q, variance, width, whole=None if self.groups else 1.0)
                for name, part in zip(self.columns, block, strict=True)
                for q in self.quantiles
            ]
            for block in parts
        ]
        values, low, high = np.moveaxis(np.array(found), -1, 0)
        single = len(self.columns) == 1
        names = tuple(f"{q:g}" if single else f"{name} {q:g}" for name in self.columns for q in self.quantiles)
        return Reading(names, self.groups, values, low, high)


def quantile(
    edges: NDArray[np.float64],
    mean: NDArray[np.float64],
    q: float,
    variance: float,
    width: float,
    *,
    whole: float | None,
) -> tuple[float, float, float]:
    """A quantile with its interval, from the mean of columns of R.

    Let F(t) be the share of the users' rows in the bins up to t, W the share in all of them (1 unless there are groups)
    and G(t) = F(t) - qW, estimated with the standard deviation s(t) that follows from R. The quantile is in the bin t*
    with G(t* - 1) < 0 <= G(t*). So the estimate of G(t*) is at least -z s(t*) but for half of what z leaves out, and
    that of G(t* - 1) at most z s(t* - 1) but for the other half: t* is neither before the first t for which the former
    holds, nor after the last for which the latter does, and one more.

    Args:
        edges: Of the bins.
        mean: The mean of the users' columns.
        q: Which quantile.
        variance: V, of each coordinate of the mean.
        width: z.
        whole: W where it is public; None where it is the last value of the distribution function.
    """
    matrix = root(len(mean))
    weights = matrix if whole is not None else matrix - q * matrix[-1]
    gap = weights @ mean - (0.0 if whole is None else q * whole)
    slack = width * np.sqrt(variance * np.einsum("ij,ij->i", weights, weights))
    reached = np.flatnonzero(gap >= -slack)
    first = int(reached[0]) if reached.size else len(mean) - 1
    below = np.flatnonzero(gap <= slack)
    last = min(int(below[-1]) + 1 if below.size else 0, len(mean) - 1)
    # Between the largest so far and the smallest still to come: a distribution function does not fall.
    rising = 0.5 * (np.maximum.accumulate(gap) + np.minimum.accumulate(gap[::-1])[::-1])
    place = min(int(np.searchsorted(rising, 0.0)), len(mean) - 1)
    before = rising[place - 1] if place else -q * (1.0 if whole is None else whole)
    share = float(np.clip(-before / (rising[place] - before), 0.0, 1.0)) if rising[place] > before else 0.5
    value = edges[place] + share * (edges[place + 1] - edges[place])
    low, high = float(edges[min(first, place)]), float(edges[max(last, place) + 1])
    return float(value), low, high
