"""Plans for two servers: a prime modulus, few levels, the promise kept, and short uploads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpsgd import Plan, plan
from cpsgd.engines.pair.task import create_task
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner.modulus import smallest_modulus
from cpsgd.planner.search import prime_modulus
from cpsgd.planner.two_servers import upload_bytes
from cpsgd.privacy import guarantee
from cpsgd.secagg.pair.extension import LARGEST_PRIME, is_prime, least_prime
from cpsgd.secagg.pair.shape import MOST_LEVELS, RoundShape
from cpsgd.secagg.pair.upload import upload_bytes as sent_bytes

COMMON = {"clients": 100, "dim": 60, "epsilon": 4.0, "delta": 1e-5, "dropout": 0.2, "pair": True}


def check(found: Plan) -> None:
    """What every plan for two servers has."""
    protocol = found.protocol
    assert protocol.modulus is not None
    assert is_prime(protocol.modulus)
    assert protocol.mechanism.values <= MOST_LEVELS
    assert protocol.promise is not None
    assert found.guarantee.epsilon <= 4.0
    assert guarantee(found.run, 1e-5).epsilon <= protocol.promise.claim.epsilon
    assert found.overflow_probability <= 1e-9
    shape = RoundShape.choose(prime=protocol.modulus, dim=protocol.dim, task=b"task", levels=protocol.mechanism.values)
    assert upload_bytes(protocol) == shape.upload_bytes == sent_bytes(shape)
    task, _ = create_task(protocol, leader="http://127.0.0.1:1", helper="http://127.0.0.1:2")
    assert task.surviving == 80


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["coins", "rounded-gaussian", "binomial"])
def test_a_plan_with_given_bits_is_one_that_servers_take(mechanism: str) -> None:
    found = plan(**COMMON, bits=9, mechanism=mechanism)
    check(found)
    least = smallest_modulus(found.protocol.mechanism, clients=100, dim=60, clip_norm=1.0)
    assert found.protocol.modulus == least_prime(max(least, found.protocol.mechanism.values + 2))
    assert found.protocol.bits_per_coordinate <= 9.0


@pytest.mark.slow
def test_without_bits_uploads_are_the_shortest_that_come_near_enough() -> None:
    found = plan(**COMMON, mechanism="coins")
    check(found)
    assert found.ratio <= 1.1
    for bits in (6, 7, 8):
        try:
            other = plan(**COMMON, bits=bits, mechanism="coins")
        except InfeasibleError:
            continue
        assert other.ratio > 1.1 or upload_bytes(other.protocol) >= upload_bytes(found.protocol)


@pytest.mark.slow
def test_what_two_servers_cannot_do_is_refused() -> None:
    with pytest.raises(ParameterError, match="send once"):
        plan(**COMMON, rounds=4, correlated=2)
    with pytest.raises(InfeasibleError, match="bits="):
        plan(**COMMON, bits=2, mechanism="coins")
    with pytest.raises(ParameterError):
        plan(**COMMON, mechanism="sampled-coins")
    with pytest.raises(ParameterError, match="wrap around"):
        plan(**COMMON, mechanism="discrete-laplace")
    with pytest.raises(ParameterError, match="delta=0"):
        plan(**{**COMMON, "delta": 0.0})
    with pytest.raises(ParameterError, match="modulus"):
        upload_bytes(replace(plan(**{**COMMON, "pair": False}, bits=4, mechanism="coins").protocol))


@pytest.mark.parametrize(
    ("smallest", "values", "found"), [(336, 2, 337), (3, 40, 43), (LARGEST_PRIME, 2, LARGEST_PRIME)]
)
def test_the_modulus_is_the_least_prime_with_points_for_a_proof(smallest: int, values: int, found: int) -> None:
    assert prime_modulus(smallest, values) == found
    assert prime_modulus(LARGEST_PRIME + 1, 2) > 2**32
    RoundShape.choose(prime=found, dim=10, task=b"task", levels=values)


def test_primes_are_those_of_trial_division() -> None:
    for number in [*range(2000), 25_326_001, 3_215_031_751 - 2, 46_337**2, 46_337 * 46_349, LARGEST_PRIME]:
        by_division = number >= 2 and all(number % k for k in range(2, int(number**0.5) + 1))
        assert is_prime(number) == by_division, number
