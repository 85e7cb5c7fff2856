"""Sums of the privacy losses of many rounds, and the δ that they add up to.

Rounds are independent pairs of laws, whose losses add up. Every number is rounded up. Masses lie on a grid of losses.
Sums are computed by FFT of masses tilted by e^(λ l) towards the ε asked for, so that rounding errors are small against
δ however small that is. Where there are too many rounds for that, the pairs' Rényi divergences are left.
docs/proofs/fixed-size.md has the proofs; `cpsgd.privacy.fixed_size` and `cpsgd.privacy.poisson` have the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpsgd.mechanisms.law import Array

FINE_POINTS = 2**17
"""Points of the grid for final answers."""
COARSE_POINTS = 2**14
"""Points of the grid inside searches."""

UNIT = 2.0**-53
# Losses above this are infinite.
LARGEST_LOSS = 600.0
# How many nats the window of the FFT goes beyond the tail at ε that is asked for, and inside searches.
_DEPTH, _COARSE_DEPTH = 32.0, 24.0
# Assumed of numpy.fft: relative error in the Euclidean norm within this times log2 of the length.
_FFT_ERROR = 8.0 * UNIT
# Losses that are taken for infinite are as many powers of ten rarer than δ.
_NEGLIGIBLE = 11.0
_LOG_POWERS = (-6.0, 14.0)
# The lowest level at which losses are cut off is 10 to the power of minus four times this.
_DEEPEST = 74
# Losses beyond this many lengths of the window are taken for infinite, to save time.
_MOST_WINDOWS = 16
# In final answers, losses are at most this far apart, or this part of the largest one; unless it takes more points.
_WIDEST, _LONGEST, _MOST_POINTS = 7e-5, 1e5, 2**20
# One window serves all ε within such a factor.
_CELL = math.log(1.05)
_TINY = 1e-300


class EqualRounds(Protocol):
    """Equal rounds: their number, and their privacy losses."""

    @property
    def count(self) -> int:
        """Number of rounds."""

    def rough(self, level: float) -> Losses:
        """Returns the losses of one round on a coarse grid, without those that are rarer than `level`."""

    def on_grid(self, interval: float, most: int, level: float) -> Losses:
        """Returns the losses of one round at multiples of `interval`, at most `most` of them above zero."""


@dataclass(frozen=True)
class Losses:
    """Privacy losses of a pair of laws, with the first law's mass at each.

    Attributes:
        loss: Each too small by at most `short`.
        mass: Their masses.
        infinite: Mass without a finite loss.
        short: See `loss`.
    """

    loss: Array
    mass: Array
    infinite: float
    short: float

    @cached_property
    def _log_mass(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.mass)

    def log_moment(self, power: float) -> float:
        """Returns an upper bound on log Σ mass e^(power loss), `power` >= 0, infinite losses left out."""
        exponents = self._log_mass + power * self.loss
        largest = float(exponents.max())
        size = abs(largest) + power * float(self.loss.max())
        return (
            largest + math.log(float(np.sum(np.exp(exponents - largest)))) + power * self.short + 1e-13 * (1.0 + size)
        )

    def tilted(self, power: float) -> tuple[Array, float]:
        """Returns the masses times e^(power loss - c), and c, chosen so that they sum to about 1."""
        scale = self.log_moment(power)
        return np.exp(self._log_mass + power * self.loss - scale), scale

    def mean(self, power: float) -> float:
        """Returns the mean of the losses, their masses tilted by e^(power loss)."""
        return float(np.sum(self.tilted(power)[0] * self.loss))

    def variance(self, power: float) -> float:
        """Returns the variance of the tilted losses."""
        return float(np.sum(self.tilted(power)[0] * (self.loss - self.mean(power)) ** 2))


class Composition:
    """δ of all rounds. Losses that are large, but too rare to matter for δ, are taken for infinite."""

    def __init__(self, kinds: Sequence[EqualRounds], points: int) -> None:
        self._kinds, self._points = kinds, points
        self._cuts: dict[int, _Cut] = {}
        self._suited: dict[float, _Cut] = {}

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on δ at this ε >= 0, which does not depend on what was asked before."""
        return self._cut(epsilon).delta(epsilon)

    def rough_delta(self, epsilon: float) -> float:
        """Returns a larger bound on δ, by a Rényi divergence."""
        cut = self._cut(epsilon)
        return min(1.0, cut.renyi(epsilon) + cut.infinite)

    def _cut(self, epsilon: float) -> _Cut:
        """Returns δ for ε near this one."""
        near = _near(epsilon)
        if near not in self._suited:
            self._suited[near] = self._new_cut(near)
        return self._suited[near]

    def _new_cut(self, epsilon: float) -> _Cut:
        """Returns δ without losses that are negligible against it at this ε, as far as Rényi divergences tell that."""
        level, tried = 2, set[int]()
        while level not in tried:
            tried.add(level)
            if level not in self._cuts:
                self._cuts[level] = _Cut(self._kinds, self._points, 10.0 ** (-4 * level))
            cut = self._cuts[level]
            finite = max(cut.renyi(epsilon), _TINY)
            level = min(max(1, math.ceil(0.25 * (_NEGLIGIBLE - math.log10(finite)))), _DEEPEST)
        return cut


def _near(epsilon: float) -> float:
    """Returns a number near ε and not above it, the same for many; 0 for those below 10^-6."""
    return math.exp(math.floor(math.log(epsilon) / _CELL) * _CELL) * (1.0 - 1e-12) if epsilon > 1e-6 else 0.0


class _Cut:
    """δ of all rounds, by sums of losses or by Rényi divergences, whichever is smaller.

    Attributes:
        infinite: Upper bound on the probability of a loss that counts as infinite, in any round.
    """

    def __init__(self, kinds: Sequence[EqualRounds], points: int, level: float) -> None:
        self._kinds, self._points, self._level = kinds, points, level
        self._rough = [(kind.rough(level), kind.count) for kind in kinds]
        self.infinite = math.fsum(count * losses.infinite for losses, count in self._rough) * (1.0 + 1e-14)
        # By ε: a power λ and the moment log M(λ), and sums tilted by e^(λ l).
        self._powers: dict[float, tuple[float, float]] = {}
        self._sums: dict[float, _Sums | None] = {}

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on δ at this ε, of all rounds."""
        near = _near(epsilon)
        found = self.renyi(epsilon) + self.infinite
        if near not in self._sums:
            power, moment = self._powers[near]
            self._sums[near] = self._new_sums(near, power, moment - power * near)
        sums = self._sums[near]
        return min(1.0, found, sum(sums.delta(epsilon)) if sums is not None else 1.0)

    def renyi(self, epsilon: float) -> float:
        """Returns δ of the finite losses by a Rényi divergence."""
        near = _near(epsilon)
        if near not in self._powers:
            power = self._best_power(near)
            self._powers[near] = power, self._log_moment(power)
        power, moment = self._powers[near]
        # Canonne, Kamath and Steinke 2020, Proposition 12, with α = power + 1.
        order = power + 1.0
        found = moment - power * epsilon + power * math.log1p(-1.0 / order) - math.log(order)
        return math.exp(min(0.0, found + 1e-13 * (2.0 + abs(found) + abs(moment) + power * epsilon)))

    def _log_moment(self, power: float) -> float:
        return math.fsum(count * losses.log_moment(power) for losses, count in self._rough)

    def _mean(self, power: float) -> float:
        """Returns the mean of the tilted sum, the derivative of `_log_moment`."""
        return math.fsum(count * losses.mean(power) for losses, count in self._rough)

    def _best_power(self, epsilon: float) -> float:
        """Returns the λ with the smallest Chernoff bound e^(Σ log M(λ) - λ ε), within limits."""
        low, high = _LOG_POWERS
        while high - low > 0.01:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._mean(math.exp(middle)) < epsilon else (low, middle)
        return math.exp(low)

    def _new_sums(self, epsilon: float, power: float, chernoff: float) -> _Sums | None:
        """Returns sums tilted towards ε, in a window whose upper tail is negligible against that at ε.

        None if the losses are too large for a window.
        """
        depth = _DEPTH if self._points >= FINE_POINTS else _COARSE_DEPTH
        low, high = math.log(power), _LOG_POWERS[1]
        while high - low > 0.01:
            middle = 0.5 * (low + high)
            top = self._mean(math.exp(middle))
            deep = self._log_moment(math.exp(middle)) - math.exp(middle) * top <= chernoff - depth
            low, high = (low, middle) if deep and top > epsilon else (middle, high)
        larger = math.exp(high)
        largest = math.fsum(count * float(losses.loss.max()) for losses, count in self._rough)
        # Where no tail is negligible the window holds all sums, and where no sum is as large as ε, any window does.
        top = self._mean(larger) if high < _LOG_POWERS[1] else 1.01 * largest
        # All ε that are near this one lie in the window.
        top = max(top, epsilon * math.exp(_CELL) + 1e-6)
        if top > 2.0 * LARGEST_LOSS:
            return None
        # The sums that are taken for others are those further below ε than the window is long.
        variance = math.fsum(count * losses.variance(power) for losses, count in self._rough)
        length = max(2.2 * (top - epsilon), 9.0 * math.sqrt(max(0.0, variance)))
        interval = 1.001 * length / self._points
        if self._points >= FINE_POINTS:
            farthest = max(float(losses.loss.max()) for losses, _ in self._rough)
            interval = min(0.7 * interval, max(_WIDEST, farthest / _LONGEST))
        # Those further above it are taken for smaller ones, and weigh e^(power length) times as much as they should.
        if larger > power:
            wrapped = self._log_moment(larger) - larger * epsilon - chernoff + depth
            length = max(length, wrapped / (larger - power))
        points = self._points
        while length > interval * points and points < _MOST_POINTS:
            points *= 2
        return _Sums(self._kinds, points, self._level, top, length, power, larger)


class _Sums:
    """Sums of losses, tilted by e^(power loss), on a grid, modulo a window of this length that ends at `top`.

    Sums below the window are taken for larger ones, which only adds to δ. The probability of those above it is added
    to δ, by a Chernoff bound with `top_power`.
    """

    def __init__(
        self,
        kinds: Sequence[EqualRounds],
        points: int,
        level: float,
        top: float,
        length: float,
        power: float,
        top_power: float,
    ) -> None:
        self._interval = length / (points - 2)
        self._last = math.floor(top / self._interval)
        self._points, self._power = points, power
        largest = 0
        self._scale = tail = self._shift = self._infinite = inexact = growth = norms = 0.0
        spectrum = np.ones(points // 2 + 1, dtype=np.complex128)
        roundings = _FFT_ERROR * math.log2(points)
        for kind in kinds:
            losses = kind.on_grid(self._interval, _MOST_WINDOWS * points, level)
            tilted, scale = losses.tilted(power)
            steps = np.rint(losses.loss / self._interval).astype(np.int64)
            masses: Array = np.bincount(steps % points, tilted, points).astype(np.float64, copy=False)
            norm = _norm(masses)
            spectrum *= _power(np.fft.rfft(masses), kind.count)
            largest += kind.count * int(steps.max())
            self._scale += kind.count * scale
            self._shift += kind.count * losses.short
            self._infinite += kind.count * losses.infinite
            tail += kind.count * losses.log_moment(top_power)
            inexact += kind.count * UNIT * (1e4 + 4.0 * (power * float(losses.loss.max()) + abs(scale)))
            growth += kind.count * (max(0.0, math.log(float(masses.sum()))) + roundings * math.sqrt(points) * norm)
            norms += kind.count * norm
        self._sums = np.maximum(np.fft.irfft(spectrum, points).astype(np.float64), 0.0)
        count = sum(kind.count for kind in kinds)
        norm = _norm(self._sums)
        self._error = 1.1 * math.exp(min(growth, 700.0)) * (roundings * (norms + norm) + 4.0 * UNIT * count * norm)
        self._inexact = math.exp(min(inexact, 700.0)) * (1.0 + 1e-12)
        if largest > self._last:
            log_tail = tail - top_power * self._last * self._interval
            self._infinite += math.exp(min(0.0, log_tail + 1e-13 * (1.0 + abs(tail))))

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Returns an estimate of δ at this ε, and a bound on its error: their sum is an upper bound on δ.

        The error comes from the FFT, from floating point and from losses beyond the window.
        """
        # The sums of losses may be too small by up to `_shift`; a smaller ε makes up for that.
        epsilon -= self._shift + 8.0 * UNIT * (epsilon + self._last * self._interval)
        first = math.floor(epsilon / self._interval) + 1
        if first <= self._last - self._points or self._scale - self._power * self._interval * first > 700.0:
            return 1.0, 0.0  # below the window, or so far below the tilt that numbers would overflow
        if first > self._last:
            return 0.0, self._infinite + _TINY
        steps = np.arange(first, self._last + 1)
        loss = self._interval * steps
        weights = np.exp(self._scale - self._power * loss) * -np.expm1(epsilon - loss)
        weights *= 1.0 + 8.0 * UNIT * (1.0 + abs(self._scale) + self._power * float(loss[-1]))
        estimate = float(np.sum(weights * self._sums[steps % self._points])) * self._inexact
        return estimate, _norm(weights) * self._error * self._inexact + self._infinite + _TINY


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Returns the power by repeated squaring, with relative errors of at most √5 2^-53 per factor."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        base, exponent = base * base, exponent >> 1
    return result


def _norm(values: Array) -> float:
    """Returns the Euclidean norm, rounded up, on one thread: the threads of BLAS cost more than they gain."""
    return math.sqrt(float(np.einsum("i,i->", values, values))) * (1.0 + 1e-10)
