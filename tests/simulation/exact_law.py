"""A small round whose sums have a law that can be written down, for every engine to be held against."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.mechanisms import Binomial

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


def noise_of(of: Protocol) -> Binomial:
    assert isinstance(of.mechanism, Binomial)
    return of.mechanism


def integers(of: Protocol, mean: np.ndarray, count: int) -> np.ndarray:
    """The integer sums behind a mean."""
    noise = noise_of(of)
    middle = count * (noise.trials * noise.p + (noise.levels - 1) / 2)
    return np.rint(mean.astype(np.float64) / of.scale * count + middle).astype(np.int64)


def exact_law(of: Protocol) -> np.ndarray:
    """Probabilities of a coordinate's sum: each client's rounding, then Binomial(nm, p)."""
    noise = noise_of(of)
    grid = noise.grid
    law = binom.pmf(np.arange(CLIENTS * noise.trials + 1), CLIENTS * noise.trials, noise.p)
    for value in VALUES:
        point = round(value * grid.unit) + grid.limit
        level, fraction = divmod(point / 2**grid.fraction_bits, 1.0)
        client = np.zeros(noise.levels)
        client[int(level)] = 1.0 - fraction
        if fraction:
            client[int(level) + 1] = fraction
        law = np.convolve(law, client)
    return law
