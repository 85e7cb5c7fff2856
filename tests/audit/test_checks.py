"""Each check allows what chance does and no more."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd import Protocol
from cpsgd.audit import checks
from cpsgd.audit.checks import Check, Played
from cpsgd.audit.sum_law import SumLaw
from cpsgd.mechanisms import Coins, LazyCoins

FALSE_ALARM = 1e-6
DIM = 16
PROTOCOL = Protocol.binomial(clients=1, dim=DIM, clip_norm=1.0, levels=4, trials=100)
LAW = SumLaw(PROTOCOL, [(np.full(DIM, 1.0), 1)])


def batch(exact: np.ndarray) -> Played:
    return Played("test", LAW, 0.0, exact, np.arange(len(exact)))


def honest(rounds: int, seed: int = 1) -> np.ndarray:
    return 1.0 + np.random.default_rng(seed).binomial(100, 0.5, size=(rounds, DIM))


def uniform(exact: np.ndarray) -> np.ndarray:
    return LAW.uniform(batch(exact).sums, np.random.default_rng(2))


@pytest.mark.parametrize("trials", [1, 20, 1_000, 100_000])
@pytest.mark.parametrize("p", [0.5, 0.01])
@pytest.mark.parametrize("false_alarm", [0.1, 1e-3, 1e-8])
def test_bennett_bounds_coins(trials: int, p: float, false_alarm: float) -> None:
    reach = checks.bennett(trials * p * (1 - p), 1.0, false_alarm)
    above = binom.sf(math.ceil(trials * p + reach) - 1, trials, p)
    below = binom.cdf(math.floor(trials * p - reach), trials, p)
    assert above + below <= false_alarm


def test_bennett_is_not_idle() -> None:
    # With many coins, within an eighth of the normal law's quantile; with one that is rare, one success is too many.
    assert checks.bennett(1e6, 1.0, 1e-6) < 1.125 * 4.8916 * 1e3
    assert 0.0 < checks.bennett(1e-9, 1.0, 1e-6) < 1.0
    assert checks.bennett(0.0, 1.0, 1e-6) < 0.1


@pytest.mark.parametrize("variance", [1e-12, 1e-3, 1.0, 1e5, 1e12])
def test_bennett_solves_its_equation(variance: float) -> None:
    reach = float(checks.bennett(variance, 0.5, 1e-6))
    ratio = 0.5 * reach / variance
    nats = variance / 0.25 * ((1.0 + ratio) * math.log1p(ratio) - ratio)
    assert nats == pytest.approx(math.log(2e6), rel=1e-3)


def all_checks(exact: np.ndarray, numbers: np.ndarray, false_alarm: float, law: SumLaw = LAW) -> list[Check]:
    played = [Played("test", law, 0.0, exact, np.arange(len(exact)))]
    return [
        checks.unbiased(played, false_alarm),
        checks.spread(played, [numbers], false_alarm),
        checks.distribution(played, [numbers], false_alarm),
        checks.tails(played, [numbers], false_alarm),
        checks.remainders(played, false_alarm),
        checks.quiet(numbers, false_alarm),
        checks.coordinates(numbers, false_alarm),
        checks.rounds(numbers, false_alarm),
        checks.repeats(played, false_alarm),
    ]


def test_honest_sums_pass_all_checks() -> None:
    for seed in range(20):
        exact = honest(500, seed)
        found = [checks.integers([batch(exact)]), *all_checks(exact, uniform(exact), FALSE_ALARM)]
        assert [check.name for check in found if not check.passed] == []


def test_false_alarms_are_as_rare_as_stated() -> None:
    # At a rate that can be seen. With a true rate of 0.1, more than 65 of 300 have probability below 1e-9.
    alarms: Counter[str] = Counter()
    for seed in range(300):
        exact = honest(60, seed)
        numbers = LAW.uniform(batch(exact).sums, np.random.default_rng(1_000 + seed))
        alarms.update(check.name for check in all_checks(exact, numbers, 0.1) if not check.passed)
    assert binom.sf(65, 300, 0.1) < 1e-9
    assert max(alarms.values(), default=0) <= 65
    # Some of the limits are exact, so that silence would be a bug.
    assert alarms["quiet"] > 0


# Sums of few coins, whose law is coarse: two clients whose points differ, in every coordinate the same.
COINS = [
    Coins(coins=1, theta=0.3, coordinate_range=0.5),
    Coins(coins=5, theta=0.1, coordinate_range=0.5),
    LazyCoins(rate=0.2, theta=0.5, coordinate_range=0.5),
]
POINTS = (0.0, 0.75)


def tossed(mechanism: Coins | LazyCoins, rounds: int, seed: int) -> np.ndarray:
    generator, total = np.random.default_rng(seed), np.zeros((rounds, DIM))
    for point in POINTS:
        odds = 0.5 + mechanism.theta * (2.0 * point - 1.0)
        if isinstance(mechanism, Coins):
            total += generator.binomial(mechanism.coins, odds, size=total.shape)
        else:
            heads = generator.random(total.shape) < odds
            total += np.where(generator.random(total.shape) < mechanism.rate, 2 * heads, 1)
    return total


@pytest.mark.parametrize("mechanism", COINS, ids=lambda mechanism: mechanism.describe())
def test_false_alarms_of_coins_are_as_rare_as_stated(mechanism: Coins | LazyCoins) -> None:
    protocol = Protocol(clients=2, dim=DIM, clip_norm=1.0, mechanism=mechanism)
    law = SumLaw(protocol, [(np.full(DIM, point), 1) for point in POINTS])
    alarms: Counter[str] = Counter()
    for seed in range(300):
        exact = tossed(mechanism, 60, seed)
        numbers = law.uniform(exact.astype(np.int64), np.random.default_rng(1_000 + seed))
        alarms.update(check.name for check in all_checks(exact, numbers, 0.1, law) if not check.passed)
    assert max(alarms.values(), default=0) <= 65
    assert alarms["quiet"] > 0


def test_vectors_that_count_for_more_are_found_in_all_rounds_together() -> None:
    # A fiftieth more of what 40 vectors add up to: too little for each of them.
    generator = np.random.default_rng(4)
    points = generator.uniform(0.0, 3.0, size=(40, DIM))
    laws = [SumLaw(PROTOCOL, [(row, 1)]) for row in points]
    honest_sums = [law.sample(500, generator) for law in laws]
    longer = [
        sums + np.where(generator.random(sums.shape) < 0.2 * np.abs(row - 1.5), np.sign(row - 1.5), 0.0)
        for sums, row in zip(honest_sums, points, strict=True)
    ]
    for played, passed in ((honest_sums, True), (longer, False)):
        batches = [Played("test", law, 0.0, sums, np.arange(500)) for law, sums in zip(laws, played, strict=True)]
        assert checks.unbiased(batches, FALSE_ALARM).passed is passed
    assert all(
        checks.unbiased([Played("test", law, 0.0, sums, np.arange(500))], FALSE_ALARM).passed
        for law, sums in zip(laws, longer, strict=True)
    )


def test_integers() -> None:
    exact = honest(10)
    assert checks.integers([batch(exact + 0.1)]).passed
    exact[3, 2] += 0.3
    assert not checks.integers([batch(exact)]).passed
    exact[3, 2] = math.nan
    assert not checks.integers([batch(exact)]).passed


def test_what_is_no_number_counts_as_far_away() -> None:
    exact = honest(2)
    exact[0, :3] = [math.nan, math.inf, -math.inf]
    assert batch(exact).sums[0, :3].tolist() == [2**52, 2**52, -(2**52)]


def test_a_shift_is_found_in_one_coordinate_and_in_all() -> None:
    exact = honest(2_000)
    standard_error = 5.0 / math.sqrt(2_000)
    one = exact.copy()
    one[:, 3] += 1.0
    assert not checks.unbiased([batch(one)], FALSE_ALARM).passed
    # A shift of two standard errors shows only where all coordinates are added up: 2 · √2000 · 16 / √16.
    many = exact.copy()
    many[: int(4.0 * standard_error * 2_000)] += 1.0
    assert not checks.unbiased([batch(many)], FALSE_ALARM).passed


def test_what_pushes_outwards_is_found_though_it_cancels_out() -> None:
    law = SumLaw(PROTOCOL, [(np.where(np.arange(DIM) % 2, 3.0, 0.0), 1)])
    exact = np.where(np.arange(DIM) % 2, 3.0, 0.0) + np.random.default_rng(4).binomial(100, 0.5, size=(1_000, DIM))
    for push, passed in ((0.0, True), (0.5, False)):
        pushed = exact.copy()
        pushed[: int(push * 1_000)] += law.outward
        played = Played("test", law, 0.0, pushed, np.arange(1_000))
        assert checks.unbiased([played], FALSE_ALARM).passed is passed
    pushed = exact + law.outward
    played = Played("test", law, 0.0, pushed, np.arange(1_000))
    assert not checks.distribution([played], [law.uniform(played.sums, np.random.default_rng(5))], FALSE_ALARM).passed


def test_resolution_is_forgiven() -> None:
    exact = honest(2_000)
    exact[:, 3] += 1.0
    assert checks.unbiased([Played("test", LAW, 1.0, exact, np.arange(2_000))], FALSE_ALARM).passed


@pytest.mark.parametrize(("trials", "p"), [(1, 0.5), (4, 0.5), (12, 0.5), (40, 0.5), (3, 0.02), (30, 0.9)])
@pytest.mark.parametrize("side", [-1, 1])
def test_resolution_is_forgiven_beyond_the_least_and_the_largest_sum(trials: int, p: float, side: int) -> None:
    # On a level there is nothing to round; a point that the codec's resolution moves off it is rounded once in a while.
    protocol = Protocol.binomial(clients=1, dim=DIM, clip_norm=1.0, levels=101, trials=trials, p=p)
    law = SumLaw(protocol, [(np.full(DIM, 50.0), 1)])
    generator = np.random.default_rng(trials)
    noise = generator.binomial(trials, p, size=(3_000, DIM))
    exact = 50.0 + noise + side * (generator.random(noise.shape) < 4e-4)
    played = [Played("test", law, 4.2e-4, exact, np.arange(len(exact)))]
    numbers = [law.uniform(played[0].sums, generator)]
    found = [
        checks.unbiased(played, FALSE_ALARM),
        checks.spread(played, numbers, FALSE_ALARM),
        checks.distribution(played, numbers, FALSE_ALARM),
        checks.tails(played, numbers, FALSE_ALARM),
        checks.remainders(played, FALSE_ALARM),
        checks.quiet(numbers[0], FALSE_ALARM),
    ]
    assert [check.name for check in found if not check.passed] == []


def test_half_the_variance_is_found() -> None:
    exact = 26.0 + np.random.default_rng(3).binomial(50, 0.5, size=(1_000, DIM))
    assert checks.unbiased([batch(exact)], FALSE_ALARM).passed
    assert not checks.distribution([batch(exact)], [uniform(exact)], FALSE_ALARM).passed


def test_noise_that_is_a_little_narrow_is_found() -> None:
    exact = 6.0 + np.random.default_rng(3).binomial(90, 0.5, size=(4_000, DIM))
    assert not checks.spread([batch(exact)], [uniform(exact)], FALSE_ALARM).passed
    # In one coordinate, and for one of two vectors.
    one = honest(2_000)
    one[:, 5] = 51.0 + np.rint(0.7 * (one[:, 5] - 51.0))
    assert not checks.spread([batch(one)], [uniform(one)], FALSE_ALARM).passed
    batches = [batch(honest(5_000)), batch(exact[:1_000])]
    numbers = [uniform(played.exact) for played in batches]
    assert checks.spread(batches[:1], numbers[:1], FALSE_ALARM).passed
    narrow = 51.0 + np.rint(0.5 * (honest(40) - 51.0))
    batches[1] = batch(narrow)
    assert not checks.spread(batches, [numbers[0], uniform(narrow)], FALSE_ALARM).passed


def test_another_law_in_one_coordinate_is_found() -> None:
    exact = honest(2_000)
    exact[:, 5] = np.random.default_rng(6).choice([46.0, 56.0], size=2_000)
    assert not checks.distribution([batch(exact)], [uniform(exact)], FALSE_ALARM).passed


def test_tails_that_are_missing_or_too_heavy_are_found() -> None:
    exact = honest(2_000)
    assert checks.tails([batch(exact)], [uniform(exact)], FALSE_ALARM).passed
    cut = np.clip(exact, 51.0 - 13.0, 51.0 + 13.0)
    assert not checks.tails([batch(cut)], [uniform(cut)], FALSE_ALARM).passed
    wild = exact.copy()
    wild[7, 3] = 96.0  # nine standard deviations
    assert not checks.tails([batch(wild)], [uniform(wild)], FALSE_ALARM).passed
    wild[7, 3] = 500.0
    assert not checks.tails([batch(wild)], [uniform(wild)], FALSE_ALARM).passed


def test_steps_of_two_are_found_in_all_coordinates_and_in_one() -> None:
    exact = honest(1_000)
    assert checks.remainders([batch(exact)], FALSE_ALARM).passed
    one = exact.copy()
    one[:, 3] -= one[:, 3] % 2.0
    assert not checks.remainders([batch(one)], FALSE_ALARM).passed
    few = exact[:60]
    few = few - few % 2.0
    assert not checks.remainders([batch(few)], FALSE_ALARM).passed


def test_one_quiet_round_is_found() -> None:
    exact = honest(2_000)
    assert checks.quiet(uniform(exact), FALSE_ALARM).passed
    exact[77] = 51.0
    assert not checks.quiet(uniform(exact), FALSE_ALARM).passed


def test_a_check_without_a_limit_passes() -> None:
    assert Check("name", "question", 5.0, None).passed
    assert Check("name", "question", 5.0, 5.0).passed
    assert not Check("name", "question", 5.1, 5.0).passed
