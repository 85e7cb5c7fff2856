"""Bounded losses of coins and sampled coins: against exact sums over all outcomes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Protocol, Run, guarantee
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import Coins
from cpsgd.mechanisms.law import Steps
from cpsgd.privacy.proofs.steps_renyi import bounded_epsilon

Array = NDArray[np.float64]
COINS = ((0.95, 0.05), (0.05, 0.95))
SAMPLED = ((0.45, 0.5, 0.05), (0.05, 0.5, 0.45))


def mixed(low: Array, high: Array, point: float) -> Array:
    return 0.5 * (1.0 - point) * low + 0.5 * (1.0 + point) * high


def exact_delta(ends: tuple[Array, Array], clients: int, split: tuple[float, ...], epsilon: float) -> float:
    """The largest δ over the others' ends, the client's own end and both orders, at these distances."""
    low, high = ends
    found = 0.0
    for counts in itertools.product(range(clients), repeat=len(split)):
        first, second = np.ones(1), np.ones(1)
        for count, distance in zip(counts, split, strict=True):
            others = np.ones(1)
            for place in range(clients - 1):
                others = np.convolve(others, high if place < count else low)
            pair = [np.convolve(others, mixed(low, high, point)) for point in (-1.0 + distance, -1.0)]
            first, second = np.multiply.outer(first, pair[0]).ravel(), np.multiply.outer(second, pair[1]).ravel()
        for a, b in ((first, second), (second, first)):
            found = max(found, float(np.maximum(a - math.exp(epsilon) * b, 0.0).sum()))
    return found


@pytest.mark.parametrize("ends", [COINS, SAMPLED], ids=["coins", "sampled"])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("clients", [2, 4, 7])
def test_no_split_of_the_distances_has_a_larger_delta(
    ends: tuple[tuple[float, ...], ...], delta: float, clients: int
) -> None:
    low, high = (np.array(end) for end in ends)
    law = Steps(low=ends[0], high=ends[1], clients=clients)
    epsilon = bounded_epsilon(law, coordinates=2, budget=4.0, reach=2.0, delta=delta)
    for split in ((2.0,), (math.sqrt(2.0), math.sqrt(2.0)), (1.9, math.sqrt(4.0 - 1.9**2)), (1.0, math.sqrt(3.0))):
        assert exact_delta((low, high), clients, split, epsilon) <= delta
    # Nor is it far above the truth.
    worst = exact_delta((low, high), clients, (math.sqrt(2.0), math.sqrt(2.0)), 0.4 * epsilon)
    assert worst > delta or delta == 1e-2


def test_rates_are_above_exact_divergences() -> None:
    """ε at a large δ' is a divergence and a number; so it tells the divergence that was used."""
    low, high = (np.array(end) for end in COINS)
    law = Steps(low=COINS[0], high=COINS[1], clients=30)
    others = np.ones(1)
    for _ in range(29):
        others = np.convolve(others, low)
    epsilon = bounded_epsilon(law, coordinates=400, budget=1.0, reach=0.5, delta=1e-6)
    for distance in (0.5, 0.3, 0.1, 0.05):
        first, second = (np.convolve(others, mixed(low, high, point)) for point in (-1.0 + distance, -1.0))
        found = []
        for order in range(2, 200):
            divergence = math.log(float(np.sum(second * (first / second) ** order))) / (order - 1)
            shift = math.log1p(-1.0 / order) - (math.log(1e-6) + math.log(order)) / (order - 1)
            found.append(divergence / distance**2 + shift)
        assert min(found) <= epsilon


def test_large_odds_and_a_tiny_delta() -> None:
    # 0.2.0 proved 24.2 (the smoothed certificate).
    protocol = Protocol(clients=200, dim=200, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.45, coordinate_range=1.0))
    found = guarantee(protocol, 2e-13)
    assert found.method == "bounded-losses"
    assert found.epsilon < 6.6
    smoothed = dict(found.alternatives)["smoothed-certificate"]
    assert isinstance(smoothed, float)
    assert smoothed > 20.0
    twice = guarantee(Run.of(protocol, rounds=2), 2e-13)
    assert found.epsilon < twice.epsilon < 2.0 * found.epsilon
    one = Protocol(clients=200, dim=1, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.45, coordinate_range=1.0))
    odds = (0.5 + one.mechanism.theta) / (0.5 - one.mechanism.theta)  # type: ignore[attr-defined]
    assert guarantee(one, 2e-13).epsilon <= math.log(odds) * (1.0 + 1e-9)


def test_what_is_given_up() -> None:
    law = Steps(low=COINS[0], high=COINS[1], clients=100_000)
    with pytest.raises(ConditionError, match="too long"):
        bounded_epsilon(law, coordinates=1, budget=1.0, reach=1.0, delta=1e-6)
    with pytest.raises(ConditionError, match="come below"):
        bounded_epsilon(Steps(*COINS, clients=50), coordinates=9, budget=1.0, reach=1.0, delta=1e-6, below=1e-3)
    for ends in (((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.0), (0.5, 0.5)), ((0.5, 0.5), (0.0, 1.0))):
        with pytest.raises(ConditionError, match="for sure"):
            bounded_epsilon(Steps(*ends, 5), coordinates=9, budget=1.0, reach=1.0, delta=1e-6)
