"""Sums of a run with correlated noise, against messages that clients encode one by one."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from cpsgd.codec import pipeline
from cpsgd.correlated import run_sums
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.run_sums import Slots, SummedLineages, wide_draw
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream
from cpsgd.simulation.cpu import RoundSimulator, noise_norm

Array = NDArray[np.float64]
Rounds = Callable[[Protocol, NDArray[np.float32], int], Array]

BANDS, ROUNDS, CLIENTS = 3, 6, 2


def protocol_for(dim: int, *, clients: int = CLIENTS, sigma: float = 4.0, rotate: bool = False) -> Protocol:
    mechanism = CorrelatedGaussian(
        noise_deviation=sigma, step=1.0, window=2**10, coordinate_range=16.0, bands=BANDS, run_length=ROUNDS
    )
    return Protocol(clients=clients, dim=dim, clip_norm=16.0 * math.sqrt(dim), mechanism=mechanism, rotate=rotate)


def encoded(protocol: Protocol, vectors: NDArray[np.float32], rounds: int) -> Array:
    """The means of rounds of real messages, of lineages that nobody breaks."""
    count, found = len(vectors), []
    seeds: list[list[bytes]] = [[] for _ in range(count)]
    for number in range(rounds):
        sums = np.zeros(protocol.dim, dtype=np.uint64)
        for client in range(count):
            own = bytes([number, client]) * 8
            seeds[client] = [own, *seeds[client]][:BANDS]
            sums += pipeline.integers(protocol, vectors[client], number, Keystream(own), seeds[client])
        found.append(protocol.decode_sum(sums, count, number))
    return np.array(found, dtype=np.float64)


def simulated(protocol: Protocol, vectors: NDArray[np.float32], rounds: int, seed: int | None = 5) -> Array:
    lineages = SummedLineages(protocol.mechanism, Slots(protocol.mechanism, seed), len(vectors), protocol.dim)
    found = []
    for number in range(rounds):
        simulator = RoundSimulator(protocol, number, seed=seed, source=lineages)
        simulator.add(vectors)
        found.append(simulator.mean())
    return np.array(found, dtype=np.float64)


def covariance(protocol: Protocol, rounds: int, count: int) -> Array:
    """Of the means of one coordinate, in all rounds."""
    mechanism = protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    factors = mechanism.correlation.factors
    mixing: Any = sum(np.diag(np.full(rounds - k, factors[k]), -k) for k in range(BANDS))
    z = mechanism.noise_deviation**2 * mixing @ mixing.T
    rest = mechanism.noise.own_variance + 1.0 / 12.0
    return np.asarray((z + rest * np.eye(rounds)) / count)


def check_covariance(found: Array, expected: Array) -> None:
    """Within six deviations in each entry: those of Gaussian products."""
    dim = found.shape[1]
    seen = found @ found.T / dim
    variance = (np.outer(np.diag(expected), np.diag(expected)) + expected**2) / dim
    assert np.all(np.abs(seen - expected) < 6.0 * np.sqrt(variance))


@pytest.mark.parametrize("rounds_of", [encoded, simulated])
def test_noise_is_correlated_over_rounds_as_the_theory_says(rounds_of: Rounds) -> None:
    protocol = protocol_for(20_000)
    vectors = np.zeros((CLIENTS, protocol.dim), dtype=np.float32)
    check_covariance(rounds_of(protocol, vectors, ROUNDS), covariance(protocol, ROUNDS, CLIENTS))


def test_many_clients_have_the_same_law() -> None:
    protocol = protocol_for(4000, clients=100)
    vectors = np.zeros((100, protocol.dim), dtype=np.float32)
    check_covariance(simulated(protocol, vectors, ROUNDS), covariance(protocol, ROUNDS, 100))


@pytest.mark.parametrize("count", [2, 3, 32, 33, 200])
def test_a_sum_has_the_mean_and_the_variance_of_its_messages(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lineages' noise, which is drawn first; the other draw is replaced by uniform numbers."""
    mechanism: Any = protocol_for(40_000, clients=count).mechanism
    half = 1 << (mechanism.finest_bits - 1)
    deviations: list[float] = []

    def drawn(deviation: float, stream: Keystream, size: int) -> Any:
        deviations.append(math.ldexp(deviation, -mechanism.finest_bits))
        return np.random.default_rng(1).integers(-half, half, size) * (len(deviations) - 1)

    monkeypatch.setattr(run_sums, "wide_draw", drawn)
    sums = SummedLineages(mechanism, Slots(mechanism, 5), count, 40_000)
    points = np.full(40_000, count * int(mechanism.grid.limit), dtype=np.uint64)
    found = sums.noisy(points, count, 0, Keystream(bytes(16)))
    # What is rounded off is uniform in every message but the last, and drawn where these are few.
    uniform = (count - 1) / 12.0
    rest = count * (mechanism.noise.own_variance + 1.0 / 12.0) - 1.0 / 12.0
    assert deviations[1] ** 2 == pytest.approx(rest if count > 32 else rest - uniform, rel=1e-12)
    # Rounding down the sum of a uniform number and another one adds f (1 - f) to the variance, 1/6 where f is uniform.
    spread = uniform + 1.0 / 6.0 if count <= 32 else 0.25
    assert abs(found.mean() - count * mechanism.centre) < 5.0 * math.sqrt(spread / 40_000)
    assert count > 32 or abs(found.var() / spread - 1.0) < 6.0 * math.sqrt(2.0 / 40_000)


def test_the_integers_have_the_law_of_messages() -> None:
    """Two samples of what a round gives, and of the sum of two: the same histogram, with rounding visible in it."""
    protocol = protocol_for(40_000)
    # Fractions that rounding at the nearest integer would show, were they not hidden.
    vectors = np.tile(np.array([[0.3], [-2.6]], dtype=np.float32), (1, protocol.dim))
    real, drawn = encoded(protocol, vectors, 3), simulated(protocol, vectors, 3)
    for seen, other in ((real[0], drawn[0]), (real[2], drawn[2]), (real[1] + real[2], drawn[1] + drawn[2])):
        values = np.rint(2 * seen).astype(int), np.rint(2 * other).astype(int)
        low, high = np.quantile(values[0], [0.001, 0.999])
        counts = [np.bincount(np.clip(v, low, high).astype(int) - int(low)) for v in values]
        assert chi2_contingency(counts).pvalue > 1e-7
        assert abs(seen.mean() - other.mean()) < 6.0 * math.sqrt(2.0 * seen.var() / protocol.dim)


def test_vectors_are_added_up_exactly_and_rotated_alike_in_all_rounds() -> None:
    protocol = protocol_for(64, clients=40, sigma=4.0, rotate=True)
    vectors = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    with_them, without = simulated(protocol, vectors, ROUNDS), simulated(protocol, 0 * vectors, ROUNDS)
    # The noise is the same: it follows from the seed. What is left is rounding to the sum's integers.
    difference = with_them - without
    assert np.abs(difference - vectors.mean(axis=0)).max() < 6.0 / 40
    assert np.array_equal(protocol.rotation_signs(0), protocol.rotation_signs(5))


def test_with_a_seed_a_run_is_repeated_and_taken_up_anywhere() -> None:
    protocol = protocol_for(50)
    vectors = np.ones((CLIENTS, 50), dtype=np.float32)
    whole = simulated(protocol, vectors, ROUNDS)
    assert np.array_equal(whole, simulated(protocol, vectors, ROUNDS))
    lineages = SummedLineages(protocol.mechanism, Slots(protocol.mechanism, 5), CLIENTS, 50)
    later = RoundSimulator(protocol, 4, seed=5, source=lineages)
    later.add(vectors)
    assert np.array_equal(later.mean(), whole[4].astype(np.float32))
    assert not np.array_equal(whole, simulated(protocol, vectors, ROUNDS, seed=6))


def test_without_a_seed_keys_are_kept_as_long_as_they_are_needed_and_drawn_once() -> None:
    mechanism = protocol_for(1).mechanism
    slots = Slots(mechanism, None)
    first, second = slots.draw(0), slots.draw(1)
    assert second[0] == first[0]
    assert second[1] != first[0]
    with pytest.raises(ParameterError, match="never drawn again"):
        slots.draw(1)
    third = slots.draw(2)
    kept = slots.state_dict()
    assert set(third) == {0, 1, 2}
    assert set(kept["keys"]) == {1, 2}  # the key of round 0 is of no use any more
    other = Slots(mechanism, None)
    other.load_state_dict(kept)
    # Round 3 was charged and lost with its key: later rounds go without it.
    assert set(other.draw(4)) == {2, 4}
    with pytest.raises(ParameterError, match="never drawn again"):
        other.draw(3)
    other.draw(5)
    assert other.state_dict()["keys"] == {}
    with pytest.raises(CheckpointError):
        other.load_state_dict({"next": 1})


def test_noise_that_was_lost_is_not_taken_away() -> None:
    protocol = protocol_for(20_000)
    vectors = np.zeros((CLIENTS, protocol.dim), dtype=np.float32)
    lineages = SummedLineages(protocol.mechanism, Slots(protocol.mechanism, None), CLIENTS, protocol.dim)
    found = []
    for number in (0, 2):
        simulator = RoundSimulator(protocol, number, source=lineages)
        simulator.add(vectors)
        found.append(simulator.mean())
    check_covariance(np.array(found, dtype=np.float64), covariance_without(protocol))


def covariance_without(protocol: Protocol) -> Array:
    """Of rounds 0 and 2, where the noise of round 1 is nobody's."""
    mechanism = protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    weight = mechanism.correlation.factors[2]
    rest = mechanism.noise.own_variance + 1.0 / 12.0
    z = mechanism.noise_deviation**2
    return np.array([[z + rest, weight * z], [weight * z, (1 + weight**2) * z + rest]]) / CLIENTS


def test_another_number_of_messages_is_refused() -> None:
    protocol = protocol_for(10, clients=3)
    lineages = SummedLineages(protocol.mechanism, Slots(protocol.mechanism, 1), 3, 10)
    simulator = RoundSimulator(protocol, 0, seed=1, source=lineages)
    simulator.add(np.zeros((2, 10), dtype=np.float32))
    with pytest.raises(ParameterError, match="Expected 3 messages"):
        simulator.mean()


def test_the_noise_norm_is_that_of_a_settled_round() -> None:
    protocol = protocol_for(4000)
    vectors = np.zeros((CLIENTS, protocol.dim), dtype=np.float32)
    last = simulated(protocol, vectors, ROUNDS)[-1]
    assert np.linalg.norm(last) == pytest.approx(
        noise_norm(protocol, CLIENTS, variance=protocol.mechanism.noise.settled_variance), rel=0.06
    )


@pytest.mark.parametrize("deviation", [2048.0, 4095.5, 4096.0, 123_456.0, 3e8])
def test_wide_draws_have_their_variance_and_fill_their_grid(deviation: float) -> None:
    drawn = wide_draw(deviation, Keystream(bytes(16)), 50_000)
    assert abs(drawn.var() / deviation**2 - 1.0) < 6.0 * math.sqrt(2.0 / 50_000)
    assert abs(drawn.mean()) < 6.0 * deviation / math.sqrt(50_000)
    assert abs(np.mean((drawn / deviation) ** 4) - 3.0) < 6.0 * math.sqrt(96.0 / 50_000)
    assert abs(np.mean(drawn & 1) - 0.5) < 3.0 / math.sqrt(50_000)


def test_wide_draws_are_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sums, "_BLOCK", 10)
    drawn = wide_draw(3000.0, Keystream(bytes(16)), 25)
    assert drawn.shape == (25,)
    assert np.array_equal(drawn[:20], wide_draw(3000.0, Keystream(bytes(16)), 20))
    assert np.all(drawn != 0)
    assert np.unique(drawn).size == 25


def test_a_client_has_as_many_values_as_there_are_points() -> None:
    mechanism: Any = protocol_for(4).mechanism
    client = SummedLineages(mechanism, Slots(mechanism, 5), CLIENTS, 4).client
    assert client.values == 2 * int(mechanism.grid.limit) + 1
