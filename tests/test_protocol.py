from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Binomial, Gaussian
from cpsgd.neighbours import Adjacency
from cpsgd.paper import bounds

BASE = {"clients": 10, "dim": 100, "clip_norm": 1.0, "coordinate_range": 0.5, "levels": 4, "trials": 12}


OF_THE_MECHANISM = ("coordinate_range", "levels", "trials", "p")


def build(**fields: Any) -> Protocol:
    """A protocol from all its fields, those of its mechanism among them."""
    own = {name: fields.pop(name) for name in OF_THE_MECHANISM if name in fields}
    return Protocol(**fields, mechanism=Binomial(**own))


def reach(protocol: Protocol) -> float:
    assert isinstance(protocol.mechanism, Binomial)
    return protocol.mechanism.coordinate_range


def test_names_of_the_paper() -> None:
    common = {"clients": 10, "dim": 100, "clip_norm": 2.0}
    gaussian = Protocol.gaussian(**common, sigma=0.1)
    binomial = Protocol.binomial(**common, levels=4, trials=12)
    rotated = Protocol.rotated_binomial(**common, levels=4, trials=12, delta=1e-6)
    assert [p.name for p in (gaussian, binomial, rotated)] == ["gaussian", "binomial", "rotated-binomial"]
    assert reach(binomial) == 2.0
    assert reach(rotated) == pytest.approx(2 * 2.0 * math.sqrt(math.log(2 * 10 * 100 / 1e-6) / 100))
    assert reach(rotated) == bounds.coordinate_range(clients=10, dim=100, clip_norm=2.0, delta=1e-6)
    assert gaussian.radix == 0
    assert (binomial.radix, binomial.scale) == (16, pytest.approx(4.0 / 3))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        build(**BASE).dim = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        build(**BASE).mechanism.levels = 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clients", 0),
        ("clients", 2.5),
        ("dim", 0),
        ("dim", 2**32),
        ("dim", True),
        ("clip_norm", 0.0),
        ("clip_norm", -1.0),
        ("clip_norm", math.nan),
        ("clip_norm", math.inf),
        ("clip_norm", "1"),
        ("coordinate_range", 0.0),
        ("coordinate_range", 1e300),
        ("levels", 1),
        ("levels", 2**24 + 1),
        ("trials", -1),
        ("trials", 2**31 + 1),
        ("p", 0.0),
        ("p", 1.0),
        ("modulus", 15),
        ("modulus", 2**32),
        ("sigma", 1.0),
        ("rotation_seed", -1),
        ("rotation_seed", 2**64),
        ("rotate", 1),
        ("rotate", "no"),
        ("clip_norm", 10**400),
        ("clients", 10**400),
        ("coordinate_range", 1e-19),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    if (field, value) == ("coordinate_range", 1e-19):
        with pytest.raises(ParameterError, match="so small against"):
            build(**{**BASE, "clip_norm": 1e19, field: value})
        return
    with pytest.raises(ParameterError, match="Gaussian" if field == "sigma" else field):
        Protocol.from_dict({**BASE, field: value})
    if field != "sigma":
        with pytest.raises(ParameterError, match=field):
            build(**{**BASE, field: value})


def test_floats_have_no_rotation_or_modulus() -> None:
    for change in ({"rotate": True}, {"rotate": False, "modulus": 100}):
        with pytest.raises(ParameterError, match="rotation or modulus"):
            Protocol(clients=10, dim=100, clip_norm=1.0, mechanism=Gaussian(sigma=1.0), **change)


@pytest.mark.parametrize("mechanism", [None, "binomial", {"levels": 2}, Binomial])
def test_what_is_no_mechanism_is_refused(mechanism: object) -> None:
    with pytest.raises(ParameterError, match="mechanism"):
        Protocol(clients=10, dim=100, clip_norm=1.0, mechanism=mechanism)


@pytest.mark.parametrize(
    ("levels", "trials", "modulus"), [(2, 14, None), (3, 2, None), (2, 1, None), (100, 69_900, None), (9, 40, 1000)]
)
@pytest.mark.parametrize("dim", [1, 100, 51_370])
def test_size_within_three_percent(levels: int, trials: int, modulus: int | None, dim: int) -> None:
    protocol = Protocol.rotated_binomial(
        clients=10, dim=dim, clip_norm=1.0, levels=levels, trials=trials, modulus=modulus
    )
    message = protocol.encode([0.1] * dim, 0)
    assert len(message) == protocol.message_bytes
    assert protocol.bits_per_client == 8 * len(message)
    assert len(message) <= 1.03 * (dim * math.log2(protocol.radix) / 8 + 64)


def test_the_gaussian_protocol_has_no_scale() -> None:
    with pytest.raises(ParameterError, match="gaussian protocol sends floats"):
        _ = Protocol.gaussian(clients=1, dim=1, clip_norm=1.0, sigma=1.0).scale


# ---------------------------------------------------------------------- a stated replace-one distance

ONE_HOT = {"replace_one_distance": math.sqrt(2.0), "distance_reason": "rows are one-hot"}


def test_a_stated_distance_is_an_assumption_about_replacing_only() -> None:
    stated = dataclasses.replace(build(**BASE), **ONE_HOT)
    assert stated.assumption(Adjacency.REPLACE_ONE) == "replace-one distance 1.41421 because rows are one-hot"
    assert stated.assumption(Adjacency.ZERO_OUT) is None
    assert build(**BASE).assumption(Adjacency.REPLACE_ONE) is None


@pytest.mark.parametrize(
    ("distance", "reason", "words"),
    [
        (1.4, None, "distance_reason to say why"),
        (1.4, "", "distance_reason to say why"),
        (1.4, "  ", "distance_reason to say why"),
        (1.4, 7, "distance_reason to say why"),
        (1.4, "two\nlines", "one line of at most 300 printable"),
        (1.4, "\x1b[2J", "one line of at most 300 printable"),
        (1.4, "x" * 301, "got 301 characters"),
        (None, "why", "give both or neither"),
        (2.1, "why", r"at most 2 clip_norm = 2, .* got replace_one_distance=2.1; leave it out"),
        (0.9, "why", "at least clip_norm=1, got replace_one_distance=0.9"),
        (0.0, "why", "replace_one_distance > 0"),
        (-1.0, "why", "replace_one_distance > 0"),
        (math.nan, "why", "finite replace_one_distance"),
        (math.inf, "why", "finite replace_one_distance"),
        ("1.4", "why", "replace_one_distance to be a number"),
        (True, "why", "replace_one_distance to be a number"),
    ],
)
def test_a_distance_needs_sense_and_a_reason(distance: object, reason: object, words: str) -> None:
    stated = {"replace_one_distance": distance, "distance_reason": reason}
    with pytest.raises(ParameterError, match=words):
        dataclasses.replace(build(**BASE), **stated)
    with pytest.raises(ParameterError, match=words):
        Protocol.from_dict({**build(**BASE).to_dict(), **stated})


@pytest.mark.parametrize("distance", [1, 1.0, 2.0, np.float32(1.5)])
def test_a_distance_from_the_norm_to_twice_the_norm_is_taken(distance: float) -> None:
    stated = dataclasses.replace(build(**BASE), replace_one_distance=distance, distance_reason="why")
    assert stated.replace_one_distance == float(distance)
    assert type(stated.replace_one_distance) is float
