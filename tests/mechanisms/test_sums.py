"""The bounds on sums against exact laws, and against vectors made to break them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.special import logsumexp
from scipy.stats import binom, skellam

from cpsgd import Protocol
from cpsgd.mechanisms import Binomial, Coins, Mechanism, Skellam
from cpsgd.mechanisms.sums import MeanCoordinate, rounding_cumulant
from cpsgd.planner.modulus import overflow_probability, smallest_modulus

SLOPES = np.geomspace(1e-3, 60.0, 40).tolist()


def log_mean_exp(slope: float, values: NDArray[np.float64], masses: NDArray[np.float64]) -> float:
    kept = masses > 0
    return float(logsumexp(slope * values[kept] + np.log(masses[kept])))


# ------------------------------------------------------------------ cumulants of rounding and noise


def test_rounding_has_the_largest_cumulant_over_all_fractions() -> None:
    fractions = np.linspace(0.0, 1.0, 20_001)
    for slope in [*SLOPES, 1e-9, 300.0]:
        exact = float(
            np.max(
                np.logaddexp(np.log1p(-fractions[:-1]), slope + np.log(fractions[:-1].clip(1e-300)))
                - slope * fractions[:-1]
            )
        )
        assert exact * (1 - 1e-6) - 1e-15 <= rounding_cumulant(slope) <= slope * slope / 8
        if slope >= 0.01:
            assert rounding_cumulant(slope) <= exact * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("p", [0.5, 0.1, 0.9, 0.37])
@pytest.mark.parametrize("trials", [1, 13, 300])
def test_binomial_noise_has_its_exact_cumulant(p: float, trials: int) -> None:
    mechanism = Binomial(levels=3, trials=trials, p=p, coordinate_range=1.0)
    values = np.arange(trials + 1)
    masses = binom.pmf(values, trials, p)
    for slope in SLOPES:
        exact = max(log_mean_exp(sign * slope, values - trials * p, masses) for sign in (1, -1))
        found = mechanism.noise.cumulant(slope)
        assert exact * (1 - 1e-9) - 1e-12 <= found <= exact * (1 + 1e-9) + 1e-8 * trials
        assert found <= trials * slope * slope / 8


def test_skellam_noise_has_its_exact_cumulant() -> None:
    mechanism = Skellam(levels=3, variance=3.5, coordinate_range=1.0)
    values = np.arange(-200, 201)
    masses = skellam.pmf(values, 1.75, 1.75)
    for slope in SLOPES[:25]:
        assert mechanism.noise.cumulant(slope) == pytest.approx(log_mean_exp(slope, values, masses), rel=1e-6)


# ------------------------------------------------------------------ a coordinate of the mean

DIM = 16
SIGNS = 1 - 2 * ((np.arange(2**DIM)[:, None] >> np.arange(DIM)) & 1)
TRANSFORM = hadamard(DIM)[3] / math.sqrt(DIM)


def unit(vector: list[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vector, dtype=float) / np.linalg.norm(vector)


SHAPES = {
    "one-hot": unit([1.0] + [0.0] * 15),
    "flat": unit([1.0] * 16),
    "two": unit([1.0, 1.0] + [0.0] * 14),
    "falling": unit([2.0**-j for j in range(16)]),
    "random": unit(np.random.default_rng(4).standard_normal(16)),
}


def crowds() -> Iterator[tuple[str, list[tuple[float, NDArray[np.float64]]], float]]:
    """Shares of the clients and what they hold, and the norm of the mean.

    Some hold a long vector, which is clipped where it peaks, and the others a short one the other way, which is not.
    """
    for name, shape in SHAPES.items():
        for share in (0.1, 0.2, 0.3, 0.4, 0.5):
            back = share / (1 - share)
            yield f"{name} {share} cancelled", [(share, shape), (1 - share, -back * shape)], 0.0
            yield f"{name} {share} halved", [(share, shape), (1 - share, -0.5 * back * shape)], 0.5 * share
        yield f"{name} common", [(1.0, 0.3 * shape)], 0.3
        yield f"{name} one of many", [(0.01, shape), (0.99, 0 * shape)], 0.01


@pytest.mark.parametrize("reach", [0.3, 0.5, 0.8, 1.0, 2.0])
def test_the_cumulants_of_a_mean_coordinate_cover_every_rotation(reach: float) -> None:
    naive_fails = 0
    for name, crowd, norm in crowds():
        rotated = {i: SIGNS @ (TRANSFORM * vector) for i, (_, vector) in enumerate(crowd)}
        mean = sum(share * rotated[i].clip(-reach, reach) for i, (share, _) in enumerate(crowd))
        bound = MeanCoordinate(100, DIM, 1.0, reach, True, max(norm, 1e-3), 1e9)
        assert float(np.abs(mean).max()) <= bound.largest + 1e-12, name
        masses = np.full(2**DIM, 2.0**-DIM)
        for slope in np.geomspace(0.1, 300.0, 12).tolist():
            exact = log_mean_exp(slope, mean, masses)
            for cumulant in bound.cumulants():
                assert exact <= cumulant(slope) * (1 + 1e-9) + 1e-12, (name, slope)
            naive_fails += exact > 0.5 * slope**2 * max(norm, 1e-3) ** 2 / DIM + 1e-9
    # The mean of clipped coordinates is not the clipped mean: its own norm alone would not do.
    assert (naive_fails > 0) == (reach < 1.0)


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e-3, 1.2),
    st.floats(0.0, 500.0),
    st.integers(1, 10**6),
    st.sampled_from([1, 5, 1000, 65_536]),
)
def test_the_cumulants_rise_with_the_slope_and_the_norm(
    norm: float, reach: float, slope: float, clients: int, dim: int
) -> None:
    shape = clients, dim, 1.0, reach, True
    bound, longer = (MeanCoordinate(*shape, value, 1e9) for value in (0.5 * norm, norm))
    for cumulant in bound.cumulants():
        assert 0.0 <= cumulant(0.5 * slope) <= cumulant(slope) * (1 + 1e-9) + 1e-12
    assert bound.largest <= longer.largest * (1 + 1e-12) <= min(1.0, reach) * (1 + 1e-5) + 1e-12
    if norm < 1.0:
        # Up to where the places happen to lie.
        assert bound.cumulants()[-1](slope) <= longer.cumulants()[-1](slope) * 1.01 + 1e-3


def test_without_clipping_the_mean_alone_counts() -> None:
    bound = MeanCoordinate(1000, 65_536, 1.0, 1.0, True, 0.1, 1e9)
    whole, layered = bound.cumulants()
    slope = 8 * 256 / 0.1
    # Eight deviations of the mean: what its own norm says, and a little for the layers.
    assert 32.0 <= layered(slope) <= 1.1 * 32.0
    assert whole(slope) == pytest.approx(100 * 32.0)


# ------------------------------------------------------------------ sums of coins


def heads(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The exact law of the number of heads among these coins."""
    law = np.ones(1)
    for p in probabilities:
        law = np.convolve(law, [1 - p, p])
    return law


@pytest.mark.parametrize("coins", [1, 3])
@pytest.mark.parametrize("theta", [0.02, 0.25, 0.49])
def test_coins_of_the_worst_unrotated_vectors_stay_within_the_bound(coins: int, theta: float) -> None:
    clients = 40
    mechanism = Coins(coins=coins, theta=theta, coordinate_range=0.8)
    for mean_norm in (None, 0.3):
        shape = {"clients": clients, "dim": 3, "clip_norm": 1.0, "rotate": False, "mean_norm": mean_norm}
        crowd = np.full(clients, 1.0)
        if mean_norm is not None:
            # A third at -D is clipped to -X; the others keep the mean's coordinate at mean_norm.
            crowd[: clients // 3] = -1.0
            crowd[clients // 3 :] = (mean_norm * clients + clients // 3) / (clients - clients // 3)
            assert np.mean(crowd) == pytest.approx(mean_norm)
            assert np.all(np.abs(crowd) <= 1.0)
        tilts = mechanism.theta * (crowd / 0.8).clip(-1, 1)
        law = heads(np.repeat(0.5 + tilts, coins))
        for modulus in range(mechanism.values, clients * coins + 3):
            lowest = math.ceil(clients * mechanism.centre - 0.5 * modulus)
            inside = float(law[max(0, lowest) : lowest + modulus].sum())
            assert 1.0 - inside <= overflow_probability(modulus, mechanism, **shape) + 1e-12


@pytest.mark.parametrize(
    "mechanism",
    [Coins(coins=1, theta=0.2, coordinate_range=0.15), Binomial(levels=5, trials=11, coordinate_range=0.15)],
    ids=lambda mechanism: mechanism.name,
)
def test_real_sums_with_a_short_mean_overflow_less_often_than_the_bound(mechanism: Mechanism) -> None:
    clients, dim, overflow, mean_norm = 60, 64, 0.05, 0.02
    shape = {"clients": clients, "dim": dim, "clip_norm": 1.0, "mean_norm": mean_norm}
    modulus = smallest_modulus(mechanism, **shape, overflow=overflow)
    assert modulus < smallest_modulus(mechanism, **{**shape, "mean_norm": None}, overflow=overflow)
    protocol = Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=mechanism, modulus=modulus)
    peak = unit([1.0, 1.0, 1.0] + [0.0] * (dim - 3))
    vectors = np.where(np.arange(clients)[:, None] < 20, peak, -0.5 * peak)
    assert np.linalg.norm(vectors.mean(axis=0)) <= mean_norm
    centre = clients * mechanism.centre
    overflows = 0
    for round_ in range(150):
        sums = sum(protocol.encode_integers(vector, round_).astype(np.int64) for vector in vectors)
        overflows += not np.all((sums - centre >= -modulus / 2) & (sums - centre < modulus / 2))
    # 150 rounds at 0.05 each: more than 23 have probability below 1e-6.
    assert overflows <= 23


def test_a_mean_that_may_be_as_long_as_a_vector_is_not_shorter() -> None:
    for reach in (0.5, 2.0, 9.0):
        found = [MeanCoordinate(10, 16, 2.0, reach, True, norm, 100.0) for norm in (None, 2.0, 3.0)]
        assert [each.largest for each in found] == [min(2.0, reach)] * 3
        assert [len(each.cumulants()) for each in found] == [1] * 3
    assert MeanCoordinate(10, 16, 2.0, 2.0, True, math.nextafter(2.0, 0.0), 100.0).cumulants()[1:] != []
