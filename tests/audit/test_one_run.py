"""One-run auditing: the bound holds where it must, and catches noise that is too small by half."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd.audit.one_run import audit_scores, lower_bound, p_value
from cpsgd.errors import ParameterError
from cpsgd.privacy.gaussian import gdp_mu


@pytest.mark.slow
@pytest.mark.parametrize(("guesses", "epsilon", "error"), [(50, 0.5, 0.05), (400, 1.0, 0.01), (1000, 3.0, 0.05)])
def test_randomized_response_is_refuted_no_more_often_than_stated(guesses: int, epsilon: float, error: float) -> None:
    # The worst that pure ε allows: every guess is right with probability e^ε/(1 + e^ε), independently.
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    right = np.arange(guesses + 1)
    refuted = np.array([lower_bound(guesses, guesses, int(v), 0.0, error) > epsilon for v in right])
    assert float(binom.pmf(right, guesses, rate)[refuted].sum()) <= error


def test_a_catastrophe_of_probability_delta_is_allowed() -> None:
    # With probability δ per canary everything is shown; the bound counts m of them.
    assert p_value(1000, 100, 100, 1.0, 0.0) < 1e-13
    assert p_value(1000, 100, 100, 1.0, 1e-3) >= 2.0 * 1000 * 1e-3 / 100
    assert lower_bound(1000, 100, 100, 1e-4, 0.05) < lower_bound(1000, 100, 100, 0.0, 0.05)
    assert lower_bound(1000, 100, 50, 0.0, 0.05) == 0.0
    assert lower_bound(1000, 100, 0, 0.0, 0.05) == 0.0


@pytest.mark.parametrize(("epsilon", "r", "v"), [(0.7, 20, 17), (8.0, 8, 8), (0.0, 9, 1)])
def test_the_sum_over_i_is_that_of_the_theorem(epsilon: float, r: int, v: int) -> None:
    delta, m = 1e-4, 60
    rate = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    masses = [math.comb(r, k) * rate**k * (1 - rate) ** (r - k) for k in range(r + 1)]
    beta = sum(masses[v:])
    alpha = max(2.0 / i * sum(masses[max(0, v - i) : v]) for i in range(1, m + 1))
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(beta + alpha * m * delta, rel=1e-6)


def test_what_is_left_out_of_the_sum_over_i_counts_as_certain() -> None:
    """Of 10,001 guesses that are all right the first 4,101 terms are next to nothing, and 1/i is at most 1/4,102."""
    found = p_value(10_000, 10_001, 10_001, 0.0, 1e-3)
    assert found == pytest.approx(2.0 * 10_000 * 1e-3 / 4_102, rel=1e-6)
    below = np.cumsum(binom.pmf(np.arange(10_000, -1, -1), 10_001, 0.5))
    assert found >= 2.0 * 10_000 * 1e-3 * float(np.max(below / np.arange(1, 10_002)))


def test_a_claim_that_is_met_exactly_passes() -> None:
    included = np.arange(40) % 2 == 0
    report = audit_scores(included.astype(float), included, claimed=1.0, delta=0.0)
    assert report.epsilon > 1.0
    assert [replace(report, claimed=report.epsilon + more).passed for more in (-1e-9, 0.0, 1e-9)] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_noise_too_small_by_half_is_caught_and_honest_noise_is_not(seed: int) -> None:
    claimed, delta, count = 2.0, 1e-8, 1_000_000
    generator = np.random.default_rng(seed)
    mu = gdp_mu(claimed, delta)
    included = generator.random(count) < 0.5
    noise = generator.normal(size=count)
    honest = audit_scores(mu * included + noise, included, claimed=claimed, delta=delta)
    assert honest.passed
    assert honest.epsilon > 0.4
    halved = audit_scores(mu * included + 0.5 * noise, included, claimed=claimed, delta=delta)
    assert not halved.passed


@pytest.mark.slow
def test_honest_noise_raises_no_alarm_more_often_than_stated() -> None:
    claimed, delta, count = 1.0, 1e-5, 2_000
    generator = np.random.default_rng(1)
    mu = gdp_mu(claimed, delta)
    alarms = 0
    for _ in range(200):
        included = generator.random(count) < 0.5
        report = audit_scores(mu * included + generator.normal(size=count), included, claimed=claimed, delta=delta)
        alarms += not report.passed
    # Binomial(200, 0.05) exceeds 30 with probability 1e-7.
    assert alarms <= 30


def test_scores_and_coins_must_fit() -> None:
    with pytest.raises(ParameterError, match="at least 8 canaries"):
        audit_scores(np.zeros(3), np.zeros(3, dtype=bool), claimed=1.0, delta=1e-6)
    with pytest.raises(ParameterError, match="confidence"):
        audit_scores(np.zeros(30), np.zeros(30, dtype=bool), claimed=1.0, delta=1e-6, confidence=1.0)
