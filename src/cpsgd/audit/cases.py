"""The protocols of an audit where none is named: every mechanism with every sampler it has, small enough to repeat.

Each sampler has a protocol as it is planned, for ε near 2, and one with so little noise that a missing coin, a missing
bit or a clip norm that is too large shows in a few thousand rounds. The first has sixteen coordinates, which are
rotated at once, the second thirteen, which are rotated in two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
)
from cpsgd.protocol import Protocol
from cpsgd.registry import MECHANISMS

DELTA = 1e-3
"""δ of the claims, large enough to show in few rounds."""

EVEN_DIM, ODD_DIM = 16, 13
# Of the noise of usual parameters, the share of its variance that shows faults soonest.
_LITTLE = 0.1
_ROUNDS = (0, 1, 2, 7, 1_000_000, (1 << 32) + 1)


@dataclass(frozen=True)
class Case:
    """A protocol to audit.

    Attributes:
        sampler: Name of the sampler that draws the noise.
        protocol: The protocol.
        claimed: Whether there is an ε to attack; else the law of the sums is checked alone.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=4, dim=16, clip_norm=1.0, levels=2, trials=14)
        >>> Case("binomial", protocol).name
        'binomial'
    """

    sampler: str
    protocol: Protocol
    claimed: bool = True

    @property
    def name(self) -> str:
        """Mechanism and sampler."""
        mechanism = self.protocol.mechanism.name
        return self.sampler if self.sampler.startswith(mechanism) else f"{mechanism}, {self.sampler}"

    @property
    def rounds(self) -> tuple[int, ...]:
        """Round numbers to play, even and odd; within the run if noise is correlated."""
        return tuple(number for number in _ROUNDS if number < self.protocol.mechanism.memory.rounds)


def _planned(sampler: str, mechanism: Mechanism, modulus: int | None = None) -> Case:
    protocol = Protocol(clients=4, dim=EVEN_DIM, clip_norm=1.0, mechanism=mechanism, modulus=modulus)
    return Case(sampler, protocol)


def _quiet(sampler: str, mechanism: Mechanism, modulus: int | None = None) -> Case:
    protocol = Protocol(clients=8, dim=ODD_DIM, clip_norm=1.0, mechanism=mechanism, modulus=modulus)
    return Case(sampler, protocol, claimed=False)


def usual(name: str) -> tuple[Case, ...]:
    """Returns two cases of a mechanism: with its usual parameters, and with little noise.

    There are none if its messages are floats.
    """
    kind = MECHANISMS[name]
    mechanism = kind(**kind.usual(clients=4, dim=EVEN_DIM, clip_norm=1.0, rotate=True, delta=DELTA))
    if mechanism.grid is None:
        return ()
    return _planned(name, mechanism), _quiet(name, mechanism.quieter(_LITTLE) or mechanism)


def all_cases() -> tuple[Case, ...]:
    """Returns cases for every sampler of every mechanism whose sums are integers: as planned, and with little noise.

    Example:
        >>> sorted({case.protocol.mechanism.name for case in all_cases()})[:3]
        ['binomial', 'coins', 'correlated-gaussian']
    """
    return (
        _planned("inversion", Binomial(levels=33, trials=4063, coordinate_range=0.7587)),
        _quiet("inversion", Binomial(levels=64, trials=20, p=0.3, coordinate_range=0.72)),
        _planned("counted coins", Binomial(levels=8, trials=256, coordinate_range=0.72)),
        _quiet("counted coins", Binomial(levels=64, trials=16, coordinate_range=0.72)),
        _quiet("counted coins, modulo", Binomial(levels=64, trials=16, coordinate_range=0.72), modulus=293),
        _planned("skellam", Skellam(levels=39, variance=1594.0, coordinate_range=0.7193)),
        _quiet("skellam", Skellam(levels=64, variance=4.0, coordinate_range=0.72)),
        _planned("discrete-gaussian", DiscreteGaussian(levels=39, sigma_squared=1597.0, coordinate_range=0.7191)),
        _quiet("discrete-gaussian", DiscreteGaussian(levels=64, sigma_squared=4.0, coordinate_range=0.72)),
        _planned("coins", Coins(coins=15, theta=0.0536, coordinate_range=0.625)),
        _quiet("coins", Coins(coins=64, theta=0.49, coordinate_range=0.72)),
        _planned("coins, modulo", Coins(coins=255, theta=0.0148, coordinate_range=0.6875), modulus=256),
        _planned("sampled-coins", SampledCoins(rate=0.25, theta=0.26, coordinate_range=0.625)),
        _quiet("sampled-coins", SampledCoins(rate=0.66, theta=0.49, coordinate_range=0.72)),
        _planned("lazy-coins", LazyCoins(rate=0.66, theta=0.19, coordinate_range=0.625)),
        _quiet("lazy-coins", LazyCoins(rate=0.66, theta=0.49, coordinate_range=0.72)),
        _planned("fine Gaussian", RoundedGaussian(noise_deviation=1.25, step=1.17, window=16, coordinate_range=0.625)),
        _quiet("fine Gaussian", RoundedGaussian(noise_deviation=2.0, step=0.02, window=256, coordinate_range=0.72)),
        _planned("lineages that begin", _correlated(64.0, 1.0 / 128.0, 1 << 13)),
        _quiet("lineages that begin", _correlated(4.0, 0.02, 512)),
        _planned("silos that begin", _shaped(3.0, 0.5, 64)),
        _quiet("silos that begin", _shaped(3.0, 0.02, 256)),
    )


def _correlated(deviation: float, step: float, window: int) -> CorrelatedGaussian:
    return CorrelatedGaussian(
        noise_deviation=deviation, step=step, window=window, coordinate_range=0.72, bands=4, run_length=8
    )


def _shaped(deviation: float, step: float, window: int) -> ShapedGaussian:
    return ShapedGaussian(
        noise_deviation=deviation, step=step, window=window, coordinate_range=0.72, bands=4, run_length=8
    )


def left_out() -> dict[str, str]:
    """Returns the mechanisms that no case covers, with the reasons."""
    covered = {case.protocol.mechanism.name for case in all_cases()}
    reasons = {"gaussian": "sends floats: there is no lattice to bring its sums back to"}
    slow = "its sampler is written in Python and slow: name a protocol to audit it"
    return {name: reasons.get(name, slow) for name in MECHANISMS if name not in covered}
