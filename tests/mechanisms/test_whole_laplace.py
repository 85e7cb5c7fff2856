"""Noise in whole levels: the sampler, pure differential privacy by enumeration, and clients that keep to no level."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cpsgd import Aggregator, Protocol, RoundSimulator, Run, guarantee, plan
from cpsgd.audit import audit
from cpsgd.codec import pipeline
from cpsgd.errors import InfeasibleError, NonFiniteError, ParameterError
from cpsgd.mechanisms.discrete_laplace import PolyaLaw, PolyaNoise
from cpsgd.mechanisms.whole_laplace import WholeLaplace
from cpsgd.neighbours import Adjacency
from cpsgd.planner import Requirements
from cpsgd.randomness import Keystream

FALSE_ALARM = 1e-6
DRAWS = 20_000
ROOM = 1.0 + 2.0**-20
HALVES: dict[str, Any] = {"clip_norm": 0.5 * ROOM, "levels": (2, 0.5), "rotate": False}
ONES: dict[str, Any] = {"clip_norm": ROOM, "levels": (3, 1.0), "rotate": False}


def mechanism(levels: int = 3, *, spread: int = 1, divisor: int = 2, shares: int = 3, reach: float = 1.0) -> Any:
    return WholeLaplace(
        levels=levels, coordinate_range=reach, spread=spread, divisor=divisor, shares=shares, window=512
    )


def protocol(levels: int = 3, *, dim: int = 3, clip_norm: float = ROOM, **fields: Any) -> Protocol:
    return Protocol(clients=3, dim=dim, clip_norm=clip_norm, mechanism=mechanism(levels, **fields), rotate=False)


def masses(rate: float, shape: float, reach: int) -> np.ndarray:
    """f(-reach), ..., f(reach) of the difference of two negative binomial variables, by summing it up."""
    k = np.arange(4000)
    one = stats.nbinom.pmf(k, shape, -math.expm1(-rate))
    return np.array([float(np.sum(one[abs(z) :] * one[: len(one) - abs(z)])) for z in range(-reach, reach + 1)])


def rounded(given: Protocol, vector: Any) -> np.ndarray:
    """What noise is added to, in whole levels from the lowest: the encoder's own way, with its noise left out."""
    silent = replace(given, mechanism=given.mechanism.without_noise(), modulus=None)
    return pipeline.integers(silent, vector, 0).astype(np.int64)


# ------------------------------------------------------------------ the law and the sampler


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("count", "shares", "spread", "divisor"), [(1, 5, 7, 3), (3, 3, 1, 2), (7, 5, 1, 2), (2, 1, 3, 2), (4, 5, 5, 2)]
)
def test_the_sampler_has_the_law(count: int, shares: int, spread: int, divisor: int, at_once: bool) -> None:
    noise = PolyaNoise(spread, shares, 1 << 16, 1 << 15, divisor)
    draw = noise.of_sum if at_once else noise.of_clients
    draws = draw(count, DRAWS, Keystream(bytes([count, shares, spread, *range(13)]))) - count * (1 << 15)
    expected = masses(divisor / spread, count / shares, 200) * DRAWS
    kept = expected >= 20.0
    observed = np.array([np.count_nonzero(draws == z) for z in np.arange(-200, 201)[kept]])
    rest = DRAWS - observed.sum(), DRAWS - expected[kept].sum()
    assert stats.chisquare([*observed, rest[0]], [*expected[kept], rest[1]]).pvalue > FALSE_ALARM
    variance = float(np.arange(-200, 201) ** 2 @ masses(divisor / spread, count / shares, 200))
    assert count * noise.variance == pytest.approx(variance, rel=1e-9)


def test_messages_and_sums_decode_to_levels() -> None:
    given = protocol(spread=1, divisor=100)  # next to no noise
    aggregator = Aggregator(given, round=0)
    for vector in ([1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]):
        aggregator.add(given.encode(vector, round=0))
    assert np.array_equal(np.rint(3.0 * aggregator.mean()), [1.0, 0.0, -1.0])
    simulator = RoundSimulator(given, 0, seed=1)
    simulator.add(np.eye(3, dtype=np.float32))
    assert np.array_equal(np.rint(3.0 * simulator.mean()), [1.0, 1.0, 1.0])
    assert Protocol.from_json(given.to_json()) == given


# ------------------------------------------------------------------ pure ε, by enumeration


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(("spread", "divisor"), [(1, 2), (2, 3), (1, 1), (7, 5)])
@pytest.mark.parametrize("levels", [2, 4])
def test_one_coordinate_costs_exactly_its_levels(parts: int, spread: int, divisor: int, levels: int) -> None:
    """All outputs of the sum, for every value of one client, on levels or between two."""
    given = protocol(levels, dim=1, clip_norm=1.0, spread=spread, divisor=divisor)
    found = guarantee(given, 0.0, surviving=parts)
    noise = masses(divisor / spread, parts / 3, 60)
    outputs = []
    for share in (0.0, 0.25, 0.5, 1.0):
        for low in range(levels - 1):
            outputs.append(np.convolve(noise, np.r_[np.zeros(low), 1.0 - share, share, np.zeros(levels - 2 - low)]))
    # What wraps around is cut off; ratios there are those further in.
    inside = slice(2 * levels, -2 * levels)
    worst = max(float(np.max(np.log(a[inside] / b[inside]))) for a, b in itertools.permutations(outputs, 2))
    assert worst <= found.epsilon * (1.0 + 1e-9)
    if parts >= 3:
        assert found.epsilon == pytest.approx((levels - 1) * divisor / spread, rel=1e-9)
        # With more honest clients than shares the tails lose as much as is claimed, further out than these.
        assert worst >= (0.999 if parts == 3 else 0.8) * found.epsilon
    assert (found.delta, found.assumption) == (0.0, None)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_several_coordinates_cost_the_farthest_whole_vectors(parts: int) -> None:
    """Every grid point within the norm, every pair of them, and the exact loss of each."""
    for clip_norm, dim in ((ROOM, 3), (1.5, 3), (2.0, 2), (math.sqrt(2.0) * ROOM, 4)):
        given = protocol(5, dim=dim, clip_norm=clip_norm, reach=2.0, spread=3, divisor=2)
        points = np.array([r for r in itertools.product(range(-2, 3), repeat=dim) if math.hypot(*r) <= clip_norm])
        apart = np.abs(points[:, None] - points[None, :])
        steps = given.levels_apart(Adjacency.REPLACE_ONE)
        assert steps is not None
        assert apart.sum(axis=2).max() <= steps <= 2 * math.floor(clip_norm**2)
        assert np.abs(points).sum(axis=1).max() <= (given.levels_apart(Adjacency.ZERO_OUT) or 0)
        law = np.log(masses(2.0 / 3.0, parts / 3, 60))
        loss = np.array([np.max(np.abs(law[10:-10] - law[10 + z : len(law) - 10 + z])) for z in range(9)])
        found = guarantee(given, 0.0, surviving=parts).epsilon
        worst = float(loss[apart].sum(axis=2).max())
        assert worst <= found * (1.0 + 1e-9)
        if clip_norm == ROOM and parts == 3:
            assert found == pytest.approx(worst, rel=1e-9)


def test_a_norm_that_many_coordinates_share_is_bounded_by_their_number() -> None:
    wide = protocol(101, dim=2, clip_norm=50.0, reach=50.0)
    assert wide.levels_apart(Adjacency.REPLACE_ONE) == 2 * math.floor(50.0 * math.sqrt(2.0))
    assert protocol(3, dim=2, clip_norm=50.0).levels_apart(Adjacency.REPLACE_ONE) == 4  # the range
    assert protocol(2, dim=5, clip_norm=50.0).levels_apart(Adjacency.ZERO_OUT) == 5  # zero is on no level
    assert protocol(3, clip_norm=math.nextafter(1.0, 0.0)).levels_apart(Adjacency.REPLACE_ONE) == 2  # rounded up


# ------------------------------------------------------------------ clients that keep to no level


HOSTILE = [
    [0.6, 0.6, 0.0],
    [0.5, 0.5, 0.5],  # ties
    [-0.5, 0.5, -0.5],
    [0.5 + 2.0**-24, 0.5, 0.0],
    [math.nextafter(1.0, 2.0), 0.0, 0.0],
    [math.nextafter(0.5, 1.0), -0.0, math.nextafter(-0.5, -1.0)],
    [-0.0, -0.0, -0.0],
    [1.0, 1e-9, -1e-9],
    [1e300, -1e300, 1.0],
    [1e38, 1e38, 1e38],
    [1e-310, 5e-324, -1e-40],
    [0.9999999, 0.0001, 0.0],
    [1.0, 1.0, 1.0],
]


def test_no_vector_gets_beyond_the_norm_or_the_range() -> None:
    generator = np.random.default_rng(0)
    others = generator.normal(size=(400, 3)) * generator.choice([0.3, 0.6, 1.0, 3.0], size=(400, 1))
    ties = generator.integers(-3, 4, size=(100, 3)) / 2.0
    given = protocol()
    apart = given.levels_apart(Adjacency.REPLACE_ONE)
    assert apart == 2
    found = {tuple(rounded(given, np.array(each, dtype=kind)) - 1)
             for each in [*HOSTILE, *others, *ties]
             for kind in ((np.float64, np.float32) if np.abs(each).max() < 1e38 else (np.float64,))}  # fmt: skip
    assert all(abs(a) + abs(b) + abs(c) <= 1 for a, b, c in found)
    assert len(found) == 7  # all that there are


@pytest.mark.parametrize("value", [0.5, -0.5, 0.25, 0.75, -0.0, 0.0, 1e300, -1e38, math.nextafter(0.5, 1.0), 5e-324])
def test_one_value_is_one_of_two_levels(value: float) -> None:
    given = protocol(2, dim=1, clip_norm=0.5 * ROOM, reach=0.5)
    found = {int(rounded(given, [value])[0]) for _ in range(60)}
    assert found <= {0, 1}
    if abs(value) >= 0.5:  # on a level it is not rounded at random
        assert found == {int(value > 0.0)}


def test_what_is_not_finite_is_refused_or_counts_as_zero() -> None:
    given = protocol()
    for broken in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteError):
            given.encode([broken, 0.0, 0.0], round=0)
        simulator = RoundSimulator(protocol(spread=1, divisor=100), 0, seed=1)
        simulator.add(np.array([[broken, 0.0, 0.0]] * 3, dtype=np.float32))
        assert np.array_equal(np.rint(3.0 * simulator.mean()), np.zeros(3))


def test_rotated_vectors_are_within_the_norm_too() -> None:
    given = replace(protocol(dim=8, clip_norm=1.0), rotate=True)
    for vector in np.random.default_rng(1).normal(size=(200, 8)):
        assert np.abs(rounded(given, vector) - 1).sum() <= 1


@pytest.mark.parametrize(("levels", "reach", "ones"), [(2, 0.5, 1), (2, 0.5, 3), (3, 1.0, 1), (3, 0.7, 3), (5, 0.1, 7)])
def test_a_norm_of_just_the_clip_norm_is_left_as_it_is(levels: int, reach: float, ones: int) -> None:
    step = reach / (levels - 1) * (1 + levels % 2)
    vectors = np.vstack([np.eye(ones), np.ones((1, ones))]) if levels % 2 else np.ones((1, ones))
    clip_norm = step * math.sqrt(ones)
    given = plan(50, ones, 1.0, 0.0, clip_norm=clip_norm, levels=(levels, reach), rotate=False).protocol
    assert isinstance(given.mechanism, WholeLaplace)
    for vector in step * vectors:
        for sign in (1.0, -1.0):
            wanted = np.rint((sign * vector + reach) / given.mechanism.scale)
            assert np.array_equal(rounded(given, sign * vector), wanted)
    # With less of it the vector of the largest norm is shrunk.
    shorter = replace(given, clip_norm=clip_norm * (1.0 - 2.0**-30), promise=None)
    found = {tuple(rounded(shorter, step * vectors[-1])) for _ in range(60)}
    assert found != {tuple(np.rint((step * vectors[-1] + reach) / given.mechanism.scale))}


def test_the_usual_parameters_send_vectors() -> None:
    usual = WholeLaplace.usual(clients=3, dim=2, clip_norm=0.3, rotate=False, delta=0.0)
    given = Protocol(clients=3, dim=2, clip_norm=0.3, mechanism=WholeLaplace(**usual), rotate=False)
    assert rounded(given, [0.0, -0.3]).tolist() == [1, 0]


def test_a_norm_that_allows_zero_alone_is_refused() -> None:
    for levels, dim, least in (((3, 1.0), 3, 1.0), ((2, 0.5), 3, 0.5 * math.sqrt(3.0))):
        for mechanism in ("best", "whole-laplace", "discrete-laplace"):
            vectors: dict[str, Any] = {"levels": levels, "rotate": False, "mechanism": mechanism}
            with pytest.raises(ParameterError, match="at least"):
                plan(100, dim, 1.0, 0.0, clip_norm=least * (1.0 - 1e-9), **vectors)
            assert plan(100, dim, 1.0, 0.0, clip_norm=least, **vectors).guarantee.epsilon <= 1.0


def test_no_noise_modulo_a_number_is_no_noise() -> None:
    silent = protocol(spread=0)
    aggregator = Aggregator(silent, round=0)
    for vector in np.eye(3):
        aggregator.add(silent.encode(vector, round=0))
    assert np.allclose(3.0 * aggregator.mean(), 1.0)


# ------------------------------------------------------------------ plans


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 5.5])
@pytest.mark.parametrize("clients", [2, 1000, 100_000])
@pytest.mark.parametrize("secure", [False, True])
def test_a_plan_spends_epsilon_and_has_the_error_of_the_geometric_mechanism(
    epsilon: float, clients: int, secure: bool
) -> None:
    cube = {**HALVES, "clip_norm": 0.5 * math.sqrt(3.0) * ROOM}
    for vectors, dim, sensitivity in ((HALVES, 1, 1.0), (cube, 3, 3.0), (ONES, 50, 2.0)):
        found = plan(clients, dim, epsilon, 0.0, secure=secure, mechanism="whole-laplace", **vectors)
        assert epsilon * (1.0 - 1e-6) <= found.guarantee.epsilon <= epsilon
        geometric = 0.5 / math.sinh(0.5 * epsilon / sensitivity) ** 2
        assert found.error.total * clients**2 == pytest.approx(dim * geometric, rel=1e-6)
        assert found.guarantee.assumption is None
        assert found.overflow_probability <= 1e-9


def test_the_planned_error_is_the_one_that_is_played() -> None:
    found = plan(20, 2, 2.0, 0.0, colluding=2, dropout=0.1, **ONES)  # the best of all
    noise = found.protocol.mechanism
    assert isinstance(noise, WholeLaplace)
    assert noise.shares == 16
    vectors = np.tile(np.eye(2, dtype=np.float32), (9, 1))
    errors = []
    for round in range(2000):
        simulator = RoundSimulator(found.protocol, 0, seed=round)
        simulator.add(vectors)
        errors.append(float(np.sum((simulator.mean() - 0.5) ** 2)))
    # Squares have a standard deviation of about twice their mean: 2,000 give 5 %, and 25 % is five of these.
    assert np.mean(errors) == pytest.approx(found.error.total, rel=0.25)


def test_the_best_of_all_mechanisms_may_be_of_whole_levels() -> None:
    for delta in (0.0, 1e-6):
        found = plan(1000, 1, 2.0, delta, **HALVES)
        assert (found.protocol.mechanism.name, found.guarantee.delta <= delta) == ("whole-laplace", True)
        assert found.guarantee.epsilon <= 2.0
    # The exact Laplace mechanism for the same distance, on real numbers, is worse.
    assert plan(1000, 1, 2.0, 0.0, **HALVES).ratio == pytest.approx(0.7240, abs=1e-3)
    assert plan(1000, 50, 1.0, 0.0, mechanism="whole-laplace", **ONES).ratio == pytest.approx(0.9795, abs=1e-3)


def test_rounds_share_epsilon() -> None:
    found = plan(100, 1, 1.0, 0.0, rounds=4, **HALVES)
    assert 0.999 < found.guarantee.epsilon <= 1.0
    assert guarantee(Run.of(found.protocol, rounds=1), 0.0).epsilon == pytest.approx(0.25, rel=1e-6)
    drawn = plan(100, 1, 1.0, 0.0, rounds=4, participation="fixed-size:0.5", **HALVES)
    assert drawn.guarantee.epsilon <= 1.0
    assert drawn.error.total < found.error.total * 0.5


def test_rounds_that_are_too_costly_for_sampling_to_help_are_planned_for() -> None:
    # Beyond ε = 500 a sampled round is accounted for as if everybody were in it.
    for drawn in ({"participation": "fixed-size:0.1"}, {"participation": "poisson:0.3", "adjacency": "zero-out"}):
        found = plan(200, 1, 499.0, 0.0, mechanism="whole-laplace", **drawn, **HALVES)
        assert 490.0 < found.guarantee.epsilon <= 499.0


def test_what_cannot_be_is_refused() -> None:
    for change, said in (
        ({"levels": None}, "known levels"),
        ({"levels": 3}, "a number and a range"),
        ({"levels": (1, 1.0)}, "levels"),
        ({"levels": (3, -1.0)}, "levels"),
        ({"rotate": True}, "rotate=False"),
    ):
        with pytest.raises(ParameterError, match=said):
            plan(100, 2, 1.0, 0.0, **{**ONES, "mechanism": "whole-laplace", **change})
    with pytest.raises(InfeasibleError):
        plan(100, 2, 1.0, 0.0, mechanism="whole-laplace", bits=4, **ONES)
    with pytest.raises(InfeasibleError):
        plan(100, 100, 1e-4, 0.0, mechanism="whole-laplace", **{**HALVES, "clip_norm": 5.0})  # wider than is drawn
    for fields in ({"divisor": 0}, {"divisor": 2**50}, {"spread": 2**13 * 2}, {"spread": 1, "divisor": 513}):
        with pytest.raises(ParameterError):
            mechanism(**fields)
    assert Requirements(clients=3, dim=1, epsilon=1.0, delta=0.0).levels is None


def test_an_audit_finds_nothing_wrong() -> None:
    for vectors, dim in ((HALVES, 1), (ONES, 3)):
        given = plan(6, dim, 1.0, 0.0, mechanism="whole-laplace", **vectors).protocol
        found = audit(given, rounds=1000, seed=3, delta=1e-3)
        assert found.passed, str(found)


def test_fewer_honest_clients_cost_more_and_a_law_knows_its_rate() -> None:
    found = [guarantee(protocol(), 0.0, surviving=n).epsilon for n in (1, 2, 3, 4)]
    assert found[0] > found[1] > found[2] == found[3]
    assert PolyaLaw(3, 2, 2, divisor=2).step_loss == pytest.approx(2.0 / 3.0, rel=1e-12)
    assert "spread 1.5" in str(PolyaLaw(3, 2, 2, divisor=2))
