"""The lower bound on ε is wrong as rarely as it says: by adding up all outcomes of small experiments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, multinomial

from cpsgd.audit import epsilon_lower_bound
from cpsgd.audit.bound import Attacker, Rehearsal


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("delta", [1e-9, 0.05, 0.3])
@pytest.mark.parametrize("alarms", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("error", [0.2, 0.05])
def test_coverage_by_enumeration(epsilon: float, delta: float, alarms: float, error: float) -> None:
    # As much as (ε, δ)-privacy allows: p₁ = e^ε p₀ + δ.
    hits = min(1.0, math.exp(epsilon) * alarms + delta)
    true = math.log((hits - delta) / alarms)
    rounds = 30
    wrong_probability = 0.0
    shares = multinomial(rounds, [0.5 * hits, 0.5 * alarms, 1.0 - 0.5 * (hits + alarms)])
    for right, wrong in itertools.product(range(rounds + 1), repeat=2):
        if right + wrong <= rounds and epsilon_lower_bound(right, wrong, rounds, delta, error) > true:
            wrong_probability += shares.pmf([right, wrong, rounds - right - wrong])
    assert wrong_probability <= error


def test_close_to_the_truth_with_many_rounds() -> None:
    rounds, delta, alarms, epsilon = 10**7, 1e-3, 0.05, 1.5
    hits = math.exp(epsilon) * alarms + delta
    bound = epsilon_lower_bound(0.5 * rounds * hits, 0.5 * rounds * alarms, rounds, delta, 1e-6)
    assert 0.98 * epsilon < bound < epsilon


def test_nothing_is_proved_by_nothing() -> None:
    assert epsilon_lower_bound(0, 0, 1_000, 1e-3, 0.05) == 0.0
    assert epsilon_lower_bound(10, 500, 1_000, 1e-3, 0.05) == 0.0
    # So many right answers are explained by δ alone.
    assert epsilon_lower_bound(int(binom.isf(0.025, 1_000, 0.05)), 0, 1_000, 0.1, 0.05) == 0.0


def test_monotone() -> None:
    def bound(right: int = 300, wrong: int = 50, delta: float = 1e-3, error: float = 0.05) -> float:
        return epsilon_lower_bound(right, wrong, 1_000, delta, error)

    assert bound(right=301) > bound() > bound(wrong=51)
    assert bound() > bound(delta=0.1)
    assert bound() > bound(error=1e-6)


def test_answers_are_counted_on_either_side() -> None:
    scores = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    worlds = np.array([False, False, True, False, True, True])
    assert Attacker(1, 0.5).counts(scores, worlds) == (2, 1)
    assert Attacker(-1, -0.5).counts(scores, worlds) == (2, 1)
    assert Attacker(1, 3.0).counts(scores, worlds) == (0, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_strongest_attacker_finds_the_side_that_tells(sign: int) -> None:
    # Only one world ever goes beyond 3 on this side; on the other the worlds are alike.
    generator = np.random.default_rng(5)
    worlds = generator.random(5_000) < 0.5
    scores = generator.random(5_000)
    telling = (worlds == (sign > 0)) & (generator.random(5_000) < 0.1)
    scores[telling] += 4.0
    scores *= sign
    promise = Rehearsal(scores, worlds).best_prospect(20_000, delta=1e-3, error=1e-6)
    assert promise.sign == sign
    assert promise.share in (0.03, 0.05)
    assert promise.epsilon > 2.0


def test_an_attacker_answers_as_often_as_it_is_told() -> None:
    scores = np.random.default_rng(5).permutation(1_000).astype(float)
    for sign in (1, -1):
        attacker = Attacker.answering(scores, sign, 0.05)
        assert sum(attacker.counts(scores, scores > 500.0)) in (50, 51)
