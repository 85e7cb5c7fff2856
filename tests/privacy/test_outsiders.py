"""Who does not know the round: small runs in full, by integrals over all results, in both orders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtr
from scipy.stats import binom, norm

from cpsgd import Protocol
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.privacy import guarantee, outsiders_epsilon
from cpsgd.privacy import outsiders as module
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.gaussian import gdp_delta, gdp_mu
from cpsgd.run import Run
from tests import known_values

Array = NDArray[np.float64]

ORDERS = np.exp([0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0])
STEP = 0.1
GRID = np.arange(-8.0, 9.0, STEP) + STEP / 2
FIRST = GRID[:, None]
"""The first round's result, for two rounds of one coordinate; the second's is GRID."""


def law(first: float, second: Array | float) -> Array:
    """Returns the law of two results with unit noise; the second mean may depend on the first result."""
    exponent = (FIRST - first) ** 2 + (GRID - second) ** 2
    return np.asarray(np.exp(-0.5 * exponent) * STEP**2 / (2.0 * math.pi))


def divergences(one: Array, other: Array) -> Array:
    return np.array([np.maximum(one - order * other, 0.0).sum() for order in ORDERS])


def both_orders(one: Array, other: Array) -> Iterator[Array]:
    yield divergences(one, other)
    yield divergences(other, one)


def choices(largest: float, generator: np.random.Generator) -> Iterator[tuple[float, Array]]:
    """Yields a vector for the first round, and one for the second that depends on the first result."""
    while True:
        first = float(generator.choice([-largest, largest, generator.uniform(-largest, largest)]))
        second = [
            np.full_like(FIRST, generator.uniform(-largest, largest)),
            largest * np.sign(FIRST - generator.uniform(-1.0, 1.0)),
            generator.choice([-largest, largest], size=FIRST.shape),
            np.full_like(FIRST, largest * generator.choice([-1, 1])),
        ]
        yield first, second[generator.integers(len(second))]


# ------------------------------------------------------------------ each client chooses its round


@pytest.mark.parametrize(("norm", "memory"), list(itertools.product((0.3, 1.0, 2.0), (0.0, 0.5, 1.0))))
def test_independent_rounds_are_dominated_by_the_pair(norm: float, memory: float) -> None:
    vectors = choices(norm, np.random.default_rng(1))

    def mixture(first: float, second: Array | float) -> Array:
        return 0.5 * law(first, memory * first) + 0.5 * law(0.0, second)

    nothing, farthest = law(0.0, 0.0), mixture(norm, norm)
    zero_out = list(both_orders(farthest, nothing))
    replace_one = divergences(farthest, mixture(-norm, -norm))
    for _ in range(10):
        one, other = mixture(*next(vectors)), mixture(*next(vectors))
        for found, bound in zip(both_orders(one, nothing), zero_out, strict=True):
            assert np.all(found <= bound + 1e-12)
        for found in both_orders(one, other):
            assert np.all(found <= replace_one + 1e-12)


# ------------------------------------------------------------------ cohorts of fixed size


def cohorts(own: tuple[float, Array], other: tuple[float, Array], memory: float) -> Array:
    """Returns the law of two rounds of one client each, in random order."""
    alternatives = (own[0], other[1]), (other[0], own[1])
    return 0.5 * sum((law(first, memory * first + second) for first, second in alternatives), np.zeros((1, 1)))


def test_fixed_size_cohorts_are_not_dominated_by_the_pair_of_independent_rounds() -> None:
    """The page's numbers: with the other client at -x, δ(0.5) is 0.2213 where independent rounds have 0.1492."""
    same = np.full_like(FIRST, 1.0)
    with_client = cohorts((1.0, same), (-1.0, -same), 0.0)
    without = cohorts((0.0, 0.0 * same), (-1.0, -same), 0.0)
    independent = 0.5 * law(1.0, 0.0) + 0.5 * law(0.0, 1.0)
    wanted = max(found[4] for found in both_orders(independent, law(0.0, 0.0)))
    assert max(found[4] for found in both_orders(with_client, without)) == pytest.approx(0.2213, abs=1e-4)
    assert wanted == pytest.approx(0.1492, abs=1e-4)


@cache
def alike(mu: float, count: int, points: int = 1001) -> Array:
    """Returns E((1 + γ) s̄ - (γ - 1))_+ of the theorem, s̄ the mean of `count` draws, a little too large."""
    loss = np.linspace(-mu * (mu / 2 + 10.0), mu * (mu / 2 + 10.0), 40_001)
    mass = norm.pdf(loss, mu * mu / 2, mu) + norm.pdf(loss, -mu * mu / 2, mu)
    # Each draw is split between two points around it, which keeps its mean and so raises the expectation.
    place = (np.tanh(loss / 2) + 1.0) * (points - 1) / 2
    below = np.minimum(place.astype(int), points - 2)
    shares = mass / mass.sum()
    law_of_one = np.bincount(below, shares * (below + 1 - place), points)
    law_of_one += np.bincount(below + 1, shares * (place - below), points)
    size = count * (points - 1) + 1
    law_of_sum = fft.irfft(fft.rfft(law_of_one, size) ** count, size)
    mean = np.linspace(-1.0, 1.0, size)
    return np.array([law_of_sum @ np.maximum((1.0 + order) * mean - (order - 1.0), 0.0) for order in ORDERS])


def theorem(mu: float, rounds: int, more: int = 0) -> Array:
    """Returns the theorem's δ at its best p, before it is made a closed form; `more` makes it false."""
    found = []
    for p in (0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        counts = range(rounds)
        expected = sum(binom.pmf(k, rounds - 1, p) * alike(mu, k + 1 + more) for k in counts)
        found.append(expected + (1.0 + ORDERS) * (rounds - 1) * p * gdp_delta(mu, -math.log(p)))
    return np.asarray(np.min(found, axis=0))


@pytest.mark.parametrize(("norm", "memory"), [(0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (0.25, 0.5), (0.5, 1.0)])
def test_two_rounds_of_fixed_size_keep_the_theorem(norm: float, memory: float) -> None:
    mu = 2.0 * norm * (1.0 + memory)
    bound, false = theorem(mu, 2), theorem(mu, 2, more=1)
    vectors = choices(norm, np.random.default_rng(2))
    far = np.full_like(FIRST, norm)
    cases = [((norm, far), (-norm, -far), (-norm, -far))]
    cases += [(next(vectors), next(vectors), next(vectors)) for _ in range(12)]
    largest = np.zeros_like(ORDERS)
    for own, replaced, other in cases:
        for found in both_orders(cohorts(own, other, memory), cohorts(replaced, other, memory)):
            largest = np.maximum(largest, found)
    assert np.all(largest <= bound + 1e-9)
    if not memory:
        assert np.any(largest > false), "the test would not notice one client too many"
        assert bound[0] < 2.0 * ndtr(mu / 2) - 1.0, "and less than what the server learns"


def hinge(mean: float) -> Array:
    return np.maximum((1.0 + ORDERS) * mean - (ORDERS - 1.0), 0.0)


def mixed(laws: Array, own: int) -> Array:
    """Returns the law of two bits of rounds of one client each, 2 and `own`; laws[:, 0] is of the first."""
    rounds = [laws[:, 0, a, :, None] * laws[:, 1:, b] for a, b in ((own, 2), (2, own))]
    return np.asarray(0.5 * sum(rounds, np.zeros(())).reshape(-1, 1, 4))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_all_adaptive_choices_of_two_binary_rounds_keep_the_theorem(epsilon: float) -> None:
    """Rounds of one bit that are (ε, 0)-private: p = e^-ε costs nothing, and s is within ±tanh(ε/2)."""
    p, s = math.exp(-epsilon), math.tanh(epsilon / 2)
    one, two = (hinge(s) + hinge(-s)) / 2, (hinge(s) + 2.0 * hinge(0.0) + hinge(-s)) / 4
    bound, nearest = (1.0 - p) * one + p * two, 0.0
    # The bit's laws for x, x' and another client: in round one, and in round two after a 0 and after a 1.
    choices = np.array(list(itertools.product((0, 1), repeat=9))).reshape(-1, 3, 3)
    for low in (0.5 * p / (1.0 + p), p / (1.0 + p), 0.4, 0.8):
        bit = np.where(choices, min(low / p, 1.0 - (1.0 - low) * p), low)
        laws = np.stack([1.0 - bit, bit], axis=-1)
        found = np.maximum(mixed(laws, 0) - ORDERS[:, None] * mixed(laws, 1), 0.0).sum(axis=2).max(axis=0)
        assert np.all(found <= bound + 1e-12)
        nearest = max(nearest, float(np.max(found[bound > 0.0] / bound[bound > 0.0])))
    assert nearest > 0.85, "so a bound that is much smaller would be noticed"


def test_three_rounds_of_fixed_size_keep_the_theorem() -> None:
    step = 0.25
    axis = np.arange(-5.0, 5.5, step)
    one, two, three = axis[:, None, None], axis[None, :, None], axis[None, None, :]

    def mixture(held: tuple[float, float, float]) -> Array:
        total = np.zeros((axis.size,) * 3)
        for a, b, c in itertools.permutations(held):
            total += np.exp(-0.5 * ((one - a) ** 2 + (two - b) ** 2 + (three - c) ** 2))
        return np.asarray(total * step**3 / (6.0 * (2.0 * math.pi) ** 1.5))

    norm = 0.4
    bound, false = theorem(2.0 * norm, 3), theorem(2.0 * norm, 3, more=2)
    largest = np.zeros_like(ORDERS)
    for others in itertools.product((-norm, 0.0, norm), repeat=2):
        for found in both_orders(mixture((norm, *others)), mixture((-norm, *others))):
            largest = np.maximum(largest, found)
    assert np.all(largest <= bound + 1e-4)  # the grid is coarse
    assert np.any(largest > false + 1e-3)


# ------------------------------------------------------------------ the number


def shared_law(mu: float, rounds: int, epsilon: float) -> float:
    """Returns δ of the run where all other clients hold x' and noise is independent: one of T places has the mean μ.

    Values of the likelihood ratio are tilted so that their mean is e^ε, and added up by a Fourier transform.
    """
    draws = np.linspace(-12.0, 12.0, 100_001)
    weight = norm.pdf(draws)
    excess = np.expm1(mu * draws - mu * mu / 2) - math.expm1(epsilon)

    def tilted(power: float) -> tuple[Array, float]:
        exponent = power * excess
        mass = weight * np.exp(exponent - exponent.max())
        return mass / mass.sum(), float(exponent.max() + math.log(mass.sum() / weight.sum()))

    low, high = 0.0, 1e4
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if tilted(middle)[0] @ excess < 0.0 else (low, middle)
    mass, moment = tilted(high)
    size = 1 << 14
    width = math.sqrt(float(mass @ excess**2) * rounds) / 200.0
    place = np.rint(excess / width).astype(int)
    one = np.bincount(place[np.abs(place) < size // 2] % size, mass[np.abs(place) < size // 2], size)
    total = fft.irfft(fft.rfft(one, size) ** rounds, size)[1 : size // 2]
    sums = np.arange(1, size // 2) * width
    return float(total @ (np.exp(-high * sums) * sums)) / rounds * math.exp(rounds * moment)


@pytest.mark.parametrize(("server", "most"), [(2.0, 0.27), (1.0, 0.051), (0.5, 0.0160), (0.25, 0.0066)])
def test_the_bound_lies_above_a_run_that_is_known_exactly(server: float, most: float) -> None:
    mu, delta, rounds = gdp_mu(server, 1e-9), 1e-9, 2_500
    found = module._Bound(delta, Rounds(mu), 0.0, 0.0).best(mu, rounds, 1, server)
    assert found <= most
    assert shared_law(mu, rounds, found) <= delta
    assert shared_law(mu, rounds, found / 8.0) > delta, "it would notice a bound that is far too small"


@pytest.mark.parametrize(("mu", "rounds"), [(0.1, 25), (0.3, 15), (1.0, 10)])
def test_the_closed_form_lies_above_the_theorem(mu: float, rounds: int) -> None:
    sharp = theorem(mu, rounds)
    for order, delta in zip(ORDERS, sharp, strict=True):
        if 1e-12 < delta < 0.5:
            found = module._Bound(float(delta), Rounds(mu), 0.0, 0.0).best(mu, rounds, 1, 50.0)
            assert found >= math.log(order) * (1.0 - 1e-6)


@pytest.mark.parametrize(
    ("count", "p", "chance"), [(10, 0.3, 1e-2), (2_499, 0.05, 1e-11), (100, 0.9, 1e-6), (1, 0.5, 1)]
)
def test_few_clients_alike_are_rare(count: int, p: float, chance: float) -> None:
    least = module._at_least(count, p, chance)
    assert binom.cdf(least - 1, count, p) <= chance
    assert least >= binom.ppf(chance, count, p) - 0.3 * math.sqrt(count) - 1


# ------------------------------------------------------------------ runs


@pytest.fixture
def binomial() -> Protocol:
    return Protocol.rotated_binomial(clients=10_000, dim=1024, clip_norm=1.0, levels=16, trials=64)


def test_more_rounds_hide_better_and_never_worse_than_the_server(binomial: Protocol) -> None:
    found = [outsiders_epsilon(Run.of(binomial, rounds=count, participation="once"), 1e-9) for count in (1, 30, 2_500)]
    assert found[0] == guarantee(binomial, 1e-9).epsilon
    assert found[2] < 0.1 * found[1] < 0.1 * found[0] + 1e-12


def correlated(bands: int) -> Run:
    """Returns a run whose ε is about 0.5 against the server, whatever the bands."""
    norm = {1: 1.0, 2: 1.16, 8: 1.37, 32: 1.53}[bands]
    noise = CorrelatedGaussian(
        noise_deviation=64.0, step=0.00334 * norm, window=8192, coordinate_range=1.0, bands=bands, run_length=2_500
    )
    protocol = Protocol(clients=10_000, dim=6, clip_norm=1.0, mechanism=noise)
    return Run.of(protocol, rounds=2_500, participation="once")


def test_noise_that_is_taken_away_hides_the_round_less() -> None:
    found = [outsiders_epsilon(correlated(bands), 1e-9) for bands in (1, 2, 8, 32)]
    assert found == sorted(found)
    assert found[0] < 0.02
    assert 0.2 < found[3] < 0.35
    assert 0.49 < guarantee(correlated(32), 1e-9).epsilon < 0.51


def test_hidden_rounds_share_the_noise_of_those_they_reach() -> None:
    """The factor of a stride is the norm of what the split noise leaves, with the best shares, which add up to one."""
    echo = np.array(correlated(8).protocol.mechanism.memory.echo)[:100]
    assert float((echo**2).sum()) <= 1.0
    for stride, factor in module._strides(echo, 100):
        apart = [echo[phase::stride] for phase in range(stride)]
        shares = [part / part.sum() for part in apart]
        exact = math.sqrt(sum(float((part**2 / share).sum()) for part, share in zip(apart, shares, strict=True)))
        assert exact <= factor <= exact * (1.0 + 1e-5)


def test_samplers_and_roundings_of_all_rounds_count(binomial: Protocol) -> None:
    base = module._Bound(1e-9, Rounds(0.1), 0.0, 0.0).best(0.1, 1_000, 1, 2.0)
    rounded = module._Bound(1e-9, Rounds(0.1), 0.0, 0.01).best(0.1, 1_000, 1, 2.0)
    assert base + 0.02 <= rounded <= base + 0.021
    for cost, variation in ((Rounds(0.1, tail_mass=3e-10), 0.0), (Rounds(0.1), 3e-10)):
        assert base < module._Bound(1e-9, cost, variation, 0.0).best(0.1, 1_000, 1, 2.0) <= 2.0
    assert module._Bound(1e-9, Rounds(0.1), 1e-9, 0.0).best(0.1, 1_000, 1, 2.0) == 2.0


def test_an_epsilon_that_protects_nobody_does_not_overflow() -> None:
    found = module._Bound(1e-9, Rounds(0.1), 0.0, 30.0).best(0.1, 1_000, 1, 755.0)
    assert found == 755.0


def test_rounds_that_clients_tell_are_refused(binomial: Protocol) -> None:
    run = Run.of(binomial, rounds=2_500, participation="once", colluding=1)
    with pytest.raises(ConditionError, match="tell their rounds"):
        outsiders_epsilon(run, 1e-9)


@pytest.mark.parametrize(("participation", "adjacency"), [("every", "replace-one"), ("once", "zero-out")])
def test_other_runs_are_refused(binomial: Protocol, participation: str, adjacency: str) -> None:
    run = Run.of(binomial, rounds=10, participation=participation, adjacency=adjacency)
    with pytest.raises(ConditionError, match="take part once"):
        outsiders_epsilon(run, 1e-9)


def test_known_bounds() -> None:
    values: dict[str, object] = {}
    for slack, variation, tail in ((0.0, 0.0, 0.0), (0.01, 1e-9, 1e-10)):
        bound = module._Bound(1e-5, Rounds(0.3, tail_mass=tail), variation, slack)
        key = f"{slack}"
        values[f"delta {key}"] = [
            bound._delta(moved, variance, epsilon)
            for moved in (1e-8, 0.0)
            for variance in (1e-3, 0.1)
            for epsilon in (0.015, 0.5, 3.0, 699.0)
        ]
        values[f"smallest {key}"] = [bound._smallest(1e-7, 1e-3, known) for known in (9.0, 0.9, 0.3, 0.01)]
        values[f"best {key}"] = [
            bound.best(mu, rounds, stride, 5.0)
            for mu in (0.2, 1.5)
            for rounds, stride in ((900, 1), (900, 7), (2, 1), *((150 + i, 1) for i in range(8)))
        ]
    echo = np.array([1.0, 0.5, 0.3, -0.2, 0.1])
    for name, each, rounds in (("echo", echo, 12), ("alone", echo[:1], 40), ("short", echo, 3)):
        values[name] = list(itertools.chain(*module._strides(each, rounds)))
    values["at least"] = [
        module._at_least(count, p, chance) for count in (0, 1, 50, 3000) for p in (0.1, 0.9) for chance in (1e-3, 1e-9)
    ]
    known_values.check("privacy/outsiders", values, rel=1e-9)


@pytest.mark.parametrize(
    ("inner", "finite"), [(0.0, False), (-0.1, False), (1e-3, True), (699.0, True), (700.0, False)]
)
def test_a_delta_is_computed_where_exponentials_are(inner: float, finite: bool) -> None:
    bound = module._Bound(1e-5, Rounds(0.3), 0.0, 0.0)
    assert math.isfinite(bound._delta(0.0, 1e-3, inner)) == finite


def test_without_a_delta_outsiders_are_told_what_the_server_is() -> None:
    noise = DiscreteLaplace(levels=3, coordinate_range=1.0, spread=20, shares=50, window=2**14)
    pure = Protocol(clients=60, dim=8, clip_norm=1.0, rotate=False, mechanism=noise)
    run = Run.of(pure, rounds=50, participation="once")
    assert outsiders_epsilon(run, 0.0) == guarantee(run, 0.0).epsilon


def test_distances_of_hidden_rounds_grow_by_a_quarter_at_most() -> None:
    assert [r for r, _ in module._strides(np.ones(3), 40)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18]
    assert [r for r, _ in module._strides(np.ones(1), 40)] == [1]
    assert [r for r, _ in module._strides(np.ones(3), 1)] == []


@pytest.mark.parametrize("several", [False, True])
def test_correlated_noise_has_counted_all_rounds_already(
    several: bool, binomial: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.of(binomial, rounds=40, participation="once") if several else correlated(2)
    asked: list[float] = []

    class Bound:
        def __init__(self, *given: float) -> None:
            asked[:] = given

        def best(self, mu: float, rounds: int, stride: int, known: float) -> float:
            return 7.0

    cost = Rounds(0.1, tail_mass=1e-13, variation=1e-14, slack=1e-5)
    monkeypatch.setattr(module, "guarantee", lambda *_: SimpleNamespace(epsilon=9.0))
    monkeypatch.setattr(module, "round_cost", lambda *_: cost)
    monkeypatch.setattr(module, "_Bound", Bound)
    assert outsiders_epsilon(run, 1e-9) == 7.0
    times = 40 if several else 1
    assert asked == [1e-9, cost, pytest.approx(times * 1e-14, rel=1e-8, abs=0.0), pytest.approx(times * 1e-5)]
