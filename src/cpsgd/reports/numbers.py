"""Numbers as people read them."""

from __future__ import annotations

from cpsgd._numbers import rounded_down as rounded_down
from cpsgd._numbers import rounded_up as rounded_up

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def size(count: float) -> str:
    """Bytes as people say them.

    >>> size(25_712), size(3_200_000_000)
    ('25.7 kB', '3.2 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000.0 or unit == "TB":
            break
        count /= 1000.0
    return f"{count:.3g} {unit}"


def power(value: float) -> str:
    """1e-09 as 10⁻⁹; other numbers as they are."""
    mantissa, _, exponent = f"{value:e}".partition("e")
    if float(mantissa) == 1.0 and not 1e-3 <= value <= 1e3:
        return "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    return f"{value:g}"
