"""All mechanisms, by name. A new one is named here, and is then everywhere."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    Gaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
)

MECHANISMS: dict[str, type[Mechanism]] = {
    mechanism.name: mechanism
    for mechanism in (
        Binomial,
        Gaussian,
        Skellam,
        DiscreteGaussian,
        Coins,
        SampledCoins,
        LazyCoins,
        RoundedGaussian,
        CorrelatedGaussian,
    )
}
"""All mechanisms, by name."""


def by_name(name: str) -> type[Mechanism]:
    """Returns the class of mechanisms with this name.

    Raises:
        ParameterError: There is none; the message lists the known names.
    """
    try:
        return MECHANISMS[name]
    except (KeyError, TypeError):
        raise ParameterError(f"Expected mechanism to be one of {list(MECHANISMS)}, got {reprlib.repr(name)}.") from None


def of_file(fields: Mapping[str, object]) -> type[Mechanism]:
    """Returns the class of mechanisms that a protocol file is about; files of 0.1.0 do not name it."""
    if "mechanism" in fields:
        return by_name(str(fields["mechanism"]))
    return Binomial if fields.get("sigma") is None else Gaussian
