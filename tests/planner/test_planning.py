"""Plans with the paper's mechanism: the targets they must meet, the wishes they keep, what they say where none exists.

Which mechanism is chosen where none is named: test_choice.py.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import planner
from cpsgd.codec import pack
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.mechanisms import Binomial, Mechanism
from cpsgd.mechanisms.binomial import MAX_COINS
from cpsgd.neighbours import Participation
from cpsgd.planner import Plan, problem
from cpsgd.planner.examples import plan_examples
from cpsgd.planner.modulus import overflow_probability, smallest_modulus
from cpsgd.planner.search import Contest, Setting
from cpsgd.planner.target import Target
from cpsgd.privacy.gaussian import analytic_sigma
from cpsgd.privacy.guarantees import guarantee, guarantee_over_rounds

REFERENCE: dict[str, Any] = {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9}
SMALL: dict[str, Any] = {"clients": 500, "dim": 2_000, "epsilon": 3.0, "delta": 1e-6}


def plan(*size: Any, **wishes: Any) -> Plan:
    """The best plan with the paper's mechanism."""
    return planner.plan(*size, **{"mechanism": "binomial", **wishes})


def binomial(found: Plan) -> Binomial:
    """The mechanism of a plan, which is Binomial."""
    assert isinstance(found.protocol.mechanism, Binomial)
    return found.protocol.mechanism


@pytest.fixture(scope="module")
def reference() -> Plan:
    return plan(**REFERENCE, bits=4)


@pytest.mark.parametrize(("bits", "ratio"), [(2, 1.25), (3, 1.15), (4, 1.10), (5, 1.06), (6, 1.04), (8, 1.02)])
def test_close_to_the_exact_gaussian_mechanism(bits: int, ratio: float) -> None:
    found = plan(**REFERENCE, bits=bits)
    assert found.ratio <= ratio
    assert binomial(found).levels + binomial(found).trials == 2**bits
    assert found.guarantee.epsilon <= 2.0


def test_the_gaussian_error_is_that_of_the_exact_mechanism(reference: Plan) -> None:
    sigma = analytic_sigma(epsilon=2.0, sensitivity=2.0 / 10_000, delta=1e-9)
    assert reference.gaussian_squared_error == pytest.approx(65_536 * sigma**2, rel=1e-9)


def test_the_guarantee_is_that_of_the_very_protocol(reference: Plan) -> None:
    own = guarantee(reference.protocol, 1e-9)
    assert reference.guarantee.epsilon == own.epsilon
    assert reference.guarantee.method == own.method


def test_the_frontier_falls_and_holds_the_choice(reference: Plan) -> None:
    errors = [point.expected_squared_error for point in reference.frontier]
    assert errors == sorted(errors, reverse=True)
    assert [point.bits for point in reference.frontier] == list(range(2, 17))
    chosen = next(point for point in reference.frontier if point.bits == 4)
    assert chosen.expected_squared_error == reference.error.total
    assert all(point.ratio > 1.0 for point in reference.frontier)


def test_every_point_of_the_frontier_keeps_the_wish(reference: Plan) -> None:
    for point in reference.frontier[:6]:
        changed = replace(reference.protocol, mechanism=point.mechanism)
        # The search is allowed no more than rounding over the wish.
        assert guarantee(changed, 1e-9).epsilon <= 2.0 * (1 + 1e-6)


def test_only_what_is_asked_for_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[float] = []

    def counted(search: Any) -> Any:
        def at(setting: Setting, target: Target, bits: float) -> Any:
            searched.append(bits)
            return search(setting, target, bits)

        return at

    monkeypatch.setattr(problem, "Contest", counted(Contest))
    found = plan(**SMALL, bits=4)
    assert searched == [4]
    # The frontier is searched when it is first asked for, and once.
    searched.clear()
    frontier = found.frontier
    assert searched == [bits for bits in range(1, 17) if bits != 4]
    assert found.frontier is frontier
    assert found.to_dict()["frontier"] == [point.to_dict() for point in frontier]
    assert len(searched) == 15
    # Without a number of bits they are looked at until one is close enough to the Gaussian mechanism.
    searched.clear()
    whole = plan(**SMALL)
    assert searched == list(range(1, round(whole.bits) + 1))
    assert [point.bits for point in whole.frontier] == [point.bits for point in frontier]


@pytest.mark.parametrize(
    "wishes",
    [
        {"bits": 3},
        {"bits": 6, "adjacency": "zero-out"},
        {"bits": 5, "dropout": 0.2, "colluding": 30},
        {"bits": 4, "rounds": 50, "participation": "once"},
        {"bits": 7, "rounds": 20, "participation": "every"},
        {"bits": 6, "rounds": 50, "participation": "poisson:0.05", "adjacency": "zero-out"},
        {"bits": 6, "rounds": 50, "participation": "fixed-size:0.05"},
        {"bits": 12, "secure": True},
        {"bits": 9, "rotate": False},
        {"bits": 4, "clip_norm": 0.01},
        {"bits": math.log2(12)},
        {"max_error": 0.4},
    ],
    ids=str,
)
def test_wishes_are_kept(wishes: dict[str, Any]) -> None:
    found = plan(**SMALL, **wishes)
    again = guarantee_over_rounds(
        found.protocol,
        1e-6,
        rounds=wishes.get("rounds", 1),
        participation=wishes.get("participation", "once"),
        adjacency=wishes.get("adjacency", "replace-one"),
        surviving=math.floor(500 * (1 - wishes.get("dropout", 0.0))),
        colluding=wishes.get("colluding", 0),
    )
    assert again.epsilon == found.guarantee.epsilon <= 3.0
    # The budget is used up, too (unless X has to be wider than privacy asks).
    assert again.epsilon > 2.9
    values = found.protocol.modulus or binomial(found).levels + binomial(found).trials
    assert values <= 2**found.bits * (1 + 1e-12)
    assert found.error.total == pytest.approx(found.ratio * found.gaussian_squared_error)
    if "max_error" in wishes:
        assert found.error.total <= wishes["max_error"]


def test_odd_levels_win_where_coordinates_are_small(reference: Plan) -> None:
    assert reference.protocol.mechanism.levels % 2 == 1
    # Rounding costs far less than the worst case of a quarter.
    assert reference.error.rounding < 0.4 * reference.error.noise / binomial(reference).trials


def test_a_wider_range_is_chosen_where_privacy_alone_would_clip() -> None:
    # Many clients and few coordinates: the noise privacy asks for is so small that X would cut vectors to pieces.
    found = plan(clients=1_000_000, dim=16, epsilon=1.0, delta=1e-6, bits=5)
    assert found.guarantee.epsilon < 0.9
    assert found.error.clipping < 0.5 * found.error.total
    errors = [point.expected_squared_error for point in found.frontier]
    assert errors == sorted(errors, reverse=True)


def test_unrotated_vectors_are_never_clipped() -> None:
    found = plan(**SMALL, bits=9, rotate=False)
    assert binomial(found).coordinate_range >= found.protocol.clip_norm
    assert found.error.clipping < 1e-10


def test_more_privacy_costs_accuracy_and_more_clients_buy_it() -> None:
    base = plan(**SMALL, bits=4).error.total
    assert plan(**{**SMALL, "epsilon": 2.0}, bits=4).error.total > base
    assert plan(**{**SMALL, "delta": 1e-9}, bits=4).error.total > base
    assert plan(**{**SMALL, "clients": 600}, bits=4).error.total < base
    assert plan(**SMALL, bits=4, adjacency="zero-out").error.total < base
    assert plan(**SMALL, bits=4, colluding=50).error.total > base
    assert plan(**SMALL, bits=4, dropout=0.1).error.total > base


@pytest.mark.parametrize(("colluding", "dropout", "honest", "surviving"), [(10, 0.0, 40, 50), (10, 0.2, 30, 40)])
def test_the_gaussian_beside_it_has_the_honest_survivors_noise_alone(
    colluding: int, dropout: float, honest: int, surviving: int
) -> None:
    """The accounting has the last word on a plan, so a search that counts too many is safe, but compares wrongly."""
    few: dict[str, Any] = {
        "clients": 50,
        "dim": 20,
        "epsilon": 3.0,
        "delta": 1e-6,
        "bits": 6,
        "mechanism": "rounded-gaussian",
    }
    alone, found = plan(**few), plan(**few, colluding=colluding, dropout=dropout)
    cost = 50 * 50 / (honest * surviving)
    assert found.gaussian_squared_error == pytest.approx(cost * alone.gaussian_squared_error, rel=1e-9)
    assert found.guarantee.epsilon <= 3.0


def test_the_modulus_is_the_smallest_and_its_overflow_is_bounded() -> None:
    found = plan(**SMALL, bits=11.7, secure=True, overflow=1e-7)
    protocol = found.protocol
    assert protocol.modulus is not None
    assert 2**11 < protocol.modulus <= 2**11.7
    assert found.overflow_probability <= 1e-7
    shape = {name: getattr(protocol, name) for name in ("clients", "dim", "clip_norm", "rotate")}
    assert overflow_probability(protocol.modulus - 1, protocol.mechanism, **shape) > 1e-7
    # Far fewer bits than sums of full range would take.
    assert protocol.modulus < 500 * (binomial(found).levels + binomial(found).trials - 1)


def test_sums_of_very_many_clients_get_the_modulus_they_need() -> None:
    found = plan(clients=1_000_000, dim=1, epsilon=1.0, delta=1e-9, secure=True)
    assert found.ratio <= 1.1
    assert found.protocol.modulus is not None
    assert 2**16 < found.protocol.modulus <= 2**found.bits
    assert found.overflow_probability <= 1e-9
    # With 16 bits everything would have to be so coarse that the noise drowns it.
    assert next(point for point in found.frontier if point.bits == 16).ratio > 1e6


def test_a_mean_through_a_modulus_of_more_than_16_bits() -> None:
    found = plan(clients=400, dim=4, epsilon=200.0, delta=1e-6, secure=True, bits=24)
    protocol = found.protocol
    assert protocol.modulus is not None
    assert 2**16 < protocol.modulus <= 2**24
    vectors = np.random.default_rng(0).normal(size=(400, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    sums = sum(protocol.encode_integers(vector, round=3).astype(np.uint64) for vector in vectors)
    mean = protocol.decode_sum(sums % protocol.modulus, 400, round=3)
    # The error is that of four Gaussian coordinates, nearly: beyond 40 times its expectation with probability < 1e-30.
    assert float(((mean - vectors.mean(axis=0)) ** 2).sum()) < 40 * found.error.total
    assert found.error.total < 1e-6


@pytest.mark.parametrize("epsilon", [60.0, 400.0])
def test_a_large_epsilon_is_planned_with_noise_that_is_drawn_exactly(epsilon: float) -> None:
    # e^ε times the error of one inexact draw would be more than δ.
    found = plan(clients=1000, dim=1000, epsilon=epsilon, delta=1e-9, bits=12)
    assert binomial(found).trials <= MAX_COINS
    assert found.ratio <= 1.1


def test_a_large_epsilon_of_many_rounds() -> None:
    best = plan(clients=1000, dim=64, epsilon=400.0, delta=1e-8, rounds=1000)
    assert 390.0 < best.guarantee.epsilon <= 400.0


@pytest.mark.parametrize("participation", ["every", "poisson:0.05"])
def test_an_epsilon_near_what_a_sampler_that_is_not_exact_can_keep(participation: str) -> None:
    best = plan(
        clients=33,
        dim=500,
        epsilon=39.0,
        delta=6e-8,
        bits=10,
        rounds=10,
        participation=participation,
        adjacency="zero-out",
    )
    assert binomial(best).trials > MAX_COINS
    assert best.guarantee.epsilon <= 39.0
    assert best.ratio < 1.2


def test_bits_that_are_of_no_use_are_not_chosen() -> None:
    # Far from the Gaussian mechanism, whose noise 256 coins a client are too coarse for, and more bits do not help.
    best = plan(clients=2, dim=100, epsilon=400.0, delta=1e-9)
    assert best.ratio > 1.1
    assert best.bits == math.ceil(best.protocol.bits_per_coordinate)


def test_a_fraction_of_a_bit_is_of_use_to_a_modulus() -> None:
    found = [plan(**SMALL, bits=bits, secure=True) for bits in (10, 10.5, 10.9)]
    for before, after in itertools.pairwise(found):
        assert (after.protocol.modulus or 0) > (before.protocol.modulus or 0)
        assert after.ratio < before.ratio
    for one in found:
        assert one.protocol.bits_per_coordinate <= one.bits


def test_a_power_of_two_is_taken_where_messages_are_as_short() -> None:
    found = plan(**SMALL, bits=12, secure=True)
    protocol = found.protocol
    assert protocol.modulus == 2**12
    assert next(point for point in found.frontier if point.bits == 12).modulus == 2**12
    shape = {name: getattr(protocol, name) for name in ("clients", "dim", "clip_norm", "rotate")}
    needed = smallest_modulus(protocol.mechanism, **shape)
    assert needed < 2**12
    assert pack.payload_bytes(protocol.dim, needed) == pack.payload_bytes(protocol.dim, 2**12)
    # Where that would be more bits than asked for, or longer messages, the smallest modulus stays.
    for bits in (11.999, 11.8):
        assert (plan(**SMALL, bits=bits, secure=True).protocol.modulus or 0) <= 2**bits


REFUSED = {
    "0": {"mean_norm": 0.0},
    "negative": {"mean_norm": -1.0},
    "nan": {"mean_norm": math.nan},
    "text": {"mean_norm": "0.5"},
    "above D": {"mean_norm": 1.0001},
    "not secure": {"mean_norm": 0.5, "secure": False},
}


@pytest.mark.parametrize("wishes", REFUSED.values(), ids=REFUSED.keys())
def test_a_mean_norm_that_cannot_be_is_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="mean_norm"):
        plan(**SMALL, **{"secure": True, **wishes})


def test_a_mean_norm_above_the_clip_norm_names_the_remedy() -> None:
    with pytest.raises(ParameterError, match=r"at most clip_norm=1, got mean_norm=2: .*Leave mean_norm out"):
        plan(**SMALL, secure=True, mean_norm=2.0)


def test_a_mean_norm_saves_bits_and_leaves_privacy_alone() -> None:
    whole = plan(**REFERENCE, bits=13, secure=True)
    same = plan(**REFERENCE, bits=13, secure=True, mean_norm=1.0)
    short = plan(**REFERENCE, bits=13, secure=True, mean_norm=0.1)
    assert same.protocol == whole.protocol
    assert short.ratio < whole.ratio
    assert short.guarantee == guarantee_over_rounds(short.protocol, REFERENCE["delta"], rounds=1)
    assert (short.protocol.modulus or 0) <= 2**13
    # Without the promise sums of that protocol may wrap around, and the bound says so.
    shape = {"clients": REFERENCE["clients"], "dim": REFERENCE["dim"], "clip_norm": 1.0}
    mechanism, modulus = short.protocol.mechanism, short.protocol.modulus
    assert modulus is not None
    assert overflow_probability(modulus, mechanism, **shape, mean_norm=0.1) == short.overflow_probability <= 1e-9
    assert overflow_probability(modulus, mechanism, **shape) > 1e-9


def test_too_few_bits_for_the_modulus_are_paid_for_with_noise() -> None:
    few, many = (plan(**SMALL, bits=bits, secure=True) for bits in (8, 12))
    assert few.guarantee.epsilon < 2.5
    assert few.error.total > many.error.total


def test_without_a_wish_the_fewest_bits_near_the_gaussian() -> None:
    found = plan(**SMALL)
    assert found.ratio <= 1.1
    fewer = [point for point in found.frontier if point.bits < found.bits]
    assert all(point.ratio > 1.1 for point in fewer)


def test_the_fewest_bits_for_an_error() -> None:
    allowed = 1.001 * plan(**SMALL, bits=5).error.total
    found = plan(**SMALL, max_error=allowed)
    assert found.bits == 5
    assert all(point.expected_squared_error > allowed for point in found.frontier if point.bits < 5)


# ------------------------------------------------------------------ infeasible


def test_a_closer_scale_without_a_certificate_does_not_spoil_the_plan() -> None:
    best = plan(clients=100, dim=1_000, epsilon=2.0, delta=1e-6, bits=1e-3, mechanism="sampled-coins")
    assert 0.17 < best.guarantee.epsilon <= 2.0


def test_nobody_left_to_protect() -> None:
    with pytest.raises(InfeasibleError, match="At most 449 may collude"):
        plan(**SMALL, bits=4, dropout=0.1, colluding=450)


@pytest.mark.parametrize(
    "wishes",
    [
        {"bits": 4, "max_error": 0.1},
        {"bits": 32},
        {"bits": 0},
        {"bits": 4, "epsilon": 0.0},
        {"bits": 4, "delta": 1.0},
        {"bits": 4, "dropout": 1.0},
        {"bits": 4, "participation": "often"},
        {"bits": 4, "participation": "poisson:0.1"},
        {"bits": 4, "adjacency": "friends"},
        {"bits": 4, "rounds": 0},
        {"max_error": -1.0},
    ],
    ids=str,
)
def test_nonsense_is_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        plan(**(SMALL | wishes))


def test_a_participation_object_is_as_good_as_its_name() -> None:
    named = plan(**SMALL, bits=4, rounds=3, participation="every")
    typed = plan(**SMALL, bits=4, rounds=3, participation=Participation.every())
    assert named == typed


def test_serialises(reference: Plan) -> None:
    data = json.loads(json.dumps(reference.to_dict()))
    assert data["error"]["noise"] + data["error"]["rounding"] + data["error"]["clipping"] == pytest.approx(
        data["expected_squared_error"]
    )
    assert data["protocol"]["levels"] == data["levels"] == reference.protocol.mechanism.levels


def test_the_finished_protocols_accounting_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    # Even if the search were wrong by a tenth, no plan would promise what its own accounting does not.
    honest = Target.smallest_scale

    def careless(self: Target, mechanism: Mechanism, wanted: float = 0.0) -> float:
        return 0.9 * honest(self, mechanism, wanted)

    monkeypatch.setattr(Target, "smallest_scale", careless)
    for wishes in ({"bits": 4}, {"bits": 6, "rounds": 20, "participation": "every"}, {"bits": 12, "secure": True}):
        found = plan(**SMALL, **wishes)  # type: ignore[arg-type]
        assert 2.9 < found.guarantee.epsilon <= 3.0


def test_clipping_everything_away_is_no_plan() -> None:
    # The noise one client needs is far larger than any vector: the smallest squared error would be a mean of nothing.
    found = plan(clients=1, dim=1_000, epsilon=10.0, delta=1e-6, bits=11)
    assert found.gaussian_squared_error > 100.0
    assert binomial(found).coordinate_range >= 2.5 / 1_000**0.5 * (1 - 1e-9)
    assert found.error.clipping <= 0.002


@pytest.mark.parametrize(
    ("clients", "epsilon"),
    [*(pytest.param(*case, marks=pytest.mark.thorough) for case in ((60, 0.05), (30, 0.1))), (200, 0.05)],
)
def test_little_noise_and_a_small_epsilon(clients: int, epsilon: float) -> None:
    # The Rényi certificate ends at an order below the one that would be best here.
    assert plan(clients, 44, epsilon, 1e-6).guarantee.epsilon <= epsilon


# ---------------------------------------------------------------------- a stated replace-one distance

ONE_HOT = {"replace_one_distance": math.sqrt(2.0), "distance_reason": "rows are one-hot"}


@pytest.mark.parametrize(
    "wishes",
    [
        {**REFERENCE, "bits": 4},
        pytest.param({**SMALL, "bits": 6, "rounds": 10}, marks=pytest.mark.thorough),
        {**SMALL, "bits": 5, "dropout": 0.1, "colluding": 7},
        {**SMALL, "bits": 14, "secure": True},
        {**SMALL, "bits": 8, "rotate": False},
        {**SMALL, "bits": 6, "mechanism": "skellam"},
        {"clients": 2_000, "dim": 1, "epsilon": 1.0, "delta": 1e-6, "bits": 8, "clip_norm": 1.0},
    ],
)
def test_one_hot_vectors_need_half_the_noise(wishes: dict[str, Any]) -> None:
    usual, found = plan(**wishes), plan(**wishes, **ONE_HOT)
    assert found.protocol.replace_one_distance == math.sqrt(2.0)
    assert found.guarantee.epsilon <= wishes["epsilon"]
    assert found.guarantee.assumption == "replace-one distance 1.41421 because rows are one-hot"
    assert usual.guarantee.assumption is None
    assert usual.gaussian_squared_error / found.gaussian_squared_error == pytest.approx(2.0, rel=1e-12)
    if wishes.get("rotate", True):
        assert usual.error.total / found.error.total == pytest.approx(2.0, abs=0.03)
    again = guarantee_over_rounds(
        found.protocol,
        wishes["delta"],
        rounds=wishes.get("rounds", 1),
        surviving=found.surviving,
        colluding=found.colluding,
    )
    assert again.epsilon == found.guarantee.epsilon
    # Without the statement the same protocol is not as private.
    bare = replace(found.protocol, replace_one_distance=None, distance_reason=None)
    assert guarantee(bare, wishes["delta"]).epsilon > guarantee(found.protocol, wishes["delta"]).epsilon


@pytest.mark.parametrize("distance", [1.999, *(pytest.param(d, marks=pytest.mark.thorough) for d in (1.9, 2.0))])
def test_a_distance_never_costs_anything(distance: float) -> None:
    """Where the grid is so coarse that the distance could not be told from 2D, 2D is used."""
    wishes: dict[str, Any] = {"clients": 3, "dim": 2**22, "epsilon": 0.3, "delta": 1e-6, "bits": 8}
    usual = plan(**wishes)
    found = plan(**wishes, replace_one_distance=distance, distance_reason="why")
    assert found.error.total <= usual.error.total * (1.0 + 1e-9)
    assert found.guarantee.epsilon <= 0.3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distance_reason": None}, "distance_reason to say why"),
        ({"replace_one_distance": None}, "give both or neither"),
        ({"replace_one_distance": 2.5}, "at most 2 clip_norm"),
        ({"replace_one_distance": 0.5}, "at least clip_norm"),
        ({"adjacency": "zero-out"}, "says nothing of zero-out neighbours, .*; leave it out"),
    ],
)
def test_distances_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        plan(**{**SMALL, "bits": 4, **ONE_HOT, **changes})


def test_examples_have_no_distance_of_their_own() -> None:
    with pytest.raises(ParameterError, match="about whole clients' vectors"):
        plan_examples(10, 100, 4.0, 1e-6, examples=50, **ONE_HOT)
