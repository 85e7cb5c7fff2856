"""Ways to round, and the exact laws of the integers that come of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom, chisquare

from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.base import Rounding

HALF = 1 << 15

COIN = {
    "one": Rounding(7_838, HALF, 16, coins=1),
    "three": Rounding(4_614, HALF, 16, coins=3),
    "many": Rounding(1_000, HALF, 16, coins=70),
    "sampled": Rounding(30_000, HALF, 16, rate=13_107),
}
"""Coins of all kinds; those that are tossed one by one, and those that are too many for it."""


def rounding_to(levels: int) -> Rounding:
    return Binomial(levels=levels, trials=0, coordinate_range=1.0).device_rounding()


def exact_coins(rounding: Rounding, points: Sequence[int]) -> np.ndarray:
    """The law of the sum of clients' integers, one client at each of these grid points."""
    law = np.ones(1)
    for point in points:
        heads = 0.5 + min(max(point, -rounding.limit), rounding.limit) / 2**16
        if rounding.rate is None:
            coins = rounding.coins or 0
            client = binom.pmf(np.arange(coins + 1), coins, heads)
        else:
            rate = rounding.rate / 2**16
            client = np.array([rate * (1.0 - heads), 1.0 - rate, rate * heads])
        law = np.convolve(law, client)
    return law


def goodness_of_fit(integers: np.ndarray, law: np.ndarray) -> float:
    """Chi-square's p-value, rare outcomes taken together; 0 where something impossible was seen."""
    seen = np.bincount(integers, minlength=law.size).astype(float)
    if seen.size > law.size:
        return 0.0
    expected = law * integers.size
    common = expected >= 10
    observed = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if observed[expected <= 0.0].sum():
        return 0.0
    keep = expected > 5
    return float(chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue)
