"""The simulator on the CPU against single messages, exact laws and the promises of a protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from cpsgd import Aggregator, Protocol, plan
from cpsgd.errors import EmptyError, GuaranteeError, InfeasibleError, ParameterError, VectorError
from cpsgd.mechanisms import Binomial, Coins, DiscreteGaussian, Mechanism, Skellam, binomial
from cpsgd.mechanisms.noise import Noise
from cpsgd.randomness import Keystream
from cpsgd.simulation.cpu import RoundSimulator, clipped_sum, float_mean, noise_norm

from .exact_law import CLIENTS, DIM, PROTOCOLS, VALUES, coins, exact_law, integers, protocol


def vectors() -> np.ndarray:
    return np.tile(np.array(VALUES, dtype=np.float32)[:, None], (1, DIM))


@pytest.mark.parametrize("tested", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_sum_has_the_law_of_single_messages(tested: Protocol, fixed_seed: None) -> None:
    # Both paths against the exact law, and against each other; each false alarm has probability 1e-7.
    simulator = RoundSimulator(tested, round=3, seed=5)
    simulator.add(vectors())
    aggregator = Aggregator(tested, round=3)
    for vector in vectors():
        aggregator.add(tested.encode(vector, round=3))
    law = exact_law(tested)
    counts = []
    for mean in (simulator.mean(), aggregator.mean()):
        sums = integers(tested, mean, CLIENTS)
        observed = np.bincount(sums, minlength=law.size)
        kept = law * DIM >= 5
        seen = np.append(observed[kept], observed[~kept].sum())
        expected = np.append(law[kept], law[~kept].sum()) * DIM
        seen, expected = seen[expected > 0], expected[expected > 0]
        assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-7
        counts.append(seen)
        exact_mean = law @ np.arange(law.size)
        exact_variance = law @ (np.arange(law.size) - exact_mean) ** 2
        # The sample variance of 20,000 nearly normal numbers is within 5.4 · √(2/20000) = 5.4 % but for 1e-7.
        assert sums.var() == pytest.approx(exact_variance, rel=0.06)
    both = np.array(counts)
    expected = np.outer(both.sum(axis=1), both.sum(axis=0)) / both.sum()
    assert chisquare(both.ravel(), expected.ravel(), ddof=both.shape[1]).pvalue > 1e-7


LARGE = Binomial(levels=4, trials=500, coordinate_range=1.0)
SAMPLERS = {
    # Drawn in one go: no further from the law than as many clients' own draws.
    "inversion": (LARGE, True),
    "biased": (Binomial(levels=4, trials=20, p=0.25, coordinate_range=1.0), True),
    "skellam": (Skellam(levels=4, variance=3.5, coordinate_range=1.0), True),
    # Client by client: coins are exact, and a table is not.
    "coins": (Binomial(levels=4, trials=20, coordinate_range=1.0), False),
    "discrete-gaussian": (DiscreteGaussian(levels=4, sigma_squared=2.0, coordinate_range=1.0), False),
}


@pytest.mark.parametrize(("mechanism", "at_once"), SAMPLERS.values(), ids=SAMPLERS)
def test_noise_that_protects_is_as_exact_as_the_accounting_says(
    mechanism: Mechanism, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = Protocol(clients=30, dim=5, clip_norm=1.0, mechanism=mechanism, rotate=True)
    called = []
    noise = type(mechanism.noise)
    for name in ("of_sum", "of_clients"):
        real = getattr(noise, name)

        def draw(self: Noise, *arguments: Any, name: str = name, real: Any = real) -> Any:
            called.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(noise, name, draw)
    for seed in (None, 7):
        simulator = RoundSimulator(tested, round=0, seed=seed)
        simulator.add_zeros(30)
        simulator.mean()
    assert called == ["of_sum" if at_once else "of_clients", "of_sum"]
    # What `guarantee` takes off δ for each coordinate of each round covers the sampler that was used.
    assert (mechanism.noise.sum_variation(30) <= 30 * mechanism.noise.variation) == at_once


def test_a_large_epsilon_of_coins_would_not_survive_a_table() -> None:
    # At ε = 64 a table of 128-bit numbers costs more than δ, and nothing is taken off δ for coins.
    coins_of = Binomial(levels=4, trials=27, coordinate_range=1.0)
    assert coins_of.noise.variation == 0.0
    assert 700 * coins_of.noise.sum_variation(1_797) * np.exp(64.0) > 1e-6


def test_coins_leave_no_noise_to_draw() -> None:
    tested = coins(3)
    drawn = tested.mechanism.noise.of_sum(5, 7, Keystream(bytes(16)))
    assert drawn.tolist() == [0] * 7
    assert not tested.mechanism.noise.separate
    simulator = RoundSimulator(tested, round=0, seed=1)
    simulator.add_zeros(37)
    # Zeros are tossed, too: their coins are fair, and their variance is what `noise_norm` says.
    sums = integers(tested, simulator.mean(), 37)
    assert sums.var() == pytest.approx(37 * 3 / 4, rel=5.4 * np.sqrt(2 / DIM))
    assert simulator.noise_norm() ** 2 == pytest.approx(DIM * tested.scale**2 * (3 / 4) / 37, rel=1e-12)


def test_rotated_means_estimate_the_mean(fixed_seed: None) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(400, 300)).astype(np.float32)
    tested = Protocol.rotated_binomial(
        clients=400, dim=300, clip_norm=25.0, levels=64, trials=30, coordinate_range=6.0, rotation_seed=9
    )
    simulator = RoundSimulator(tested, round=2)
    simulator.add(rows)
    error = np.linalg.norm(simulator.mean() - rows.mean(axis=0))
    # ‖error‖² is nearly a sum of 300 squared normals: outside these bounds with probability under 1e-9.
    assert 0.5 * simulator.noise_norm() < error < 2.0 * simulator.noise_norm()


@pytest.mark.parametrize(
    "mechanism",
    [Coins(coins=2, theta=0.1, coordinate_range=2.0), Binomial(levels=5, trials=9, coordinate_range=2.0)],
    ids=["coins", "binomial"],
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_seeded_round_depends_on_neither_chunks_nor_threads(chunk: int, threads: int, mechanism: Mechanism) -> None:
    rows = np.random.default_rng(2).normal(size=(100, 50)).astype(np.float32)
    tested = Protocol(clients=100, dim=50, clip_norm=5.0, mechanism=mechanism)
    whole = RoundSimulator(tested, round=0, seed=4)
    whole.add(rows)
    parts = RoundSimulator(tested, round=0, seed=4, threads=threads)
    for start in range(0, 100, chunk):
        parts.add(rows[start : start + chunk])
    assert parts.count == 100
    np.testing.assert_array_equal(parts.mean(), whole.mean())


def test_other_seeds_rounds_and_none_give_other_noise() -> None:
    tested = Protocol.binomial(clients=1, dim=100, clip_norm=1.0, levels=3, trials=50)

    def mean(seed: int | None, round: int = 0) -> bytes:
        simulator = RoundSimulator(tested, round=round, seed=seed)
        simulator.add(np.zeros((1, 100), dtype=np.float32))
        return simulator.mean().tobytes()

    assert mean(1) == mean(1)
    assert len({mean(1), mean(2), mean(1, round=1), mean(None), mean(None)}) == 5


def test_wide_levels_do_not_overflow_32_bits() -> None:
    tested = Protocol.binomial(clients=600, dim=3, clip_norm=2.0, levels=2**24, trials=0, coordinate_range=1.0)
    simulator = RoundSimulator(tested, round=0, seed=1, threads=1)
    simulator.add(np.full((600, 3), 0.75, dtype=np.float32))
    np.testing.assert_allclose(simulator.mean(), 0.75, atol=1e-6)


def test_a_modulus_changes_nothing_while_nothing_wraps() -> None:
    rows = np.random.default_rng(3).normal(size=(50, 40)).astype(np.float32)
    means = []
    for modulus in (None, 1024):
        tested = Protocol.binomial(clients=50, dim=40, clip_norm=1.0, levels=3, trials=20, modulus=modulus)
        simulator = RoundSimulator(tested, round=0, seed=1)
        simulator.add(rows)
        means.append(simulator.mean())
    np.testing.assert_allclose(means[0], means[1], atol=1e-6)


def test_noise_of_very_many_trials_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binomial, "MAX_TRIALS", 1000)
    tested = Protocol.binomial(clients=50, dim=20_000, clip_norm=1.0, levels=2, trials=53)
    simulator = RoundSimulator(tested, round=0, seed=1)
    simulator.add(np.full((50, 20_000), -1.0, dtype=np.float32) / np.float32(142.0))
    sums = integers(tested, simulator.mean(), 50)
    # 50 · 53 coins and 50 roundings with probability near 1/2; bounds of 5.4 standard deviations.
    variance = 50 * 53 / 4 + 50 * (0.25 - (0.5 / 142.0) ** 2)
    assert sums.var() == pytest.approx(variance, rel=5.4 * np.sqrt(2 / 20_000))


def test_the_gaussian_protocol_adds_its_variance_once_a_client() -> None:
    tested = Protocol.gaussian(clients=100, dim=20_000, clip_norm=1.0, sigma=0.5)
    simulator = RoundSimulator(tested, round=0, seed=1)
    simulator.add(np.zeros((60, 20_000), dtype=np.float32))
    simulator.add_zeros(40)
    mean = simulator.mean()
    # 5.4 standard deviations of a sample variance and a mean of 20,000 normal numbers.
    assert mean.var() == pytest.approx(0.5**2 / 100, rel=5.4 * np.sqrt(2 / 20_000))
    assert abs(mean.mean()) < 5.4 * 0.05 / np.sqrt(20_000)


def test_clipped_sums() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(clipped_sum(rows, 1.0), [0.9, 1.2], rtol=1e-5)
    floats = float_mean(2, 1.0)
    floats.add(rows)
    floats.add_zeros(1)
    np.testing.assert_allclose(floats.mean(), [0.225, 0.3], rtol=1e-5)
    assert floats.noise_norm() == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["binomial", "gaussian", "floats"])
def test_a_row_that_is_not_finite_counts_as_zeros(bad: float, kind: str) -> None:
    rows = np.linspace(-1.0, 1.0, 40 * 3, dtype=np.float32).reshape(40, 3)
    zeroed = rows.copy()
    zeroed[17] = 0.0
    rows[17, 1] = bad
    gaussian = Protocol.gaussian(clients=40, dim=3, clip_norm=1.0, sigma=0.1)
    of = {"binomial": protocol(clients=40, dim=3), "gaussian": gaussian}
    means = []
    for given in (rows, zeroed):
        engine = float_mean(3, 1.0) if kind == "floats" else RoundSimulator(of[kind], 0, seed=1)
        engine.add(given)
        assert engine.count == 40
        means.append(engine.mean())
    np.testing.assert_array_equal(*means)


def test_zeros_fill_a_cohort_up_with_their_noise() -> None:
    tested = Protocol.binomial(clients=40, dim=20_000, clip_norm=1.0, levels=3, trials=10)
    simulator = RoundSimulator(tested, round=0, seed=1)
    simulator.add_zeros(37)
    assert simulator.count == 37
    # With an odd number of levels zero lies on a level, and only the noise is left.
    expected = noise_norm(Protocol.binomial(clients=40, dim=1, clip_norm=1.0, levels=3, trials=10), 37) ** 2
    noise_only = expected * (10 * 0.25) / (10 * 0.25 + 0.25)
    assert simulator.mean().var() == pytest.approx(noise_only, rel=5.4 * np.sqrt(2 / 20_000))


def test_a_mean_is_released_once() -> None:
    simulator = RoundSimulator(protocol(dim=3), round=0)
    simulator.add(np.zeros((2, 3), dtype=np.float32))
    first = simulator.mean()
    assert simulator.mean() is first
    with pytest.raises(ParameterError, match="no more messages"):
        simulator.add(np.zeros((2, 3), dtype=np.float32))


def test_too_few_rows_are_held_to_the_promise() -> None:
    best = plan(clients=200, dim=4, epsilon=2.0, delta=1e-6, bits=8, mechanism="binomial")
    simulator = RoundSimulator(best.protocol, round=0)
    simulator.add(np.zeros((100, 4), dtype=np.float32))
    with pytest.raises(GuaranteeError, match=r"100 messages .* at least 200\. The ε that is true with so few is 2\.\d"):
        simulator.mean()
    with pytest.raises(GuaranteeError):
        simulator.mean(accept_epsilon=2.0)
    assert simulator.mean(accept_epsilon=4.0).shape == (4,)
    simulator = RoundSimulator(best.protocol, round=0)
    simulator.add(np.zeros((200, 4), dtype=np.float32))
    assert simulator.mean().shape == (4,)


def test_bad_input() -> None:
    simulator = RoundSimulator(protocol(dim=3), round=0)
    with pytest.raises(EmptyError):
        simulator.mean()
    with pytest.raises(VectorError, match="rows of 3 float32"):
        simulator.add(np.zeros((2, 4), dtype=np.float32))
    with pytest.raises(VectorError, match="float64"):
        simulator.add(np.zeros((2, 3)))
    with pytest.raises(ParameterError, match="seed"):
        RoundSimulator(protocol(dim=3), round=0, seed=-1)
    with pytest.raises(EmptyError):
        float_mean(3, 1.0).mean()


def test_the_round_after_the_last_one_promised_is_refused() -> None:
    best = plan(clients=50, dim=3, epsilon=4.0, delta=1e-5, rounds=2)
    RoundSimulator(best.protocol, round=1)
    with pytest.raises(InfeasibleError, match=r"about 2 rounds.*number 2"):
        RoundSimulator(best.protocol, round=2)
