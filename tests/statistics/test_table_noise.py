"""Noise of sums: its ε by brute force, the choice between kinds, and a ledger's record that is never cheaper."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cpsgd.neighbours import Adjacency
from cpsgd.privacy import guarantee
from cpsgd.privacy.gaussian import analytic_sigma, gdp_epsilon
from cpsgd.promise import Claim
from cpsgd.statistics import Count, Histogram, Mean, Quantiles
from cpsgd.statistics.questions import Geometry
from cpsgd.statistics.rows import RowQuestion
from cpsgd.statistics.table_noise import (
    Neighbours,
    SumRequest,
    TableNoise,
    allot,
    gaussian_noise,
    laplace_noise,
    mu_of_pure,
    noise_for,
    pure_of_mu,
    total,
)

COLUMNS = {f"c{i}": (0.0, 1.0) for i in range(100)}


def first(columns: int) -> dict[str, tuple[float, float]]:
    return dict(list(COLUMNS.items())[:columns])


QUESTIONS: dict[str, tuple[RowQuestion, float, float]] = {
    # With the L1 and the L2 sensitivity that another library would be told.
    "count": (Count(["x"]).central("replace-one", None), 1.0, 1.0),
    "mean": (Mean(first(1)), 1.0, 1.0),
    "means of 9": (Mean(first(9)), 9.0, 3.0),
    "means of 100": (Mean(first(100)), 100.0, 10.0),
    "histogram of 2": (Histogram("x", categories=range(2)), 2.0, math.sqrt(2.0)),
    "histogram of 1000": (Histogram("x", categories=range(1000)), 2.0, math.sqrt(2.0)),
}


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("name", QUESTIONS)
def test_noise_is_no_more_than_of_the_better_mechanism(name: str, epsilon: float) -> None:
    question, l1, l2 = QUESTIONS[name]
    found = noise_for(question.geometry, Claim(epsilon, 1e-6))
    rows = question.rows or 1
    laplace = math.sqrt(2.0) * l1 / epsilon
    gaussian = analytic_sigma(epsilon=epsilon, sensitivity=l2, delta=1e-6)
    assert rows * math.sqrt(found.variance) <= 1.001 * min(laplace, gaussian)
    assert found.is_pure == (laplace < gaussian)


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 7.3])
def test_laplace_epsilon_by_brute_force(epsilon: float, neighbours: Neighbours) -> None:
    question = Histogram("x", categories=["a", "b"], rows=3)
    noise = laplace_noise(question.geometry, epsilon, neighbours)
    assert noise.units == 3
    assert noise.sensitivity == (6 if neighbours == "replace-one" else 3)
    # The exact loss of the farthest neighbours, as a fraction.
    assert Fraction(noise.sensitivity) * noise.loss <= Fraction(epsilon)
    assert 0.999 * epsilon < noise.epsilon <= epsilon


def test_gaussian_masses_are_within_the_loss_of_a_rounded_gaussian() -> None:
    """docs/proofs/statistics.md, section 2, with small σ so that both can be computed."""
    from scipy.special import log_ndtr

    sigma, reach = 16.0, 8.0
    z = np.arange(0, int(reach * sigma))
    everywhere = np.arange(-4000, 4001)
    discrete = -(z**2) / (2 * sigma**2) - math.log(np.exp(-(everywhere**2) / (2 * sigma**2)).sum())
    upper, lower = log_ndtr(-(z - 0.5) / sigma), log_ndtr(-(z + 0.5) / sigma)
    rounded = upper + np.log(-np.expm1(lower - upper))
    assert np.abs(discrete - rounded).max() <= reach**2 / (24.0 * sigma**2) * (1.0 + 1e-9)


@pytest.mark.parametrize("dim", [1, 64, 1 << 20])
def test_gaussian_mu_covers_distance_rounding_and_loss(dim: int) -> None:
    geometry = Geometry.round(dim, 1.0, 1.5, "any")
    noise = gaussian_noise(geometry, 0.2, "replace-one")
    assert noise is not None
    assert noise.distance >= 1.5 * noise.units + math.sqrt(dim)
    assert 0.2 * 0.95 < noise.mu <= 0.2
    assert noise.mu >= noise.distance / 2.0**24 + 2.6 * dim * 44.0**2 / (24.0 * 2.0**48)


def test_pure_and_gaussian_shifts() -> None:
    for epsilon in (1e-6, 0.01, 1.0, 20.0):
        mu = mu_of_pure(epsilon)
        assert 0.999 * epsilon < pure_of_mu(mu) <= epsilon
        # The trade-off of a pure ε is under that of the Gaussian everywhere.
        for at in (0.0, 0.5 * epsilon, 0.99 * epsilon):
            worst = max(0.0, (math.exp(epsilon) - math.exp(at)) / (1.0 + math.exp(epsilon)))
            assert math.isclose(at, 0.0) or gdp_delta_at(mu, at) >= worst * (1.0 - 1e-9)


def gdp_delta_at(mu: float, epsilon: float) -> float:
    from cpsgd.privacy.gaussian import gdp_delta

    return gdp_delta(mu, epsilon)


NOISES = [
    laplace_noise(Histogram("x", categories=["a", "b"], rows=3).geometry, 0.7, "replace-one"),
    laplace_noise(Mean(first(3)).geometry, 1e-3, "replace-one"),
    laplace_noise(Mean(first(3)).geometry, 30.0, "add-remove"),
    gaussian_noise(Mean(first(100)).geometry, 0.3, "replace-one"),
    gaussian_noise(Quantiles({"x": (0, 1)}).geometry, 0.05, "add-remove"),
]


@pytest.mark.parametrize("noise", NOISES)
def test_the_ledgers_record_is_never_cheaper(noise: TableNoise) -> None:
    record = noise.record("a reason")
    for neighbours, adjacency in (("replace-one", Adjacency.REPLACE_ONE), ("add-remove", Adjacency.ZERO_OUT)):
        same: Any = TableNoise(noise.kind, noise.dim, noise.units, noise.distance, noise.norm, neighbours, noise.loss)
        delta = 0.0 if noise.is_pure else 1e-6
        booked = guarantee(record, delta, adjacency=adjacency).epsilon
        exact = same.epsilon if noise.is_pure else gdp_epsilon(same.mu, delta)
        if noise.is_pure or neighbours == "replace-one":
            assert exact * (1.0 - 1e-9) <= booked <= exact * (1.0 + 2e-5) + 1e-8
        else:
            assert booked >= gdp_epsilon(noise.norm / 2.0**24, delta) * (1.0 - 1e-9)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_what_is_allotted_keeps_the_claim(delta: float) -> None:
    requests = [
        SumRequest(Mean(first(20)).geometry),
        SumRequest(Histogram("x", categories=range(9), rows=2).geometry, 2.0, 3.0),
        SumRequest(Geometry(1, 1.0, 1.0, "cut", 1.0, 1.0, lattice=1), 0.02, 0.1, counts=False),
    ]
    for squares in (None, True, False) if delta else (None, False):
        noises = allot(requests, Claim(1.0, delta), "replace-one", squares=squares)
        claim, _, _ = total(noises, delta)
        assert claim.epsilon <= 1.0
        assert claim.delta <= delta
        if squares is None:
            assert claim.epsilon > 0.9
