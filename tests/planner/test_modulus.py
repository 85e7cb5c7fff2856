"""The overflow bound against exact tails, against the worst vectors, and against the real decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm, skellam

from cpsgd import Protocol
from cpsgd.codec import pipeline
from cpsgd.mechanisms import Binomial, Coins, LazyCoins, RoundedGaussian
from cpsgd.mechanisms.sums import Deviation
from cpsgd.mechanisms.tilted import Tilted
from cpsgd.planner.modulus import overflow_probability, smallest_modulus

MECHANISM = Binomial(levels=5, trials=11, coordinate_range=0.3)
ROUND: dict[str, Any] = {"clients": 200, "dim": 256, "clip_norm": 1.0}


@pytest.mark.parametrize("overflow", [1e-3, 1e-9, 1e-15])
@pytest.mark.parametrize("rotate", [True, False])
def test_smallest_is_smallest(overflow: float, rotate: bool) -> None:
    found = smallest_modulus(MECHANISM, **ROUND, rotate=rotate, overflow=overflow)
    assert overflow_probability(found, MECHANISM, **ROUND, rotate=rotate) <= overflow
    assert overflow_probability(found - 1, MECHANISM, **ROUND, rotate=rotate) > overflow


def test_never_less_than_one_client_needs_nor_more_than_everything() -> None:
    mechanism = Binomial(levels=4, trials=9, coordinate_range=1.0)
    alone = smallest_modulus(mechanism, clients=1, dim=8, clip_norm=1.0)
    assert 4 + 9 <= alone <= 12 + 2
    assert overflow_probability(12 + 2, mechanism, clients=1, dim=8, clip_norm=1.0) == 0


def test_a_coarser_grid_of_many_levels_is_paid_for() -> None:
    # Levels as far apart, of which there are more than leave room for 2^16 grid points between two: 2^8 at 2^24 levels.
    clients, scale = 10**6, 0.1
    few, many = (
        smallest_modulus(
            Binomial(levels=k, trials=100, coordinate_range=0.5 * scale * (k - 1)),
            clients=clients,
            dim=64,
            clip_norm=1.0,
        )
        for k in (2**16, 2**24)
    )
    assert many - few == pytest.approx(2.0 * clients * (2.0**-8 - 2.0**-16), abs=2.0)


def test_monotone() -> None:
    base = smallest_modulus(MECHANISM, **ROUND)
    assert smallest_modulus(MECHANISM, **{**ROUND, "clients": 300}) > base
    assert smallest_modulus(replace(MECHANISM, trials=20), **ROUND) > base
    assert smallest_modulus(replace(MECHANISM, coordinate_range=0.6), **ROUND) < base
    assert smallest_modulus(MECHANISM, **ROUND, overflow=1e-6) < base
    assert smallest_modulus(MECHANISM, **ROUND, rotate=False) >= base


def exact_overflow(modulus: int, offset: float) -> float:
    """P(a coordinate's sum is outside the decoder's window | the vectors add `offset` levels), without rounding."""
    trials = ROUND["clients"] * MECHANISM.trials
    middle = ROUND["clients"] * (MECHANISM.trials / 2 + (MECHANISM.levels - 1) / 2)
    lowest = math.ceil(middle - modulus / 2)
    shift = ROUND["clients"] * (MECHANISM.levels - 1) / 2 + offset
    return float(
        binom.cdf(math.ceil(lowest - shift) - 1, trials, 0.5)
        + binom.sf(math.floor(lowest + modulus - 1 - shift), trials, 0.5)
    )


def test_the_bound_covers_all_clients_holding_the_worst_vector() -> None:
    # Unrotated, all clients sit at the edge of the range in one coordinate and at zero elsewhere: exact Binomial tails.
    scale = 2 * MECHANISM.coordinate_range / (MECHANISM.levels - 1)
    edge = ROUND["clients"] * MECHANISM.coordinate_range / scale
    for overflow in (1e-2, 1e-6, 1e-9):
        modulus = smallest_modulus(MECHANISM, **ROUND, rotate=False, overflow=overflow)
        exact = exact_overflow(modulus, edge) + (ROUND["dim"] - 1) * exact_overflow(modulus, 0.0)
        assert exact <= overflow


def test_the_bound_covers_a_rotated_common_vector() -> None:
    # One-hot vectors shared by all clients become ±D/√d everywhere: the exact tail at that offset.
    scale = 2 * MECHANISM.coordinate_range / (MECHANISM.levels - 1)
    offset = ROUND["clients"] * ROUND["clip_norm"] / math.sqrt(ROUND["dim"]) / scale
    modulus = smallest_modulus(MECHANISM, **ROUND, overflow=1e-6)
    assert ROUND["dim"] * exact_overflow(modulus, offset) <= 1e-6


def overflows(protocol: Protocol, vectors: np.ndarray, rounds: int, seed: int) -> int:
    """How many rounds decode to something else than the same sums do without a modulus."""
    rng = np.random.default_rng(seed)
    clients, dim = vectors.shape
    plain = Protocol.from_dict({**protocol.to_dict(), "modulus": None})
    bits = 16
    wrapped = 0
    for round_ in range(rounds):
        grid = sum(pipeline.to_grid(protocol, v.astype(np.float32), round_).astype(np.float64) for v in vectors[:1])
        # All clients hold the same vector; rounding is a Binomial number of ups in each coordinate.
        levels = grid / 2**bits + (MECHANISM.levels - 1) / 2
        floor = np.clip(np.floor(levels), 0, MECHANISM.levels - 2)
        ups = rng.binomial(clients, np.clip(levels - floor, 0.0, 1.0))
        sums = (clients * floor + ups + rng.binomial(clients * MECHANISM.trials, 0.5, dim)).astype(np.uint64)
        modular = pipeline.decode(protocol, sums % np.uint64(protocol.modulus or 1), clients, round_)
        wrapped += not np.allclose(modular, pipeline.decode(plain, sums, clients, round_), atol=1e-3)
    return wrapped


def test_simulated_overflow_of_the_real_decoder_is_below_the_bound() -> None:
    parameters = {**ROUND, "dim": 64}
    modulus = smallest_modulus(MECHANISM, **parameters, overflow=0.05)
    protocol = Protocol(**parameters, mechanism=MECHANISM, modulus=modulus)
    rng = np.random.default_rng(3)
    vector = rng.standard_normal(64)
    vectors = np.tile(vector / np.linalg.norm(vector), (200, 1))
    # 2,000 rounds at probability at most 0.05: more than 150 have probability under 1e-6 (mean 100, deviation 9.7).
    assert overflows(protocol, vectors, 2_000, seed=5) <= 150
    # The bound is not idle: with a modulus a third smaller most rounds overflow.
    tight = Protocol(**parameters, mechanism=MECHANISM, modulus=modulus // 3)
    assert overflows(tight, vectors, 100, seed=6) > 50


# ------------------------------------------------------------------ noise whose moments are bounded up to some λ only


@dataclass(frozen=True, kw_only=True)
class Differences(Binomial):
    """A stand-in whose deviation is that of a difference of two Poisson variables of this mean for each client.

    E exp(λ X) = exp(2 mean (cosh λ - 1)), which is at most exp(λ² V/2) with V = 4 mean (cosh 1 - 1) for |λ| <= 1,
    because (cosh λ - 1)/λ² rises with |λ|.
    """

    mean: float

    def deviations(
        self, *, clients: int, dim: int, clip_norm: float, rotate: bool, mean_norm: float | None = None
    ) -> list[Deviation]:
        proxy = clients * 4 * self.mean * (math.cosh(1) - 1)
        return [Deviation(offset=3.0, cumulant=lambda slope: 0.5 * proxy * slope * slope, steepest=1.0)]

    def exact_overflow(self, modulus: int, clients: int, dim: int) -> float:
        """P(some coordinate is M/2 above the centre or further below), where the vectors take all of the offset."""
        rest, mean = modulus / 2 - 3, clients * self.mean
        # The law is symmetric, so that both ends are survival functions, which keep their digits.
        beyond = skellam.sf(math.floor(rest), mean, mean) + skellam.sf(math.ceil(rest) - 1, mean, mean)
        return float(-math.expm1(dim * math.log1p(-min(beyond, 0.5))))


# Enough values for no modulus below to hold every sum, and few enough for none to be below one client's values.
DIFFERENCES = [
    Differences(levels=2, trials=8 + math.ceil(10 * mean), coordinate_range=1.0, mean=mean)
    for mean in (0.05, 0.3, 1.0, 30.0)
]
STEEP = pytest.mark.parametrize("mechanism", DIFFERENCES, ids=lambda mechanism: f"mean {mechanism.mean:g}")


@STEEP
@pytest.mark.parametrize("clients", [50, 400])
@pytest.mark.parametrize("overflow", [0.3, 1e-3, 1e-9, 1e-15])
def test_with_a_steepest_slope_smallest_is_smallest(mechanism: Differences, clients: int, overflow: float) -> None:
    shape: dict[str, Any] = {"clients": clients, "dim": 64, "clip_norm": 1.0}
    found = smallest_modulus(mechanism, **shape, overflow=overflow)
    assert overflow_probability(found, mechanism, **shape) <= overflow
    assert overflow_probability(found - 1, mechanism, **shape) > overflow
    assert mechanism.exact_overflow(found, clients, 64) <= overflow


@STEEP
def test_with_a_steepest_slope_the_bound_is_the_best_of_all_slopes_and_covers_the_exact_law(
    mechanism: Differences,
) -> None:
    clients, dim = 50, 64
    shape: dict[str, Any] = {"clients": clients, "dim": dim, "clip_norm": 1.0}
    (deviation,) = mechanism.deviations(**shape, rotate=True)
    slopes = np.linspace(0.0, deviation.steepest, 10_001)
    largest = smallest_modulus(mechanism, **shape, overflow=1e-30)
    bounds = []
    for modulus in range(8, largest, max(1, largest // 50)):
        found = overflow_probability(modulus, mechanism, **shape)
        rest = max(0.0, modulus / 2 - deviation.offset)
        exponents = np.array([deviation.at(slope) for slope in slopes]) - slopes * rest
        best = 2 * dim * math.exp(float(exponents.min()))
        assert found == pytest.approx(min(1.0, best), rel=1e-5)
        assert mechanism.exact_overflow(modulus, clients, dim) <= found
        bounds.append(found)
    assert bounds == sorted(bounds, reverse=True)


def test_both_kinds_of_slopes_are_met() -> None:
    # Else the tests above would say nothing about bounds whose best slope is the steepest one, or about the others.
    met = set()
    for mechanism in DIFFERENCES:
        (deviation,) = mechanism.deviations(clients=50, dim=64, clip_norm=1.0, rotate=True)
        modulus = smallest_modulus(mechanism, clients=50, dim=64, clip_norm=1.0)
        met.add(modulus / 2 - deviation.offset > 2.0 * deviation.at(deviation.steepest) / deviation.steepest)
    assert met == {True, False}


@pytest.mark.parametrize("clients", [1, 2, 4, 30])
@pytest.mark.parametrize(
    "mechanism",
    [
        Coins(coins=1, theta=0.2, coordinate_range=0.6),
        Coins(coins=10, theta=0.06, coordinate_range=0.6),
        LazyCoins(rate=0.6, theta=0.2, coordinate_range=0.6),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_few_coins_get_a_modulus_that_holds_their_sums(mechanism: Tilted, clients: int) -> None:
    """However steep a slope, the bound is one: sums of few coins reach their ends with a probability that is seen."""
    modulus = smallest_modulus(mechanism, clients=clients, dim=16, clip_norm=1.0, overflow=1e-9)
    steps = mechanism.steps(clients)
    masses, middle = np.ones(1), 0.5 * (np.array(steps.low) + np.array(steps.high))
    for _ in range(clients * steps.copies):
        masses = np.convolve(masses, middle)
    distances = np.abs(np.arange(len(masses)) - clients * mechanism.centre)
    assert masses[distances > 0.5 * modulus].sum() <= 1e-9
    assert overflow_probability(modulus, mechanism, clients=clients, dim=16, clip_norm=1.0) <= 1e-9


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_noise_before_rounding_gets_a_modulus_that_holds_its_sums(clients: int) -> None:
    mechanism = RoundedGaussian(noise_deviation=1.3, step=0.3, window=40, coordinate_range=0.6)
    modulus = smallest_modulus(mechanism, clients=clients, dim=16, clip_norm=1.0, overflow=1e-9)
    # All clients at the end of the range: sums of Gaussians that are each rounded.
    masses = np.ones(1)
    ends = (np.arange(mechanism.window + 1) - 0.5 - mechanism.centre - 0.25 / 0.3) / 1.3
    for _ in range(clients):
        masses = np.convolve(masses, np.diff(norm.cdf(ends)))
    distances = np.abs(np.arange(len(masses)) - clients * mechanism.centre)
    assert masses[distances > 0.5 * modulus].sum() <= 1e-9
    assert modulus <= clients * (mechanism.window - 1) + 1
    assert overflow_probability(modulus, mechanism, clients=clients, dim=16, clip_norm=1.0) <= 1e-9
