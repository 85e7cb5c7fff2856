"""The exact law of a round's sums: every client's rounding, and the noise beside it, convolved in each coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from cpsgd.errors import ParameterError
from cpsgd.mechanisms.law import Law, Normal, Steps

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

# Outcomes rarer than about e^-200 are left out.
_NATS = 200.0
_MAX_ENTRIES = 2**24


class SumLaw:
    """The law of one round's sums, coordinate by coordinate; the coordinates are independent.

    Attributes:
        count: Messages of a round.
        first: The smallest sum that has a mass, for each coordinate.
        mass: A row of masses for each coordinate, from `first` on.
        mean: Expected sums.
        variance: Their variances.
        outward: 1 or -1, the side of the middle that an expected sum is on. Vectors that are too long push this way.
    """

    def __init__(self, protocol: Protocol, groups: Sequence[tuple[Array, int]]) -> None:
        """Convolves the noise with the rounding of all clients.

        Args:
            protocol: Fixes the noise of a client.
            groups: Where clients lie (`RoundLattice.points`), and how many are there.

        Raises:
            ParameterError: The law would take too much memory.
        """
        self.count = count = sum(clients for _, clients in groups)
        law = protocol.mechanism.law(count)
        if isinstance(law, Normal):
            raise ParameterError("Only sums of integers have a law that can be convolved.")
        self.first = np.zeros(protocol.dim, dtype=np.int64)
        self.mass = np.ones((protocol.dim, 1))
        if isinstance(law, Steps):
            _check_size(protocol.dim, law.copies * count * (len(law.low) - 1) + 1)
            for points, clients in groups:
                self._add_steps(law, points, clients)
        else:
            self._add_rounding(law, groups)
        outcomes = np.arange(self.mass.shape[1])
        self.mean = self.first + self.mass @ outcomes
        self.variance = self.mass @ outcomes**2 - (self.mass @ outcomes) ** 2
        middle = count * protocol.mechanism.centre
        self.outward = np.where(self.mean >= middle, 1.0, -1.0)
        self._below = np.cumsum(self.mass, axis=1) - self.mass

    def _add_steps(self, law: Steps, points: Array, clients: int) -> None:
        """Clients whose integers have a law that is affine in their coordinate, from -1 to 1."""
        low, high = np.array(law.low), np.array(law.high)
        masses = 0.5 * ((1.0 - points)[:, None] * low + (1.0 + points)[:, None] * high)
        left = clients * law.copies
        while left:
            if left & 1:
                self.mass = _convolved(self.mass, masses)
            masses, left = _convolved(masses, masses) if left > 1 else masses, left >> 1

    def _add_rounding(self, law: Law, groups: Sequence[tuple[Array, int]]) -> None:
        """Clients who round to one of two neighbouring levels, and the noise of all."""
        noise = law.window(_NATS)
        _check_size(len(self.first), len(noise.mass) + self.count)
        for points, clients in groups:
            below = np.floor(points)
            self.first = self.first + clients * below.astype(np.int64)
            ups: Array = np.asarray(binom.pmf(np.arange(clients + 1), clients, (points - below)[:, None]))
            self.mass = _convolved(self.mass, ups)
        self.first = self.first + noise.first
        self.mass = np.array([np.convolve(noise.mass, rounding) for rounding in self.mass])

    def coincidence(self, rounds: int) -> float:
        """The probability that so many rounds have the same sums in all coordinates."""
        return float(np.prod(np.sum(self.mass**rounds, axis=1)))

    def probability(self, sums: Integers) -> Array:
        """Of each row of sums."""
        index = sums - self.first
        inside = np.clip(index, 0, self.mass.shape[1] - 1)
        masses = np.where(index == inside, self.mass[np.arange(sums.shape[1]), inside], 0.0)
        product: Array = masses.prod(axis=1)
        return product

    def remainders(self, divisor: int) -> Array:
        """The probabilities of the remainders that a sum's distance from `first` leaves, one row per coordinate."""
        folded: Array = np.stack([self.mass[:, start::divisor].sum(axis=1) for start in range(divisor)], axis=1)
        return folded

    def tail_ends(self, shares: Array) -> Array:
        """How much the tails that hold these shares together may gain or lose for each unit that a sum is moved by.

        To move one client's rounding by a probability e is to move e of the rest of the sum by one. So a tail gains or
        loses at most e times a mass of the rest next to where it ends, and a mass of the rest is at most twice the
        larger of two neighbouring masses of the sum.
        """
        gains = np.zeros(len(shares))
        for row in self.mass:
            both = np.zeros(len(shares))
            for masses in (row, row[::-1]):
                ends = np.searchsorted(np.cumsum(masses), 0.5 * shares, side="right")
                near = np.clip(ends[:, None] + np.arange(-2, 3), 0, len(row) - 1)
                both += 2.0 * masses[near].max(axis=1)
            gains = np.maximum(gains, both)
        return gains

    def sample(self, rounds: int, generator: np.random.Generator) -> Integers:
        """Sums of honest rounds, one row each, to prepare an attack with; no noise that protects anybody."""
        uniform = generator.random((self.mass.shape[0], rounds))
        drawn = [np.searchsorted(below, row, side="right") - 1 for below, row in zip(self._below, uniform, strict=True)]
        sums: Integers = self.first + np.array(drawn, dtype=np.int64).T
        return sums

    def uniform(self, sums: Integers, generator: np.random.Generator) -> Array:
        """Sums, one row per round, as numbers that are independent and uniform on [0, 1] if the sums have this law.

        The distribution function is spread over each of its jumps by a random number of its own.
        """
        index = sums - self.first
        inside = np.clip(index, 0, self.mass.shape[1] - 1)
        rows = np.arange(sums.shape[1])
        spread = self._below[rows, inside] + generator.random(sums.shape) * self.mass[rows, inside]
        return np.where(index < 0, 0.0, np.where(index > inside, 1.0, np.clip(spread, 0.0, 1.0)))


def _convolved(first: Array, second: Array) -> Array:
    """Row by row."""
    return np.array([np.convolve(*rows) for rows in zip(first, second, strict=True)])


def _check_size(dim: int, width: int) -> None:
    if dim * width > _MAX_ENTRIES:
        raise ParameterError(
            f"The exact law of {dim} coordinates with {width} outcomes each is too large to compute; "
            "audit a protocol of fewer coordinates, or with fewer surviving messages."
        )


class LikelihoodRatio:
    """The best attacker there is for two known laws: log(one / zero) of a round's sums.

    Sums that neither law expects get the ratio's straight continuation, so that it also ranks the outputs of code
    that does not follow the protocol.
    """

    def __init__(self, zero: SumLaw, one: SumLaw) -> None:
        """Tabulates the logarithm for each coordinate, where both laws have masses."""
        self._first = np.maximum(zero.first, one.first)
        width = zero.mass.shape[1]
        shift = np.abs(zero.first - one.first)
        self._last = self._first + np.maximum(width - shift, 1) - 1
        outcomes = self._first[:, None] + np.arange(width)
        outcomes = np.minimum(outcomes, self._last[:, None])
        # Where the laws do not overlap at all, the continuation alone tells them apart.
        self._table = np.where((shift < width)[:, None], _log_mass(one, outcomes) - _log_mass(zero, outcomes), 0.0)
        self._slope = (one.mean - zero.mean) / zero.variance

    def score(self, sums: Integers) -> Array:
        """The ratio's logarithm for each row of sums."""
        inside = np.clip(sums, self._first, self._last)
        rows = np.arange(sums.shape[1])
        ratios = self._table[rows, inside - self._first] + (sums - inside) * self._slope
        scores: Array = ratios.sum(axis=1)
        return scores


def _log_mass(law: SumLaw, outcomes: Integers) -> Array:
    index = np.clip(outcomes - law.first[:, None], 0, law.mass.shape[1] - 1)
    masses: Array = np.maximum(np.take_along_axis(law.mass, index, axis=1), 1e-300)
    return np.log(masses)
