"""How far a coordinate of a sum of messages lies from its centre: what the bounds of all mechanisms share.

Everything is said by cumulants, upper bounds on log E exp(λ Z) for both signs of λ: those of independent parts add up,
and Chernoff's inequality turns them into tails. docs/planning.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import clip

Array = NDArray[np.float64]

# For the sum over a tail: places where it is more than e^-NATS, and reaches tried at each.
_PLACES, _REACHES, _NATS = 128, 64, 60.0
# Of which these are tried for what is within.
_EVERY = 4
_LEAST_WIDTH = 1e-200
# Logarithms below minus this are those of zero.
_NOTHING = 1e300
# Beyond this many deviations nothing is left of a tail, whatever the number of clients.
_FARTHEST = 40.0
# Below this slope the closed form of `rounding_cumulant` loses digits, and λ²/8 is as good.
_SMALL_SLOPE = 1e-2


@dataclass(frozen=True)
class Deviation:
    """A bound on the distance of a sum of messages from its centre, in integers.

    Attributes:
        offset: A constant bound on one part of the distance.
        cumulant: For the rest Z, a bound on log E exp(±λZ) at λ >= 0.
        steepest: The largest λ of that bound.
    """

    offset: float
    cumulant: Callable[[float], float]
    steepest: float = math.inf

    def at(self, slope: float) -> float:
        """Returns the cumulant at a λ >= 0, infinite beyond the steepest."""
        return self.cumulant(slope) if slope <= self.steepest else math.inf


def rounding_cumulant(slope: float) -> float:
    """Returns the largest log E exp(λ (Z - f)) of a Z that is 1 with probability f and else 0, over all f; λ >= 0.

    log(1 - f + f e^λ) - λ f is concave in f. Its maximum is log((e^λ - 1)/λ) - 1 + λ/(e^λ - 1), and at most λ²/8.
    """
    if slope < _SMALL_SLOPE or slope > 700.0:
        return 0.125 * slope * slope
    grown = math.expm1(slope)
    return min(0.125 * slope * slope, (math.log(grown / slope) - 1.0 + slope / grown) * (1.0 + 1e-12) + 1e-15)


@dataclass(frozen=True)
class MeanCoordinate:
    """One coordinate of the mean of the clients' vectors as they are encoded: clipped, rotated, and clipped to ±X.

    Attributes:
        clients: n.
        dim: d.
        clip_norm: D.
        coordinate_range: X.
        rotate: Whether vectors are rotated.
        mean_norm: Bound on the norm of the mean of the vectors clipped to norm D; None if only D is known.
        grid_unit: Grid points per unit of the vector.
    """

    clients: int
    dim: int
    clip_norm: float
    coordinate_range: float
    rotate: bool
    mean_norm: float | None
    grid_unit: float

    @property
    def largest(self) -> float:
        """Upper bound on the coordinate's absolute value, for any vectors."""
        if self._mean_norm is None:
            return min(self.clip_norm, self.coordinate_range)
        share, rest = _line(self.coordinate_range, self.clip_norm)
        return min(self.coordinate_range, float(share * self._mean_norm + rest) + self._shrinking)

    def cumulants(self) -> list[Callable[[float], float]]:
        """Returns further bounds, valid over the random rotation, as cumulants for λ >= 0; each of them holds."""
        if not self.rotate:
            return []
        deviation = self._deviation
        found: list[Callable[[float], float]] = [lambda slope: 0.5 * (slope * deviation) ** 2]
        if self._mean_norm is not None:
            found.append(self._layered)
        return found

    @property
    def _mean_norm(self) -> float | None:
        """Bound on the mean's norm after clipping with its margin; None if it is no better than D."""
        if self.mean_norm is None or self.mean_norm >= self.clip_norm:
            return None
        return self.mean_norm + clip.MARGIN * self.clip_norm

    @property
    def _deviation(self) -> float:
        """A rotated coordinate of a vector of norm D is sub-Gaussian with this: D/√B, B = 2^⌊log2 d⌋."""
        return self.clip_norm / math.sqrt(1 << (self.dim.bit_length() - 1))

    @property
    def _shrinking(self) -> float:
        """The distance that the mean moves because the encoder shrinks vectors whose norm on the grid exceeds D."""
        shrunk = 2.0 * math.sqrt(self.dim) / (self.clip_norm * self.grid_unit) + 2.0**-18
        return shrunk * self.coordinate_range

    def _layered(self, slope: float) -> float:
        """Returns a cumulant: coordinates that are all within ±T, and the tail of y beyond; at the best of a few T.

        E exp(λ y) <= exp(λ b + (λ a σ)²/2) + P' + Σ (exp(λ z') - exp(λ z)) min(P(|y| > z), P') over neighbouring places
        z < z', where σ is the deviation of the unclipped mean's coordinate and P' the probability that some client's
        coordinate is beyond ±T.
        """
        layers = self._layers
        widths = slope * layers.gaps
        if float(widths.min()) < _LEAST_WIDTH:
            return slope * self.largest
        within = slope * layers.rest + 0.5 * (slope * layers.share * layers.deviation) ** 2
        steps = slope * layers.places[1:] + np.log(-np.expm1(-widths))
        few = slice(None, None, _EVERY)
        # The logarithm of a sum, with the largest term taken out: several times as quick as adding up term by term.
        terms = steps + layers.beyond
        largest = np.maximum(terms.max(axis=1), -_NOTHING)
        added = np.exp(terms - largest[:, None]).sum(axis=1)
        outside = np.logaddexp(largest + np.log(np.maximum(added, 1.0 / _NOTHING)), layers.missed[few])
        return float(np.logaddexp(within[few], outside).min()) + slope * self._shrinking

    @cached_property
    def _layers(self) -> _Layers:
        """Tail bounds that `_layered` needs, computed once; y here excludes the encoder's shrinking.

        If no client's coordinate is beyond ±T, then |y| <= a |x| + b, x the coordinate of the unclipped mean. That is
        so with probability 1 - 2n exp(-T²/(2τ²)), and x is sub-Gaussian with deviation τ ν/D.
        """
        assert self._mean_norm is not None
        deviation, reach = self._deviation, self.coordinate_range
        mean_deviation = deviation * self._mean_norm / self.clip_norm
        farthest = max(reach, min(self.clip_norm, _FARTHEST * deviation))
        beyond = np.linspace(reach, farthest, _REACHES)
        missed = math.log(2.0 * self.clients) - 0.5 * (beyond / deviation) ** 2
        missed[beyond >= self.clip_norm] = -math.inf
        share, rest = _line(reach, beyond)
        # Close to each other where the tail is worth something.
        typical = deviation * math.sqrt(2.0 * (_NATS + math.log(2.0 * self.clients)))
        steep, shift = map(float, _line(reach, typical))
        worth = min(steep * mean_deviation * math.sqrt(2.0 * _NATS) + shift, 0.75 * self.largest)
        places = np.r_[np.linspace(0.0, worth, _PLACES), np.geomspace(worth, self.largest, _PLACES // 2)[1:]]
        over = np.maximum(places[:-1, None] - rest, 0.0) / share
        within = math.log(2.0) - 0.5 * (over / mean_deviation) ** 2
        # Every T is valid. The best one is next to that where the larger of the two is smallest.
        best = np.maximum(within, missed).argmin(axis=1)[:, None] + np.arange(-1, 2)
        best = np.clip(best, 0, _REACHES - 1)
        tails = np.logaddexp(missed[best], np.take_along_axis(within, best, axis=1))
        missed = np.minimum(missed, 0.0)
        met = np.minimum(np.minimum(tails.min(axis=1), 0.0), missed[::_EVERY, None])
        return _Layers(places, np.diff(places), met, mean_deviation, share, rest, missed)


@dataclass(frozen=True, eq=False)
class _Layers:
    """Tail bounds of a mean's coordinate y, in the letters of `MeanCoordinate._layered`.

    Attributes:
        places: Places z.
        gaps: Their distances.
        beyond: log min(P(|y| > z), P') for every few T, and each place but the last.
        deviation: σ.
        share: a, for each T.
        rest: b, for each T.
        missed: log P', for each T.
    """

    places: Array
    gaps: Array
    beyond: Array
    deviation: float
    share: Array
    rest: Array
    missed: Array


def _line(reach: float, beyond: Array | float) -> tuple[Array, Array]:
    """Returns a, b with clip(x) <= a x + b for -T <= x: the line from (-T, -X) to (X, X), the identity where T <= X."""
    farthest = np.maximum(beyond, reach)
    return 2.0 * reach / (farthest + reach), reach * (farthest - reach) / (farthest + reach)
