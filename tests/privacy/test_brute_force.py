"""Claims against the enumeration of all outputs, for hundreds of random pairs of neighbours."""

from __future__ import annotations

import pytest

from cpsgd import Protocol, guarantee, plan
from cpsgd.errors import ConditionError
from cpsgd.privacy import guarantee_over_rounds

from . import checks
from .oracle import Pair

PAIRS = checks.random_pairs(400, seed=20180529)


def test_the_sample_is_not_empty_talk() -> None:
    # Most pairs must get a certificate, and both kinds of coins and dimensions must occur among them.
    accepted = []
    for pair in PAIRS:
        try:
            checks.certificate_epsilon(pair)
        except ConditionError:
            continue
        accepted.append((len(pair.u), pair.p == 0.5))
    assert len(accepted) > 250
    assert min(accepted.count(kind) for kind in [(1, True), (1, False), (2, True), (2, False)]) > 30


def test_gaussian_certificate_is_never_below_the_exact_epsilon() -> None:
    assert checks.wrong_epsilons(checks.certificate_epsilon, PAIRS) == []


@pytest.mark.parametrize(("first", "last"), [(0, 10), pytest.param(10, 200, marks=pytest.mark.thorough)])
def test_renyi_certificate_is_never_below_the_exact_epsilon(first: int, last: int) -> None:
    assert checks.wrong_epsilons(checks.renyi_epsilon, PAIRS[first:last]) == []


def test_summed_renyi_certificates_are_never_below_the_exact_epsilon() -> None:
    certified = 0
    for pair, rounds in checks.few_coins(60, seed=20201):
        try:
            epsilon = checks.summed_epsilon(pair, rounds)
        except ConditionError:
            continue
        certified += 1
        assert pair.delta_at(epsilon, rounds) <= pair.delta * (1 + 1e-9), (pair, rounds)
    assert certified >= 40


@pytest.mark.parametrize(("clients", "trials", "levels", "rounds"), [(1, 30, 2, 2), (2, 15, 2, 5), (3, 10, 3, 3)])
def test_guarantees_of_rounds_with_few_clients(clients: int, trials: int, levels: int, rounds: int) -> None:
    protocol = Protocol.binomial(clients=clients, dim=1, clip_norm=1.0, levels=levels, trials=trials)
    found = guarantee_over_rounds(protocol, 1e-3, rounds=rounds)
    pair = Pair(u=(levels - 1.0,), v=(0.0,), levels=levels, clients=clients, trials=trials, p=0.5, delta=1e-3)
    assert found.method == "renyi-certificate"
    assert pair.delta_at(found.epsilon, rounds) <= 1e-3
    # And not far: half of it would not do.
    assert pair.delta_at(0.5 * found.epsilon, rounds) > 1e-3


def test_guarantees_of_protocols() -> None:
    assert checks.wrong_guarantees() == []


@pytest.mark.parametrize("p", [0.5, 0.35, 0.7])
@pytest.mark.parametrize("delta", [1e-2, *(pytest.param(d, marks=pytest.mark.thorough) for d in (3e-2, 1e-3))])
@pytest.mark.parametrize("moved", [(1.0,), (3.0,), (1.0, 2.0)])
def test_exact_then_certificate_then_theorem(p: float, delta: float, moved: tuple[float, ...]) -> None:
    pair = Pair(u=moved, v=(0.0,) * len(moved), levels=5, clients=1, trials=1_000, p=p, delta=delta)
    certified = min(checks.certificate_epsilon(pair), checks.renyi_epsilon(pair))
    assert pair.delta_at(certified) <= delta
    try:
        assert certified <= checks.theorem_epsilon(pair)
        assert checks.wrong_epsilons(checks.theorem_epsilon, [pair]) == []
    except ConditionError:
        assert 1_000 * p * (1 - p) < 250  # the theorem is silent only for little noise


@pytest.mark.parametrize("p", [0.5, 0.2, 0.9])
@pytest.mark.parametrize("trials", [10_000, 1_000_000])
@pytest.mark.parametrize("dim", [1, 1_000])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_certificate_beats_the_theorem_wherever_that_applies(p: float, trials: int, dim: int, delta: float) -> None:
    pair = Pair(u=(2.0,) * dim, v=(0.0,) * dim, levels=4, clients=10, trials=trials // 10, p=p, delta=delta)
    assert checks.certificate_epsilon(pair) < checks.theorem_epsilon(pair)


@pytest.mark.parametrize("levels", [1001, 2001])
def test_the_theorem_fails_for_large_distances_and_the_guarantee_does_not_rest_on_it(levels: int) -> None:
    # Neighbours 4.5 and 9 standard deviations apart: the theorem's condition holds, its ε does not.
    protocol = Protocol.binomial(clients=1000, dim=1, clip_norm=1.0, levels=levels, trials=200)
    delta = 1e-5
    pair = Pair(u=(levels - 1.0,), v=(0.0,), levels=levels, clients=1000, trials=200, p=0.5, delta=delta)
    found = guarantee(protocol, delta)
    published = dict(found.alternatives)["paper-theorem"]
    assert isinstance(published, float)
    assert pair.delta_at(published) > 2 * delta
    assert found.method != "paper-theorem"
    assert found.epsilon > published
    assert pair.delta_at(found.epsilon) <= delta


@pytest.mark.parametrize("epsilon", [8.0, 20.0, 50.0])
def test_no_plan_beats_the_gaussian_mechanism(epsilon: float) -> None:
    assert plan(clients=160, dim=2, epsilon=epsilon, delta=0.01, bits=10, rotate=False).ratio >= 1.0
