"""Bounds of columns that nobody has stated: private quantiles of the values, from a small share of the budget.

The values' distribution function over bins whose edges are powers of √2, of both signs, from 2^-20 to 2^40, is found as
for `Quantiles`. The bounds are the edges beyond which a small share of the values lies: half a percent on either side,
or twice the standard deviation of the noise where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import InfeasibleError
from cpsgd.statistics.contributions import Rows
from cpsgd.statistics.questions import Geometry, Planned, Question
from cpsgd.statistics.ranks import rank_points, root, root_geometry
from cpsgd.statistics.results import Reading
from cpsgd.statistics.tables import Chunk, numbers

SHARE = 0.1
"""Share of the budget, in squares of Gaussian shifts, that is spent on the bounds."""

# Share of the values on either side that may be beyond the bounds, where noise is small.
_TAIL = 0.005
MUCH = 0.05
"""With more than this beyond the bounds on either side there is a warning."""
_TOO_MUCH = 0.25

_SIZES = 2.0 ** (0.5 * np.arange(-40, 81))
_EDGES: NDArray[np.float64] = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])


class Ranges(Question):
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
            share = np.maximum.accumulate(root(bins) @ part)
            first = min(int(np.searchsorted(share, tail)), bins - 1)
            last = min(int(np.searchsorted(share, 1.0 - tail)), bins - 1)
            ends.append((_EDGES[first], _EDGES[max(first, last) + 1]))
        low, high = np.array(ends).T[:, None, :]
        return Reading(self.columns, None, 0.5 * (low + high), low, high)


def _tail(variance: float) -> float:
    last = root(len(_EDGES) - 1)[-1]
    return max(_TAIL, 2.0 * math.sqrt(variance * float(last @ last)))


def beyond(asked: Planned) -> float:
    """The share of the values that may be beyond bounds found by this plan, on either side.

    Raises:
        InfeasibleError: It is so large that the bounds would be of no use.
    """
    tail = _tail(asked.variance(asked.protocol.clients))
    if tail > _TOO_MUCH:
        raise InfeasibleError(
            f"{asked.protocol.clients:,} users at this ε are too few to choose bounds privately; state bounds that you "
            "know without the data."
        )
    return tail
