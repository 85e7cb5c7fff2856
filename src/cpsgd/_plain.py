"""Frozen dataclasses as plain JSON values, and back. Everything that reads or writes JSON of our own goes through here.

`to_dict` and `plain` write, `build` reads. At every depth `build` refuses unknown and missing names, and values of
another type, with `ParameterError`. `parse` refuses text that gives a name twice, NaN and infinity. `canonical` gives
the one text of a value that may be hashed.

Why not msgspec (0.22 was tried). For dataclasses it ignores unknown names, and of a name that is given twice it takes
the last: both must be refused here. It writes 1e-06 as 1e-6, which would change every fingerprint and every hash of a
ledger, so the standard library would still have to write. An error of our own that a constructor raises loses its type.
What would be left to it is the check of types, which are the forty lines of `_reader`. cattrs converts where we refuse:
`int("3")`.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cpsgd.errors import ParameterError

T = TypeVar("T")


def to_dict(value: object, *computed: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a dataclass by name, as plain JSON values.

    Args:
        value: The dataclass.
        computed: Names of properties to write beside its fields.
        without: Names of fields to leave out.

    Example:
        >>> from cpsgd.neighbours import Participation
        >>> to_dict(Participation.poisson(0.5), "sampled")
        {'scheme': 'poisson', 'rate': 0.5, 'separation': 1, 'sampled': True}
    """
    names = [field.name for field in fields(value) if field.name not in without]  # type: ignore[arg-type]
    return {name: plain(getattr(value, name)) for name in (*names, *computed)}


def plain(value: object) -> Any:
    """Returns a value as plain JSON values: dataclasses as objects, enumerations by value, bytes in hexadecimal.

    A part that has a `to_dict` of its own is written by that.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if (own := getattr(value, "to_dict", None)) is not None:
        return own()
    return to_dict(value) if is_dataclass(value) else value


def build(kind: type[T], data: object, **known: Any) -> T:
    """Returns the dataclass whose fields are in `data`, as `to_dict` wrote them.

    Args:
        kind: The dataclass. Its fields' types say what is accepted.
        data: Plain JSON values.
        known: Fields that are not in `data`.

    Raises:
        ParameterError: A name is unknown, missing or no field, or a value has another type than its field.

    Example:
        >>> from cpsgd.neighbours import Participation
        >>> build(Participation, {"scheme": "once", "rate": 1.0})
        Traceback (most recent call last):
        cpsgd.errors.ParameterError: Missing fields ['separation'] of a Participation.
    """
    readers = _readers(cast("Any", kind))
    values = named(kind.__name__, data, readers.keys() - known.keys())
    return kind(**{name: readers[name](value, name) for name, value in values.items()}, **known)


def named(what: str, data: object, names: Collection[str]) -> dict[str, Any]:
    """Returns the values of a JSON object by name, if all names are there and no others.

    Raises:
        ParameterError: It is no object, or a name is unknown or missing.
    """
    if not isinstance(data, Mapping):
        raise ParameterError(f"Expected a JSON object for a {what}, got {type(data).__name__}.")
    if data.keys() == names:
        return dict(data)
    if unknown := sorted(str(name) for name in data.keys() - set(names)):
        raise ParameterError(f"Unknown fields {reprlib.repr(unknown)} of a {what}; it has {sorted(names)}.")
    if missing := sorted(set(names) - data.keys()):
        raise ParameterError(f"Missing fields {missing} of a {what}.")
    return dict(data)


def parse(text: str | bytes, what: str) -> Any:
    """Returns the JSON values in a text.

    Raises:
        ParameterError: It is not JSON, gives a name twice, or holds NaN or an infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_named_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{what} must hold JSON: {error}.") from None


def canonical(value: object) -> str:
    """Returns the one text of plain values: sorted names, no spaces, ASCII only, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


# ------------------------------------------------------------------ inside


Reader = Callable[[Any, str], Any]
"""Turns the value of a field of this name into what the field's type expects, or raises `ParameterError`."""


@cache
def _readers(kind: Any) -> dict[str, Reader]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in fields(kind) if field.init}


@cache
def _reader(hint: Any) -> Reader:
    """Returns the function that reads a plain value as this type, or raises."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner = _reader(next(each for each in arguments if each is not NoneType))
        return lambda value, name: None if value is None and NoneType in arguments else inner(value, name)
    if hint in (bool, int, str):
        return lambda value, name: value if type(value) is hint else _refuse(hint, value, name)
    if origin is None and is_dataclass(hint):
        own = getattr(hint, "from_dict", lambda value: build(cast("type[Any]", hint), value))
        return lambda value, name: own(value)
    inside = [_reader(each) for each in arguments if each is not Ellipsis] if origin is not Literal else []

    def read(value: Any, name: str) -> Any:
        if hint is Any or hint is object or (origin is Literal and value in arguments):
            return value
        if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # and so no NaN
            return float(value)
        if origin in (list, tuple) and isinstance(value, list | tuple):
            of = inside * len(value) if origin is list or arguments[-1] is Ellipsis else inside
            if len(of) == len(value):
                return origin(each(part, name) for each, part in zip(of, value, strict=True))
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {inside[0](key, name): inside[1](part, name) for key, part in value.items()}
        with suppress(ValueError):
            if hint is bytes and isinstance(value, str):
                return bytes.fromhex(value)
            if isinstance(hint, type) and issubclass(hint, Enum):
                return hint(value)
        return _refuse(hint, value, name)

    return read


def _refuse(hint: Any, value: object, name: str) -> Any:
    kind = " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else getattr(hint, "__name__", hint)
    raise ParameterError(f"Expected {name} to be {kind}, got {reprlib.repr(value)}.")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. One that gives a name twice could mean two things to two readers."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is given twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
