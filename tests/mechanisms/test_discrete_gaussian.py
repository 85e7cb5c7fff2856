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
from cpsgd.mechanisms.discrete_gaussian import (
    DiscreteGaussianLaw,
    DiscreteGaussianNoise,
    closeness,
    convolved,
    integer_variance,
)
from cpsgd.randomness import Keystream
from tests import known_values as known

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


# ------------------------------------------------------------------ parts, and where one way takes over from the other


@pytest.mark.parametrize("variance", [0.0, 2.0**-6, 0.05, 0.3, 1.0, 3.9, 4.0, 5.0, 1e6])
def test_the_variance_on_the_integers_is_that_of_the_masses(variance: float) -> None:
    j = np.arange(-60.0, 61.0)
    masses = np.exp(-0.5 * j * j / variance) if variance else (j == 0.0).astype(float)
    expected = float(j * j @ masses / masses.sum()) if variance <= 5.0 else variance
    assert integer_variance(variance) == pytest.approx(expected, rel=1e-12)


def test_known_parts() -> None:
    values: dict[str, object] = {}
    for variance, clients in (
        (0.02, 2),
        (0.05, 9),
        (0.3, 2),
        (0.3, 7),
        (0.5, 300),
        (1.3, 5),
        (6.0, 2),
        (0.1, 4000),
        (2.0, 1),
    ):
        values[f"closeness {variance} {clients}"] = closeness(variance, clients)
    for variance, clients, reach in ((0.02, 3, 20), (0.3, 7, 5), (1.0, 6, 40), (0.2, 33, 9)):
        masses, error = convolved(variance, clients, reach)
        values[f"convolved {variance} {clients}"] = [len(masses), error]
        values[f"masses {variance} {clients}"] = masses
        assert not masses.flags.writeable
    x, y = np.array([1.0, 0.5, 0.1]), np.array([1.0, 0.6, 0.2, 0.01])
    whole = np.convolve(np.r_[x[:0:-1], x], np.r_[y[:0:-1], y])[5:]
    z = np.arange(1, 6)
    values["lost"] = [*discrete_gaussian._lost(x, y, z, whole), *discrete_gaussian._lost(y, x, z, whole)]
    # Where the last two masses are alike, nothing is bounded.
    values["unknown"] = discrete_gaussian._lost(np.ones(3), np.ones(4), z, whole) < np.inf
    noise = DiscreteGaussianNoise(5.0, 30)
    values["drawn"] = noise.of_sum(7, 30, Keystream(bytes(16)))
    values["silent"] = DiscreteGaussianNoise(0.0, 3).of_sum(7, 4, Keystream(bytes(16)))
    values["window"] = [len(discrete_gaussian.sum_table(variance, 3).high) for variance in (0.4, 9.0)]
    # The bound on what is outside counts the error of the ratio there: here it is large.
    window = DiscreteGaussianLaw(10**6, 1.7, 0).window(30.0)
    values["outside"] = [window.error, window.outside_above, window.outside_below, len(window.mass)]
    values["variation"] = [DiscreteGaussianNoise(size, 3).sum_variation(2) for size in (0.0, 1.0)]
    values["truncation"] = [DiscreteGaussianNoise.truncation(9.0, limit) for limit in (0, 1, 20)]
    known.check("mechanisms/discrete-gaussian", values)


@pytest.mark.parametrize("allowed", [1.0, 0.05])
def test_sums_stop_where_too_much_is_lost(allowed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrete_gaussian, "_MOST_LOST", allowed)
    half = np.exp(-(np.arange(7.0) ** 2) / 5.0)
    whole = np.exp(-(np.arange(60.0) ** 2) / 5.0)
    found, error = discrete_gaussian._sum(half, 1e-9, half, 1e-9, 30)
    exact = np.convolve(np.r_[whole[:0:-1], whole], np.r_[whole[:0:-1], whole])[118:]
    assert len(found) < 13
    assert np.all(np.abs(exact[: len(found)] / exact[0] / found - 1.0) <= 2.0 * error)
    known.check("mechanisms/discrete-gaussian", {f"sum {allowed}": [*found, error]})
    monkeypatch.setattr(discrete_gaussian, "_MOST_LOST", 1e-12)
    with pytest.raises(ConditionError, match="too small for its masses"):
        discrete_gaussian._sum(half[:3], 1e-9, half[:3], 1e-9, 30)


@pytest.mark.parametrize(("a", "b"), [(9, 6), (6, 9), (7, 7)])
def test_what_the_end_of_a_law_leaves_out_of_a_sum_is_bounded(a: int, b: int) -> None:
    """By brute force: the terms beyond the last place of X, next to places of Y that are kept."""
    masses = np.exp(-(np.arange(60.0) ** 2) / 4.0)
    x, y, z = masses[: a + 1], masses[: b + 1], np.arange(1, a + b + 1)
    whole = [
        sum(x[abs(j)] * y[abs(place - j)] for j in range(-a, a + 1) if abs(place - j) <= b)
        for place in range(a + b + 1)
    ]
    bounds = discrete_gaussian._lost(x, y, z, np.array(whole))
    for place, bound in zip(z.tolist(), bounds.tolist(), strict=True):
        exact = sum(masses[j] * y[abs(place - j)] for j in range(a + 1, place + b + 1)) / whole[place]
        assert exact <= bound
        assert bound <= 2.0 * exact or place - a > 1


def test_sums_of_much_noise_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []
    table = discrete_gaussian.sum_table
    monkeypatch.setattr(discrete_gaussian, "MAX_SIZE", 22.0)
    monkeypatch.setattr(discrete_gaussian, "sum_table", lambda *given: asked.append(given) or table(*given))
    for size, count, parts in ((5.0, 11, [4, 4, 3]), (5.0, 4, [4]), (30.0, 2, [1, 1])):
        asked.clear()
        drawn = DiscreteGaussianNoise(size, 40).of_sum(count, 400, Keystream(bytes(16)))
        assert asked == [(size, part) for part in parts]
        # Of 400 draws the mean is within 5.4 standard errors but for a probability of 1e-7.
        assert abs(float(drawn.mean()) - 40 * count) < 5.4 * math.sqrt(size * count / 400)


def test_where_convolution_takes_over() -> None:
    near = DiscreteGaussianLaw(2, 2.0, 0)  # within 1e-8 of a discrete Gaussian: exact enough for long windows alone
    assert 2.0**-34 < closeness(2.0, 2) < 1e-7
    assert [near._ratios(count)[1] > 1e-9 for count in (8_000, 8_001)] == [False, True]
    assert near._ratios(8_001)[1] == pytest.approx(2.1 * closeness(2.0, 2) + 3000.0 * 2.0**-53, rel=1e-12)
    far = DiscreteGaussianLaw(5, 0.2, 0)
    assert len(far._ratios(40_000)[0]) < 40_000
    with pytest.raises(ConditionError, match="not computed"):
        far._ratios(40_001)


def test_masses_beyond_floating_point_are_refused() -> None:
    law = DiscreteGaussianLaw(2, 0.05, 0)
    known_ones = len(law._ratios(10_000)[0])
    for direction in (1, -1):
        steps, errors = law.step(np.array([-(known_ones - 1.0), known_ones - 1.0]), direction)
        assert np.all(np.isfinite(steps))
        assert np.all(errors > 0.0)
        for points in ([known_ones, 0.0], [0.0, -known_ones]):
            with pytest.raises(ConditionError, match="too small for floating point"):
                law.step(np.array(points, dtype=float), direction)


def test_truncation_is_a_probability() -> None:
    assert DiscreteGaussianNoise.truncation(1e6, 0) == 1.0
