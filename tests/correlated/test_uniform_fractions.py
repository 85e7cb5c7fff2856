"""Shaped rounding against brute force: the lattice's shortest vector and series, and exact laws of small runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import norm

from cpsgd.correlated.uniform_fractions import _series, excess, shortest
from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.rounded_gaussian import uniformity


@pytest.mark.parametrize("variance", [0.01, 0.05, 0.3, 1.0])
def test_missing_messages_cost_jacobis_theta(variance: float) -> None:
    """θ₃ = Σ exp(-2π² v k²) over all integers k, by Poisson's summation: Σ exp(-m²/(2v)) / √(2π v)."""
    theta = sum(math.exp(-m * m / (2.0 * variance)) for m in range(-40, 41)) / math.sqrt(2.0 * math.pi * variance)
    for missing in (1, 3):
        found = _series(variance, 5, missing) - _series(variance, 5, 0)
        assert found == pytest.approx(missing * math.log(theta), rel=1e-6, abs=1e-12)


Message = tuple[int, int]
"""A silo and a round."""


@dataclass(frozen=True)
class Graph:
    """A run: the messages of each sum, messages that did not arrive, and rounds in which silos begin anew."""

    sums: tuple[tuple[Message, ...], ...]
    missing: tuple[Message, ...] = ()
    anew: tuple[Message, ...] = ()
    bands: int = 3

    @property
    def messages(self) -> list[Message]:
        return sorted({each for members in self.sums for each in members} | set(self.missing), key=lambda m: m[::-1])

    def weights(self) -> np.ndarray:
        """Returns L, messages by messages: a message uses a silo's earlier z unless the silo began anew since."""
        own, g = self.messages, Correlation(self.bands, max(self.bands, 4)).factors
        found = np.zeros((len(own), len(own)))
        for i, (silo, round_) in enumerate(own):
            for j, (other, earlier) in enumerate(own):
                kept = not any(who == silo and earlier < when <= round_ for who, when in self.anew)
                if silo == other and 0 <= round_ - earlier < self.bands and kept:
                    found[i, j] = g[round_ - earlier]
        return found

    def members(self) -> np.ndarray:
        return np.array([[float(each in members) for members in self.sums] for each in self.messages])

    def lengths(self, reach: int) -> np.ndarray:
        """Returns q(k) for all k in a box, k not in the fibre, one for each class by fixing a message of every sum."""
        own, part = self.messages, self.members()
        fixed = {own.index(members[0]) for members in self.sums}
        free = [i for i in range(len(own)) if i not in fixed]
        back = self.weights().T
        basis = back @ part
        project = np.eye(len(own)) - basis @ np.linalg.pinv(basis)
        found = []
        for values in product(range(-reach, reach + 1), repeat=len(free)):
            if any(values):
                k = np.zeros(len(own))
                k[free] = values
                found.append(float(np.sum((project @ (back @ k)) ** 2)))
        return np.array(found)


def every(silos: int, rounds: int) -> tuple[tuple[Message, ...], ...]:
    return tuple(tuple((silo, round_) for silo in range(silos)) for round_ in range(rounds))


GRAPHS = [
    Graph(every(2, 2)),
    Graph(every(2, 3)),
    Graph(every(3, 2)),
    Graph((((0, 0), (1, 0)), ((1, 1), (2, 1))), missing=((2, 0), (0, 1))),
    Graph((((0, 0), (1, 0)), ((0, 1), (1, 1), (2, 1)), ((1, 2), (2, 2)))),
    Graph((((0, 0), (1, 0)), ((0, 1), (1, 1))), missing=((2, 0), (2, 1))),
    Graph(every(2, 3), anew=((0, 1),)),
    Graph(every(2, 3), anew=((0, 2), (1, 1))),
    # Two sums in a round, whose silos are mixed in the next.
    Graph((((0, 0), (1, 0)), ((2, 0), (3, 0)), ((0, 1), (2, 1)), ((1, 1), (3, 1)))),
    Graph((((0, 0), (1, 0)), ((1, 1), (2, 1))), bands=2),
]


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_vector_is_shorter_than_the_bound(graph: Graph) -> None:
    fewest = min(map(len, graph.sums))
    rounds = 1 + max(round_ for _, round_ in graph.messages)
    bound = shortest(Correlation(min(graph.bands, max(2, rounds)), max(2, rounds)), fewest)
    reach = 2 if len(graph.messages) - len(graph.sums) <= 5 else 1
    assert graph.lengths(reach).min() >= bound


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("beta", [5.0, 8.0, 12.0])
def test_no_series_is_larger_than_the_bound(graph: Graph, beta: float) -> None:
    """The sum over all classes, 1 for the fibre itself included, against ρ Π(1 + τ) θ₃^missing."""
    reach = 3 if len(graph.messages) - len(graph.sums) <= 4 else 2
    total = 1.0 + float(np.exp(-beta * graph.lengths(reach)).sum())
    spread = float(np.sum(Correlation(graph.bands, 4).factors ** 2))
    bound = spread ** (len(graph.sums) / 2.0)
    for members in graph.sums:
        bound *= 1.0 + uniformity(beta / (2.0 * math.pi**2), len(members))
    bound *= (1.0 + 2.0 * sum(math.exp(-beta * k * k) for k in range(1, 6))) ** len(graph.missing)
    assert total <= bound


@pytest.mark.parametrize(("sigma", "silos"), [(1.2, 2), (1.5, 3), (2.0, 2)])
def test_the_whole_bound_holds_for_runs_of_two_rounds(sigma: float, silos: int) -> None:
    alpha = 2.0 * math.pi**2 * sigma**2
    found = excess(sigma**2, Correlation(2, 2), honest=2, silos=silos)
    graphs = [Graph(every(2, 2), bands=2)]
    if silos == 3:
        graphs += [Graph(every(3, 2), bands=2)]
        graphs += [Graph((((0, 0), (1, 0)), ((1, 1), (2, 1))), missing=((2, 0), (0, 1)), bands=2)]
    for graph in graphs:
        assert float(np.exp(-alpha * graph.lengths(2)).sum()) <= found


# ---------------------------------------------------------------------- exact laws
#
# A silo's w follows from its messages: w = Y - x - Σ g w. So the probability of all messages is a product of Φ's, and
# that of the sums is a finite sum over how each is split. Nothing is integrated, and nothing is drawn.


def law(graph: Graph, x: dict[Message, float], sigma: float, sums: tuple[int, ...], reach: int = 9) -> float:
    """Returns P(S = sums) exactly: the sum over all messages, by silo and round, of their probability."""
    own, g = graph.messages, Correlation(graph.bands, max(graph.bands, 4)).factors

    def rest(index: int, said: dict[Message, int], left: dict[int, int]) -> float:
        if index == len(own):
            return 1.0
        silo, round_ = own[index]
        w: dict[int, float] = {}
        for earlier in range(round_):
            if (silo, earlier) in said:
                w[earlier] = said[silo, earlier] - x[silo, earlier] - taken(silo, earlier, w)
        mean = x[silo, round_] + taken(silo, round_, w)
        member = next((a for a, members in enumerate(graph.sums) if own[index] in members), None)
        last = member is not None and own[index] == max(graph.sums[member], key=own.index)
        values = [left[member]] if last and member is not None else range(round(mean) - reach, round(mean) + reach + 1)
        total = 0.0
        for value in values:
            mass = float(ndtr((value + 0.5 - mean) / sigma) - ndtr((value - 0.5 - mean) / sigma))
            if mass > 1e-17:
                after = left if member is None else {**left, member: left[member] - value}
                total += mass * rest(index + 1, {**said, own[index]: value}, after)
        return total

    def taken(silo: int, round_: int, w: dict[int, float]) -> float:
        kept = (e for e in w if round_ - e < graph.bands)
        return sum(
            g[round_ - e] * w[e]
            for e in kept
            if not any(who == silo and e < when <= round_ for who, when in graph.anew)
        )

    return rest(0, {}, dict(enumerate(sums)))


def density(total: float, sigma: float, silos: int) -> float:
    """Returns ψ, the density of N(0, nσ²) plus n numbers uniform on (-1/2, 1/2), for n = 2."""
    assert silos == 2
    points = np.linspace(-1.0, 1.0, 4001)
    weights = 1.0 - np.abs(points)
    return float(np.trapezoid(weights * norm.pdf(total - points, scale=sigma * math.sqrt(2.0)), points))


@pytest.mark.parametrize(("rounds", "sigma"), [(2, 0.7), (2, 1.0), (3, 0.85)])
def test_sums_have_the_law_of_the_gaussian_mechanism_rounded(rounds: int, sigma: float) -> None:
    """Theorem 1, for two silos that are in every round: P(S = s) is within (1 ± τ)^T of Π ψ((C (s - X))_t)."""
    graph, random = Graph(every(2, rounds)), np.random.default_rng(1)
    tau = uniformity(sigma**2, 2)
    c = Correlation(3, max(3, rounds)).coefficients
    x = {message: float(random.uniform(-0.5, 0.5)) for message in graph.messages}
    total = [x[0, t] + x[1, t] for t in range(rounds)]
    for _ in range(4):
        sums = tuple(int(each) for each in random.integers(-2, 3, size=rounds))
        expected = 1.0
        for t in range(rounds):
            expected *= density(sum(c[t - s] * (sums[s] - total[s]) for s in range(t + 1)), sigma, 2)
        found = law(graph, x, sigma, sums)
        assert (1.0 - tau) ** rounds * (1 - 1e-5) <= found / expected <= (1.0 + tau) ** rounds * (1 + 1e-5)


IRREGULAR = [
    Graph((((0, 0), (1, 0)), ((1, 1), (2, 1))), missing=((2, 0), (0, 1))),
    Graph((((0, 0), (1, 0)), ((0, 1), (1, 1), (2, 1)))),
    Graph(every(2, 3), anew=((0, 1),)),
]


@pytest.mark.parametrize("graph", IRREGULAR)
@pytest.mark.parametrize("sigma", [0.8, 1.1])
def test_nothing_but_the_sums_of_the_vectors_is_told(graph: Graph, sigma: float) -> None:
    """Theorem 2: two ways to split the same sums of vectors have the same law of sums, within 1 ± τ."""
    random = np.random.default_rng(2)
    tau = float(np.exp(-2.0 * math.pi**2 * sigma**2 * graph.lengths(2)).sum())
    x = {message: float(random.uniform(-0.5, 0.5)) for message in graph.messages}
    moved = {message: float(random.uniform(-0.5, 0.5)) for message in graph.messages}
    for members in graph.sums:
        mean = sum(x[m] - moved[m] for m in members) / len(members)
        for message in members:
            moved[message] += mean
    for _ in range(3):
        sums = tuple(int(each) for each in random.integers(-1, 2, size=len(graph.sums)))
        ratio = law(graph, x, sigma, sums, 7) / law(graph, moved, sigma, sums, 7)
        assert abs(math.log(ratio)) <= math.log((1 + tau) / (1 - tau)) + 1e-9


def test_two_silos_are_the_fewest() -> None:
    with pytest.raises(ConditionError, match="two honest silos"):
        excess(4.0, Correlation(2, 10), honest=1, silos=2)
    with pytest.raises(ConditionError, match="may drop out"):
        excess(4.0, Correlation(2, 10), honest=2, silos=1000)


def test_published_numbers() -> None:
    """Ten silos of which eight are there: σ = 2.85; a hundred of which ninety are: σ = 2.06. 300 rounds, d = 10⁴."""
    run = Correlation(32, 300)
    assert 1e4 * excess(2.85**2, run, honest=8, silos=10) < 1e-7
    assert 1e4 * excess(2.5**2, run, honest=8, silos=10) > 1e-3
    assert 1e4 * excess(2.06**2, run, honest=90, silos=100) < 1e-7
