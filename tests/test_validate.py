"""Guards of parameters: what they let through, and what they say."""

from __future__ import annotations

import math

import pytest

from cpsgd import _validate
from cpsgd.errors import ParameterError


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 5e-324, 0.5, math.nextafter(1.0, 0.0)])
def test_a_fraction_is_at_least_zero_and_below_one(value: float) -> None:
    assert _validate.fraction("dropout", value) == value


@pytest.mark.parametrize("value", [-5e-324, 1, 1.0, math.nan, math.inf, True, "0.5", None])
def test_what_is_no_fraction(value: object) -> None:
    with pytest.raises(ParameterError, match="dropout"):
        _validate.fraction("dropout", value)


@pytest.mark.parametrize("value", [0, -0.0, 1e300])
def test_non_negative(value: float) -> None:
    assert _validate.non_negative("decay", value) == value


@pytest.mark.parametrize("value", [-5e-324, -1, math.inf, math.nan, False, "0"])
def test_what_is_negative_or_no_number(value: object) -> None:
    with pytest.raises(ParameterError, match="decay"):
        _validate.non_negative("decay", value)


def test_a_choice_is_one_of_the_known_names() -> None:
    assert _validate.choice("scheme", "once", ("once", "every")) == "once"
    for wrong in ("twice", "", None, 3, ["once"], "x" * 10_000):
        with pytest.raises(ParameterError, match=r"Unknown scheme .*Known are once, every\.$") as raised:
            _validate.choice("scheme", wrong, ("once", "every"))
        assert len(str(raised.value)) < 200


def test_integers_that_no_float_holds_are_refused_without_a_limit_of_their_own() -> None:
    assert _validate.integer("rounds", 2**63 - 1, low=1) == 2**63 - 1
    assert _validate.integer("seed", 2**100, low=0, high=2**128 - 1) == 2**100
    for value in (2**63, 10**400):
        with pytest.raises(ParameterError, match=r"Expected rounds in \[1, "):
            _validate.integer("rounds", value, low=1)
    with pytest.raises(ParameterError, match="Expected rounds >= 1, got rounds=0"):
        _validate.integer("rounds", 0, low=1)


def test_what_is_of_another_type_is_refused_without_its_content() -> None:
    _validate.instance("data", [1], list)
    with pytest.raises(ParameterError, match=r"^Expected data of type dict, got list\. Make one\.$"):
        _validate.instance("data", [1], dict, "Make one.")
