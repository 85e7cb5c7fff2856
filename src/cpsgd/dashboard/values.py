"""Values from files that anybody may have written, checked and made readable."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

# No text of a file is shown at greater length, and nothing in it that is nested more deeply.
_LONGEST, _DEEPEST = 2_000, 3
# Larger numbers are somebody's joke, and sums of them no numbers any more.
_LARGEST = 1e100


def number(value: object) -> float | None:
    """Returns a number of a sensible size; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= _LARGEST else None


def whole(value: object, low: int = 0, high: int = 2**53) -> int | None:
    """Returns a whole number within bounds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if low <= value <= high else None


def text(value: object, depth: int = _DEEPEST) -> str:
    """Returns a value as readable text of bounded length."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 2**64 else "a very large number"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping | list | tuple) and not depth:
        return "…"
    if isinstance(value, Mapping):
        first = islice(value.items(), 50)
        return shortened(", ".join(f"{shortened(str(key))} {text(each, depth - 1)}" for key, each in first))
    if isinstance(value, list | tuple):
        return shortened(", ".join(text(each, depth - 1) for each in value[:50]))
    return shortened(str(value))


def shortened(found: str) -> str:
    """Returns a text, cut off at a maximum length."""
    return found if len(found) <= _LONGEST else found[:_LONGEST] + "…"


def mapping(value: object) -> Mapping[str, Any]:
    """Returns a mapping; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def duration(seconds: float) -> str:
    """Returns a duration as text.

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
