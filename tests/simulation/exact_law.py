"""A small round whose sums have a law that can be written down, for every engine to be held against."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import binom, chisquare, norm

from cpsgd import Protocol
from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian, SampledCoins
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.law import Steps

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


def coins(count: int, theta: float = 0.2) -> Protocol:
    """The same round with coins."""
    return with_mechanism(Coins(coins=count, theta=theta, coordinate_range=1.0))


def with_mechanism(mechanism: Mechanism) -> Protocol:
    return Protocol(clients=CLIENTS, dim=DIM, clip_norm=1e4, mechanism=mechanism, rotate=False)


PROTOCOLS = {
    "levels and coins": protocol(),
    "unfair coins": protocol(p=0.3),
    "no noise": protocol(trials=0),
    "two levels": protocol(trials=60, levels=2),
    "one coin": coins(1),
    "three coins": coins(3, theta=0.07),
    "many coins": coins(70, theta=0.03),
    "widest coin": coins(1, theta=0.4999),
    "sampled coins": with_mechanism(SampledCoins(rate=0.3, theta=0.3, coordinate_range=1.0)),
    "few sampled coins": with_mechanism(SampledCoins(rate=0.05, theta=0.5, coordinate_range=1.0)),
    "noise before rounding": with_mechanism(
        RoundedGaussian(noise_deviation=1.2, step=0.7, window=30, coordinate_range=1.0)
    ),
    "discrete Laplace in shares": with_mechanism(
        DiscreteLaplace(levels=3, spread=4, shares=CLIENTS, window=256, coordinate_range=1.0)
    ),
}
"""Rounds of every kind."""


def integers(of: Protocol, mean: np.ndarray, count: int) -> np.ndarray:
    """The integer sums behind a mean."""
    return np.rint(mean.astype(np.float64) / of.scale * count + count * of.mechanism.centre).astype(np.int64)


def exact_law(of: Protocol) -> np.ndarray:
    """Probabilities of a coordinate's sum: each client's rounding, and the noise where that is not the rounding's."""
    if isinstance(steps := of.mechanism.noise.law(1) if of.mechanism.is_noisy else None, Steps):
        return _law_of_steps(of, steps)
    if isinstance(of.mechanism, RoundedGaussian):
        return _law_of_rounded(of.mechanism)
    law, levels = _law_of_noise(of.mechanism)
    grid = of.mechanism.grid
    assert grid is not None
    for value in VALUES:
        point = round(value * grid.unit) + grid.limit
        level, fraction = divmod(point / 2**grid.fraction_bits, 1.0)
        client = np.zeros(levels)
        client[int(level)] = 1.0 - fraction
        if fraction:
            client[int(level) + 1] = fraction
        law = np.convolve(law, client)
    return law


def _law_of_noise(mechanism: Mechanism) -> tuple[np.ndarray, int]:
    """Probabilities of all clients' noise together, and the number of levels."""
    if isinstance(mechanism, DiscreteLaplace):
        middle = round(CLIENTS * (mechanism.centre - 0.5 * (mechanism.levels - 1)))
        law = np.exp(-np.abs(np.arange(2 * middle + 1) - middle) * mechanism.divisor / mechanism.spread)
        return law / law.sum(), mechanism.levels
    assert isinstance(mechanism, Binomial)
    trials = CLIENTS * mechanism.trials
    return binom.pmf(np.arange(trials + 1), trials, mechanism.p), mechanism.levels


def _law_of_steps(of: Protocol, steps: Steps) -> np.ndarray:
    grid = of.mechanism.grid
    assert grid is not None
    law = np.ones(1)
    for value in VALUES:
        x = np.clip(round(value * grid.unit) / grid.limit, -1.0, 1.0)
        step = 0.5 * (1.0 - x) * np.array(steps.low) + 0.5 * (1.0 + x) * np.array(steps.high)
        for _ in range(steps.copies):
            law = np.convolve(law, step)
    return law


def _law_of_rounded(mechanism: RoundedGaussian) -> np.ndarray:
    law, grid = np.ones(1), mechanism.grid
    for value in VALUES:
        mean = round(value * grid.unit) / 2**grid.fraction_bits + mechanism.centre
        ends = (np.arange(mechanism.window + 1) - 0.5 - mean) / mechanism.noise_deviation
        law = np.convolve(law, np.diff(norm.cdf(ends)))
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
