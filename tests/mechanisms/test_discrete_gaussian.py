"""Discrete Gaussian noise: the law of its sums by either way, its sampler, its certificates and its plans."""

from __future__ import annotations

import math
from functools import lru_cache

import mpmath
import numpy as np
import pytest

from cpsgd import Protocol, guarantee, plan
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import discrete_gaussian
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussianLaw, closeness, convolved, integer_variance

_DIGITS = 400


@lru_cache(maxsize=64)
def exact_masses(variance: float, clients: int) -> list[int]:
    """Masses of the sum at 0, 1, ..., in proportion, by convolution of integers with 400 digits."""
    with mpmath.workdps(2 * _DIGITS):
        reach = int(math.sqrt(2 * variance * _DIGITS * 2.31)) + 2
        half = [int(mpmath.exp(-mpmath.mpf(j * j) / (2 * mpmath.mpf(variance))) * 10**_DIGITS) for j in range(reach)]
    single = np.array(half[:0:-1] + half, dtype=object)
    found = single
    for _ in range(clients - 1):
        found = np.convolve(found, single)
    return list(found[len(found) // 2 :])


SMALL = [(0.02, 3), (0.05, 2), (0.1, 5), (0.3, 2), (0.3, 7), (0.5, 3), (1.0, 2), (1.0, 6), (2.5, 3), (6.0, 5)]


@pytest.mark.parametrize(("variance", "clients"), SMALL)
def test_convolution_is_within_its_stated_error(variance: float, clients: int) -> None:
    found, error = convolved(variance, clients, 20)
    exact = exact_masses(variance, clients)
    assert error < 1e-12
    for z, mass in enumerate(found):
        assert abs(exact[z] / exact[0] / float(mass) - 1) <= 2 * error + 1e-15, z


@pytest.mark.parametrize(("variance", "clients"), [(0.3, 2), (0.3, 7), (0.5, 3), (1.0, 2), (1.0, 6), (2.5, 3)])
def test_closeness_is_an_upper_bound_and_not_vacuous(variance: float, clients: int) -> None:
    exact = exact_masses(variance, clients)
    with mpmath.workdps(60):
        excess = [
            mpmath.mpf(mass)
            / mpmath.mpf(10) ** (_DIGITS * clients)
            * mpmath.exp(mpmath.mpf(z * z) / (2 * clients * mpmath.mpf(variance)))
            for z, mass in enumerate(exact[: 3 * clients])
        ]
        # The term at the dual lattice's origin: the density of points of A_{n-1} times the integral of the Gaussian.
        constant = mpmath.sqrt(2 * mpmath.pi * mpmath.mpf(variance)) ** (clients - 1) / mpmath.sqrt(clients)
        off = max(abs(value / constant - 1) for value in excess)
    assert off <= closeness(variance, clients)
    assert closeness(variance, clients) <= 1.2 * off
    # The authors' bound on the same ratio, 5 Σ e^(-2π²σ² k/(k+1)), is larger.
    authors = 5 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, clients))
    assert closeness(variance, clients) < authors


@pytest.mark.parametrize(("variance", "clients"), [(1.3, 300), (1.0, 3000)])
def test_both_ways_agree(variance: float, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    law = DiscreteGaussianLaw(clients, variance, 4)
    one = law.window(60.0)
    monkeypatch.setattr(discrete_gaussian, "_CLOSE", 1.0)
    other = law.window(60.0)
    assert one.error < 1e-9 < other.error
    assert one.first == other.first
    np.testing.assert_allclose(one.mass, other.mass, rtol=other.error)


@pytest.mark.parametrize(("variance", "clients"), SMALL)
@pytest.mark.parametrize("nats", [3.0, 40.0, 200.0])
def test_the_window_is_within_its_stated_error(variance: float, clients: int, nats: float) -> None:
    window = DiscreteGaussianLaw(clients, variance, 5).window(nats)
    exact = exact_masses(variance, clients)
    total, centre = exact[0] + 2 * sum(exact[1:]), 5 * clients
    assert window.first + window.last == 2 * centre
    for z in range(centre, window.last + 1):
        ratio = mpmath.mpf(exact[z - centre]) / total / mpmath.mpf(float(window.mass[z - window.first]))
        assert abs(ratio - 1) <= window.error, z
    beyond = mpmath.mpf(sum(exact[window.last - centre + 1 :])) / total
    assert beyond <= window.outside_above


@pytest.mark.parametrize(("variance", "clients"), [(0.3, 7), (1.0, 6), (6.0, 5)])
@pytest.mark.parametrize("direction", [1, -1])
def test_ratios_of_masses(variance: float, clients: int, direction: int) -> None:
    exact = exact_masses(variance, clients)
    points = np.arange(-15.0, 16.0)
    step, errors = DiscreteGaussianLaw(clients, variance, 0).step(points, direction)
    for point, found, error in zip(points, step, errors, strict=True):
        place = int(point)
        with mpmath.workdps(50):
            ratio = mpmath.mpf(exact[abs(place - direction)]) / exact[abs(place)]
        assert abs((1.0 + float(found)) / ratio - 1) <= float(error) * 2.0**-53, point


def test_a_million_clients_with_little_noise_are_computed_or_refused() -> None:
    window = DiscreteGaussianLaw(10**6, 2.0, 9).window(60.0)
    assert window.error < 1e-7
    assert abs(float(window.mass.sum()) - 1.0) < 1e-9
    with pytest.raises(ConditionError, match="fewer clients"):
        DiscreteGaussianLaw(10**9, 0.5, 9).window(60.0)


@pytest.mark.parametrize(
    ("variance", "share"), [(0.05, 0.00181583231), (0.2, 0.70659942), (1.0, 0.99999979), (5.0, 1.0)]
)
def test_the_variance_of_the_integers(variance: float, share: float) -> None:
    assert integer_variance(variance) == pytest.approx(share * variance, rel=1e-5)


def test_a_plan_keeps_its_word_and_fills_its_bits() -> None:
    planned = plan(clients=40, dim=30, epsilon=4.0, delta=1e-5, bits=6, mechanism="discrete-gaussian")
    protocol = Protocol.from_json(planned.protocol.to_json())
    assert protocol == planned.protocol
    assert protocol.name == "rotated-discrete-gaussian"
    assert 3.9 < planned.guarantee.epsilon <= 4.0
    assert guarantee(protocol, 1e-5).epsilon == planned.guarantee.epsilon
    assert 2**6 - 1 <= protocol.radix <= 2**6
    assert 1.0 < planned.ratio < 1.2


def test_a_secure_plan_of_many_clients() -> None:
    planned = plan(
        clients=10_000, dim=1000, epsilon=1.0, delta=1e-6, bits=14, secure=True, mechanism="discrete-gaussian"
    )
    assert planned.protocol.modulus is not None
    assert planned.protocol.modulus <= 2**14
    assert planned.guarantee.epsilon <= 1.0
