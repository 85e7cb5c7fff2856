"""Composition and sampling: against closed forms, against dp_accounting, against numerical integration; monotone."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Participation
from cpsgd.privacy import accountant
from cpsgd.privacy.accountant import Rounds, composed_delta, composed_epsilon, least_noise, mixed_epsilon, solve
from cpsgd.privacy.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from cpsgd.privacy.loss_sums import COARSE_POINTS, FINE_POINTS
from cpsgd.promise import Claim
from tests import known_values as known

EVERY = Participation.every()
POISSON = Participation.poisson(0.02)
FIXED = Participation.fixed_size(cohort=20, population=1000)
ALL = [Participation.once(), EVERY, POISSON, FIXED]


# ------------------------------------------------------------------ exact composition of Gaussians


def test_gaussians_compose_as_the_root_of_summed_squares() -> None:
    rounds = [Rounds(0.1, 9), Rounds(0.2, 4)]
    exact = gdp_epsilon(math.sqrt(9 * 0.01 + 4 * 0.04), 1e-6)
    found = composed_epsilon(rounds, delta=1e-6, participation=EVERY)
    assert exact <= found <= exact * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [200.0, 300.0, 499.0])
def test_every_epsilon_up_to_the_largest_is_found(epsilon: float) -> None:
    mu = gdp_mu(epsilon, 1e-6)
    assert composed_epsilon([Rounds(mu=0.5 * mu, count=4)], delta=1e-6, participation=EVERY) == pytest.approx(epsilon)


@pytest.mark.parametrize("epsilon", [15.0, 33.0, 45.0, 50.0])
def test_epsilon_is_found_where_a_larger_one_would_not_pay_for_the_sampler(epsilon: float) -> None:
    # At 64, the next power of two, the variation costs 6e-4 and more: far more than δ, most of which tails have taken.
    spent = [Rounds(mu=0.5 * gdp_mu(epsilon, 2e-8), count=4, tail_mass=2.45e-7, variation=2.5e-34)]
    found = composed_epsilon(spent, delta=1e-6, participation=EVERY)
    assert epsilon * (1 - 1e-9) <= found <= epsilon + 0.001
    assert composed_delta(spent, epsilon=found, participation=EVERY) <= 1e-6


def test_a_sampler_that_spends_delta_leaves_no_proof() -> None:
    mu = gdp_mu(61.0, 1e-6)
    assert composed_epsilon([Rounds(mu, 1, variation=1e-31)], delta=1e-6, participation=EVERY) == math.inf


def test_epsilon_beyond_the_largest_is_infinite() -> None:
    mu = gdp_mu(499.0, 1e-6)
    assert composed_epsilon([Rounds(mu=1.01 * mu, count=1)], delta=1e-6, participation=EVERY) == math.inf


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_agrees_with_dp_accounting_on_gaussian_events(delta: float) -> None:
    accountant = PLDAccountant()
    accountant.compose(dp.GaussianDpEvent(20.0), 50)
    accountant.compose(dp.GaussianDpEvent(8.0), 3)
    found = composed_epsilon([Rounds(1 / 20, 50), Rounds(1 / 8, 3)], delta=delta, participation=EVERY)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=2e-3)


def test_taking_part_once_costs_as_much_as_the_costliest_round() -> None:
    rounds = [Rounds(0.1, 1000), Rounds(0.3, 1), Rounds(0.2, 5)]
    found = composed_epsilon(rounds, delta=1e-6, participation=Participation.once())
    assert found == pytest.approx(gdp_epsilon(0.3, 1e-6), rel=1e-6)


# ------------------------------------------------------------------ Poisson sampling


def subsampled_delta(mu: float, rate: float, epsilon: float) -> float:
    """δ of one Poisson-sampled Gaussian round by numerical integration, the worse of both directions."""
    x = np.linspace(-40.0, 40.0, 800_001)
    base, shifted = norm.pdf(x), norm.pdf(x - mu)
    mixture = (1 - rate) * base + rate * shifted
    step = x[1] - x[0]
    forth = np.maximum(mixture - math.exp(epsilon) * base, 0).sum() * step
    back = np.maximum(base - math.exp(epsilon) * mixture, 0).sum() * step
    return float(max(forth, back))


@pytest.mark.parametrize(("mu", "rate", "epsilon"), [(1.0, 0.1, 0.3), (2.0, 0.05, 0.5), (0.5, 0.5, 0.2)])
def test_one_poisson_round_is_the_mixture_integral(mu: float, rate: float, epsilon: float) -> None:
    scheme = Participation.poisson(rate)
    found = composed_delta([Rounds(mu)], epsilon=epsilon, participation=scheme)
    exact = subsampled_delta(mu, rate, epsilon)
    assert exact * (1 - 1e-6) <= found <= exact * 1.01


def test_many_poisson_rounds_agree_with_dp_accounting() -> None:
    accountant = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(2.0)), 300)
    found = composed_epsilon([Rounds(0.5, 300)], delta=1e-6, participation=POISSON)
    # On a grid twice as fine, so never above; below by what the coarser grid costs.
    assert 0.9999 * accountant.get_epsilon(1e-6) <= found <= accountant.get_epsilon(1e-6)


def test_sampling_always_with_probability_one_is_every_round() -> None:
    rounds = [Rounds(0.1, 10)]
    everyone = Participation("poisson", 1.0)
    every = composed_epsilon(rounds, delta=1e-6, participation=EVERY)
    assert composed_epsilon(rounds, delta=1e-6, participation=everyone) == every
    nearly = composed_epsilon(rounds, delta=1e-6, participation=Participation.poisson(0.9999))
    assert nearly == pytest.approx(every, rel=5e-3)


def test_a_tiny_delta_is_below_what_divergences_prove() -> None:
    rounds = [Rounds(0.5, 300)]
    renyi = RdpAccountant(range(2, 64), dp.NeighboringRelation.REPLACE_SPECIAL)
    renyi.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(2.0)), 300)
    found = composed_epsilon(rounds, delta=1e-16, participation=POISSON)
    assert 0.9 * renyi.get_epsilon(1e-16) <= found <= renyi.get_epsilon(1e-16)


# ------------------------------------------------------------------ sampling without replacement


@pytest.mark.parametrize(("mu", "rate", "epsilon"), [(1.0, 0.1, 1.0), (2.0, 0.05, 1.5), (0.5, 0.3, 0.8)])
def test_one_fixed_size_round_is_above_the_exact_worst_case(mu: float, rate: float, epsilon: float) -> None:
    # Worst case of one round (Balle, Barthe, Gaboardi 2018, Theorem 11): δ'(log(1 + q(e^ε - 1))) = q δ(ε).
    scheme = Participation("fixed-size", rate)
    amplified = math.log1p(rate * math.expm1(epsilon))
    assert composed_delta([Rounds(mu)], epsilon=amplified, participation=scheme) >= rate * gdp_delta(mu, epsilon)


# ------------------------------------------------------------------ tails


def test_tails_are_added_for_every_round() -> None:
    bare = composed_delta([Rounds(0.2, 10)], epsilon=1.0, participation=EVERY)
    tailed = composed_delta([Rounds(0.2, 10, tail_mass=1e-9)], epsilon=1.0, participation=EVERY)
    moved = composed_delta([Rounds(0.2, 10, variation=1e-9)], epsilon=1.0, participation=EVERY)
    assert tailed - bare == pytest.approx(1e-8, rel=1e-6)
    assert moved - bare == pytest.approx(1e-8 * (1 + math.e), rel=1e-6)


def test_slack_adds_to_epsilon_and_multiplies_delta() -> None:
    rounds = [Rounds(0.2, 10, slack=1e-3)]
    mu = 0.2 * math.sqrt(10.0)
    found = composed_delta(rounds, epsilon=1.0, participation=EVERY)
    assert found == pytest.approx(gdp_delta(mu, 1.0 - 0.02) * math.exp(0.01), rel=1e-9)
    epsilon = composed_epsilon(rounds, delta=1e-6, participation=EVERY)
    assert epsilon == pytest.approx(gdp_epsilon(mu, 1e-6 * math.exp(-0.01)) + 0.02, rel=1e-6)
    assert composed_delta(rounds, epsilon=epsilon, participation=EVERY) <= 1e-6
    # So much that nothing is left.
    assert composed_delta([Rounds(0.2, 10, slack=1.0)], epsilon=1.0, participation=EVERY) == 1.0


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_slack_of_every_scheme_costs(scheme: Participation) -> None:
    bare, slack = (
        composed_epsilon([Rounds(0.5, 20, slack=each)], delta=1e-6, participation=scheme) for each in (0.0, 1e-3)
    )
    counted = scheme.counted_rounds(20)
    assert slack >= bare + 2e-3 * counted * (1.0 - 1e-9)
    assert slack <= bare + 3e-3 * counted + 1e-3


def test_tails_of_one_round_only_where_everybody_takes_part_once() -> None:
    rounds = [Rounds(0.2, 10, tail_mass=1e-9)]
    bare = composed_delta([Rounds(0.2)], epsilon=1.0, participation=EVERY)
    tailed = composed_delta(rounds, epsilon=1.0, participation=Participation.once())
    assert tailed - bare == pytest.approx(1e-9, rel=1e-6)


def test_tails_beyond_delta_are_refused() -> None:
    with pytest.raises(ConditionError, match="tails of 10 rounds"):
        composed_epsilon([Rounds(0.2, 10, tail_mass=1e-7)], delta=1e-6, participation=EVERY)
    with pytest.raises(ConditionError, match="tails alone"):
        least_noise(Claim(1.0, 1e-6), rounds=10, participation=EVERY, tail_mass=1e-7)


# ------------------------------------------------------------------ monotonicity


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_more_noise_fewer_rounds_or_larger_delta_never_raise_epsilon(scheme: Participation) -> None:
    base = Rounds(0.4, 40, tail_mass=1e-12)

    def epsilon(rounds: Rounds, delta: float = 1e-6) -> float:
        return composed_epsilon([rounds], delta=delta, participation=scheme, interval=1e-3)

    reference = epsilon(base)
    assert epsilon(replace(base, mu=0.38)) <= reference
    assert epsilon(replace(base, count=39)) <= reference
    assert epsilon(replace(base, tail_mass=0.0)) <= reference
    assert epsilon(base, delta=2e-6) <= reference
    assert composed_epsilon([base, base], delta=1e-6, participation=scheme, interval=1e-3) >= reference


def test_a_smaller_rate_never_raises_epsilon() -> None:
    for scheme in ("poisson", "fixed-size"):
        found = [
            composed_epsilon([Rounds(0.4, 40)], delta=1e-6, participation=Participation(scheme, rate), interval=1e-3)
            for rate in (0.01, 0.05, 0.2, 1.0)
        ]
        assert found == sorted(found)


def test_a_coarser_discretisation_only_costs() -> None:
    fine = composed_epsilon([Rounds(0.5, 300)], delta=1e-6, participation=POISSON, interval=1e-4)
    coarse = composed_epsilon([Rounds(0.5, 300)], delta=1e-6, participation=POISSON, interval=1e-3)
    assert fine <= coarse <= 1.01 * fine


# ------------------------------------------------------------------ two of three


@pytest.mark.parametrize("scheme", [EVERY, POISSON, FIXED], ids=str)
def test_each_of_the_three_follows_from_the_other_two(scheme: Participation) -> None:
    delta, rounds = 1e-6, 60
    noisy = solve(delta=delta, participation=scheme, epsilon=1.0, rounds=rounds, tolerance=1e-4)
    assert noisy.epsilon <= 1.0
    assert noisy.epsilon == pytest.approx(1.0, rel=1e-2)
    again = solve(delta=delta, participation=scheme, noise_multiplier=noisy.noise_multiplier, rounds=rounds)
    assert again.epsilon == noisy.epsilon
    longest = solve(delta=delta, participation=scheme, epsilon=1.0, noise_multiplier=noisy.noise_multiplier)
    assert longest.rounds in (rounds, rounds + 1)
    assert longest.epsilon <= 1.0


def test_the_answers_are_on_the_safe_side_and_tight() -> None:
    found = solve(delta=1e-6, participation=EVERY, epsilon=2.0, rounds=100)
    assert composed_epsilon([Rounds(1 / found.noise_multiplier, 100)], delta=1e-6, participation=EVERY) <= 2.0 + 1e-6
    less = [Rounds(1 / found.noise_multiplier * 1.00001, 100)]
    assert composed_delta(less, epsilon=2.0, participation=EVERY) > 1e-6
    most = solve(delta=1e-6, participation=EVERY, epsilon=2.0, noise_multiplier=50.0).rounds
    assert composed_delta([Rounds(0.02, most)], epsilon=2.0, participation=EVERY) <= 1e-6
    assert composed_delta([Rounds(0.02, most + 1)], epsilon=2.0, participation=EVERY) > 1e-6


def test_solve_wants_exactly_two() -> None:
    with pytest.raises(ParameterError, match="exactly two"):
        solve(delta=1e-6, participation=EVERY, epsilon=1.0)
    with pytest.raises(ParameterError, match="exactly two"):
        solve(delta=1e-6, participation=EVERY, epsilon=1.0, rounds=1, noise_multiplier=1.0)


def test_rounds_are_free_where_everybody_takes_part_once() -> None:
    with pytest.raises(ParameterError, match="any number of rounds"):
        solve(delta=1e-6, participation=Participation.once(), epsilon=1.0, noise_multiplier=100.0)


def test_not_even_one_round_is_said() -> None:
    with pytest.raises(ConditionError, match="Not even one round"):
        solve(delta=1e-6, participation=EVERY, epsilon=1.0, noise_multiplier=1.0)


# ------------------------------------------------------------------ rounds with different participations


def two_rounds_delta(plain: float, mu: float, rate: float, epsilon: float) -> float:
    """δ of one Gaussian and one Poisson-sampled Gaussian round by integration in the plane, the worse direction."""
    x = np.linspace(-8.0, 9.0, 1_001)
    step = x[1] - x[0]
    with_client = np.outer(norm.pdf(x - plain), (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu))
    without = np.outer(norm.pdf(x), norm.pdf(x))
    forth = np.maximum(with_client - math.exp(epsilon) * without, 0).sum() * step**2
    back = np.maximum(without - math.exp(epsilon) * with_client, 0).sum() * step**2
    return float(max(forth, back))


@pytest.mark.parametrize(("plain", "mu", "rate"), [(0.5, 1.0, 0.1), (1.0, 2.0, 0.3), (0.1, 1.5, 0.05)])
def test_a_sampled_and_an_unsampled_round_are_the_integral(plain: float, mu: float, rate: float) -> None:
    parts = [(Rounds(plain), EVERY), (Rounds(mu), Participation.poisson(rate))]
    exact = two_rounds_delta(plain, mu, rate, 1.0)
    assert 1.0 - 1e-4 <= mixed_epsilon(parts, delta=exact) <= 1.01


def test_mixed_rates_agree_with_dp_accounting() -> None:
    parts = [
        (Rounds(0.05, 40), EVERY),
        (Rounds(0.5, 300), POISSON),
        (Rounds(0.8, 100), Participation.poisson(0.005)),
    ]
    accountant = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.GaussianDpEvent(20.0), 40)
    accountant.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(2.0)), 300)
    accountant.compose(dp.PoissonSampledDpEvent(0.005, dp.GaussianDpEvent(1.25)), 100)
    expected = accountant.get_epsilon(1e-6)
    found = mixed_epsilon(parts, delta=1e-6)
    assert 0.999 * expected <= found <= expected
    assert found == pytest.approx(mixed_epsilon(parts[::-1], delta=1e-6), rel=1e-9)


def test_mixed_rounds_of_one_kind_are_composed_as_before() -> None:
    for participation in (EVERY, POISSON, FIXED):
        rounds = [Rounds(0.3, 20, tail_mass=1e-9), Rounds(0.2, 5)]
        plain = composed_epsilon(rounds, delta=1e-6, participation=participation)
        assert mixed_epsilon([(r, participation) for r in rounds], delta=1e-6) == plain
    assert mixed_epsilon([], delta=1e-6) == 0.0


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(ParameterError, match="not composed"):
        mixed_epsilon([(Rounds(0.1), Participation.once())], delta=1e-6)
    with pytest.raises(ParameterError, match="not composed"):
        mixed_epsilon([(Rounds(0.1), POISSON), (Rounds(0.1), FIXED)], delta=1e-6)
    with pytest.raises(ConditionError, match="tails"):
        mixed_epsilon([(Rounds(0.1, 10, tail_mass=1e-7), EVERY)], delta=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.3, 5.0])
def test_a_pure_round_that_is_sampled(epsilon: float) -> None:
    for rate in (1e-6, 0.3, 0.999):
        exact = math.log((1.0 - rate) + rate * math.exp(epsilon))
        assert accountant._sampled_pure(epsilon, rate) == pytest.approx(exact, rel=1e-3 if exact < 1e-9 else 1e-6)
        assert accountant._sampled_pure(epsilon, rate) < epsilon
    assert accountant._sampled_pure(epsilon, 1.0) == epsilon
    # Where e^ε is too large for a float, what sampling gains is given away.
    assert accountant._sampled_pure(1e6, 0.5) == 1e6


def test_where_nobody_is_sampled_the_least_noise_is_that_of_a_gaussian() -> None:
    for rounds in (1, 7):
        found = least_noise(Claim(1.0, 1e-6), rounds=rounds, participation=Participation.parse("every"))
        assert found == pytest.approx(math.sqrt(rounds) / gdp_mu(1.0, 1e-6), rel=1e-6)


# ------------------------------------------------------------------ parts

_MIXED = [
    Rounds(0.3, 7, tail_mass=1e-9, variation=2e-10, slack=3e-4, pure=0.2),
    Rounds(0.5, 2, tail_mass=2e-9, pure=0.4),
    Rounds(0.2, 3, variation=1e-10, slack=1e-4),
]
_SCHEMES = [EVERY, Participation.once(), Participation.apart(3), Participation.poisson(0.1), FIXED]


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_known_compositions(scheme: Participation) -> None:
    values: dict[str, object] = {}
    for interval in (accountant.COARSE, 2e-4):
        values |= {
            f"epsilon {interval} {delta}": composed_epsilon(
                _MIXED, delta=delta, participation=scheme, interval=interval
            )
            for delta in (1e-6, 1e-3)
        }
        values |= {
            f"delta {interval} {epsilon}": composed_delta(
                _MIXED, epsilon=epsilon, participation=scheme, interval=interval
            )
            for epsilon in (0.0, 0.02, 0.5, 3.0)
        }
    claim = Claim(1.3, 1e-5)
    values["noise"] = least_noise(claim, rounds=6, participation=scheme, tail_mass=1e-8, tolerance=1e-3)
    if scheme.scheme != "once":
        values["rounds"] = accountant.most_rounds(claim, 30.0, participation=EVERY, tail_mass=1e-8)
    known.check("privacy/accountant", {f"{scheme} {key}": value for key, value in values.items()}, rel=1e-8)


def test_known_parts_of_the_accountant() -> None:
    tails, apart = accountant._tails(_MIXED), [(each, EVERY) for each in _MIXED]
    mixed = [(_MIXED[0], EVERY), (_MIXED[1], POISSON), (_MIXED[2], POISSON)]
    pure = [(replace(each, pure=0.1 * number), who) for number, (each, who) in enumerate(mixed, 1)]
    values: dict[str, object] = {
        "tails": [tails(0.0), tails(2.0)],
        "slack": [accountant._slack(_MIXED), accountant._slack([Rounds(1.0, 2, slack=400.0)])],
        "summed": accountant._summed(_MIXED),
        "pure": [accountant.pure_epsilon(each) for each in (mixed[:1], mixed[:2], mixed, pure)],
        "mixed": [mixed_epsilon(each, delta=delta) for each in (apart, mixed, pure) for delta in (1e-3, 1e-7)],
        "nothing but pure": [mixed_epsilon(pure, delta=delta) for delta in (0.0, 1e-9)],
        "some pure": mixed_epsilon([(replace(_MIXED[0], mu=2.0), EVERY), (_MIXED[2], EVERY)], delta=1e-6),
        "smallest": [
            accountant._smallest(lambda x, place=place: place - x, start=1.0, limit=limit)  # type: ignore[misc]
            for place, limit in ((1e-12, 9.0), (0.3, 9.0), (1.0, 9.0), (5.0, 9.0), (8.9, 9.0), (9.1, 9.0), (1.0, 1.0))
        ],
        "budget": solve(delta=1e-6, participation=POISSON, noise_multiplier=3.0, rounds=5, tail_mass=1e-9).epsilon,
    }
    known.check("privacy/accountant", values, rel=1e-8)


def test_the_costliest_of_rounds_has_the_largest_of_every_part() -> None:
    seen = replace(_MIXED[0], seen=((0.1, 0.2),)), replace(_MIXED[1], seen=((0.3, 0.4), (0.5, 0.6)))
    assert accountant.costliest(_MIXED, 4) == Rounds(0.5, 4, 2e-9, 2e-10, 3e-4, math.inf)
    assert accountant.costliest(seen, 2) == Rounds(0.5, 2, 2e-9, 2e-10, 3e-4, 0.4, ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6)))
    assert accountant.costliest([seen[0], _MIXED[1]], 2).seen == ()


def test_limits_of_what_is_searched() -> None:
    with pytest.raises(ConditionError, match="No noise multiplier under"):
        least_noise(Claim(1e-9, 1e-12), rounds=10**6, participation=EVERY)
    with pytest.raises(ConditionError, match="More than 10"):
        solve(delta=1e-6, participation=EVERY, epsilon=1.0, noise_multiplier=1e9)
    assert composed_delta([Rounds(1.0)], epsilon=1e19, participation=EVERY) < 1e-300
    far, most = (least_noise(Claim(epsilon, 0.5), rounds=1, participation=EVERY) for epsilon in (1e19, 500.0))
    assert far == pytest.approx(most, rel=1e-6)
    # Whoever is drawn may be seen: sampling alone pays.
    for scheme in (Participation.poisson(0.01), FIXED):
        assert least_noise(Claim(1.0, 0.5), rounds=1, participation=scheme) < 1e-3
    # Exactly what is left for tails.
    assert composed_epsilon([Rounds(0.1, tail_mass=0.9e-6)], delta=1e-6, participation=EVERY) < math.inf
    for spent in (1e-6, 2e-6):
        with pytest.raises(ConditionError, match="tails of 1 rounds"):
            composed_epsilon([Rounds(0.1, tail_mass=spent)], delta=1e-6, participation=EVERY)
        with pytest.raises(ConditionError, match="tails alone"):
            least_noise(Claim(1.0, 1e-6), rounds=1, participation=EVERY, tail_mass=spent)
    assert composed_epsilon([], delta=1e-6, participation=EVERY) == 0.0
    assert composed_delta([], epsilon=1.0, participation=EVERY) == 0.0


def test_numbers_of_rounds() -> None:
    for wrong in ({"mu": 0.0}, {"mu": -1.0}, {"mu": math.inf}, {"mu": 1.0, "count": 0}):
        with pytest.raises(ParameterError):
            Rounds(**wrong)
    # No δ is above 1.
    for spent in ({"tail_mass": 0.3}, {"slack": 1e-3, "mu": 50.0}):
        assert composed_delta([Rounds(**{"mu": 5.0, "count": 10} | spent)], epsilon=0.1, participation=EVERY) == 1.0


@pytest.mark.parametrize(("epsilon", "variation"), [(0.05, 2.4e-3), (0.3, 2.4e-3), (0.5, 2.4e-3), (0.1, 4e-3)])
def test_a_sampler_may_spend_half_of_delta(epsilon: float, variation: float) -> None:
    # So much that the search must not end too early: at the answer it spends a half and more of what is left.
    delta = 1e-2
    mu = gdp_mu(epsilon, delta - variation * (1.0 + math.exp(epsilon)))
    found = composed_epsilon([Rounds(mu, variation=variation)], delta=delta, participation=EVERY)
    assert found == pytest.approx(epsilon, rel=1e-6)


def test_delta_at_an_epsilon_of_zero() -> None:
    assert composed_delta([Rounds(0.3)], epsilon=0.0, participation=EVERY) == pytest.approx(gdp_delta(0.3, 0.0))


def test_sampling_helps_up_to_the_largest_epsilon() -> None:
    assert accountant._sampled_pure(500.0, 0.25) == pytest.approx(500.0 + math.log(0.25), rel=1e-14)
    assert accountant._sampled_pure(500.1, 0.25) == 500.1
    assert all(accountant._sampled_pure(epsilon, 1.0) == epsilon for epsilon in np.linspace(0.1, 9.0, 50))


def test_tails_that_spend_exactly_all_of_delta_are_refused() -> None:
    claim = Claim(1.0, 2.0**-20)
    with pytest.raises(ConditionError, match="their tails alone spend δ"):
        least_noise(claim, rounds=4, participation=EVERY, tail_mass=2.0**-22)
    assert least_noise(claim, rounds=3, participation=EVERY, tail_mass=2.0**-22) > 0.0


def test_more_rounds_than_anybody_runs_are_not_counted() -> None:
    noise = 1.0 / gdp_mu(1.0, 1e-6)
    found = accountant.most_rounds(Claim(1.0, 1e-6), noise * math.sqrt(0.75 * 2.0**40), participation=EVERY)
    assert found == pytest.approx(0.75 * 2.0**40, rel=1e-4)
    with pytest.raises(ConditionError, match=r"More than 10\^12"):
        accountant.most_rounds(Claim(1.0, 1e-6), noise * math.sqrt(1.5 * 2.0**40), participation=EVERY)


@pytest.mark.parametrize(("mu", "count"), [(0.0, 1), (-1.0, 1), (math.nan, 1), (1.0, 0), (1.0, 1.5)])
def test_rounds_that_are_none_are_refused(mu: float, count: int) -> None:
    with pytest.raises(ParameterError):
        Rounds(mu, count)


@pytest.mark.parametrize("mu", [0.01, 1.0, 5.0])
def test_delta_at_zero_is_the_total_variation(mu: float) -> None:
    found = composed_delta([Rounds(mu)], epsilon=0.0, participation=EVERY)
    assert found == pytest.approx(2.0 * norm.cdf(mu / 2.0) - 1.0, rel=1e-9)
    assert composed_delta([Rounds(mu, slack=0.1)], epsilon=0.0, participation=EVERY) == 1.0


@pytest.mark.parametrize("sampling", [Participation.poisson(0.01), Participation.fixed_size(cohort=1, population=100)])
def test_rounds_for_all_count_beside_sampled_ones(sampling: Participation) -> None:
    for mu in (0.4, 1.4):
        parts = [(Rounds(mu), EVERY), (Rounds(0.3, 2), sampling)]
        exact = gdp_epsilon(mu, 1e-5)
        assert exact <= mixed_epsilon(parts, delta=1e-5, interval=accountant.COARSE) < 1.05 * exact


def test_a_profile_that_is_no_number_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that overflow must not be read as a δ that is small enough."""
    monkeypatch.setattr(accountant, "_profiles", lambda parts, interval: [lambda epsilon: math.nan])
    assert accountant._gaussian_epsilon([(Rounds(0.5, 3), EVERY)], 1e-6, accountant.FINE) == math.inf


@pytest.mark.parametrize("needed", [0.0, 1e-320, 1e-9, 1e-6, math.nextafter(1e-6, 1.0), 0.5, math.inf, math.nan])
def test_more_than_delta_is_never_enough(needed: float) -> None:
    assert (accountant._excess(needed, 1e-6) <= 0.0) == (needed <= 1e-6)


def test_no_rounds_cost_nothing() -> None:
    assert mixed_epsilon([], delta=1e-6) == mixed_epsilon([], delta=0.0) == 0.0


def test_as_many_rounds_as_the_root_of_their_number_affords() -> None:
    for rounds in range(1, 20):
        noise = math.sqrt(rounds + 0.5) / gdp_mu(1.0, 1e-6)
        assert accountant.most_rounds(Claim(1.0, 1e-6), noise, participation=EVERY) == rounds
        spent = solve(delta=1e-6, participation=EVERY, noise_multiplier=noise, rounds=rounds).epsilon
        assert spent == pytest.approx(gdp_epsilon(math.sqrt(rounds) / noise, 1e-6), rel=1e-9)


def test_noise_is_found_up_to_the_largest_multiplier() -> None:
    for noise, found in ((0.99e9, True), (1.01e9, False)):
        with contextlib.nullcontext() if found else pytest.raises(ConditionError, match="under 1e"):
            rounds = int((noise * gdp_mu(1.0, 1e-6)) ** 2)
            assert least_noise(Claim(1.0, 1e-6), rounds=rounds, participation=EVERY) == pytest.approx(noise, rel=1e-5)


@pytest.mark.parametrize(("interval", "points"), [(accountant.FINE, FINE_POINTS), (accountant.COARSE, COARSE_POINTS)])
@pytest.mark.parametrize("scheme", ["fixed-size", "poisson"])
def test_what_is_asked_about_sampled_rounds(
    scheme: str, interval: float, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    name = "sampled_profile" if scheme == "fixed-size" else "poisson_profile"
    monkeypatch.setattr(accountant, name, lambda *given: asked.append(given) or (lambda epsilon: 0.25))
    for population in (3, 7, 49, 103):
        rate = Participation.fixed_size(cohort=1, population=population).rate
        parts = [(Rounds(0.5, 9), Participation(scheme, rate)), (Rounds(0.1, 4), EVERY)]
        assert accountant._profiles(parts, interval)[0](1.0) == 0.25
        (sampled, every), found = asked.pop()
        assert found == points
        assert (sampled.mu, sampled.count, every.rate, every.count) == (0.5, 9, 1.0, 1)
        assert every.mu == pytest.approx(0.2)
        # A rate is rounded up.
        assert 0 < sampled.rate - Fraction(1, population) < 1e-15


def test_nothing_is_looked_for_beyond_a_limit() -> None:
    asked: list[float] = []
    assert accountant._smallest(lambda x: asked.append(x) or 9.5 - x, start=6.0, limit=9.0) == math.inf  # type: ignore[func-returns-value]
    assert asked == [6.0, 9.0]
