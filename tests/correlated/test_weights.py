"""Weights, sensitivity and prefix sums of correlated noise, against exact arithmetic, brute force and jax_privacy."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from cpsgd.correlated.weights import MAX_BANDS, WEIGHT_BITS, Correlation
from cpsgd.errors import ParameterError

# (rounds, bands): squared sensitivity once, at least 10 rounds apart, and every round; mean variance of prefix sums,
# and of the iterates of SGD with momentum 0.9. Computed once by jax_privacy 2.0.0 (matrix_factorization.toeplitz:
# inverse_coef, sensitivity_squared, minsep_sensitivity_squared, per_query_error) in float64, from these weights.
PUBLISHED = {
    (64, 2): (1.3333333333333333, 9.34375253815231, 249.33333333333331, 8.875, 547.2847960425566),
    (64, 8): (1.8754574840842988, 18.75680165634212, 1205.393304785041, 2.7807537503540516, 128.66778814449526),
    (64, 32): (2.3033875911620783, 34.26112529221026, 2496.5350364898613, 2.105039271293208, 79.1977544047815),
    (2500, 2): (1.3333333333333333, 333.98240086992325, 9993.333333333334, 313.375, 30948.006925207737),
    (2500, 8): (1.8754577738021554, 757.0212244799102, 56721.791153264014, 56.23745645933152, 5471.672681125805),
    (2500, 32): (2.3316019744074277, 2559.800532199759, 236284.10029840225, 14.812526092967392, 1356.7256376691103),
}
# Its own weights, optimal_max_error_noising_coefs, which are not rounded: squared sensitivity once.
UNROUNDED = {2: 1.3333333333333333, 8: 1.8754577738021554, 32: 2.3399458131005284}


def exact(correlation: Correlation) -> list[Fraction]:
    """The coefficients of C."""
    weights = [Fraction(weight, 1 << WEIGHT_BITS) for weight in correlation.weights]
    found = [Fraction(1)]
    for k in range(1, correlation.rounds):
        found.append(-sum((w * found[k - j] for j, w in enumerate(weights) if 0 < j <= k), Fraction(0)))
    return found


def test_weights_are_those_of_a_square_root_rounded_towards_zero() -> None:
    value = Fraction(1)
    for k, weight in enumerate(Correlation(MAX_BANDS, 1000).weights):
        assert weight == math.trunc(value * 2**WEIGHT_BITS)
        value *= Fraction(2 * k - 1, 2 * k + 2)
    assert Correlation(4, 4).weights == (2**14, -(2**13), -(2**11), -(2**10))


@pytest.mark.parametrize(("bands", "rounds"), [(1, 1), (1, 7), (2, 9), (3, 12), (12, 12), (5, 40)])
def test_the_column_norm_is_an_upper_bound_and_close(bands: int, rounds: int) -> None:
    correlation = Correlation(bands, rounds)
    squared = sum(c * c for c in exact(correlation))
    assert squared <= Fraction(correlation.column_norm) ** 2 <= squared * (1 + Fraction(1, 10**9))


@pytest.mark.parametrize(("bands", "rounds", "separation"), [(3, 7, 2), (2, 6, 1), (7, 7, 3), (4, 8, 9), (1, 5, 2)])
def test_the_sensitivity_is_the_largest_over_all_participations(bands: int, rounds: int, separation: int) -> None:
    correlation = Correlation(bands, rounds, separation)
    column = np.array([float(c) for c in exact(correlation)])
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    largest = 0.0
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=rounds):
        taken = np.flatnonzero(signs)
        if len(taken) < 2 or np.diff(taken).min() >= separation:
            largest = max(largest, float(np.linalg.norm(matrix @ np.array(signs))))
    assert largest <= correlation.sensitivity <= largest * (1.0 + 1e-9)
    most = max(len(range(start, rounds, separation)) for start in range(rounds))
    assert correlation.participations == most


@pytest.mark.parametrize(("rounds", "bands"), PUBLISHED)
def test_the_numbers_are_those_of_the_matrix_mechanism_elsewhere(rounds: int, bands: int) -> None:
    once, apart, every, prefix, momentum = PUBLISHED[rounds, bands]
    for separation, squared in ((None, once), (10, apart), (1, every)):
        assert Correlation(bands, rounds, separation).sensitivity ** 2 == pytest.approx(squared, rel=1e-9)
    correlation = Correlation(bands, rounds)
    assert float(correlation.prefix_variance().mean()) == pytest.approx(prefix, rel=1e-9)
    response = (1.0 - 0.9 ** np.arange(1, rounds + 1)) / (1.0 - 0.9)
    assert float(correlation.prefix_variance(response).mean()) == pytest.approx(momentum, rel=1e-9)
    if rounds == 2500:
        assert correlation.sensitivity**2 == pytest.approx(UNROUNDED[bands], rel=4e-3)


def test_coefficients_fall_and_are_those_of_the_inverse() -> None:
    for bands in (2, 8, 32, MAX_BANDS):
        correlation = Correlation(bands, 2000)
        assert correlation.coefficients.min() >= 0.0
        assert np.all(np.diff(correlation.coefficients) <= 0.0)
        unit = np.convolve(correlation.factors, correlation.coefficients)[:2000]
        assert np.abs(unit - np.eye(2000)[0]).max() < 1e-12


def test_it_pays_where_clients_come_back_late_and_not_where_they_are_in_every_round() -> None:
    assert [round(Correlation(bands, 2500).gain, 1) for bands in (2, 8, 32)] == [3.0, 11.9, 36.2]
    assert Correlation(8, 2500, 100).gain > 11.8
    assert all(Correlation(bands, 2500, 1).gain < 1.0 for bands in (2, 8, 32))
    assert Correlation(1, 2500).gain == 1.0
    assert Correlation(1, 2500, 50).sensitivity ** 2 == pytest.approx(50, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bands": 0, "rounds": 5}, "bands"),
        ({"bands": 6, "rounds": 5}, "at most rounds=5"),
        ({"bands": MAX_BANDS + 1, "rounds": 5000}, "bands"),
        ({"bands": 2, "rounds": 0}, "rounds"),
        ({"bands": 2, "rounds": 5, "separation": 0}, "separation"),
        ({"bands": True, "rounds": 5}, "bands"),
    ],
)
def test_bad_correlations_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Correlation(**fields)
