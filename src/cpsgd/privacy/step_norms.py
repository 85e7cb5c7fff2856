"""Rényi divergences of sums without separate noise, where clients' vectors have a bounded norm.

Neighbours that are far apart in a coordinate, from one end of the range to another, have used up their norms there. So
a coordinate in which they have the points x and y is charged with a share of both norms:

    D_α(P_x, P_y) <= rate (w x² + (2 - w) y²)    for all x and y,

hence at most 2 rate N over all coordinates if squared norms add up to N. docs/proofs/bounded-losses.md has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpsgd.mechanisms.law import Array

# The square around zero in which the divergence is bounded by its second derivative, and the points outside of it.
_CENTRE, _POINTS = 1e-3, 60
# Cells are cut into this many squared, at most so often, until their bound is within this of a value that is attained.
_CUT, _DEPTH, _CLOSE = 4, 6, 1.015
# Corners of cells times outputs that are computed in all; seconds. Where more are needed, cells stay as they are.
_MOST = 1e8
_UNIT = 2.0**-53
_ALL_PAIRS = "iv,jv->ij"


@dataclass(frozen=True, eq=False)
class StepSum:
    """The sum beside some number of other clients at 1: its law with the client at x is mass (1 + x ratio).

    Attributes:
        mass: Masses with the client at 0.
        ratio: In (-1, 1), off by at most `error`.
        error: Also of the masses, relative.
        hidden: Upper bound on what outputs that are left out add to a moment.
    """

    mass: Array
    ratio: Array
    error: float
    hidden: float

    def log_moments(self, order: int, x: Array, y: Array, sums: str = "...v,...v->...") -> Array:
        """Returns upper bounds on log Σ P_x^α P_y^(1-α) for each two points; `sums` may ask for all pairs of them."""
        # All terms are positive. Their relative errors: of the ratio, in both powers; of powers and sums.
        least = 1.0 - float(np.max(np.abs(self.ratio))) - self.error
        error = self.error * (2.0 + 2.0 * order / least) + (16.0 + 4.0 * order + len(self.mass)) * _UNIT
        first = np.exp(order * np.log1p(np.multiply.outer(x, self.ratio)))
        second = np.exp((1 - order) * np.log1p(np.multiply.outer(y, self.ratio)))
        moments = np.einsum(sums, first * self.mass, second) * (1.0 + error) + self.hidden
        found: Array = np.log1p(np.maximum(moments - 1.0, 0.0)) * (1.0 + 4.0 * _UNIT) + 2.0 * _UNIT
        return found

    def curvature(self, order: int) -> float:
        """Returns an upper bound on D_α(P_x, P_y) / (x - y)², for points in the centre."""
        size = np.abs(self.ratio) + self.error
        powers = (order - 2) * np.log1p(_CENTRE * size) + (1 - order) * np.log1p(-_CENTRE * size)
        bound = 0.5 * order * float(np.sum(self.mass * size**2 * np.exp(powers)))
        return bound * (1.0 + 2.0 * self.error + 1e-12) + self.hidden / _CENTRE**2


@dataclass(frozen=True)
class Norms:
    """The points that neighbours may have in a coordinate, and how they are charged.

    Attributes:
        largest: The largest |x|.
        weight: w.
        zero: Whether one of the two points is 0.
    """

    largest: float
    weight: float = 1.0
    zero: bool = False

    @property
    def edges(self) -> Array:
        """Points between which rectangles cover all that two neighbours may have, 0 in the middle."""
        steps = np.geomspace(_CENTRE, self.largest, _POINTS)
        return np.concatenate([-steps[::-1], [0.0], steps])

    def charge(self, x: Array, y: Array) -> Array:
        """Returns w x² + (2 - w) y², rounded down."""
        return (self.weight * x * x + (2.0 - self.weight) * y * y) * (1.0 - 8.0 * _UNIT)

    def least_charge(self, cells: Array) -> Array:
        """Returns the smallest charge in each cell."""
        x, y = (
            np.where(low * high <= 0.0, 0.0, np.minimum(np.abs(low), np.abs(high)))
            for low, high in ((cells[:, 0], cells[:, 1]), (cells[:, 2], cells[:, 3]))
        )
        return self.charge(x, y)

    @property
    def farthest(self) -> float:
        """The largest (x - y)² over the charge, by Cauchy and Schwarz."""
        return 1.0 if self.zero else (1.0 / self.weight + 1.0 / (2.0 - self.weight)) * (1.0 + 8.0 * _UNIT)


def attained(background: StepSum, order: int, charging: Sequence[Norms]) -> list[float]:
    """Returns the largest rate at the corners of the first cells for each of `charging`: an estimate of `bound`."""
    edges, found = charging[0].edges, []
    moments = background.log_moments(order, edges, edges, _ALL_PAIRS) / (order - 1)
    for norms in charging:
        charges = np.maximum(norms.charge(edges[:, None], edges), _CENTRE**2)
        if norms.zero:
            charges[np.minimum(np.abs(edges[:, None]), np.abs(edges)) > 0.0] = np.inf
        found.append(max(float(np.max(moments / charges)), background.curvature(order) * norms.farthest))
    return found


def bound(backgrounds: Sequence[StepSum], order: int, norms: Norms, start: float) -> float:
    """Returns a rate for all points and backgrounds, rounded up; `start` is about the answer, or below.

    Moments are convex in both points together, so that in a cell they are largest at a corner.
    """
    found = max(start, *(attained(each, order, [norms])[0] for each in backgrounds))
    left = _MOST
    for background in backgrounds:
        cells, rates = _first_cells(background, order, norms)
        for depth in range(_DEPTH):
            over = rates > found * _CLOSE
            if not np.any(over):
                break
            left -= 4.0 * np.count_nonzero(over) * _CUT**2 * len(background.mass)
            if depth == _DEPTH - 1 or left < 0.0:
                found = float(np.max(rates)) / _CLOSE
                break
            cells = np.concatenate(list(_cut(cells[over], norms.zero)))
            corners = background.log_moments(order, cells[:, [0, 1, 0, 1]], cells[:, [2, 2, 3, 3]])
            rates = _rates(corners.max(axis=1), order, norms, cells)
    return found * _CLOSE * (1.0 + 1e-12)


def _first_cells(background: StepSum, order: int, norms: Norms) -> tuple[Array, Array]:
    """Returns rectangles (x from, x to, y from, y to) that cover all points but the centre's, and their rates."""
    edges, middle = norms.edges, _POINTS
    moments = background.log_moments(order, edges, edges, _ALL_PAIRS)
    spans = np.stack([edges[:-1], edges[1:]], axis=1)
    if norms.zero:
        nothing = np.zeros_like(spans)
        cells = np.concatenate([np.hstack([spans, nothing]), np.hstack([nothing, spans])])
        lines = [moments[:, middle], moments[middle]]
        largest = np.concatenate([np.maximum(line[:-1], line[1:]) for line in lines])
    else:
        cells = np.hstack([np.repeat(spans, len(spans), axis=0), np.tile(spans, (len(spans), 1))])
        beside = np.maximum(moments[:-1], moments[1:])
        largest = np.maximum(beside[:, :-1], beside[:, 1:]).ravel()
    outside = np.max(np.abs(cells), axis=1) > _CENTRE * (1.0 + 1e-9)
    return cells[outside], _rates(largest[outside], order, norms, cells[outside])


def _rates(log_moments: Array, order: int, norms: Norms, cells: Array) -> Array:
    found: Array = log_moments / (order - 1) / norms.least_charge(cells) * (1.0 + 8.0 * _UNIT)
    return found


def _cut(cells: Array, zero: bool) -> Iterator[Array]:
    """Cuts each side of the cells into `_CUT` pieces and yields the parts. Neighbours share their edges exactly.

    If `zero`, one side of each cell has length 0, so that both sides are cut at once.
    """
    spans = [np.linspace(cells[:, side], cells[:, side + 1], _CUT + 1) for side in (0, 2)]
    for i in range(_CUT):
        if zero:
            yield np.stack([*spans[0][i : i + 2], *spans[1][i : i + 2]], axis=1)
        else:
            for j in range(_CUT):
                yield np.stack([*spans[0][i : i + 2], *spans[1][j : j + 2]], axis=1)
