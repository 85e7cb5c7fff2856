"""Shares of discrete Laplace noise: an exact sampler, and pure differential privacy against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mpmath
import numpy as np
import pytest
from scipy import stats

from cpsgd import Aggregator, Protocol, RoundSimulator, Run, guarantee, plan
from cpsgd.audit import audit
from cpsgd.errors import ConditionError, GuaranteeError, ParameterError
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace, PolyaLaw, PolyaNoise
from cpsgd.mechanisms.interface import Search
from cpsgd.privacy import Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon, mixed_epsilon
from cpsgd.privacy.proofs import round_cost
from cpsgd.randomness import Keystream
from cpsgd.secagg import SecureParameters, Stage
from cpsgd.statistics import mean
from tests import known_values as known
from tests.secagg.rounds import new_round, play

FALSE_ALARM = 1e-6
DRAWS = 20_000


def mechanism(levels: int = 5, spread: int = 3, shares: int = 6, window: int = 4096) -> DiscreteLaplace:
    return DiscreteLaplace(levels=levels, spread=spread, shares=shares, window=window, coordinate_range=1.0)


def protocol(dim: int = 1, **fields: int) -> Protocol:
    return Protocol(clients=6, dim=dim, clip_norm=1.0, mechanism=mechanism(**fields), rotate=False)


def masses(spread: int, shape: float, reach: int) -> np.ndarray:
    """f(-reach), ..., f(reach) of the difference of two negative binomial variables, by summing it up."""
    k = np.arange(2000)
    one = stats.nbinom.pmf(k, shape, 1.0 - math.exp(-1.0 / spread))
    return np.array([float(np.sum(one[abs(z) :] * one[: len(one) - abs(z)])) for z in range(-reach, reach + 1)])


# ------------------------------------------------------------------ the law and the sampler


def test_as_many_clients_as_shares_add_up_to_discrete_laplace_noise() -> None:
    summands = PolyaLaw(3, 6, 6).summands(60.0)
    z = summands.first + np.arange(len(summands.mass))
    alpha = math.exp(-1.0 / 3.0)
    expected = (1.0 - alpha) / (1.0 + alpha) * alpha ** np.abs(z)
    assert summands.mass == pytest.approx(expected, rel=1e-9, abs=1e-24)


@pytest.mark.parametrize(("parts", "shares"), [(1, 6), (4, 6), (9, 6), (3, 1)])
def test_the_law_is_a_difference_of_negative_binomials(parts: int, shares: int) -> None:
    law = PolyaLaw(4, shares, parts)
    summands = law.summands(60.0)
    z = summands.first + np.arange(len(summands.mass))
    middle = np.abs(z) <= 50
    assert summands.mass[middle] == pytest.approx(masses(4, law.shape, 50), rel=1e-9)
    variance = parts * PolyaNoise(4, shares, 1000, 0).variance
    assert float(z.astype(float) ** 2 @ summands.mass) == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("count", "shares"), [(1, 5), (3, 5), (5, 5), (7, 5), (2, 1)])
def test_the_sampler_has_the_law(count: int, shares: int, at_once: bool) -> None:
    noise = PolyaNoise(2, shares, 1 << 16, 1 << 15)
    draw = noise.of_sum if at_once else noise.of_clients
    draws = draw(count, DRAWS, Keystream(bytes([count, shares, *range(14)]))) - count * (1 << 15)
    expected = masses(2, count / shares, 400) * DRAWS
    kept = expected >= 20.0
    observed = np.array([np.count_nonzero(draws == z) for z in np.arange(-400, 401)[kept]])
    rest = DRAWS - observed.sum(), DRAWS - expected[kept].sum()
    found = stats.chisquare([*observed, rest[0]], [*expected[kept], rest[1]])
    assert found.pvalue > FALSE_ALARM


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.2, 0.3])
def test_the_cumulant_is_that_of_the_law(slope: float) -> None:
    noise = PolyaNoise(3, 6, 1 << 16, 0)
    z = np.arange(-400, 401)
    exact = math.log(float(np.exp(slope * z) @ masses(3, 1 / 6, 400)))
    assert noise.cumulant(slope) == pytest.approx(exact, rel=1e-6, abs=1e-12)
    assert noise.cumulant(0.34) == math.inf


# ------------------------------------------------------------------ pure ε, against brute force


def exact_epsilon(law: PolyaLaw, distance: float) -> float:
    """The largest loss of one coordinate over all pairs of points at this distance, on a grid of fractions."""
    noise = masses(law.spread, law.shape, 60)

    def output(point: float) -> np.ndarray:
        below = math.floor(point)
        padded = np.zeros(len(noise) + 20)
        for level, weight in ((below, 1.0 - (point - below)), (below + 1, point - below)):
            padded[level : level + len(noise)] += weight * noise
        return padded

    worst = 0.0
    for start in np.linspace(0.0, 1.0, 9):
        first, second = output(start), output(start + distance)
        inside = slice(8 + math.ceil(distance), len(noise) - 8)
        ratios = np.log(first[inside] / second[inside])
        worst = max(worst, float(np.max(np.abs(ratios))))
    return worst


@pytest.mark.parametrize("parts", [1, 2, 5, 6, 9, 12])
@pytest.mark.parametrize("levels", [2, 3, 6])
def test_epsilon_covers_every_pair_of_neighbours_and_is_near_the_worst(parts: int, levels: int) -> None:
    found = guarantee(protocol(levels=levels), 0.0, surviving=parts)
    worst = exact_epsilon(PolyaLaw(3, 6, parts), levels - 1.0)
    assert (found.method, found.delta, found.tail) == ("discrete-laplace", 0.0, 0.0)
    assert worst <= found.epsilon * (1.0 + 1e-9)
    # Every unit of distance is counted as the worst of all; with fewer honest clients a large distance costs less.
    assert found.epsilon <= 1.25 * worst


def test_a_fraction_of_a_level_costs_more_than_its_share_and_is_covered() -> None:
    small = Protocol(clients=6, dim=1, clip_norm=0.1, mechanism=mechanism(), rotate=False)
    found = guarantee(small, 0.0).epsilon
    assert exact_epsilon(PolyaLaw(3, 6, 6), 0.4) <= found * (1.0 + 1e-9)
    assert found > 0.4 / 3.0


def test_epsilon_grows_as_honest_clients_go_missing_and_never_shrinks_below_that_of_all() -> None:
    found = [guarantee(protocol(), 0.0, surviving=n).epsilon for n in range(1, 13)]
    assert all(more >= fewer for more, fewer in pairwise(found[:6]))
    assert found[5:] == [found[5]] * 7
    assert guarantee(protocol(), 0.0, surviving=9, colluding=3).epsilon == found[5]


def test_coordinates_cost_by_the_sum_of_their_distances() -> None:
    one, four = guarantee(protocol(dim=1), 0.0).epsilon, guarantee(protocol(dim=4), 0.0).epsilon
    # √4 times the Euclidean distance, and a little more for the rounding of four coordinates.
    assert 2.0 * one <= four * (1.0 + 1e-9) <= 2.3 * one


@pytest.mark.parametrize("parts", [4, 6, 8])
def test_an_l1_distance_that_is_stated_covers_one_hot_vectors(parts: int) -> None:
    """Every output of two coordinates, for all pairs of one-hot vectors and zero, by brute force."""
    stated = {"replace_one_l1_distance": 2.0, "distance_reason": "rows are one-hot"}
    given = replace(protocol(dim=2, levels=9), **stated)
    found = guarantee(given, 0.0, surviving=parts)
    noise = masses(3, parts / 6, 60)
    steps = np.log(noise)

    def loss(apart: int) -> float:
        return float(np.max(np.abs(steps[20:-20] - steps[20 + apart : len(steps) - 20 + apart])))

    # Levels are a quarter apart: a one-hot vector is four levels from zero, in each of two coordinates.
    assert 2.0 * loss(4) <= found.epsilon * (1.0 + 1e-9) <= 2.0 * loss(4) * 1.4
    assert found.epsilon < guarantee(protocol(dim=2, levels=9), 0.0, surviving=parts).epsilon
    assert "L1 distance 2 because rows are one-hot" in str(found.assumption)
    # A vector and zero: nothing is stated about them.
    zero_out = {"adjacency": "zero-out", "surviving": parts}
    without = guarantee(protocol(dim=2, levels=9), 0.0, **zero_out)
    assert guarantee(given, 0.0, **zero_out).epsilon == without.epsilon
    assert Protocol.from_json(given.to_json()) == given


def test_a_stated_l1_distance_is_checked() -> None:
    reason = {"distance_reason": "one-hot"}
    for change, said in (
        ({"replace_one_l1_distance": 0.5, **reason}, "at least clip_norm"),
        ({"replace_one_l1_distance": 2.0}, "why no two vectors"),
        ({"replace_one_l1_distance": 2.0, "rotate": True, **reason}, "rotation keeps no L1"),
        ({"replace_one_l1_distance": math.inf, **reason}, "replace_one_l1_distance"),
    ):
        with pytest.raises(ParameterError, match=said):
            replace(protocol(dim=2), **change)
    with pytest.raises(ParameterError, match="says nothing of zero-out"):
        plan(100, 2, 1.0, 0.0, adjacency="zero-out", rotate=False, replace_one_l1_distance=2.0, **reason)


# ------------------------------------------------------------------ rounds


def test_pure_epsilon_adds_up_and_a_delta_buys_less() -> None:
    given = protocol(spread=200)
    one = guarantee(given, 0.0).epsilon
    many = guarantee(Run.of(given, rounds=100), 0.0)
    assert many.epsilon == pytest.approx(100 * one, rel=1e-9)
    assert guarantee(Run.of(given, rounds=100), 1e-6).epsilon < 0.7 * many.epsilon
    once = guarantee(Run.of(given, rounds=100, participation="once"), 0.0)
    assert once.epsilon == one
    sampled = guarantee(Run.of(given, rounds=100, participation="fixed-size:0.1"), 0.0)
    assert sampled.epsilon == pytest.approx(100 * math.log1p(0.1 * math.expm1(one)), rel=1e-9)


def test_as_an_equivalent_gaussian_it_composes_with_others() -> None:
    cost = round_cost(Run.of(protocol()), 0.0)
    both = [(cost, Participation.every()), (Rounds(0.1, 10), Participation.every())]
    assert mixed_epsilon(both, delta=1e-6) > composed_epsilon([both[1][0]], delta=1e-6, participation=both[1][1])
    with pytest.raises(ConditionError, match="pure"):
        mixed_epsilon(both, delta=0.0)
    # Randomized response has the trade-off curve that touches the Gaussian's: Φ(μ/2) = e^ε/(1 + e^ε).
    assert stats.norm.cdf(cost.mu / 2.0) == pytest.approx(1.0 / (1.0 + math.exp(-cost.pure)), rel=1e-9)


# ------------------------------------------------------------------ everywhere mechanisms go


def test_a_plan_at_delta_zero_keeps_epsilon_and_predicts_its_error() -> None:
    found = plan(clients=200, dim=2, epsilon=1.0, delta=0.0, bits=14, colluding=20, dropout=0.1)
    chosen = found.protocol.mechanism
    assert isinstance(chosen, DiscreteLaplace)
    assert (chosen.shares, found.guarantee.delta, found.guarantee.method) == (160, 0.0, "discrete-laplace")
    assert 0.99 < found.guarantee.epsilon <= 1.0
    assert found.overflow_probability <= 1e-9
    assert Protocol.from_json(found.protocol.to_json()) == found.protocol
    vectors = np.full((180, 2), 0.4)
    errors = []
    for round in range(200):
        simulator = RoundSimulator(found.protocol, round=0, seed=round)
        simulator.add(vectors.astype(np.float32))
        errors.append(float(np.sum((simulator.mean() - 0.4) ** 2)))
    # 200 rounds of two coordinates: the mean of squares of Laplace noise is within a third.
    assert np.mean(errors) == pytest.approx(found.error.total, rel=0.5)
    with pytest.raises(ParameterError, match="pure differential privacy"):
        plan(clients=200, dim=2, epsilon=1.0, delta=0.0, mechanism="binomial")


def test_messages_and_secure_sums_wrap_around() -> None:
    given = protocol(dim=3, window=128)
    assert given.modulus == 128
    with pytest.raises(ParameterError, match="modulus=128"):
        Protocol(clients=6, dim=3, clip_norm=1.0, mechanism=given.mechanism, rotate=False, modulus=256)
    aggregator, total = Aggregator(given, round=0), np.zeros(3, dtype=np.uint64)
    for _ in range(6):
        aggregator.add(given.encode([0.5, 0.0, -0.5], round=0))
        total += given.encode_integers([0.5, 0.0, -0.5], round=0)
    assert np.all(total % 128 < 128)
    for found in (aggregator.mean(), given.decode_sum(total % 128, 6, round=0)):
        assert np.all(np.abs(found) < 64 * given.scale / 6)
    assert np.array_equal(given.decode_sum(total, 6, round=0), given.decode_sum(total % 128, 6, round=0))


def test_secure_aggregation_reveals_the_sum_modulo_the_window() -> None:
    found = plan(clients=8, dim=3, epsilon=4.0, delta=0.0, bits=14, dropout=0.25, secure=True).protocol
    started = new_round(SecureParameters.for_protocol(found, round=7, dropout=0.25))
    started.values = np.stack([found.encode_integers([0.5, 0.0, -0.5], round=7) for _ in range(8)])
    total = play(started, {Stage.MASK: frozenset({2})})
    assert len(total.survivors) == 7
    expected = started.values[list(total.survivors)].astype(np.uint64).sum(axis=0) % found.modulus
    assert total.sums.tolist() == expected.tolist()
    release = found.release(7)
    assert release is not None
    assert release.epsilon <= 4.0


def test_sums_that_are_not_reduced_would_show_more_than_epsilon() -> None:
    given = protocol(levels=3, spread=8, shares=3, window=64)
    proved = guarantee(given, 0.0, surviving=3).epsilon
    noise, middle = masses(8, 1 / 3, 1000), round(given.mechanism.centre) - 1

    def sums(level: int) -> np.ndarray:
        """The law of a sum of three clients' integers, of whom the others are at level 1."""
        laws = []
        for each in (level, 1, 1):
            law = np.zeros(64)
            np.add.at(law, (np.arange(-1000, 1001) + each + middle) % 64, noise)
            laws.append(law)
        return np.convolve(np.convolve(laws[0], laws[1]), laws[2])

    def reduced(law: np.ndarray) -> np.ndarray:
        return np.bincount(np.arange(len(law)) % 64, weights=law)

    assert np.max(np.abs(np.log(reduced(sums(2)) / reduced(sums(0))))) <= proved
    assert np.max(np.abs(np.log(sums(2) / sums(0)))) > 1.2 * proved
    aggregator = Aggregator(given, round=0)
    for _ in range(40):
        aggregator.add(given.encode([0.3], round=0))
    assert aggregator.sums.max() < 64
    again = Aggregator.restore(given, aggregator.save())
    assert np.array_equal(again.sums, aggregator.sums)


def test_sampling_hides_no_epsilon_that_is_too_large_for_an_exponential() -> None:
    loud = protocol(levels=4097, spread=1, window=1 << 16)
    alone = guarantee(loud, 0.0).epsilon
    assert alone > 4096
    for delta in (0.0, 1e-6):
        sampled = guarantee(Run.of(loud, participation="fixed-size:0.5"), delta).epsilon
        assert alone - math.log(2.0) <= sampled <= alone * (1.0 + 1e-9)
    assert round_cost(Run.of(loud), 0.0).mu == pytest.approx(2.0 * math.sqrt(2.0 * alone), rel=0.01)
    # Masses that far apart are beyond what is summed up; the loss per step bounds theirs.
    assert guarantee(loud, 0.0, surviving=3).epsilon > alone


@pytest.mark.parametrize("spread", [1, 40, 4096])
def test_the_equivalent_gaussian_is_never_too_quiet(spread: int) -> None:
    for reach in (1.0, 1e3, 1e6, 1e9):
        wide = Protocol(
            clients=6,
            dim=1,
            clip_norm=1.0,
            rotate=False,
            mechanism=replace(mechanism(spread=spread), coordinate_range=reach),
        )
        cost = round_cost(Run.of(wide), 0.0)
        with mpmath.workdps(40):
            below = mpmath.ncdf(-mpmath.mpf(cost.mu) / 2)
            assert mpmath.log(1 - below) - mpmath.log(below) >= cost.pure


def test_a_release_of_too_few_is_refused_with_the_true_epsilon() -> None:
    found = plan(clients=20, dim=1, epsilon=1.0, delta=0.0, bits=12)
    release = found.protocol.release(20)
    assert release is not None
    assert release.epsilon <= 1.0
    with pytest.raises(GuaranteeError, match="at δ = 0") as refusal:
        found.protocol.release(10)
    assert refusal.value.epsilon == guarantee(found.protocol, 0.0, surviving=10).epsilon > 1.0


def test_a_ledger_adds_up_pure_epsilon(tmp_path: Path) -> None:
    given = protocol(spread=40)
    one = guarantee(given, 0.0).epsilon
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=3.5 * one, delta=0.0))
    event = RoundEvent(protocol=given, survivors=6)
    for count in (1, 2, 3):
        ledger.reserve("people", event)
        assert ledger.total("people").epsilon == pytest.approx(count * one, rel=1e-9)
    with pytest.raises(ValueError, match="budget"):
        ledger.reserve("people", event)
    other = protocol(spread=400)
    ledger.reserve("people", RoundEvent(protocol=other, survivors=6))
    expected = 3 * one + guarantee(other, 0.0).epsilon
    assert ledger.total("people").epsilon == pytest.approx(expected, rel=1e-9)
    coins = Protocol.binomial(clients=6, dim=1, clip_norm=1.0, levels=2, trials=40)
    with pytest.raises(ParameterError, match="pure differential privacy"):
        ledger.reserve("people", RoundEvent(protocol=coins, survivors=6))


def test_sampled_and_other_pure_rounds_of_a_ledger_are_cited_as_such(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=10.0, delta=0.0))
    given = protocol(spread=40)
    one = guarantee(given, 0.0).epsilon
    for number, participation in enumerate(("every", "fixed-size:0.1")):
        event = RoundEvent(protocol=given, survivors=6, participation=participation, round=number)
        ledger.reserve("people", event)
    total = ledger.total("people")
    assert total.epsilon == pytest.approx(one + math.log1p(0.1 * math.expm1(one)), rel=1e-9)
    assert total.method == "basic composition"
    assert "discrete Laplace" in total.citation
    assert "Gaussian certificate" not in total.citation


@pytest.mark.parametrize("accounting", ["adaptive", "adaptive-renyi", "adaptive-renyi:8"])
def test_adaptive_budgets_need_a_delta(accounting: str) -> None:
    with pytest.raises(ParameterError, match="delta above 0"):
        Budget(population="people", epsilon=1.0, delta=0.0, accounting=accounting)


def test_a_column_of_a_table_has_a_mean_with_pure_privacy() -> None:
    ages = np.random.default_rng(0).normal(40.0, 10.0, size=3000)
    found = mean({"age": ages}, columns=["age"], bounds={"age": (0.0, 100.0)}, epsilon=1.0, delta=0.0)
    assert "at δ = 0" in repr(found)
    # Laplace noise of 100/3000: beyond 20 times that with a probability of e^-20.
    value = float(repr(found).partition("age ")[2].partition(" ")[0])
    assert value == pytest.approx(float(np.clip(ages, 0.0, 100.0).mean()), abs=20 * 100 / 3000)


def test_an_audit_finds_nothing_wrong() -> None:
    near = {"replace_one_l1_distance": 1.2, "distance_reason": "the audit's pairs are made so"}
    for given in (protocol(window=1 << 16), replace(protocol(dim=2, window=1 << 16), **near)):
        found = audit(given, rounds=1000, seed=1, delta=1e-3)
        assert found.passed, str(found)


def test_bad_parameters_are_refused() -> None:
    for change in ({"spread": -1}, {"spread": 1 << 13}, {"shares": 0}, {"window": 3}, {"levels": 1}):
        with pytest.raises(ParameterError, match=next(iter(change))):
            mechanism(**change)
    with pytest.raises(ConditionError, match="spread=0"):
        guarantee(protocol(spread=0), 0.0)


# ------------------------------------------------------------------ parts


def test_known_losses() -> None:
    values: dict[str, object] = {}
    for spread, shares, parts in ((1, 6, 1), (3, 6, 5), (40, 2, 1), (3, 6, 6), (3, 6, 20)):
        law = PolyaLaw(spread, shares, parts)
        values[f"step {spread} {parts}"] = law.step_loss
        values[f"losses {spread} {parts}"] = [law.losses(steps) for steps in (1, 2, 9)]
        count = len(law._masses(120.0))
        assert law.losses(count) == math.inf > law.losses(count - 1)
        values[f"masses {spread} {parts}"] = law._masses(9.0)
    # Cut off so early that what is left out counts.
    coarse = PolyaLaw(40, 2, 1)
    few = np.array([1.0, 0.4, 0.3])
    object.__setattr__(coarse, "_masses", lambda nats: few)
    values["coarse"] = [coarse.losses(1), coarse.losses(2)]
    noise = PolyaNoise(3, 4, 64, 30)
    values["noise"] = [noise.variance, noise.largest, noise.mean, PolyaNoise(0, 4, 64, 30).variance]
    values["cumulant"] = [noise.cumulant(slope) for slope in (0.0, 0.1, 0.3, 0.34)]
    values["silent"] = [
        PolyaNoise(0, 4, 64, 30).cumulant(9.0),
        *PolyaNoise(0, 4, 64, 30).of_sum(3, 2, Keystream(bytes(16))),
    ]
    for count in (1, 4, 6, 9):
        values[f"drawn {count}"] = noise.of_sum(count, 40, Keystream(count.to_bytes(16, "little")))
    known.check("mechanisms/discrete-laplace", values)
    assert [len(part) for part in (noise.table().high, noise.table().low)] == [0, 0]
    assert noise.table().base == 0


def test_as_many_honest_clients_as_shares_may_be_planned_for() -> None:
    found = []
    for honest, values in ((2**24, 64), (2**24 + 1, 64), (9, 2**32 - 1), (9, 2**32)):
        search = Search(values, honest, 1e-20, 3, 1.0, False, lambda _: 9.0, lambda _: True)
        found.append(next(DiscreteLaplace.candidates(search), None) is not None)
    assert found == [True, False, True, False]
