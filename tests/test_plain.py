"""`cpsgd._plain`: dataclasses to JSON values and back, and all that is refused on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest

from cpsgd import _plain
from cpsgd.errors import ParameterError


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    ratio: float
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    kind: Literal["a", "b"]
    colour: Colour
    key: bytes
    inner: Inner
    pair: tuple[int, str]
    many: tuple[Inner, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    anything: Any = None

    @property
    def double(self) -> int:
        return 2 * self.count


OUTER = Outer(3, True, "a", Colour.RED, b"\x01\xff", Inner(0.5), (1, "x"), (Inner(1.0, "n"),), {"k": 2}, [1, None])
PLAIN: dict[str, Any] = {
    "count": 3,
    "flag": True,
    "kind": "a",
    "colour": "red",
    "key": "01ff",
    "inner": {"ratio": 0.5, "name": None},
    "pair": [1, "x"],
    "many": [{"ratio": 1.0, "name": "n"}],
    "counts": {"k": 2},
    "anything": [1, None],
}


def test_what_is_written_is_read_back() -> None:
    assert _plain.plain(OUTER) == PLAIN
    assert _plain.build(Outer, json.loads(json.dumps(PLAIN))) == OUTER
    assert _plain.to_dict(OUTER, "double", without=["inner"])["double"] == 6
    assert "inner" not in _plain.to_dict(OUTER, without=["inner"])


def test_fields_that_are_known_are_not_read() -> None:
    data = {name: value for name, value in PLAIN.items() if name != "count"}
    assert _plain.build(Outer, data, count=3) == OUTER
    with pytest.raises(ParameterError, match="Unknown fields"):
        _plain.build(Outer, PLAIN, count=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": True}, "Expected count to be int, got True"),
        ({"count": 3.0}, "Expected count to be int"),
        ({"count": "3"}, "Expected count to be int"),
        ({"count": None}, "Expected count to be int"),
        ({"flag": 1}, "Expected flag to be bool"),
        ({"kind": "c"}, "Expected kind to be 'a' or 'b', got 'c'"),
        ({"colour": "blue"}, "Expected colour to be Colour"),
        ({"key": "0x"}, "Expected key to be bytes"),
        ({"key": 5}, "Expected key to be bytes"),
        ({"inner": {"ratio": float("nan"), "name": None}}, "Expected ratio to be float, got nan"),
        ({"inner": {"ratio": 10**400, "name": None}}, "Expected ratio to be float"),
        ({"inner": {"ratio": 1.0, "name": 7}}, "Expected name to be str"),
        ({"inner": {"ratio": 1.0}}, r"Missing fields \['name'\] of a Inner"),
        ({"inner": {"ratio": 1.0, "name": None, "more": 1}}, r"Unknown fields \['more'\] of a Inner"),
        ({"inner": [1.0, None]}, "Expected a JSON object for a Inner, got list"),
        ({"pair": [1]}, "Expected pair"),
        ({"pair": [1, 2]}, "Expected pair to be str"),
        ({"many": {}}, "Expected many"),
        ({"counts": {"k": "2"}}, "Expected counts to be int"),
        ({"counts": [["k", 2]]}, "Expected counts"),
        ({"new": 1}, r"Unknown fields \['new'\] of a Outer"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        _plain.build(Outer, {**PLAIN, **change})


def test_whole_numbers_are_floats_too() -> None:
    found = _plain.build(Inner, {"ratio": 2, "name": None})
    assert repr(found.ratio) == "2.0"


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', '{"a":NaN}', '{"a":-Infinity}', "{", "", "[" * 100_000, '{"a":' + "9" * 5000 + "}", b"\xff\xfe{"],
)
def test_text_that_is_not_plain_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ParameterError, match="A file must hold JSON"):
        _plain.parse(text, "A file")


def test_the_canonical_text() -> None:
    assert _plain.canonical({"b": [1e-06, "ε"], "a": None}) == '{"a":null,"b":[1e-06,"\\u03b5"]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        _plain.canonical({"a": float("inf")})
