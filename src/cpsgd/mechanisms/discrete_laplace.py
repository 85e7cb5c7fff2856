"""Rounding to k levels plus shares of discrete Laplace noise: pure differential privacy (δ = 0) for few coordinates.

A client adds the difference of two Pólya variables (negative binomial of real shape 1/m, m = `shares`). The sum over m
clients is the difference of two geometric variables: the discrete Laplace law, P(Z = z) proportional to e^(-|z|/t)
(Ács and Castelluccia, "I Have a DREAM!", 2011; Goryczka and Xiong, "A Comprehensive Comparison of Multiparty Secure
Additions with Differential Privacy", 2015). docs/proofs/pure-laplace.md has the proofs, also for fewer and for more
honest clients than m.

Messages are integers modulo `window`, and so are sums. Only then may noise be unbounded, and only unbounded noise has
pure differential privacy: reduction modulo a number is post-processing of the sum.

The sampler is exact. A geometric variable G with α = e^(-1/t) is drawn as by Canonne, Kamath and Steinke (2020, with
rational probabilities alone). Given G, a share of it is drawn by a Pólya urn: of the G units one after the other goes
to the client with probability (1/m + k)/(1 + j) = (1 + m k)/(m (1 + j)), where k of the j units before did. For G is
the sum of two independent negative binomial variables of shapes 1/m and 1 - 1/m, and given their sum the first is
beta-binomial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._exact import geometric, heads
from cpsgd.codec.clip import MAX_LEVELS
from cpsgd.codec.rounding import COINS, PythonKernel, Rounder, Table
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import Binomial
from cpsgd.mechanisms.interface import Mechanism, Search
from cpsgd.mechanisms.lattice import IntegerNoise, Lattice
from cpsgd.mechanisms.law import Array, Summands
from cpsgd.randomness import Keystream

MAX_SPREAD = 2**12
"""The largest t: drawing takes time in proportion to it."""
# Where a plan chooses t: with this many times √n, all clients' rounding is less than a hundredth of the noise.
_ENOUGH, _LEAST_ENOUGH = 4, 64
MAX_SHARES = 2**24
MAX_WINDOW = 2**32 - 1
_UNIT = 2.0**-53
# Bytes of a key per coordinate, from which the sampler draws as many as it needs.
_KEY_BYTES = 16

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PolyaLaw:
    """The difference of two negative binomial variables of shape `parts`/`shares`, each with α = e^(-1/t).

    Attributes:
        spread: t times the divisor.
        shares: m; as many parts make the discrete Laplace law.
        parts: Honest clients in the sum.
        moved: What each part is moved up by, which costs nothing.
        divisor: Denominator of t.
    """

    spread: int
    shares: int
    parts: int
    moved: int = 0
    divisor: int = 1

    @property
    def rate(self) -> float:
        """1/t, within two roundings."""
        return self.divisor / self.spread

    @property
    def shape(self) -> float:
        """Shape r of the sum's law: honest clients over m."""
        return self.parts / self.shares

    @property
    def step_loss(self) -> float:
        """Upper bound on log f(z)/f(z ± 1) over all z: 1/t from m honest clients on, log f(0)/f(1) with fewer."""
        if self.parts >= self.shares:
            return self.rate * (1.0 + 4.0 * _UNIT)
        return self.losses(1)

    def losses(self, steps: int) -> float:
        """Returns an upper bound on log f(0)/f(steps) where there are fewer honest clients than shares.

        f is the law of the difference of two draws from p: f(z) = Σ_k p(k) p(k + z), where
        p(k + 1)/p(k) = α (k + r)/(k + 1) < α.
        Both sums are cut off at K. The rest of f(0) is less than p(K)²/(1 - α²), and is added; the rest of f(steps) may
        be left out, since that makes the bound larger. Every p is a product of at most K ratios.
        """
        masses = self._masses(120.0)
        if steps >= len(masses):
            return math.inf
        alpha = math.exp(-self.rate)
        left = float(masses[-1]) ** 2 / (1.0 - alpha * alpha)
        zero = float(np.sum(masses**2)) + left
        moved = float(np.sum(masses[:-steps] * masses[steps:]))
        return math.log(zero / moved) * (1.0 + 1e-12) + 16.0 * len(masses) * _UNIT

    def _masses(self, nats: float) -> Array:
        """Returns p(0), p(1), ... up to a factor, until e^-nats is left."""
        count = math.ceil(self.spread / self.divisor * (nats + 8.0 + max(self.shape, 1.0) * 8.0)) + 8
        k = np.arange(count, dtype=np.float64)
        with np.errstate(under="ignore"):
            ratios: Array = math.exp(-self.rate) * (k + self.shape) / (k + 1.0)
            found: Array = np.concatenate([[1.0], np.cumprod(ratios)])
        kept: Array = found[found > 1e-280 * found.max()]
        return kept

    def summands(self, nats: float) -> Summands:
        """Returns this noise, without the rarest e^-nats, and the clients' rounding to a level next to their point."""
        one_sided = self._masses(nats)
        one_sided /= one_sided.sum()
        mass = np.convolve(one_sided, one_sided[::-1])

        def client(point: float) -> tuple[int, Array]:
            below = math.floor(point)
            return below, np.array([1.0 - (point - below), point - below])

        first = self.parts * self.moved + 1 - len(one_sided)
        return Summands(client, first=first, mass=mass, largest=float(len(one_sided)))

    def __str__(self) -> str:
        return f"{self.parts} of {self.shares} shares of discrete Laplace noise with spread {1.0 / self.rate:g}"


@dataclass(frozen=True)
class PolyaNoise(IntegerNoise):
    """One of `shares` shares of discrete Laplace noise, moved up to the middle of the window; the sampler is exact.

    Attributes:
        spread: t times the divisor.
        shares: m.
        window: M.
        middle: Integer added to each share.
        divisor: Denominator of t.
    """

    spread: int
    shares: int
    window: int
    middle: int
    divisor: int = 1

    @property
    def rate(self) -> float:
        """1/t, the loss per unit where all shares are in the sum; infinite without noise."""
        return self.divisor / self.spread if self.spread else math.inf

    @property
    def mean(self) -> float:
        """The mean of a share: it is shifted up by `middle`."""
        return float(self.middle)

    @property
    def variance(self) -> float:
        """2 α / (m (1 - α)²), before integers are reduced modulo the window."""
        if not self.spread:
            return 0.0
        return 2.0 / (self.shares * (2.0 * math.sinh(0.5 * self.divisor / self.spread)) ** 2)

    @property
    def largest(self) -> int:
        """Largest value of a share, M - 1: noise is reduced modulo the window M."""
        return self.window - 1

    def law(self, honest: int) -> Any:
        """Returns the difference of two negative binomial laws.

        Raises:
            ConditionError: There is no noise.
        """
        if not self.spread:
            raise ConditionError("spread=0 adds no noise, hence no privacy; use a spread of at least 1.")
        return PolyaLaw(self.spread, self.shares, honest, self.middle, self.divisor)

    def table(self) -> Table:
        """Returns an empty table: this noise is not drawn from one."""
        return COINS

    def cumulant(self, slope: float) -> float:
        """Returns (1/m) log((1 - α)² / ((1 - α e^λ)(1 - α e^-λ))), finite for λ < 1/t."""
        rate = self.rate
        if not self.spread or slope >= (1.0 - 1e-9) * rate:
            return 0.0 if not self.spread else math.inf
        up, down = -math.expm1(slope - rate), -math.expm1(-slope - rate)
        return (2.0 * math.log(-math.expm1(-rate)) - math.log(up) - math.log(down)) / self.shares

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> Integers:
        """Draws the summed noise of `count` clients exactly, from geometric variables and a share of one.

        It is reduced modulo `count` M, which a reduction modulo M does not see.
        """
        whole, rest = divmod(count if self.spread else 0, self.shares)
        found = np.full(dim, count * self.middle, dtype=np.int64)
        for sign in (1, -1):
            for _ in range(whole):
                found += sign * self._geometric(dim, keystream)
            if rest:
                found += sign * _share(self._geometric(dim, keystream), rest, self.shares, keystream)
        return found % (count * self.window)

    def _geometric(self, dim: int, keystream: Keystream) -> Integers:
        """Draws geometric variables: of one with α = e^(-1/spread), every `divisor`-th unit counts."""
        return geometric(self.spread, dim, keystream) // self.divisor

    def of_clients(self, count: int, dim: int, keystream: Keystream) -> Integers:
        """Draws each client's noise separately and adds it up."""
        found = np.zeros(dim, dtype=np.int64)
        for _ in range(count):
            found += self.of_sum(1, dim, keystream)
        return found


class PolyaKernel(PythonKernel):
    """Rounds to a level, adds a client's share, and reduces modulo the window."""

    def __init__(self, rounder: Rounder, noise: PolyaNoise) -> None:
        """Fixes the parameters."""
        self._rounder, self._noise = rounder, noise

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the integers. The first four bytes per coordinate round; the next sixteen key the noise's stream."""
        self._rounder.values(grid, keystream, values)
        stream = Keystream(keystream[4 * grid.size :][:_KEY_BYTES].tobytes())
        noise = self._noise.of_sum(1, grid.size, stream)
        values[:] = (values + noise) % self._noise.window


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplace(Lattice):
    """k levels and shares of discrete Laplace noise, sums modulo a number.

    Attributes:
        spread: t, discrete Laplace noise is z with a probability proportional to e^(-|z|/t); 0 is no noise.
        shares: m, as many clients' noise adds up to discrete Laplace noise: the honest clients of a round.
        window: M, clients' integers and their sums are taken modulo this.
    """

    name = "discrete-laplace"
    title = "rounding and shares of discrete Laplace noise"
    pure = True
    wraps = True
    planned = False

    spread: int
    shares: int
    window: int = field()
    divisor = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MAX_SPREAD * self.divisor
        object.__setattr__(self, "spread", _validate.integer("spread", self.spread, low=0, high=most))
        object.__setattr__(self, "shares", _validate.integer("shares", self.shares, low=1, high=MAX_SHARES))
        window = _validate.integer("window", self.window, low=max(2, self.levels), high=MAX_WINDOW)
        object.__setattr__(self, "window", window)

    @property
    def noise(self) -> PolyaNoise:
        """A client's share of the noise."""
        middle = (self.window - self.levels + 1) // 2
        return PolyaNoise(self.spread, self.shares, self.window, middle, self.divisor)

    @property
    def keystream_bytes(self) -> int:
        """Four bytes for rounding, and a key for the noise."""
        return 4 + _KEY_BYTES

    def kernel(self) -> Any:
        """Returns the kernel: where there is noise, one in Python."""
        rounder = Rounder(self.levels, self.grid.fraction_bits, 0, COINS.high, COINS.low, COINS.base)
        return PolyaKernel(rounder, self.noise) if self.spread or self.window > self.levels else rounder

    @property
    def values(self) -> int:
        """Number of values of a message: the modulus M."""
        return self.window

    def without_noise(self) -> Mechanism:
        """Returns rounding to the same levels without noise."""
        return Binomial(levels=self.levels, trials=0, coordinate_range=self.coordinate_range)

    # ------------------------------------------------------------------ planning

    @classmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """Returns the mechanism with the largest t whose sums fit."""
        if search.values <= levels:
            return None

        def made(spread: int) -> Any:
            return cls(levels=levels, coordinate_range=1.0, spread=spread, shares=search.honest, window=search.values)

        low, high = 1, min(MAX_SPREAD, max(_LEAST_ENOUGH, _ENOUGH * math.isqrt(search.honest)))
        if search.fits(made(high)):
            low = high
        if not search.fits(made(low)):
            return None
        while high > low + max(1, low // 64):
            middle = max(low + 1, math.isqrt(low * high))
            low, high = (middle, high) if search.fits(made(middle)) else (low, middle)
        found: Self = made(low)
        return found

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields numbers of levels, rising by a third, with the most noise each, while sums fit and more may help."""
        if search.honest > MAX_SHARES or search.values > MAX_WINDOW:
            return
        levels = 2
        while levels <= MAX_LEVELS:
            candidate = cls.loudest(levels, search)
            if candidate is None:
                return  # nor will more levels fit
            yield candidate
            _, widest = candidate.useful_scales(dim=search.dim, clip_norm=search.clip_norm, rotate=search.rotate)
            if levels > 3 and search.rough_scale(candidate) >= widest:
                return  # more levels only widen the range, and this one is wide enough already
            levels = levels + 1 if levels < 5 else (4 * levels // 3) | 1

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with a smaller t, hence less noise."""
        spread = min(math.floor(self.spread * math.sqrt(factor)), self.spread - 1)
        return replace(self, spread=spread) if spread >= 1 else None

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns 17 levels in the range of a vector, noise as wide as the levels, and room for all of it."""
        levels, spread = 17, 16
        window = 1 << (clients * (levels - 1) + 80 * spread).bit_length()
        return {
            "levels": levels,
            "coordinate_range": clip_norm,
            "spread": spread,
            "shares": clients,
            "window": min(window, MAX_WINDOW),
        }

    def describe(self) -> str:
        """Returns levels, range, noise and window."""
        return (
            f"k = {self.levels:,} levels in ±{self.coordinate_range:.4g}, one of {self.shares:,} shares of discrete "
            f"Laplace noise with spread {self.spread / self.divisor:,.4g}, modulo {self.window:,}"
        )


def _share(units: Integers, parts: int, shares: int, keystream: Keystream) -> Integers:
    """Draws `parts` of `shares` shares of geometric variables by a Pólya urn."""
    if parts == shares:
        return units
    found = np.zeros(len(units), dtype=np.int64)
    waiting = np.flatnonzero(units > 0)
    j = 0
    while waiting.size:
        numerators = parts + shares * found[waiting]
        given = heads(numerators, np.full(waiting.size, shares * (1 + j), dtype=np.int64), keystream)
        found[waiting[given]] += 1
        j += 1
        waiting = waiting[units[waiting] > j]
    return found
