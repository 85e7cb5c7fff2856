"""The paper's mechanism: stochastic rounding to k levels plus Binomial(m, p) noise (section 5).

Two samplers, whose instructions and addresses are the same whatever the outcome:

* **coins**, for p = ½ and m up to 256: the number of ones among m keystream bits. Exact.
* **inversion**, for everything else: a 128-bit uniform number is compared with the cumulative probabilities, each
  rounded to 128 bits. The law differs from Binomial(m, p) by at most `total_variation(m, p)`, below 1e-32 for all m
  here, which the accounting adds to δ. Every draw reads the whole table, so that its time grows with √(m p (1-p)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.rounding import COINS, KEYSTREAM_BYTES, WINDOW_BITS, WORKING_BITS, Table
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import lattice
from cpsgd.mechanisms.interface import ErrorBound, Search
from cpsgd.mechanisms.lattice import IntegerNoise, Lattice
from cpsgd.mechanisms.law import Array, Law, Window, check_points, window_of_ratios
from cpsgd.mechanisms.noise import FairCoins
from cpsgd.paper import bounds
from cpsgd.randomness import Keystream

MAX_TRIALS = 2**31
MAX_COINS = 256
"""More fair coins than these are drawn by inversion."""

# From this many fair coins on, `of_sum` is faster than a device's own sampler.
_MAX_DEVICE_COINS = 1 << 22
# More noise than this is as good as Gaussian already, and slow to certify.
_MOST_NOISE_TRIALS = 10**10
# Up to here all integers involved are exact in floating point.
_MAX_EXACT = 2**52


@dataclass(frozen=True)
class BinomialNoise(IntegerNoise):
    """Binomial(m, p): the number of heads among m coins."""

    trials: int
    p: float

    @property
    def largest(self) -> int:
        """Largest noise of a client: m, when all coins show heads."""
        return self.trials

    @property
    def mean(self) -> float:
        """Mean of a client's noise: m p."""
        return self.trials * self.p

    @property
    def variance(self) -> float:
        """Variance of a client's noise: m p (1 - p)."""
        return self.trials * self.p * (1.0 - self.p)

    def law(self, honest: int) -> BinomialLaw:
        """Returns Binomial(m · honest, p)."""
        if self.trials == 0:
            raise ConditionError("trials=0 adds no noise, so there is no privacy; choose trials >= 1.")
        return BinomialLaw(self.trials * honest, self.p)

    @property
    def variation(self) -> float:
        """Upper bound on the total variation between one draw and its law; 0 for fair coins."""
        return total_variation(self.trials, self.p)

    def cumulant(self, slope: float) -> float:
        """Returns the exact m (log(1 - p + p e^λ) - p λ), for the sign of λ that makes it larger."""
        one = _coin_cumulant(min(self.p, 1.0 - self.p), slope)
        return self.trials * min(0.125 * slope * slope, one)

    def table(self) -> Table:
        """Returns the sampler's table of thresholds, which is empty where fair coins are counted instead."""
        return table(self.trials, self.p)

    @property
    def keystream_bytes(self) -> int:
        """Coins in whole words, or one number of 128 bits."""
        return lattice.coin_bytes(self.trials) if uses_coins(self.trials, self.p) else KEYSTREAM_BYTES

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Draws Binomial(count m, p) in each coordinate: the sum of `count` independent Binomial(m, p)."""
        noise = np.zeros(dim, dtype=np.int64)
        for trials in self._parts(count):
            noise += sample(trials, self.p, dim, keystream)
        return noise

    def sum_variation(self, count: int) -> float:
        """Returns a bound on the total variation of all draws together, inexact even where clients' draws are exact."""
        return sum(total_variation(trials, self.p) for trials in self._parts(count))

    def _parts(self, count: int) -> list[int]:
        """Splits the coins of a sum into draws of at most `MAX_TRIALS`."""
        whole, rest = divmod(count * self.trials, MAX_TRIALS)
        return [MAX_TRIALS] * whole + [rest] * (rest > 0)

    def on_device(self, count: int) -> FairCoins | None:
        """Returns the coins of a sum of `count` clients, for a device; None if p is not ½ or there are too many."""
        trials = count * self.trials
        return FairCoins(trials) if self.p == 0.5 and trials <= _MAX_DEVICE_COINS else None


@dataclass(frozen=True, kw_only=True)
class Binomial(Lattice):
    """k levels and Binomial(m, p) noise.

    Attributes:
        levels: k, the number of levels that a coordinate is rounded to.
        trials: m, coins of a client's noise per coordinate; 0 is rounding without noise, hence without privacy.
        p: Probability of heads, strictly between 0 and 1; ½ by default.
        coordinate_range: X, each (rotated) coordinate is clipped to plus or minus this; commands take the paper's
            choice by default.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> print(Binomial(levels=16, trials=100, coordinate_range=0.1).describe())
        k = 16 levels in ±0.1, m = 100 trials, p = 0.5
    """

    name = "binomial"
    title = "rounding and Binomial noise"
    summary = "k = {levels:,} levels in ±{coordinate_range:.4g}, m = {trials:,} trials, p = {p:g}"
    sampler_remedy = "use p=0.5 and at most 256 trials, or add noise"

    trials: int
    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trials", _validate.integer("trials", self.trials, low=0, high=MAX_TRIALS))
        object.__setattr__(self, "p", _validate.probability("p", self.p))

    @property
    def noise(self) -> BinomialNoise:
        """A client's noise: Binomial(m, p)."""
        return BinomialNoise(self.trials, self.p)

    def without_noise(self) -> Self:
        """Returns the mechanism with m = 0 trials: rounding alone."""
        return replace(self, trials=0, p=0.5)

    def error_bound(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ErrorBound:
        """Returns the bound of the paper's Theorems 3 and 4."""
        bound = bounds.rotated_error if rotate else bounds.rounding_error
        return ErrorBound(
            *bound(
                clients=clients,
                dim=dim,
                clip_norm=clip_norm,
                coordinate_range=self.coordinate_range,
                levels=self.levels,
                noise_variance=self.noise.variance,
                grid_step=self.scale * 2.0**-self.grid.fraction_bits,
            )
        )

    # ------------------------------------------------------------------ planning

    @classmethod
    def loudest(cls, levels: int, search: Search) -> Self:
        """Returns the mechanism with these levels and the largest number m of trials that fits, at least 1."""
        # One draw is within about 15 √m 2^-127 of its law; what a plan promises rests on `total_variation`.
        root = min(search.variation / 15.0 * 2.0**127, math.sqrt(MAX_TRIALS))
        affordable = max(math.floor(root * root), MAX_COINS)
        most = min(search.values - levels, max(1, _MOST_NOISE_TRIALS // search.honest), affordable)
        start = cls(levels=levels, trials=most, coordinate_range=1.0)
        if search.fits(start):
            return start
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if search.fits(replace(start, trials=middle)) else (low, middle)
        return replace(start, trials=low)

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with fewer trials, hence less noise."""
        if self.trials <= 1:
            return None
        return replace(self, trials=max(1, min(self.trials - 1, math.floor(self.trials * factor))))

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns parameters with k + m = 16 values, which take four bits."""
        found = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return {**found, "trials": 14}

    def to_fields(self, clip_norm: float) -> dict[str, Any]:
        """Returns the fields of protocol files since 0.1.0, which name no mechanism."""
        return {
            "coordinate_range": self.coordinate_range,
            "levels": self.levels,
            "trials": self.trials,
            "p": self.p,
            "sigma": None,
        }

    @classmethod
    def of_fields(cls, fields: dict[str, Any], clip_norm: float) -> Self:
        """Returns the mechanism that `to_fields` wrote."""
        own = {name: value for name, value in fields.items() if name != "sigma" or value is not None}
        return super().of_fields(own, clip_norm)


# ---------------------------------------------------------------------- sampling


def _coin_cumulant(p: float, slope: float) -> float:
    """Returns log E exp(λ (Z - p)) of a Z that is 1 with probability p <= ½ and else 0; it is more than for -λ.

    The second derivative at λ is σ'(λ - L), at -λ it is σ'(λ + L), where σ is the logistic function, σ' is even and
    falls away from zero, and L = log((1 - p)/p) >= 0.
    """
    if slope > 700.0:
        return (1.0 - p) * slope
    return (math.log1p(p * math.expm1(slope)) - p * slope) + 1e-15 * (1.0 + slope)


def uses_coins(trials: int, p: float) -> bool:
    """Returns whether the noise is drawn by counting coins, hence exactly."""
    return (p == 0.5 and trials <= MAX_COINS) or trials == 0


def sample(trials: int, p: float, count: int, keystream: Keystream) -> NDArray[np.uint32]:
    """Draws `count` numbers of Binomial(m, p)."""
    return lattice.draw(table(trials, p), trials, count, keystream)


def total_variation(trials: int, p: float) -> float:
    """Returns an upper bound on the total-variation distance of one draw from Binomial(m, p); 0.0 where it is exact.

    What rounding of the thresholds moves, and the outcomes left out of the window: at most m of them, each with less
    than 2^-160 of the likeliest one's mass.
    """
    return 0.0 if uses_coins(trials, p) else table(trials, p).rounding + trials * 2.0 ** (1 - WINDOW_BITS)


@lru_cache(maxsize=16)
def table(trials: int, p: float) -> Table:
    """Returns the thresholds for inversion; empty where coins are counted instead.

    Weights follow from P(j+1)/P(j) = (m-j) p / ((j+1) (1-p)) from the mode outwards, with p as the exact fraction that
    the float is. The mode's neighbours are kept however rare they are.
    """
    if uses_coins(trials, p):
        return COINS
    success = Fraction(p)
    odds, failure = success.numerator, success.denominator - success.numerator
    mode = min(trials, int((trials + 1) * success))
    start, smallest = 1 << WORKING_BITS, 1 << (WORKING_BITS - WINDOW_BITS)

    upper = [start]
    for j in range(mode, trials):
        weight = upper[-1] * (trials - j) * odds // ((j + 1) * failure)
        if weight < smallest and len(upper) > 1:
            break
        upper.append(weight)
    lower = [start]
    for j in range(mode, 0, -1):
        weight = lower[-1] * j * failure // ((trials - j + 1) * odds)
        if weight < smallest:  # not the first: a failure has 2^-53 at least
            break
        lower.append(weight)
    return Table.of_weights(mode - len(lower) + 1, lower[:0:-1] + upper)


# ---------------------------------------------------------------------- the law


@dataclass(frozen=True)
class BinomialLaw(Law):
    """Law of the noise in a sum: Binomial(N, p)."""

    trials: int
    p: float

    part_name = "N"
    lowest = 0.0

    def __post_init__(self) -> None:
        if _validate.integer("noise_trials", self.trials, low=0) == 0:
            raise ConditionError("No noise arrived (N = 0), so there is no privacy: raise trials or honest clients.")
        object.__setattr__(self, "p", _validate.probability("p", self.p))

    @property
    def variance(self) -> float:  # type: ignore[override]
        """Variance of the noise: N p (1 - p)."""
        return self.trials * self.p * (1.0 - self.p)

    @property
    def highest(self) -> float:  # type: ignore[override]
        """Largest value of the noise: the number of trials, N."""
        return float(self.trials)

    @property
    def mirror(self) -> int | None:  # type: ignore[override]
        """N for fair coins, whose law is symmetric: z and N - z are equally likely."""
        return self.trials if self.p == 0.5 else None

    @property
    def parts(self) -> int:  # type: ignore[override]
        """Number of independent coins in the sum: N."""
        return self.trials

    def with_parts(self, parts: int) -> BinomialLaw:
        """Returns the law of another number of coins."""
        return replace(self, trials=parts)

    def __str__(self) -> str:
        return f"Binomial({self.trials}, {self.p!r})"

    def window(self, nats: float, margin: int = 0) -> Window:
        """Returns the window around the mode.

        For p > 1/2 failures are counted instead of successes: 1 - p then has no rounding error, and points near N keep
        their distance to N.
        """
        trials, p = self.trials, self.p
        if trials > _MAX_EXACT:
            raise ConditionError(
                f"{self} is not computed: at most N=2^52 trials are. "
                "Account for less noise: noise left out of the account is only a loss, never a danger."
            )
        if p > 0.5:
            return _mirrored(BinomialLaw(trials, 1.0 - p).window(nats, margin), trials)
        # Bernstein's inequality: this far from the mean only e^-nats is left on either side. It only has to be wide
        # enough; the bounds of the window do not rest on it.
        reach = math.sqrt(2.0 * self.variance * nats) + 2.0 / 3.0 * nats + 2.0 + margin
        mode = min(trials, math.floor((trials + 1) * p))
        first = max(0, math.floor(mode - reach))
        last = min(trials, math.ceil(mode + reach))
        check_points(last - first + 1, self)
        odds = p / (1.0 - p)
        # f(j+1)/f(j) = (N-j) p / ((j+1) (1-p)), one more than the window needs.
        up = np.arange(mode, last + 1, dtype=np.float64)
        up = (trials - up) / (up + 1.0) * odds
        down = np.arange(mode, first - 1, -1, dtype=np.float64)
        down = down / (trials - down + 1.0) / odds
        return window_of_ratios(mode, down[:-1], up[:-1], float(down[-1]), float(up[-1]))

    def step(self, points: Array, direction: int) -> tuple[Array, Array]:
        """Returns the relative change of the mass f to the next point, and a bound on its rounding error in units.

        f(i-1)/f(i) - 1 = (i - (N+1)p) / ((N-i+1)p) and f(i+1)/f(i) - 1 = ((N+1)p - (i+1)) / ((i+1)(1-p)).

        Relative to the ratio, the roundings of (N+1)p, of the difference and of the quotient are at most
        ((N+1)p/denominator + 3)/(1 + step) + 3 units.
        """
        mean = (self.trials + 1.0) * self.p
        if direction > 0:
            denominator = (self.trials - points + 1.0) * self.p
            step = (points - mean) / denominator
        else:
            denominator = (points + 1.0) * (1.0 - self.p)
            step = (mean - (points + 1.0)) / denominator
        return step, 3.0 + (mean / denominator + 3.0) / (1.0 + step)


def _mirrored(law: Window, trials: int) -> Window:
    """Returns the law of N - Z."""
    return Window(
        first=trials - law.last,
        mass=law.mass[::-1],
        below=np.append(1.0, law.above[:-1])[::-1],
        above=np.append(0.0, law.below[:-1])[::-1],
        outside_below=law.outside_above,
        outside_above=law.outside_below,
        error=law.error,
    )
