"""What may be stated about the distance of two clients' vectors, beyond what clipping enforces."""

from __future__ import annotations

import reprlib

from cpsgd import _validate
from cpsgd.errors import ParameterError

_LONGEST_REASON = 300


def check_distance(distance: float | None, reason: str | None, *, clip_norm: float) -> float | None:
    """The replace-one distance that is stated, or None if none is.

    Raises:
        ParameterError: It is not between D and 2D, or comes without a reason, or a reason without it.
    """
    if distance is None:
        if reason is not None:
            raise ParameterError("A distance_reason needs a replace_one_distance; give both or neither.")
        return None
    found = _validate.positive("replace_one_distance", distance)
    # Zero is sent in place of a vector that is not finite, and to fill a cohort up.
    if found < clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at least clip_norm={clip_norm:g}, got replace_one_distance={found!r}: zero "
            "stands for vectors that are broken or missing, and clip_norm is how far one may be from it. Subtract a "
            "public vector near all of them and lower clip_norm, or state clip_norm."
        )
    if found > 2.0 * clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at most 2 clip_norm = {2.0 * clip_norm:g}, which clipping already "
            f"enforces, got replace_one_distance={found!r}; leave it out."
        )
    if not isinstance(reason, str) or not reason.strip():
        raise ParameterError(
            f"Expected distance_reason to say why no two vectors are further apart than {found:g}, got "
            f"{reprlib.repr(reason)}: guarantees rest on it, and whoever reads one must be able to judge it."
        )
    # It is shown on terminals, and travels in files and messages.
    if len(reason) > _LONGEST_REASON or not reason.isprintable():
        raise ParameterError(
            f"Expected distance_reason to be one line of at most {_LONGEST_REASON} printable characters, got "
            f"{len(reason)} characters."
        )
    return found
