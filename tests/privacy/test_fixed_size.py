"""Fixed-size sampling: against closed forms, integrals over all outputs, enumerated laws, and the bound it replaced."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from fractions import Fraction

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy import fft
from scipy.special import erf, ndtr

from cpsgd import Protocol
from cpsgd.neighbours import Participation
from cpsgd.privacy import fixed_size, loss_sums
from cpsgd.privacy.accountant import Rounds, composed_delta, composed_epsilon, mixed_epsilon
from cpsgd.privacy.fixed_size import SampledRounds, sampled_profile
from cpsgd.privacy.gaussian import gdp_delta, gdp_epsilon
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.privacy.loss_sums import COARSE_POINTS, FINE_POINTS
from cpsgd.privacy.proofs import round_cost
from cpsgd.privacy.proofs.argument import counted_tail
from cpsgd.run import Run
from tests import known_values as known

from . import checks
from .oracle import composed, coordinate_law, hockey_stick


def fixed(rate: float) -> Participation:
    return Participation("fixed-size", rate)


# ------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("points", [COARSE_POINTS, FINE_POINTS])
@pytest.mark.parametrize(("mu", "count"), [(1.0, 1), (0.1, 100), (0.02, 2_500), (0.5, 6)])
def test_without_sampling_it_is_the_gaussian(mu: float, count: int, points: int) -> None:
    delta = sampled_profile([SampledRounds(mu, 1.0, count)], points)
    for epsilon in (0.0, 0.1, 1.0, 3.0, 6.0, 10.0, 20.0):
        exact = gdp_delta(mu * math.sqrt(count), epsilon)
        assert exact <= delta(epsilon) <= exact * (1.003 if points == FINE_POINTS else 1.03)


@pytest.mark.parametrize(("mu", "rate"), [(1.0, 0.1), (0.3, 0.5), (2.0, 0.01), (4.0, 1e-4), (0.05, 0.9)])
def test_one_round_is_the_amplified_curve(mu: float, rate: float) -> None:
    # Balle, Barthe and Gaboardi 2018, Theorem 11: δ'(log(1 + q(e^ε - 1))) = q δ(ε).
    delta = sampled_profile([SampledRounds(mu, rate, 1)], FINE_POINTS)
    for epsilon in (0.01, 0.3, 1.0, 4.0):
        exact = rate * gdp_delta(mu, epsilon)
        if exact > 1e-290:
            assert exact <= delta(math.log1p(rate * math.expm1(epsilon))) <= exact * 1.01


def test_kinds_are_composed_together() -> None:
    both = sampled_profile([SampledRounds(0.3, 1.0, 4), SampledRounds(0.2, 1.0, 9)], FINE_POINTS)
    exact = gdp_delta(math.sqrt(4 * 0.09 + 9 * 0.04), 2.0)
    assert exact <= both(2.0) <= 1.001 * exact


@pytest.mark.parametrize("delta", [1e-20, 1e-60, 1e-200])
def test_a_tiny_delta_is_as_tight(delta: float) -> None:
    # The losses are tilted towards ε, so that nothing is lost to the FFT's absolute errors.
    found = composed_epsilon([Rounds(0.1, 100)], delta=delta, participation=fixed(1.0 - 1e-12))
    exact = gdp_epsilon(1.0, delta)
    assert exact * (1 - 1e-6) <= found <= 1.0001 * exact


# ------------------------------------------------------------------ all outputs of concrete rounds


def test_rounds_of_any_kind_are_never_below_the_integral() -> None:
    assert checks.wrong_sampling() == []


def test_one_round_attains_the_bound() -> None:
    # The client drawn instead is like the second neighbour: no bound on one round can be smaller.
    a, b = checks.sampled_rounds(1.0, 0.1)[0]
    delta = sampled_profile([SampledRounds(1.0, 0.1, 1)], FINE_POINTS)
    for epsilon in (0.05, 0.3, 1.0):
        assert hockey_stick(a, b, epsilon) == pytest.approx(delta(epsilon), rel=2e-3)


@pytest.mark.parametrize(
    ("mu", "rate", "count"), [(0.5, 0.02, 300), (1.0, 0.01, 1_000), (1.0, 0.001, 10_000), (2.0, 0.01, 100)]
)
def test_many_rounds_lie_between_a_concrete_instance_and_the_bound_known_before(
    mu: float, rate: float, count: int
) -> None:
    pair = privacy_loss_distribution.from_gaussian_mechanism(
        1 / mu, sampling_prob=rate, value_discretization_interval=2e-4
    )
    least = pair.self_compose(count).get_epsilon_for_delta(1e-6)
    found = composed_epsilon([Rounds(mu, count)], delta=1e-6, participation=fixed(rate))
    assert 0.999 * least <= found <= 1.3 * least
    assert found < 0.65 * theorem_27(mu, rate, count, 1e-6)


# ------------------------------------------------------------------ the bound it replaced


# Each rate once, each number of rounds at least once.
FEW = {(0.01, 3_000), (0.5, 3_000), (0.9, 30)}


@functools.cache
def accountant_of(mu: float, rate: float, count: int) -> RdpAccountant:
    """The library's, which takes a second to add up the rounds; asked for several δ."""
    accountant = RdpAccountant(range(2, 64), dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(2**30, math.ceil(rate * 2**30), dp.GaussianDpEvent(1 / mu))
    return accountant.compose(event, count)


def theorem_27(mu: float, rate: float, count: int, delta: float) -> float:
    """ε by Wang, Balle and Kasiviswanathan 2019, Theorem 27, or without sampling."""
    return min(accountant_of(mu, rate, count).get_epsilon(delta), gdp_epsilon(math.sqrt(count) * mu, delta))


@pytest.mark.parametrize(
    ("rate", "count"),
    [
        pytest.param(rate, count, marks=() if (rate, count) in FEW else pytest.mark.thorough)
        for rate in (1e-4, 0.01, 0.1, 0.5, 0.9)
        for count in (1, 30, 3_000)
    ],
)
def test_never_above_the_bound_known_before(rate: float, count: int) -> None:
    for mu, delta in itertools.product((0.1, 1.0, 3.0), (1e-4, 1e-9)):
        before = theorem_27(mu, rate, count, delta)
        if before < 400.0:
            found = composed_epsilon([Rounds(mu, count)], delta=delta, participation=fixed(rate))
            assert found <= before * (1 + 1e-6) + 1e-8, (mu, count, delta)


def without_replacement_rdp(rate: float, sigma: float, order: int) -> float:
    """Theorem 27 of Wang, Balle, Kasiviswanathan for the Gaussian mechanism, with 300 digits."""
    with mpmath.workdps(300):
        q, variance = mpmath.mpf(rate), mpmath.mpf(sigma) ** 2

        def central(power: int) -> mpmath.mpf:
            return sum(
                (-1) ** (power - i) * mpmath.binomial(power, i) * mpmath.exp(mpmath.mpf(i * (i - 1)) / (2 * variance))
                for i in range(power + 1)
            )

        total = 1 + q**2 * mpmath.binomial(order, 2) * min(
            4 * (mpmath.exp(1 / variance) - 1), 2 * mpmath.exp(1 / variance)
        )
        for j in range(3, order + 1):
            even = 4 * mpmath.sqrt(central(2 * (j // 2)) * central(2 * ((j + 1) // 2)))
            plain = 2 * mpmath.exp(mpmath.mpf(j * (j - 1)) / (2 * variance))
            total += q**j * mpmath.binomial(order, j) * min(even, plain)
        return float(mpmath.log(total) / (order - 1))


@pytest.mark.parametrize(("rate", "sigma"), [(0.001, 1.0), (0.01, 5.0), (0.02, 200.0), (0.1, 3.0), (0.1, 50.0)])
def test_the_librarys_rdp_is_the_theorem_within_the_stated_error(rate: float, sigma: float) -> None:
    largest = math.log(1e6) / math.log1p(2 * rate)  # beyond, the library loses digits
    for order in [o for o in (2, 3, 8, 21, 40) if o <= largest]:
        renyi = RdpAccountant([order], dp.NeighboringRelation.REPLACE_ONE)
        renyi.compose(dp.SampledWithoutReplacementDpEvent(10**6, round(rate * 10**6), dp.GaussianDpEvent(sigma)))
        exact = without_replacement_rdp(rate, sigma, order)
        assert float(renyi._rdp[0]) == pytest.approx(exact, rel=1e-8)


def test_fixed_size_sampling_reads_the_multiplier_against_the_replace_one_distance() -> None:
    # With the whole population in every cohort there is no amplification: the Rényi divergence is α μ²/2.
    renyi = RdpAccountant([2, 8], dp.NeighboringRelation.REPLACE_ONE)
    renyi.compose(dp.SampledWithoutReplacementDpEvent(100, 100, dp.GaussianDpEvent(2.0)))
    assert list(renyi._rdp) == pytest.approx([2 / 8, 8 / 8])


def test_mixed_fixed_size_rounds_are_below_what_divergences_add_up_to() -> None:
    parts = [(Rounds(0.1, 4), Participation.every()), (Rounds(0.5, 50), fixed(0.02)), (Rounds(0.4, 20), fixed(0.01))]
    best = math.inf
    for order in range(16, 22):  # the best one is 19
        divergence = 4 * order * 0.1**2 / 2
        divergence += 50 * without_replacement_rdp(0.02, 2.0, order)
        divergence += 20 * without_replacement_rdp(0.01, 2.5, order)
        # Canonne, Kamath and Steinke 2020, Proposition 12.
        best = min(best, divergence + math.log((order - 1) / order) - (math.log(1e-6) + math.log(order)) / (order - 1))
    found = mixed_epsilon(parts, delta=1e-6)
    pairs = [(1 / math.sqrt(4 * 0.01), 1.0, 1), (2.0, 0.02, 50), (2.5, 0.01, 20)]
    losses = [
        privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=rate).self_compose(count)
        for sigma, rate, count in pairs
    ]
    least = losses[0].compose(losses[1]).compose(losses[2]).get_epsilon_for_delta(1e-6)
    assert 0.999 * least <= found <= 0.8 * best


# ------------------------------------------------------------------ rounds with integer noise, enumerated


@pytest.mark.parametrize(("clients", "trials", "rate"), [(2, 30, 0.5), (3, 40, 0.2), (2, 100, 0.05)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_guarantees_of_rounds_are_never_below_the_enumeration(
    clients: int, trials: int, rate: float, rounds: int
) -> None:
    protocol = Protocol.binomial(clients=clients, dim=1, clip_norm=1.0, levels=3, trials=trials)
    delta = 1e-3
    found = guarantee_over_rounds(protocol, delta, rounds=rounds, participation=fixed(rate)).epsilon
    middle, half = 1.0, protocol.clip_norm / protocol.scale
    high, low, half_way = (
        coordinate_law(u, clients * trials, 0.5, 3) for u in (middle + half, middle - half, middle + 0.3 * half)
    )
    for instead in (low, high, half_way):
        one, other = rate * high + (1 - rate) * instead, rate * low + (1 - rate) * instead
        assert hockey_stick(*composed([(one, other)] * rounds), found) <= delta * (1 + 1e-9)


def test_only_the_tails_of_rounds_the_client_is_in_count() -> None:
    protocol = Protocol.binomial(clients=10, dim=5, clip_norm=1.0, levels=3, trials=100)
    sampled = round_cost(Run.of(protocol, surviving=10, participation=fixed(0.1)), 1e-6)
    every = round_cost(Run.of(protocol, surviving=10), 1e-5)
    assert sampled.mu == every.mu
    assert 0.1 * every.tail_mass <= sampled.tail_mass <= 0.1000001 * every.tail_mass


# ------------------------------------------------------------------ ranges and assumptions


@pytest.mark.parametrize(
    ("mu", "rate", "count"), [(1e-6, 1e-6, 1), (100.0, 1e-6, 1), (100.0, 0.5, 10), (1.0, 0.01, 10**9), (5.0, 0.999, 3)]
)
@pytest.mark.filterwarnings("error")
def test_extremes_are_answered(mu: float, rate: float, count: int) -> None:
    rounds = [Rounds(mu, count)]
    found = [
        composed_delta(rounds, epsilon=e, participation=fixed(rate), interval=1e-3) for e in (0.0, 0.5, 5.0, 300.0)
    ]
    assert all(0.0 <= delta <= 1.0 for delta in found)
    assert found == sorted(found, reverse=True)
    # A client that is never drawn costs nothing.
    assert found[0] <= min(1.0, count * rate) * 1.001


def test_normal_tails_are_as_accurate_as_assumed() -> None:
    rng = np.random.default_rng(3)
    with mpmath.workdps(40):
        for x in rng.uniform(-3.0, 37.5, 1_000):
            exact = mpmath.ncdf(-mpmath.mpf(x))
            assert abs(mpmath.mpf(float(ndtr(-x))) / exact - 1) <= 1e-14 + x * x * 2.0**-52
        for x in 10.0 ** rng.uniform(-9, 1.5, 300):
            assert abs(mpmath.mpf(float(erf(x))) / mpmath.erf(mpmath.mpf(x)) - 1) <= 1e-14


@pytest.mark.parametrize("points", [COARSE_POINTS, FINE_POINTS])
def test_ffts_are_as_accurate_as_assumed(points: int) -> None:
    rng = np.random.default_rng(4)
    allowed = loss_sums._FFT_ERROR * math.log2(points)
    for scale in (0.0, 1.0, 50.0):
        masses = np.exp(-scale * rng.random(points) * np.arange(points) / points)
        masses[rng.integers(points)] += points
        exact = fft.rfft(masses.astype(np.longdouble))
        found = np.fft.rfft(masses)
        assert np.linalg.norm(found - exact) <= 0.2 * allowed * np.linalg.norm(exact)
        back = fft.irfft(found.astype(np.clongdouble), points)
        assert np.linalg.norm(np.fft.irfft(found, points) - back) <= 0.2 * allowed * np.linalg.norm(back)


@pytest.mark.parametrize("population", [3, 7, 49, 103])
def test_the_share_of_rounds_a_client_is_in_is_rounded_up(population: int) -> None:
    assert counted_tail(Participation.fixed_size(cohort=1, population=population)) > Fraction(1, population)
    assert counted_tail(Participation.every()) == counted_tail(fixed(1.0)) == 1.0


def test_what_rounding_took_from_losses_is_added_to_their_moments() -> None:
    losses = fixed_size._rough(SampledRounds(1.0, 0.01, 1), 1e-9)
    shorter = replace(losses, short=losses.short + 0.01)
    assert shorter.log_moment(7.0) == pytest.approx(losses.log_moment(7.0) + 0.07, rel=1e-9)


_KINDS = {
    "plain": [SampledRounds(1.0, 0.01, 1000)],
    "bold": [SampledRounds(3.0, 0.2, 3)],
    "always": [SampledRounds(0.1, 1.0, 50), SampledRounds(0.7, 0.3, 5)],
    "either": [SampledRounds(0.5, 0.1, 20, ((0.3, 0.2), (1.0, 0.02)))],
    "tiny": [SampledRounds(0.01, 0.001, 7)],
    "far": [SampledRounds(8.0, 0.05, 30)],
}


@pytest.mark.parametrize("name", _KINDS)
def test_known_profiles(name: str) -> None:
    kinds, values = _KINDS[name], dict[str, object]()
    for points in (COARSE_POINTS, 256):
        profile = sampled_profile(kinds, points)
        values[f"profile {points}"] = [profile(epsilon) for epsilon in (0.0, 0.01, 0.5, 2.0, 8.0, 30.0)]
    for kind in kinds:
        key = f"{kind.mu} {kind.rate}"
        values[f"farthest {key}"] = [kind._largest, *(kind.farthest(10.0**-n) for n in (0, 1, 5, 40, 300))]
        values[f"divergence {key}"] = [
            fixed_size.sampled_divergence(kind.mu, kind.rate, order) for order in (1.5, 3.0, 40.0)
        ]
        x = 0.5 * kind.mu + np.array([0.0, 0.1, 1.0, 5.0, 60.0])
        loss = fixed_size._loss(kind, x)
        values |= {f"loss {key}": loss, f"output {key}": fixed_size._output(kind, loss[:4])}
        for number, losses in enumerate(
            [fixed_size._rough(kind, 1e-9), fixed_size._pair(kind, np.linspace(0.0, 0.7, 40))]
        ):
            losses = replace(losses, short=losses.short + 0.01)
            powers = (0.0, 0.3, 4.0)
            values |= {
                f"losses {key} {number}": losses.loss,
                f"masses {key} {number}": losses.mass,
                f"rest {key} {number}": [losses.infinite, losses.short],
                f"moments {key} {number}": [losses.log_moment(power) for power in powers],
                f"means {key} {number}": [losses.mean(power) for power in powers],
                f"variances {key} {number}": [losses.variance(power) for power in powers],
            }
    for level in (1e-4, 1e-12):
        cut = loss_sums._Cut(kinds, 512, level)
        values[f"cut {level}"] = [cut.infinite, *(cut.delta(epsilon) for epsilon in (0.0, 0.3, 3.0))]
        values[f"powers {level}"] = [cut._best_power(epsilon) for epsilon in (0.01, 1.0, 10.0)]
        for top, length in ((1.0, 3.0), (6.0, 5.0)):
            sums = loss_sums._Sums(kinds, 512, level, top, length, 2.0, 5.0)
            values[f"sums {level} {top}"] = [
                *(sums._interval, sums._last, sums._scale, sums._shift, sums._infinite, sums._inexact, sums._error),
            ]
            values[f"deltas {level} {top}"] = [sums.delta(epsilon) for epsilon in (-3.0, 0.0, 0.5, 0.99, 1.0, 5.9)]
    known.check(
        "privacy/fixed_size", {f"{name} {key}": value for key, value in values.items()}, rel=1e-7, absolute=1e-299
    )


def test_pairs_of_rounds_stand_alone() -> None:
    kind = SampledRounds(0.5, 0.1, 20, ((0.3, 0.2), (1.0, 0.02)))
    alone = [SampledRounds(mu, rate, 20) for mu, rate in ((0.5, 0.1), (0.3, 0.2), (1.0, 0.02))]
    assert kind.pairs == alone
    assert alone[0].pairs == alone[:1]


def test_the_worst_of_several_pairs_counts_wherever_it_stands() -> None:
    pairs = [(0.2, 0.3), (1.5, 0.1)]
    alone = [fixed_size.sampled_profile([SampledRounds(*pair, 4)], 2**12) for pair in pairs]
    for first, other in (pairs, pairs[::-1]):
        both = fixed_size.sampled_profile([SampledRounds(*first, 4, (other,))], 2**12)
        for epsilon in (0.01, 0.5, 2.0):
            worst = max(profile(epsilon) for profile in alone)
            assert 0.99 * worst <= both(epsilon) <= 1.5 * worst


def test_errors_that_are_larger_than_anything_leave_a_bound() -> None:
    delta = sampled_profile([SampledRounds(1e-9, 0.5, 10**16)], 2**9)(0.5)
    assert 0.0 < delta <= 1.0
    assert sampled_profile([SampledRounds(100.0, 0.9, 10**6)], 2**9)(0.0) == 1.0


def test_windows_end_at_twice_the_largest_loss() -> None:
    # It holds all ε up to 1.05 times the one it is made for.
    cut = loss_sums._Cut([SampledRounds(0.1, 0.5, 1)], 2**10, 1e-8)
    found = [cut._new_sums(epsilon, 1.0, 0.0) is not None for epsilon in (300.0, 1142.0, 1144.0)]
    assert found == [True, True, False]


@pytest.mark.parametrize("rate", [0.5, 1e-4, 1e-12])
def test_losses_of_outputs_against_mpmath(rate: float) -> None:
    kind = SampledRounds(0.7, rate, 1)
    exponents = np.array([1e-9, 0.1, 5.0, 29.9, 30.1, 35.0, 300.0])
    with mpmath.workdps(40):
        exact = [float(mpmath.log1p(mpmath.mpf(rate) * mpmath.expm1(mpmath.mpf(x)))) for x in exponents]
    assert fixed_size._loss(kind, exponents / 0.7 + 0.35) == pytest.approx(exact, rel=1e-6, abs=0.0)
    assert fixed_size._loss(kind, exponents[2:] / 0.7 + 0.35) == pytest.approx(exact[2:], rel=1e-12, abs=0.0)


def test_the_largest_curve_is_the_largest_at_every_loss() -> None:
    generator = np.random.default_rng(1)
    for _ in range(100):
        loss, masses = np.cumsum(np.append(0.0, generator.uniform(0.1, 1.0, 7))), generator.exponential(1.0, (3, 8))
        stretched = np.maximum(1.0 - np.exp(loss[:-1, None] - loss), 0.0)  # e^-ε H at each loss but the last
        found = stretched @ fixed_size._largest(loss, masses**3)
        np.testing.assert_allclose(found, np.max(masses**3 @ stretched.T, axis=0), rtol=1e-11)


def test_errors_grow_with_the_number_of_rounds() -> None:
    count, unit = 10**12, 2.0**-53
    kind = SampledRounds(1e-7, 0.5, count)
    sums = loss_sums._Sums([kind], 512, 1e-9, 1.0, 2.0, 3.0, 5.0)
    losses = kind.on_grid(sums._interval, 512 * 16, 1e-9)
    tilted, scale = losses.tilted(3.0)
    steps = np.arange(len(losses.loss) // 2)
    masses = np.bincount(np.concatenate([steps, -steps]) % 512, tilted, 512)
    norms, roundings = math.sqrt(float(masses @ masses)), 8.0 * unit * 9
    assert sums._inexact == pytest.approx(
        math.exp(count * unit * (1e4 + 4.0 * (3.0 * losses.loss.max() + abs(scale)))), rel=1e-9
    )
    growth, norm = count * roundings * math.sqrt(512) * norms, float(np.linalg.norm(sums._sums))
    error = 1.1 * math.exp(growth) * (roundings * (count * norms + norm) + 4.0 * unit * count * norm)
    assert sums._error == pytest.approx(error, rel=1e-7)


@pytest.mark.parametrize(("mu", "rate"), [(0.3, 0.2), (2.0, 0.9)])
def test_masses_of_losses_are_on_the_safe_side(mu: float, rate: float) -> None:
    kind = SampledRounds(mu, rate, 1)
    for last in (0.5, 3.0):
        loss = np.linspace(0.0, last, 3)
        above, infinite, _ = fixed_size._positive(kind, loss)
        with mpmath.workdps(40):
            ends = [mpmath.mpf(float(x)) for x in fixed_size._output(kind, loss)]
            first = [(1 - mpmath.mpf(rate)) * mpmath.ncdf(-x) + mpmath.mpf(rate) * mpmath.ncdf(mu - x) for x in ends]
            assert 0 < infinite / first[-1] - 1 < 1e-10
            assert 0 < mpmath.fsum(map(float, above)) / (first[0] - first[-1]) - 1 < 1e-10


def test_outputs_reach_beyond_half_of_a_tiny_distance() -> None:
    assert SampledRounds(1e-4, 0.5, 1).farthest(1.0) == pytest.approx(0.5e-4 + 1e-3, rel=1e-12)


def test_nothing_is_added_for_sums_that_the_window_holds() -> None:
    kind, length = SampledRounds(1.0, 0.1, 1), 3.0
    on_grid = kind.on_grid(length / 510, 512 * 16, 1e-6)
    steps = len(on_grid.loss) // 2 - 1
    for short, added in ((0, False), (1, True)):
        top = (steps - short + 0.5) * length / 510
        sums = loss_sums._Sums([kind], 512, 1e-6, top, length, 2.0, 5.0)
        assert sums._last == steps - short
        assert (sums._infinite > on_grid.infinite * (1.0 + 1e-9)) == added


def test_windows_hold_as_many_sums_as_they_have_points() -> None:
    sums = loss_sums._Sums([SampledRounds(1.0, 0.1, 3)], 512, 1e-6, 1.0, 3.0, 2.0, 5.0)
    for first, inside in (
        (sums._last - 512, False),
        (sums._last - 511, True),
        (sums._last, True),
        (sums._last + 1, False),
    ):
        estimate, error = sums.delta((first - 0.5) * sums._interval)
        assert (0.0 < estimate < 10.0 and error >= sums._infinite) == inside, first
    assert sums.delta((sums._last - 512.5) * sums._interval) == (1.0, 0.0)
    sums._infinite = 0.0
    (estimate, error), sums._inexact = sums.delta(0.5), 2.0 * sums._inexact
    assert sums.delta(0.5) == pytest.approx((2.0 * estimate, 2.0 * error), rel=1e-12, abs=0.0)
