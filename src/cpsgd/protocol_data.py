"""A protocol as data: the fields of its file, their fingerprint, and checks of a stated distance."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from typing import Any

from cpsgd import _validate, registry
from cpsgd._plain import canonical
from cpsgd.errors import ParameterError
from cpsgd.promise import Promise

# Fields of a protocol file beside those of its mechanism.
_SHARED = ("clients", "dim", "clip_norm", "rotate", "modulus", "rotation_seed")
# Also there, but only if it was stated: files and fingerprints of 0.1.0, which knew none of it, stay as they are.
_STATED = ("replace_one_distance", "distance_reason")


_LONGEST_REASON = 300


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a protocol's file as plain JSON values, from those of the protocol."""
    shared = {name: values[name] for name in _SHARED}
    stated = {name: values[name] for name in _STATED if values[name] is not None}
    promise = {} if values["promise"] is None else {"promise": values["promise"].to_dict()}
    return {**shared, **values["mechanism"].to_fields(values["clip_norm"]), **stated, **promise}


def arguments(data: object) -> dict[str, Any]:
    """Returns the arguments that make the protocol with these fields.

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
    """Returns the 16 bytes that stand for a protocol with these fields; see `Protocol.fingerprint`."""
    text = "cpsgd protocol v1" + canonical(_exact(fields))
    return hashlib.sha256(text.encode()).digest()[:16]


def _exact(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the same with floats as text that loses nothing."""
    return {
        name: v.hex() if isinstance(v, float) else _exact(v) if isinstance(v, dict) else v for name, v in data.items()
    }


def check_distance(distance: float | None, reason: str | None, *, clip_norm: float) -> float | None:
    """Returns the replace-one distance that is stated beyond clipping, or None.

    Raises:
        ParameterError: It is not between D and 2D, or comes without a reason, or a reason without it.
    """
    if distance is None:
        if reason is not None:
            raise ParameterError("A distance_reason needs a replace_one_distance; give both or neither.")
        return None
    stated = _validate.positive("replace_one_distance", distance)
    # Zero is sent in place of a vector that is not finite, and to fill a cohort up.
    if stated < clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at least clip_norm={clip_norm:g}, got replace_one_distance={stated!r}: "
            "zero stands for vectors that are broken or missing, and clip_norm is how far one may be from it. Subtract "
            "a public vector near all of them and lower clip_norm, or state clip_norm."
        )
    if stated > 2.0 * clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at most 2 clip_norm = {2.0 * clip_norm:g}, which clipping already "
            f"enforces, got replace_one_distance={stated!r}; leave it out."
        )
    if not isinstance(reason, str) or not reason.strip():
        raise ParameterError(
            f"Expected distance_reason to say why no two vectors are further apart than {stated:g}, got "
            f"{reprlib.repr(reason)}: guarantees rest on it, and whoever reads one must be able to judge it."
        )
    # It is shown on terminals, and travels in files and messages.
    if len(reason) > _LONGEST_REASON or not reason.isprintable():
        raise ParameterError(
            f"Expected distance_reason to be one line of at most {_LONGEST_REASON} printable characters, got "
            f"{len(reason)} characters."
        )
    return stated
