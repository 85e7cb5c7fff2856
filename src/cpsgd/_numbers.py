"""Numbers as text. Privacy figures are rounded to the safe side: ε up, what is left of a budget down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns an upper bound such as ε with few digits, rounded up.

    Example:
        >>> rounded_up(3.6731), rounded_up(2.0), rounded_up(math.inf)
        ('3.674', '2', '∞')
    """
    return _rounded(value, Context(prec=digits, rounding=ROUND_CEILING))


def rounded_down(value: float, digits: int = 4) -> str:
    """Returns a lower bound, or what is left of a budget, with few digits, rounded down."""
    return _rounded(value, Context(prec=digits, rounding=ROUND_FLOOR))


def _rounded(value: float, context: Context) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0.0 else str(value)
    found = context.create_decimal_from_float(value).normalize()
    return f"{found:f}" if abs(value) >= 1e-6 or not value else f"{found}"


def size(count: float) -> str:
    """Returns a number of bytes with its unit.

    Example:
        >>> size(25_712), size(3_200_000_000)
        ('25.7 kB', '3.2 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000.0 or unit == "TB":
            break
        count /= 1000.0
    return f"{count:.3g} {unit}"


def bits_of(count: float) -> str:
    """Returns a number of bits with its unit.

    Example:
        >>> bits_of(1.0), bits_of(4.125), bits_of(0.1)
        ('1 bit', '4.125 bits', '0.1 bits')
    """
    shown = f"{count:.4g}"
    return f"{shown} bit" if shown == "1" else f"{shown} bits"


def power(value: float) -> str:
    """Returns a small or large power of ten as such, other numbers as usual.

    Example:
        >>> power(1e-9), power(2e-9), power(0.05)
        ('10⁻⁹', '2e-09', '0.05')
    """
    mantissa, _, exponent = f"{value:e}".partition("e")
    if float(mantissa) == 1.0 and not 1e-3 <= value <= 1e3:
        return "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    return f"{value:g}"
