"""Symmetric noise, Skellam and discrete Gaussian: tables, certificates against the exact law, parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest

from cpsgd import Protocol, guarantee
from cpsgd.codec.rounding import Table
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import DiscreteGaussian, Skellam, discrete_gaussian, skellam
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussianLaw
from cpsgd.mechanisms.skellam import SkellamLaw
from cpsgd.mechanisms.symmetric import Symmetric, SymmetricLaw
from cpsgd.privacy import certified_epsilon, renyi_certificate


def skellam_mass(variance: float, place: int) -> mpmath.mpf:
    return mpmath.besseli(place, mpmath.mpf(variance)) * mpmath.exp(-mpmath.mpf(variance))


@cache
def gaussian_total(variance: float) -> mpmath.mpf:
    return mpmath.nsum(lambda j: mpmath.exp(-(j**2) / (2 * mpmath.mpf(variance))), [-mpmath.inf, mpmath.inf])


def gaussian_mass(variance: float, place: int) -> mpmath.mpf:
    return mpmath.exp(-mpmath.mpf(place**2) / (2 * mpmath.mpf(variance))) / gaussian_total(variance)


def of(kind: type[Symmetric], size: float, **changes: Any) -> Symmetric:
    """The mechanism with noise of this size on two levels."""
    return kind(**{"levels": 2, "coordinate_range": 1.0, kind.noise_type.size_name: size, **changes})


@pytest.mark.parametrize(
    ("kind", "table", "mass", "size", "limit"),
    [
        *((Skellam, skellam.table, skellam_mass, size, limit) for size, limit in ((0.5, 12), (3.0, 20), (40.0, 60))),
        *(
            (DiscreteGaussian, discrete_gaussian.table, gaussian_mass, size, limit)
            for size, limit in ((0.1, 2), (0.5, 5), (3.0, 12), (40.0, 60))
        ),
    ],
)
def test_the_table_is_within_its_stated_distance(
    kind: type[Symmetric], table: Callable[[float, int], Table], mass: Callable[..., Any], size: float, limit: int
) -> None:
    found = table(size, limit)
    thresholds = [0, *(int(h) << 64 | int(low) for h, low in zip(found.high, found.low, strict=True)), 2**128]
    assert len(thresholds) == 2 * limit + 2
    with mpmath.workdps(80):
        gaussian_total.cache_clear()
        masses = [mass(size, abs(j - limit)) for j in range(2 * limit + 1)]
        moved = sum(abs(mpmath.mpf(thresholds[j + 1] - thresholds[j]) / 2**128 - m) for j, m in enumerate(masses))
        distance = (moved + 1 - sum(masses)) / 2
    stated = of(kind, size, noise_limit=limit).noise.variation
    # The bound is not vacuous: it is the truncation's cost, or near the resolution of the table.
    assert distance <= stated < 30 * max(1.0, math.sqrt(size)) * distance + 1e-34 * limit


def exact_delta(law: SymmetricLaw, shift: int, epsilon: float) -> float:
    """The exact δ of one coordinate moved by `shift`, by brute force."""
    masses = law.window(600.0).mass
    here, moved = np.append(masses, np.zeros(shift)), np.append(np.zeros(shift), masses)
    return float(np.maximum(here - math.exp(epsilon) * moved, 0.0).sum())


@pytest.mark.parametrize("prove", [certified_epsilon, renyi_certificate])
@pytest.mark.parametrize(
    ("law", "shift"),
    [
        *((SkellamLaw(20, 2.0, 9), 1), (SkellamLaw(50, 1.0, 9), 2), (SkellamLaw(400, 0.5, 9), 3)),
        *((SkellamLaw(10, 30.0, 9), 4), (DiscreteGaussianLaw(20, 2.0, 9), 1)),
        *((DiscreteGaussianLaw(100, 0.4, 9), 2), (DiscreteGaussianLaw(10, 30.0, 9), 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("delta", [1e-2, 1e-4, 1e-6])
def test_certificates_are_above_the_truth(
    prove: Callable[..., Any], law: SymmetricLaw, shift: int, delta: float
) -> None:
    found = prove(law, dim=1, sensitivity=float(shift), levels=shift + 1, delta=delta)
    epsilon = found[0] if isinstance(found, tuple) else found.epsilon
    # One coordinate and a whole number of steps: the divergence is that of two shifted laws.
    assert exact_delta(law, shift, epsilon) <= delta * (1 + 1e-9)
    # And not far above: at half of it the truth costs more than δ.
    assert exact_delta(law, shift, 0.5 * epsilon) > delta


@pytest.mark.parametrize("kind", [Skellam, DiscreteGaussian])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"size": -1.0}, {"size": math.nan}, {"size": 1e12}, {"size": 1e-9}, {"noise_limit": 0}),
        # Cut off so hard that it is another law, and so far out that the table would be huge.
        *({"size": 100.0, "noise_limit": 15}, {"noise_limit": 524_287}),
    ],
)
def test_parameters_out_of_range(kind: type[Symmetric], wrong: dict[str, Any]) -> None:
    name = "noise_limit" if "noise_limit" in wrong else kind.noise_type.size_name
    with pytest.raises(ParameterError, match=name):
        of(kind, **{"size": 1.0, **wrong})


@pytest.mark.parametrize("kind", [Skellam, DiscreteGaussian])
def test_no_noise_is_no_privacy_and_negative_zero_is_zero(kind: type[Symmetric]) -> None:
    silent = of(kind, 1.0).without_noise()
    with pytest.raises(ConditionError, match=f"{kind.noise_type.size_name}=0"):
        silent.noise.law(3)
    plus, minus = (Protocol(clients=2, dim=3, clip_norm=1.0, mechanism=of(kind, zero)) for zero in (0.0, -0.0))
    assert plus == minus
    assert plus.fingerprint == minus.fingerprint


def test_the_remedy_for_a_coarse_sampler_is_its_own() -> None:
    mechanism = of(Skellam, 10.0, levels=3, noise_limit=20)
    with pytest.raises(ConditionError, match="larger noise_limit"):
        guarantee(Protocol(clients=100, dim=100, clip_norm=1.0, mechanism=mechanism), 1e-6)
