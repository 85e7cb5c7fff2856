"""Rounds whose cohort is a random subset of fixed size, with replace-one neighbours, composed.

A round is dominated by one pair of laws, or by the largest curve of several such pairs. Let A = (1-q) N(0,1) +
q N(μ,1) and B = N(0,1). The loss is l(x) = log(1 + q(e^(μx - μ²/2) - 1)), positive for x > μ/2. The first law has A's
mass at the losses l(x) > 0, B's mass at their negatives, and the rest at loss 0. The second law is the first mirrored.
Losses of independent pairs add up.

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
from cpsgd.privacy.loss_sums import LARGEST_LOSS, UNIT, Composition, Losses

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

# Assumed of scipy.special.ndtr(-x): relative error within 1e-14 + x² 2^-52, and of erf: within 1e-14 (the tests compare
# them with mpmath). Twice that covers the sums and products they go into.
_SPECIAL = 2e-14
# Normal laws are cut off here, where a tail is 6e-300.
_FARTHEST = 37.0
# Points at which a normal law is cut into pieces where no grid of losses is needed.
_PIECES = 4_000
# Rounding errors of exponentials, relative.
_EXP_ERROR = 4.0 * UNIT
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

    def rough(self, level: float) -> Losses:
        """Returns the losses of one round on a coarse grid, without those that are rarer than `level`."""
        return _rough(self, level)

    def on_grid(self, interval: float, most: int, level: float) -> Losses:
        """Returns the losses of one round at multiples of `interval`, at most `most` of them above zero."""
        farthest = max(float(_loss(pair, np.array([pair.farthest(level)]))[0]) for pair in self.pairs)
        return _pair(self, interval * np.arange(min(math.ceil(farthest / interval), most) + 1, dtype=np.float64))

    @property
    def _largest(self) -> float:
        return 0.5 * self.mu + (math.log1p(math.expm1(LARGEST_LOSS) / self.rate)) / self.mu


def sampled_profile(kinds: Sequence[SampledRounds], points: int) -> Callable[[float], float]:
    """Returns upper bounds on δ as a function of ε >= 0 for all the rounds together.

    Example:
        >>> from cpsgd.privacy.loss_sums import FINE_POINTS
        >>> delta = sampled_profile([SampledRounds(mu=1.0, rate=0.01, count=1000)], FINE_POINTS)
        >>> f"{delta(1.5):.3g}"
        '0.000844'
    """
    return Composition(kinds, points).delta


def sampled_divergence(mu: float, rate: float, order: float) -> tuple[float, float]:
    """Returns the Rényi divergence of one round, rounded up, and the mass of losses that it leaves out.

    Example:
        >>> f"{sampled_divergence(1.0, 0.01, 8)[0]:.3g}"
        '0.00126'
    """
    losses = _rough(SampledRounds(mu, rate, 1), _RARE)
    return losses.log_moment(order - 1.0) / (order - 1.0) * (1.0 + 4.0 * UNIT), losses.infinite


def _pair(kind: SampledRounds, loss: Array) -> Losses:
    """Returns the losses of one round, rounded to the values ±`loss`; `loss` rises from 0."""
    each = [_positive(pair, loss) for pair in kind.pairs]
    above = _largest(loss, [mass for mass, _, _ in each]) if len(each) > 1 else each[0][0]
    # The pair is its own mirror image. The rest, up to 1, has the loss 0.
    below = above * np.exp(-loss) * (1.0 + _EXP_ERROR)
    total = float(above.sum()) + float(below.sum())
    below[0] += max(0.0, 1.0 - total) + 1e-13
    infinite, short = max(part[1] for part in each), max(part[2] for part in each)
    return Losses(np.concatenate([loss, -loss]), np.concatenate([above, below]), infinite, short)


def _positive(kind: SampledRounds, loss: Array) -> tuple[Array, float, float]:
    """Returns the first law's masses at losses >= 0, its mass beyond the last one, and the largest error of a loss."""
    mu, rate, x = kind.mu, kind.rate, _output(kind, loss)
    # An output is computed from a loss with a few roundings.
    short = 16.0 * UNIT * (2.0 + float(loss[-1]) - math.log(rate) + mu * (mu + float(x[-1])))
    inexact = _SPECIAL + 8.0 * UNIT * float(x[-1]) ** 2
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
    error = 8.0 * UNIT * len(loss)
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


def _rough(kind: SampledRounds, level: float) -> Losses:
    """Returns the losses of one round on a coarse grid of equally spaced outputs, without the farthest ones."""
    pieces = _PIECES // len(kind.pairs)
    losses = [_loss(pair, np.linspace(0.5 * pair.mu, pair.farthest(level), pieces)) for pair in kind.pairs]
    return _pair(kind, np.unique(np.append(np.concatenate(losses), 0.0)))
