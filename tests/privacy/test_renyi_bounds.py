"""The accounting that others published: what it says, and that it is above the exact divergences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ive, logsumexp
from scipy.stats import binom

from cpsgd import Protocol, Run, guarantee
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import DiscreteGaussian, Skellam
from cpsgd.mechanisms.discrete_gaussian import convolved
from cpsgd.neighbours import Adjacency
from cpsgd.privacy import renyi_bounds
from cpsgd.privacy.guarantees import CITATIONS, COMPARISONS
from cpsgd.privacy.proofs.certified_renyi import rdp_epsilon
from cpsgd.privacy.proofs.published_accounting import accounting_of, published_epsilon
from cpsgd.privacy.renyi_bounds import ORDERS
from tests import known_values as known

Array = NDArray[np.float64]
REPLACE = Adjacency.REPLACE_ONE


def exact_divergences(half: Array, shift: int) -> dict[int, float]:
    """D_α of a symmetric law, given by its log-masses at 0, 1, ..., and its shift, where the tails do not matter."""
    full = np.concatenate([half[:0:-1], half])
    full = full - logsumexp(full)
    found = {}
    for place, order in enumerate(ORDERS):
        terms = order * full[shift:] + (1.0 - order) * full[: full.size - shift]
        if max(terms[0], terms[-1]) < terms.max() - 50.0:
            found[place] = float(logsumexp(terms)) / (order - 1.0)
    return found


@pytest.mark.parametrize("variance", [0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("shift", [1, 2, 3, 5, 10, 30])
def test_the_skellam_bound_is_above_the_divergence(variance: float, shift: int) -> None:
    masses = ive(np.arange(4000.0), variance)
    exact = exact_divergences(np.log(masses[masses > 1e-300]), shift)
    bound = renyi_bounds.skellam_rdp(float(shift), float(shift), variance)
    for place, divergence in exact.items():
        assert divergence <= bound[place] * (1 + 1e-9)
    if variance == 100.0 and shift <= 10:
        # And close, where there is much noise.
        assert len(exact) > 20
        assert max(divergence / bound[place] for place, divergence in exact.items()) > 0.97


@pytest.mark.parametrize("sigma_squared", [0.25, 0.3, 0.4, 0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("clients", [2, 3, 5, 10, 50])
def test_the_discrete_gaussian_bound_is_above_the_divergence(sigma_squared: float, clients: int) -> None:
    half = np.log(convolved(sigma_squared, clients, 2000)[0])
    checked = 0
    for shift in (1, 2, 3, 5, 10):
        bound = renyi_bounds.discrete_gaussian_rdp(float(shift), float(shift), sigma_squared, clients, 1)
        for place, divergence in exact_divergences(half, shift).items():
            assert divergence <= bound[place] * (1 + 1e-9)
            checked += 1
    assert checked > 20


def poisson_binomial(coins: list[float]) -> Array:
    law = np.ones(1)
    for odds in coins:
        law = np.convolve(law, [1.0 - odds, odds])
    return law


@pytest.mark.parametrize(("coins", "clients"), [(1, 2), (1, 6), (2, 4), (3, 3)])
@pytest.mark.parametrize("theta", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_no_odds_of_the_others_are_worse_for_poisson_binomial(
    coins: int, clients: int, theta: float, adjacency: Adjacency
) -> None:
    bound = renyi_bounds.poisson_binomial_rdp(coins, theta, clients, adjacency)
    generator = np.random.default_rng(3)
    ends = (0.5 - theta, 0.5 + theta)
    others = [list(mix) for mix in itertools.combinations_with_replacement(ends, clients - 1)]
    others += [list(mix) for mix in generator.uniform(*ends, size=(30, clients - 1))]
    pairs = [ends, *(tuple(pair) for pair in generator.uniform(*ends, size=(5, 2)))]
    if adjacency is Adjacency.ZERO_OUT:
        pairs = [(end, 0.5) for end in [*ends, *generator.uniform(*ends, size=5)]]
    largest = np.zeros_like(ORDERS[:30])
    for mix, pair, flip in itertools.product(others, pairs, (1, -1)):
        one, other = (poisson_binomial([*mix, odds] * coins) for odds in pair[::flip])
        exact = np.array([np.log(np.sum(other * (one / other) ** a)) / (a - 1.0) for a in ORDERS[:30]])
        assert np.all(exact <= bound[:30] * (1 + 1e-9))
        largest = np.maximum(largest, exact)
    assert np.all(largest >= bound[:30] * (1 - 1e-9))


def test_many_coins_are_the_same_law() -> None:
    law = poisson_binomial([0.6] * 4 + [0.3] * 36)
    window = renyi_bounds._one_more(4, 0.6, 36, 0.3)
    np.testing.assert_allclose(window, law, rtol=1e-9)
    np.testing.assert_allclose(renyi_bounds._one_more(3, 0.6, 0, 0.3), binom.pmf(range(4), 3, 0.6), rtol=1e-12)


def test_the_conversion_is_ours() -> None:
    divergences = 0.02 * ORDERS
    expected = min(rdp_epsilon(d, a, 1e-6) for d, a in zip(divergences, ORDERS, strict=True))
    assert renyi_bounds.best_epsilon(divergences, 1e-6) == pytest.approx(expected, rel=1e-12)


def test_the_sum_of_many_terms_is_bounded() -> None:
    exact = renyi_bounds.discrete_gaussian_rdp(1.0, 1.0, 0.6, 99_999, 1)
    more = renyi_bounds.discrete_gaussian_rdp(1.0, 1.0, 0.6, 200_000, 1)
    tau = [10 * sum(math.exp(-2 * math.pi**2 * 0.6 * k / (k + 1)) for k in range(1, n)) for n in (99_999, 200_000)]
    for found, value, clients in ((exact, tau[0], 99_999), (more, tau[1], 200_000)):
        scale = 1.0 / math.sqrt(clients * 0.6)
        assert found[0] == pytest.approx(min(scale**2 + value, (scale + value) ** 2), rel=1e-3)


@pytest.mark.parametrize(
    "mechanism",
    [
        Skellam(levels=9, variance=40.0, coordinate_range=0.6),
        DiscreteGaussian(levels=9, sigma_squared=40.0, coordinate_range=0.6),
    ],
)
def test_it_is_shown_beside_ours_and_is_larger(mechanism: Skellam | DiscreteGaussian) -> None:
    protocol = Protocol(clients=500, dim=100, clip_norm=1.0, mechanism=mechanism)
    published = accounting_of(protocol)
    assert published is not None
    name = published.name
    assert name in COMPARISONS
    assert CITATIONS[name] == published.citation
    for adjacency in Adjacency:
        found = guarantee(protocol, 1e-6, adjacency=adjacency)
        authors = dict(found.alternatives)[name]
        assert isinstance(authors, float)
        assert found.epsilon < authors < 2.0 * found.epsilon


def test_a_condition_that_fails_is_named() -> None:
    mechanism = DiscreteGaussian(levels=3, sigma_squared=0.2, coordinate_range=1.0)
    protocol = Protocol(clients=500, dim=10, clip_norm=1.0, mechanism=mechanism)
    with pytest.raises(ConditionError, match="1/4"):
        published_epsilon(Run.of(protocol), 1e-6)
    nobody = Protocol.gaussian(clients=500, dim=10, clip_norm=1.0, sigma=1.0)
    with pytest.raises(ConditionError, match="no published accounting for gaussian"):
        published_epsilon(Run.of(nobody), 1e-6)


def test_known_divergences() -> None:
    values: dict[str, object] = {"orders": ORDERS, "beta": renyi_bounds.BETA}
    for norm, dim in ((0.3, 1), (2.0, 9), (7.0, 400)):
        for adjacency in Adjacency:
            key = f"{norm} {adjacency}"
            values[f"sensitivities {key}"] = renyi_bounds._sensitivities(norm, dim, adjacency)
            given: dict[str, Any] = {"norm": norm, "dim": dim, "delta": 1e-6, "adjacency": adjacency}
            values[f"epsilon {key}"] = [
                renyi_bounds.discrete_gaussian_epsilon(sigma_squared=0.4, clients=30, **given),
                renyi_bounds.skellam_epsilon(variance=0.7, clients=30, **given),
            ]
        values[f"rounded {norm}"] = renyi_bounds.rounded_norm(norm, dim)
    for clients, variance in ((1, 3.0), (20, 0.3), (300_000, 0.25)):
        values[f"gaussian {clients}"] = renyi_bounds.discrete_gaussian_rdp(3.0, 2.0, variance, clients, 4)
        values[f"skellam {clients}"] = renyi_bounds.skellam_rdp(3.0, 2.0, clients * variance)
    for adjacency in Adjacency:
        for clients in (1, 2, 40):
            key = f"coins {adjacency} {clients}"
            values[key] = renyi_bounds.poisson_binomial_rdp(3, 0.1, clients, adjacency)
            values[f"{key} ε"] = renyi_bounds.poisson_binomial_epsilon(
                coins=3, theta=0.1, clients=clients, dim=5, delta=1e-6, adjacency=adjacency
            )
    values["one more"] = np.concatenate([renyi_bounds._one_more(3, 0.4, others, 0.6) for others in (0, 2)])
    values["overflow"] = renyi_bounds._divergences(np.array([0.9, 0.1, 0.0]), np.array([1e-9, 1.0 - 1e-9, 0.0]))
    values["smallest"] = [
        renyi_bounds.best_epsilon(scale * ORDERS, delta) for scale in (0.0, 0.01) for delta in (0.1, 0.9)
    ]
    known.check("privacy/renyi_bounds", values, rel=1e-8)
    with pytest.raises(ConditionError, match="σ² >= 1/4"):
        renyi_bounds.discrete_gaussian_epsilon(sigma_squared=0.2499, clients=30, **given)
    assert renyi_bounds.discrete_gaussian_epsilon(sigma_squared=0.25, clients=30, **given) > 0.0


def test_divergences_of_laws_with_different_supports() -> None:
    first, second = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.5, 0.4, 0.1, 0.0])
    orders = renyi_bounds.ORDERS
    with np.errstate(over="ignore"):
        exact = np.log(0.5 + 0.4 * 1.25**orders) / (orders - 1.0)
    assert renyi_bounds._divergences(first, second) == pytest.approx(exact, rel=1e-9)
    assert np.all(renyi_bounds._divergences(second, first) == np.inf)
