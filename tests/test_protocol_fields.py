"""A protocol as a file, and the fingerprint that stands for it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd import Protocol
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Binomial
from cpsgd.promise import Claim, Conditions, Promise

BASE = {"clients": 10, "dim": 100, "clip_norm": 1.0, "coordinate_range": 0.5, "levels": 4, "trials": 12}
PROTOCOL_TEXT = Protocol.rotated_binomial(clients=2, dim=3, clip_norm=1.0, levels=2, trials=14).to_json()
ONE_HOT = {"replace_one_distance": math.sqrt(2.0), "distance_reason": "rows are one-hot"}
OF_THE_MECHANISM = ("coordinate_range", "levels", "trials", "p")


def build(**fields: Any) -> Protocol:
    """A protocol from all its fields, those of its mechanism among them."""
    own = {name: fields.pop(name) for name in OF_THE_MECHANISM if name in fields}
    return Protocol(**fields, mechanism=Binomial(**own))


@settings(max_examples=100, deadline=None)
@given(
    dim=st.integers(1, 10**6),
    clip_norm=st.floats(1e-6, 1e6),
    coordinate_range=st.floats(1e-6, 1e6),
    levels=st.integers(2, 2**24),
    trials=st.integers(0, 2**31),
    p=st.floats(0.001, 0.999),
    rotate=st.booleans(),
    rotation_seed=st.integers(0, 2**64 - 1),
)
def test_json_round_trip(**fields: object) -> None:
    protocol = build(clients=7, **fields)
    again = Protocol.from_json(protocol.to_json())
    assert again == protocol
    assert hash(again) == hash(protocol)
    assert again.fingerprint == protocol.fingerprint


def test_the_fingerprint_sees_every_field() -> None:
    changes = {
        "clients": 11,
        "dim": 101,
        "clip_norm": math.nextafter(1.0, 2.0),
        "coordinate_range": 0.25,
        "levels": 5,
        "trials": 13,
        "p": 0.25,
        "rotate": False,
        "modulus": 100,
        "rotation_seed": 1,
    }
    stated = {"replace_one_distance", "replace_one_l1_distance", "distance_reason", "promise"}
    shared = {field.name for field in dataclasses.fields(Protocol)} - {"mechanism"}
    assert set(changes) | stated == shared | {field.name for field in dataclasses.fields(Binomial)}
    assert set(changes) | {"sigma"} == build(**BASE).to_dict().keys()
    protocols = [build(**BASE), *(build(**{**BASE, name: value}) for name, value in changes.items())]
    # One cannot be without the other.
    for distance, reason in ((1.5, "one"), (1.5, "two"), (math.nextafter(1.5, 2.0), "one")):
        protocols.append(
            dataclasses.replace(build(**BASE), replace_one_distance=distance, distance_reason=reason),
        )
    for l1 in (1.5, 2.0):
        fields = {"rotate": False, "replace_one_l1_distance": l1, "distance_reason": "one"}
        protocols.append(dataclasses.replace(build(**BASE), **fields))
    claims = [(Claim(epsilon, delta), Conditions.of(10)) for epsilon, delta in ((1.0, 1e-6), (2.0, 1e-6), (1.0, 1e-7))]
    others = [(9, {}), (10, {"colluding": 1}), (10, {"rounds": 2})]
    claims += [(Claim(1.0, 1e-6), Conditions.of(surviving, **change)) for surviving, change in others]
    for claim, conditions in claims:
        protocols.append(dataclasses.replace(build(**BASE), promise=Promise(claim, conditions)))
    protocols += [Protocol.gaussian(clients=10, dim=100, clip_norm=1.0, sigma=s) for s in (1.0, 2.0)]
    assert len({p.fingerprint for p in protocols}) == len(protocols)


def test_the_fingerprint_is_fixed_for_ever() -> None:
    assert build(**BASE).fingerprint.hex() == "62a524cc2b907105bbd1d0def316e08a"


def test_equal_protocols_have_equal_fingerprints_whatever_the_types() -> None:
    plain = build(**BASE)
    typed = build(**{**BASE, "rotate": np.bool_(True), "levels": np.int64(4), "clip_norm": np.float32(1)})
    assert typed == plain
    assert typed.fingerprint == plain.fingerprint
    assert Protocol.from_json(typed.to_json()) == plain


def test_whole_numbers_given_as_int_or_float_mean_the_same() -> None:
    assert build(**{**BASE, "clip_norm": 1}).fingerprint == build(**BASE).fingerprint


@pytest.mark.parametrize("name", ["laplace", "", 5, None, ["binomial"]])
def test_an_unknown_mechanism_in_a_file_is_refused(name: object) -> None:
    with pytest.raises(ParameterError, match=r"mechanism to be one of \['binomial'"):
        Protocol.from_dict({**BASE, "mechanism": name})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        "[" * 100_000,
        "{}",
        json.dumps({**BASE, "leves": 3}),
        json.dumps({**BASE, "rotate": "yes"}),
        json.dumps({**BASE, "dim": "100"}),
        json.dumps({**BASE, "clip_norm": None}),
        b"\xff\xfe",
    ],
)
def test_bad_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ParameterError):
        Protocol.from_json(text)


def test_a_field_given_twice_is_refused() -> None:
    text = PROTOCOL_TEXT.replace('"levels": 2', '"levels": 2, "levels": 3')
    with pytest.raises(ParameterError, match="given twice"):
        Protocol.from_json(text)


def test_a_stated_distance_travels_in_the_file() -> None:
    plain = build(**BASE)
    stated = dataclasses.replace(plain, **ONE_HOT)
    assert stated.to_dict() == {**plain.to_dict(), **ONE_HOT}
    again = Protocol.from_json(stated.to_json())
    assert again == stated
    assert again.fingerprint == stated.fingerprint != plain.fingerprint
    # Null is as good as nothing: both are what release 0.1.0 wrote.
    nothing = Protocol.from_dict({**plain.to_dict(), "replace_one_distance": None, "distance_reason": None})
    assert nothing == plain
    assert nothing.fingerprint == plain.fingerprint
    assert not ONE_HOT.keys() & nothing.to_dict().keys()
