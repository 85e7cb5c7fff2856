"""`Noise`: what one client adds to a coordinate, as samplers, simulations and proofs need it.

Every mechanism has one (`Mechanism.noise`). All numbers are in units of the mechanism's integers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.mechanisms.law import Law, Normal, Steps
from cpsgd.randomness import Keystream

Drawn = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class FairCoins:
    """Noise that a device's kernels can draw: the number of heads among `trials` fair coins."""

    trials: int


FEW_CLIENTS = 32
"""The most clients whose rounding is drawn one by one in a sum; the rounding of more is a Gaussian draw."""


@dataclass(frozen=True)
class SumRounding:
    """Noise that is added before the rounding, for a device that draws it for a whole sum.

    The sum of n grid points, centred, gets Gaussian noise of this deviation and n - 1 numbers uniform on one level.
    It is then rounded to the nearest level, and `centre` is added once per client. This is the law of a sum of numbers
    that are rounded one by one (docs/proofs/rounded-gaussian.md).

    Attributes:
        deviation: Standard deviation of the Gaussian noise, in grid points.
        fraction_bits: F, a level has 2^F grid points.
        clients: n.
        offset: Number of grid points that `Rounding` added to every client's point.
        centre: Mean of a client's integer whose coordinate is zero.
    """

    deviation: float
    fraction_bits: int
    clients: int
    offset: int
    centre: float


class Noise(ABC):
    """The noise of one client in one coordinate, and the sum of several clients' noise."""

    separate: ClassVar[bool] = True
    """Whether noise is added after the rounding, so that a simulation may draw the noise of a sum by itself."""

    @property
    @abstractmethod
    def variance(self) -> float:
        """Variance of one client's noise: the smallest variance that its integer can have at any coordinate."""

    @property
    def settled_variance(self) -> float:
        """Variance in the later rounds of a run; equal to `variance` unless noise depends on other rounds."""
        return self.variance

    @abstractmethod
    def law(self, honest: int) -> Law | Normal | Steps:
        """Returns the law of the summed noise of `honest` clients; if rounding is the noise, that of the whole sum.

        Raises:
            ConditionError: There is no noise.
        """

    @property
    def variation(self) -> float:
        """Upper bound on the total variation between one draw and its law; 0 for an exact sampler."""
        return 0.0

    def slack(self, honest: int) -> float:
        """Returns λ: per coordinate, up to `variation`, sums have e^±λ times the probabilities that `law` states."""
        return 0.0

    def cumulant(self, slope: float) -> float:
        """Returns a bound on log E exp(±λZ) for the centred noise Z and λ = `slope` >= 0, convex in λ.

        Noise that is not separate includes the rounding in Z. Infinite where no bound is known.
        """
        return math.inf

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> Drawn:
        """Draws the summed noise of `count` clients in one go; zeros where the noise is not separate."""
        return np.zeros(dim, dtype=np.int64)

    def sum_variation(self, count: int) -> float:
        """Returns an upper bound on the total variation between a coordinate of `of_sum` and the law of the sum.

        The accounting allows for `count` times `variation`. A release uses `of_clients` where this is larger.
        """
        return 0.0

    def of_clients(self, count: int, dim: int, keystream: Keystream) -> Drawn:
        """Draws the summed noise of `count` clients by each client's own sampler, one client at a time."""
        return self.of_sum(count, dim, keystream)

    def on_device(self, count: int) -> FairCoins | Normal | SumRounding | None:
        """Returns a description of `of_sum` that a device's kernels can draw; None where the host must draw it."""
        return None
