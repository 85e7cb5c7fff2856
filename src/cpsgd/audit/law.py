"""The exact law of a round's sums, and what follows from it for an attacker and for checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpsgd.audit.convolution import Array as Array
from cpsgd.audit.convolution import Integers as Integers
from cpsgd.audit.convolution import of_noise, of_rounded, of_steps
from cpsgd.errors import ParameterError
from cpsgd.mechanisms.law import Normal, RoundedNormal, Steps

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol


class SumLaw:
    """The law of one round's sums, coordinate by coordinate; the coordinates are independent.

    Attributes:
        count: Messages of a round.
        first: The smallest sum that has a mass, for each coordinate.
        mass: A row of masses for each coordinate, from `first` on.
        mean: Expected sums.
        variance: Their variances.
        largest: A sum is one of independent parts, none of which is ever further from its mean than this.
        narrowing: A mass of the sum of all parts but one is at most so many times one of the whole sum, next to it.
        outward: 1 or -1, the side of the middle that an expected sum is on. Vectors that are too long push this way.
        pull: How far that is, over the variance: the weights that show best whether all vectors are too long.
    """

    def __init__(self, protocol: Protocol, groups: Sequence[tuple[Array, int]]) -> None:
        """Convolves what all clients contribute.

        Args:
            protocol: Fixes the law of a client's integers.
            groups: Points between the levels, and how many clients have them.

        Raises:
            ParameterError: The law would take too much memory.
        """
        self.count = count = sum(clients for _, clients in groups)
        law = protocol.mechanism.noise.law(count)
        if isinstance(law, RoundedNormal):
            found = of_rounded(law, groups)
        elif isinstance(law, Normal):
            raise ParameterError("Only sums of integers have a law that can be convolved.")
        else:
            found = of_steps(law, groups) if isinstance(law, Steps) else of_noise(law, groups)
        self.first, self.mass = found.first, found.mass
        self.largest, self.narrowing = found.largest, found.narrowing
        outcomes = np.arange(self.mass.shape[1])
        self.mean = self.first + self.mass @ outcomes
        self.variance = self.mass @ outcomes**2 - (self.mass @ outcomes) ** 2
        middle = count * protocol.mechanism.centre
        self.outward = np.where(self.mean >= middle, 1.0, -1.0)
        self.pull = (self.mean - middle) / self.variance
        self._below = np.cumsum(self.mass, axis=1) - self.mass

    def coincidence(self, rounds: int) -> float:
        """The probability that so many rounds have the same sums in all coordinates."""
        return float(np.prod(np.sum(self.mass**rounds, axis=1)))

    def masses(self, outcomes: Integers) -> Array:
        """Of outcomes, one row per coordinate."""
        index = outcomes - self.first[:, None]
        inside = np.clip(index, 0, self.mass.shape[1] - 1)
        found: Array = np.where(index == inside, np.take_along_axis(self.mass, inside, axis=1), 0.0)
        return found

    def probability(self, sums: Integers) -> Array:
        """Of each row of sums."""
        product: Array = self.masses(sums.T).prod(axis=0)
        return product

    def remainders(self, divisor: int) -> Array:
        """The probabilities of the remainders that a sum's distance from `first` leaves, one row per coordinate."""
        folded: Array = np.stack([self.mass[:, start::divisor].sum(axis=1) for start in range(divisor)], axis=1)
        return folded

    def tail_ends(self, shares: Array) -> Array:
        """How much the tails that hold these shares together may gain or lose for each unit that a sum is moved by.

        To move the mean of one part by e is to move e of the rest of the sum by one, or half of it by two. So a tail
        gains or loses at most e times a mass of the rest next to where it ends, and a mass of the rest is at most
        `narrowing` times the largest of the neighbouring masses of the sum.
        """
        gains = np.zeros(len(shares))
        for row in self.mass:
            both = np.zeros(len(shares))
            for masses in (row, row[::-1]):
                ends = np.searchsorted(np.cumsum(masses), 0.5 * shares, side="right")
                near = np.clip(ends[:, None] + np.arange(-2, 3), 0, len(row) - 1)
                both += self.narrowing * masses[near].max(axis=1)
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


class LikelihoodRatio:
    """The best attacker there is for two known laws: log(one / zero) of a round's sums.

    Sums that neither law expects get the ratio's straight continuation, so that it also ranks the outputs of code
    that does not follow the protocol.
    """

    def __init__(self, zero: SumLaw, one: SumLaw) -> None:
        """Tabulates the logarithm for each coordinate, where both laws have masses."""
        lowest = np.minimum(zero.first, one.first)
        ends = [law.first + law.mass.shape[1] for law in (zero, one)]
        outcomes = lowest[:, None] + np.arange(int(np.max(np.maximum(*ends) - lowest)))
        masses = [law.masses(outcomes) for law in (zero, one)]
        known = (masses[0] > 0.0) & (masses[1] > 0.0)
        # Where the laws do not overlap at all, the continuation alone tells them apart.
        self._table = np.zeros(outcomes.shape)
        self._table[known] = np.log(masses[1][known]) - np.log(masses[0][known])
        last = outcomes.shape[1] - 1 - np.argmax(known[:, ::-1], axis=1)
        self._lowest, self._first = lowest, lowest + np.argmax(known, axis=1)
        self._last = np.maximum(self._first, np.where(known.any(axis=1), lowest + last, lowest))
        self._slope = (one.mean - zero.mean) / zero.variance

    def score(self, sums: Integers) -> Array:
        """The ratio's logarithm for each row of sums."""
        inside = np.clip(sums, self._first, self._last)
        rows = np.arange(sums.shape[1])
        ratios = self._table[rows, inside - self._lowest] + (sums - inside) * self._slope
        scores: Array = ratios.sum(axis=1)
        return scores
