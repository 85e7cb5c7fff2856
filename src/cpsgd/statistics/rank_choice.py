"""Few quantiles by a private choice of a bin: permute-and-flip on ranks, of a pure ε.

The bounds are divided into many bins. A bin's distance is the number of users between its ranks and q n. Every bin
tosses a coin, heads with probability e^(-λ (distance - smallest distance)), and one of those with heads is chosen at
random: the same law as permute-and-flip (McKenna and Sheldon, NeurIPS 2020). Neighbours' distances differ by at most
one user Δ, so that a choice is (2 λ Δ, 0)-private; docs/proofs/statistics.md, section 6, has the proof.

For the interval, the bins at two ranks beside q n are chosen, too. They are so far from it that the quantile is between
them with the confidence that was asked for, however the values are distributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cpsgd._exact import Integers, below, survives_far
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream
from cpsgd.statistics.partial import SumTask
from cpsgd.statistics.questions import Matrix
from cpsgd.statistics.ranks import Quantiles
from cpsgd.statistics.results import Reading
from cpsgd.statistics.table_noise import SUM_LIMIT, TableNoise
from cpsgd.statistics.users import Sizes
from cpsgd.tables import Chunk

CITATION = (
    "bins chosen by permute-and-flip (docs/proofs/statistics.md, section 6), on McKenna and Sheldon 2020, Theorem 1"
)
# Grid units of one user, and bins in each of the question's.
_UNITS, _FINER = 1 << 24, 16
# Parts of a quantile's ε: its value, and either end of its interval.
_VALUE, _END = Fraction(1, 2), Fraction(1, 4)


@dataclass(frozen=True, kw_only=True)
class RankChoice(TableNoise):
    """The choice of a bin for each quantile of each column, with all that its cost depends on; see the module.

    Attributes:
        question: The quantiles, without groups and of a public number of users.
        asked: ε of all of them.
        confidence: Of the intervals.
    """

    question: Quantiles
    asked: float
    confidence: float

    @classmethod
    def of(cls, question: Quantiles, epsilon: float, confidence: float = 0.95) -> RankChoice:
        """Returns the choices that keep ε, or raises `InfeasibleError`."""
        bins = question.bins * _FINER
        found = cls(
            kind="permute-and-flip",
            dim=len(question.columns) * bins,
            units=_UNITS,
            # Δ: a user adds 1 to a column's ranks at most, and the rounding of each bin half a unit.
            distance=_UNITS + bins // 2 + 1,
            norm=_UNITS + bins // 2 + 1,
            neighbours="replace-one",
            question=question,
            asked=epsilon,
            confidence=confidence,
        )
        if found.spread(_END) >= SUM_LIMIT >> 12:
            raise InfeasibleError(f"ε = {rounded_up(epsilon)} is too small for so many quantiles.")
        return found

    @property
    def bins(self) -> int:
        """B, the bins of a column."""
        return self.dim // len(self.question.columns)

    @property
    def _many(self) -> int:
        return len(self.question.quantiles) * len(self.question.columns)

    def spread(self, part: Fraction) -> int:
        """Returns 1/λ in grid units, for this part of a quantile's ε."""
        return math.ceil(2 * Fraction(self.distance) * self._many / (Fraction(self.asked) * part))

    @property
    def epsilon(self) -> float:
        """ε of all choices, rounded up."""
        each = 2 * Fraction(self.distance) * (Fraction(1, self.spread(_VALUE)) + Fraction(2, self.spread(_END)))
        return float(each * self._many) * (1.0 + 1e-12)

    @property
    def variance(self) -> float:
        """Approximate variance of a rank, in squared users: the variance of two-sided exponential noise."""
        return 2.0 * (self.spread(_VALUE) / _UNITS) ** 2

    @property
    def citation(self) -> str:
        """The theorem behind it."""
        return CITATION

    def draw(self) -> Integers:
        """Raises an error: this question chooses bins, so there is no noise to add to a sum."""
        raise TypeError("Bins are chosen: no noise is added to a sum.")

    def record(self, reason: str) -> Protocol:
        """Returns a protocol for the ledger's record, which costs at least as much as the choices."""
        # Ranks change by a user at most, be it replaced or left out.
        return TableNoise("discrete-laplace", 1, 1, 1.0, 1.0, "replace-one", Fraction(self.epsilon)).record(reason)

    def choose(self, sums: Integers, users: int) -> Matrix:
        """Returns three chosen bins per column and quantile: for the value, and for both ends of the interval."""
        found = []
        failure = 0.5 * (1.0 - self.confidence)
        # With a larger distance than this the chance of heads is below 2 failure/B, and half of that to come before the
        # nearest bin, which has heads for certain. So it is below failure for B bins together.
        far = math.ceil(self.spread(_END) * math.log(0.5 * self.bins / failure) * (1.0 + 1e-9)) + 1
        for part in sums.reshape(-1, self.bins):
            for q in self.question.quantiles:
                rank = round(Fraction(q) * users * _UNITS)
                value = choose_nearest(distances_to(rank, part), self.spread(_VALUE))
                first, last = 0, self.bins - 1
                if rank > far:
                    first = choose_nearest(distances_to(rank - far, part), self.spread(_END))
                if rank + far < users * _UNITS:
                    last = choose_nearest(distances_to(rank + far, part), self.spread(_END))
                found.append((value, min(first, value), max(last, value)))
        return np.array(found, dtype=np.float64)


def distances_to(rank: int, users: Integers) -> Integers:
    """Returns each bin's distance from a rank, given the number of users in each bin.

    Example:
        >>> distances_to(3, np.array([2, 0, 5, 1])).tolist()
        [1, 1, 0, 4]
    """
    above = np.cumsum(users)
    return np.asarray(np.maximum(np.maximum(above - users - rank, rank - above), 0))


def choose_nearest(distances: Integers, spread: int) -> int:
    """Chooses a bin by permute-and-flip with λ = 1/spread: each bin tosses a coin, and one of the heads wins."""
    keystream = Keystream()
    heads = np.flatnonzero(survives_far(distances - distances.min(), spread, keystream))
    return int(heads[below(np.array([len(heads)], dtype=np.int64), keystream)[0]])


@dataclass(frozen=True, eq=False)
class RankTask(SumTask):
    """A sum task that releases chosen bins in place of the sums of users per bin."""

    summed: Quantiles
    noise: RankChoice

    def sum(self, chunk: Chunk, sizes: Sizes) -> Integers:
        """Returns the numbers of users by bin, a user's rows in equal shares, in whole grid units."""
        bins, owner = self.noise.bins, np.repeat(np.arange(len(sizes)), sizes)
        found = []
        for name, (low, high) in self.summed.bounds.items():
            values, _ = self.summed.values_of(name, chunk)
            edges = np.linspace(low, high, bins + 1)
            code = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1)
            pairs, rows = np.unique(owner * bins + code, return_counts=True)
            weights = np.rint(_UNITS * (rows / sizes[pairs // bins]))
            # Whole numbers below 2^53: exact.
            found.append(np.bincount(pairs % bins, weights, minlength=bins).astype(np.int64))
        return np.concatenate(found)

    def release(self, sums: Integers, users: int) -> Matrix:
        """Returns the chosen bins, which are all that anybody may see."""
        return self.noise.choose(sums, users)

    def read(self, released: Matrix, users: int, confidence: float) -> Reading:
        """Returns the middle of each chosen bin; its interval spans the bins chosen for both ends."""
        chosen = released.astype(np.int64).reshape(len(self.summed.columns), -1, 3)
        table = []
        for (low, high), bins in zip(self.summed.bounds.values(), chosen, strict=True):
            edges = np.linspace(low, high, self.noise.bins + 1)
            table += [(0.5 * edges[v] + 0.5 * edges[v + 1], edges[a], edges[b + 1]) for v, a, b in bins.tolist()]
        values, starts, ends = np.array(table).T[:, None, :]
        return Reading(self.summed.names, None, values, starts, ends)
