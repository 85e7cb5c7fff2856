"""Who is whose neighbour. The stated risks are upper bounds: compared with all graphs, and with graphs as in life."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from math import comb, factorial

import numpy as np
import pytest

from cpsgd.secagg import SecureParameters, cohort, risk
from cpsgd.secagg.parameters import _parts, _risk, smallest_quorum, smallest_threshold

from .rounds import FINGERPRINT


def circle_neighbours(order: tuple[int, ...], degree: int) -> dict[int, set[int]]:
    n = len(order)
    return {
        order[place]: {order[(place + step) % n] for step in range(-degree // 2, degree // 2 + 1) if step}
        for place in range(n)
    }


def connected(members: set[int], ties: dict[int, set[int]]) -> bool:
    reached, edge = set(), {min(members)}
    while edge:
        reached |= edge
        edge = {other for one in edge for other in ties[one] & members} - reached
    return reached == members


@pytest.mark.parametrize(
    ("n", "k", "t", "dropped", "colluding"), [(7, 4, 3, 2, 1), (7, 4, 4, 1, 2), (7, 2, 2, 2, 0), (8, 4, 4, 2, 2)]
)
def test_the_bounds_hold_over_all_graphs(n: int, k: int, t: int, dropped: int, colluding: int) -> None:
    lost = set(range(dropped))
    bad = set(range(dropped, dropped + colluding))
    failing = insecure = disconnected = 0
    for rest in permutations(range(1, n)):
        ties = circle_neighbours((0, *rest), k)
        left = {client: len(near - lost) + (client not in lost) for client, near in ties.items()}
        failing += any(left[client] < t for client in range(n))
        apart = not connected(set(range(n)) - lost - bad, ties)
        disconnected += apart
        insecure += apart or any(2 * t <= k + 1 + len(ties[client] & bad) for client in set(range(n)) - bad)
    graphs = factorial(n - 1)
    found = _risk(n, k, t, dropped, colluding)
    assert failing / graphs <= found.failure
    assert insecure / graphs <= found.insecurity
    assert disconnected / graphs <= _parts(n, k, dropped, colluding)
    assert found.failure <= n * failing / graphs + 1e-12  # a union bound loses at most the number of clients


def exact_tail(population: int, marked: int, drawn: int, below: int) -> Fraction:
    """P(fewer than `below` marked among those drawn), in fractions."""
    ways = sum(
        comb(marked, i) * comb(population - marked, drawn - i)
        for i in range(max(0, drawn - (population - marked)), below)
        if drawn - i <= population - marked
    )
    return Fraction(ways, comb(population, drawn))


@pytest.mark.parametrize(("n", "dropped", "colluding"), [(100, 10, 5), (1000, 100, 50), (3000, 600, 100)])
def test_the_stated_risks_are_the_formulas_in_exact_arithmetic(n: int, dropped: int, colluding: int) -> None:
    chosen = SecureParameters.choose(
        n, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=dropped / n, colluding=colluding
    )
    k, t = chosen.neighbours, chosen.threshold
    assert k < n - 1
    found = risk(chosen, dropout=dropped / n, colluding=colluding)
    failure = (n - dropped) * exact_tail(n - 1, n - 1 - dropped, k, t - 1) + dropped * exact_tail(
        n - 1, n - dropped, k, t
    )
    both = (n - colluding) * (1 - exact_tail(n - 1, colluding, k, 2 * t - k - 1))
    crowded = 2 * (n - colluding) * (1 - exact_tail(n - 1, colluding, k // 2, t - k // 2 - 1))
    assert both <= crowded <= 1e-18  # so small that 10^9 lists may be tried
    missing = dropped + colluding
    row = k // 2
    parts = n * Fraction(comb(n - row, missing - row), comb(n, missing)) if missing >= row else Fraction(0)
    assert float(parts) <= _parts(n, k, missing, 0) <= float(parts) * (1 + 1e-5)
    for stated, exact in ((found.failure, failure), (found.insecurity, 10**9 * crowded + parts)):
        assert float(exact) <= stated <= float(exact) * (1 + 1e-5)
        assert stated <= 1e-9


def test_the_bound_on_parts_is_the_formula_in_exact_arithmetic() -> None:
    for n, k, missing in ((100, 8, 30), (100, 2, 1), (30, 20, 20), (50, 4, 2)):
        exact = n * Fraction(comb(n - k // 2, missing - k // 2), comb(n, missing))
        assert min(1.0, float(exact)) <= _parts(n, k, missing, 0) <= float(exact) * (1 + 1e-5)
        assert _parts(n, k, missing - 1, 1) == _parts(n, k, missing, 0)
    assert _parts(50, 4, 1, 0) == 0.0


def test_the_choice_is_the_smallest() -> None:
    chosen = SecureParameters.choose(1000, 1, 8, fingerprint=FINGERPRINT, round=0, colluding=50)
    k, t = chosen.neighbours, chosen.threshold
    assert _risk(1000, k, t - 1, 100, 50).insecurity > 1e-9
    for threshold in range((k - 1) // 2 + 1, k):
        smaller = _risk(1000, k - 2, threshold, 100, 50)
        assert max(smaller.failure, smaller.insecurity) > 1e-9


def test_a_graph_stays_in_one_part_with_as_few_survivors_as_clients_agree_to() -> None:
    """Without dropouts a bare circle would do; but two of them cut it, and clients would agree to that sum."""
    bare, safe = (
        SecureParameters.choose(100, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.0, surviving=surviving)
        for surviving in (100, 90)
    )
    assert bare.neighbours == 2
    assert risk(bare, dropout=0.0).insecurity == 0.0
    assert _parts(100, safe.neighbours, 10, 0) <= risk(safe, dropout=0.0).insecurity <= 1e-9
    cut = SecureParameters(
        clients=100, dim=1, bits=8, neighbours=2, threshold=3, fingerprint=FINGERPRINT, round=0, surviving=98
    )
    assert risk(cut, dropout=0.0).insecurity == 1.0


def test_few_clients_share_masks_with_everybody() -> None:
    for n in (2, 3, 10, 64):
        chosen = SecureParameters.choose(n, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.0)
        assert (chosen.neighbours, chosen.threshold) == (n - 1, n // 2 + 1)
        assert risk(chosen, dropout=0.0).insecurity == 0.0
    assert SecureParameters.choose(65, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.0).neighbours < 64


def test_the_smallest_threshold_and_quorum() -> None:
    """More than half of all shares; on a circle, more than a stretch of it has on one side."""
    assert [smallest_threshold(n, n - 1) for n in (2, 9, 10)] == [2, 5, 6]
    assert [smallest_threshold(100, k) for k in (2, 8, 98)] == [3, 6, 51]
    assert [smallest_quorum(n, n - 1, 9, c) for n, c in ((10, 0), (10, 1), (10, 2), (11, 2))] == [6, 6, 7, 7]
    assert [smallest_quorum(100, 8, surviving, 10) for surviving in (50, 56, 57)] == [56, 56, 57]


def test_neighbours_grow_like_the_logarithm() -> None:
    found = [
        SecureParameters.choose(n, 1, 8, fingerprint=FINGERPRINT, round=0, colluding=n // 20).neighbours
        for n in (100, 1_000, 10_000, 100_000)
    ]
    assert found == sorted(found)
    assert found[3] < 4 * found[1] / 2


def test_neighbours_in_life_are_as_often_colluding_as_in_theory() -> None:
    """The mean over 400 graphs of P(c >= 3) against the hypergeometric: within 5.4 standard errors, 1e-7."""
    n, k, colluding = 60, 10, 12
    expected = float(1 - exact_tail(n - 1, colluding, k, 3))
    hits = [
        sum(other < colluding for other in cohort.neighbours(n, k, session.to_bytes(16, "little"), n - 1)) >= 3
        for session in range(400)
    ]
    assert abs(np.mean(hits) - expected) < 5.4 * (expected * (1 - expected) / 400) ** 0.5


@pytest.mark.parametrize(("clients", "degree"), [(2, 1), (5, 4), (6, 2), (9, 6), (200, 12)])
def test_everybody_has_as_many_neighbours_and_neighbours_know_each_other(clients: int, degree: int) -> None:
    ties = [cohort.neighbours(clients, degree, b"session", client) for client in range(clients)]
    for client, near in enumerate(ties):
        assert len(set(near)) == degree
        assert list(near) == sorted(near)
        assert client not in near
        assert all(client in ties[other] for other in near)


def test_another_session_is_another_graph() -> None:
    one, other = ([cohort.neighbours(50, 6, session, i) for i in range(50)] for session in (b"a", b"b"))
    assert one != other
    assert one == [cohort.neighbours(50, 6, b"a", i) for i in range(50)]


def test_the_construction_is_fixed() -> None:
    """Clients and servers of different releases must see the same graph."""
    assert cohort.neighbours(20, 4, bytes(range(16)), 0) == (6, 9, 14, 19)


@pytest.mark.parametrize(
    ("threshold", "colluding", "insecure"),
    [(6, 0, 0.0), (5, 0, 1.0), (6, 2, 1.0), (6, 1, 0.0), (7, 2, 0.0), (7, 4, 1.0)],
)
def test_two_secrets_of_one_client_take_twice_the_threshold(threshold: int, colluding: int, insecure: float) -> None:
    """On a complete graph of ten: honest clients reveal one share each, colluding ones both."""
    assert _risk(10, 9, threshold, 0, colluding).insecurity == insecure
    # The quorum, too: a set of survivors more for the liars to sign.
    fields = {"dim": 1, "bits": 8, "neighbours": 9, "fingerprint": FINGERPRINT, "round": 0}
    safe = SecureParameters(clients=10, threshold=10, quorum=max(6, threshold), **fields)
    assert risk(safe, dropout=0.0, colluding=colluding).insecurity == (insecure if threshold >= 6 else 0.0)


def test_risks_are_probabilities() -> None:
    assert _risk(100, 4, 4, 90, 0).failure == 1.0
    assert _risk(100, 4, 4, 50, 0).insecurity == 1.0
    assert _parts(100, 4, 50, 0) == 1.0
    assert _risk(100, 4, 4, 50, 40).insecurity == 1.0  # crowded and in parts
    assert _risk(10, 9, 8, 2, 0).failure == 0.0
    assert _risk(10, 9, 8, 3, 0).failure == 1.0
    few = SecureParameters(clients=10, dim=1, bits=8, neighbours=9, threshold=6, fingerprint=FINGERPRINT, round=0)
    assert risk(few, dropout=0.4).failure == 0.0
    assert risk(few, dropout=0.5).failure == 1.0  # fewer than the quorum of 6
    sparse = SecureParameters(
        clients=100, dim=1, bits=8, neighbours=30, threshold=17, fingerprint=FINGERPRINT, round=0, surviving=95
    )
    assert risk(sparse, dropout=0.05).failure < 1e-6
    assert risk(sparse, dropout=0.06).failure == 1.0  # fewer than the quorum of 95, with shares enough
