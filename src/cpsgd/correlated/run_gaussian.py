"""`RunGaussian`: what mechanisms share whose noise is correlated over the rounds of a run, and then rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import InfeasibleError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.interface import Extent, Search
from cpsgd.mechanisms.rounded_gaussian import MAX_WINDOW, RoundedGaussian, RoundedNoise, cut_off, reach_of

ROUNDING = 1.0 + 8 * 2.0**-53
"""Covers the roundings of a few operations."""


@lru_cache(maxsize=64)
def correlation_of(bands: int, rounds: int, separation: int | None, taps: str = "") -> Correlation:
    """Returns one object for all mechanisms that have it: its sensitivity takes a while to compute."""
    return Correlation(bands, rounds, separation, taps)


def resolution(ratio: float) -> float:
    """Returns the total variation of one draw, with this deviation in cells, from its law."""
    return fine_gaussian.SMOOTHING + 2.0 * (2 * fine_gaussian.farthest(ratio) + 2) * 2.0**-128


@dataclass(frozen=True)
class RunNoise(RoundedNoise):
    """The noise of a run, of which later rounds take a part away. Subclasses state `taken` and `fresh_deviation`."""

    of: RunGaussian

    @property
    def deviation(self) -> float:
        """σ, the standard deviation of a client's z, in steps."""
        return self.of.noise_deviation

    @property
    def cut(self) -> float:
        """Upper bound on the probability that a message leaves the window, whatever its client was handed."""
        room = 0.5 * self.of.window - self.taken
        return cut_off(room * (1.0 - 1e-12) / self.fresh_deviation)

    @property
    def factors(self) -> NDArray[np.float64]:
        """The weights of earlier rounds' noise, as they act."""
        return self.of.correlation.factors

    @property
    def taken(self) -> float:
        """Upper bound on the part of the window, either way, that is taken before fresh noise is added."""
        raise NotImplementedError

    @property
    def fresh_deviation(self) -> float:
        """Upper bound on the deviation of the noise that the rest of the window is for."""
        raise NotImplementedError


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
    def noise(self) -> RunNoise:
        """The noise of a client."""
        raise NotImplementedError

    @property
    def finest_bits(self) -> int:
        """F: everything is a multiple of 2^-F steps."""
        raise NotImplementedError

    @property
    def centre(self) -> float:
        """The middle of the window, and half a point of the finest grid: halves are rounded up."""
        return 0.5 * (self.window - 1) + math.ldexp(0.5, -self.finest_bits)

    @property
    def extent(self) -> Extent:
        """The extent of a round, times the sensitivity of the run's weights."""
        return replace(super().extent, growth=self.correlation.sensitivity * ROUNDING)

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Raises `InfeasibleError`: the planner needs a run, which `correlated` asks for."""
        raise InfeasibleError(f"{cls.name} is planned for a run of rounds: give correlated, the number of bands.")

    @classmethod
    def with_room(cls, *, noise_deviation: float, step: float, coordinate_range: float, cut: float, **run: Any) -> Self:
        """Returns the mechanism whose window a message leaves with a probability of at most `cut`.

        Raises:
            ParameterError: No window is wide enough, or something is out of range.
        """
        fixed: dict[str, Any] = {"noise_deviation": noise_deviation, "step": step, **run}
        widest = cls(window=MAX_WINDOW, coordinate_range=coordinate_range, **fixed)
        needed = 2.0 * (widest.noise.taken + reach_of(cut) * widest.noise.fresh_deviation) * (1.0 + 1e-9)
        return replace(widest, window=math.ceil(needed))
