"""Checks by exact laws, each sharp for one kind of fault: a variance, a claim, a modulus.

`claim` involves no chance: a claim below what two neighbours need is false, however few rounds are played. The sums of
a round are independent in every coordinate and their masses are known, so the distribution of the privacy loss is a
convolution. Losses are rounded down to a grid, and masses too small for a Fourier transform are left out: both only
make the ε found smaller. None of the accounting's own code is used.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import numpy as np

from cpsgd.audit.auditing import Claim
from cpsgd.audit.checks import Check, Played
from cpsgd.audit.playing import RoundLattice, canaries_of, resting
from cpsgd.audit.sum_law import Array, Integers, SumLaw
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol

# Slopes at which Chernoff's bound is looked at, relative to the one that is best for a Gaussian.
_SLOPES = np.geomspace(0.25, 4.0, 25)
# Beyond it, outcomes that the law leaves out would count.
_STEEPEST, _LARGEST_EXPONENT = 0.25, 600.0
# What the codec's margin and grid may take off a distance.
_RESOLUTION, _LEAST = 1e-3, 1e-4
# Residues of a modulus that are looked at; of a larger one, those where something ends.
_MAX_RESIDUES = 1 << 12
# Digits of a middle after the point: fewer than convolution keeps.
_DIGITS = 6
# Points of the loss's grid over all coordinates together.
_POINTS = 1 << 16
# Outcomes of a coordinate that are rarer than this are left out.
_RARE = 1e-14
# What a transform may be off by, per coordinate; masses below a hundred times this are left out.
_TRANSFORM = 1e-14


def variance(batches: Sequence[Played], false_alarm: float) -> Check:
    """Checks that the squared deviations of all sums add up to the law's variance: Chernoff's bound, from exact laws.

    Every sum counts in units of its own variance, which best shows that all noise is too narrow by a factor.
    """
    total = forgiven = scale = 0.0
    parts: list[tuple[int, Array, Array]] = []
    for batch in batches:
        law = batch.law
        rounds = len(batch.sums)
        total += float(np.sum(((batch.sums - law.mean) ** 2) / law.variance - 1.0))
        # The codec's resolution moves the mean and the variance of a sum.
        forgiven += rounds * float(np.sum((batch.slack + batch.slack**2) / law.variance))
        for masses, squares, number in _kinds(law):
            parts.append((rounds * number, masses, squares))
            scale += rounds * number * float(masses @ squares**2)
    nats = math.log(2.0 / false_alarm)
    limits = []
    farthest = max(float(squares.max()) for _, _, squares in parts)
    for sign in (1.0, -1.0):
        slopes = np.minimum(_SLOPES * math.sqrt(2.0 * nats / scale), min(_STEEPEST, _LARGEST_EXPONENT / farthest))
        grown = sum(
            number * np.log(np.exp(sign * slopes[:, None] * squares) @ masses) for number, masses, squares in parts
        )
        limits.append(float(np.min((grown + nats) / slopes)))
    worst = max(total / (limits[0] + forgiven), -total / (limits[1] + forgiven))
    question = "deviation of all squared noise from its variance, in units of what chance allows"
    return Check("variance", question, worst, 1.0)


def _kinds(law: SumLaw) -> list[tuple[Array, Array, int]]:
    """Groups equal coordinates: returns masses, scaled squared deviations minus 1, and the group's size."""
    rows, which, counts = np.unique(law.mass, axis=0, return_index=True, return_counts=True)
    offsets: Integers = np.arange(law.mass.shape[1])
    found = []
    for masses, place, number in zip(rows, which, counts, strict=True):
        squares = (law.first[place] + offsets - law.mean[place]) ** 2 / law.variance[place] - 1.0
        kept = masses > 0.0
        found.append((masses[kept], squares[kept], int(number)))
    return found


def claim(protocol: Protocol, claims: Sequence[Claim], adjacency: Adjacency, count: int) -> Check:
    """Checks that each claimed ε is at least the exact ε of every pair of neighbours that the audit knows.

    Exact laws of the sums are compared, so the result is not random.
    """
    lattice = RoundLattice(protocol, 0)
    others = (lattice.points(resting(lattice)), count - 1)
    worst = -math.inf
    for canary in canaries_of(lattice, adjacency):
        laws = [SumLaw(protocol, [(lattice.points(end), 1), others]) for end in (canary.zero, canary.one)]
        for stated in claims:
            needed = pair_epsilon(laws[0], laws[1], stated.delta)
            worst = max(worst, needed - (1.0 + _RESOLUTION) * stated.claimed - _LEAST)
    question = "largest excess of the ε that neighbours need by their exact laws over the ε claimed"
    return Check("claim", question, worst, 0.0)


def wraparound(protocol: Protocol, rounds: Sequence[int], counts: Sequence[int]) -> Check:
    """Checks that every residue of a sum is decoded to its representative nearest to the middle. Not random."""
    question = "distance of a decoded sum from the one that was reduced modulo the modulus"
    if protocol.modulus is None:
        return Check("modulus", question, 0.0, None)
    modulus, dim, worst = protocol.modulus, protocol.dim, 0.0
    for number in rounds:
        lattice = RoundLattice(protocol, number)
        for count in counts:
            # The window often begins halfway between integers, which the middle's last digits must not decide.
            lowest = math.ceil(round(lattice.middle(count) - 0.5 * modulus, _DIGITS))
            places = np.arange(modulus)
            if modulus > _MAX_RESIDUES:
                # Both ends of the window, and where the residues begin again.
                near = np.arange(_MAX_RESIDUES // 4)
                places = np.unique(np.concatenate([near, modulus - 1 - near, (near - lowest) % modulus]))
            sums = lowest + np.resize(places, -(-len(places) // dim) * dim).reshape(-1, dim)
            means = np.stack([protocol.decode_sum((row % modulus).astype(np.uint64), count, number) for row in sums])
            gaps = np.abs(lattice.sums(means, count) - sums)
            worst = max(worst, math.inf if np.isnan(gaps).any() else float(gaps.max()))
    return Check("modulus", question, worst, 0.25)


def pair_epsilon(zero: SumLaw, one: SumLaw, delta: float) -> float:
    """Returns the exact ε of a pair of laws at δ, rounded down: the larger one of both directions."""
    return max(_one_way(one, zero, delta), _one_way(zero, one, delta))


def _one_way(played: SumLaw, other: SumLaw, delta: float) -> float:
    """Returns the smallest ε with E(1 - e^(ε - L))₊ <= δ; L is the log of the laws' ratio where the first is played."""
    kinds: Counter[tuple[bytes, bytes]] = Counter()
    parts: dict[tuple[bytes, bytes], tuple[Array, Array]] = {}
    outcomes = played.first[:, None] + np.arange(played.mass.shape[1])
    others = other.masses(outcomes)
    for masses, against in zip(played.mass, others, strict=True):
        kept = (masses > _RARE) & (against > 0.0)
        key = masses[kept].tobytes(), against[kept].tobytes()
        kinds[key] += 1
        parts[key] = masses[kept], np.log(masses[kept]) - np.log(against[kept])
    if any(not losses.size for _, losses in parts.values()):
        return math.inf  # nothing that is possible under the first law is possible under the second
    width = sum(number * float(np.ptp(parts[key][1])) for key, number in kinds.items())
    step = max(width, 1e-9) / (_POINTS - 2 * played.first.size)
    spectrum, lowest = np.ones(_POINTS // 2 + 1, dtype=np.complex128), 0
    for key, number in kinds.items():
        masses, losses = parts[key]
        places = np.floor(losses / step).astype(np.int64)
        start = int(places.min())
        spectrum *= np.fft.rfft(np.bincount(places - start, weights=masses), _POINTS) ** number
        lowest += number * start
    found = np.fft.irfft(spectrum, _POINTS)
    found[found < 100.0 * _TRANSFORM * played.first.size] = 0.0
    loss = step * (lowest + np.arange(_POINTS))
    counted = (found > 0.0) & (loss > 0.0)
    mass, loss = 0.99 * found[counted], loss[counted]

    def needed(epsilon: float, first: int) -> float:
        """Returns the δ needed at ε, if `first` is the index of the first loss beyond ε."""
        return float(mass[first:] @ -np.expm1(epsilon - loss[first:]))

    if needed(0.0, 0) <= delta:
        return 0.0
    first = bisect_left(range(loss.size), -delta, key=lambda place: -needed(float(loss[place]), place + 1))
    # Up to this loss the same ones are beyond ε, and e^ε is a quotient of their sums.
    solution = loss[first] + math.log(
        (mass[first:].sum() - delta) / (mass[first:] @ np.exp(loss[first] - loss[first:]))
    )
    return float(np.clip(solution, loss[first - 1] if first else 0.0, loss[first]))
