"""Poisson sampling: against closed forms, integrals over all outputs, and dp_accounting on random settings."""

from __future__ import annotations

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from scipy.special import ndtr

from cpsgd.neighbours import Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.fixed_size import SampledRounds
from cpsgd.privacy.gaussian import gdp_delta
from cpsgd.privacy.loss_sums import COARSE_POINTS, FINE_POINTS, Composition
from cpsgd.privacy.poisson import PoissonRounds, poisson_profile

_CASES = [(1.0, 0.1), (0.3, 0.6), (2.0, 0.01), (4.0, 1e-4), (0.05, 0.9), (1.2, 2e-4), (0.7, 1.0 - 1e-9), (1e-3, 0.5)]


def one_round(mu: float, rate: float, epsilon: float) -> tuple[float, float]:
    """δ of one round in both orders: q h_μ where the loss is above ε, and the same mirrored below -ε."""
    forth = rate * gdp_delta(mu, math.log1p(math.expm1(epsilon) / rate))
    most = -math.expm1(-epsilon) / rate  # 1 - e^(log of the quotient at which the loss is -ε)
    if most >= 1.0:
        return forth, 0.0
    # Where N(μ,1)/N(0,1) is below γ: B(E) - e^ε ((1-q) B(E) + q N(μ,1)(E)).
    x = math.log1p(-most) / mu + 0.5 * mu
    return forth, max(0.0, (1 - math.exp(epsilon) * (1 - rate)) * ndtr(x) - math.exp(epsilon) * rate * ndtr(x - mu))


@pytest.mark.parametrize("points", [COARSE_POINTS, FINE_POINTS])
@pytest.mark.parametrize(("mu", "rate"), _CASES)
def test_one_round_in_both_orders(mu: float, rate: float, points: int) -> None:
    for epsilon in (0.003, 0.05, 0.3, 1.0, 4.0):
        exact = one_round(mu, rate, epsilon)
        for swapped in (False, True):
            found = Composition([PoissonRounds(mu, rate, 1, swapped)], points).delta(epsilon)
            # The closed form itself loses what is far below one.
            assert exact[swapped] * (1 - 1e-12) - 1e-14 <= found
            close, rest = (1e-3, 1e-13) if points == FINE_POINTS else (0.05, 1e-12)
            assert found <= exact[swapped] * (1.0 + close) + rest
    profile = poisson_profile([PoissonRounds(mu, rate, 1)], points)
    assert profile(0.3) >= max(one_round(mu, rate, 0.3)) * (1 - 1e-12)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("mu", "rate"), [(0.7, 0.3), (1.5, 0.05), (0.4, 0.95)])
def test_masses_keep_both_laws_and_lie_above_them(mu: float, rate: float, swapped: bool) -> None:
    kind = PoissonRounds(mu, rate, 1, swapped)
    for interval in (1e-2, 1e-3):
        losses = kind.on_grid(interval, 10**6, 1e-12)
        assert np.all(losses.mass >= 0.0)
        assert 1.0 - 1e-15 <= losses.mass.sum() + losses.infinite <= 1.0 + 1e-9
        # The second law's masses are e^-loss times the first one's, and sum to one as well.
        assert float(losses.mass @ np.exp(-losses.loss)) == pytest.approx(1.0, abs=1e-8)
        for epsilon in (0.0, 0.02, 0.2):
            above = losses.loss > epsilon
            curve = float(losses.mass[above] @ -np.expm1(epsilon - losses.loss[above])) + losses.infinite
            assert curve >= one_round(mu, rate, epsilon)[swapped] * (1 - 1e-12)


def _random_settings(count: int) -> list[tuple[float, float, int, float]]:
    """Settings of μ, q, rounds and δ, by a fixed seed."""
    rng = np.random.default_rng(20261120)
    found = []
    for _ in range(count):
        mu, rate = np.exp(rng.uniform(np.log([0.1, 5e-4]), np.log([3.0, 0.9])))
        found.append((float(mu), float(rate), int(np.exp(rng.uniform(1.0, 7.0))), float(10.0 ** -rng.uniform(3, 10))))
    return found


# Many rounds that rarely matter have tails much heavier than a Gaussian's: windows must be longer for them.
_HEAVY = [(1.17, 0.000208, 412, 8.8e-12), (0.986, 0.00502, 12, 5.4e-9), (2.42, 0.000444, 209, 9.7e-6)]


@pytest.mark.parametrize(
    ("mu", "rate", "count", "delta"),
    [
        *_HEAVY,
        *_random_settings(5),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in _random_settings(40)),
    ],
)
def test_epsilon_is_at_most_that_of_dp_accounting_and_not_below_its_lower_bound(
    mu: float, rate: float, count: int, delta: float
) -> None:
    found = composed_epsilon([Rounds(mu, count)], delta=delta, participation=Participation.poisson(rate))
    interval = max(1e-4, (0.5 * mu * mu + 15.0 * mu) / 1e5)
    peer = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, interval)
    peer.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.0 / mu)), count)
    # For a very large ε there are not points enough for a finer grid than theirs.
    assert found <= peer.get_epsilon(delta - 1e-15 * count) * (1.0 + (1e-12 if found < 50.0 else 1e-8))
    # Losses rounded down to a grid, so that divergences are too small.
    least = privacy_loss_distribution.from_gaussian_mechanism(
        1.0 / mu,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        sampling_prob=rate,
        use_connect_dots=False,
    )
    assert found >= least.self_compose(count).get_epsilon_for_delta(delta + 1e-14 * count)


def test_delta_is_the_same_whatever_was_asked_before() -> None:
    kinds = [PoissonRounds(0.8, 0.02, 300)]
    alone = [poisson_profile(kinds, COARSE_POINTS)(epsilon) for epsilon in (0.3, 1.0, 1.01, 3.0)]
    one = poisson_profile(kinds, COARSE_POINTS)
    assert [one(epsilon) for epsilon in (3.0, 1.01, 1.0, 0.3)] == alone[::-1]
    assert alone == sorted(alone, reverse=True)


@pytest.mark.parametrize(
    "kind", [PoissonRounds(0.1, 0.05, 1), PoissonRounds(0.1, 0.05, 1, True), SampledRounds(0.1, 0.05, 1)]
)
def test_delta_falls_also_where_no_loss_is_as_large(kind: PoissonRounds | SampledRounds) -> None:
    delta = Composition([kind], COARSE_POINTS).delta
    found = [delta(float(epsilon)) for epsilon in np.geomspace(1e-3, 50.0, 500)]
    assert all(after <= 1.001 * before + 1e-290 for before, after in itertools.pairwise(found))
    assert found[-1] < 1e-100


def test_unsampled_rounds_beside_them_are_gaussians() -> None:
    # A client that is drawn next to never adds next to nothing.
    both = poisson_profile([PoissonRounds(0.5, 1e-12, 3), SampledRounds(0.7, 1.0, 1)], FINE_POINTS)
    for epsilon in (0.1, 1.0, 3.0):
        exact = gdp_delta(0.7, epsilon)
        assert exact <= both(epsilon) <= 1.001 * exact + 1e-11


@pytest.mark.parametrize(
    ("mu", "rate", "count"), [(1e-6, 1e-6, 1), (100.0, 1e-6, 1), (100.0, 0.5, 10), (1.0, 0.01, 10**9), (5.0, 0.999, 3)]
)
@pytest.mark.filterwarnings("error")
def test_extremes_are_answered(mu: float, rate: float, count: int) -> None:
    profile = poisson_profile([PoissonRounds(mu, rate, count)], COARSE_POINTS)
    found = [profile(epsilon) for epsilon in (0.0, 0.5, 5.0, 300.0)]
    assert all(0.0 <= delta <= 1.0 for delta in found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("delta", [1e-20, 1e-60, 1e-200])
def test_a_tiny_delta_is_as_tight(delta: float) -> None:
    # One round, whose δ is q h_μ(1 + (e^ε - 1)/q).
    found = composed_epsilon([Rounds(1.0)], delta=delta, participation=Participation.poisson(0.1))
    assert one_round(1.0, 0.1, found)[0] <= delta
    assert one_round(1.0, 0.1, found * (1.0 - 1e-4))[0] > delta


def test_a_rate_next_to_one_is_no_sampling() -> None:
    rounds = [Rounds(1.0, 3)]
    every = composed_epsilon(rounds, delta=1e-6, participation=Participation.every())
    for rate in (1.0 - 2.0**-53, 1.0 - 2.0**-52):
        found = composed_epsilon(rounds, delta=1e-6, participation=Participation.poisson(rate))
        assert every * (1.0 - 1e-9) <= found <= every


def test_outputs_reach_beyond_half_of_a_tiny_distance() -> None:
    assert PoissonRounds(1e-4, 0.5, 1)._farthest(1.0) == pytest.approx(0.5e-4 + 1e-3, rel=1e-12)
