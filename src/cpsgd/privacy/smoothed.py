"""The smoothed Gaussian certificate: many coordinates together are more Gaussian than one.

Let G(w) be the pair N(√w, 1), N(0, 1), and write (A, B) ≼_η G(w) if H_s(A, B) <= H_s(G(w)) + η for all s > 0, and the
same for (B, A). If pair ⊗ G(w) ≼_η G(w + κ(w) t²) for all pairs that a coordinate can have at a distance t, and all
w >= w₀, then a product of coordinates at distances t_j is ≼ G(w_d), w_j = w_{j-1} + κ(w_{j-1}) t_j²: coordinates are
swapped for Gaussians one at a time. With ẽ(x) = e(exp x), e the pair's excess (`cpsgd.privacy.curves`), the pair is
within G(w + Δ) if, for all c,

    R(c) = 2 ∫ ẽ(x) exp(x c/w - x²/(2w) - x/2) dx  <=  J(c) = ∫_w^(w+Δ) √(w/v) exp((c²/2)(1/w - 1/v) - (v-w)/8) dv.

log R is convex in c and log J convex in c², which bounds both between the values of c that are computed.
docs/proofs/smoothed-certificate.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import kernels
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Array
from cpsgd.privacy.curves import Curve, Family

# Distances of the scaled first curve grow by this factor. A tangent of t² is within the square of what it is over 1.
# Where that is more than κ is to be precise by, and decides, the distances are divided into so many.
_RATIO, _CLOSER, _PIECES = 1.25, 1.077, 3
# Comparisons are near to the one that decides if they are within this.
_NEAR = 2e-3
# Where Δ (c/w)² is at most this, J/Δ is flat, and chords will do.
_NARROW = 0.05
# The smallest distance is so small that the kernel of R is constant, to this much, where the curve matters.
_FLAT = 0.12
# Values of w grow by this factor. c/√w runs from -W to W, W one of these, over this many values times W.
_GROWTH, _THRESHOLDS = 1.2, 5.0
_DRAFT_GROWTH, _DRAFT_PRECISION = 1.6, 5e-3
_WIDTHS = (*np.arange(5.0, 12.0, 0.25).tolist(), *np.arange(12.0, 30.5, 0.5).tolist())
_LARGEST_EXPONENT, _SMALLEST_EXPONENT = 300.0, 640.0
_FASTEST, _LOSS = 3.0, 2e-4
# A start is lowered while more than this share of w may be gained.
_WORTHWHILE = 4e-4
# Parts of the interval of v that J is bounded on: more of them where Δ (c/w)² is over these limits.
_PARTS = ((_NARROW, 1), (0.5, 2), (math.inf, 6))
_STEEPEST = 6.0
_TRIES, _PRECISION, _LARGEST_STEP, _WIDEST_CELL = 60, 1e-4, 1e3, 20.0
# How much less precise κ may be where this share of the way is left, and at most.
_CARE, _LEAST_PRECISE = 0.01, 30.0
_SAFE = 1.0 + 1e-8
# Below this, floating point soon has no smaller w.
_SMALLEST_W = 1e-200
# A line in exp(x) that falls over a cell of width h lies over the line in x by less than this times h of its fall.
_BENT = 1.0 / 7.0


@dataclass(frozen=True, eq=False)
class Growth:
    """The growth of w as coordinates are swapped for Gaussians, from which a family's certificates follow.

    Attributes:
        starts: Values of w, rising. Any of them will do as what the adversary is given; the best is taken.
        rates: κ at each, falling; each holds up to the next, the last one from there on.
        reach: The largest distance in a coordinate.
    """

    starts: Array
    rates: Array
    reach: float

    def reached(self, budget: float) -> float:
        """Returns an upper bound on w when the squared distances add up to `budget`."""
        return min(self._reached_from(first, budget) for first in range(len(self.starts)))

    def _reached_from(self, first: int, budget: float) -> float:
        """Returns the bound on w after `budget`, if w begins at `starts[first]`."""
        left = budget * (1.0 + 1e-12)
        for i in range(first, len(self.starts) - 1):
            gap = (self.starts[i + 1] - self.starts[i]) / self.rates[i] * (1.0 - 1e-12)
            if left <= gap:
                return float(self.starts[i] + left * self.rates[i]) * (1.0 + 1e-12)
            left += self._overshoots[first, i + 1] - gap
        return float(self.starts[-1] + left * self.rates[-1]) * (1.0 + 1e-12)

    def affordable(self, w: float) -> float:
        """Returns the largest Σt², rounded down, after which w is at most this; 0 where even the start is more."""
        found = 0.0
        for first in range(len(self.starts)):
            spent = 0.0
            for i in range(first, len(self.starts)):
                last = i + 1 == len(self.starts) or self.starts[i + 1] >= w
                end = w if last else self.starts[i + 1]
                spent += max(0.0, end - self.starts[i]) / self.rates[i]
                if last:
                    break
                spent -= self._overshoots[first, i + 1]
            found = max(found, spent * (1.0 - 1e-9))
        return found

    @cached_property
    def _overshoots(self) -> Array:
        """Σt² that is lost from each start, a row, because a coordinate may step over the n-th value of w, a column.

        A step from between the i-th value and the next, with the rate κ_i, ends less than κ_i T² - (w_n - w_{i+1})
        beyond the n-th, where w should take 1/κ_n - 1/κ_{n-1} more of Σt² than before. It may step over several.
        """
        found = np.zeros((len(self.starts), len(self.starts)))
        for n in range(1, len(self.starts)):
            beyond = np.maximum(self.rates[:n] * self.reach**2 - (self.starts[n] - self.starts[1 : n + 1]), 0.0)
            farthest = np.maximum.accumulate(beyond[::-1])[::-1]
            found[:n, n] = farthest * (1.0 / self.rates[n] - 1.0 / self.rates[n - 1])
        return found * (1.0 + 1e-9)


def growth(families: Sequence[Family], *, around: float, tail: float, draft: bool = False) -> Growth:
    """Returns κ(w) for w up to about `around`.

    Args:
        families: The pairs that a coordinate can have.
        around: The w that the whole product will have, roughly.
        tail: Mass per coordinate that may be spent on thresholds far out, beside what the family leaves out.
        draft: Whether rougher bounds, at fewer w, will do.

    Raises:
        ConditionError: Pairs are too far apart to be smoothed, or next to equal.
    """
    curves = [_Curves(family) for family in families]
    if not around > _SMALLEST_W:
        raise ConditionError("No smoothed certificate is computed: there is next to nothing to smooth.")
    reach = max(family.reach for family in families)
    finest, slowest = (_DRAFT_PRECISION, _DRAFT_GROWTH) if draft else (_PRECISION, _GROWTH)
    w, factor = around, slowest
    values: list[float] = []
    rates: list[float] = []
    while True:
        try:
            # Where little of the way is left κ need not be precise.
            rate, precision = 0.0, max(finest, _PRECISION * min(_CARE * around / w, _LEAST_PRECISE))
            # The costliest first: what is enough for it will mostly do for the others.
            for each in sorted(curves, key=lambda each: each.last_rate, reverse=True):
                rate = max(rate, each.rate(w, tail, rate, precision))
        except _TooRoughError:
            break
        # Where κ hardly changes, or little of the way is left, steps may be longer.
        if rates:
            loss = (rate / rates[-1] - 1.0) * w / around
            factor = min(_FASTEST, factor**1.5) if loss < _LOSS else max(slowest, math.sqrt(factor))
        values.append(w)
        rates.append(rate)
        # From a lower start at most this much of w would be gained.
        if w * rates[0] / rate < _WORTHWHILE * around:
            break
        w /= factor
    if not values:
        raise ConditionError(
            "No smoothed certificate: what one client can change in a coordinate is too large against the whole."
        )
    starts, found = np.array(values[::-1]), np.minimum.accumulate(np.array(rates[::-1]))
    return Growth(starts, found, reach)


def fisher(family: Family) -> float:
    """Returns κ of a small distance at a large w, roughly: 2 ∫ e(s) ds / t² of the first curve."""
    first = family.first
    s = np.exp(first.log_ratios)
    area = float(np.sum(0.5 * (first.excess[1:] + first.excess[:-1]) * np.diff(s)))
    return 2.0 * area / first.distance**2


class _TooRoughError(Exception):
    """Raised inside this module when w is too small for these pairs."""


class _Curves:
    """All curves of a family, at all distances that are needed."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.first = family.first
        self.spread = float(np.max(np.abs(self.first.log_ratios)))
        self.last_rate = fisher(family)
        self._scale = min(1.0, family.reach / self.first.distance)
        self._largest = family.others[-1] if family.others else _scaled(self.first, [self._scale])[0]
        # Which of the widths was the last one needed: for the next, smaller w it is that or more.
        self._width = 0
        # The last w and κ; how fast log κ rises as log w falls, the gap falls as log κ rises; distances that decide.
        self._last, self._rise, self._fall = (0.0, 0.0), 0.0, 1.0
        self._deciding = (math.inf, 0.0)

    def rate(self, w: float, tail: float, least: float = 0.0, precision: float = _PRECISION) -> float:
        """Returns an upper bound on κ(w), within about `precision` of the best; `least` where that is one."""
        largest = self._largest
        farthest = float(np.max(np.abs(largest.log_ratios)))
        # Minus the logarithm of the smallest mass, apart from a cell's width and a scale.
        smallest = farthest * (0.5 * farthest / w + 1.5) - math.log(tail)
        for place in range(self._width, len(_WIDTHS)):
            widest, self._width = _WIDTHS[place], place
            # Far enough out, what is smoothed is under the tail; from there on it only falls.
            end = widest * math.sqrt(w)
            if end < farthest + w:
                continue
            if farthest * (end / w + 0.5) > _LARGEST_EXPONENT or smallest > _SMALLEST_EXPONENT:
                break
            moments = _moments([largest], w, end, 3)[0]
            log_density = -0.5 * (widest - 0.5 * math.sqrt(w)) ** 2
            if math.log(float(np.max(moments))) + log_density <= math.log(tail * math.sqrt(w)):
                thresholds = np.linspace(-end, end, 2 * round(0.5 * _THRESHOLDS * widest) + 1)
                test = _Test(self, w, thresholds, precision)
                found = self._rate(test, least, precision)
                self._deciding = test.divided
                return found
        raise _TooRoughError

    def _rate(self, test: _Test, least: float, precision: float) -> float:
        """Returns approximately the smallest κ that passes the test, by the Illinois method; `least` if that passes."""
        # What is enough for another family is mostly enough for this one, by far.
        if least > 0.0 and test.passes(least):
            return least
        # Where the gap closes is found by false positions; an end that stays counts half as much (Illinois).
        log_w = math.log(test.w)
        start = self._last[1] + self._rise * (self._last[0] - log_w) if self._last[1] else math.log(self.last_rate)
        x, low, high, side = max(start, math.log(least)) if least > 0.0 else start, None, None, 0
        for _ in range(_TRIES):
            gap = test.gap(math.exp(x))
            if gap <= 0.0:
                high = x, gap
                if gap > -precision:
                    break
                low = (low[0], 0.5 * low[1]) if low is not None and side > 0 else low
                side = 1
            else:
                low = x, gap
                high = (high[0], 0.5 * high[1]) if high is not None and side < 0 else high
                side = -1
            if low is not None and high is not None:
                if high[0] - low[0] < 0.1 * precision:
                    break
                x = low[0] + (high[0] - low[0]) * max(0.1, (low[1] + 0.3 * precision) / (low[1] - high[1]))
                x = min(x, 0.9 * high[0] + 0.1 * low[0])
            else:
                x += min(0.3, (gap + 0.3 * precision) / self._fall)
            if math.exp(x) * self._largest.distance**2 > _LARGEST_STEP * test.w:
                break
        if high is None:
            raise _TooRoughError
        if low is not None:
            self._fall = min(max((low[1] - high[1]) / (high[0] - low[0]), 1.0), _STEEPEST)
        if self._last[1]:
            self._rise = min(max(0.0, (high[0] - self._last[1]) / (self._last[0] - log_w)), 1.0)
        self._last, self.last_rate = (log_w, high[0]), math.exp(high[0])
        return self.last_rate * _SAFE

    def scales(self, w: float, end: float) -> list[float]:
        """Returns factors of the first curve, falling to where it is narrow against √w."""
        found = [self._scale]
        smallest = _FLAT / ((end / w + 1.5) * self.spread)
        low, high = self._deciding
        while found[-1] > smallest or len(found) < 2:
            found.append(found[-1] / (_CLOSER if low < found[-1] <= high * _CLOSER else _RATIO))
        return found

    def smallest(self, w: float, end: float, distance: float) -> float:
        """Returns an upper bound on R/t² for all t up to the smallest distance and all c up to `end`.

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


def _scaled(curve: Curve, scales: Sequence[float]) -> list[Curve]:
    """Returns the curves of the mixtures (1 - λ) B + λ A: e_λ(1 + v) = λ e(1 + v/λ)."""
    column = np.array(scales)[:, None]
    moved = np.log1p(column * np.expm1(curve.log_ratios))
    excess = column * (curve.excess * (1.0 + 1e-15))
    return [
        curve if scale == 1.0 else Curve(scale * curve.distance, x, e)
        for scale, x, e in zip(scales, moved, excess, strict=True)
    ]


def _moments(curves: Sequence[Curve], w: float, end: float, thresholds: int) -> Array:
    """Returns upper bounds on R(c), one row per curve, for an odd number of values of c from -end to end.

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
    found = np.empty((len(curves), thresholds))
    # From c = 0 to either side, so that nothing vanishes that would grow again.
    kernels.tilted_sums(_masses(x, e, w), x, end / (thresholds // 2) / w, found)
    return found * (2.0 * _SAFE)


def _masses(x: Array, e: Array, w: float) -> Array:
    """Returns the mass of each cell, divided between its two ends.

    In a cell ẽ is linear in s, hence under ē + δ ξ with ξ from -1 to 1, up to a share h/8 of its fall; the exponent,
    concave in x, lies under its tangent y ξ in the middle. With E_j the averages of ξ^j exp(y ξ) the two ends get
    (h/2) (ē E₀ ± (ē E₁ + δ E₂) + δ E₁).
    """
    mass = np.empty_like(x)
    if kernels.cell_masses(x, e, w, _BENT, mass) > _WIDEST_CELL:
        raise _TooRoughError
    return mass


class _Test:
    """A test of whether κ is large enough at one w: R <= J for all c between the thresholds and all distances.

    Between two distances R lies under its chord. J, as a function of t through Δ = κ t², is convex where
    c² >= v (1 + v/4), v = w + Δ, or Δ <= w/(1 + w/4): there it lies over its tangent at the smaller distance, and chord
    and tangent are compared at both ends. Elsewhere, where c is small, the largest R/t² of the chord is compared with
    J/Δ, an average of a function of v that rises and then falls, at the end where it is the smaller.

    This holds for any distances. They start far from each other; where a comparison decides, more are put between.
    """

    def __init__(self, curves: _Curves, w: float, thresholds: Array, precision: float) -> None:
        self.w, self._curves = w, curves
        self._thresholds, self._c0, self._c1 = thresholds, thresholds[:-1], thresholds[1:]
        self._end, self._count = float(thresholds[-1]), len(thresholds)
        self._longest = 1.0 + math.sqrt(precision)
        # The smallest and largest scale of the first curve between which distances decided.
        self.divided = (math.inf, 0.0)
        scales = curves.scales(w, self._end)[::-1]
        smallest = curves.smallest(w, self._end, scales[0] * curves.first.distance)
        self._smallest = np.array([[math.log(smallest)], [0.0]]) + np.zeros(self._count - 1)
        self._scales = np.array(scales)
        found = [*_scaled(curves.first, scales), *curves.family.others]
        self._measure(np.array([curve.distance for curve in found]), _moments(found, w, self._end, self._count))

    def _measure(self, distances: Array, moments: Array) -> None:
        """Stores R at all distances, and its chords between thresholds."""
        rows, cells = len(distances), self._count - 1
        self._distances, self._values = distances, moments
        self._moments, self._largest = np.empty((2 * rows, cells)), np.empty((2 * (rows - 1), cells))
        kernels.chords(distances, moments, self._thresholds, self._moments, self._largest)

    def passes(self, rate: float) -> bool:
        """Returns whether κ = `rate` is large enough."""
        while True:
            gaps = self._gaps(rate)
            wrong = ~(gaps <= 0.0)
            if not np.any(wrong):
                return True
            if not np.all(self._long[wrong]):
                return False
            self._divide(wrong)

    def gap(self, rate: float) -> float:
        """Returns an upper bound on the largest log R - log J; at most zero if the rate is enough."""
        while True:
            gaps = self._gaps(rate)
            worst, long = int(np.argmax(gaps)), self._long
            if not long[worst] or not math.isfinite(gaps[worst]):
                return float(gaps[worst])
            # Roughly, more distances lower a gap by no more than this; those that stay below another's need none.
            at_least = float(np.max(gaps - np.where(long, 8.0 * (self._ratios - 1.0) ** 2, 0.0)))
            self._divide(long & (gaps >= at_least - _NEAR))

    @property
    def _ratios(self) -> Array:
        """Ratio of each distance to the one before it, 1 for the first."""
        return np.append(1.0, self._distances[1:] / self._distances[:-1])

    @property
    def _long(self) -> NDArray[np.bool_]:
        """Returns, for each distance, whether the gap below it is worth dividing."""
        return (self._ratios > self._longest) & (np.arange(len(self._distances)) < len(self._scales))

    def _divide(self, where: NDArray[np.bool_]) -> None:
        """Inserts `_PIECES` - 1 distances between each marked distance and the one before it, and stores R at them."""
        places = np.flatnonzero(where)
        shares = np.arange(1.0, _PIECES) / _PIECES
        low, high = self._scales[places - 1, None], self._scales[places, None]
        self.divided = min(self.divided[0], float(low[0, 0])), max(self.divided[1], float(high[-1, 0]))
        scales = (low ** (1.0 - shares) * high**shares).ravel()
        curves = _scaled(self._curves.first, scales.tolist())
        moments = _moments(curves, self.w, self._end, self._count)
        before = np.repeat(places, _PIECES - 1)
        self._scales = np.insert(self._scales, before, scales)
        self._measure(
            np.insert(self._distances, before, [curve.distance for curve in curves]),
            np.insert(self._values, before, moments, axis=0),
        )

    def _gaps(self, rate: float) -> Array:
        """Returns upper bounds on log R - log J: up to the first distance, and from each distance to the next."""
        t = self._distances
        average, bend = _averages(self.w, rate * t * t, self._c0, self._c1)
        found = np.empty(len(t))
        chords = self._smallest, self._largest, self._moments
        kernels.gaps(self.w, rate, _NARROW, t, average, bend, *chords, self._c0, self._c1, found)
        return found


def _averages(w: float, widths: Array, c0: Array, c1: Array) -> tuple[Array, Array]:
    """Returns lower bounds on log J/Δ and its slope in c², at c² = (c0² + c1²)/2.

    There is a row per width and a column per cell.
    """
    # The same for c and -c.
    half, cells = (len(c0) + 1) // 2, len(c0)
    squares = (c0 * c0)[:half], (c1 * c1)[:half]
    value, bend = np.empty((2, len(widths), cells))
    start = 0
    for limit, parts in _PARTS:
        stop = int(np.searchsorted(widths * (c1[-1] / w) ** 2, limit))
        value[start:stop, :half], bend[start:stop, :half] = _average(w, widths[start:stop], *squares, parts)
        start = stop
    value[:, half:], bend[:, half:] = value[:, cells // 2 - 1 :: -1], bend[:, cells // 2 - 1 :: -1]
    return value, bend


def _average(w: float, widths: Array, y0: Array, y1: Array, parts: int) -> tuple[Array, Array]:
    """Computes `_averages` for c² between y0 and y1, over equal parts of [w, w + Δ]."""
    value, bend = np.empty((2, len(widths), len(y0)))
    kernels.log_averages(w, widths, y0, y1, parts, value, bend)
    return value, bend
