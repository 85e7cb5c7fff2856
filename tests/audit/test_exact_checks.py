"""Checks by exact laws, against enumeration and finer searches."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cpsgd.audit import exact_checks
from cpsgd.audit.auditing import Claim
from cpsgd.audit.checks import Played
from cpsgd.audit.playing import RoundLattice, canaries_of, resting
from cpsgd.audit.sum_law import Array, SumLaw
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol

SMALL = Protocol.binomial(clients=3, dim=2, clip_norm=1.0, levels=3, trials=6)


def law(first: list[int], *rows: list[float]) -> SumLaw:
    """The law with these masses, one row per coordinate."""
    found = SumLaw.__new__(SumLaw)
    found.first, found.mass = np.array(first), np.array(rows)
    outcomes = found.first[:, None] + np.arange(found.mass.shape[1])
    found.mean = np.sum(found.mass * outcomes, axis=1)
    found.variance = np.sum(found.mass * (outcomes - found.mean[:, None]) ** 2, axis=1)
    return found


def masses(laws: SumLaw) -> dict[tuple[int, ...], float]:
    """All outcomes of all coordinates together."""
    places = itertools.product(*(range(laws.mass.shape[1]) for _ in laws.first))
    return {tuple(laws.first + place): float(np.prod([m[i] for m, i in zip(laws.mass, place, strict=True)]))
            for place in places}  # fmt: skip


def enumerated(one: SumLaw, other: SumLaw, delta: float) -> float:
    """The ε that both laws need, by bisection over all outcomes."""
    tables, worst = (masses(one), masses(other)), 0.0
    for first, second in (tables, tables[::-1]):
        a, b = np.array(list(first.values())), np.array([second.get(place, 0.0) for place in first])
        low, high = 0.0, 60.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            short = np.maximum(a - math.exp(middle) * b, 0.0).sum()
            low, high = (middle, high) if short > delta else (low, middle)
        worst = max(worst, low)
    return worst


PAIRS = [
    (law([0], [0.75, 0.25]), law([0], [0.25, 0.75])),
    (law([0], [0.6, 0.3, 0.1]), law([0], [0.1, 0.5, 0.4])),
    # One way needs more than the other.
    (law([0], [0.98, 0.01, 0.01]), law([0], [0.7, 0.1, 0.2])),
    # Several coordinates, alike and not; places that one law alone has.
    (law([0, 0, 5], *[[0.5, 0.3, 0.2]] * 3), law([0, 0, 5], *[[0.3, 0.3, 0.4]] * 3)),
    (law([0, 3], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]), law([1, 3], [0.2, 0.7, 0.1], [0.2, 0.6, 0.2])),
]


@pytest.mark.parametrize("pair", PAIRS, ids=["two", "three", "one way", "alike", "shifted"])
@pytest.mark.parametrize("delta", [0.3, 0.05, 0.01])
def test_the_epsilon_of_a_pair_is_that_of_all_outcomes_or_a_little_less(
    pair: tuple[SumLaw, SumLaw], delta: float
) -> None:
    found = exact_checks.pair_epsilon(*pair, delta)
    assert found == exact_checks.pair_epsilon(*pair[::-1], delta)
    # Masses are taken 1 % too small, and outcomes that one law alone has are left out.
    one, other = (dict(masses(each)) for each in pair)
    alone = max(sum(m for place, m in a.items() if place not in b) for a, b in ((one, other), (other, one)))
    assert found <= enumerated(*pair, delta) + 1e-9
    assert found >= 0.995 * enumerated(*pair, (delta + alone) / 0.99) - 1e-3


def test_pairs_that_need_all_or_nothing() -> None:
    same, far = law([0], [0.5, 0.5]), law([9], [0.5, 0.5])
    assert exact_checks.pair_epsilon(same, same, 1e-9) == 0.0
    assert exact_checks.pair_epsilon(same, same, 0.0) == 0.0
    assert exact_checks.pair_epsilon(same, far, 1e-9) == math.inf
    # One coordinate that tells is enough.
    both = law([0, 0], [0.5, 0.5], [0.5, 0.5]), law([0, 9], [0.5, 0.5], [0.5, 0.5])
    assert exact_checks.pair_epsilon(*both, 1e-9) == math.inf


@pytest.mark.parametrize(("pair", "ratio"), [(PAIRS[0], 3.0), (PAIRS[1], 6.0), (PAIRS[2], 20.0)])
def test_losses_are_rounded_down(pair: tuple[SumLaw, SumLaw], ratio: float) -> None:
    found = exact_checks.pair_epsilon(*pair, 1e-12)
    assert math.log(ratio) - 1e-3 < found <= math.log(ratio)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_a_claim_is_compared_with_what_the_worst_canary_needs(adjacency: Adjacency) -> None:
    lattice = RoundLattice(SMALL, 0)
    others = (lattice.points(resting(lattice)), 2)
    laws = [
        [SumLaw(SMALL, [(lattice.points(end), 1), others]) for end in (canary.zero, canary.one)]
        for canary in canaries_of(lattice, adjacency)
    ]
    needed = {delta: max(enumerated(pair[0], pair[1], delta) for pair in laws) for delta in (0.01, 0.1)}
    for claims in ([Claim(0.01, 0.5, 0.0)], [Claim(0.01, 9.0, 0.0), Claim(0.1, 0.25, 0.0)]):
        exact = max(needed[each.delta] - 1.001 * each.claimed for each in claims) - 1e-4
        assert exact_checks.claim(SMALL, claims, adjacency, 3).statistic == pytest.approx(exact, abs=0.02)
    exact = max(exact_checks.pair_epsilon(pair[0], pair[1], 0.01) for pair in laws) - 1.001 * 0.5 - 1e-4
    found = exact_checks.claim(SMALL, [Claim(0.01, 0.5, 0.0)], adjacency, 3).statistic
    assert found == pytest.approx(exact, abs=1e-12)
    assert not exact_checks.claim(SMALL, [Claim(0.01, 0.9 * needed[0.01], 0.0)], adjacency, 3).passed
    assert exact_checks.claim(SMALL, [Claim(0.01, needed[0.01], 0.0)], adjacency, 3).passed


LAWS = (law([0, 2], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]), law([0, 0], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]))


def played(laws: SumLaw, sums: list[list[int]], slack: float) -> Played:
    return cast(Played, SimpleNamespace(law=laws, sums=np.array(sums), slack=slack))


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("slack", [0.0, 0.05])
@pytest.mark.parametrize("sums", [[[1, 3]] * 40, [[0, 4], [2, 2]] * 20, [[1, 3], [0, 3], [2, 2], [1, 4]] * 10])
def test_squares_are_compared_with_chernoffs_bound(sums: list[list[int]], slack: float, times: int) -> None:
    batches = [played(LAWS[0], sums * times, slack), played(LAWS[1], [[2, 1], [2, 0], [1, 2]] * 5 * times, slack)]
    found = exact_checks.variance(batches, 1e-3).statistic
    total = forgiven = 0.0
    terms: list[tuple[Array, Array, int]] = []
    for batch in batches:
        for j in range(2):
            z = (batch.sums[:, j] - batch.law.mean[j]) ** 2 / batch.law.variance[j] - 1.0
            total += float(z.sum())
            forgiven += len(z) * (slack + slack**2) / float(batch.law.variance[j])
            outcomes = batch.law.first[j] + np.arange(3)
            squares = (outcomes - batch.law.mean[j]) ** 2 / batch.law.variance[j] - 1.0
            terms.append((batch.law.mass[j], squares, len(z)))
    limits = []
    for sign in (1.0, -1.0):
        slopes = np.linspace(1e-3, 0.25, 500)
        cumulant = sum(n * np.log(np.exp(sign * np.outer(slopes, x)) @ p) for p, x, n in terms)
        limits.append(float(np.min((cumulant + math.log(2.0 / 1e-3)) / slopes)) + forgiven)
    exact = max(total / limits[0], -total / limits[1])
    assert exact * (1.0 - 0.01 * np.sign(exact)) <= found <= exact * (1.0 + 1e-6 * np.sign(exact))


@pytest.mark.parametrize("modulus", [64, 65, 8192])
def test_every_residue_is_decoded_to_the_nearest_to_the_middle(modulus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = Protocol.binomial(clients=3, dim=2, clip_norm=1.0, levels=3, trials=6, modulus=modulus)
    rounds, counts = ([0, 1], (1, 3)) if modulus < 100 else ([1], (3,))
    check = exact_checks.wraparound(protocol, rounds, counts)
    assert check.limit == 0.25
    assert check.statistic < 0.01
    decode = Protocol.decode_sum
    lowest = round(RoundLattice(protocol, 1).middle(3) - modulus / 2)
    for place in (lowest, lowest + modulus - 1, 0) if modulus < 100 else (0,):

        def wrong(self: Protocol, sums: Any, count: int, number: int, place: int = place) -> Any:
            found = decode(self, sums, count, number).copy()
            off = sums == place % modulus
            return np.where(off, found + self.mechanism.scale * modulus / count, found) if number == 1 else found

        monkeypatch.setattr(Protocol, "decode_sum", wrong)
        assert exact_checks.wraparound(protocol, rounds, counts).statistic == pytest.approx(modulus, rel=1e-3)
        monkeypatch.setattr(Protocol, "decode_sum", lambda *given, wrong=wrong: np.where(
            (found := wrong(*given)) > decode(*given), np.nan, found))  # fmt: skip
        assert exact_checks.wraparound(protocol, rounds, counts).statistic == math.inf
    assert modulus > 100 or exact_checks.wraparound(protocol, [0], (1, 3)).passed


def test_sums_of_integers_without_a_modulus_are_not_asked_about() -> None:
    check = exact_checks.wraparound(SMALL, [0], (3,))
    assert (check.statistic, check.limit, check.passed) == (0.0, None, True)
