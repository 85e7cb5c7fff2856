"""A protocol as data: the fields of its file, and the fingerprint that stands for them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from cpsgd import registry
from cpsgd.errors import ParameterError
from cpsgd.promise import Promise

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# What a protocol file holds beside the fields of its mechanism.
_SHARED = ("clients", "dim", "clip_norm", "rotate", "modulus", "rotation_seed")
# Also there, but only if it was stated: files and fingerprints of 0.1.0, which knew none of it, stay as they are.
_STATED = ("replace_one_distance", "distance_reason")


def fields(protocol: Protocol) -> dict[str, Any]:
    """The fields of a protocol's file, its mechanism's among them, as plain JSON values."""
    shared = {name: getattr(protocol, name) for name in _SHARED}
    stated = {name: value for name in _STATED if (value := getattr(protocol, name)) is not None}
    promise = {} if protocol.promise is None else {"promise": protocol.promise.to_dict()}
    return {**shared, **protocol.mechanism.to_fields(protocol.clip_norm), **stated, **promise}


def arguments(data: object) -> dict[str, Any]:
    """What makes the protocol with these fields.

    Raises:
        ParameterError: There are unknown fields, or some are missing.
    """
    if not isinstance(data, dict):
        raise ParameterError(f"Expected a JSON object with a protocol's fields, got {type(data).__name__}.")
    missing = sorted({"clients", "dim", "clip_norm"} - data.keys())
    if missing:
        raise ParameterError(f"Missing protocol fields {missing}.")
    kind = registry.of_file(data)
    known = (*_SHARED, *_STATED)
    shared = {name: data[name] for name in known if name in data}
    own = {name: value for name, value in data.items() if name not in (*known, "mechanism", "promise")}
    if "promise" in data:
        shared["promise"] = Promise.from_dict(data["promise"])
    return {**shared, "mechanism": kind.of_fields(own, data["clip_norm"])}


def parsed(text: str | bytes) -> object:
    """What a protocol's file holds.

    Raises:
        ParameterError: It is not JSON, or gives a field twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"A protocol file must hold a JSON object: {error}.") from None


def fingerprint(fields: dict[str, Any]) -> bytes:
    """The 16 bytes that stand for fields, and for a protocol; see `Protocol.fingerprint`."""
    text = "cpsgd protocol v1" + json.dumps(_exact(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:16]


def _exact(data: dict[str, Any]) -> dict[str, Any]:
    """The same with floats as text that loses nothing."""
    return {
        name: v.hex() if isinstance(v, float) else _exact(v) if isinstance(v, dict) else v for name, v in data.items()
    }


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one that says a thing twice could mean two things to two readers."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is given twice")
    return found
