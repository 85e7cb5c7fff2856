"""Coins that are mostly not flipped: for secure aggregation, where a small modulus matters and not the values sent.

With probability r a client flips a biased coin for a coordinate and sends 1 or -1, else it sends 0. That is the law of
`sampled_coins`, but the client chooses by its own private randomness, tells nobody, and sends all coordinates: so its
integers can be masked and added up. Under secure aggregation a message takes log2 M bits per coordinate, whatever its
values are, and M follows from the spread of the sum. A sum of n coins has a variance of n/4, of n lazy ones n r: with
many clients and more coordinates n/4 is far more noise than privacy needs in one sum. The modulus shrinks by √(4r).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from cpsgd.codec.pack import Integers
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.sampled_coins import MAX_RATE, LazyFlipper, SampledCoins
from cpsgd.mechanisms.tilted import FRACTION_BITS

_ONE = 1 << FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class LazyCoins(SampledCoins):
    """A biased coin per coordinate that is flipped with probability r, else counts as 0.

    Attributes:
        rate: r, the probability that a coordinate's coin is flipped, at most ⅔; a multiple of 2^-16.
        theta: θ, how far a coordinate at the end of its range moves the odds from even; a multiple of 2^-16.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this.

    Example:
        >>> from cpsgd.mechanisms import LazyCoins
        >>> print(LazyCoins(rate=0.125, theta=0.25, coordinate_range=0.1).describe())
        1 coin of bias up to 0.25, flipped with probability 0.125, in ±0.1
    """

    name = "lazy-coins"
    title = "biased coins that are flipped now and then"
    summary = "1 coin of bias up to {theta:.4g}, flipped with probability {rate:.4g}, in ±{coordinate_range:.4g}"
    fewest_values = 3
    not_summed = None
    caution = None

    def packer(self) -> tuple[LazyFlipper, int]:
        """Returns the kernel: all coordinates are sent."""
        return self.kernel(), self.keystream_bytes

    def format(self, clip_norm: float, modulus: int | None) -> Integers:
        """Returns the layout of a message: packed integers of all coordinates."""
        return Integers(modulus or self.values, self.values)

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields, for each range, the largest rate whose sums fit the modulus."""
        if search.values < cls.fewest_values:
            return
        for reach in cls.ranges(search):
            start = cls(rate=MAX_RATE, theta=0.125, coordinate_range=reach)
            low, high = 1, start._below
            if search.fits(start.at_rough_scale(search)):
                low = high
            while high > low + max(1, low >> 7):
                middle = (low + high) // 2
                fits = search.fits(replace(start, rate=middle / _ONE).at_rough_scale(search))
                low, high = (middle, high) if fits else (low, middle)
            yield replace(start, rate=low / _ONE).at_rough_scale(search)

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns a rate of 100 flips per coordinate in a sum, which have the variance of 400 fair coins; at most ½."""
        found = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return {**found, "rate": min(0.5, max(100.0 / clients, 2.0**-10))}
