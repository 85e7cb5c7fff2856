"""Checks for faults that a likelihood attack would miss: that sums follow the law, and that their noise is fresh.

Each check has a false-alarm probability that is proved for a finite sample. The tools are the inequalities of Bennett
(sums of independent and bounded numbers), of Freedman (differences of a martingale), and of Dvoretzky, Kiefer and
Wolfowitz with Massart's constant (distribution functions). Some laws are exact (Binomial counts, Gamma sums of
logarithms). docs/auditing.md says which fault each check finds. No work grows with the square of the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import lambertw
from scipy.stats import binom, gamma

from cpsgd import _plain
from cpsgd.audit.sum_law import Array, Integers, SumLaw

# A released mean is float32, so its sums are integers only up to rounding.
_NEAR_INTEGER = 0.25
# Steps of the noise that the code under audit may leave out: all but every second sum, and so on.
_DIVISORS = (2, 3, 5, 16)
# Shares of the numbers that lie in the tails, from where samples see much to where nothing may lie.
_TAILS: Array = np.array([10.0 ** (-0.5 * step) for step in range(2, 31)])
# What float64 can still tell from 0, in logarithms of numbers in [0, 1].
_RESOLUTION = 2.0**-53
# Numbers whose correlation at all distances is looked at.
_MAX_LAGGED = 2**22


@dataclass(frozen=True)
class Check:
    """A statistic of the data and its limit.

    Attributes:
        name: Short name.
        question: Description of the statistic.
        statistic: The measured value.
        limit: Its largest allowed value; None where there were too few data to decide.
    """

    name: str
    question: str
    statistic: float
    limit: float | None

    @property
    def passed(self) -> bool:
        """Whether the statistic is within its limit."""
        return self.limit is None or self.statistic <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return _plain.to_dict(self, "passed")


@dataclass(frozen=True)
class Played:
    """Rounds with the same vectors.

    Attributes:
        name: Description of the vectors.
        law: The law that their sums should follow.
        slack: The most that the codec's resolution may move an expected sum.
        exact: The sums as they came out of the released means, one row per round.
        times: Place of each round among all that were played, from 0.
    """

    name: str
    law: SumLaw
    slack: float
    exact: Array
    times: Integers

    @property
    def blur(self) -> float:
        """The most that the codec's resolution may move the distribution function of a sum."""
        return self.slack * min(1.0, self.law.narrowing * float(self.law.mass.max()))

    @property
    def sums(self) -> Integers:
        """The sums, rounded to integers; NaN becomes a value far outside the law."""
        return np.rint(np.nan_to_num(np.clip(self.exact, -(2.0**52), 2.0**52), nan=2.0**52)).astype(np.int64)


def bennett(variance: Array | float, largest: float, false_alarm: float) -> Array:
    """Returns a bound on |Σ X| that fails with at most this probability; X independent, centred, |X| <= `largest`.

    Bennett's inequality: P(Σ X >= x) <= exp(-v/b² h(b x/v)) with h(u) = (1 + u) log(1 + u) - u, solved for x by
    Lambert's W. Freedman's inequality has the same form where X are differences of a martingale and v bounds the sum of
    their conditional variances.
    """
    nats = math.log(2.0 / false_alarm)
    spread = np.maximum(np.asarray(variance, dtype=np.float64), 1e-300)
    exponent = largest * largest * nats / spread
    growth = np.expm1(1.0 + lambertw((exponent - 1.0) / math.e, 0).real)
    # h(u) <= u²/2, so the solution is never below this; W loses digits there.
    reach: Array = spread / largest * np.maximum(growth, np.sqrt(2.0 * exponent))
    return reach


def integers(batches: Sequence[Played]) -> Check:
    """Checks that released means are sums of integers, as the protocol's are. No chance is involved."""
    gaps = [float(np.max(np.abs(batch.exact - np.rint(batch.exact)), initial=0.0)) for batch in batches]
    worst = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    return Check("integers", "distance of a released sum from the lattice", worst, _NEAR_INTEGER)


def unbiased(batches: Sequence[Played], false_alarm: float) -> Check:
    """Checks that released means are unbiased: in each coordinate, and summed over all coordinates.

    A sum's deviation from its expectation is a sum of independent parts, those of the noise and of the rounding. All
    batches are also added up: as they are, and with the weights that best show vectors that count too much.
    """
    worst = 0.0
    each = 0.9 * false_alarm / len(batches) / 3.0
    largest = max(batch.law.largest for batch in batches)
    pooled = np.zeros((2, 3))
    for batch in batches:
        rounds, dim = batch.exact.shape
        deviations = np.sum(batch.sums - batch.law.mean, axis=0)
        # The codec's resolution moves the expectation, and with it the variance of a part.
        slack = rounds * batch.slack
        variance = rounds * batch.law.variance + largest * slack
        apart = np.abs(deviations) / (bennett(variance, largest, each / dim) + slack)
        together = float(bennett(float(variance.sum()), largest, each)) + dim * slack
        pushed = max(abs(float(deviations.sum())), abs(float(deviations @ batch.law.outward)))
        worst = max(worst, float(apart.max()), pushed / together)
        for total, weights in zip(pooled, (np.ones(dim), batch.law.pull), strict=True):
            total += deviations @ weights, variance @ weights**2, slack * np.sum(np.abs(weights))
    pulls = max(float(np.max(np.abs(batch.law.pull))) for batch in batches)
    for (deviation, spread, slack), weight in zip(pooled, (1.0, pulls), strict=True):
        if weight > 0.0:
            limit = float(bennett(spread, weight * largest, 0.05 * false_alarm)) + slack
            worst = max(worst, float(abs(deviation) / limit))
    return Check(
        "unbiased", "largest deviation of an average from its expectation, in units of what chance allows", worst, 1.0
    )


def spread(batches: Sequence[Played], uniforms: Sequence[Array], false_alarm: float) -> Check:
    """Checks the width of the noise: for every vector, in every coordinate, in rounds of each size.

    Of independent uniform numbers u, (u - ½)² has mean 1/12 and variance 1/180.
    """
    widths = [np.sum((uniform - 0.5) ** 2 - 1.0 / 12.0, axis=0) for uniform in uniforms]
    rounds = np.array([len(uniform) for uniform in uniforms])
    counts = np.array([batch.law.count for batch in batches])
    dim = len(widths[0])
    # Deviations, and how many numbers each is the sum of.
    alone = (np.array(widths), rounds[:, None])
    vectors = (np.sum(widths, axis=1), dim * rounds)
    coordinates = (np.sum(widths, axis=0), rounds.sum())
    sizes = [(np.sum(vectors[0][counts == count]), dim * rounds[counts == count].sum()) for count in set(counts)]
    kinds = [alone, vectors, coordinates, *sizes]
    # On [0, 1], (u - ½)² goes up and down by ½ in all, and the square of its distance from 1/12 by 5/72.
    blur = max(batch.blur for batch in batches)
    forgiven, variance = 0.5 * blur, 1.0 / 180.0 + 5.0 / 72.0 * blur
    worst = 0.0
    for deviations, numbers in kinds:
        limits = bennett(numbers * variance, 1.0 / 6.0, false_alarm / len(kinds) / deviations.size) + forgiven * numbers
        worst = max(worst, float(np.max(np.abs(deviations) / limits)))
    return Check("spread", "largest deviation of the noise's width, in units of what chance allows", worst, 1.0)


def distribution(batches: Sequence[Played], uniforms: Sequence[Array], false_alarm: float) -> Check:
    """Checks that the sums have the protocol's law: the distribution function of all coordinates at once, and of each.

    All at once for every batch, as they are and turned outwards, because a vector that is too long moves coordinates
    apart, which would cancel out. Each by itself for all batches.
    """
    worst = 0.0
    for batch, uniform in zip(batches, uniforms, strict=True):
        gap = max(_gap(uniform.ravel()), _gap(np.where(batch.law.outward > 0.0, uniform, 1.0 - uniform).ravel()))
        worst = max(worst, gap / (_massart(uniform.size, 0.25 * false_alarm / len(batches)) + batch.blur))
    rounds, dim = sum(len(uniform) for uniform in uniforms), uniforms[0].shape[1]
    limit = _massart(rounds, 0.5 * false_alarm / dim) + max(batch.blur for batch in batches)
    for coordinate in range(dim):
        worst = max(worst, _gap(np.concatenate([uniform[:, coordinate] for uniform in uniforms])) / limit)
    return Check("law", "largest gap to the exact distribution function, in units of what chance allows", worst, 1.0)


def _massart(size: int, false_alarm: float) -> float:
    return math.sqrt(math.log(2.0 / false_alarm) / (2.0 * size))


def _gap(uniform: Array) -> float:
    """Returns the largest distance of the empirical distribution function from the uniform one."""
    ordered = np.sort(uniform)
    steps = np.arange(ordered.size + 1) / ordered.size
    return float(max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1])))


def tails(batches: Sequence[Played], uniforms: Sequence[Array], false_alarm: float) -> Check:
    """Checks the number of sums in the tails, neither too few nor too many, by exact Binomial laws.

    Both tails together, from a tenth of the numbers down to shares that are never seen; in rounds of each size.
    """
    # Where the codec's resolution sometimes rounds a client's point up, a tail gains a mass at its end.
    moved = [batch.slack * batch.law.tail_ends(_TAILS) for batch in batches]
    sizes = {batch.law.count for batch in batches}
    least = 1.0
    for size in sizes:
        chosen = [i for i, batch in enumerate(batches) if batch.law.count == size]
        numbers = np.concatenate([uniforms[i].ravel() for i in chosen])
        distances = 1.0 - np.abs(2.0 * numbers - 1.0)
        for share, forgiven in zip(_TAILS, np.max([moved[i] for i in chosen], axis=0), strict=True):
            found, few, many = np.count_nonzero(distances < share), max(0.0, share - forgiven), share + forgiven
            least = min(
                least, binom.cdf(found, distances.size, few), binom.sf(found - 1, distances.size, min(1.0, many))
            )
    each = false_alarm / (2 * len(_TAILS) * len(sizes))
    question = "improbability of the least likely count of sums in the tails, in units of what chance allows"
    return Check("tails", question, _improbability(least, each), 1.0)


def remainders(batches: Sequence[Played], false_alarm: float) -> Check:
    """Checks the law of sums modulo small numbers. For example, noise in steps of two would reveal a sum's parity.

    For every vector, in every coordinate and in all together.
    """
    worst = 0.0
    each = false_alarm / (2 * sum(_DIVISORS) * len(batches))
    for batch in batches:
        rounds, dim = batch.exact.shape
        index = batch.sums - batch.law.first
        # The codec's resolution moves on average at most this many sums to another remainder, now these and now those.
        slack = rounds * batch.slack
        for divisor in _DIVISORS:
            expected = batch.law.remainders(divisor)
            # Every coordinate counts its own remainders.
            places = index % divisor + divisor * np.arange(dim)
            found = np.bincount(places.ravel(), minlength=dim * divisor).reshape(dim, divisor)
            excess, variance = found - rounds * expected, rounds * expected * (1.0 - expected) + slack
            apart = np.abs(excess) / (bennett(variance, 1.0, each / dim) + slack)
            together = np.abs(excess.sum(axis=0)) / (bennett(variance.sum(axis=0), 1.0, each) + dim * slack)
            worst = max(worst, float(apart.max()), float(together.max()))
    question = f"largest excess of a remainder modulo {', '.join(map(str, _DIVISORS))}, in units of what chance allows"
    return Check("remainders", question, worst, 1.0)


def quiet(uniforms: Array, false_alarm: float) -> Check:
    """Checks that no single round has next to no noise.

    Of independent uniform numbers u, -log|2u - 1| is exponential: its sum over a round's coordinates is Gamma.
    """
    rounds, dim = uniforms.shape
    closeness = -np.sum(np.log(np.maximum(np.abs(2.0 * uniforms - 1.0), _RESOLUTION)), axis=1)
    least = float(gamma.sf(closeness.max(), dim))
    question = "improbability of the round with the least noise, in units of what chance allows"
    return Check("quiet", question, _improbability(least, false_alarm / rounds), 1.0)


def _improbability(probability: float, allowed: float) -> float:
    """Returns log(probability)/log(allowed), which exceeds 1 if an outcome is less likely than allowed."""
    return math.log(max(probability, 1e-300)) / math.log(allowed)


# ---------------------------------------------------------------------- is the noise fresh?


def of_law(batches: Sequence[Played], uniforms: Sequence[Array], false_alarm: float) -> list[Check]:
    """Runs the checks of the law that apply to all batches, each with this false-alarm rate."""
    return [
        integers(batches),
        unbiased(batches, false_alarm),
        spread(batches, uniforms, false_alarm),
        distribution(batches, uniforms, false_alarm),
        tails(batches, uniforms, false_alarm),
        remainders(batches, false_alarm),
    ]


def in_order(batches: Sequence[Played], uniforms: Sequence[Array]) -> Array:
    """Returns the uniform numbers of all rounds in the order in which they were played."""
    times = np.concatenate([batch.times for batch in batches])
    return np.concatenate(list(uniforms))[np.argsort(times)]


@dataclass(frozen=True)
class _View:
    """Numbers to be compared: independent and centred if the uniform ones are independent and uniform.

    Attributes:
        numbers: The numbers.
        variance: Variance of a number.
        largest: Upper bound on their absolute values.
        wobble: Variance of a number's square.
    """

    numbers: Array
    variance: float
    largest: float
    wobble: float


def _views(uniforms: Array) -> tuple[_View, _View]:
    """Returns two views of uniform numbers u: the noise u - ½, and its centred square (u - ½)² - 1/12.

    Squares are correlated where the same coordinates are included twice.
    """
    noise = uniforms - 0.5
    # With t = (u - ½)² - 1/12: E t² = 1/180, E t⁴ = 1/15120.
    return _View(noise, 1.0 / 12.0, 0.5, 1.0 / 180.0), _View(
        noise**2 - 1.0 / 12.0, 1.0 / 180.0, 1.0 / 6.0, 1.0 / 15120.0 - 1.0 / 32400.0
    )


def coordinates(uniforms: Array, false_alarm: float) -> Check:
    """Checks that the noise of any two coordinates is uncorrelated, and also its size."""
    question = "largest correlation of two coordinates, in units of what chance allows"
    rounds, dim = uniforms.shape
    if dim == 1:
        return Check("coordinates", question, 0.0, None)
    worst = 0.0
    for view in _views(uniforms):
        products = view.numbers.T @ view.numbers
        np.fill_diagonal(products, 0.0)
        limit = bennett(rounds * view.variance**2, view.largest**2, 0.5 * false_alarm / (dim * (dim - 1) / 2.0))
        worst = max(worst, float(np.abs(products).max() / limit))
    return Check("coordinates", question, worst, 1.0)


def rounds(uniforms: Array, false_alarm: float) -> Check:
    """Checks that the noise of a round is uncorrelated with that of rounds any fixed number later.

    All numbers are one sequence, round after round and coordinate after coordinate, and are compared with themselves at
    every distance. So this also finds a keystream that is not advanced far enough. The products x_i x_(i+L) are
    differences of a martingale, of conditional variances x_i² V, V the variance of x, that sum to at most `variance`
    but for half of the false alarms. The same for the size of the noise.
    """
    worst = 0.0
    for view in _views(uniforms):
        sequence = view.numbers.ravel()[:_MAX_LAGGED]
        size = len(sequence)
        # Twice as long, so that the end is not compared with the beginning.
        power = np.abs(np.fft.rfft(sequence, 2 * size)) ** 2
        products = np.fft.irfft(power, 2 * size)[1:size]
        squares = size * view.variance + float(bennett(size * view.wobble, view.largest**2, 0.25 * false_alarm))
        limit = bennett(squares * view.variance, view.largest**2, 0.25 * false_alarm / (size - 1))
        worst = max(worst, float(np.abs(products).max() / limit))
    question = "largest correlation of the noise with itself any distance later, in units of what chance allows"
    return Check("rounds", question, worst, 1.0)


def repeats(batches: Sequence[Played], false_alarm: float) -> Check:
    """Checks that rounds do not have the same sums more often than chance allows, at any distance.

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
        times: Place of each round among all.
        value: Index of each round's sums among the different sums that occurred.
        probability: Probability of each of these different sums.
        pair: Probability that two rounds agree.
        triple: Probability that three rounds agree.
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
        """Returns the second half's excess of matches, a bound on its variance, and the largest term."""
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
