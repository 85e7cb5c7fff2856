"""The law of the noise in one coordinate of a sum, as the accountant needs it.

`Normal` is the exact Gaussian. `Law` is a log-concave law on the integers: the certificates of `cpsgd.privacy` need
nothing of a mechanism but this, so a mechanism with such a law gets all of them.

A law is given by the ratios of neighbouring masses, f(j+1)/f(j), which fall with j. Products of them from the mode
outwards give f up to a constant, and the sum of a window gives the constant; no special function is involved. All terms
are positive, so relative errors only add up. K steps from the mode outwards have six roundings each, a sum of M masses
M - 1 more, and the division by the total has those of the total: every mass and every tail sum is within (12 K + 2 M)
2^-53, and a few roundings. What lies outside the window is bounded by a geometric series,
because the ratios fall away from the mode.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ConditionError, ParameterError

Array = NDArray[np.float64]

MAX_POINTS = 2**24
"""The widest window that is computed."""

# Products stay clear of subnormal numbers, where relative accuracy is lost.
_SMALLEST_WEIGHT = 1e-290
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Summands:
    """The independent integers that a sum is made of in one coordinate, for computing its exact law by convolution.

    A client's *point* says where its coordinate lies between the levels, from 0 to k - 1.

    Attributes:
        client: Maps a point to the first outcome and the masses of one of a client's integers.
        copies: Number of such integers that a client adds up.
        first: First outcome of what is added beside the clients' integers.
        mass: Its masses.
        largest: No integer is ever further from its mean than this.
        narrowing: A mass of the sum of all integers but one is at most this many times a neighbouring mass of the sum.
    """

    client: Callable[[float], tuple[int, Array]]
    copies: int = 1
    first: int = 0
    mass: Array = field(default_factory=lambda: np.ones(1))
    largest: float = 1.0
    narrowing: float = 2.0


@dataclass(frozen=True)
class Normal:
    """A Gaussian of this standard deviation, on the real numbers."""

    deviation: float

    def summands(self, nats: float) -> Summands:
        """Raises `ParameterError`: a sum of floats is no sum of integers."""
        raise ParameterError("Only sums of integers have a law that can be convolved.")


@dataclass(frozen=True)
class RoundedNormal(Normal):
    """A Gaussian on the real numbers, of which clients send rounded parts.

    Attributes:
        part: Standard deviation of what one client adds before it rounds to the nearest integer.
        lowest: The mean of a client's integer whose coordinate is at the lower end of its range.
        method: Name of the proof that covers this law.
    """

    part: float
    lowest: float
    method: str = "rounded-gaussian"

    def summands(self, nats: float) -> Summands:
        """Returns the clients' integers: Gaussian noise around the client's point, rounded to the nearest integer.

        Moments are those of a Gaussian and of numbers uniform on a level, which are sums of ever smaller parts.
        """
        reach = math.ceil(math.sqrt(2.0 * nats) * self.part) + 1

        from scipy.special import ndtr  # late: who only encodes does without SciPy

        def client(point: float) -> tuple[int, Array]:
            middle = math.floor(self.lowest + point)
            ends = (np.arange(-reach, reach + 2) - 0.5 + (middle - self.lowest - point)) / self.part
            # By the nearer tail, so that small masses keep their digits.
            return middle - reach, np.where(ends[1:] <= 0.0, np.diff(ndtr(ends)), -np.diff(ndtr(-ends)))

        return Summands(client)


@dataclass(frozen=True)
class SlotsAndCoins:
    """Correlated Gaussian noise, rounded at random by every client: what the proof about a run needs.

    Attributes:
        untold: Lower bound on the messages of a round, beside the client's own, whose own noise z stays secret.
        told: Upper bound on the messages of a round whose own noise z may be revealed.
        deviation: Standard deviation of z, in steps.
        point: The distance of two points of z's grid, in steps.
        room: How far z may go towards the nearer end of the window in a message that has the largest coordinate and
            inherits the most, in deviations.
        farther: The same towards the other end.
        weighting: The weights, and the run's length: a `Correlation`.
    """

    untold: int
    told: int
    deviation: float
    point: float
    room: float
    farther: float
    weighting: Any

    def saturating(self, margin: float) -> float:
        """Returns an upper bound on the probability that a message comes within this many deviations of an end."""
        ends = (self.room - margin) / math.sqrt(2.0), (self.farther - margin) / math.sqrt(2.0)
        return min(1.0, 0.5 * sum(math.erfc(end) for end in ends) * (1.0 + 1e-9))

    def summands(self, nats: float) -> Summands:
        """Raises `ParameterError`: only the whole run has a law, single rounds have none."""
        raise ParameterError("The rounds of a run with correlated noise have no common law that can be convolved.")


@dataclass(frozen=True)
class Steps:
    """A sum without separate noise: every client adds independent small integers whose law is affine in its coordinate.

    With x the client's coordinate over X, clipped to [-1, 1], one of its integers is v with the probability
    ((1 - x) low[v] + (1 + x) high[v]) / 2. A sum of such integers over clients is log-concave, and it rises with x in
    the order of likelihood ratios.

    Attributes:
        low: Masses of the integers 0, 1, ... at x = -1.
        high: Masses at x = 1.
        clients: Honest clients in the sum.
        copies: How many such integers a client adds up per coordinate, independently and with the same x.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    clients: int
    copies: int = 1

    def summands(self, nats: float) -> Summands:
        """Returns the clients' integers, whose law is affine in a client's point from 0 to 1."""
        low, high = np.array(self.low), np.array(self.high)
        integers = np.arange(len(low))
        largest = max(float(np.max(np.abs(integers - end @ integers))) for end in (low, high))
        # The largest mass of a part is convex in the point, and the same at points that mirror each other: least at ½.
        narrowing = 2.0 / float(np.max(low + high))
        return Summands(
            lambda point: (0, (1.0 - point) * low + point * high), self.copies, largest=largest, narrowing=narrowing
        )


@dataclass(frozen=True)
class Window:
    """A law on the integers first, ..., first + len(mass) - 1.

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


class Law(ABC):
    """A log-concave law on the integers with ratios of neighbouring masses that can be computed.

    Attributes:
        variance: Its variance.
        lowest: The smallest possible value, or minus infinity.
        highest: The largest possible value, or infinity.
        mirror: z and mirror - z are equally likely, exactly; None where the law is not symmetric.
        parts: How many independent equal parts the noise is the sum of, such as coins or clients.
        part_name: What a part is called in messages.
    """

    variance: float
    lowest: float
    highest: float
    mirror: int | None
    parts: int
    part_name: str

    @abstractmethod
    def window(self, nats: float, margin: int = 0) -> Window:
        """Returns the window beyond which at most about e^-nats of the mass lies, `margin` points wider at each end.

        Args:
            nats: How deep into the tails the window goes. It is cut where masses fall under 1e-290 of the mode's.
            margin: Additional points at both ends.

        Raises:
            ConditionError: The window would have more than 2^24 points.
        """

    @abstractmethod
    def step(self, points: Array, direction: int) -> tuple[Array, Array]:
        """Returns f(i - direction)/f(i) - 1 at each point, direction ±1, and bounds on the ratios' relative errors.

        Those bounds are in units of 2^-53.
        """

    def summands(self, nats: float) -> Summands:
        """Returns this noise, without the rarest e^-nats, and the clients' rounding to a level next to their point.

        The noise is a sum of independent coins, or a limit of such sums, as the rounding is.
        """
        window = self.window(nats)

        def client(point: float) -> tuple[int, Array]:
            below = math.floor(point)
            return below, np.array([1.0 - (point - below), point - below])

        return Summands(client, first=window.first, mass=window.mass)

    @abstractmethod
    def with_parts(self, parts: int) -> Self:
        """Returns the law of the sum of another number of parts."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns name and parameters, for messages."""


def window_of_ratios(
    mode: int, downwards: Array, upwards: Array, next_down: float, next_up: float, extra_steps: int = 0
) -> Window:
    """Returns the window of a law from its mode and ratios of masses.

    Args:
        mode: Where the mass is largest.
        downwards: f(j-1)/f(j) for j = mode, mode - 1, ..., each within five roundings.
        upwards: f(j+1)/f(j) for j = mode, mode + 1, ..., each within five roundings.
        next_down: The ratio that would follow `downwards`, or an upper bound on it.
        next_up: The ratio that would follow `upwards`, or an upper bound on it.
        extra_steps: Steps of five roundings that the ratios themselves took beforehand.
    """
    weights_up = np.cumprod(upwards)
    weights_up = weights_up[: np.count_nonzero(weights_up > _SMALLEST_WEIGHT)]
    weights_down = np.cumprod(downwards)
    weights_down = weights_down[: np.count_nonzero(weights_down > _SMALLEST_WEIGHT)]
    # Where the window was cut, the ratio that follows is one of those given.
    next_up = float(upwards[len(weights_up)]) if len(weights_up) < len(upwards) else next_up
    next_down = float(downwards[len(weights_down)]) if len(weights_down) < len(downwards) else next_down

    weight = np.concatenate([weights_down[::-1], [1.0], weights_up])
    below = np.cumsum(weight)
    above = np.append(np.cumsum(weight[:0:-1])[::-1], 0.0)
    total = float(below[-1])
    # The masses outside form sums that shrink faster than geometric ones with the ratio at the window's end.
    outside_below = _beyond(float(weight[0]) / total, next_down)
    outside_above = _beyond(float(weight[-1]) / total, next_up)
    steps = max(len(weights_down), len(weights_up)) + extra_steps
    error = (12.0 * steps + 2.0 * len(weight) + 16.0) * _UNIT * 1.01 + 1.01 * (outside_below + outside_above)
    return Window(
        first=mode - len(weights_down),
        mass=weight / total,
        below=below / total,
        above=above / total,
        outside_below=outside_below,
        outside_above=outside_above,
        error=error,
    )


def check_points(points: int, law: Law) -> None:
    """Refuses a window of too many points.

    Raises:
        ConditionError: The window has more than 2^24 points.
    """
    if points > MAX_POINTS:
        raise ConditionError(
            f"{law} would need {points} points; at most {MAX_POINTS} are computed. "
            "Account for less noise: noise left out of the account is only a loss, never a danger."
        )


def _beyond(end_mass: float, ratio: float) -> float:
    """Bounds the mass beyond the window's end, given the mass there and the ratio of the next mass to it."""
    if ratio >= 1.0:
        raise ValueError("The law's window does not reach past its mode; widen it.")
    # 1e-6 covers the relative error of `end_mass` for every window that is computed.
    return end_mass * ratio / (1.0 - ratio) * (1.0 + 1e-6)
