"""One file per mechanism. `interface.py` has the questions, and `cpsgd.registry` names them all."""

from __future__ import annotations

from typing import Any

from cpsgd._lazy import on_demand
from cpsgd.mechanisms.binomial import Binomial as Binomial
from cpsgd.mechanisms.coins import Coins as Coins
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussian as DiscreteGaussian
from cpsgd.mechanisms.float_gaussian import Gaussian as Gaussian
from cpsgd.mechanisms.interface import ErrorBound as ErrorBound
from cpsgd.mechanisms.interface import ExpectedError as ExpectedError
from cpsgd.mechanisms.interface import Mechanism as Mechanism
from cpsgd.mechanisms.lazy_coins import LazyCoins as LazyCoins
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian as RoundedGaussian
from cpsgd.mechanisms.sampled_coins import SampledCoins as SampledCoins
from cpsgd.mechanisms.skellam import Skellam as Skellam


def __getattr__(name: str) -> Any:
    """Finds the mechanisms of other rooms under their public names."""
    if name != "CorrelatedGaussian":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return on_demand("cpsgd", {name: "correlated.mechanism"})(name)
