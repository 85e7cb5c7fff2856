"""Cohorts: the clients of a round as a pure function of a key and the round, without storing the population.

Cohorts are drawn with NumPy's generator, which is enough for a simulation on one machine. A deployment whose guarantee
relies on sampling must draw its cohorts from private randomness and keep them secret.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from cpsgd.codec.rounding import kernels
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.learning.option_groups import CohortOptions
from cpsgd.neighbours import Adjacency, Participation, Scheme

OVERFLOW_SHARE = 1e-3
"""Share of δ for the probability that a Poisson round draws more clients than there is room for."""

_MIXING_ROUNDS = 6
# Probability that any round has fewer messages than the budget was checked for, and may have to be abandoned.
_UNLUCKY = 1e-3


@dataclass(frozen=True)
class Cohorts:
    """The cohorts of a run, as `CohortOptions` describe them.

    Attributes:
        population: Number of all clients.
        messages: Messages in a round's sum. With Poisson sampling they are more than `cohort`: other clients send noise
            only, so that the noise does not depend on the draw.
        overflow: Probability that a round draws more clients than `messages` (Poisson only), part of δ.
        key: Key of all draws.
    """

    population: int
    cohort: int
    scheme: Scheme
    messages: int
    overflow: float
    key: int

    @classmethod
    def plan(cls, options: CohortOptions, *, population: int, key: int, delta: float) -> Cohorts:
        """Checks that there are enough clients, and computes the number of messages; δ is that of the guarantee."""
        cohort, rounds, scheme = options.cohort, options.rounds, options.participation or "once"
        if rounds is None:
            raise ParameterError("Missing rounds: nothing was planned that would say how many.")
        if cohort > population:
            raise ParameterError(f"A cohort of {cohort:,} is larger than the population of {population:,} clients.")
        if scheme == "once" and cohort * rounds > population:
            raise InfeasibleError(
                f"Each of {population:,} clients takes part once: that is enough for {population // cohort:,} disjoint "
                f"cohorts of {cohort:,}, not for {rounds:,} rounds. Use smaller cohorts, fewer rounds, or "
                "participation apart (several passes over the clients), fixed-size or every."
            )
        if scheme == "every" and cohort != population:
            raise ParameterError(
                f"With participation 'every' the cohort is the population of {population:,} clients, not {cohort:,}."
            )
        if scheme != "poisson" or cohort == population:
            return cls(population, cohort, scheme, cohort, 0.0, key)
        overflow = OVERFLOW_SHARE * delta / rounds
        # One place more than the others' draws need: the noise is then the same with a given client and without.
        messages = int(binom.isf(overflow / 2.0, population, cohort / population)) + 2
        exceeded = float(binom.sf(messages - 2, population, cohort / population)) * (1.0 + 1e-9)
        return cls(population, cohort, scheme, messages, exceeded, key)

    @property
    def participation(self) -> Participation:
        """The participation for the accounting, with the sampling rate."""
        return participation_of(self.scheme, self.cohort, self.population)

    @property
    def adjacency(self) -> Adjacency:
        """The default adjacency."""
        return Adjacency.ZERO_OUT if self.scheme == "poisson" else Adjacency.REPLACE_ONE

    def fewest_survivors(self, dropout: float, rounds: int) -> int:
        """Returns the number of messages that arrive in each of the rounds with probability 0.999."""
        if dropout <= 0.0:
            return self.messages
        return max(1, int(binom.ppf(_UNLUCKY / rounds, self.messages, 1.0 - dropout)))

    def clients(self, round: int) -> NDArray[np.int64]:
        """Returns the numbers of the clients in a round's cohort."""
        if self.scheme == "every":
            return np.arange(self.population)
        if self.scheme in ("once", "apart"):
            return self.several(range(round, round + 1))[0]
        generator, size = self.generator("cohort", round), self.cohort
        if self.scheme == "poisson":
            size = int(generator.binomial(self.population, size / self.population))
        return np.sort(generator.choice(self.population, size, replace=False, shuffle=False)).astype(np.int64)

    def several(self, rounds: range) -> list[NDArray[np.int64]]:
        """Returns `clients` of consecutive rounds, faster than one by one.

        With "once" and "apart" clients come in one order, the next cohort after the last. With "apart" the first follow
        the last again. So a client comes back after ⌊population / cohort⌋ rounds at the earliest.
        """
        if self.scheme not in ("once", "apart") or not rounds:
            return [self.clients(round) for round in rounds]
        if self.scheme == "once" and (rounds[-1] + 1) * self.cohort > self.population:
            raise InfeasibleError(f"Round {rounds[-1]:,} would need clients who took part before: all are used up.")
        numbers = np.arange(rounds[0] * self.cohort, (rounds[-1] + 1) * self.cohort) % self.population
        return list(permuted(numbers, self.population, self.key).reshape(-1, self.cohort))

    def arrived(self, round: int, messages: int, dropout: float) -> NDArray[np.bool_]:
        """Returns whether each of a round's messages arrives."""
        if dropout <= 0.0:
            return np.ones(messages, dtype=bool)
        return self.generator("dropout", round).random(messages) >= dropout

    def generator(self, purpose: str, round: int) -> np.random.Generator:
        """Returns the random generator for one purpose in one round."""
        digest = hashlib.sha256(f"cpsgd {purpose} v1".encode() + struct.pack("<QQ", self.key, round)).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def participation_of(scheme: Scheme, cohort: int, population: int) -> Participation:
    """Returns the participation of cohorts that are drawn by a scheme, with its rate or separation.

    Example:
        >>> str(participation_of("apart", cohort=100_000, population=25_000_000))
        'apart:250'
    """
    if scheme == "apart":
        return Participation.apart(population // cohort)
    return Participation(scheme, cohort / population if scheme in ("poisson", "fixed-size") else 1.0)


def permuted(numbers: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Applies a pseudo-random permutation of 0..size-1, fixed by `key`, to these numbers.

    A Feistel network permutes the numbers with an even number of bits, enough for `size`. It is applied again to a
    number that lands outside, until it lands inside; the map stays one-to-one because cycles lead back inside.

    Example:
        >>> sorted(permuted(np.arange(10), 10, key=1).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, math.ceil(max(1, (size - 1).bit_length()) / 2))
    digest = hashlib.sha256(b"cpsgd permutation v1" + struct.pack("<Q", key)).digest()
    keys = np.frombuffer(digest + hashlib.sha256(digest).digest(), dtype="<u8")[:_MIXING_ROUNDS].astype(np.uint64)
    found = np.empty(numbers.size, dtype=np.int64)
    kernels.permute(np.ascontiguousarray(numbers, dtype=np.int64), size, half, keys, found)
    return found
