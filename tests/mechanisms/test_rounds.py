"""Whole rounds with every kind of mechanism: messages, simulated sums, secure sums, and the error that is predicted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pipeline
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
)
from cpsgd.randomness import Keystream
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage
from cpsgd.simulation.cpu import RoundSimulator, noise_norm

# Five standard errors on both sides are 6e-7.
ERRORS = 5.0
CLIENTS, DIM, ROUNDS = 60, 1000, 60

MECHANISMS: list[Mechanism] = [
    Coins(coins=1, theta=0.12, coordinate_range=0.1),
    Coins(coins=1, theta=0.45, coordinate_range=0.08),  # clips, and its variance depends on the coordinate
    Coins(coins=5, theta=0.05, coordinate_range=0.15),
    SampledCoins(rate=0.05, theta=0.5, coordinate_range=0.1),
    SampledCoins(rate=2 / 3, theta=0.5, coordinate_range=0.07),  # the same
    SampledCoins(rate=0.3, theta=0.1, coordinate_range=0.15),
    LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.12),
    RoundedGaussian(noise_deviation=2.0, step=0.02, window=64, coordinate_range=0.15),
    Skellam(levels=9, variance=3.0, coordinate_range=0.12),
    DiscreteGaussian(levels=3, sigma_squared=0.5, coordinate_range=0.12),
    Binomial(levels=4, trials=20, coordinate_range=0.12),
]

Vector = NDArray[np.float32]
Estimate = Callable[[Protocol, Vector, int, np.random.Generator], Vector]


def by_messages(
    protocol: Protocol, vector: NDArray[np.float32], round_: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """The mean of messages, from an aggregator that was saved and restored half way."""
    aggregator = Aggregator(protocol, round_)
    for number in range(CLIENTS):
        if number == CLIENTS // 2:
            aggregator = Aggregator.restore(protocol, aggregator.save())
        aggregator.add(pipeline.encode(protocol, vector, round_, Keystream(random.bytes(16))))
    return aggregator.mean()


def by_simulation(
    protocol: Protocol, vector: NDArray[np.float32], round_: int, random: np.random.Generator
) -> NDArray[np.float32]:
    simulator = RoundSimulator(protocol, round_, seed=int(random.integers(2**32)))
    simulator.add(np.tile(vector, (CLIENTS, 1)))
    return simulator.mean()


@pytest.mark.parametrize("estimate", [by_messages, by_simulation])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_real_rounds_have_the_predicted_error(
    mechanism: Mechanism, estimate: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = Protocol(clients=CLIENTS, dim=DIM, clip_norm=1.0, mechanism=mechanism)
    random = np.random.default_rng(3)
    monkeypatch.setattr(os, "urandom", random.bytes)  # ids of messages choose coordinates
    vector = random.standard_normal(DIM).astype(np.float32)
    vector /= np.linalg.norm(vector)
    predicted = mechanism.predicted_error(clients=CLIENTS, dim=DIM, clip_norm=1.0, rotate=True)
    errors, exact = [], []
    for round_ in range(ROUNDS):
        mean = estimate(protocol, vector, round_, random).astype(np.float64)
        errors.append(float(np.sum((mean - vector) ** 2)))
        exact.append(protocol.expected_squared_error([vector] * CLIENTS, round_).total)
    standard_error = float(np.std(errors)) / math.sqrt(ROUNDS)
    assert abs(float(np.mean(errors)) - float(np.mean(exact))) <= ERRORS * standard_error
    assert abs(float(np.mean(errors)) - predicted.total) <= ERRORS * standard_error
    assert standard_error < 0.02 * predicted.total
    assert noise_norm(protocol, CLIENTS) ** 2 >= (predicted.noise + predicted.rounding) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [
        (LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.5), 21),
        (Skellam(levels=3, variance=0.5, coordinate_range=0.5), 75),
    ],
)
def test_a_round_of_secure_aggregation_with_dropouts(mechanism: Mechanism, size: int) -> None:
    clients, dim = 12, 100
    plain = Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=mechanism)
    protocol = replace(plain, modulus=size)
    assert size < clients * (mechanism.values - 1)  # less than sums can be
    vectors = np.random.default_rng(1).normal(0.0, 0.1, size=(clients, dim))
    agreed = SecureParameters.for_protocol(protocol, round=2, dropout=0.25)
    server = SecureServer(agreed)
    parties = [SecureClient(expected=agreed) for _ in range(clients)]
    values = [protocol.encode_integers(vector, 2) for vector in vectors]
    waiting = server.invite()
    while server.stage is not Stage.DONE:
        for number, message in waiting.items():
            if (server.stage, number) in ((Stage.SHARE, 1), (Stage.MASK, 4), (Stage.UNMASK, 7)):
                continue
            answer = getattr(parties[number], server.stage.value)
            masked = server.stage is Stage.MASK
            server.receive(number, answer(message, values[number]) if masked else answer(message))
        waiting = server.advance()
    found = server.result()
    left = [number for number in range(clients) if number not in (1, 4)]
    assert list(found.survivors) == left
    total = np.sum([values[number] for number in left], axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(found.sums, total % size)
    np.testing.assert_allclose(
        protocol.decode_sum(found.sums, len(left), 2), plain.decode_sum(total, len(left), 2), atol=1e-5
    )
