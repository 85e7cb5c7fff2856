"""`Run`, `Conditions` and `Claim`: made and checked in one place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cpsgd import Adjacency, Protocol, Run, guarantee
from cpsgd.errors import ParameterError
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.promise import Claim, Conditions, Promise

PROTOCOL = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=64)


def test_sizes_are_counted_and_sorted_however_they_are_given() -> None:
    expected = ((900, 1), (1000, 2))
    for surviving in ([1000, 900, 1000], {1000: 2, 900: 1}, (1000, 1000, 900)):
        run = Run.of(PROTOCOL, surviving=surviving, colluding=50)
        assert (run.sizes, run.rounds, run.surviving, run.honest) == (expected, 3, 900, 850)
    assert Run.of(PROTOCOL).sizes == ((1000, 1),)
    assert Run.of(PROTOCOL, rounds=7).sizes == ((1000, 7),)
    assert Run.of(PROTOCOL, adjacency="zero-out").adjacency is Adjacency.ZERO_OUT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2**32}, "rounds"),
        ({"surviving": 0}, "surviving"),
        ({"surviving": b"12"}, "surviving"),
        ({"surviving": []}, "one entry of surviving per round"),
        ({"surviving": [1000, 1000], "rounds": 3}, "one entry of surviving per round"),
        ({"surviving": {1000: 0}}, "rounds"),
        ({"colluding": -1}, "colluding"),
        ({"examples": 0}, "examples"),
        ({"examples": 5, "participation": "fixed-size:0.1"}, "single examples"),
        ({"participation": "sometimes"}, "participation"),
        ({"participation": "poisson:0.1"}, "zero-out"),
        ({"participation": "fixed-size:0.1", "adjacency": "zero-out"}, "replace-one"),
        ({"adjacency": "add-remove"}, "adjacency"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Run.of(PROTOCOL, **change)


@pytest.mark.parametrize("participation", ["once", "every"])
def test_sizes_in_another_order_prove_no_more(participation: str) -> None:
    run = Run.of(PROTOCOL, surviving=[1000, 300], participation=participation)
    other = replace(run, conditions=replace(run.conditions, sizes=((1000, 1), (300, 1))))
    assert other == run
    assert guarantee(other, 1e-6).noise_clients == 300
    doubled = replace(run.conditions, sizes=((1000, 1), (300, 1), (1000, 2)), adjacency="zero-out")
    assert doubled == Conditions.of({300: 1, 1000: 3}, participation=participation, adjacency="zero-out")
    assert doubled.adjacency is Adjacency.ZERO_OUT


@pytest.mark.parametrize(
    "sizes",
    [(), ((0, 1),), ((900, 1), (1000, 0)), ((1000, -3), (900, 5)), ((True, 1),), ((math.nan, 1),), ((10**400, 1),)],
)
def test_sizes_that_are_none_are_refused_however_conditions_are_made(sizes: Any) -> None:
    with pytest.raises(ParameterError, match=r"surviving|rounds"):
        Conditions(sizes)


def test_a_run_is_of_a_protocol_and_conditions() -> None:
    for fields in ((PROTOCOL, None), (None, Conditions.of(1000)), (PROTOCOL, {"rounds": 1})):
        with pytest.raises(ParameterError, match="a Protocol and its Conditions"):
            Run(*fields)  # type: ignore[arg-type]


def test_a_promise_is_no_part_of_a_run() -> None:
    promising = Protocol.from_dict(
        {**PROTOCOL.to_dict(), "promise": Promise(Claim(1.0, 1e-6), Conditions.of(900)).to_dict()}
    )
    assert Run.of(promising) == Run.of(PROTOCOL)
    assert hash(Run.of(promising)) == hash(Run.of(PROTOCOL))


def test_helpers_make_the_same_run() -> None:
    run = Run.of(PROTOCOL, rounds=3, surviving=900, colluding=10)
    found = guarantee(run, 1e-6)
    assert found == guarantee_over_rounds(PROTOCOL, 1e-6, rounds=3, surviving=900, colluding=10)
    assert (found.run, found.claim.delta, found.claim.sense) == (run, 1e-6, "fixed in advance")
    assert guarantee(PROTOCOL, 1e-6, surviving=900) == guarantee(Run.of(PROTOCOL, surviving=900), 1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [((-1.0, 0.0), "epsilon"), ((1.0, 1.0), "delta"), ((1.0, -1e-9), "delta"), ((1.0, 0.0, "hopeful"), "sense")],
)
def test_a_claim_has_an_epsilon_a_delta_and_a_sense(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Claim(*fields)
    assert str(Claim(1.00001, 0.0, "ex post")) == "ε = 1.001 at δ = 0 (ex post)"
