"""`Promise`: the block in a protocol file, old files, edited files, and what the fingerprint binds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd import Aggregator, Protocol
from cpsgd.errors import FingerprintError, ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.promise import Claim, Conditions, Promise

PROMISE = Promise(Claim(1, 1e-6), Conditions.of(9))
PLAIN = Protocol.rotated_binomial(clients=10, dim=100, clip_norm=1.0, levels=3, trials=14)
PROTOCOL = replace(PLAIN, promise=PROMISE)


def changed(**conditions: Any) -> Promise:
    return replace(PROMISE, conditions=replace(PROMISE.conditions, **conditions))


@given(
    epsilon=st.floats(1e-6, 100),
    delta=st.floats(1e-30, 0.5),
    surviving=st.integers(2, 2**32),
    rounds=st.integers(1, 2**32 - 1),
    rate=st.floats(1e-6, 1.0),
    scheme=st.sampled_from(["once", "every", "poisson", "fixed-size"]),
    examples=st.none() | st.integers(1, 10**6),
)
def test_files_keep_every_digit(
    scheme: Any, rate: float, examples: int | None, surviving: int, rounds: int, epsilon: float, delta: float
) -> None:
    sampled = scheme in ("poisson", "fixed-size")
    participation = Participation(scheme, rate if sampled else 1.0)
    adjacency = Adjacency.ZERO_OUT if scheme == "poisson" else Adjacency.REPLACE_ONE
    conditions = Conditions.of(
        surviving,
        rounds=rounds,
        colluding=surviving - 1,
        participation=participation,
        adjacency=adjacency,
        examples=None if sampled else examples,
    )
    promise = Promise(Claim(epsilon, delta), conditions)
    assert Promise.from_dict(json.loads(json.dumps(promise.to_dict()))) == promise


def test_a_protocol_file_holds_the_promise() -> None:
    data = json.loads(PROTOCOL.to_json())
    assert data["promise"] == {
        "version": 1,
        "epsilon": 1.0,
        "delta": 1e-6,
        "adjacency": "replace-one",
        "surviving": 9,
        "colluding": 0,
        "rounds": 1,
        "participation": "every",
        "unit": "client",
    }
    assert Protocol.from_json(PROTOCOL.to_json()) == PROTOCOL
    silo = replace(PROTOCOL, promise=changed(examples=50))
    assert json.loads(silo.to_json())["promise"] | {"unit": "example", "examples": 50} == silo.to_dict()["promise"]
    assert Protocol.from_json(silo.to_json()) == silo


def test_a_file_without_a_promise_is_as_it_was() -> None:
    assert "promise" not in PLAIN.to_dict()
    # As 0.1.0 and 0.2.0 wrote it: messages on the way and fingerprints that people have noted stay good.
    assert PLAIN.fingerprint.hex() == "48336d332570cb0730432d68b7f381ab"
    assert Protocol.from_json(PLAIN.to_json()).promise is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 1, got version 2"),
        ({"version": True}, "version 1, got version True"),
        ({"version": None}, "got version None"),
        ({"epsilon": 0}, "epsilon > 0"),
        ({"epsilon": -1.0}, "epsilon > 0"),
        ({"epsilon": "1"}, "epsilon to be a number"),
        ({"epsilon": float("nan")}, "finite epsilon"),
        ({"epsilon": float("inf")}, "finite epsilon"),
        ({"delta": -1e-9}, "delta in"),
        ({"delta": 1}, "delta in"),
        ({"adjacency": "neighbours"}, "adjacency to be one of"),
        ({"adjacency": 1}, "to be text"),
        ({"surviving": 0}, "surviving >= 1"),
        ({"surviving": 2.0}, "surviving to be an integer"),
        ({"surviving": True}, "surviving to be an integer"),
        ({"surviving": 11}, "promise.surviving in"),
        ({"colluding": -1}, "colluding >= 0"),
        ({"colluding": 9}, "nobody would be left"),
        ({"rounds": 0}, "rounds in"),
        ({"rounds": 10**400}, "rounds in"),
        ({"epsilon": 10**400}, "epsilon"),
        ({"participation": "sometimes"}, "Expected participation"),
        ({"participation": "poisson:0.1"}, "zero-out neighbours"),
        ({"participation": "fixed-size:2"}, "rate"),
        ({"participation": ["every"]}, "to be text"),
        ({"unit": "household"}, "Unknown unit"),
        ({"unit": "example"}, "examples"),
        ({"unit": "example", "examples": None}, "examples is missing"),
        ({"unit": "example", "examples": 0}, "examples in"),
        ({"unit": "example", "examples": 10**400}, "examples in"),
        ({"unit": "example", "examples": 5, "participation": "fixed-size:0.1"}, "single examples"),
        ({"examples": 5}, "missing or unknown"),
        ({"note": "trust me"}, "missing or unknown"),
    ],
)
def test_bad_promises_are_refused(change: dict[str, Any], words: str) -> None:
    data = PROTOCOL.to_dict()
    data["promise"] |= change
    with pytest.raises(ParameterError, match=words):
        Protocol.from_dict(data)


@pytest.mark.parametrize("promise", [None, [], "ε = 1", 1, {}, {"version": 1}])
def test_what_is_no_promise_is_refused(promise: Any) -> None:
    with pytest.raises(ParameterError, match="promise"):
        Protocol.from_dict(PLAIN.to_dict() | {"promise": promise})


@pytest.mark.parametrize("name", sorted(PROMISE.to_dict()))
def test_a_promise_with_a_hole_is_refused(name: str) -> None:
    data = PROTOCOL.to_dict()
    del data["promise"][name]
    with pytest.raises(ParameterError, match=r"missing|version"):
        Protocol.from_dict(data)


def test_a_promise_said_twice_is_refused() -> None:
    text = PROTOCOL.to_json().replace('"surviving": 9', '"surviving": 9, "surviving": 1')
    with pytest.raises(ParameterError, match="given twice"):
        Protocol.from_json(text)


@pytest.mark.parametrize("sense", ["filter", "ex post"])
def test_a_claim_after_the_fact_is_no_promise(sense: Any) -> None:
    with pytest.raises(ParameterError, match="fixed in advance"):
        Promise(Claim(1.0, 1e-6, sense), Conditions.of(10))


def test_only_a_promise_is_one() -> None:
    with pytest.raises(ParameterError, match="to be a Promise"):
        replace(PLAIN, promise={"epsilon": 1.0})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="to be a Participation"):
        replace(PROMISE.conditions, participation="every")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        None,
        changed(sizes=((1, 1),)),
        replace(PROMISE, claim=Claim(100, 1e-6)),
        replace(PROMISE, claim=Claim(1, 0.1)),
        changed(sizes=((9, 2),)),
        changed(adjacency=Adjacency.ZERO_OUT),
        changed(participation=Participation.once()),
        changed(examples=3),
    ],
)
def test_messages_made_under_one_promise_are_refused_under_another(other: Promise | None) -> None:
    aggregator = Aggregator(replace(PLAIN, promise=other), round=0)
    with pytest.raises(FingerprintError):
        aggregator.add(PROTOCOL.encode([0.0] * 100, round=0))
    assert aggregator.count == 0
