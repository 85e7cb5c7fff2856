"""Rounds whose cohort is a random subset of fixed size, with replace-one neighbours, composed.

A round is dominated by one pair of laws, or by the largest curve of several such pairs. Let A = (1-q) N(0,1) +
q N(μ,1) and B = N(0,1). The loss is l(x) = log(1 + q(e^(μx - μ²/2) - 1)), positive for x > μ/2. The first law has A's
mass at the losses l(x) > 0, B's mass at their negatives, and the rest at loss 0. The second law is the first mirrored.
Losses of independent pairs add up.

Every number is rounded up. Masses go to the two points of a grid around their loss ("connecting the dots", Doroshenko
et al. 2022). Sums are computed by FFT of masses tilted by e^(λ l) towards the ε asked for, so that rounding errors are
small against δ however small that is. Where there are too many rounds for that, the pair's Rényi divergences are left.
docs/proofs/fixed-size.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd._lazy import Late
from cpsgd.mechanisms.law import Array

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

FINE_POINTS = 2**17
"""Points of the grid for final answers."""
COARSE_POINTS = 2**14
"""Points of the grid inside searches."""

_UNIT = 2.0**-53
# Assumed of scipy.special.ndtr(-x): relative error within 1e-14 + x² 2^-52, and of erf: within 1e-14 (the tests compare
# them with mpmath). Twice that covers the sums and products they go into.
_SPECIAL = 2e-14
# Normal laws are cut off here, where a tail is 6e-300.
_FARTHEST = 37.0
# Losses above this are infinite.
_LARGEST_LOSS = 600.0
# Points at which a normal law is cut into pieces where no grid of losses is needed.
_PIECES = 4_000
# How many nats the window of the FFT goes beyond the tail at ε that is asked for.
_DEPTH = 18.0
# Rounding errors of exponentials, relative.
_EXP_ERROR = 4.0 * _UNIT
# Assumed of numpy.fft: relative error in the Euclidean norm within this times log2 of the length.
_FFT_ERROR = 8.0 * _UNIT
# Beyond this share of δ, what is added for rounding errors and cut-off sums calls for another tilt.
_NEGLIGIBLE = 1e-4
_LOG_POWERS = (-6.0, 14.0)
# The lowest level at which losses are cut off is 10 to the power of minus four times this.
_DEEPEST = 74
# Losses beyond this many lengths of the window are taken for infinite, to save time.
_MOST_WINDOWS = 16
_TINY = 1e-300
# Losses rarer than this are left out of the divergence of a single round.
_RARE = 1e-40


@dataclass(frozen=True)
class SampledRounds:
    """`count` rounds, each μ-GDP for replace-one neighbours; a client is drawn for each with this rate (1: always).

    Attributes:
        mu: μ.
        rate: q.
        count: Number of rounds.
        others: Further pairs of a μ and a rate. Each round has one of them all, whichever is worst.
    """

    mu: float
    rate: float
    count: int
    others: tuple[tuple[float, float], ...] = ()

    @property
    def pairs(self) -> list[SampledRounds]:
        """The rounds with each μ and rate alone."""
        return [self if not self.others else replace(self, others=())] + [
            SampledRounds(mu, rate, self.count) for mu, rate in self.others
        ]

    def farthest(self, level: float) -> float:
        """Returns the output, of the first pair, beyond which about this much mass lies, over all rounds."""
        tail = level / self.count
        farthest = max(
            -float(special.ndtri(min(0.5, tail))), self.mu - float(special.ndtri(min(0.5, tail / self.rate)))
        )
        return max(min(farthest, self.mu + _FARTHEST, self._largest), 0.5 * self.mu + 1e-3)

    @property
    def _largest(self) -> float:
        return 0.5 * self.mu + (math.log1p(math.expm1(_LARGEST_LOSS) / self.rate)) / self.mu


def sampled_profile(kinds: Sequence[SampledRounds], points: int) -> Callable[[float], float]:
    """Returns upper bounds on δ as a function of ε >= 0 for all the rounds together.

    Example:
        >>> delta = sampled_profile([SampledRounds(mu=1.0, rate=0.01, count=1000)], FINE_POINTS)
        >>> f"{delta(1.5):.3g}"
        '0.000844'
    """
    return _Composition(kinds, points).delta


def sampled_divergence(mu: float, rate: float, order: float) -> tuple[float, float]:
    """Returns the Rényi divergence of one round, rounded up, and the mass of losses that it leaves out.

    Example:
        >>> f"{sampled_divergence(1.0, 0.01, 8)[0]:.3g}"
        '0.00126'
    """
    losses = _rough(SampledRounds(mu, rate, 1), _RARE)
    return losses.log_moment(order - 1.0) / (order - 1.0) * (1.0 + 4.0 * _UNIT), losses.infinite


@dataclass(frozen=True)
class _Losses:
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


def _pair(kind: SampledRounds, loss: Array) -> _Losses:
    """Returns the losses of one round, rounded to the values ±`loss`; `loss` rises from 0."""
    each = [_positive(pair, loss) for pair in kind.pairs]
    above = _largest(loss, [mass for mass, _, _ in each]) if len(each) > 1 else each[0][0]
    # The pair is its own mirror image. The rest, up to 1, has the loss 0.
    below = above * np.exp(-loss) * (1.0 + _EXP_ERROR)
    total = float(above.sum()) + float(below.sum())
    below[0] += max(0.0, 1.0 - total) + 1e-13
    infinite, short = max(part[1] for part in each), max(part[2] for part in each)
    return _Losses(np.concatenate([loss, -loss]), np.concatenate([above, below]), infinite, short)


def _positive(kind: SampledRounds, loss: Array) -> tuple[Array, float, float]:
    """Returns the first law's masses at losses >= 0, its mass beyond the last one, and the largest error of a loss."""
    mu, rate, x = kind.mu, kind.rate, _output(kind, loss)
    # An output is computed from a loss with a few roundings.
    short = 16.0 * _UNIT * (2.0 + float(loss[-1]) - math.log(rate) + mu * (mu + float(x[-1])))
    inexact = _SPECIAL + 8.0 * _UNIT * float(x[-1]) ** 2
    second = special.ndtr(-x)
    first = (1.0 - rate) * second + rate * special.ndtr(mu - x)
    width = -np.expm1(-np.diff(loss))
    # Masses between two points. Tails are rounded up, towards larger losses.
    mass = -np.diff(first) * (1.0 + inexact)
    error = 3.0 * (inexact + short) * (first[:-1] + np.exp(loss[:-1]) * second[:-1])
    upper = np.clip((-np.diff(first) + np.exp(loss[:-1]) * np.diff(second) + error) / width, 0.0, mass)
    above = np.zeros_like(loss)
    above[1:] += upper
    above[:-1] += mass - upper
    return above, float(first[-1]) * (1.0 + inexact), short


def _largest(loss: Array, masses: Sequence[Array]) -> Array:
    """Returns masses at the same losses whose curve is the largest of all curves, rounded up.

    A curve H is straight in e^loss between two losses; minus its slope is the second law's mass beyond. Where one curve
    is the largest at three losses in a row, the mass in the middle is its own.
    """
    error = 8.0 * _UNIT * len(loss)
    falls = np.exp(-loss)
    # e^-loss H and the second law's mass, both of what lies beyond each loss: sums of positive terms.
    scaled, beyond = [], []
    for mass in masses:
        behind = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        scaled.append(np.append(np.cumsum((-np.diff(falls) * behind[1:-1])[::-1])[::-1], 0.0))
        beyond.append(np.append(np.cumsum((mass * falls)[::-1])[::-1], 0.0)[1:])
    best, every = np.argmax(scaled, axis=0), np.arange(len(loss))
    found: Array = np.array(masses)[best, every] * (1.0 + error)
    after = np.append(best[1:], best[-1])
    most, least = np.array(beyond)[best, every] * (1.0 + error), np.array(beyond)[after, every] * (1.0 - error)
    # Where another curve becomes the largest, the slope lies between theirs, and the masses at both ends change.
    changes = np.flatnonzero(best != after)
    top = np.array(scaled)[best, every] / falls
    rise = np.expm1(np.diff(loss)[changes]) / falls[changes]
    slope, inexact = (top[changes] - top[changes + 1]) / rise, 4.0 * error * top[changes] / rise
    most[changes] = np.minimum(most[changes], slope + inexact)
    least[changes] = np.maximum(least[changes], slope - inexact)
    ends = np.union1d(changes[changes > 0], changes + 1)
    found[ends] = np.maximum(most[ends - 1] - least[ends], 0.0) / falls[ends] * (1.0 + error)
    return found


def _loss(kind: SampledRounds, x: Array) -> Array:
    """Returns the loss l(x) for x >= μ/2."""
    exponent = np.maximum(kind.mu * (x - 0.5 * kind.mu), 0.0)
    small = np.minimum(exponent, 30.0)
    beyond = math.log(kind.rate) + exponent + np.log1p((1.0 - kind.rate) / kind.rate * np.exp(-exponent))
    return np.where(exponent > 30.0, beyond, np.log1p(kind.rate * np.expm1(small)))


def _output(kind: SampledRounds, loss: Array) -> Array:
    """Returns the x with l(x) = loss."""
    return np.log1p(np.expm1(loss) / kind.rate) / kind.mu + 0.5 * kind.mu


def _rough(kind: SampledRounds, level: float) -> _Losses:
    """Returns the losses of one round on a coarse grid of equally spaced outputs, without the farthest ones."""
    pieces = _PIECES // len(kind.pairs)
    losses = [_loss(pair, np.linspace(0.5 * pair.mu, pair.farthest(level), pieces)) for pair in kind.pairs]
    return _pair(kind, np.unique(np.append(np.concatenate(losses), 0.0)))


class _Composition:
    """δ of all rounds. Losses that are large, but too rare to matter for δ, are taken for infinite."""

    def __init__(self, kinds: Sequence[SampledRounds], points: int) -> None:
        self._kinds, self._points = kinds, points
        self._level = 2
        self._cuts: dict[int, _Cut] = {}

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on δ at this ε."""
        found = 1.0
        tried: set[int] = set()
        while self._level not in tried:
            tried.add(self._level)
            if self._level not in self._cuts:
                self._cuts[self._level] = _Cut(self._kinds, self._points, 10.0 ** (-4 * self._level))
            cut = self._cuts[self._level]
            here = cut.delta(epsilon)
            found = min(found, here)
            # The first of the levels that are negligible against δ, if the finite losses tell that.
            finite = max(here - cut.infinite, _TINY)
            self._level = min(max(1, math.ceil(0.25 * math.log10(1.0 / (_NEGLIGIBLE * finite)))), _DEEPEST)
        return found


class _Cut:
    """δ of all rounds, by sums of losses or by Rényi divergences, whichever is smaller.

    Attributes:
        infinite: Upper bound on the probability of a loss that counts as infinite, in any round.
    """

    def __init__(self, kinds: Sequence[SampledRounds], points: int, level: float) -> None:
        self._kinds, self._points, self._level = kinds, points, level
        self._rough = [(_rough(kind, level), kind.count) for kind in kinds]
        self.infinite = math.fsum(count * losses.infinite for losses, count in self._rough) * (1.0 + 1e-14)
        self._sums: _Sums | None = None

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on δ at this ε, of all rounds."""
        power = self._best_power(epsilon)
        chernoff = self._log_moment(power) - power * epsilon
        # Canonne, Kamath and Steinke 2020, Proposition 12, with α = power + 1.
        order = power + 1.0
        renyi = chernoff + power * math.log1p(-1.0 / order) - math.log(order)
        found = math.exp(min(0.0, renyi + 1e-13 * (2.0 + abs(renyi) + power * epsilon))) + self.infinite
        if self._sums is None or not self._sums.suits(epsilon):
            self._sums = self._new_sums(epsilon, power, chernoff)
        return min(found, sum(self._sums.delta(epsilon))) if self._sums is not None else found

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
        low, high = math.log(power), _LOG_POWERS[1]
        while high - low > 0.01:
            middle = 0.5 * (low + high)
            top = self._mean(math.exp(middle))
            deep = self._log_moment(math.exp(middle)) - math.exp(middle) * top <= chernoff - _DEPTH
            low, high = (low, middle) if deep and top > epsilon else (middle, high)
        larger = math.exp(high)
        largest = math.fsum(count * float(losses.loss.max()) for losses, count in self._rough)
        # Where no tail is negligible the window holds all sums, and where no sum is as large as ε, any window does.
        top = self._mean(larger) if high < _LOG_POWERS[1] else 1.01 * largest
        top = max(top, epsilon + 1e-6)
        if top > 2.0 * _LARGEST_LOSS:
            return None
        # The sums that are taken for others are those further below ε than the window is long.
        variance = math.fsum(count * losses.variance(power) for losses, count in self._rough)
        length = max(2.2 * (top - epsilon), 9.0 * math.sqrt(max(0.0, variance)))
        return _Sums(self._kinds, self._points, self._level, top, length, power, larger)


class _Sums:
    """Sums of losses, tilted by e^(power loss), on a grid, modulo a window of this length that ends at `top`.

    Sums below the window are taken for larger ones, which only adds to δ. The probability of those above it is added
    to δ, by a Chernoff bound with `top_power`.
    """

    def __init__(
        self,
        kinds: Sequence[SampledRounds],
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
            losses = self._grid(kind, level)
            tilted, scale = losses.tilted(power)
            steps = np.arange(len(losses.loss) // 2)
            masses = np.zeros(points)
            np.add.at(masses, np.concatenate([steps, -steps]) % points, tilted)
            norm = _norm(masses)
            spectrum *= _power(np.fft.rfft(masses), kind.count)
            largest += kind.count * int(steps[-1])
            self._scale += kind.count * scale
            self._shift += kind.count * losses.short
            self._infinite += kind.count * losses.infinite
            tail += kind.count * losses.log_moment(top_power)
            inexact += kind.count * _UNIT * (1e4 + 4.0 * (power * float(losses.loss.max()) + abs(scale)))
            growth += kind.count * (max(0.0, math.log(float(masses.sum()))) + roundings * math.sqrt(points) * norm)
            norms += kind.count * norm
        self._sums = np.maximum(np.fft.irfft(spectrum, points).astype(np.float64), 0.0)
        count = sum(kind.count for kind in kinds)
        norm = _norm(self._sums)
        self._error = 1.1 * math.exp(min(growth, 700.0)) * (roundings * (norms + norm) + 4.0 * _UNIT * count * norm)
        self._inexact = math.exp(min(inexact, 700.0)) * (1.0 + 1e-12)
        if largest > self._last:
            log_tail = tail - top_power * self._last * self._interval
            self._infinite += math.exp(min(0.0, log_tail + 1e-13 * (1.0 + abs(tail))))

    def _grid(self, kind: SampledRounds, level: float) -> _Losses:
        """Returns the losses of one round on the grid, without the farthest ones."""
        farthest = max(float(_loss(pair, np.array([pair.farthest(level)]))[0]) for pair in kind.pairs)
        steps = min(math.ceil(farthest / self._interval), _MOST_WINDOWS * self._points)
        loss = self._interval * np.arange(steps + 1, dtype=np.float64)
        return _pair(kind, loss)

    def suits(self, epsilon: float) -> bool:
        """Returns whether the window holds this ε and the error of δ there is negligible."""
        if not self._last - self._points < (epsilon - self._shift) / self._interval - 2 < self._last - 2:
            return False
        estimate, error = self.delta(epsilon)
        return error <= _NEGLIGIBLE * estimate

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Returns an estimate of δ at this ε, and a bound on its error: their sum is an upper bound on δ.

        The error comes from the FFT, from floating point and from losses beyond the window.
        """
        # The sums of losses may be too small by up to `_shift`; a smaller ε makes up for that.
        epsilon -= self._shift + 8.0 * _UNIT * (epsilon + self._last * self._interval)
        first = math.floor(epsilon / self._interval) + 1
        if first <= self._last - self._points or self._scale - self._power * self._interval * first > 700.0:
            return 1.0, 0.0  # below the window, or so far below the tilt that numbers would overflow
        if first > self._last:
            return 0.0, self._infinite + _TINY
        steps = np.arange(first, self._last + 1)
        loss = self._interval * steps
        weights = np.exp(self._scale - self._power * loss) * -np.expm1(epsilon - loss)
        weights *= 1.0 + 8.0 * _UNIT * (1.0 + abs(self._scale) + self._power * float(loss[-1]))
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
