"""Biased coins: the rounding is the noise, and one bit per coordinate is enough.

A coordinate x, clipped to ±X, becomes the number of heads among m coins that each show heads with probability
½ + θ x/X. The estimate (X/θ)(heads/(n m) - ½) is unbiased. With one coin this is stochastic rounding to two levels
whose range is wider than the coordinate's: no coordinate is ever certain of its level, and so nothing need be added.
(Chen, Ozgur, Kairouz: "The Poisson binomial mechanism", ICML 2022, has the law. The guarantee is ours: theirs, which is
shown beside it, lets every coordinate move over its whole range at once.)

A coin compares 16 bits of keystream with 2^15 + g, g the coordinate's grid point: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from cpsgd import _validate
from cpsgd.codec.rounding import Flipper
from cpsgd.mechanisms.binomial import Binomial
from cpsgd.mechanisms.interface import Rounding, Search
from cpsgd.mechanisms.law import Steps
from cpsgd.mechanisms.tilted import FRACTION_BITS, Tilted

MAX_COINS = 4096
# More coins than these bring nothing that other mechanisms do not do faster: every coin takes two bytes of keystream.
_MOST_PLANNED = 255


@dataclass(frozen=True, kw_only=True)
class Coins(Tilted):
    """The number of heads among m biased coins.

    Attributes:
        coins: m, biased coins per coordinate.
        theta: θ, how far a coordinate at the end of its range moves the odds from even; a multiple of 2^-16.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.

    Example:
        >>> from cpsgd.mechanisms import Coins
        >>> print(Coins(coins=1, theta=0.25, coordinate_range=0.1).describe())
        1 coin of bias up to 0.25 in ±0.1
    """

    name = "coins"
    title = "biased coins"
    fewest_values = 2
    # At ½ a coordinate at the end of its range would be certain.
    most_theta = 0.5 - 2.0**-FRACTION_BITS

    coins: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "coins", _validate.integer("coins", self.coins, low=1, high=MAX_COINS))
        super().__post_init__()

    @property
    def gain(self) -> float:
        """Factor γ of the tilt in a client's mean: m, since every coin adds its own."""
        return float(self.coins)

    @property
    def variances(self) -> tuple[float, float]:
        """The pair (a, b) = (m/4, m) of the variance a - b x̄²: each coin has (½ + x̄)(½ - x̄)."""
        return 0.25 * self.coins, float(self.coins)

    def steps(self, honest: int) -> Steps:
        """Returns the law of coins with odds between ½ - θ and ½ + θ."""
        low, high = 0.5 - self.theta, 0.5 + self.theta
        return Steps(low=(high, low), high=(low, high), clients=honest, copies=self.coins)

    @property
    def keystream_bytes(self) -> int:
        """Two bytes per coin."""
        return 2 * self.coins

    def kernel(self) -> Flipper:
        """Returns the kernel that flips the coins."""
        return Flipper(int(self.grid.limit), self.coins)

    def device_rounding(self) -> Rounding:
        """Describes the m coins to a device's kernels."""
        return Rounding(int(self.grid.limit), 1 << (FRACTION_BITS - 1), FRACTION_BITS, coins=self.coins)

    @property
    def values(self) -> int:
        """m + 1: from no heads to all."""
        return self.coins + 1

    @property
    def centre(self) -> float:
        """Half of the coins."""
        return 0.5 * self.coins

    def without_noise(self) -> Binomial:
        """Returns rounding without noise, to m + 1 levels over the same range."""
        return Binomial(levels=self.values, trials=0, coordinate_range=self.coordinate_range)

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields, for each range, the mechanism with the most coins that the values and the modulus allow."""
        most = min(search.values - 1, _MOST_PLANNED)
        if most < 1:
            return
        for reach in cls.ranges(search):
            start = cls(coins=most, theta=0.125, coordinate_range=reach)
            low, high = 1, most
            if search.fits(start.at_rough_scale(search)):
                low = most
            while high - low > 1:
                middle = (low + high) // 2
                fits = search.fits(replace(start, coins=middle).at_rough_scale(search))
                low, high = (middle, high) if fits else (low, middle)
            yield replace(start, coins=low).at_rough_scale(search)

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with fewer coins, which must be tilted more."""
        if self.coins == 1:
            return None
        fewer = max(1, min(self.coins - 1, int(self.coins * factor)))
        return replace(self, coins=fewer).with_scale(self.scale)

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns one coin, a little tilted."""
        reach = cls.usual_range(dim=dim, clip_norm=clip_norm, rotate=rotate)
        return {"coins": 1, "theta": 0.125, "coordinate_range": reach}

    def describe(self) -> str:
        """Returns coins, tilt and range."""
        coins = "1 coin" if self.coins == 1 else f"{self.coins:,} coins"
        return f"{coins} of bias up to {self.theta:.4g} in ±{self.coordinate_range:.4g}"
