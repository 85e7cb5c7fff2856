"""Optimal composition against exact sums and against dp_accounting."""

from __future__ import annotations

import math

import mpmath
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from scipy.stats import binom

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Law
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.proofs.argument import law_of, sensitivity
from cpsgd.privacy.proofs.per_round import (
    PROOFS,
    check_composable,
    optimal_composition,
    randomized_response_delta,
)
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known


def exact_delta(epsilon: float, rounds: int, target: float) -> mpmath.mpf:
    """The theorem's sum with 60 digits."""
    with mpmath.workdps(60):
        e, t = mpmath.mpf(epsilon), mpmath.mpf(target)
        terms = (
            mpmath.binomial(rounds, lost) * max(0, mpmath.exp((rounds - lost) * e) - mpmath.exp(t + lost * e))
            for lost in range(rounds + 1)
        )
        return sum(terms) / (1 + mpmath.exp(e)) ** rounds


@pytest.mark.parametrize(
    ("epsilon", "rounds", "target"),
    [(0.1, 100, 3.0), (0.01, 1000, 0.5), (1.0, 10, 4.2), (0.5, 20, 0.0), (0.3, 7, 1.2), (2.0, 1, 1.0)],
)
def test_delta_is_the_exact_sum_rounded_up(epsilon: float, rounds: int, target: float) -> None:
    found = randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=target)
    exact = exact_delta(epsilon, rounds, target)
    assert found >= exact
    assert found == pytest.approx(float(exact), rel=1e-9)


def test_one_mechanism_composes_to_itself() -> None:
    found = optimal_composition(epsilon=0.7, delta=1e-9, rounds=1, target_delta=1e-9 * (1 + 1e-9))
    assert found == pytest.approx(0.7, rel=1e-6)


def test_corner_points_of_the_published_theorem() -> None:
    # Theorem 3.3 is stated at ε' = (R - 2i) ε, with δ' = 1 - (1-δ)^R (1 - δ_i).
    epsilon, delta, rounds, i = 0.2, 1e-7, 12, 3
    pure = (
        sum(
            math.comb(rounds, lost)
            * (math.exp((rounds - lost) * epsilon) - math.exp((rounds - 2 * i + lost) * epsilon))
            for lost in range(i)
        )
        / (1 + math.exp(epsilon)) ** rounds
    )
    target = 1 - (1 - delta) ** rounds * (1 - pure)
    found = optimal_composition(epsilon=epsilon, delta=delta, rounds=rounds, target_delta=target)
    assert found == pytest.approx((rounds - 2 * i) * epsilon, rel=1e-7)


@pytest.mark.parametrize(("epsilon", "delta", "rounds"), [(0.1, 1e-9, 100), (0.5, 1e-8, 30), (0.01, 0.0, 5000)])
def test_agrees_with_dp_accounting(epsilon: float, delta: float, rounds: int) -> None:
    parameters = common.DifferentialPrivacyParameters(epsilon, delta)
    # ε is a multiple of the interval, so the library's rounding costs nothing here.
    losses = privacy_loss_distribution.from_privacy_parameters(parameters, epsilon / 100).self_compose(rounds)
    found = optimal_composition(epsilon=epsilon, delta=delta, rounds=rounds, target_delta=1e-6)
    assert found == pytest.approx(losses.get_epsilon_for_delta(1e-6), rel=1e-4)


def test_better_than_adding_up_and_worse_with_more_rounds() -> None:
    found = [optimal_composition(epsilon=0.05, delta=1e-10, rounds=r, target_delta=1e-6) for r in (1, 5, 50, 500)]
    assert found == sorted(found)
    assert found[-1] < 500 * 0.05 / 3


def test_refuses_when_the_rounds_spend_delta_themselves() -> None:
    with pytest.raises(ConditionError, match="at most δ=1e-08 per round"):
        optimal_composition(epsilon=0.1, delta=1e-7, rounds=100, target_delta=1e-6)
    with pytest.raises(ConditionError):  # exactly all of it: roundings may hide that it is more
        optimal_composition(epsilon=0.1, delta=1e-7, rounds=1, target_delta=1e-7)


@pytest.mark.parametrize("delta", [-1e-9, 1.0, 2.0])
def test_a_delta_that_is_none_is_refused_by_its_range(delta: float) -> None:
    with pytest.raises(ParameterError, match=r"delta in \[0, 1\)"):
        optimal_composition(epsilon=0.1, delta=delta, rounds=2, target_delta=1e-6)


def test_known_compositions() -> None:
    kinds = [(epsilon, rounds) for epsilon in (1e-3, 0.1, 3.0) for rounds in (1, 2, 7, 3000)]
    values: dict[str, object] = {
        f"delta {epsilon} {rounds}": [
            randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=share * epsilon * rounds)
            for share in (0.0, 0.01, 0.3, 0.999)
        ]
        for epsilon, rounds in kinds
    }
    for epsilon, rounds in kinds:
        values[f"epsilon {epsilon} {rounds}"] = [
            optimal_composition(epsilon=epsilon, delta=delta, rounds=rounds, target_delta=target)
            for delta, target in ((0.0, 1e-9), (1e-10, 1e-4), (1e-6, 0.3))
        ]
    known.check("privacy/proofs/per_round", values, rel=1e-8)


def test_small_deltas_are_rounded_up_by_what_many_logarithms_are_off() -> None:
    # At ε' = 0 δ is the total variation of two binomial laws that mirror one another: a difference of two tails.
    epsilon, rounds = 1e-4, 10**6
    found = randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=0.0)
    p = 1.0 / (1.0 + math.exp(epsilon))
    exact = binom.cdf(rounds // 2 - 1, rounds, p) - binom.sf(rounds // 2, rounds, p)
    assert found > exact
    assert found == pytest.approx(exact * (1.0 + 1.105e-7), rel=2e-8)


def test_gaps_of_exactly_zero_are_left_out() -> None:
    # (R - 2l) ε = ε' but for roundings: such terms add nothing, and their logarithm is none.
    for rounds in (3, 7, 20, 41):
        for epsilon in (0.1, 0.3, 0.7, 1.1):
            for lost in range(rounds // 2):
                target = (rounds - 2 * lost) * epsilon
                found = randomized_response_delta(epsilon=epsilon, rounds=rounds, target_epsilon=target)
                assert 0.0 <= found < 1.0


def test_so_many_rounds_are_composed_and_no_more() -> None:
    protocol = Protocol.binomial(clients=20, dim=1, clip_norm=1.0, levels=3, trials=100)
    check_composable(Run.of(protocol, rounds=20_000))
    with pytest.raises(ConditionError, match="up to 20,000 rounds"):
        check_composable(Run.of(protocol, rounds=20_001))


def test_what_could_not_come_below_is_not_computed() -> None:
    # No certificate comes below a Gaussian of equal variance by more than a thousandth.
    proof, run = PROOFS[0], Run.of(Protocol.binomial(clients=20, dim=2, clip_norm=1.0, levels=3, trials=200), rounds=4)
    law, each = law_of(run), 0.5 * 1e-6 / 4
    assert isinstance(law, Law)
    ideal = gdp_epsilon(sensitivity(run) / math.sqrt(law.variance), each)
    floor = optimal_composition(epsilon=0.999 * ideal, delta=each, rounds=4, target_delta=1e-6)
    with pytest.raises(ConditionError, match="so not computed"):
        proof.epsilon(run, 1e-6, below=floor * (1.0 - 1e-6))
    assert proof.epsilon(run, 1e-6, below=floor * (1.0 + 1e-6)).epsilon > floor


def test_no_negative_epsilon_is_asked_for() -> None:
    with pytest.raises(ParameterError, match="target_epsilon"):
        randomized_response_delta(epsilon=0.1, rounds=9, target_epsilon=-0.1)
