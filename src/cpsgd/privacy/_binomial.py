"""The Binomial law on a window around its mode, with bounds on every rounding error.

No special function is involved. The ratios f(j+1)/f(j) = (N-j) p / ((j+1)(1-p)) are exact up to a few roundings,
products of them from the mode outwards give f up to a constant, and the sum of the window gives the constant. All
terms are positive, so relative errors only add up: M steps of five roundings each, M additions and the division by
the total keep every mass and every tail sum within 13 M 2^-53 (2·10^-10 at N = 10^8). What lies outside the window
is bounded by a geometric series, because the ratios decrease away from the mode. For p > 1/2 failures are counted
instead of successes: 1 - p then has no rounding error, and points near N keep their distance to N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ConditionError

Array = NDArray[np.float64]

MAX_POINTS = 2**24
MAX_TRIALS = 2**52
"""Up to here all integers involved are exact in floating point."""

# Products stay clear of subnormal numbers, where relative accuracy is lost.
_SMALLEST_WEIGHT = 1e-290
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Window:
    """Binomial(N, p) on the integers first, ..., first + len(mass) - 1.

    With Z of that law, z = first + i and r = `error`, the exact values lie within
        P(Z = z)  in  mass[i] (1 ± r),
        P(Z <= z) in  [below[i] (1 - r), below[i] (1 + r) + outside_below],
        P(Z > z)  in  [above[i] (1 - r), above[i] (1 + r) + outside_above].
    """

    first: int
    mass: Array
    below: Array
    above: Array
    outside_below: float
    outside_above: float
    error: float

    @property
    def last(self) -> int:
        """The largest integer in the window."""
        return self.first + len(self.mass) - 1


def window(trials: int, p: float, nats: float, margin: int = 0) -> Window:
    """The window outside of which at most about e^-nats of the mass lies, and `margin` points more at each end.

    Args:
        trials: N >= 1.
        p: Success probability, strictly between 0 and 1.
        nats: How deep into the tails the window goes. It is cut where masses fall under 1e-290 of the mode's.
        margin: Additional points at both ends.

    Raises:
        ConditionError: N > 2^52, or the window would have more than 2^24 points (N beyond about 10^12).
    """
    if trials > MAX_TRIALS:
        raise ConditionError(
            f"Binomial({trials}, {p:g}) is not computed: at most N=2^52 trials are. "
            "Account for fewer trials: noise left out of the account is only a loss, never a danger."
        )
    if p > 0.5:
        return _mirrored(window(trials, 1.0 - p, nats, margin), trials)
    variance = trials * p * (1.0 - p)
    # Bernstein's inequality: this far from the mean only e^-nats is left on either side. It only has to be wide
    # enough; the bounds below do not rest on it.
    reach = math.sqrt(2.0 * variance * nats) + 2.0 / 3.0 * nats + 2.0 + margin
    mode = min(trials, math.floor((trials + 1) * p))
    first = max(0, math.floor(mode - reach))
    last = min(trials, math.ceil(mode + reach))
    if last - first >= MAX_POINTS:
        raise ConditionError(
            f"Binomial({trials}, {p:g}) would need {last - first + 1} points; at most {MAX_POINTS} are computed. "
            "Account for fewer trials: noise left out of the account is only a loss, never a danger."
        )
    odds = p / (1.0 - p)
    steps = np.arange(mode, last, dtype=np.float64)
    upwards = np.cumprod((trials - steps) / (steps + 1.0) * odds)
    upwards = upwards[: np.count_nonzero(upwards > _SMALLEST_WEIGHT)]
    steps = np.arange(mode, first, -1, dtype=np.float64)
    downwards = np.cumprod(steps / (trials - steps + 1.0) / odds)
    downwards = downwards[: np.count_nonzero(downwards > _SMALLEST_WEIGHT)]
    first, last = mode - len(downwards), mode + len(upwards)

    weight = np.concatenate([downwards[::-1], [1.0], upwards])
    below = np.cumsum(weight)
    above = np.append(np.cumsum(weight[:0:-1])[::-1], 0.0)
    total = float(below[-1])
    # The masses outside form sums that shrink faster than geometric ones with the ratio at the window's end.
    outside_below = _beyond(float(weight[0]) / total, first / (trials - first + 1.0) / odds)
    outside_above = _beyond(float(weight[-1]) / total, (trials - last) / (last + 1.0) * odds)
    error = 13.0 * _UNIT * (len(weight) + 8) + 1.01 * (outside_below + outside_above)
    return Window(
        first=first,
        mass=weight / total,
        below=below / total,
        above=above / total,
        outside_below=outside_below,
        outside_above=outside_above,
        error=error,
    )


def _mirrored(law: Window, trials: int) -> Window:
    """The law of N - Z."""
    return Window(
        first=trials - law.last,
        mass=law.mass[::-1],
        below=np.append(1.0, law.above[:-1])[::-1],
        above=np.append(0.0, law.below[:-1])[::-1],
        outside_below=law.outside_above,
        outside_above=law.outside_below,
        error=law.error,
    )


def _beyond(end_mass: float, ratio: float) -> float:
    """Upper bound on the mass beyond the window's end, given the mass there and the ratio of the next mass to it."""
    if ratio >= 1.0:
        raise ValueError("The Binomial's window does not reach past its mode; widen it.")
    # 1e-6 covers the relative error of `end_mass` for every window that is computed.
    return end_mass * ratio / (1.0 - ratio) * (1.0 + 1e-6)
