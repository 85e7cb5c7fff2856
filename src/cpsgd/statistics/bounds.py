"""Bounds of columns that nobody has stated: private quantiles of the values, from a small share of the budget.

The values' distribution function over bins whose edges are powers of √2, of both signs, from 2^-20 to 2^40, and beyond
that of 2^20, is found as for `Quantiles`. From the median outwards, the bounds are the first edges beyond which only a
small share of the values seems to lie: half a percent on either side, or three standard deviations of the noise where
that is more. (From the ends inwards, one of the many empty bins would often seem to hold that much.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import InfeasibleError
from cpsgd.statistics.columns import Chunk, numbers
from cpsgd.statistics.contributions import Rows
from cpsgd.statistics.questions import Geometry, Planned, RowQuestion
from cpsgd.statistics.ranks import rank_points, root, root_geometry
from cpsgd.statistics.results import Reading, Statistic

SHARE = 0.1
"""Share of the budget, in squares of Gaussian shifts, that is spent on the bounds."""

# Share of the values on either side that may be beyond the bounds, where noise is small; standard deviations where not.
# With fewer of them empty bins often seem to hold values, and bounds are too wide by orders of magnitude.
_TAIL, _DEVIATIONS = 0.005, 3.0
MUCH = 0.05
"""With more than this beyond the bounds on either side there is a warning."""
_TOO_MUCH = 0.25

# Few values are as large as the last; but to count them as smaller would be an error that nobody sees.
_SIZES = 2.0 ** np.concatenate([0.5 * np.arange(-40, 81), np.arange(60.0, 1001.0, 20.0)])
_EDGES: NDArray[np.float64] = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])


class Ranges(RowQuestion):
    """Between which powers of √2 most values of each column are.

    *Distance.* As of `Quantiles`: columns of R, one per column of the table.
    """

    statistic = "ranges"

    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__(None)
        self.columns, self.bounds = tuple(columns), {}

    @property
    def geometry(self) -> Geometry:
        """See the class."""
        bins, d = len(_EDGES) - 1, len(self.columns)
        norm, apart = root_geometry(bins)
        reason = "each vector is made here of columns of the square root of the summation matrix, a mean of them"
        return Geometry(d * bins, math.sqrt(d) * norm, math.sqrt(d) * max(norm, apart), reason)

    def _points(self, chunk: Chunk) -> Rows:
        return np.hstack([rank_points(_EDGES, numbers(name, chunk[name])) for name in self.columns])

    def read(self, mean: NDArray[np.float64], variance: float, users: int, width: float) -> Reading:
        """The bounds as intervals."""
        bins = len(_EDGES) - 1
        tail = _tail(variance)
        ends = []
        for part in mean.reshape(len(self.columns), bins):
            share = root(bins) @ part  # of the values in bins up to each
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
    """Of the noise in the distribution function, at its largest."""
    last = root(len(_EDGES) - 1)[-1]
    return math.sqrt(variance * float(last @ last))


def beyond(asked: Planned[Statistic]) -> float:
    """The share of the values that may be beyond bounds found by this plan, on either side.

    What seems to be the tail is that but for two standard deviations.

    Raises:
        InfeasibleError: It is so large that the bounds would be of no use.
    """
    variance = asked.variance(asked.protocol.clients)
    share = _tail(variance) + 2.0 * _deviation(variance)
    if share > _TOO_MUCH:
        raise InfeasibleError(
            f"{asked.protocol.clients:,} users at this ε are too few to choose bounds privately; state bounds that you "
            "know without the data."
        )
    return share
