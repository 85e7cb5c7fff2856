"""Rounds for which each client is drawn by a coin of its own (Poisson sampling), with zero-out neighbours, composed.

A round is dominated by the pair A = (1-q) N(0,1) + q N(μ,1) and B = N(0,1), or by the same in the other order; all
rounds by the same order. The loss of an output is l(x) = log(1 + q(e^(μx - μ²/2) - 1)), above log(1-q), and rises.

Every number is rounded up. Masses go to the two points of a grid around their loss ("connecting the dots", Doroshenko
et al. 2022). `cpsgd.privacy.loss_sums` adds losses up. docs/proofs/fixed-size.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cpsgd._lazy import Late
from cpsgd.mechanisms.law import Array
from cpsgd.privacy.fixed_size import SampledRounds
from cpsgd.privacy.loss_sums import LARGEST_LOSS, UNIT, Composition, Losses

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

# Assumed of scipy.special.ndtr(-x): relative error within 1e-14 + x² 2^-52. Twice that covers sums and products.
_SPECIAL = 2e-14
# Normal laws are cut off here, and the tail beyond is less than this.
_FARTHEST, _BEYOND = 37.0, 1e-299
# Points at which a normal law is cut into pieces where no grid of losses is needed.
_PIECES = 4_000


@dataclass(frozen=True)
class PoissonRounds:
    """`count` rounds, each μ-GDP for zero-out neighbours; a client is drawn for each with this rate, below 1.

    Attributes:
        mu: μ.
        rate: q.
        count: Number of rounds.
        swapped: Whether the first law is N(0,1), and the second one the mixture.
    """

    mu: float
    rate: float
    count: int
    swapped: bool = False

    def rough(self, level: float) -> Losses:
        """Returns the losses of one round on a coarse grid, without those that are rarer than `level`."""
        farthest = self._farthest(level)
        loss = self._loss(np.linspace(-min(farthest, _FARTHEST), farthest, _PIECES))
        return self.at(np.unique(np.append(loss, [0.0, self._least])))

    def on_grid(self, interval: float, most: int, level: float) -> Losses:
        """Returns the losses of one round at multiples of `interval`, at most `most` of them above zero."""
        farthest = float(self._loss(np.array([self._farthest(level)]))[0])
        first = max(math.floor(self._least / interval), -most)
        last = min(math.ceil(farthest / interval), most)
        return self.at(interval * np.arange(first, last + 1, dtype=np.float64))

    def at(self, loss: Array) -> Losses:
        """Returns the losses of one round, each rounded to two of these values of l; they rise."""
        x = self._output(loss)
        # An output is computed from a loss with a few roundings; those of outputs below zero move the loss less.
        short = 2.0 + float(np.abs(loss).max()) - math.log(self.rate) + self.mu * (self.mu + max(0.0, float(x[-1])))
        short *= 8.0 * UNIT
        inexact = _SPECIAL + 8.0 * UNIT * np.minimum(np.maximum(np.abs(x), np.abs(x - self.mu)), 1e3) ** 2
        # Below the first output above zero lower tails, from there on upper ones.
        turn, upper = int(np.searchsorted(x, 0.0, side="right")), x > 0.0
        tail = special.ndtr(np.where(upper, -x, x))
        mixed = (1.0 - self.rate) * tail + self.rate * special.ndtr(np.where(upper, self.mu - x, x - self.mu))
        if not self.swapped:
            return _dots(loss, mixed, tail, turn, inexact, short)
        return _dots(-loss[::-1], tail[::-1], mixed[::-1], len(x) - turn, inexact[::-1], short)

    @property
    def _least(self) -> float:
        """A number below all losses l(x)."""
        return math.log1p(-self.rate) * (1.0 + 8.0 * UNIT)

    def _farthest(self, level: float) -> float:
        """Returns an output beyond which about this much mass lies, over all rounds."""
        tail = level / self.count
        far = max(-float(special.ndtri(min(0.5, tail))), self.mu - float(special.ndtri(min(0.5, tail / self.rate))))
        largest = 0.5 * self.mu + math.log1p(math.expm1(LARGEST_LOSS) / self.rate) / self.mu
        return max(min(far, self.mu + _FARTHEST, largest), 0.5 * self.mu + 1e-3)

    def _loss(self, x: Array) -> Array:
        """Returns about l(x)."""
        exponent = self.mu * (x - 0.5 * self.mu)
        small = np.log1p(self.rate * np.expm1(np.minimum(exponent, 30.0)))
        return np.where(exponent > 30.0, math.log(self.rate) + exponent, small)

    def _output(self, loss: Array) -> Array:
        """Returns the x with l(x) = loss; -inf where there is none, or so far out that its tail is not computed."""
        grown = np.expm1(loss) / self.rate
        with np.errstate(divide="ignore"):
            exponent = np.log1p(np.maximum(grown, -1.0))
            if self.rate > 0.5:
                # Rounding errors of e^l - (1-q) move the loss the least.
                left = np.maximum((np.exp(np.minimum(loss, 0.0)) - (1.0 - self.rate)) / self.rate, 0.0)
                exponent = np.where(loss < 0.0, np.log(left), exponent)
        x = exponent / self.mu + 0.5 * self.mu
        return np.where(x < -_FARTHEST, -math.inf, x)


def _dots(loss: Array, first: Array, second: Array, turn: int, inexact: Array, short: float) -> Losses:
    """Returns losses with the first law's masses, rounded towards larger losses.

    Args:
        loss: Losses that rise, known within `short`.
        first: The first law's mass below each of the losses before `turn`, and above each of those from there on.
        second: The same of the second law.
        turn: See `first`.
        inexact: Relative errors of these masses.
        short: See `loss`.
    """
    rise, inside = np.exp(loss[:-1]), _between(first, turn)
    others = rise * _between(second, turn)
    error = inside + others + first[:-1] + first[1:] + rise * (second[:-1] + second[1:])
    error *= np.maximum(inexact[:-1], inexact[1:]) + 3.0 * short
    largest = (inside - others + error + _BEYOND * (1.0 + rise)) / -np.expm1(-np.diff(loss))
    # Masses above each loss are rounded up, those below it down.
    first = first * (1.0 + inexact)
    first[:turn] *= 1.0 - 2.0 * inexact[:turn]
    mass = _between(first, turn)
    moved = np.clip(largest, 0.0, mass)
    found = np.zeros_like(loss)
    found[1:] = moved
    found[:-1] += mass - moved
    found[0] += float(first[0]) if turn > 0 else 1.0 - float(first[0])
    beyond = float(first[-1]) if turn < len(loss) else 1.0 - float(first[-1])
    return Losses(loss, found, max(0.0, beyond) + _BEYOND, short)


def _between(tails: Array, turn: int) -> Array:
    """Returns the masses between neighbouring losses; see `_dots`."""
    found = np.diff(tails)
    found[turn:] *= -1.0
    if 0 < turn < len(tails):
        found[turn - 1] = 1.0 - tails[turn - 1] - tails[turn]
    return np.maximum(found, 0.0)


def poisson_profile(kinds: Sequence[PoissonRounds | SampledRounds], points: int) -> Callable[[float], float]:
    """Returns upper bounds on δ as a function of ε >= 0 for all the rounds together, whichever order is worse.

    Unsampled rounds may be among them, as `SampledRounds` of rate 1.

    Example:
        >>> from cpsgd.privacy.loss_sums import FINE_POINTS
        >>> delta = poisson_profile([PoissonRounds(mu=1.0, rate=0.01, count=1000)], FINE_POINTS)
        >>> f"{delta(1.5):.3g}"
        '0.000109'
    """
    swapped = [replace(kind, swapped=True) if isinstance(kind, PoissonRounds) else kind for kind in kinds]
    orders = [Composition(each, points) for each in (kinds, swapped)]

    def delta(epsilon: float) -> float:
        found = orders[0].delta(epsilon)
        # Mostly it is clear at a glance which order is worse.
        return found if orders[1].rough_delta(epsilon) <= found else max(found, orders[1].delta(epsilon))

    return delta
