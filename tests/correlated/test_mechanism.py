"""Gaussian noise correlated over the rounds of a run: a client's half, exactly, and what is said of the run."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol, guarantee
from cpsgd.codec import pipeline
from cpsgd.correlated import draws, fine_draws
from cpsgd.correlated.draws import OWN_BITS, OWN_DEVIATION, draw, farthest_point, own_shifts
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import RoundedGaussian, fine_gaussian
from cpsgd.mechanisms.fine_gaussian import DRAW_BYTES
from cpsgd.mechanisms.rounded_gaussian import uniformity
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.randomness import Keystream


def mechanism(**changes: Any) -> CorrelatedGaussian:
    fields = {"noise_deviation": 40.0, "step": 0.02, "window": 4096, "coordinate_range": 1.0}
    return CorrelatedGaussian(**{**fields, "bands": 4, "run_length": 20, **changes})


def protocol(**changes: Any) -> Protocol:
    fields = {"clients": 10, "dim": 6, "clip_norm": 1.0, "mechanism": mechanism()}
    return Protocol(**{**fields, **changes})


def seed(number: int) -> bytes:
    return number.to_bytes(16, "little")


# ------------------------------------------------------------------ draws


@pytest.mark.parametrize("ratio", [8.0, 15.9])
def test_draws_are_the_kernels_noise_to_the_last_point(ratio: float) -> None:
    count = 500
    keystream = Keystream(seed(1)).take(DRAW_BYTES * count)
    found = draw(ratio, keystream, count)
    table = fine_gaussian.table(ratio, fine_gaussian.farthest(ratio))
    cumulative = [int(h) << 64 | int(w) for h, w in zip(table.high, table.low, strict=True)]
    uniform = [int.from_bytes(keystream[16 * i : 16 * i + 16].tobytes(), "little") for i in range(count)]
    cells = [sum(bound <= number for bound in cumulative) - len(cumulative) // 2 for number in uniform]
    planes = keystream[16 * count :].reshape(-1, count).sum(axis=0, dtype=np.int64)
    assert np.array_equal(found, 256 * np.array(cells) + planes - 28 * 255 // 2)
    assert abs(found).max() <= farthest_point(ratio)


@pytest.mark.parametrize("bits", [15, 19, 23, 30])
def test_own_noise_fills_the_finest_grid(bits: int) -> None:
    shifts = own_shifts(bits)
    assert shifts[0] == bits - OWN_BITS
    assert shifts[-1] == 0
    # Each draw is as wide as several points of the coarser one: together they are one discrete Gaussian.
    points = OWN_DEVIATION * 2**OWN_BITS
    for coarse, fine in itertools.pairwise(shifts):
        smooth = (points * 2.0**fine / 2.0**coarse) ** 2
        assert 2.1 * math.exp(-2.0 * math.pi**2 * smooth / (1.0 + smooth / points**2)) < 1e-130


# ------------------------------------------------------------------ messages


def test_all_draws_of_own_noise_are_in_a_message() -> None:
    """Without the finest ones a message's rounding would tell something of the fractional part of older noise."""
    given, count = mechanism(), 20_000
    shifts, bits = own_shifts(given.finest_bits), given.finest_bits
    assert len(shifts) == 3
    keystream = Keystream(seed(2)).take(given.keystream_bytes * count)
    inherited = np.random.default_rng(1).integers(-(1 << bits), 1 << bits, count)
    values = np.empty(count, dtype=np.uint32)
    given.kernel().after(inherited).values(np.zeros(count, dtype=np.float32), keystream, values)
    parts = [keystream[DRAW_BYTES * count * i :][: DRAW_BYTES * count] for i in range(3)]
    own = [draw(8.0, part, count) << shift for part, shift in zip(parts, shifts, strict=True)]
    expected = (inherited + sum(own)) / 2.0**bits + given.window / 2
    assert np.array_equal(values, np.floor(expected))
    assert np.any(values != np.floor(expected - own[1] / 2.0**bits))


def test_what_lies_beyond_the_window_is_moved_to_its_ends() -> None:
    given = mechanism(window=200)
    inherited = np.repeat(np.array([-1000, 1000]) << given.finest_bits, 50)
    values = np.empty(100, dtype=np.uint32)
    keystream = Keystream(seed(3)).take(given.keystream_bytes * 100)
    given.kernel().after(inherited).values(np.zeros(100, dtype=np.float32), keystream, values)
    assert set(values[:50].tolist()) == {0}
    assert set(values[50:].tolist()) == {199}


def expanded(sent: CorrelatedGaussian, seed: bytes, round: int, dim: int) -> Any:
    found = np.zeros(dim, dtype=np.int64)
    sent.lineages.add(seed, round, 1, found)
    return found


def test_a_seed_is_expanded_to_the_same_noise_for_ever() -> None:
    noise = expanded(mechanism(), seed(7), 3, 5000)
    assert hashlib.sha256(noise.astype("<i8").tobytes()).hexdigest()[:16] == "cd585fd7e392c038"
    # Whole blocks do not depend on how many follow.
    assert np.array_equal(expanded(mechanism(), seed(7), 3, 4096), noise[:4096])
    assert not np.array_equal(expanded(mechanism(), seed(7), 4, 5000), noise)
    assert not np.array_equal(expanded(mechanism(), seed(8), 3, 5000), noise)


def test_messages_are_exactly_linear_before_they_are_rounded() -> None:
    shared, vector = protocol(), np.array([0.5, -0.2, 0.1, 0.0, 0.3, -0.6])
    sent = shared.mechanism
    assert isinstance(sent, CorrelatedGaussian)
    seeds = [seed(1), None, seed(3), seed(4)]
    found = pipeline.integers(shared, vector, 9, keystream=Keystream(seed(5)), seeds=seeds)
    weights = sent.correlation.weights
    noise = sum(weights[k] * expanded(sent, s, 9 - k, 6) for k, s in enumerate(seeds) if s is not None)
    stream = Keystream(seed(5)).take(6 * sent.keystream_bytes)
    own = np.zeros(6, dtype=np.int64)
    for number, shift in enumerate(sent.shifts):
        own += draw(8.0, stream[number * DRAW_BYTES * 6 :], 6) << shift
    points = np.rint(pipeline.to_grid(shared, vector, 9)).astype(np.int64) << sent.shifts[0]
    exact = (points + own + noise) / 2.0**sent.finest_bits
    assert np.array_equal(found, np.floor(exact + 0.5 * sent.window).astype(np.uint32))
    # The same, packed, and read by an aggregator.
    message = pipeline.encode(shared, vector, 9, keystream=Keystream(seed(5)), seeds=seeds)
    aggregator = Aggregator(shared, round=9)
    aggregator.add(message)
    assert np.allclose(aggregator.mean(), shared.decode_sum(found.astype(np.uint64), 1, 9))


def test_lineages_take_their_noise_away_again() -> None:
    rounds, dim, bands = 12, 400, 4
    shared = protocol(dim=dim, mechanism=mechanism(bands=bands), clients=1)
    sent = shared.mechanism
    assert isinstance(sent, CorrelatedGaussian)
    total = np.zeros(dim)
    memory: list[bytes] = []
    for number in range(rounds):
        memory = [hashlib.sha256(b"%d" % number).digest()[:16], *memory[: bands - 1]]
        sums = pipeline.integers(shared, np.zeros(dim), number, keystream=Keystream(seed(number)), seeds=memory)
        total += shared.decode_sum(sums.astype(np.uint64), 1, number)
    expected = sent.correlation.prefix_variance()[-1] * sent.noise_deviation**2
    expected += rounds * (sent.noise.own_variance + 1.0 / 12.0)
    found = float(np.mean(total**2)) / sent.step**2
    # 5.4 standard errors of a mean of squares.
    assert abs(found / expected - 1.0) < 5.4 * math.sqrt(2.0 / dim)
    assert expected < 0.5 * rounds * sent.noise_deviation**2


def test_a_client_without_seeds_begins_a_lineage() -> None:
    shared = protocol(dim=4000, clients=1, rotate=False)
    sent = shared.mechanism
    means = shared.decode_sum(shared.encode_integers(np.zeros(4000), 0).astype(np.uint64), 1, 0) / sent.scale
    assert abs(float(np.mean(means**2)) / (sent.noise.variance + 1.0 / 12.0) - 1.0) < 5.4 * math.sqrt(2.0 / 4000)


def test_one_rotation_serves_the_run() -> None:
    shared = protocol()
    assert np.array_equal(shared.rotation_signs(0), shared.rotation_signs(19))
    other = replace(shared, mechanism=RoundedGaussian(noise_deviation=4, step=0.1, window=99, coordinate_range=1.0))
    assert not np.array_equal(other.rotation_signs(0), other.rotation_signs(19))
    assert {mechanism().memory.rotation_round(round) for round in (0, 5, 19)} == {0}


@pytest.mark.parametrize(
    ("seeds", "round", "said"),
    [
        ([], 5, "got 0 seeds"),
        ([None, seed(1)], 5, "seed of this round"),
        ([seed(i) for i in range(5)], 5, "at most 3 rounds"),
        ([seed(1), b"short"], 5, "16 bytes"),
        ([seed(1), seed(1)], 5, "twice"),
        ([seed(1), seed(2)], 0, "before round 0"),
        ([seed(1)], 20, "run_length=20"),
    ],
)
def test_seeds_that_are_none_of_a_lineage_are_refused(seeds: list[bytes | None], round: int, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        protocol().encode(np.zeros(6), round, seeds=seeds)
    with pytest.raises(ParameterError, match=said):
        mechanism().memory.inherited(seeds, round, 6)


def test_other_mechanisms_take_no_seeds_and_a_run_no_further_rounds() -> None:
    other = Protocol.rotated_binomial(clients=10, dim=6, clip_norm=1.0, levels=4, trials=9)
    with pytest.raises(ParameterError, match="leave them out"):
        other.encode(np.zeros(6), 0, seeds=[seed(1)])
    for rotate in (True, False):
        with pytest.raises(ParameterError, match="run_length=20"):
            protocol(rotate=rotate).encode(np.zeros(6), 20)
    with pytest.raises(ParameterError, match="at most clients=10"):
        protocol().decode_sum(np.zeros(6, dtype=np.uint64), 11, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"noise_deviation": 3.0}, "where noise is correlated"),
        ({"bands": 0}, "bands"),
        ({"bands": 21}, "at most rounds=20"),
        ({"separation": 0}, "separation"),
        ({"untrusted_holders": -1}, "untrusted_holders"),
        ({"run_length": 2**21}, "rounds"),
    ],
)
def test_bad_parameters_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        mechanism(**fields)


def test_a_window_that_adversarial_seeds_could_leave_costs_all_of_delta() -> None:
    """The seeds that a client is handed may be anybody's choice: the window holds the largest noise they stand for."""
    wide, narrow = mechanism(window=4096), mechanism(window=900)
    assert wide.noise.cut < 1e-100
    assert narrow.noise.cut == 1.0
    reach = wide.correlation.inherited * farthest_point(wide.noise_ratio) / 2**wide.noise_bits
    assert reach < 0.5 * wide.window - wide.coordinate_range / wide.step


# ------------------------------------------------------------------ what is proved


@pytest.mark.parametrize("bands", [1, 4, 16])
def test_one_guarantee_is_that_of_the_whole_run(bands: int) -> None:
    shared = protocol(clients=1000, mechanism=mechanism(bands=bands, step=0.01))
    sent = shared.mechanism
    assert isinstance(sent, CorrelatedGaussian)
    found = guarantee(shared, 1e-6)
    mu = 2.0 / sent.step * sent.correlation.column_norm / (sent.noise_deviation * math.sqrt(1000))
    assert found.epsilon >= gdp_epsilon(mu, 1e-6)
    assert found.epsilon == pytest.approx(gdp_epsilon(mu, 1e-6), rel=1e-4)
    assert found.method == "correlated-gaussian"
    over = guarantee_over_rounds(shared, 1e-6, rounds=20, participation="once")
    assert over.epsilon == found.epsilon
    zero_out = guarantee(shared, 1e-6, adjacency=Adjacency.ZERO_OUT)
    assert zero_out.epsilon < 0.6 * found.epsilon


def test_what_the_correlation_does_not_cover_is_refused() -> None:
    shared = protocol(clients=1000, mechanism=mechanism(step=0.01))
    with pytest.raises(ConditionError, match="20 rounds, and 21"):
        guarantee_over_rounds(shared, 1e-6, rounds=21, participation="once")
    with pytest.raises(ConditionError, match="not in every round"):
        guarantee_over_rounds(shared, 1e-6, rounds=20, participation="every")
    with pytest.raises(ConditionError, match="sampling"):
        guarantee_over_rounds(shared, 1e-6, rounds=20, participation="fixed-size:0.1")
    every = replace(shared, mechanism=mechanism(step=0.01, separation=1))
    costly = guarantee_over_rounds(every, 1e-6, rounds=20, participation="every")
    independent = replace(shared, mechanism=mechanism(step=0.01, bands=1, separation=1))
    assert costly.epsilon > guarantee(independent, 1e-6).epsilon > 3.5 * guarantee(shared, 1e-6).epsilon


def test_holders_of_seeds_who_tell_them_cost_their_lineages_noise() -> None:
    handed = protocol(clients=1000, mechanism=mechanism(step=0.01, untrusted_holders=50))
    kept = protocol(clients=1000, mechanism=mechanism(step=0.01))
    # 50 colluding clients themselves, and what they hold of three predecessors each.
    assert handed.mechanism.noise.law(950).deviation == kept.mechanism.noise.law(800).deviation  # type: ignore[union-attr]
    assert guarantee(handed, 1e-6, colluding=50).epsilon > guarantee(kept, 1e-6, colluding=50).epsilon
    with pytest.raises(ConditionError, match="untrusted_holders=50"):
        guarantee(handed, 1e-6, colluding=51)
    with pytest.raises(ConditionError, match="no privacy"):
        handed.mechanism.noise.law(150)
    with pytest.raises(ConditionError, match="at least half"):
        guarantee(kept, 1e-6, surviving=499)


def test_all_rounds_are_counted_in_what_rounding_and_samplers_cost() -> None:
    short, long = mechanism(window=1800), mechanism(window=1800, run_length=2000)
    assert long.noise.variation == pytest.approx(100 * short.noise.variation)
    assert long.noise.slack(10) == pytest.approx(100 * short.noise.slack(10))
    assert short.noise.variation >= 2 * 20 * short.noise.cut
    assert short.noise.slack(10) >= 20 * uniformity(OWN_DEVIATION**2, 10)


def test_uniformity_between_a_number_of_clients_and_twice_as_many() -> None:
    """Rounds may have up to twice the clients the accountant knows of; the bound takes twice the larger of the ends."""
    for fewest in (1, 2, 3, 5, 20, 39, 60, 100):
        ends = max(uniformity(OWN_DEVIATION**2, fewest), uniformity(OWN_DEVIATION**2, 2 * fewest))
        inside = max(uniformity(OWN_DEVIATION**2, count) for count in range(fewest, 2 * fewest + 1))
        assert inside <= 2.0 * ends


def test_rounds_with_half_the_messages_of_a_clients_own_are_within_the_slack() -> None:
    """A client knows how many are in its own round; two clients' fractional parts are far less uniform than four's."""
    for honest in (1, 2, 3, 4, 5, 20, 61):
        most = max(uniformity(OWN_DEVIATION**2, count) for count in range(-(-honest // 2), 2 * honest + 1))
        assert mechanism().noise.slack(honest) >= 20 * most


@pytest.mark.parametrize("sigma", [4.0, 40.0, 2047.0])
def test_z_on_its_grid_counts_as_less_than_it_is(sigma: float) -> None:
    """It is a rounding of a Gaussian with five squared points less, whose fractional parts are not quite uniform."""
    given = mechanism(noise_deviation=sigma, step=1.0, bands=256, run_length=256, window=1 << 17)
    points = sigma * 2.0**given.noise_bits
    assert 2048 <= points < 4096
    assert given.noise.law(100).deviation ** 2 <= 100 * sigma**2 * (1.0 - 5.0 / points**2)
    # docs/proofs/correlated-gaussian.md, Lemma 4, for as many draws as twice the messages may use.
    own, z = (2.0 * 2.0**given.noise_bits / (1.0 + given.correlation.inherited)) ** 2, points**2 - 5.0
    uneven = 2.0 * math.exp(-2.0 * math.pi**2 * own * z / (own + z))
    rounding = uniformity(OWN_DEVIATION**2, 10_000)
    assert given.noise.slack(10_000) >= 256 * (256 * 20_000 * uneven + rounding)
    assert sigma < 2000 or 256 * 20_000 * uneven > 10 * rounding  # where z has few points per step, it matters


def test_files_and_fingerprints() -> None:
    shared = protocol(mechanism=mechanism(separation=5, untrusted_holders=2))
    assert Protocol.from_json(shared.to_json()) == shared
    others = [mechanism(bands=3), mechanism(run_length=21), mechanism(separation=5), mechanism(untrusted_holders=0)]
    prints = {replace(shared, mechanism=other).fingerprint for other in [*others, mechanism()]}
    assert len(prints) == 5


def test_the_seeds_purpose_is_named() -> None:
    assert draws.PURPOSE == b"cpsgd lineage noise v1"
    assert fine_draws.PURPOSE == b"cpsgd fine lineage noise v2"


def test_a_modulus_is_planned_for_the_rounds_whose_messages_hold_all_of_their_lineages_noise() -> None:
    """Their standard deviation is an eighth larger than that of the first round, with eight bands."""
    found = mechanism(bands=8)
    variance = found.noise_deviation**2 * float(np.sum(found.correlation.factors**2))
    assert variance > 1.25 * found.noise_deviation**2
    for rotate in (True, False):
        bounds = found.deviations(clients=10, dim=64, clip_norm=1.0, rotate=rotate)
        assert all(bound.at(0.1) >= 0.5 * 0.1**2 * 10 * (variance + OWN_DEVIATION**2) for bound in bounds)


def test_samplers_count_for_draws_whose_own_messages_never_arrived() -> None:
    """A message takes away the noise of b - 1 others, and none of these may be in a sum."""
    wide = mechanism(bands=8, window=1 << 15)
    assert wide.noise.cut < 1e-3 * fine_gaussian.SMOOTHING
    assert wide.noise.variation >= 2 * wide.run_length * 8 * fine_gaussian.SMOOTHING


def test_trainings_with_dropouts_or_more_rounds_than_the_run_has_are_refused() -> None:
    memory, every = mechanism().memory, Participation.every()
    memory.check_steady(20, 0.0, every)
    with pytest.raises(ParameterError, match="run of 20 rounds"):
        memory.check_steady(21, 0.0, every)
    with pytest.raises(ParameterError, match=r"dropout=0\.01"):
        memory.check_steady(20, 0.01, every)
