"""What the planner names where requirements cannot be met can be had."""

from __future__ import annotations

from typing import Any

import pytest

from cpsgd import planner
from cpsgd.errors import InfeasibleError
from cpsgd.planner import Plan

REFERENCE: dict[str, Any] = {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9}
SMALL: dict[str, Any] = {"clients": 500, "dim": 2_000, "epsilon": 3.0, "delta": 1e-6}


def plan(**wishes: Any) -> Plan:
    """The best plan with the paper's mechanism."""
    return planner.plan(mechanism="binomial", **wishes)


def test_one_bit_is_not_enough_and_the_fewest_that_are_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"bits=1\.585 is the fewest") as caught:
        plan(**SMALL, bits=1)
    assert plan(**SMALL, bits=1.585).protocol.mechanism.levels == 2
    assert "at least 3 values" in str(caught.value)


@pytest.mark.thorough
def test_an_error_below_the_gaussians_names_what_can_be_had() -> None:
    with pytest.raises(InfeasibleError, match="smallest error at ε=3 is") as caught:
        plan(**SMALL, max_error=0.01)
    needed = float(str(caught.value).split("epsilon=")[1].split(",")[0])
    assert plan(**{**SMALL, "epsilon": needed}, max_error=0.01).error.total <= 0.01
    with pytest.raises(InfeasibleError):
        plan(**{**SMALL, "epsilon": 0.9 * needed}, max_error=0.01)


def test_too_few_clients_for_any_certificate_names_how_many_would_do() -> None:
    with pytest.raises(InfeasibleError, match="clients would do at 2 bits") as caught:
        plan(clients=10, dim=1_000, epsilon=5.0, delta=1e-9, bits=2)
    enough = int(str(caught.value).split("about ")[1].split(" clients")[0].replace(",", ""))
    assert plan(clients=enough, dim=1_000, epsilon=5.0, delta=1e-9, bits=2).guarantee.epsilon <= 5.0


def test_one_client_more_would_do() -> None:
    with pytest.raises(InfeasibleError, match="about 3 clients would do at 4 bits"):
        plan(clients=2, dim=3, epsilon=256.0, delta=9e-6, bits=4)


def test_a_modulus_that_cannot_hold_the_noise_names_the_fewest_bits() -> None:
    with pytest.raises(InfeasibleError, match="is the fewest that will do") as caught:
        plan(**REFERENCE, bits=6, secure=True)
    fewest = float(str(caught.value).split("bits=")[1].split(" ")[0])
    assert plan(**REFERENCE, bits=fewest, secure=True).protocol.modulus is not None
