"""Shaped rounding: messages, states, the planner's numbers, simulated sums, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol, Run
from cpsgd.codec import pipeline
from cpsgd.correlated.shaped import ShapedGaussian, SiloState, correction
from cpsgd.correlated.uniform_fractions import excess
from cpsgd.errors import ConditionError, NonFiniteError, ParameterError
from cpsgd.mechanisms.noise import FairCoins
from cpsgd.neighbours import Participation
from cpsgd.planner import plan
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy import guarantee
from cpsgd.randomness import Keystream
from cpsgd.simulation.cpu import RoundSimulator

MECHANISM = ShapedGaussian(
    noise_deviation=3.0, step=0.1, window=80, coordinate_range=0.5, bands=4, run_length=20, separation=1
)
SILOS, DIM = 4, 50


def protocol(mechanism: ShapedGaussian = MECHANISM, dim: int = DIM, **changes: Any) -> Protocol:
    return Protocol(
        **{"clients": SILOS, "dim": dim, "clip_norm": 1.0, "mechanism": mechanism, "rotate": False} | changes
    )


def test_messages_are_linear_in_what_is_kept() -> None:
    """Y = x + Σ g_j w_(t-j) to within half a point of the finest grid, in exact fractions."""
    of, given = MECHANISM, protocol()
    state, vector = of.memory.init(), np.linspace(-0.06, 0.06, DIM).astype(np.float32)
    kept: dict[int, np.ndarray] = {}
    unit = Fraction(1, 1 << of.finest_bits)
    for round_ in range(6):
        values = given.encode_integers(vector, round_, seeds=of.memory.update(state))
        kept[round_] = state.rows[round_].copy()
        points = pipeline.to_grid(given, vector, round_)
        for i in range(0, DIM, 7):
            said = Fraction(int(values[i])) - Fraction(of.window - 1, 2)
            x = Fraction(round(float(points[i])), 1 << of.fraction_bits)
            sum_ = sum(
                (Fraction(of.correlation.weights[j], 1 << 14) * int(kept[round_ - j][i]) * unit)
                for j in range(min(of.bands, round_ + 1))
            )
            assert abs(said - x - sum_) <= unit / 2


def test_fractional_parts_that_are_not_uniform_are_no_privacy() -> None:
    slacks = {}
    for rounds in (80, 100):
        of = replace(MECHANISM, noise_deviation=1.3, run_length=rounds)
        slacks[rounds] = of.noise.run_slack(8, 8)
        found = excess(of.noise.counted_variance, of.correlation, honest=8, silos=8)
        assert found < 0.1 if rounds == 80 else 1.0 < found < 2.0
    assert 0.08 < slacks[80] < 0.1
    assert slacks[100] == math.inf


def test_grids_are_as_fine_as_their_numbers_allow() -> None:
    """Two steps of the vector, 2 (15½ σ + 1) = 95 of noise and rounding, half of the window, and 2: 128 in all."""
    for window, bits in ((58, 55), (59, 54)):
        assert replace(MECHANISM, coordinate_range=0.2, window=window).finest_bits == bits
    for steps, bits in ((1e-3, 16), (1, 16), (128, 16), (128.1, 15), (256, 15), (257, 14)):
        of = replace(MECHANISM, step=1.0, coordinate_range=steps, window=1200)
        assert of.fraction_bits == bits
        assert of.grid.limit <= 1 << 23


def test_silos_that_were_to_start_anew_are_refused() -> None:
    assert MECHANISM.memory.simulated(1, restart_every=None) is not None
    with pytest.raises(ParameterError, match="below run_length=20"):
        MECHANISM.memory.inherited(MECHANISM.memory.init(), 20, 4)
    with pytest.raises(ParameterError, match="do not start anew within a run"):
        MECHANISM.memory.simulated(1, restart_every=5)


def test_corrections_are_exact_to_half_a_point() -> None:
    random, weights = np.random.default_rng(0), MECHANISM.correlation.weights
    past = {age: random.integers(-(2**61), 2**61, size=20) for age in (1, 3)}
    found = correction(past, weights, 20)
    for i in range(20):
        exact = sum(Fraction(weights[age] * int(row[i]), 1 << 14) for age, row in past.items())
        assert abs(Fraction(int(found[i])) - exact) <= Fraction(1, 2)


def test_nothing_overflows_and_noise_fills_the_finest_grid() -> None:
    for sigma, window, reach in ((1.0, 40, 0.1), (3.0, 80, 0.5), (64.0, 1 << 17, 4.0)):
        of = ShapedGaussian(
            noise_deviation=sigma, step=0.1, window=window, coordinate_range=reach, bands=8, run_length=50
        )
        largest = of.farthest_draw + (1 << of.finest_bits)
        inherited = math.ceil(of.correlation.inherited * largest)
        limit = int(of.grid.limit) << (of.finest_bits - of.fraction_bits)
        assert largest + inherited + limit + (window << (of.finest_bits - 1)) < 2**62
        assert of.finest_bits >= 40
        variance = sum((256.0 * ratio * 2.0**shift) ** 2 for ratio, shift in of.draws)
        assert math.sqrt(variance) == pytest.approx(math.ldexp(sigma, of.finest_bits), rel=1e-12)
        assert of.draws[-1][1] == 0


def test_noise_and_rounding_are_taken_away() -> None:
    """The sum over rounds has the variance of the exact correlated Gaussian times 1 + 1/(12σ²), not T/12 more."""
    of = ShapedGaussian(noise_deviation=1.5, step=1.0, window=64, coordinate_range=0.1, bands=16, run_length=64)
    given, state, total = protocol(of, dim=4000), of.memory.init(), np.zeros(4000)
    for round_ in range(64):
        values = given.encode_integers(np.zeros(4000, np.float32), round_, seeds=state)
        total += values - 0.5 * (of.window - 1)
    expected = (1.5**2 + 1 / 12) * of.correlation.prefix_variance()[-1]
    # 4000 squares of Gaussians: a standard error of 2.2 %; false alarms below 1e-6.
    assert np.var(total) == pytest.approx(expected, rel=0.115)
    assert np.var(total) < 0.7 * (1.5**2 * of.correlation.prefix_variance()[-1] + 64 / 12)


def test_a_silo_without_state_begins_anew() -> None:
    given, state = protocol(), MECHANISM.memory.init()
    given.encode(np.zeros(DIM), 3)  # keeps nothing, and takes nothing away
    given.encode(np.zeros(DIM), 4, seeds=state)
    assert list(state.rows) == [4]
    for round_ in range(5, 12):
        given.encode(np.zeros(DIM), round_, seeds=state)
    assert list(state.rows) == [9, 10, 11]  # b - 1 rows


def test_a_state_is_used_once_in_a_round_and_never_by_halves() -> None:
    given, state = protocol(), MECHANISM.memory.init()
    given.encode(np.zeros(DIM), 2, seeds=state)
    for again in (2, 1):
        with pytest.raises(ParameterError, match="once in a round"):
            given.encode(np.zeros(DIM), again, seeds=state)
    # A message that fails leaves no row behind: half of it would still be the correction, which tells other rows.
    with pytest.raises(NonFiniteError):
        given.encode(np.full(DIM, np.nan), 3, seeds=state)
    assert list(state.rows) == [2]
    given.encode(np.zeros(DIM), 3, seeds=state)
    assert list(state.rows) == [2, 3]
    for again in (3, 2, 1):
        with pytest.raises(ParameterError, match="once in a round"):
            given.encode(np.zeros(DIM), again, seeds=state)
    with pytest.raises(ParameterError, match="No message of round 9"):
        state.commit(9, 4)
    with pytest.raises(ParameterError, match="state of its own"):
        given.encode(np.zeros(DIM), 4, seeds=(b"0" * 16,))
    with pytest.raises(ParameterError, match="not one of 51"):
        protocol(dim=51).encode(np.zeros(51), 4, seeds=state)
    with pytest.raises(ParameterError, match="below run_length"):
        given.encode(np.zeros(DIM), 20, seeds=state)
    assert "rows" not in repr(SiloState({1: np.arange(3)}))


def test_a_state_that_cannot_be_kept_holds_the_message_back() -> None:
    def failing(state: SiloState) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        protocol().encode(np.zeros(DIM), 0, seeds=SiloState(keep=failing))


# ---------------------------------------------------------------------- what is proved


@pytest.mark.parametrize(
    ("silos", "asked", "bits", "most"),
    [
        (10, {"dropout": 0.2, "examples": 10, "bits": 6}, 6.0, 1.012),
        (10, {"dropout": 0.2, "examples": 10, "bits": 7.3, "secure": True}, 7.3, 1.015),
        (100, {"dropout": 0.1, "examples": 1, "bits": 8.6, "secure": True}, 8.6, 1.02),
    ],
)
def test_silos_need_few_bits(silos: int, asked: dict[str, Any], bits: float, most: float) -> None:
    """300 rounds, d = 10⁴, ε = 4: all noise in the model over that of the exact correlated Gaussian."""
    found = plan_examples(silos, 10_000, 4.0, 1e-6, rounds=300, participation="once", correlated=32, **asked)
    mechanism = found.protocol.mechanism
    assert isinstance(mechanism, ShapedGaussian)
    assert found.protocol.bits_per_coordinate <= bits
    assert found.guarantee.method == "shaped-gaussian"
    assert found.guarantee.epsilon <= 4.0
    noise = mechanism.noise
    # The exact Gaussian for the same claim has no slack and no total variation to pay for, and no rounding.
    exact = plan_examples(
        silos, 10_000, 4.0, 1e-6, rounds=300, participation="once", correlated=32, **{**asked, "bits": 16}
    )
    best = exact.protocol.mechanism.step * exact.protocol.mechanism.noise_deviation  # type: ignore[attr-defined]
    ours = mechanism.step * math.sqrt(noise.taken_away)
    assert (ours / best) ** 2 <= most
    assert found.prefix is not None
    assert found.prefix.gain > 18.5


def test_plans_for_silos_in_every_round_shape_their_rounding() -> None:
    found = plan(10, 200, 4.0, 1e-6, rounds=30, participation="every", correlated=4, bits=7)
    assert found.protocol.mechanism.name == "shaped-gaussian"
    assert found.guarantee.epsilon <= 4.0
    assert Protocol.from_json(found.protocol.to_json()) == found.protocol
    with pytest.raises(ParameterError, match="for silos"):
        plan(10, 200, 4.0, 1e-6, rounds=30, participation="once", correlated=4, bits=7, mechanism="shaped-gaussian")
    seeds = plan(
        10, 200, 4.0, 1e-6, rounds=30, participation="every", correlated=4, bits=12, mechanism="correlated-gaussian"
    )
    assert seeds.protocol.mechanism.name == "correlated-gaussian"


def test_a_run_with_too_little_noise_or_one_honest_silo_has_no_proof() -> None:
    few = protocol(
        ShapedGaussian(noise_deviation=1.0, step=1.0, window=64, coordinate_range=0.1, bands=4, run_length=20)
    )
    with pytest.raises(ConditionError):
        guarantee(Run.of(few, rounds=20, participation="once"), 1e-6)
    with pytest.raises(ConditionError, match="two honest silos"):
        guarantee(Run.of(protocol(clients=2), rounds=20, participation="every", colluding=1), 1e-6)


def test_fewer_silos_and_more_dropouts_cost_more() -> None:
    loud = protocol(replace(MECHANISM, step=2.0, separation=None))

    def epsilon(surviving: int) -> float:
        return guarantee(Run.of(loud, rounds=20, participation="once", surviving=surviving), 1e-6).epsilon

    assert epsilon(4) < epsilon(3) < epsilon(2)


def test_one_honest_silo_and_silos_that_come_and_go_are_refused() -> None:
    memory = MECHANISM.memory
    memory.check_honest(2, 0, 2)
    with pytest.raises(ConditionError, match="two honest silos"):
        memory.check_honest(1, 0, 1)
    memory.check_steady(20, 0.0, Participation.every())
    for participation in (Participation.once(), Participation.parse("poisson:0.5")):
        with pytest.raises(ParameterError, match="the same silos take part"):
            memory.check_steady(20, 0.0, participation)


def test_a_state_uses_no_row_that_is_too_old() -> None:
    """Of another length, say: it is not looked at."""
    state = SiloState({1: np.zeros(3, np.int64), 2: np.ones(DIM, np.int64)})
    with pytest.raises(ParameterError, match="not one of 50 coordinates"):
        state.begin(4, DIM, MECHANISM.correlation)
    assert len(state.begin(5, DIM, MECHANISM.correlation)) == DIM


def test_what_is_left_out_of_a_window_is_paid_for() -> None:
    wide, narrow = (
        ShapedGaussian(noise_deviation=3.0, step=0.1, window=window, coordinate_range=0.5, bands=4, run_length=20)
        for window in (80, 40)
    )
    assert wide.noise.cut < 1e-10 < narrow.noise.cut
    with pytest.raises(ConditionError):
        guarantee(Run.of(protocol(narrow), rounds=20, participation="once"), 1e-9)


# ---------------------------------------------------------------------- simulated rounds


def test_simulated_rounds_are_life_message_by_message() -> None:
    given, source = protocol(), MECHANISM.memory.simulated(seed=7)
    states = [SiloState() for _ in range(SILOS)]
    vectors = np.random.default_rng(3).normal(size=(SILOS, DIM)).astype(np.float32) * 0.05
    for round_ in range(6):
        simulator = RoundSimulator(given, round_, seed=7, source=source.on_host(SILOS, DIM))
        simulator.add(vectors[:1])
        simulator.add(vectors[1:])
        expected = np.zeros(DIM, dtype=np.uint64)
        for silo in range(SILOS):
            stream = simulator._keystream(silo)
            expected += pipeline.integers(given, vectors[silo], round_, stream, states[silo])
        assert np.array_equal(simulator.sums, expected)
        assert np.array_equal(simulator._noisy_sums(), expected)
        assert source.parts["silos"].rounds.keys() == states[0].rows.keys() | source.parts["silos"].rounds.keys()
        for silo in range(SILOS):
            assert np.array_equal(source.parts["silos"].rounds[round_][silo], states[silo].rows[round_])


def test_a_simulated_round_is_not_begun_again() -> None:
    source = MECHANISM.memory.simulated(seed=None).on_host(SILOS, DIM)
    source.of_client(MECHANISM.kernel(), 0, 3)
    with pytest.raises(ParameterError, match="not run again"):
        source.of_client(MECHANISM.kernel(), 0, 2)
    with pytest.raises(ParameterError, match="all 4 silos"):
        source.noisy(np.zeros(DIM), 3, 3, Keystream())


@pytest.mark.parametrize("sigma", [0.99, 64.01, math.nan])
def test_deviations_that_nothing_is_proved_for_are_refused(sigma: float) -> None:
    for known in (1.0, 64.0):
        assert replace(MECHANISM, noise_deviation=known).noise_deviation == known
    with pytest.raises(ParameterError, match="noise_deviation"):
        replace(MECHANISM, noise_deviation=sigma)


def test_a_device_plays_each_silo_with_its_own_rows() -> None:
    """What a silo sends and keeps are the module's three lines, to the last point of the finest grid."""
    torch = pytest.importorskip("torch")
    of, dim = replace(MECHANISM, noise_deviation=1.5), 500
    bits, grid, limit = of.finest_bits, of.finest_bits - of.fraction_bits, int(of.grid.limit)
    source = of.memory.simulated(seed=1)
    # Rows that fill the finest grid, as those of later rounds do.
    rows = {round_: np.random.default_rng(round_).integers(-1 << bits, 1 << bits, (2, dim)) for round_ in range(3)}
    source.parts["silos"].load_state_dict({"rounds": {n: torch.from_numpy(row) for n, row in rows.items()}})
    played = source.on_device(2, dim, torch.device("cpu"))
    points = torch.linspace(-2.0 * limit, 2.0 * limit, 2 * dim).reshape(2, dim)
    for round_ in range(3, 9):
        said = [played.messages(points[i : i + 1], i, round_, 10 * round_).numpy() for i in range(2)]
        kept = source.parts["silos"].rounds[round_].numpy()
        for i in range(2):
            x = np.rint(np.clip(points[i].numpy(), -limit, limit)).astype(np.int64) << grid
            past = {age: rows[round_ - age][i] for age in range(1, of.bands) if age <= round_}
            base = x + correction(past, of.correlation.weights, dim)
            assert np.array_equal(kept[i], (said[i] << bits) - ((of.window - 1) << (bits - 1)) - base)
        rows[round_] = kept
    noise = np.stack(list(rows.values())[3:]).reshape(6, -1) * 2.0**-bits
    # Each row has 1000 draws: six standard errors of a mean and of a variance.
    assert np.abs(noise.mean(axis=1)).max() < 6.0 * math.sqrt(2.34 / 1000)
    assert np.abs(noise.var(axis=1) / (1.5**2 + 1 / 12) - 1.0).max() < 6.0 * math.sqrt(2 / 1000)
    assert np.abs(np.corrcoef(noise) - np.eye(6)).max() < 6.0 / math.sqrt(1000)
    assert (played.on_device(2), played.before_rounding(0, 2)) == (FairCoins(0), 0.0)
    with pytest.raises(ParameterError, match="2 silos, got 3"):
        played.messages(points, 1, 9, 5)


def test_devices_play_silos_in_plain_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from cpsgd.simulation.device import DeviceRound

    of = ShapedGaussian(noise_deviation=1.5, step=1.0, window=64, coordinate_range=0.1, bands=16, run_length=64)
    given, source = protocol(of, dim=2000), of.memory.simulated(seed=1)
    total = torch.zeros(2000, dtype=torch.float64)
    rows = source.parts["silos"].rounds
    for round_ in range(64):
        played = source.on_device(SILOS, 2000, torch.device("cpu"))
        one = DeviceRound(given, round_, seed=1, device="cpu", source=played)
        one.add(torch.zeros(1, 2000))
        one.add(torch.zeros(SILOS - 1, 2000))
        one.mean()
        total += one.sums - SILOS * 0.5 * (of.window - 1)
        rows = source.parts["silos"].rounds
        weights = np.array(of.correlation.weights[: min(16, round_ + 1)], dtype=np.float64) / 2**14
        kept = np.stack([rows[round_ - j].numpy() for j in range(len(weights))]) * 2.0**-of.finest_bits
        said = one.sums.numpy() - SILOS * 0.5 * (of.window - 1)
        assert np.allclose(said, np.tensordot(weights, kept, 1).sum(axis=0), atol=1e-9)
    expected = SILOS * (1.5**2 + 1 / 12) * of.correlation.prefix_variance()[-1]
    assert float(total.var()) == pytest.approx(expected, rel=0.16)  # a standard error of 3.2 %, false alarms 1e-6
    assert len(rows) == 16
