"""The exact law of a round's sums, and what follows from it for an attacker and for checks.

Laws are convolved directly, without transforms, so that tails are exact. Coordinates in which all clients have the same
points, which are most of them, are convolved once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.mechanisms.law import Summands

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

Groups = Sequence[tuple[Array, int]]
"""Points between the levels in every coordinate, and the number of clients that have them."""

# Outcomes rarer than about e^-200 are left out.
_NATS = 200.0
_MAX_ENTRIES = 2**24
# Points that agree to this many digits are the same: the codec's grid has far fewer.
_DIGITS = 12


class SumLaw:
    """The law of one round's sums, coordinate by coordinate; the coordinates are independent.

    Attributes:
        count: Messages of a round.
        first: The smallest sum that has a mass, for each coordinate.
        mass: A row of masses for each coordinate, from `first` on.
        mean: Expected sums.
        variance: Variances of the sums.
        largest: As in `Summands`.
        narrowing: As in `Summands`.
        outward: 1 or -1, the side of the middle on which an expected sum lies. Too long vectors push it this way.
        pull: Distance to the middle over the variance: the weights that best show whether all vectors are too long.
    """

    def __init__(self, protocol: Protocol, groups: Groups) -> None:
        """Convolves the contributions of all clients.

        Args:
            protocol: Fixes the law of a client's integers.
            groups: The clients.

        Raises:
            ParameterError: The law would take too much memory, or messages are floats.
        """
        self.count = count = sum(clients for _, clients in groups)
        summands = protocol.mechanism.noise.law(count).summands(_NATS)
        self.largest, self.narrowing = summands.largest, summands.narrowing
        self.first, self.mass = convolved(summands, groups)
        outcomes = np.arange(self.mass.shape[1])
        self.mean = self.first + self.mass @ outcomes
        self.variance = self.mass @ outcomes**2 - (self.mass @ outcomes) ** 2
        middle = count * protocol.mechanism.centre
        self.outward = np.where(self.mean >= middle, 1.0, -1.0)
        self.pull = (self.mean - middle) / self.variance
        self._below = np.cumsum(self.mass, axis=1) - self.mass

    def coincidence(self, rounds: int) -> float:
        """Returns the probability that this many rounds have the same sums in all coordinates."""
        return float(np.prod(np.sum(self.mass**rounds, axis=1)))

    def masses(self, outcomes: Integers) -> Array:
        """Returns the masses of outcomes, one row per coordinate."""
        index = outcomes - self.first[:, None]
        inside = np.clip(index, 0, self.mass.shape[1] - 1)
        found: Array = np.where(index == inside, np.take_along_axis(self.mass, inside, axis=1), 0.0)
        return found

    def probability(self, sums: Integers) -> Array:
        """Returns the probability of each row of sums."""
        product: Array = self.masses(sums.T).prod(axis=0)
        return product

    def remainders(self, divisor: int) -> Array:
        """Returns the probabilities of the remainders of a sum's distance from `first`, one row per coordinate."""
        folded: Array = np.stack([self.mass[:, start::divisor].sum(axis=1) for start in range(divisor)], axis=1)
        return folded

    def tail_ends(self, shares: Array) -> Array:
        """Returns bounds on the change of a sum's tail probabilities, per unit of shift of its mean.

        Each tail is given by its share of the probability. If the mean of one summand moves by e, the rest of
        the sum is shifted by one with probability e, or by two with probability e/2. So a tail gains or loses at most e
        times a mass of the rest next to the tail's end. That mass is at most `narrowing` times the largest of the
        neighbouring masses of the sum.
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
        """Draws sums of honest rounds, one row each, to prepare an attack; this noise protects nobody."""
        uniform = generator.random((self.mass.shape[0], rounds))
        drawn = [np.searchsorted(below, row, side="right") - 1 for below, row in zip(self._below, uniform, strict=True)]
        sums: Integers = self.first + np.array(drawn, dtype=np.int64).T
        return sums

    def uniform(self, sums: Integers, generator: np.random.Generator) -> Array:
        """Maps sums, one row per round, to numbers that are independent and uniform on [0, 1] if they have this law.

        The distribution function is spread over each of its jumps by a random number of its own.
        """
        index = sums - self.first
        inside = np.clip(index, 0, self.mass.shape[1] - 1)
        rows = np.arange(sums.shape[1])
        spread = self._below[rows, inside] + generator.random(sums.shape) * self.mass[rows, inside]
        return np.where(index < 0, 0.0, np.where(index > inside, 1.0, np.clip(spread, 0.0, 1.0)))


class LikelihoodRatio:
    """The best attacker for two known laws: log(one / zero) of a round's sums.

    Sums outside of both laws get the ratio's straight continuation, so that it also ranks the outputs of code that does
    not follow the protocol.
    """

    def __init__(self, zero: SumLaw, one: SumLaw) -> None:
        """Tabulates the log-likelihood ratio for each coordinate, where both laws have masses."""
        lowest = np.minimum(zero.first, one.first)
        outcomes = lowest[:, None] + np.arange(max(zero.mass.shape[1], one.mass.shape[1]))
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
        """Returns the ratio's logarithm for each row of sums."""
        inside = np.clip(sums, self._first, self._last)
        rows = np.arange(sums.shape[1])
        ratios = self._table[rows, inside - self._lowest] + (sums - inside) * self._slope
        scores: Array = ratios.sum(axis=1)
        return scores


def convolved(summands: Summands, groups: Groups) -> tuple[Integers, Array]:
    """Returns first outcomes and masses of the sum in every coordinate, filled up with zeros to the same width.

    Raises:
        ParameterError: They would take too much memory.
    """
    dim = len(groups[0][0])
    _check_size(dim, len(summands.mass) + sum(clients for _, clients in groups))
    kinds, which = np.unique(
        np.stack([np.round(points, _DIGITS) for points, _ in groups], axis=1), axis=0, return_inverse=True
    )
    laws: list[tuple[int, Array]] = []
    for points in kinds:
        first, mass = summands.first, summands.mass
        for point, (_, clients) in zip(points.tolist(), groups, strict=True):
            start, part = summands.client(point)
            times = clients * summands.copies
            more, masses = _power(tuple(part.tolist()), times)
            first, mass = _trimmed(first + times * start + more, np.convolve(mass, masses))
            _check_size(dim, len(mass))
        laws.append((first, mass))
    rows = np.zeros((len(laws), max(len(mass) for _, mass in laws)))
    for row, (_, mass) in zip(rows, laws, strict=True):
        row[: len(mass)] = mass
    return np.array([first for first, _ in laws])[which.ravel()], rows[which.ravel()]


def _check_size(dim: int, width: int) -> None:
    if dim * width > _MAX_ENTRIES:
        raise ParameterError(
            f"The exact law of {dim} coordinates with {width} outcomes each is too large to compute; "
            "audit a protocol of fewer coordinates, or with fewer surviving messages."
        )


@lru_cache(maxsize=256)
def _power(part: tuple[float, ...], times: int) -> tuple[int, Array]:
    """Returns first outcome and masses of the sum of `times` independent integers 0, 1, ... with these masses."""
    if times == 0:
        return 0, np.ones(1)
    first, mass = _power(part, times // 2)
    first, mass = 2 * first, np.convolve(mass, mass)
    return _trimmed(first, np.convolve(mass, part) if times % 2 else mass)


def _trimmed(first: int, mass: Array) -> tuple[int, Array]:
    """Drops the ends whose probability is negligible."""
    kept = np.flatnonzero(mass > math.exp(-_NATS))
    return first + int(kept[0]), mass[kept[0] : kept[-1] + 1]
