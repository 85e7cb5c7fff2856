"""Never publish messages or their ids: only the sum, or the mean, of all of them is private.

Whether a client said anything of a coordinate is part of the noise, and a message's id tells it. Who sees single
messages, as the server does, sees less noise than the guarantee speaks of.

A client includes a coordinate with probability r, by a stream that anyone can expand from the message's id, and sends
one biased coin for it: 1 with probability ½ + θ x/X, else -1. A coordinate that is left out counts as 0. So a message
has r bits per coordinate, which may be far less than one, and a client's integers have the three values -1, 0 and 1 (as
0, 1 and 2). The coins come from private randomness, which has nothing to do with the id. A message's length varies with
its id alone.

The law of an integer is affine in x, and log-concave for r <= ⅔, which is why there is that limit.

Secure aggregation is refused. It hides the messages, so that all clients would have to include the same coordinates for
few to be sent; then leaving out is no noise but an error, (1/r - 1)‖mean‖².
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.pack import Integers, Sampled
from cpsgd.codec.rounding import Flipper, PythonKernel
from cpsgd.mechanisms.binomial import Binomial
from cpsgd.mechanisms.interface import Rounding, Search
from cpsgd.mechanisms.law import Steps
from cpsgd.mechanisms.tilted import FRACTION_BITS, Tilted, sixteenth_bits

MAX_RATE = 2.0 / 3.0

_ONE = 1 << FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class SampledCoins(Tilted):
    """A biased coin for a random sample of coordinates.

    Never publish messages or their ids: only the sum, or the mean, of all of them is private.

    Attributes:
        rate: r, the share of coordinates that a client says something of, at most ⅔; a multiple of 2^-16.
        theta: θ, how far a coordinate at the end of its range moves the odds from even; a multiple of 2^-16.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.

    Example:
        >>> from cpsgd.mechanisms import SampledCoins
        >>> print(SampledCoins(rate=0.125, theta=0.25, coordinate_range=0.1).describe())
        1 coin of bias up to 0.25 for 0.125 of the coordinates in ±0.1
    """

    name = "sampled-coins"
    title = "biased coins for some coordinates"
    summary = "1 coin of bias up to {theta:.4g} for {rate:.4g} of the coordinates in ±{coordinate_range:.4g}"
    fewest_values = 1
    not_summed: ClassVar[str | None] = (
        "The sampled-coins protocol is not for secure aggregation or other transports that add up integers: a client "
        "leaves out coordinates of its own choice, and nobody could tell which from a sum. A choice common to all "
        "would be no noise but an error. Use coins, or lazy-coins, which have the same law and may be added up."
    )

    caution: ClassVar[str | None] = (
        "never publish messages or their ids: only the sum, or the mean, of all of them is private"
    )

    rate: float

    def __post_init__(self) -> None:
        remedy = "Nothing is proved for more than two thirds of the coordinates; use coins, a bit for each, instead."
        object.__setattr__(self, "rate", sixteenth_bits("rate", self.rate, most=MAX_RATE, remedy=remedy))
        super().__post_init__()

    @property
    def gain(self) -> float:
        """Factor γ = 2 r of the tilt in a client's mean: an included coordinate's coin has mean 2 θ x/X."""
        return 2.0 * self.rate

    @property
    def variances(self) -> tuple[float, float]:
        """The pair (a, b) = (r, 4 r²) of the variance: E[v²] = r, and the mean is 2 r θ x/X."""
        return self.rate, 4.0 * self.rate**2

    def steps(self, honest: int) -> Steps:
        """Returns the law of sums of -1, 0 and 1."""
        left_out, less, more = 1.0 - self.rate, self.rate * (0.5 - self.theta), self.rate * (0.5 + self.theta)
        return Steps(low=(more, left_out, less), high=(less, left_out, more), clients=honest)

    @property
    def keystream_bytes(self) -> int:
        """Two bytes to choose a coordinate, two for its coin."""
        return 4

    def kernel(self) -> LazyFlipper:
        """Returns the kernel that writes all integers; the choice of coordinates is from the keystream, too."""
        return LazyFlipper(int(self.grid.limit), self._below)

    def device_rounding(self) -> Rounding:
        """Describes the chosen coordinates and their coins to a device's kernels."""
        return Rounding(int(self.grid.limit), _ONE // 2, FRACTION_BITS, rate=self._below)

    def packer(self) -> tuple[Any, int]:
        """Returns the kernel that flips the coins of the chosen coordinates."""
        return Flipper(int(self.grid.limit), 1), 2

    def format(self, clip_norm: float, modulus: int | None) -> Integers:
        """Returns the layout of a message: one bit for each chosen coordinate."""
        return Sampled(2, 2, self._below)

    @property
    def _below(self) -> int:
        return int(self.rate * _ONE)

    @property
    def values(self) -> int:
        """Number of values of a message: -1, 0 and 1."""
        return 3

    @property
    def centre(self) -> float:
        """The mean of a client's integer if x = 0: the value 0, which is sent as 1."""
        return 1.0

    def without_noise(self) -> Binomial:
        """Returns rounding of all coordinates to two levels over the same range: one bit per coordinate."""
        return Binomial(levels=2, trials=0, coordinate_range=self.coordinate_range)

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields, for each range, the largest share of coordinates that the bits allow."""
        rate = MAX_RATE if search.bits is None else min(search.bits, MAX_RATE)
        if rate < 1 / _ONE:
            return
        for reach in cls.ranges(search):
            yield cls(rate=rate, theta=0.125, coordinate_range=reach).at_rough_scale(search)

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy that samples fewer coordinates, whose coins must be tilted more."""
        fewer = min(self._below - 1, int(self._below * factor))
        return replace(self, rate=fewer / _ONE).with_scale(self.scale) if fewer else None

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns parameters that sample a tenth of the coordinates."""
        reach = cls.usual_range(dim=dim, clip_norm=clip_norm, rotate=rotate)
        return {"rate": 0.1, "theta": 0.25, "coordinate_range": reach}


class LazyFlipper(PythonKernel):
    """Coins that are flipped with a probability: 2 for heads, 0 for tails, 1 if not flipped (16-bit word over a limit).

    Instructions and addresses are the same whatever is flipped.
    """

    def __init__(self, limit: int, below: int) -> None:
        self._flipper, self._below = Flipper(limit, 1), np.uint16(below)

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the integers."""
        size = 2 * grid.size
        self._flipper.values(grid, keystream[size : 2 * size], values)
        flipped = (keystream[:size].view("<u2") < self._below).astype(np.uint32)
        # 2 f c + 1 - f, without a branch.
        values *= np.uint32(2)
        values *= flipped
        values += np.uint32(1) - flipped
