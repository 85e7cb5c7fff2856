"""What two neighbours' exact laws say of ε, with no chance involved: a claim below it is false, however few rounds.

The sums of a round are independent in every coordinate and their masses are known, so the distribution of the privacy
loss is a convolution. Losses are rounded down to a grid and what is too small for a Fourier transform is left out: both
only make the ε found smaller. None of the accounting's own code is used.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from cpsgd.audit.sum_law import Array, SumLaw

# Points of the loss's grid over all coordinates together.
_POINTS = 1 << 16
# Outcomes of a coordinate that are rarer than this are left out.
_RARE = 1e-14
# What a transform may be off by, per coordinate; masses below a hundred times this are left out.
_TRANSFORM = 1e-14
_STEPS = 60


def pair_epsilon(zero: SumLaw, one: SumLaw, delta: float) -> float:
    """The ε that these two laws need at δ, rounded down; in the direction that needs more."""
    return max(_one_way(one, zero, delta), _one_way(zero, one, delta))


def _one_way(played: SumLaw, other: SumLaw, delta: float) -> float:
    """The smallest ε with E(1 - e^(ε - L))₊ <= δ, L the log of the ratio of the laws where the first is played."""
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
        return math.inf  # nothing that the first law plays is possible under the second
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
    mass = 0.99 * found[found > 0.0]
    loss = step * (lowest + np.flatnonzero(found > 0.0))

    def needed(epsilon: float) -> float:
        beyond = loss > epsilon
        return float(mass[beyond] @ -np.expm1(epsilon - loss[beyond]))

    low, high = 0.0, float(loss.max(initial=0.0))
    if needed(low) <= delta:
        return 0.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if needed(middle) > delta else (low, middle)
    return low
