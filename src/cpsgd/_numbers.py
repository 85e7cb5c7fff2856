"""Figures of privacy as people read them: never shown on the wrong side of what they are."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Few digits for ε, which is an upper bound: never shown smaller than it is.

    Example:
        >>> rounded_up(3.6731), rounded_up(2.0), rounded_up(math.inf)
        ('3.674', '2', '∞')
    """
    return _rounded(value, Context(prec=digits, rounding=ROUND_CEILING))


def rounded_down(value: float, digits: int = 4) -> str:
    """Few digits for what is left of a budget, or for a lower bound on ε: never shown larger than it is."""
    return _rounded(value, Context(prec=digits, rounding=ROUND_FLOOR))


def _rounded(value: float, context: Context) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0.0 else str(value)
    found = context.create_decimal_from_float(value).normalize()
    return f"{found:f}" if abs(value) >= 1e-6 or not value else f"{found}"
