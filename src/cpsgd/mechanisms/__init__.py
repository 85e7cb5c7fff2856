"""One file per mechanism: what a coordinate becomes, and all that follows from it. `base.py` is the interface."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from cpsgd.errors import ParameterError
from cpsgd.mechanisms.base import ErrorBound as ErrorBound
from cpsgd.mechanisms.base import ExpectedError as ExpectedError
from cpsgd.mechanisms.base import Mechanism as Mechanism
from cpsgd.mechanisms.binomial import Binomial as Binomial
from cpsgd.mechanisms.coins import Coins as Coins
from cpsgd.mechanisms.correlated_gaussian import CorrelatedGaussian as CorrelatedGaussian
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussian as DiscreteGaussian
from cpsgd.mechanisms.gaussian import Gaussian as Gaussian
from cpsgd.mechanisms.lazy_coins import LazyCoins as LazyCoins
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian as RoundedGaussian
from cpsgd.mechanisms.sampled_coins import SampledCoins as SampledCoins
from cpsgd.mechanisms.skellam import Skellam as Skellam

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
    """The class of mechanisms with this name.

    Raises:
        ParameterError: There is none; the message lists the known names.
    """
    try:
        return MECHANISMS[name]
    except (KeyError, TypeError):
        raise ParameterError(f"Expected mechanism to be one of {list(MECHANISMS)}, got {reprlib.repr(name)}.") from None


def of_file(fields: Mapping[str, object]) -> type[Mechanism]:
    """The class of mechanisms that a protocol file is about; files of 0.1.0 do not name it."""
    if "mechanism" in fields:
        return by_name(str(fields["mechanism"]))
    return Binomial if fields.get("sigma") is None else Gaussian
