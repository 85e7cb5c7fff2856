from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import dp_accounting
import mpmath
import pytest
from scipy.special import erfcx, ndtr

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian
from cpsgd.privacy import (
    analytic_epsilon,
    analytic_sigma,
    classical_epsilon,
    classical_sigma,
    gaussian,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from cpsgd.privacy.proofs import gaussian_noise
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run

MUS = [1e-4, 0.01, 0.2376, 1.0, 5.0, 30.0]


def oracle_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """δ(ε) of a μ-GDP mechanism with 60 digits."""
    with mpmath.workdps(60):
        x, h = mpmath.mpf(epsilon) / mpmath.mpf(mu), mpmath.mpf(mu) / 2
        return mpmath.ncdf(h - x) - mpmath.exp(mpmath.mpf(epsilon)) * mpmath.ncdf(-h - x)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("shift", [-3.0, -0.1, 0.0, 0.5, 4.0, 15.0, 37.0])
def test_delta_is_an_upper_bound_and_sharp(mu: float, shift: float) -> None:
    epsilon = max(0.0, mu * (0.5 * mu + shift))
    exact, bound = oracle_delta(mu, epsilon), gdp_delta(mu, epsilon)
    assert bound >= exact
    # The only loss is the cancellation between two values of erfcx about μ apart.
    assert bound <= exact * (1 + 1e-12 * (1 + 1 / mu) * (1 + shift**2)) or bound < 1e-300


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("delta", [1e-200, 1e-15, 1e-9, 1e-5, 0.3])
def test_epsilon_and_mu_are_inverse_on_the_safe_side(mu: float, delta: float) -> None:
    epsilon = gdp_epsilon(mu, delta)
    assert oracle_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert oracle_delta(mu, epsilon * (1 - 1e-9)) > delta
        back = gdp_mu(epsilon, delta)
        assert back <= mu * (1 + 1e-8)
        assert back >= mu * (1 - 1e-8)
        assert oracle_delta(back, epsilon) <= delta


@pytest.mark.skipif(version("dp-accounting").startswith("0.5"), reason="dp-accounting has this function since 0.6")
@pytest.mark.parametrize("delta", [1e-12, 1e-9, 1e-5])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0, 50.0])
def test_agrees_with_dp_accounting(delta: float, multiplier: float) -> None:
    theirs = dp_accounting.get_epsilon_gaussian(multiplier, delta)
    ours = analytic_epsilon(sigma=multiplier, sensitivity=1.0, delta=delta)
    assert ours == pytest.approx(theirs, rel=1e-6)
    sigma = analytic_sigma(epsilon=ours, sensitivity=1.0, delta=delta)
    assert sigma == pytest.approx(multiplier, rel=1e-7)
    assert sigma == pytest.approx(dp_accounting.get_sigma_gaussian(ours, delta), rel=1e-6)


def test_scipy_is_as_accurate_as_assumed() -> None:
    with mpmath.workdps(60):
        for i in range(0, 400):
            y = i * 0.1
            exact = mpmath.exp(mpmath.mpf(y) ** 2) * mpmath.erfc(mpmath.mpf(y))
            assert abs(float(erfcx(y)) - exact) <= 1e-14 * exact
            exact = mpmath.ncdf(mpmath.mpf(y))
            assert abs(float(ndtr(y)) - exact) <= 1e-14 * exact


def test_classical_lemma() -> None:
    sigma = classical_sigma(epsilon=0.5, sensitivity=2.0, delta=1e-5)
    assert sigma == pytest.approx(2.0 / 0.5 * math.sqrt(2.0 * math.log(1.25e5)), rel=1e-12)
    assert classical_epsilon(sigma=sigma, sensitivity=2.0, delta=1e-5) == pytest.approx(0.5, rel=1e-12)
    assert analytic_epsilon(sigma=sigma, sensitivity=2.0, delta=1e-5) < 0.5


def test_classical_lemma_is_silent_above_one() -> None:
    needed = math.sqrt(2.0 * math.log(1.25e5))
    with pytest.raises(ConditionError, match=f"sigma >= {needed:.6g}"):
        classical_epsilon(sigma=needed * 0.999, sensitivity=1.0, delta=1e-5)
    with pytest.raises(ConditionError, match="ε <= 1"):
        classical_sigma(epsilon=1.001, sensitivity=1.0, delta=1e-5)
    classical_epsilon(sigma=needed * 1.001, sensitivity=1.0, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-9, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(ParameterError, match="delta"):
        gdp_epsilon(1.0, delta)
    with pytest.raises(ParameterError, match="delta"):
        classical_sigma(epsilon=0.5, sensitivity=1.0, delta=delta)


def test_already_private_without_epsilon() -> None:
    assert gdp_epsilon(1e-3, 0.01) == 0.0


def test_negative_epsilon_is_refused() -> None:
    assert gdp_delta(1.0, 0.0) == pytest.approx(0.38292492254802624)
    with pytest.raises(ParameterError, match="epsilon >= 0"):
        gdp_delta(1.0, -1e-9)


def test_numbers_far_out() -> None:
    # From here on the smallest normal float stands for what would underflow.
    for near, expected in ((35.0, False), (37.4, False), (38.1, True), (60.0, True)):
        assert (gaussian._delta(1.0, near + 0.5) == gaussian._TINY) == expected
    assert gdp_delta(1e3, 0.0) == 1.0
    assert gdp_delta(0.3, 1e-300) == pytest.approx(2.0 * float(ndtr(0.15)) - 1.0, rel=1e-12)


@pytest.mark.parametrize("place", [1e-12, 0.3, 1.0, 7.0, 1000.0])
@pytest.mark.parametrize("high", [0.5, 1.0, 2000.0])
def test_a_boundary_is_found_from_either_side(place: float, high: float) -> None:
    below, above = gaussian._boundary(lambda x: x >= place, 0.0, high)
    assert below < place <= above
    assert above - below <= 2e-15 * above


def test_the_classical_lemma_holds_up_to_one() -> None:
    factor = math.sqrt(2.0 * math.log(1.25 / 1e-6))
    assert classical_epsilon(sigma=2.0 * factor * 1.0001, sensitivity=2.0, delta=1e-6) == pytest.approx(1 / 1.0001)
    assert classical_sigma(epsilon=1.0, sensitivity=2.0, delta=1e-6) == pytest.approx(2.0 * factor, rel=1e-12)
    with pytest.raises(ConditionError, match="holds for ε <= 1"):
        classical_sigma(epsilon=math.nextafter(1.0, 2.0), sensitivity=2.0, delta=1e-6)
    with pytest.raises(ConditionError, match=f"sigma >= {2.0 * factor:.6g}"):
        classical_epsilon(sigma=2.0 * factor * 0.9999, sensitivity=2.0, delta=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_mu_is_asked_for_with_a_probability(delta: float) -> None:
    with pytest.raises(ParameterError, match="delta"):
        gdp_mu(1.0, delta)


def rounded(**conditions: Any) -> Run:
    noise = RoundedGaussian(noise_deviation=2.2, window=60, step=0.4, coordinate_range=0.7)
    return Run.of(Protocol(clients=60, dim=8, clip_norm=1.0, mechanism=noise), **conditions)


def test_a_sampler_costs_its_variation_on_either_side() -> None:
    run = rounded(rounds=5, surviving=50)
    variation = run.protocol.mechanism.noise.variation
    assert variation > 0.0
    spent = gaussian_noise._spent(run, Claim(1.5, 1e-6))
    assert spent == pytest.approx(5 * 50 * 8 * variation * (1.0 + math.exp(1.5)) / 1e-6, rel=1e-12, abs=0.0)


def test_the_slack_of_rounding_is_made_up_for() -> None:
    claim, slack = Claim(1.5, 1e-6), 0.07
    mu = gaussian_noise._mu(rounded(rounds=5), claim, 0.03, slack) * math.sqrt(5)
    assert gdp_delta(mu, 1.5 - 2 * slack) * math.exp(slack) == pytest.approx(0.97e-6, rel=1e-6)
    sampled = rounded(rounds=5, participation="poisson:0.2", adjacency="zero-out")
    without = gaussian_noise._mu(sampled, claim, 0.0)
    assert gaussian_noise._mu(sampled, claim, 0.0, slack) == pytest.approx(without * (1.0 - 2 * slack / 1.5), rel=1e-12)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_parameters_out_of_range_are_refused_by_name(wrong: float) -> None:
    for name, call in (("mu", gdp_epsilon), ("epsilon", gdp_mu)):
        with pytest.raises(ParameterError, match=name):
            call(wrong, 1e-6)
        with pytest.raises(ParameterError, match="delta"):
            call(1.0, wrong)


def test_limits_themselves_are_allowed() -> None:
    assert gdp_epsilon(0.7, gdp_delta(0.7, 0.0)) == 0.0
    assert classical_sigma(epsilon=1.0, sensitivity=1.0, delta=1e-6) == pytest.approx(math.sqrt(2 * math.log(1.25e6)))
