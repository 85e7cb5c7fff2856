"""A protocol as data: the fields of its file, and the fingerprint that stands for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from cpsgd import registry
from cpsgd._plain import canonical
from cpsgd.errors import ParameterError
from cpsgd.promise import Promise

# What a protocol file holds beside the fields of its mechanism.
_SHARED = ("clients", "dim", "clip_norm", "rotate", "modulus", "rotation_seed")
# Also there, but only if it was stated: files and fingerprints of 0.1.0, which knew none of it, stay as they are.
_STATED = ("replace_one_distance", "distance_reason")


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a protocol's file as plain JSON values, from those of the protocol."""
    shared = {name: values[name] for name in _SHARED}
    stated = {name: values[name] for name in _STATED if values[name] is not None}
    promise = {} if values["promise"] is None else {"promise": values["promise"].to_dict()}
    return {**shared, **values["mechanism"].to_fields(values["clip_norm"]), **stated, **promise}


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


def fingerprint(fields: dict[str, Any]) -> bytes:
    """The 16 bytes that stand for fields, and for a protocol; see `Protocol.fingerprint`."""
    text = "cpsgd protocol v1" + canonical(_exact(fields))
    return hashlib.sha256(text.encode()).digest()[:16]


def _exact(data: dict[str, Any]) -> dict[str, Any]:
    """The same with floats as text that loses nothing."""
    return {
        name: v.hex() if isinstance(v, float) else _exact(v) if isinstance(v, dict) else v for name, v in data.items()
    }
