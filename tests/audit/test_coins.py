"""Mechanisms whose rounding is the noise pass an audit, and each seeded fault of theirs is found.

All randomness is fixed but the product's own noise; with that, honest code fails with probability at most 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Aggregator, Protocol
from cpsgd.audit import AuditReport, Encode, Start, audit
from cpsgd.audit.law import SumLaw
from cpsgd.codec import pipeline
from cpsgd.mechanisms import Coins, LazyCoins, Mechanism, SampledCoins
from cpsgd.randomness import Keystream

from .faults import honest, one_keystream_for_all_clients, one_keystream_for_all_rounds, spoiled

DELTA = 1e-3
COINS = Coins(coins=2, theta=0.2, coordinate_range=0.5)
SAMPLED = SampledCoins(rate=0.4, theta=0.4, coordinate_range=0.5)
LAZY = LazyCoins(rate=0.4, theta=0.4, coordinate_range=0.5)
Values = NDArray[np.uint32]
Fault = Callable[[Protocol], tuple[Encode, Start]]


def of(mechanism: Mechanism) -> Protocol:
    return Protocol(clients=8, dim=8, clip_norm=1.0, mechanism=mechanism)


def audited(protocol: Protocol, fault: Fault = honest) -> AuditReport:
    encode, start = fault(protocol)
    return audit(protocol, DELTA, rounds=2_000, encode=encode, start=start, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [COINS, SAMPLED, LAZY], ids=lambda mechanism: mechanism.name)
def test_the_product_passes(mechanism: Mechanism) -> None:
    report = audited(of(mechanism))
    assert {check.name for check in report.checks if not check.passed} == set()
    assert 0.0 <= report.lower_bound < report.claimed.epsilon
    near = {check.name: check.statistic for check in report.checks}
    # Limits that honest rounds never come near would find nothing.
    assert near["unbiased"] > 0.1
    assert near["law"] > 0.1


def biased(protocol: Protocol) -> tuple[Encode, Start]:
    """Every coin shows heads a little more often: ½ + 0.03."""
    generator = np.random.default_rng(5)

    def integers(vector: Any, round: int) -> Values:
        values = pipeline.integers(protocol, vector, round)
        tails = protocol.mechanism.values - 1 - values
        return values + generator.binomial(tails, 0.06).astype(np.uint32)

    return spoiled(protocol, integers)


def tilted_too_far(protocol: Protocol) -> tuple[Encode, Start]:
    """A θ of twice what was agreed."""
    mechanism = protocol.mechanism
    assert isinstance(mechanism, Coins)
    other = replace(protocol, mechanism=replace(mechanism, theta=2.0 * mechanism.theta))
    return spoiled(protocol, lambda vector, round: pipeline.integers(other, vector, round))


def not_clipped(protocol: Protocol) -> tuple[Encode, Start]:
    loose = replace(protocol, clip_norm=1e6)
    return spoiled(protocol, lambda vector, round: pipeline.integers(loose, vector, round))


def certain(protocol: Protocol) -> tuple[Encode, Start]:
    """Deterministic rounding: no coin is flipped."""
    middle = protocol.mechanism.centre

    def integers(vector: Any, round: int) -> Values:
        grid = pipeline.to_grid(protocol, pipeline.as_vector(vector, protocol.dim), round)
        return np.where(grid > 0.0, 2.0 * middle, 0.0).astype(np.uint32)

    return spoiled(protocol, integers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [biased, tilted_too_far, not_clipped, certain, one_keystream_for_all_clients, one_keystream_for_all_rounds],
    ids=lambda fault: fault.__name__,
)
def test_faults_of_coins_are_found(fault: Fault) -> None:
    assert not audited(of(COINS), fault).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [one_keystream_for_all_clients, one_keystream_for_all_rounds], ids=lambda fault: fault.__name__
)
def test_repeated_randomness_of_lazy_coins_is_found(fault: Fault) -> None:
    assert not audited(of(LAZY), fault).passed


class _Whole:
    """A server that is handed integers."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        self.protocol, self.round, self.count = protocol, round, 0
        self.sums = np.zeros(protocol.dim, dtype=np.uint64)

    def add(self, message: Values) -> None:
        self.sums = self.sums + message
        self.count += 1

    def mean(self) -> NDArray[np.float32]:
        return pipeline.decode(self.protocol, self.sums, self.count, self.round)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["clients", "rounds"])
def test_a_pattern_that_is_used_again_is_found(shared: str) -> None:
    """All clients of a round, or all rounds, include the same coordinates; coins are fresh."""
    protocol = of(SAMPLED)
    generator = np.random.default_rng(3)
    patterns = {"now": generator.random(protocol.dim) < SAMPLED.rate}

    def start(protocol: Protocol, round: int) -> _Whole:
        if shared == "clients":
            patterns["now"] = generator.random(protocol.dim) < SAMPLED.rate
        return _Whole(protocol, round)

    always = replace(protocol, mechanism=Coins(coins=1, theta=SAMPLED.theta, coordinate_range=SAMPLED.coordinate_range))

    def encode(vector: Any, round: int) -> Values:
        return np.where(patterns["now"], 2 * pipeline.integers(always, vector, round), 1).astype(np.uint32)

    assert not audit(protocol, DELTA, rounds=2_000, encode=encode, start=start, seed=1).passed


def test_the_law_of_sums_is_that_of_the_integers() -> None:
    protocol = of(SAMPLED)
    law = SumLaw(protocol, [(np.full(8, 0.5), 1), (np.full(8, -1.0), 1)])
    # One client at ½ and one at -1: probabilities r(½ ± θx), 1 - r of the integers 2, 0 and 1.
    one, other = [0.4 * 0.3, 0.6, 0.4 * 0.7], [0.4 * 0.9, 0.6, 0.4 * 0.1]
    assert np.allclose(law.mass, np.convolve(one, other), atol=2e-5)  # r and θ are multiples of 2^-16
    assert law.first.tolist() == [0] * 8


def test_coins_are_counted_per_client() -> None:
    law = SumLaw(of(COINS), [(np.zeros(8), 3)])
    assert np.allclose(law.mean, 3.0)
    assert np.allclose(law.variance, 1.5)


def test_the_aggregator_is_part_of_the_audit() -> None:
    protocol = of(SAMPLED)
    aggregator = Aggregator(protocol, 0)
    aggregator.add(pipeline.encode(protocol, np.zeros(8), 0, Keystream(bytes(16))))
    assert aggregator.count == 1
