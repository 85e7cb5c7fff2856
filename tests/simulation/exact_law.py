"""A small round whose sums have a law that can be written down, for every engine to be held against."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.codec import quantize

CLIENTS, DIM = 6, 20_000
VALUES = (0.3, -0.7, 0.05, 0.9, -0.2, 0.0)
"""What each client holds in every coordinate."""


def protocol(**changes: Any) -> Protocol:
    parameters: dict[str, Any] = {
        "clients": CLIENTS,
        "dim": DIM,
        "clip_norm": 1e4,
        "coordinate_range": 1.0,
        "levels": 3,
        "trials": 5,
    }
    return Protocol.binomial(**{**parameters, **changes})


def integers(of: Protocol, mean: np.ndarray, count: int) -> np.ndarray:
    """The integer sums behind a mean."""
    middle = count * (of.trials * of.p + (of.levels - 1) / 2)
    return np.rint(mean.astype(np.float64) / of.scale * count + middle).astype(np.int64)


def exact_law(of: Protocol) -> np.ndarray:
    """Probabilities of a coordinate's sum: each client's rounding, then Binomial(nm, p)."""
    law = binom.pmf(np.arange(CLIENTS * of.trials + 1), CLIENTS * of.trials, of.p)
    for value in VALUES:
        grid = round(value * quantize.unit(1.0, of.levels)) + quantize.coordinate_limit(of.levels)
        level, fraction = divmod(grid / 2 ** quantize.fraction_bits(of.levels), 1.0)
        client = np.zeros(of.levels)
        client[int(level)] = 1.0 - fraction
        if fraction:
            client[int(level) + 1] = fraction
        law = np.convolve(law, client)
    return law
