"""Excess curves: how well two neighbours can be told apart by one coordinate of a sum.

With H_s(A, B) = sup over events E of A(E) - s B(E), the hockey-stick divergence, the *excess* of a pair is

    e(s) = H_s(A, B) - max(0, 1 - s),    0 < s < ∞,

zero for A = B. It says everything about the pair, in both orders: H_s(B, A) - max(0, 1 - s) = s e(1/s). It is convex on
either side of 1, e(s)/min(1, s) falls away from 1, and of a pair with densities a and b it is Σ (a - s b)₊ for s >= 1
and Σ (s b - a)₊ for s <= 1. Here it is kept as upper bounds at some s, with straight lines between them.

Three facts make one curve do for many pairs (docs/proofs/smoothed-certificate.md):

* *Mixtures.* If A_λ = (1 - λ) B + λ A, then e_λ(1 + v) = λ e(1 + v/λ). So a coordinate that is rounded between two
  integers needs one curve for all distances up to 1.
* *Convexity.* If A is affine in t between two distances, e_t(s) lies under the chord.
* *Envelopes.* What holds for several pairs holds for the larger of their curves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Array, Law, Steps

# Distances between nodes grow by about this factor: the chord of t² is then within 0.03 % of it.
_RATIO = 1.03
# Shifts of more units than this take too many curves; with noise that wide the Gaussian certificate is as good.
_MOST_SHIFTS = 32
# Nodes of a curve, in standard deviations of the log-likelihood ratio: close together where the mass is.
_CENTRE, _FINE, _COARSE = 5.0, 1.0 / 28.0, 0.25
# Beyond the centre, so many nodes at a time.
_PIECE = 16
# A curve that has not fallen to the tail's mass this far out belongs to a law whose support ends there.
_FARTHEST, _LARGEST = 400.0, 50.0
# With more backgrounds than this, neighbouring ones are covered by one: the share 2θ/_MOST_BLOCKS of the noise is lost.
_MOST_BLOCKS, _LEAST_BLOCKS, _BLOCK_WORK = 320, 32, 12_000.0
_DRAFT_BLOCKS = 32
_GROUPS = 4
# Scalar products of at most this length are computed by one thread.
_LONGEST_PRODUCT = 4096
_UNIT = 2.0**-53


@dataclass(frozen=True, eq=False)
class Curve:
    """Upper bounds on the excess of all pairs at one distance.

    Attributes:
        distance: t, how far the two neighbours are apart.
        log_ratios: Where the bounds hold: logarithms of s, rising, with 0 among them.
        excess: The bounds. Between two points the excess lies under the straight line in s. Outside of them it is at
            most the tail's mass times min(1, s).
    """

    distance: float
    log_ratios: Array
    excess: Array


@dataclass(frozen=True, eq=False)
class Family:
    """The curves of pairs that neighbours can have in one coordinate.

    Attributes:
        first: At the distance up to which A is affine in t, from B on.
        others: At larger distances, rising; A is affine in t from each to the next.
        reach: The largest distance.
        tail: Mass per coordinate that the curves leave out.
    """

    first: Curve
    others: tuple[Curve, ...]
    reach: float
    tail: float


# ---------------------------------------------------------------------- rounding and integer noise


def of_law(law: Law, *, reach: float, tail: float) -> list[Family]:
    """Returns the curves of rounding plus noise of this law, for neighbours up to `reach` lattice units apart.

    A coordinate u is rounded to (1 - f) Z_r + f Z_{r+1}, r + f = u, with Z_r the noise shifted by r. For a pair at
    distance t both laws are affine in the fraction of the nearer one, and excesses are jointly convex, so the worst
    pairs have a whole number at one end: Z_0 and P_t, t positive or negative.

    Args:
        law: Of the noise in a coordinate of the sum.
        reach: The largest distance, at most 32.
        tail: Mass that may be left out.

    Raises:
        ConditionError: The law's support ends before its tail is that small, or the reach is too large.
    """
    steps = math.ceil(reach)
    if steps > _MOST_SHIFTS:
        raise ConditionError(
            f"No smoothed certificate is computed for neighbours {steps} lattice units apart (at most {_MOST_SHIFTS}): "
            "with that many levels the Gaussian certificate is about as good."
        )
    window = law.window(math.log(2.0 / tail) + 12.0, margin=2 * steps + 2)
    left_out = window.outside_below + window.outside_above
    if left_out > 0.5 * tail:
        raise ConditionError(f"No smoothed certificate for {law}: its tails are too heavy to compute.")
    distances = [min(1.0, reach), *_distances(reach)]
    curves = []
    for t in distances:
        noises = [window.mass] if law.mirror is not None else [window.mass, window.mass[::-1]]
        pairs = [_shifted(noise, t, window.error) for noise in noises]
        deviation = t / math.sqrt(law.variance)
        curves.append(_envelope([[(1.0, pair)] for pair in pairs], t, deviation, tail, str(law)))
    return [Family(curves[0], tuple(curves[1:]), reach, tail + left_out)]


def _distances(reach: float) -> list[float]:
    """Returns distances above 1: all whole numbers, and others so that neighbours differ by at most a fixed ratio."""
    found: list[float] = []
    whole = 1
    while whole < reach:
        end = min(float(whole + 1), reach)
        pieces = math.ceil(math.log(end / whole) / math.log(_RATIO))
        found += [whole + (end - whole) * j / pieces for j in range(1, pieces)] + [end]
        whole += 1
    return found


@dataclass(frozen=True, eq=False)
class _Pair:
    """Masses of A and B on the same points, where A/B rises; each is within the factor 1 ± `error` of the truth."""

    first: Array
    second: Array
    error: float


def _shifted(noise: Array, t: float, error: float) -> _Pair:
    """Returns the laws P_t and Z_0 as a pair, cut to the window. Mirrored noise makes it the pair of P_-t and Z_0."""
    shift, fraction = divmod(t, 1.0)
    r, n = int(shift), len(noise)
    padded, moved = np.zeros((2, n + r + 1))
    padded[:n] = noise
    moved[r : r + n] = (1.0 - fraction) * noise
    moved[r + 1 :] += fraction * noise
    return _Pair(moved, padded, 2.0 * error + 4.0 * _UNIT)


# ---------------------------------------------------------------------- steps: the rounding is the noise


def of_steps(steps: Steps, *, reach: float, tail: float, draft: bool = False) -> list[Family]:
    """Returns the curves of one of a client's steps, for any other clients. Distances are in units of X, up to 2.

    Every law is affine in every client's coordinate. So the worst pairs have the client's coordinate at -1 in one world
    (or at 1, which is the mirror image) and every other client's at -1 or 1: K of them at 1. Where there are too many K
    to take each, a block of them is covered at once: of the clients that differ within the block, the adversary learns
    all but the part that their two extreme laws have in common. That part is a number F of equal steps, known to the
    adversary, and does not depend on K. A block and its mirror image (others - K in place of K) have the same curve.
    Of a draft there are few blocks.

    Raises:
        ConditionError: There are no others, or the steps do not hide enough.
    """
    others = steps.clients - 1
    low, high = np.array(steps.low), np.array(steps.high)
    _check_steps(low, high, reach)
    if others < 1:
        raise ConditionError("No smoothed certificate: nobody else's step is in the sum. More clients would do.")
    mean = float(np.arange(len(high)) @ high)
    variance = others * float(np.arange(len(high)) ** 2 @ high - mean * mean)
    edges = _edges(others, math.sqrt(variance), _DRAFT_BLOCKS if draft else _MOST_BLOCKS)
    cut = 1e-4 * tail / len(edges)
    # Blocks have two or three sizes only.
    sizes = [int(size) for size in np.diff(edges)]
    powers = {size: _power(high, size, cut) for size in set(sizes)}
    rises = [_Power(np.ones(1), 0, 0.0, 0.0)]
    for size in sizes:
        rises.append(rises[-1].plus(powers[size], cut))
    # P(-1), the law of a client's step in one world, against P(1) in the other; less far apart, they are mixtures.
    apart = float(np.arange(len(low)) @ (high - low))
    mixtures = []
    worst_lost = 0.0
    blocks = [(j, j) for j in range(len(edges))] if others == len(edges) - 1 else _blocks(edges)
    common = {free: _common(low, high, free, cut) for free in {int(edges[b] - edges[a]) for a, b in blocks}}
    # The others are mirror images of these, with A and B swapped.
    for first, last in blocks[: (len(blocks) + 1) // 2]:
        # `first` clients at 1, `last` counts those at 1 or free; the rest, at -1, are the mirror image of as many at 1.
        base = rises[first].plus(rises[len(edges) - 1 - last].mirrored(), cut)
        kept, untold = common[int(edges[last] - edges[first])]
        mixture, lost = [], 0.0
        for weight, free in kept:
            law = base.plus(free, cut)
            pair = _Pair(_convolved(law.mass, high), _convolved(law.mass, low), law.error + 8.0 * _UNIT)
            mixture.append((weight, pair))
            lost = max(lost, law.lost)
        mixtures.append(mixture)
        worst_lost = max(worst_lost, lost + untold)
    # One envelope of all would take each tail from where it is heaviest; a few, each of similar K, lose little.
    size, deviation = math.ceil(2 * len(mixtures) / _GROUPS), apart / math.sqrt(variance)
    groups = [mixtures[start : start + size] for start in range(0, len(mixtures), size)]
    found = [_envelope(group, 2.0, deviation, tail, f"steps of {steps.clients} clients") for group in groups]
    both = [curve for each in found for curve in (each, _swapped(each))]
    return [Family(curve, (), reach, tail + worst_lost) for curve in both]


def _check_steps(low: Array, high: Array, reach: float) -> None:
    """Checks that the optimal tests between neighbours' steps are thresholds, as the proofs and the curves need.

    Raises:
        ConditionError: The two extreme laws are not mirrored or not log-concave, their ratio falls or `reach` > 2.
    """
    slack = 1.0 - 8.0 * _UNIT
    mirrored = len(low) >= 2 and np.array_equal(low, high[::-1]) and abs(float(high.sum()) - 1.0) <= 8.0 * _UNIT
    # Of laws with zeros at their ends only.
    concave = np.all(high[1:-1] ** 2 >= high[:-2] * high[2:] * slack) and np.all(high[np.argmax(high > 0.0) :] > 0.0)
    ordered = np.all(high[1:] * low[:-1] >= high[:-1] * low[1:] * slack)
    if not (mirrored and concave and ordered and np.all(high >= 0.0) and 0.0 < reach <= 2.0):
        raise ConditionError(
            "Steps are accounted for whose extremes are log-concave laws, mirror images of each other, the likelihood "
            f"ratio of which rises, and distances up to 2; got low={low}, high={high}, reach={reach:g}."
        )


def _edges(others: int, deviation: float, most: int = _MOST_BLOCKS) -> NDArray[np.int64]:
    """Returns the ends of blocks of numbers of clients at 1, symmetric: e_j + e_(last - j) = others."""
    count = 2 * round(min(max(_BLOCK_WORK / deviation, _LEAST_BLOCKS), most) / 2.0)
    if others <= count:
        return np.arange(others + 1)
    half = np.linspace(0.0, 0.5 * others, count // 2 + 1)[:-1].astype(np.int64)
    middle = [others // 2] if others % 2 == 0 else [others // 2, others - others // 2]
    return np.concatenate([half, middle, others - half[::-1]])


def _blocks(edges: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(j, j + 1) for j in range(len(edges) - 1)]


@dataclass(frozen=True, eq=False)
class _Power:
    """The law of a sum of independent steps; a mass of at most `lost` is missing, others are within 1 ± `error`."""

    mass: Array
    first: int
    error: float
    lost: float

    def plus(self, other: _Power, cut: float) -> _Power:
        """Returns the law of the sum of two independent sums, trimmed by a mass of at most `cut`."""
        mass = _convolved(self.mass, other.mass)
        error = self.error + other.error + (min(len(self.mass), len(other.mass)) + 2) * _UNIT
        below, above = np.cumsum(mass), np.cumsum(mass[::-1])
        start, stop = int(np.searchsorted(below, 0.4 * cut)), int(np.searchsorted(above, 0.4 * cut))
        kept = mass[start : len(mass) - stop]
        lost = self.lost + other.lost + (cut if start or stop else 0.0)
        return _Power(kept, self.first + other.first + start, error * (1.0 + 1e-9), lost)

    def mirrored(self) -> _Power:
        """Returns the law of the negated sum, up to a shift."""
        return _Power(self.mass[::-1], 0, self.error, self.lost)


def _convolved(first: Array, second: Array) -> Array:
    """Returns the convolution. Every mass is a sum of positive products, at most the shorter one's length of them.

    NumPy's takes scalar products of that length, for which a linear algebra library may wake threads: very slow where
    processors are shared. So the shorter one is taken in parts that are too short for that.
    """
    if len(first) < len(second):
        first, second = second, first
    if len(second) <= _LONGEST_PRODUCT:
        return np.convolve(first, second)
    found = np.zeros(len(first) + len(second) - 1)
    for start in range(0, len(second), _LONGEST_PRODUCT):
        part = second[start : start + _LONGEST_PRODUCT]
        found[start : start + len(first) + len(part) - 1] += np.convolve(first, part)
    return found


def _power(step: Array, count: int, cut: float) -> _Power:
    """Returns the law of the sum of `count` independent steps, less a mass of at most `cut`."""
    found, square = _Power(np.ones(1), 0, 0.0, 0.0), _Power(step, 0, 8.0 * _UNIT, 0.0)
    # What a square loses is lost as often as it is used.
    each = 0.25 * cut / max(count, 1)
    while count:
        if count & 1:
            found = found.plus(square, each)
        square = square.plus(square, each) if count > 1 else square
        count >>= 1
    return found


def _common(low: Array, high: Array, free: int, cut: float) -> tuple[list[tuple[float, _Power]], float]:
    """Returns a mixture of laws, as (weight, law), for `free` clients whose steps follow `low` or `high`.

    Write each of the two laws as ρ times their common part, plus a rest. Then F ~ Binomial(free, ρ) clients take a
    step of the common part, whichever law is theirs. The adversary may know F. Fewer steps hide less, so F is grouped
    into a few bins and rounded down to the smallest of its bin.

    Returns:
        The mixture, and the mass of F that was left out.
    """
    if free == 0:
        return [(1.0, _Power(np.ones(1), 0, 0.0, 0.0))], 0.0
    shared = np.minimum(low, high)
    mass, rest = float(shared.sum()), float(np.maximum(high - low, 0.0).sum())
    if mass < 1e-6:
        return [(1.0, _Power(np.ones(1), 0, 0.0, 0.0))], 0.0
    counts = _power(np.array([rest, mass]), free, cut)
    below = np.cumsum(counts.mass)
    places = sorted({int(np.searchsorted(below, share)) for share in (1e-6, 0.05, 0.5)})
    starts = [counts.first, *(counts.first + place for place in places if place > 0)]
    found = []
    for i, start in enumerate(starts):
        stop = starts[i + 1] if i + 1 < len(starts) else counts.first + len(counts.mass)
        weight = float(counts.mass[start - counts.first : stop - counts.first].sum()) * (1.0 + counts.error + 1e-13)
        found.append((weight, _power(shared / mass, start, cut)))
    return found, counts.lost


# ---------------------------------------------------------------------- from masses to a curve


def _envelope(mixtures: list[list[tuple[float, _Pair]]], t: float, deviation: float, tail: float, name: str) -> Curve:
    """Returns the largest excess of several pairs; each is a mixture whose parts the adversary can tell apart."""
    tails = [[(weight, _Tails(pair)) for weight, pair in mixture] for mixture in mixtures]

    def excess(points: Array) -> Array:
        found = np.zeros_like(points)
        for mixture in tails:
            total = np.zeros_like(points)
            for weight, part in mixture:
                total += weight * part.excess(points)
            np.maximum(found, total, out=found)
        return found * (1.0 + 1e-14)

    centre = np.arange(0.0, _CENTRE, _FINE) * min(deviation, _LARGEST / _CENTRE)
    width = _COARSE * deviation
    signs = np.array([[1.0], [-1.0]])

    def both(x: Array) -> Array:
        """Returns the excess at x and the excess at -x."""
        return excess((signs * x).ravel()).reshape(2, -1)

    def over(x: Array, e: Array) -> NDArray[np.bool_]:
        return e > tail * np.minimum(1.0, np.exp(signs * x))

    limit = min(_FARTHEST * deviation, _LARGEST - _PIECE * width)
    end = np.array([limit + _PIECE * width])
    x, e = centre, both(centre)
    while np.any((is_over := over(x, e))[:, -1]):
        # It only falls: what is too much at the very end is so everywhere.
        if x[-1] > limit or np.any(over(end, both(end))):
            raise ConditionError(
                f"No smoothed certificate for {name}: more than {tail:.2g} of the noise in a coordinate lies where "
                "the other neighbour has (next to) none. More noise or a larger tail would do."
            )
        more = x[-1] + width * np.arange(1.0, 1.0 + _PIECE)
        x, e = np.append(x, more), np.append(e, both(more), axis=1)
    sides = []
    for sign, here, high in zip((1.0, -1.0), e, is_over, strict=True):
        # What lies beyond the first point under the tail is left out, but not the centre.
        last = max(int(np.argmin(high)), round(1.0 / _FINE))
        sides.append((sign * x[: last + 1], here[: last + 1]))
    (right, above), (left, below) = sides
    return Curve(t, np.concatenate([left[:0:-1], right]), np.concatenate([below[:0:-1], above]))


def _swapped(curve: Curve) -> Curve:
    """Returns the curve of (B, A): s e(1/s). Lines in s stay lines."""
    x = -curve.log_ratios[::-1]
    return Curve(curve.distance, x, curve.excess[::-1] * np.exp(x) * (1.0 + 1e-14))


class _Tails:
    """Tail sums of a pair's masses beyond each point, added from the far end so that small sums are accurate."""

    def __init__(self, pair: _Pair) -> None:
        with np.errstate(divide="ignore", over="ignore"):
            ratio = pair.first / np.maximum(pair.second, 1e-320)
        # Rises, but for roundings.
        self.ratio = np.maximum.accumulate(ratio)
        self.above = _sums(pair.first[::-1])[::-1], _sums(pair.second[::-1])[::-1]
        self.below = _sums(pair.first), _sums(pair.second)
        self.error = 4.0 * pair.error + 4.0 * len(ratio) * _UNIT

    def excess(self, log_ratios: Array) -> Array:
        """Returns upper bounds on e(s): a sum of A - s B over the points where it is positive, or of s B - A."""
        found, over = np.empty_like(log_ratios), log_ratios >= 0.0
        s = np.exp(log_ratios[over])
        # Points from `place` on have a ratio over s, or might have but for roundings.
        place = np.searchsorted(self.ratio, s * (1.0 - 0.75 * self.error), side="right")
        first, second = self.above
        found[over] = first[place] * (1.0 + self.error) - s * second[place] * (1.0 - self.error)
        s = np.exp(log_ratios[~over])
        place = np.searchsorted(self.ratio, s * (1.0 + 0.75 * self.error), side="right")
        first, second = self.below
        found[~over] = s * second[place] * (1.0 + self.error) - first[place] * (1.0 - self.error)
        return np.maximum(found, 0.0)


def _sums(masses: Array) -> Array:
    """Returns the partial sums, with a 0 in front."""
    found = np.empty(len(masses) + 1)
    found[0] = 0.0
    np.cumsum(masses, out=found[1:])
    return found
