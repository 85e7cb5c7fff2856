"""Correlated noise in few bits: no noise of the client's own, and rounding at random that saturates.

A client adds to its vector the noise z of this round, which it draws, and what is to be taken away of its predecessors'
noise. The latter is clipped, so that seeds that somebody chose cannot take the room away. It rounds up or down at
random, and what lies beyond the window is moved to its ends. So a message needs room for a few deviations only, and
5 bits do what 12 do with `correlated-gaussian`.

What protects is the noise of the others, as in `mechanism`, and the randomness of everybody's rounding. A client that
saturates tells where it is, so its own noise is not counted. docs/proofs/rounded-correlated.md has the proof. It is for
clients that take part in one round of the run.

z lies on a grid that is much finer than what a client moves the others' noise by in the proof. A simulated run plays
every client (`client_sums`): clipping and saturating are not linear, so that no sum can be drawn at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.rounding import PythonKernel, saturate
from cpsgd.correlated.client_sums import SimulatedClients
from cpsgd.correlated.draws import Points
from cpsgd.correlated.fine_draws import FINE_BITS, FINE_VARIATION, REFINED_BITS, FineLineages
from cpsgd.correlated.mechanism import CorrelatedGaussian, CorrelatedNoise, coarse_bits
from cpsgd.correlated.run_gaussian import resolution
from cpsgd.correlated.run_memory import MORE, RunMemory
from cpsgd.correlated.weights import WEIGHT_BITS
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.interface import Extent
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.mechanisms.rounded_gaussian import LEAST_SIGMA, RoundedGaussian, usual_fields

# Bytes of the number that decides about rounding up.
_COIN_BYTES = 8
_ROUNDING = 1.0 + 8 * 2.0**-53


def beyond(deviations: float) -> float:
    """Returns the probability that a standard Gaussian number is larger than this, rounded up."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0)) * (1.0 + 1e-9)


def squared_loss(deviation: float, limit: float) -> float:
    """Returns E (|Z| - limit)₊² for Gaussian Z of this deviation."""
    if deviation == 0.0:
        return 0.0
    x = limit / deviation
    density = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return 2.0 * deviation**2 * max(0.0, (1.0 + x * x) * beyond(x) - x * density)


@dataclass(frozen=True)
class SaturatingNoise(CorrelatedNoise):
    """The noise of a lineage, and the randomness of rounding."""

    of: RoundedCorrelated

    @property
    def own_variance(self) -> float:
        """Variance that no later round takes away, minus 1/12: from random rounding, clipping and saturation."""
        clipped = squared_loss(self._earlier, self.of.inherited_range) - (self._clipped * self._earlier) ** 2
        return 1.0 / 12.0 + clipped + squared_loss(self._whole, self.of.largest)

    @property
    def factors(self) -> NDArray[np.float64]:
        """The effective weights: clipping scales a Gaussian by 1 - P(clipped), and adds an uncorrelated part."""
        found = self.of.correlation.factors * (1.0 - self._clipped)
        found[0] = 1.0
        return found

    @property
    def _clipped(self) -> float:
        """Probability that a message's inherited noise is clipped."""
        return 2.0 * beyond(self.of.inherited_range / self._earlier) if self._earlier else 0.0

    @property
    def _earlier(self) -> float:
        """Standard deviation of the noise that a message inherits, in steps."""
        spread = self.of.correlation.spread
        return self.of.noise_deviation * math.sqrt(max(0.0, spread * spread - 1.0))

    @property
    def _whole(self) -> float:
        return self.of.noise_deviation * self.of.correlation.spread

    @property
    def room(self) -> float:
        """Largest |z|, in steps, that does not saturate a message with the largest coordinate and inheritance."""
        return (self.of.largest - self.of.farthest_point - self.of.inherited_range) * (1.0 - 1e-12)

    def law(self, honest: int) -> SlotsAndCoins:  # type: ignore[override]
        """Returns the law in the form that the proof needs.

        Raises:
            ConditionError: Untrusted holders of seeds may know the noise of all other clients.
        """
        exposed = self.of.exposed
        # The client's own noise does not count.
        untold = honest - exposed - 1
        if untold < 0:
            raise ConditionError(
                f"Of {honest} honest clients the noise of {exposed} may be told by those who hold their seeds: there "
                "is no privacy. Use more clients, fewer bands, or fewer untrusted_holders."
            )
        deviation = math.sqrt(self.counted_variance) / _ROUNDING
        return SlotsAndCoins(
            untold=untold,
            told=exposed + 1,
            deviation=deviation,
            point=math.ldexp(1.0, -self.of.noise_bits),
            room=self.room / (deviation * (1.0 + 1e-9)),
            farther=(2.0 * self.of.largest - self.room) / (deviation * (1.0 + 1e-9)),
            weighting=self.of.correlation,
        )

    @property
    def variation(self) -> float:
        """Total variation over all rounds, from samplers and grids."""
        each = resolution(self.of.noise_ratio) + FINE_VARIATION + fine_gaussian.GRID_VARIATION
        return MORE * self.of.run_length * self.of.draws * each * _ROUNDING

    def slack(self, honest: int) -> float:
        """Returns 0: the proof covers the rounding exactly."""
        return 0.0

    @property
    def cut(self) -> float:
        """Zero: messages saturate instead of leaving the window, and the proof accounts for that."""
        return 0.0

    def cumulant(self, slope: float) -> float:
        """Returns a bound on log E exp(slope z), z a client's integer about its mean.

        Rounding at random has a variance proxy of ¼, clipping a symmetric number makes its cumulant smaller, and
        saturating at one end adds at most the slope times the mean of what is cut off at the other.
        """
        x = self.room / self.of.noise_deviation
        lost = self.of.noise_deviation * max(
            0.0, math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi) - x * beyond(x) * (1.0 - 1e-8)
        )
        return (0.5 * slope * slope * (self._whole**2 + 0.25) + slope * (lost + 1e-12)) * _ROUNDING


@dataclass(frozen=True)
class OnceMemory(RunMemory):
    """The memory of a run whose messages are rounded at random."""

    of: RoundedCorrelated
    echo = None

    @property
    def steerable(self) -> bool:  # type: ignore[override]
        """Whether seeds may be revealed; the proof then assumes that holders are chosen without looking at results."""
        return bool(self.of.untrusted_holders)

    def simulated(self, seed: int | None, *, restart_every: int | None = None) -> SimulatedClients:  # type: ignore[override]
        """Returns the state of a run whose clients are simulated."""
        return SimulatedClients(self.of, seed, restart_every)


@dataclass(frozen=True, kw_only=True)
class RoundedCorrelated(CorrelatedGaussian):
    """Gaussian noise that is correlated over the rounds of a run, rounded at random to few integers.

    Attributes:
        noise_deviation: σ, standard deviation of the noise z that each client draws, in steps; from 0.8 to 2047.
        window: Number of integers that a message can hold; what would lie beyond is moved to its ends.
        inherited_range: The noise of earlier rounds is clipped to plus or minus this many steps.
        taps: Weights of a few ages only, as in "1:8118,32:1145" (multiples of 2^-14); empty for those of √(1 - x).
    """

    name = "rounded-correlated"
    title = "Gaussian noise that later rounds take away, rounded at random"
    summary = f"{CorrelatedGaussian.summary}; earlier rounds' noise in ±{{inherited_range:.4g}} steps"
    fewest_values = 6
    least_deviation: ClassVar[float] = LEAST_SIGMA
    sampler_remedy: ClassVar[str] = "use more clients, or a shorter run"
    caution: ClassVar[str | None] = (
        "its proof is new, and whole runs were enumerated for two and three rounds only; its guarantee is that of a "
        "whole run, which is charged as one; who holds seeds must not be chosen by results"
    )

    inherited_range: float
    taps: str = ""  # type: ignore[misc]  # the base class has none

    def __post_init__(self) -> None:
        given = _validate.positive("inherited_range", self.inherited_range, high=float(1 << 17))
        object.__setattr__(self, "inherited_range", given)
        super().__post_init__()
        # Numbers of `SaturatingKernel` are 64-bit integers; z is never beyond 16 deviations.
        farthest = self.largest + self.farthest_point + given + 16.0 * self.noise_deviation + 2.0
        if farthest >= math.ldexp(1.0, 63 - self.finest_bits):
            raise ParameterError(
                f"Expected a smaller window than {self.window} for noise_deviation={self.noise_deviation:g}: its "
                "numbers do not fit in 64 bits, and would wrap around."
            )
        if self.noise.room <= 0.0:
            raise ParameterError(
                f"Expected window={self.window} to have room for coordinate_range={self.coordinate_range:g} and "
                f"inherited_range={given:g} steps of {self.step:g}; use a wider window, or a larger step."
            )

    @cached_property
    def memory(self) -> OnceMemory:  # type: ignore[override]
        """The run: its rounds, seeds and participation."""
        return OnceMemory(self)

    @property
    def noise(self) -> SaturatingNoise:
        """The parts of the noise."""
        return SaturatingNoise(self)

    @property
    def largest(self) -> float:
        """Largest absolute value R of a message's centred integer, in steps."""
        return 0.5 * (self.window - 1)

    @property
    def centre(self) -> float:
        """The middle of the window."""
        return self.largest

    @property
    def widest_range(self) -> float:
        """Slightly less than the part of the window that inherited noise leaves free."""
        return 0.98 * (self.largest - self.inherited_range)

    @property
    def draws(self) -> int:
        """Number of draws of noise in a message."""
        return sum(1 for weight in self.correlation.weights if weight)

    @cached_property
    def lineages(self) -> FineLineages:
        """The noise of a client that follows from seeds, with the earlier rounds' part clipped."""
        limit = math.floor(math.ldexp(self.inherited_range, self.finest_bits))
        return FineLineages(self.correlation, self.noise_ratio, limit)

    @cached_property
    def noise_bits(self) -> int:
        """Fraction bits G of the noise's grid: z has 2^G points per step."""
        return coarse_bits(self.noise_deviation) + FINE_BITS

    @property
    def noise_ratio(self) -> float:
        """σ in cells of a draw that is not refined."""
        return super().noise_ratio * 2.0**-REFINED_BITS

    @cached_property
    def fraction_bits(self) -> int:
        """Fraction bits of the vector's grid: steps are wide here, and the grid must not be."""
        return WEIGHT_BITS

    @property
    def keystream_bytes(self) -> int:
        """Bytes of the rounding, and of a lineage that begins."""
        return _COIN_BYTES + self.lineages.draw_bytes

    @property
    def inheriting_bytes(self) -> int:
        """Bytes of the rounding alone."""
        return _COIN_BYTES

    def kernel(self) -> Any:
        """Returns the kernel that adds noise and rounds at random."""
        return SaturatingKernel(self.lineages, int(self.grid.limit), self.window, self.finest_bits)

    @property
    def extent(self) -> Extent:
        """The extent of a round: the run's weights are in the proof."""
        return RoundedGaussian.extent.fget(self)  # type: ignore[attr-defined,no-any-return]

    @property
    def shifts(self) -> tuple[int, ...]:
        """Empty: clients draw no noise of their own."""
        return ()

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns a σ of 4 in 5 bits, six taps, and a run of a thousand rounds."""
        noise = usual_fields(3.5, 1 << 5, 1.5, clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)
        taps = "1:8118,2:2490,4:1676,8:1140,16:763,32:1145"
        return {**noise, "bands": 33, "run_length": 1000, "inherited_range": 5.0, "taps": taps}


class SaturatingKernel(PythonKernel):
    """Adds a lineage's noise to grid points, and rounds at random to an integer of a window.

    The first part of the keystream decides about rounding. The rest is for the noise of a lineage that begins here; it
    is left aside where `inherited` is given.
    """

    def __init__(
        self, lineages: FineLineages, limit: int, window: int, fraction_bits: int, inherited: Points | None = None
    ) -> None:
        """Fixes the parameters; `inherited` is the lineage's noise of the coordinates that will be asked for."""
        self._lineages, self._limit, self._window, self._bits = lineages, limit, window, fraction_bits
        self._inherited = inherited

    def after(self, inherited: Points) -> SaturatingKernel:
        """Returns the kernel that adds this noise, for the coordinates that will be asked for."""
        return SaturatingKernel(self._lineages, self._limit, self._window, self._bits, inherited)

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the integers."""
        inherited = self._inherited
        if inherited is None:
            inherited = self._lineages.fresh(keystream[_COIN_BYTES * grid.size :], grid.size)
        saturate(grid, keystream, inherited, self._limit, self._window, WEIGHT_BITS, self._bits, values)
