"""Values from files that anybody may have written: what they are taken for, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# No text of a file is shown at greater length.
_LONGEST = 2_000


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object, low: int = 0, high: int = 2**53) -> int | None:
    """A whole number within bounds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if low <= value <= high else None


def text(value: object) -> str:
    """A value as people read it, in bounded length."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 2**64 else "a very large number"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return shortened(", ".join(f"{key} {text(each)}" for key, each in list(value.items())[:50]))
    if isinstance(value, list | tuple):
        return shortened(", ".join(text(each) for each in value[:50]))
    return shortened(str(value))


def shortened(found: str) -> str:
    """The beginning of a text, where it is too long."""
    return found if len(found) <= _LONGEST else found[:_LONGEST] + "…"


def mapping(value: object) -> Mapping[str, Any]:
    """An object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(8), duration(95), duration(7_300), duration(200_000)
    ('8 s', '1 min 35 s', '2 h 1 min', '2 d 7 h')
    """
    whole_seconds = round(seconds)
    for (large, name), (small, smaller) in (
        ((86_400, "d"), (3_600, "h")),
        ((3_600, "h"), (60, "min")),
        ((60, "min"), (1, "s")),
    ):
        if whole_seconds >= large:
            return f"{whole_seconds // large} {name} {whole_seconds % large // small} {smaller}"
    return f"{whole_seconds} s"
