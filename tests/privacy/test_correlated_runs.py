"""What is proved of a run with correlated noise, against exact Gaussian laws of small runs.

A *slot* is one draw z: a client of one round, its own noise, and the later messages of its lineage that take it away.
The observations are the rounds' sums. Whatever lineages do, the information in them about a client is at most that of
the accounting, ‖c‖²/n with n slots per round that nobody tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr

from cpsgd.correlated.weights import Correlation
from cpsgd.privacy.gaussian import gdp_delta

Array = NDArray[np.float64]


def information(design: Array, moves: Array) -> float:
    """Squared Mahalanobis distance of two runs whose sums' means differ by `moves`; sums are design @ z."""
    return float(moves @ np.linalg.solve(design @ design.T, moves))


def random_run(
    generator: np.random.Generator, bands: int, rounds: int, clients: int, told: float
) -> tuple[Array, int] | None:
    """The design of a run in which lineages break, skip rounds, begin anew and are told; and the fewest slots left.

    None where a round has no slot that nobody tells.
    """
    weights = Correlation(bands, rounds).factors
    columns, left = [], np.zeros(rounds, dtype=int)
    # A lineage is a list of the slots it still remembers: (round, column).
    lineages: list[list[tuple[int, Array]]] = [[] for _ in range(clients)]
    for number in range(rounds):
        for index in range(clients):
            if generator.random() < 0.25:
                lineages[index] = []  # begins anew
            memory = [(t, column) for t, column in lineages[index] if number - t < bands]
            column = np.zeros(rounds)
            arrives = generator.random() < 0.8
            if arrives:
                column[number] = 1.0
                for t, other in memory:
                    other[number] += weights[number - t]
            known = generator.random() < told
            if not known:
                columns.append(column)
                left[number] += arrives
            if arrives or generator.random() < 0.5:
                lineages[index] = [*memory, (number, column)]  # a client that drops out may hand on what it drew
    if left.min() == 0:
        return None
    return np.stack(columns, axis=1), int(left.min())


def runs(seed: int, count: int) -> Iterator[tuple[Correlation, Array, int]]:
    generator = np.random.default_rng(seed)
    while count:
        rounds = int(generator.integers(1, 9))
        bands = int(generator.integers(1, rounds + 1))
        found = random_run(generator, bands, rounds, int(generator.integers(1, 7)), float(generator.choice([0, 0.3])))
        if found is not None:
            yield Correlation(bands, rounds), *found
            count -= 1


def test_lineages_that_break_and_seeds_that_are_told_cost_no_privacy() -> None:
    nearest = 0.0
    for correlation, design, slots in runs(seed=1, count=2000):
        limit = correlation.sensitivity**2 / slots
        for number in range(correlation.rounds):
            moves = np.eye(correlation.rounds)[number]
            found = information(design, moves)
            assert found <= limit * (1.0 + 1e-9)
            nearest = max(nearest, found / limit)
    assert nearest > 0.999  # and with whole lineages it is that much


def test_clients_that_come_back_cost_what_the_separation_says() -> None:
    generator = np.random.default_rng(2)
    for one, design, slots in runs(seed=3, count=500):
        separation = int(generator.integers(1, one.rounds + 1))
        correlation = Correlation(one.bands, one.rounds, separation)
        for _ in range(4):
            moves, last = np.zeros(one.rounds), -separation
            for number in range(one.rounds):
                if number - last >= separation and generator.random() < 0.7:
                    moves[number], last = generator.choice([-1.0, 1.0]), number
            assert information(design, moves) <= correlation.sensitivity**2 / slots * (1.0 + 1e-9)


def split_run(generator: np.random.Generator, bands: int, rounds: int) -> tuple[Array, NDArray[np.int64]]:
    """The design of a run in which nothing is told, with one to three sums in a round; and the messages in each sum.

    Who is in which sum, how many messages there are and which lineages go on is another matter in every round.
    """
    weights = Correlation(bands, rounds).factors
    columns: list[Array] = []
    sums: list[int] = []
    messages: list[list[tuple[int, Array]]] = []  # the slots that lineages remember: (round, column)
    for number in range(rounds):
        heard: list[list[tuple[int, Array]]] = []
        waiting = [messages[i] for i in generator.permutation(len(messages))]
        for _ in range(generator.integers(1, 4)):
            sums.append(int(generator.integers(1, 9)))
            for _ in range(sums[-1]):
                known = waiting.pop() if waiting and generator.random() < 0.9 else []
                column = np.zeros(3 * rounds)
                column[len(sums) - 1] = 1.0
                for t, other in known:
                    other[len(sums) - 1] += weights[number - t]
                columns.append(column)
                heard.append([*known, (number, column)])
        messages = [[(t, c) for t, c in known if number + 1 - t < bands] for known in heard + waiting]
    return np.stack(columns, axis=1)[: len(sums)], np.array(sums)


def test_where_nothing_is_told_only_the_messages_in_the_clients_own_sum_count() -> None:
    """So a client need not take the server's word for how many will be in later rounds, or that each has one sum."""
    generator = np.random.default_rng(5)
    nearest = 0.0
    for _ in range(300):
        rounds = int(generator.integers(1, 7))
        bands = int(generator.integers(1, rounds + 1))
        design, sums = split_run(generator, bands, rounds)
        inverse = np.linalg.inv(design @ design.T)
        found = np.diag(inverse) * sums / Correlation(bands, rounds).sensitivity ** 2
        assert found.max() <= 1.0 + 1e-9
        nearest = max(nearest, float(found.max()))
        # And over rounds: a client in one sum of each.
        every = Correlation(bands, rounds, 1).sensitivity ** 2
        moves = generator.choice([-1.0, 0.0, 1.0], size=len(sums))
        owner = np.flatnonzero(moves)
        if len(sums) == rounds and len(owner):
            assert moves @ inverse @ moves <= every / sums[owner].min() * (1.0 + 1e-9)
    assert nearest > 0.95


def test_what_is_told_later_in_a_lineage_matters_for_the_rounds_before() -> None:
    """Nobody tells z of round 0 here, and still it does not protect a client who is alone in its lineage.

    Noise counts for a round only as long as somebody's later noise is there to make up for it: the fewest slots of any
    round count, and not the lineages that hold an untold slot in the client's own round.
    """
    weights = Correlation(2, 3).factors
    # One lineage; z of rounds 1 and 2 is told. The sums are x + z_0, -z_0/2 and 0.
    design = np.array([[1.0], [weights[1]], [0.0]])
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(design @ design.T)
    nearly = np.concatenate([design, 1e-3 * np.eye(3)], axis=1)
    assert information(nearly, np.array([1.0, 0.0, 0.0])) > 1e4


def test_a_seed_that_two_messages_of_a_round_use_costs_privacy() -> None:
    """So an honest client seals its seeds for one successor, and uses those it is handed once per round."""
    weights = Correlation(2, 2).factors
    whole, twice = np.array([[1.0, 0.0], [weights[1], 1.0]]), np.array([[1.0, 0.0], [2.0 * weights[1], 1.0]])
    moves, limit = np.array([1.0, 0.0]), Correlation(2, 2).sensitivity ** 2
    assert information(whole, moves) <= limit * (1.0 + 1e-12)
    assert information(twice, moves) > 1.5 * limit


@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_a_server_that_picks_dropouts_by_what_it_saw_learns_no_more(epsilon: float) -> None:
    """Three rounds, two lineages, two bands. After each sum the server breaks a lineage, or both, or none."""
    generator, samples = np.random.default_rng(4), 50_000
    correlation, deviation = Correlation(2, 3), 1.2
    half = correlation.factors[1]
    z = deviation * generator.standard_normal((samples, 3, 2))

    def alive(total: Array) -> Array:
        return np.stack([total < 0.8, total > -0.5], axis=1).astype(float)

    # Under the law without the client: the first sum, and then those that follow from what the server chose.
    sums = [z[:, 0].sum(axis=1)]
    chosen = []
    for number in (1, 2):
        chosen.append(alive(sums[-1]))
        sums.append(z[:, number].sum(axis=1) + half * (z[:, number - 1] * chosen[-1]).sum(axis=1))
    observed = np.stack(sums, axis=1)
    # What the client moved was the first sum, by 1. The law of each course of choices is Gaussian.
    ratio = np.empty(samples)
    for first in np.unique(chosen[0], axis=0):
        for second in np.unique(chosen[1], axis=0):
            taken = (chosen[0] == first).all(axis=1) & (chosen[1] == second).all(axis=1)
            design = np.zeros((3, 6))
            design[0, 0:2] = design[1, 2:4] = design[2, 4:6] = 1.0
            design[1, 0:2], design[2, 2:4] = half * first, half * second
            direction = np.linalg.solve(deviation**2 * design @ design.T, np.array([1.0, 0.0, 0.0]))
            ratio[taken] = observed[taken] @ direction - 0.5 * direction[0]
    mu = correlation.sensitivity / (deviation * math.sqrt(2.0))
    # H of the two laws, from samples of the first: E max(0, L - e^ε) for L = e^ratio.
    excess = np.maximum(0.0, np.exp(ratio) - math.exp(epsilon))
    error = float(excess.std()) / math.sqrt(samples)
    assert float(excess.mean()) <= gdp_delta(mu, epsilon) + 5.0 * error
    assert float(excess.mean()) > 0.5 * gdp_delta(mu, epsilon)


# ------------------------------------------------------------------ exact laws of small runs with rounding


def joint_law(deviation: float, own: float, weight: float, point: tuple[float, float]) -> Array:
    """Masses of the rounded messages of a lineage of two rounds, by integration over the first."""
    reach = math.ceil(9.0 * math.hypot(deviation, own))
    nodes, weights = np.polynomial.legendre.leggauss(12)
    integers = np.arange(-reach, reach + 1)
    first = integers[:, None] + 0.5 * nodes
    total = math.hypot(deviation, own)
    density = np.exp(-0.5 * ((first - point[0]) / total) ** 2) / (total * math.sqrt(2.0 * math.pi)) * 0.5 * weights
    slope = weight * deviation**2 / total**2
    rest = math.sqrt(own**2 + deviation**2 * (1.0 + weight**2) - slope**2 * total**2)
    middle = point[1] + slope * (first - point[0])
    ends = (np.arange(-reach, reach + 2) - 0.5)[:, None, None]
    below = ndtr((ends - middle) / rest)
    masses: Array = np.einsum("jin,in->ij", np.diff(below, axis=0), density)
    return masses


@pytest.mark.parametrize("moved", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_rounded_sums_of_two_lineages_are_within_the_accounting(moved: tuple[float, float], shift: float) -> None:
    """All outcomes of two clients' sums over two rounds, their noise before rounding and their own noise included."""
    deviation, own = 3.0, 1.6
    half = float(Correlation(2, 2).factors[1])
    other = joint_law(deviation, own, half, (0.2, 0.7))
    apart = 2.0

    def sums(point: tuple[float, float]) -> Array:
        one = joint_law(deviation, own, half, point)
        size = len(one) + len(other) - 1
        found: Array = np.fft.irfft2(np.fft.rfft2(one, (size, size)) * np.fft.rfft2(other, (size, size)), (size, size))
        return np.maximum(found, 0.0)

    base = sums((shift, 0.1))
    there = sums((shift + apart * moved[0], 0.1 + apart * moved[1]))
    mu = apart * Correlation(2, 2).sensitivity / (deviation * math.sqrt(2.0))
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        for p, q in ((base, there), (there, base)):
            found = float(np.maximum(0.0, p - math.exp(epsilon) * q).sum())
            assert found <= gdp_delta(mu, epsilon) + 1e-12
    # Without the run's sensitivity the bound would be broken: the first round's noise is partly taken away.
    if moved[0]:
        less = apart / math.hypot(deviation, own) / math.sqrt(2.0)
        assert float(np.maximum(0.0, base - math.exp(0.5) * there).sum()) > gdp_delta(less, 0.5)
