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
from cpsgd.mechanisms import DiscreteGaussian, Skellam, discrete_gaussian, skellam, symmetric
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussianLaw
from cpsgd.mechanisms.interface import Search
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


def search(values: int, fits: Callable[[Any], bool] = lambda mechanism: True, **changes: Any) -> Search:
    given = {"honest": 100, "variation": 1e-20, "dim": 9, "clip_norm": 1.0, "rotate": False}
    return Search(values=values, rough_scale=lambda mechanism: 1.0, fits=fits, **{**given, **changes})


@pytest.mark.parametrize("kind", [Skellam, DiscreteGaussian])
class TestTheLoudestNoise:
    def test_its_truncation_is_what_can_be_afforded(self, kind: type[Symmetric]) -> None:
        for values, variation in ((64, 1e-20), (257, 1e-12), (31, 1e-9)):
            found = kind.loudest(3, search(values, variation=variation))
            assert found is not None
            room, affordable = (values - 3) // 2, 0.5 * variation
            truncation = kind.noise_type.truncation
            assert truncation(found.size, room) <= affordable < truncation(1.002 * found.size, room)
            # Cut off no farther out than that takes.
            assert found.levels == 3
            assert found.noise_limit == min(room, kind.noise_type.limit_of(found.size, affordable))
            assert truncation(found.size, found.noise_limit) <= affordable

    def test_a_budget_of_nothing_is_the_samplers_resolution(self, kind: type[Symmetric]) -> None:
        least, same = kind.loudest(3, search(257, variation=0.0)), kind.loudest(3, search(257, variation=2.0**-99))
        assert least == same

    def test_there_is_none_without_room(self, kind: type[Symmetric]) -> None:
        assert kind.loudest(3, search(3)) is None
        assert kind.loudest(3, search(4)) is None
        little = kind.noise_type.truncation(kind.least_size, 1) <= 0.5e-30
        assert (kind.loudest(3, search(5, variation=1e-30)) is not None) == little

    def test_there_is_no_more_than_all_clients_together_may_have(self, kind: type[Symmetric]) -> None:
        found = kind.loudest(3, search(257, honest=10**9, variation=1e-9))
        assert found is not None
        assert found.size == max(symmetric._MOST_NOISE / 10**9, kind.least_size)

    def test_it_fits_the_modulus(self, kind: type[Symmetric]) -> None:
        free = kind.loudest(3, search(257))
        assert free is not None
        most = 0.3 * free.size
        found = kind.loudest(3, search(257, lambda mechanism: mechanism.size <= most))
        assert found is not None
        assert 0.995 * most < found.size <= most
        quiet = kind.loudest(3, search(257, lambda mechanism: False))
        assert quiet is not None
        assert quiet.size == pytest.approx(kind.least_size, rel=2e-3)

    def test_a_quieter_one_is_cut_off_where_it_costs_as_much(self, kind: type[Symmetric]) -> None:
        loud = of(kind, 30.0, noise_limit=60)
        half, nearly = loud.quieter(0.5), loud.quieter(1.0)
        assert half is not None
        assert nearly is not None
        assert (half.size, nearly.size) == (15.0, pytest.approx(29.7))
        cost = kind.noise_type.truncation(30.0, 60)
        assert half.noise_limit == kind.noise_type.limit_of(15.0, cost) < 60
        assert loud.quieter(0.5 * kind.least_size / 30.0) is None
