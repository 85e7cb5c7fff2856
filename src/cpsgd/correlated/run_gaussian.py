"""`RunGaussian`: what mechanisms share whose noise is correlated over the rounds of a run, and then rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import InfeasibleError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.interface import Extent, Search
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian, RoundedNoise, cut_off, reach_of

ROUNDING = 1.0 + 8 * 2.0**-53
"""Covers the roundings of a few operations."""


@lru_cache(maxsize=64)
def correlation_of(bands: int, rounds: int, separation: int | None, taps: str = "") -> Correlation:
    """Returns the correlation with these parameters from a cache, since its sensitivity is slow to compute."""
    return Correlation(bands, rounds, separation, taps)


def centre_of(window: int, finest_bits: int) -> float:
    """Returns the middle of a window, and half a point of the finest grid: halves are rounded up."""
    return 0.5 * (window - 1) + math.ldexp(0.5, -finest_bits)


def resolution(ratio: float) -> float:
    """Returns the total variation of one draw, with this deviation in cells, from its law."""
    return fine_gaussian.SMOOTHING + 2.0 * (2 * fine_gaussian.farthest(ratio) + 2) * 2.0**-128


@dataclass(frozen=True)
class WindowRoom:
    """The room that a message needs in its window.

    Attributes:
        taken: Upper bound on the part, either way, that is taken before fresh noise is added.
        fresh_deviation: Upper bound on the deviation of the noise that the rest is for.
    """

    taken: float
    fresh_deviation: float

    def cut(self, window: int) -> float:
        """Returns an upper bound on the probability that a message leaves a window of this many integers."""
        return cut_off((0.5 * window - self.taken) * (1.0 - 1e-12) / self.fresh_deviation)

    def window(self, cut: float) -> int:
        """Returns the width of the window, in integers, that a message leaves with probability at most `cut`."""
        return math.ceil(2.0 * (self.taken + reach_of(cut) * self.fresh_deviation) * (1.0 + 1e-9))


@dataclass(frozen=True)
class RunNoise(RoundedNoise):
    """The noise of a run, of which later rounds take a part away."""

    of: RunGaussian

    @property
    def deviation(self) -> float:
        """σ, the standard deviation of a client's z, in steps."""
        return self.of.noise_deviation

    @property
    def factors(self) -> NDArray[np.float64]:
        """The weights of earlier rounds' noise, as they act."""
        return self.of.correlation.factors


@dataclass(frozen=True, kw_only=True)
class RunGaussian(RoundedGaussian):
    """Gaussian noise of a run of rounds; every guarantee is that of the whole run.

    Attributes:
        bands: b, the number of rounds that a draw of noise is in: its own, and the b - 1 that take it away.
        run_length: T, the rounds of the run that the guarantee is about.
        separation: The least distance of two rounds of what is protected, 1 where it may be in all; None where it is in
            one round of the run at most.
    """

    summary = f"{RoundedGaussian.summary}; {{bands}} bands over a run of {{run_length:,}} rounds"
    planned = False
    taps: ClassVar[str] = ""

    bands: int
    run_length: int
    separation: int | None = None

    def __post_init__(self) -> None:
        correlation = Correlation(self.bands, self.run_length, self.separation, self.taps)
        for name, value in (
            ("bands", correlation.bands),
            ("run_length", correlation.rounds),
            ("separation", correlation.separation),
        ):
            object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def correlation(self) -> Correlation:
        """The weights of earlier rounds' noise, the run's length, and the participation."""
        return correlation_of(self.bands, self.run_length, self.separation, self.taps)

    @property
    def extent(self) -> Extent:
        """The extent of a round, times the sensitivity of the run's weights."""
        return replace(super().extent, growth=self.correlation.sensitivity * ROUNDING)

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Raises `InfeasibleError`: the planner needs a run, which `correlated` asks for."""
        raise InfeasibleError(f"{cls.name} is planned for a run of rounds: give correlated, the number of bands.")
