"""Which mechanism a plan chooses where none is named, and how near it comes to the exact Gaussian mechanism."""

from __future__ import annotations

from typing import Any

import pytest

from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner import plan
from cpsgd.planner.requirements import BEST

MANY: dict[str, Any] = {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9}
HUNDRED: dict[str, Any] = {"clients": 100, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6}
LARGE: dict[str, Any] = {"clients": 1_000, "dim": 2**20, "epsilon": 2.0, "delta": 1e-6}


@pytest.mark.parametrize(
    ("size", "bits", "ratio"),
    [
        (MANY, 1, 1.065),
        pytest.param(MANY, 2, 1.03, marks=pytest.mark.thorough),
        pytest.param(MANY, 3, 1.012, marks=pytest.mark.thorough),
        pytest.param(HUNDRED, 1, 1.06, marks=pytest.mark.slow),
        pytest.param(LARGE, 1, 1.02, marks=pytest.mark.slow),
        pytest.param(MANY, 0.05, 1.08, marks=pytest.mark.slow),
    ],
)
def test_few_bits_are_nearly_as_good_as_real_numbers(size: dict[str, Any], bits: float, ratio: float) -> None:
    found = plan(**size, bits=bits)
    assert found.ratio <= ratio
    assert found.guarantee.epsilon <= 2.0
    assert found.protocol.bits_per_coordinate <= bits
    assert found.protocol.mechanism.name == ("coins" if bits >= 1 else "sampled-coins")
    if bits < 1:
        assert found.protocol.message_bytes <= 480


def test_sampled_cohorts_do_not_rule_coins_out() -> None:
    cohort = {"clients": 1_000, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6}
    found = plan(**cohort, bits=2, rounds=100, participation="fixed-size:0.01")
    assert found.protocol.mechanism.name == "coins"
    assert found.ratio < 1.15
    assert 1.9 < found.guarantee.epsilon <= 2.0


def test_more_bits_are_never_worse() -> None:
    ratios = [plan(**HUNDRED, bits=bits, secure=True, mechanism="binomial").ratio for bits in (8, 9, 10, 11)]
    assert ratios == sorted(ratios, reverse=True)
    # Noise that fills the modulus at a scale that is then not needed would cost six per cent at 10 bits.
    assert ratios[2] < 1.02


FEW: dict[str, Any] = {"dim": 1_000, "epsilon": 4.0, "delta": 1e-5, "rounds": 30}


@pytest.mark.parametrize(
    ("clients", "bits", "ratio"),
    [(10, 8, 1.001), (10, 5, 1.025), (10, 4, 1.11), (5, 8, 1.001), (5, 5, 1.025), (2, 8, 1.001)],
)
def test_few_clients_with_noise_before_rounding(clients: int, bits: int, ratio: float) -> None:
    found = plan(clients, **FEW, bits=bits, mechanism="rounded-gaussian")
    assert found.ratio <= ratio
    assert found.guarantee.epsilon <= 4.0
    assert found.guarantee.method == "rounded-gaussian"
    assert found.protocol.bits_per_coordinate <= bits


@pytest.mark.parametrize(("clients", "epsilon", "bits"), [(3, 1.0, 5), (8, 50.0, 8)])
def test_one_coordinate_with_noise_before_rounding(clients: int, epsilon: float, bits: int) -> None:
    # The range is the norm, so that the cube of coordinates and the ball are the same.
    found = plan(clients, dim=1, epsilon=epsilon, delta=1e-5, bits=bits, rotate=False, mechanism="rounded-gaussian")
    assert 0.99 * epsilon < found.guarantee.epsilon <= epsilon


@pytest.mark.parametrize("dim", [1_000, 2**20])
def test_a_step_so_wide_that_the_range_is_below_a_grid_point(dim: int) -> None:
    found = plan(1, dim=dim, epsilon=0.01, delta=1e-6, bits=6, mechanism="rounded-gaussian")
    mechanism = found.protocol.mechanism
    assert mechanism.grid is not None
    assert mechanism.grid.limit == 1.0
    assert found.guarantee.epsilon <= 0.01


@pytest.mark.parametrize("clients", [10, 5])
def test_noise_before_rounding_is_chosen_where_it_is_best(clients: int) -> None:
    found = plan(clients, **FEW, bits=8)
    assert found.protocol.mechanism.name == "rounded-gaussian"
    assert found.ratio <= 1.01


def test_sampled_rounds_of_few_clients_have_the_best_of_both() -> None:
    """Coins keep what sampling gives, and may be as good."""
    sampled = {**FEW, "bits": 8, "participation": "fixed-size:0.5"}
    found = plan(10, **sampled)
    assert found.ratio <= min(1.01, plan(10, **sampled, mechanism="rounded-gaussian").ratio)


@pytest.mark.parametrize("clients", [2, 10, 100])
def test_noise_before_rounding_in_a_modulus(clients: int) -> None:
    found = plan(clients, **FEW, bits=8, secure=True, mechanism="rounded-gaussian")
    assert found.ratio <= 1.06
    assert found.protocol.modulus is not None
    assert found.protocol.modulus <= 2**8
    assert found.overflow_probability <= 1e-9


def test_too_few_bits_for_noise_before_rounding_are_refused_with_a_remedy() -> None:
    with pytest.raises(InfeasibleError, match="bits"):
        plan(10, **FEW, bits=3, mechanism="rounded-gaussian")


@pytest.mark.parametrize(("size", "bits"), [(HUNDRED, 6.5), (LARGE, 6.5), (MANY, 11.5)])
def test_secure_sums_in_a_small_modulus(size: dict[str, Any], bits: float) -> None:
    found = plan(**size, bits=bits, secure=True)
    assert found.ratio <= 1.1
    assert found.protocol.modulus is not None
    assert found.protocol.modulus <= 2**bits
    assert found.overflow_probability <= 1e-9


@pytest.mark.parametrize(
    ("clients", "ratio", "mechanism"),
    [
        (10, 1.45, BEST),
        (30, 1.3, "binomial"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((30, 1.3, BEST), (100, 1.15, BEST), (10, 1.45, "binomial"), (100, 1.15, "binomial"))
        ),
    ],
)
def test_few_clients_and_many_rounds(clients: int, ratio: float, mechanism: str) -> None:
    found = plan(clients, 1_000, 4.0, 1e-5, rounds=30, bits=4, mechanism=mechanism)
    assert found.ratio <= ratio
    assert found.guarantee.epsilon <= 4.0


def test_many_clients_and_few_coordinates_are_for_rounding_and_noise() -> None:
    assert plan(10**6, 10**5, 2.0, 1e-9, bits=2).protocol.mechanism.name == "binomial"


def test_a_mechanism_that_is_named_is_taken() -> None:
    assert plan(**MANY, bits=4, mechanism="binomial").protocol.mechanism.name == "binomial"


def test_sampled_coins_are_not_for_secure_aggregation() -> None:
    with pytest.raises(ParameterError, match=r"not for secure aggregation.*Use coins"):
        plan(**MANY, bits=0.05, secure=True, mechanism="sampled-coins")


def test_less_than_a_bit_has_no_secure_plan() -> None:
    with pytest.raises(InfeasibleError, match="do not fit the modulus"):
        plan(**HUNDRED, bits=0.5, secure=True)


@pytest.mark.parametrize("mean_norm", [0.0, 1.5, -1.0])
def test_a_mean_longer_than_every_vector_is_refused(mean_norm: float) -> None:
    with pytest.raises(ParameterError, match="mean_norm"):
        plan(**HUNDRED, bits=8, secure=True, mean_norm=mean_norm)
