"""Does the carrier follow the protocol's law? Checks on what a likelihood attack alone would miss.

Each has a false-alarm probability that is proved for a finite sample: by Bernstein's inequality (sums of independent
coins; products of independent uniform numbers), by the inequality of Dvoretzky, Kiefer and Wolfowitz with Massart's
constant (distribution functions), or by Markov's (coincidences). docs/auditing.md says which fault shows up where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.privacy.audit._law import Array, Integers, Law

# A released mean is float32, so its sums are integers only up to rounding.
_NEAR_INTEGER = 0.25


@dataclass(frozen=True)
class Check:
    """One question to the data.

    Attributes:
        name: Short name.
        question: What was asked.
        statistic: What was measured.
        limit: What it may be at most; None where too little could be seen to ask at all.
        passed: Whether it was within the limit.
    """

    name: str
    question: str
    statistic: float
    limit: float | None

    @property
    def passed(self) -> bool:
        """Whether the statistic is within its limit."""
        return self.limit is None or self.statistic <= self.limit


@dataclass(frozen=True)
class Batch:
    """Rounds with the same vectors.

    Attributes:
        name: What was played.
        law: What their sums should follow.
        slack: How far the codec's resolution may move an expected sum.
        exact: The sums as they came out of the released means, a row a round.
        times: When each round was played, from 0.
    """

    name: str
    law: Law
    slack: float
    exact: Array
    times: Integers

    @property
    def sums(self) -> Integers:
        """The sums as integers; what is no number counts as far away."""
        return np.rint(np.nan_to_num(np.clip(self.exact, -(2.0**52), 2.0**52), nan=2.0**52)).astype(np.int64)


def bernstein(variance: float, largest: float, false_alarm: float) -> float:
    """What |Σ X| exceeds with at most this probability; X independent, centred, at most `largest`, of this variance."""
    nats = math.log(2.0 / false_alarm)
    third = largest * nats / 3.0
    return third + math.sqrt(third * third + 2.0 * variance * nats)


def integers(batches: Sequence[Batch]) -> Check:
    """Whether released means are sums of integers, as the protocol's are. No chance is involved."""
    gaps = [float(np.max(np.abs(batch.exact - np.rint(batch.exact)), initial=0.0)) for batch in batches]
    worst = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    return Check("integers", "distance of a released sum from the lattice", worst, _NEAR_INTEGER)


def unbiased(batches: Sequence[Batch], false_alarm: float) -> Check:
    """Whether the means are right on average: in every coordinate, and in all together, upwards and outwards.

    A sum's deviation from its expectation is a sum of independent coins, those of the noise and of the rounding.
    """
    worst = 0.0
    each = false_alarm / len(batches) / 3.0
    for batch in batches:
        rounds, dim = batch.exact.shape
        deviations = np.sum(batch.sums - batch.law.mean, axis=0)
        slack = rounds * batch.slack
        apart = np.abs(deviations) / [bernstein(rounds * v, 1.0, each / dim) + slack for v in batch.law.variance]
        together = bernstein(rounds * float(batch.law.variance.sum()), 1.0, each) + dim * slack
        pushed = max(abs(float(deviations.sum())), abs(float(deviations @ batch.law.outward)))
        worst = max(worst, float(apart.max()), pushed / together)
    return Check(
        "unbiased", "largest deviation of an average from its expectation, in units of what chance allows", worst, 1.0
    )


def distribution(batches: Sequence[Batch], uniforms: Sequence[Array], false_alarm: float) -> Check:
    """Whether the sums have the protocol's law: the distribution function of all coordinates at once.

    Once as they are, and once turned outwards: too long a vector moves coordinates apart, which would cancel out.
    """
    worst = 0.0
    for batch, uniform in zip(batches, uniforms, strict=True):
        limit = math.sqrt(math.log(4.0 * len(batches) / false_alarm) / (2.0 * uniform.size))
        gap = max(_gap(uniform), _gap(np.where(batch.law.outward > 0.0, uniform, 1.0 - uniform)))
        worst = max(worst, gap / (limit + batch.slack * float(batch.law.mass.max())))
    return Check("law", "largest gap to the exact distribution function, in units of what chance allows", worst, 1.0)


def _gap(uniform: Array) -> float:
    """The largest distance of the empirical distribution function from the uniform one."""
    ordered = np.sort(uniform, axis=None)
    steps = np.arange(ordered.size + 1) / ordered.size
    return float(max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1])))


def coordinates(uniforms: Array, false_alarm: float) -> Check:
    """Whether the noise of any two coordinates is uncorrelated."""
    question = "largest correlation of two coordinates, in units of what chance allows"
    rounds, dim = uniforms.shape
    if dim == 1:
        return Check("coordinates", question, 0.0, None)
    centred = uniforms - 0.5
    products = centred.T @ centred
    np.fill_diagonal(products, 0.0)
    limit = bernstein(rounds / 144.0, 0.25, false_alarm / (dim * (dim - 1) / 2.0))
    return Check("coordinates", question, float(np.abs(products).max()) / limit, 1.0)


def successive(uniforms: Array, false_alarm: float) -> Check:
    """Whether the noise of a round and of the next one is uncorrelated; pairs of rounds do not overlap."""
    centred = uniforms[: len(uniforms) // 2 * 2] - 0.5
    products = centred[::2] * centred[1::2]
    limit = bernstein(products.size / 144.0, 0.25, false_alarm)
    question = "correlation of a round with the next, in units of what chance allows"
    return Check("rounds", question, abs(float(products.sum())) / limit, 1.0)


def repeats(batches: Sequence[Batch], false_alarm: float) -> Check:
    """Whether the noise of one round comes back in another, however much later."""
    expected, found = 0.0, 0
    for batch in batches:
        rounds = len(batch.exact)
        expected += 0.5 * rounds * (rounds - 1) * batch.law.coincidence
        found += rounds - len(np.unique(batch.sums, axis=0))
    # With few coordinates honest rounds coincide too, and nothing can be concluded.
    return Check(
        "repeats", "rounds whose noise was there before", float(found), 0.0 if expected <= false_alarm else None
    )


def in_order(batches: Sequence[Batch], uniforms: Sequence[Array]) -> NDArray[np.float64]:
    """The uniform numbers of all rounds as they were played."""
    times = np.concatenate([batch.times for batch in batches])
    return np.concatenate(list(uniforms))[np.argsort(times)]
