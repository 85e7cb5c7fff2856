"""Numbers as people read them."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Few digits for ε: never shown smaller than it is."""
    return f"{Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value).normalize():f}"
