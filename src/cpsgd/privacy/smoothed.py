"""The smoothed Gaussian certificate: many coordinates together are more Gaussian than one.

The Gaussian certificate asks of every single coordinate that it be as private as a Gaussian, at its worst threshold.
But a round has many coordinates, and their product is far smoother. Let G(w) be the pair N(√w, 1), N(0, 1), and write
(A, B) ≼_η G(w) if H_s(A, B) <= H_s(G(w)) + η for all s > 0, and the same for (B, A). If

    pair ⊗ G(w) ≼_η G(w + κ(w) t²)    for all pairs that a coordinate can have at a distance t, and all w >= w₀,

then a product of coordinates at distances t_j is ≼ G(w_d), w_j = w_{j-1} + κ(w_{j-1}) t_j², with η for each: give the
adversary G(w₀) for free and swap coordinates for Gaussians one at a time. The round is √w_d-GDP up to a tail, as with
the Gaussian certificate, and rounds are simply more coordinates.

**One integral.** Let e be the pair's excess (`cpsgd.privacy.curves`) and ẽ(x) = e(exp x). Then

    H_exp(c)(pair ⊗ G(w)) - H_exp(c)(G(w)) = ∫ ẽ(x) φ((x - c)/√w + √w/2) dx/√w,

a Gaussian average of positive numbers, and, since ∂/∂v H_exp(c)(G(v)) = φ(√v/2 - c/√v)/(2√v), the pair is within
G(w + Δ) if, for all c,

    R(c) = 2 ∫ ẽ(x) exp(x c/w - x²/(2w) - x/2) dx  <=  J(c) = ∫_w^(w+Δ) √(w/v) exp((c²/2)(1/w - 1/v) - (v-w)/8) dv.

Nothing cancels, so distances however small are compared to full relative accuracy. log R is convex in c and log J
convex in c², which bounds both between the values of c that are computed. The proofs are in docs/accounting.md,
section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Array
from cpsgd.privacy.curves import Curve, Family

# Distances of the scaled first curve grow by this factor; the chord of t² is within 0.03 % of it.
_RATIO = 1.03
# The smallest distance is so small that the kernel of R is constant, to this much, where the curve matters.
_FLAT = 0.1
# Values of w grow by this factor. c/√w runs from -W to W, W one of these, over so many values times W.
_GROWTH, _THRESHOLDS = 1.2, 7.0
_WIDTHS = (6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 17.0, 20.0, 25.0, 30.0)
_LARGEST_EXPONENT = 600.0
_FASTEST, _FLAT_RATE = 3.0, 1e-3
# Nothing is gained by a start below this share of w.
_LEAST_START = 3e-4
# Parts of the interval of v that J is bounded on: more of them where Δ (c/w)² is over these limits.
_PARTS = ((0.05, 1), (0.5, 4), (math.inf, 12))
# Edges between two distances are so close that R/t² changes by less than this.
_PIECE, _MOST_PIECES = 2e-3, 12
# κ is found to this where small steps do not lead to it.
_PRECISION = 0.005
_SAFE = 1.0 + 1e-8


@dataclass(frozen=True, eq=False)
class Growth:
    """How w grows as coordinates are swapped for Gaussians: what a family's certificates follow from.

    Attributes:
        starts: Values of w, rising. Any of them will do as what the adversary is given; the best is taken.
        rates: κ at each, falling; each holds up to the next, the last one from there on.
        reach: The largest distance in a coordinate.
    """

    starts: Array
    rates: Array
    reach: float

    def reached(self, budget: float) -> float:
        """Upper bound on w when the squared distances add up to `budget`."""
        return min(self._reached(first, budget) for first in range(len(self.starts)))

    def affordable(self, w: float) -> float:
        """The largest Σt², rounded down, after which w is at most this; 0 where even the start is more."""
        return max(self._affordable(first, w) for first in range(len(self.starts)))

    def _reached(self, first: int, budget: float) -> float:
        left = (budget + self._overshoots[first]) * (1.0 + 1e-12)
        for w, following, rate in self._steps[first:]:
            enough = (following - w) / rate * (1.0 - 1e-12)
            if left <= enough:
                return (w + left * rate) * (1.0 + 1e-12)
            left -= enough
        raise AssertionError("the last rate has no end")

    def _affordable(self, first: int, w: float) -> float:
        spent = math.fsum(max(0.0, min(w, following) - start) / rate for start, following, rate in self._steps[first:])
        return max(0.0, spent * (1.0 - 1e-9) - self._overshoots[first])

    @cached_property
    def _steps(self) -> list[tuple[float, float, float]]:
        starts = [float(w) for w in self.starts]
        return list(zip(starts, [*starts[1:], math.inf], [float(rate) for rate in self.rates], strict=True))

    @cached_property
    def _overshoots(self) -> list[float]:
        """Σt² that coordinates may gain by a step from below a value of w to beyond it, for each start.

        A step from between the i-th value and the next ends less than κ_i T² - (w_n - w_{i+1}) beyond the n-th, where a
        unit of w should take 1/κ_n of Σt² and took only 1/κ_{n-1}, or even less. Each value is stepped over once.
        """
        found = np.zeros(len(self.starts))
        for n in range(1, len(self.starts)):
            beyond = self.rates[:n] * self.reach**2 - (self.starts[n] - self.starts[1 : n + 1])
            # From a later start there are fewer places to come from.
            most = np.maximum.accumulate(np.maximum(beyond, 0.0)[::-1])[::-1]
            found[:n] += most * (1.0 / self.rates[n] - 1.0 / self.rates[n - 1])
        return [float(lost) for lost in found * (1.0 + 1e-12)]


def growth(families: Sequence[Family], *, around: float, tail: float) -> Growth:
    """κ(w) for w up to about `around`.

    Args:
        families: The pairs that a coordinate can have.
        around: The w that the whole product will have, roughly.
        tail: Mass per coordinate that may be spent on thresholds far out, beside what the family leaves out.

    Raises:
        ConditionError: Pairs are too far apart to be smoothed.
    """
    curves = [_Curves(family) for family in families]
    reach = max(family.reach for family in families)
    w, factor = around, _GROWTH
    values: list[float] = []
    rates: list[float] = []
    while True:
        try:
            rate = 0.0
            # The costliest first: what is enough for it will mostly do for the others.
            for each in sorted(curves, key=lambda each: each.last_rate, reverse=True):
                rate = max(rate, each.rate(w, tail, rate))
        except _TooRoughError:
            break
        # Where κ hardly changes, steps may be longer.
        if rates:
            factor = min(_FASTEST, factor * factor) if rate < rates[-1] * (1.0 + _FLAT_RATE) else _GROWTH
        values.append(w)
        rates.append(rate)
        if w < _LEAST_START * around:
            break
        w /= factor
    if not values:
        raise ConditionError(
            "No smoothed certificate: what one client can change in a coordinate is too large against the whole."
        )
    starts, found = np.array(values[::-1]), np.minimum.accumulate(np.array(rates[::-1]))
    return Growth(starts, found, reach)


def fisher(family: Family) -> float:
    """κ of a small distance at a large w, roughly: 2 ∫ e(s) ds / t² of the first curve."""
    first = family.first
    s = np.exp(first.log_ratios)
    area = float(np.sum(0.5 * (first.excess[1:] + first.excess[:-1]) * np.diff(s)))
    return 2.0 * area / first.distance**2


class _TooRoughError(Exception):
    """W is too small for these pairs."""


class _Curves:
    """All curves of a family, at all distances that are needed."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.first = family.first
        self.spread = float(np.max(np.abs(self.first.log_ratios)))
        self.last_rate = fisher(family)

    def rate(self, w: float, tail: float, least: float) -> float:
        """Upper bound on κ(w); `least` if that is one."""
        largest = self.family.others[-1] if self.family.others else self.first
        farthest = float(np.max(np.abs(largest.log_ratios)))
        # The logarithm of the smallest number below, apart from a cell's width and a scale.
        smallest = 0.5 * farthest * farthest / w + 1.5 * farthest - math.log(tail)
        for widest in _WIDTHS:
            # Far enough out, what is smoothed is under the tail; from there on it only falls.
            end = widest * math.sqrt(w)
            if end < farthest + w or max(farthest * end / w, smallest) > _LARGEST_EXPONENT:
                continue
            moments = _moments([largest], w, end, 3)[0]
            log_density = -0.5 * (widest - 0.5 * math.sqrt(w)) ** 2
            if math.log(float(np.max(moments))) + log_density <= math.log(tail * math.sqrt(w)):
                return self._rate(w, end, 2 * round(0.5 * _THRESHOLDS * widest) + 1, least)
        raise _TooRoughError

    def _rate(self, w: float, end: float, thresholds: int, least: float) -> float:
        curves = self._nodes(w, end)
        c = np.linspace(-end, end, thresholds)
        moments = _moments(curves, w, end, thresholds)
        distances = np.array([curve.distance for curve in curves])
        edges, bounds = _between(distances, moments, self.last_rate * (end / w) ** 2)
        smallest = np.full((1, thresholds), self._smallest(w, end, curves[0].distance))
        log_bounds = np.log(np.vstack([smallest, bounds]))
        squares = np.square(np.append(0.0, edges))
        low, rate, step = 0.0, max(self.last_rate, least), 0.01
        # J/Δ rises with κ where c is large, so what is needed falls: small steps at first.
        while not (found := _needed(log_bounds, c, w, rate * squares)) <= rate:
            # It grows by a little more each time, so that this ends.
            low, rate, step = rate, min(found, (1.0 + step) * rate) * (1.0 + 1e-4 * step), 1.5 * step
            if not rate * squares[-1] <= 100.0 * w:
                raise _TooRoughError
        while low > 0.0 and rate > (1.0 + _PRECISION) * low:
            middle = math.sqrt(low * rate)
            enough = _needed(log_bounds, c, w, middle * squares) <= middle
            low, rate = (low, middle) if enough else (middle, rate)
        self.last_rate = rate
        return rate * _SAFE

    def _nodes(self, w: float, end: float) -> list[Curve]:
        """The first curve, scaled down to where it is narrow against √w, and the others."""
        first, reach = self.first, self.family.reach
        smallest = _FLAT / ((end / w + 1.5) * self.spread)
        most = min(1.0, reach / first.distance)
        count = max(1, math.ceil(math.log(most / min(most, smallest)) / math.log(_RATIO)))
        curves = [_scaled(first, float(most * _RATIO**-i)) for i in range(count, -1, -1)]
        return [*curves, *self.family.others]

    def _smallest(self, w: float, end: float, distance: float) -> float:
        """Upper bound on R/t² for all t up to the smallest distance and all c up to `end`.

        With t = λ t₁ it is 2/t₁² ∫ e(1 + u) k(λ u) du, and with b = c/w - 3/2 the kernel is k(v) <= (1 + v)^b <=
        1 + b v + v² (|b| + 1)² exp(1.4 (|b| + 2)|v|)/2 for |v| <= ½.
        """
        first = self.first
        u = np.expm1(first.log_ratios)
        scale, steep = distance / first.distance, end / w + 1.5
        largest = scale * float(np.max(np.abs(u)))
        if largest > 0.5:
            raise _TooRoughError
        cells, middle = 0.5 * (first.excess[1:] + first.excess[:-1]) * np.diff(u), 0.5 * (u[1:] + u[:-1])
        farther = np.maximum(np.abs(u[1:]), np.abs(u[:-1]))
        # The mean of u in a cell of a linear e is off its middle by at most a sixth of the fall.
        mean = float(cells @ middle)
        spread = float(np.sum(np.abs(np.diff(first.excess)) * np.diff(u) ** 2)) / 12.0
        bend = 0.5 * (scale * (steep + 1.0)) ** 2 * math.exp(1.4 * (steep + 2.0) * largest)
        total = float(cells.sum()) + scale * steep * (abs(mean) + spread) + bend * float(cells @ (farther * farther))
        return 2.0 / first.distance**2 * total * _SAFE


def _scaled(curve: Curve, scale: float) -> Curve:
    """The curve of the mixture (1 - λ) B + λ A: e_λ(1 + v) = λ e(1 + v/λ)."""
    if scale == 1.0:
        return curve
    moved = np.log1p(scale * np.expm1(curve.log_ratios))
    return Curve(scale * curve.distance, moved, scale * curve.excess * (1.0 + 1e-15))


def _moments(curves: Sequence[Curve], w: float, end: float, thresholds: int) -> Array:
    """Upper bounds on R(c), one row per curve, for so many values of c, an odd number, from -end to end.

    The measure ẽ(x) exp(-x²/(2w) - x/2) dx of each cell is moved to the cell's ends with its mean kept, which only
    increases the integral of exp(x c/w), convex in x.
    """
    # Shorter curves end in cells of no width.
    longest = max(len(curve.excess) for curve in curves)
    x, e = np.empty((2, len(curves), longest))
    for i, curve in enumerate(curves):
        size = len(curve.excess)
        x[i, :size], x[i, size:] = curve.log_ratios, curve.log_ratios[-1]
        e[i, :size], e[i, size:] = curve.excess, curve.excess[-1]
    mass = _masses(x, e, w)
    found, middle = np.empty((len(curves), thresholds)), thresholds // 2
    # From c = 0 on to either side, so that nothing that grows has vanished before.
    for sign in (1, -1):
        term, factor = 2.0 * mass, np.exp(sign * end / middle / w * x)
        for k in range(middle + 1):
            np.einsum("ij->i", term, out=found[:, middle + sign * k])
            term *= factor
    return found * _SAFE


def _masses(x: Array, e: Array, w: float) -> Array:
    """The measure of the cells at their ends.

    In a cell ẽ is linear in s, hence under ē + δ ξ with ξ from -1 to 1, up to the share h/7 of its fall; the exponent,
    concave in x, lies under its tangent y ξ in the middle. With E_j the averages of ξ^j exp(y ξ) the two ends get
    (h/2) (ē E₀ ± (ē E₁ + δ E₂) + δ E₁).
    """
    width, middle = np.diff(x), 0.5 * (x[:, 1:] + x[:, :-1])
    bent = np.maximum(0.0, e[:, :-1] - e[:, 1:]) * width / 7.0
    mean, half = 0.5 * (e[:, 1:] + e[:, :-1]) + bent, 0.5 * (e[:, 1:] - e[:, :-1])
    y = -(middle / w + 0.5) * 0.5 * width
    if float(np.max(np.abs(y))) > 1.0:
        raise _TooRoughError
    z = y * y
    even = 1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z * (1 / 362880 + z / 39916800))))
    odd = y * (1 / 3 + z * (1 / 30 + z * (1 / 840 + z * (1 / 45360 + z * (1 / 3991680 + z / 518918400)))))
    square = 1 / 3 + z * (1 / 10 + z * (1 / 168 + z * (1 / 6480 + z * (1 / 443520 + z / 47174400))))
    scale = 0.5 * width * np.exp(-middle * (0.5 * middle / w + 0.5))
    both, apart = mean * even + half * odd, mean * odd + half * square
    mass = np.zeros_like(x)
    mass[:, 1:] += scale * (both + apart)
    mass[:, :-1] += scale * (both - apart)
    return mass


def _between(distances: Array, moments: Array, change: float) -> tuple[Array, Array]:
    """Bounds on R(c)/t² between neighbouring distances, and between further edges where it changes with t.

    Between two distances R lies under its chord a + b t, and (a + b t)/t² is largest at an edge or at 1/t = -b/(2a).

    Args:
        distances: Where R is known.
        moments: R, one row per distance.
        change: R/t² at the largest c grows by about this times t², relatively.
    """
    steps = np.diff(np.square(distances)) * change / _PIECE
    pieces = np.clip(np.ceil(steps), 1, _MOST_PIECES).astype(np.int64)
    row = np.repeat(np.arange(len(pieces)), pieces)
    place = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) / pieces[row]
    start, width = distances[:-1][row], np.diff(distances)[row]
    edges = np.append(start + width * place, distances[-1])
    b = np.diff(moments, axis=0) / np.diff(distances)[:, None]
    a = (moments[:-1] - b * distances[:-1, None])[row]
    b = b[row]
    near, far = 1.0 / edges[:-1, None], 1.0 / edges[1:, None]
    vertex = np.clip(-0.5 * b / np.minimum(a, -1e-300), far, near)
    largest = np.maximum(np.maximum((a * near + b) * near, (a * far + b) * far), (a * vertex + b) * vertex)
    return edges, largest * (1.0 + 1e-11)


def _needed(log_bounds: Array, thresholds: Array, w: float, widths: Array) -> float:
    """The smallest κ with R/t² <= κ J/Δ for all c and all t, given bounds on log R/t² between neighbouring edges.

    `widths` are the Δ at the edges. J/Δ, an average of a function of v that rises and then falls, is smallest at an
    edge. It is an average of exp(A + B c²): on each part of [w, w + Δ] the mean of the exponent is bounded below, since
    1/v lies under its chord and log v under its tangent.
    """
    c0, c1 = thresholds[:-1], thresholds[1:]
    # Between two thresholds log R lies under its chord, and log J, convex in c², over its tangent in between.
    y = 0.5 * (c0 * c0 + c1 * c1)
    value, bend = np.empty((2, len(widths), len(y)))
    # Both are the same for c and -c.
    half, start = (len(y) + 1) // 2, 0
    for limit, parts in _PARTS:
        stop = int(np.searchsorted(widths * (thresholds[-1] / w) ** 2, limit))
        value[start:stop, :half], bend[start:stop, :half] = _average(w, widths[start:stop], y[:half], parts)
        start = stop
    value[:, half:], bend[:, half:] = value[:, len(y) // 2 - 1 :: -1], bend[:, len(y) // 2 - 1 :: -1]
    rise = (log_bounds[:, 1:] - log_bounds[:, :-1]) / (c1 - c0)
    found = -math.inf
    for edge in (slice(0, -1), slice(1, None)):
        low, curve = value[edge], bend[edge]
        vertex = np.clip(rise / (2.0 * np.maximum(curve, 1e-300)), c0, c1)
        for c in (c0, c1, vertex):
            here = log_bounds[:, :-1] + rise * (c - c0) - low - curve * (c * c - y)
            found = max(found, float(np.max(here)))
    return math.exp(min(found, 600.0)) * (1.0 + 1e-11)


def _average(w: float, widths: Array, y: Array, parts: int) -> tuple[Array, Array]:
    """Lower bounds on log J/Δ at c² = y, and its slope there: one row per width Δ."""
    edges = w + widths[:, None] * np.arange(parts + 1) / parts
    low, high, middle = edges[:, :-1], edges[:, 1:], 0.5 * (edges[:, :-1] + edges[:, 1:])
    constant = -0.5 * np.log(middle / w) - (middle - w) / 8.0
    quadratic = 0.25 * ((low - w) / (w * low) + (high - w) / (w * high))
    if parts == 1:
        return constant + quadratic * y, np.broadcast_to(quadratic, (len(widths), len(y)))
    terms = constant[:, None, :] + quadratic[:, None, :] * y[None, :, None]
    top = np.max(terms, axis=2)
    weights = np.exp(terms - top[:, :, None])
    total = np.einsum("icp->ic", weights)
    return top + np.log(total / parts), np.einsum("icp,ip->ic", weights, quadratic) / total
