"""Lazy coins: the law of what is sent, messages, and rounds of secure aggregation with a small modulus."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pipeline
from cpsgd.mechanisms import Coins, LazyCoins, SampledCoins
from cpsgd.mechanisms.interface import Search
from cpsgd.planner.modulus import overflow_probability, smallest_modulus
from cpsgd.randomness import Keystream

MECHANISM = LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.5)


def test_the_law_is_that_of_sampled_coins() -> None:
    sampled = SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5)
    assert sampled.steps(17) == MECHANISM.steps(17)
    assert (sampled.scale, sampled.noise.variance) == (MECHANISM.scale, MECHANISM.noise.variance)


def test_as_many_coins_are_flipped_as_there_are_clients_for() -> None:
    for clients, rate in ((100, 0.5), (400, 0.25), (1000, 0.1), (10**7, 2.0**-10)):
        usual = LazyCoins.usual(clients=clients, dim=9, clip_norm=1.0, rotate=True, delta=1e-6)
        assert usual["rate"] == pytest.approx(rate, rel=1e-12)
        assert LazyCoins(**usual).rate <= rate


def test_messages_are_the_integers_and_their_mean_is_unbiased() -> None:
    clients, dim = 4000, 12
    protocol = Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=MECHANISM)
    vector = np.linspace(-0.4, 0.4, dim)
    vector /= 1.1 * np.linalg.norm(vector)
    key = Keystream(bytes(16))
    one = pipeline.encode(protocol, vector, 3, Keystream(bytes(16)))
    values = pipeline.integers(protocol, vector, 3, key)
    lone = Aggregator(protocol, 3)
    lone.add(one)
    np.testing.assert_allclose(lone.mean(), protocol.decode_sum(values.astype(np.uint64), 1, 3), rtol=1e-6)
    sums = sum(protocol.encode_integers(vector, 3).astype(np.int64) for _ in range(clients))
    mean = protocol.decode_sum(np.asarray(sums, np.uint64), clients, 3)
    error = float(np.sum((mean - vector) ** 2))
    expected = MECHANISM.predicted_error(clients=clients, dim=dim, clip_norm=1.0, rotate=True)
    # Nothing is clipped (the rotated coordinates stay below 0.5), and a sum of 12 squares is beyond 4.2 times its mean
    # with a probability below 1e-6.
    assert np.abs(pipeline.to_grid(protocol, vector, 3)).max() < MECHANISM.grid.limit
    assert error < 4.2 * (expected.noise + expected.rounding)


def test_a_small_rate_needs_a_small_modulus() -> None:
    """The setting of a thousand clients: within six and a half bits, where flipped coins need eight."""
    shape = {"clients": 1000, "dim": 2**20, "clip_norm": 1.0}
    reach = 4 / 2**10
    lazy = LazyCoins(rate=0.02, theta=0.1, coordinate_range=reach)
    coin = Coins(coins=1, theta=lazy.theta * math.sqrt(lazy.rate), coordinate_range=reach)
    # Both have about the same privacy: the tilt over the deviation.
    assert lazy.gain * lazy.theta / math.sqrt(lazy.noise.variance) == pytest.approx(
        coin.gain * coin.theta / math.sqrt(coin.noise.variance), rel=0.01
    )
    assert smallest_modulus(lazy, **shape) <= 2**6.5 < 2**8 < smallest_modulus(coin, **shape)


def test_the_bound_covers_exact_sums() -> None:
    clients = 60
    mechanism = LazyCoins(rate=0.1, theta=0.45, coordinate_range=1.0)
    step = np.array(mechanism.steps(1).high)
    law = np.ones(1)
    for _ in range(clients):
        law = np.convolve(law, step)
    for modulus in range(3, 2 * clients + 3):
        lowest = math.ceil(clients * mechanism.centre - 0.5 * modulus)
        inside = float(law[max(0, lowest) : lowest + modulus].sum())
        bound = overflow_probability(modulus, mechanism, clients=clients, dim=1, clip_norm=1.0, rotate=False)
        assert 1.0 - inside <= bound + 1e-12


@pytest.mark.parametrize("values", [40, 90, 1000])
def test_candidates_fill_the_modulus(values: int) -> None:
    shape = {"clients": 1000, "dim": 2**20, "clip_norm": 1.0}
    search = Search(
        values=values,
        honest=1000,
        variation=0.0,
        dim=2**20,
        clip_norm=1.0,
        rotate=True,
        rough_scale=lambda mechanism: 4.6 / math.sqrt(1000 * mechanism.noise.variance),
        fits=lambda mechanism: smallest_modulus(mechanism, **shape) <= values,
    )
    found = list(LazyCoins.candidates(search))
    assert found
    for candidate in found:
        needed = smallest_modulus(candidate, **shape)
        assert needed <= values
        assert candidate.rate > 0.66 or needed >= 0.95 * values - 2
    assert list(LazyCoins.candidates(Search(**{**vars(search), "values": 2}))) == []
