"""Is the noise fresh? Checks that no coordinate, round or message shares its noise with another.

False-alarm probabilities are proved for finite samples by Bennett's inequality, and by Freedman's where the terms are
differences of a martingale. No work grows with the square of the number of rounds: correlations at all distances are
one Fourier transform, repetitions are found by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpsgd.audit.checks import Check, Played, bennett
from cpsgd.audit.law import Array, Integers

# Numbers whose correlation at all distances is looked at.
_MAX_LAGGED = 2**22


def in_order(batches: Sequence[Played], uniforms: Sequence[Array]) -> Array:
    """The uniform numbers of all rounds as they were played."""
    times = np.concatenate([batch.times for batch in batches])
    return np.concatenate(list(uniforms))[np.argsort(times)]


def coordinates(uniforms: Array, false_alarm: float) -> Check:
    """Whether the noise of any two coordinates is uncorrelated."""
    question = "largest correlation of two coordinates, in units of what chance allows"
    rounds, dim = uniforms.shape
    if dim == 1:
        return Check("coordinates", question, 0.0, None)
    centred = uniforms - 0.5
    products = centred.T @ centred
    np.fill_diagonal(products, 0.0)
    limit = bennett(rounds / 144.0, 0.25, false_alarm / (dim * (dim - 1) / 2.0))
    return Check("coordinates", question, float(np.abs(products).max() / limit), 1.0)


def rounds(uniforms: Array, false_alarm: float) -> Check:
    """Whether the noise of a round is uncorrelated with that of any other that is a fixed number of rounds later.

    All numbers are one sequence, round after round and coordinate after coordinate, and are compared with themselves at
    every distance. So a keystream is also found that comes back in other coordinates, as one does that is not moved on
    far enough. With x = u - ½, the products x_i x_(i+L) are differences of a martingale, of conditional variances
    x_i²/12 that sum to at most `variance` but for half of the false alarms.
    """
    sequence = uniforms.ravel()[:_MAX_LAGGED] - 0.5
    size = len(sequence)
    # Twice as long, so that the end is not compared with the beginning.
    power = np.abs(np.fft.rfft(sequence, 2 * size)) ** 2
    products = np.fft.irfft(power, 2 * size)[1:size]
    variance = (size / 12.0 + bennett(size / 180.0, 1.0 / 6.0, 0.5 * false_alarm)) / 12.0
    limit = bennett(variance, 0.25, 0.5 * false_alarm / (size - 1))
    question = "largest correlation of the noise with itself any distance later, in units of what chance allows"
    return Check("rounds", question, float(np.abs(products).max() / limit), 1.0)


def repeats(batches: Sequence[Played], false_alarm: float) -> Check:
    """Whether rounds have the same sums more often than chance has it, at whatever distance.

    The rounds are split by one binary digit of their time, and those of one half are looked up in the other; any two
    rounds are in different halves for some digit. Given the first half, in which sums v occur n_v times in n rounds, a
    round of the second contributes n_v - n P(v): independent numbers whose expectation, variance and largest value
    follow from the exact law.
    """
    groups = [_Group.of(batch) for batch in batches]
    digits = max(int(batch.times.max(initial=1)) for batch in batches).bit_length()
    worst = 0.0
    for digit in range(digits):
        matches = [group.matches(digit) for group in groups]
        excess, variance = (sum(match[i] for match in matches) for i in (0, 1))
        largest = max(1.0, *(match[2] for match in matches))
        worst = max(worst, float(excess / bennett(variance, largest, false_alarm / digits)))
    question = "excess of rounds whose noise was there before, in units of what chance allows"
    return Check("repeats", question, worst, 1.0)


@dataclass(frozen=True)
class _Group:
    """The rounds of a batch by their sums.

    Attributes:
        times: When each round was played.
        value: Number of each round's sums among all that occurred.
        probability: Of each of those.
        pair: Probability that two rounds agree.
        triple: That three do.
    """

    times: Integers
    value: Integers
    probability: Array
    pair: float
    triple: float

    @classmethod
    def of(cls, batch: Played) -> _Group:
        values, number = np.unique(batch.sums, axis=0, return_inverse=True)
        law = batch.law
        return cls(batch.times, number.ravel(), law.probability(values), law.coincidence(2), law.coincidence(3))

    def matches(self, digit: int) -> tuple[float, float, float]:
        """Excess of the second half's matches over their expectation, a bound on its variance, and the largest term."""
        second = (self.times >> digit) & 1 == 1
        known = np.bincount(self.value[~second], minlength=len(self.probability))
        size, others = int(known.sum()), self.value[second]
        terms = known - size * self.probability
        expected = float(known @ self.probability) - size * self.pair
        # Sums that did not occur at all have terms too.
        elsewhere = max(0.0, self.triple - float(np.sum(self.probability**3)))
        square = float(terms**2 @ self.probability) + size * size * elsewhere
        excess = float(terms[others].sum()) - len(others) * expected
        return excess, len(others) * square, float(terms.max(initial=0.0)) - expected
