"""Guards for parameters: each raises `ParameterError` with the name, the value and what is allowed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real

from cpsgd.errors import ParameterError

_LARGEST = 2**63 - 1
# Python's own numbers first: asking an abstract class takes ten times as long, and planning asks 10^5 times.
_INTEGERS, _REALS = (int, Integral), (float, int, Real)


def integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """Returns `value` as an int within [low, high], or raises; without `high`, below 2^63, so that floats hold it."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise ParameterError(f"Expected {name} to be an integer, got {reprlib.repr(value)}.")
    result = int(value)
    if result < low or result > (_LARGEST if high is None else high):
        bound = f">= {low}" if high is None and result < low else f"in [{low}, {_LARGEST if high is None else high}]"
        shown = str(result) if result.bit_length() < 200 else f"a number of {result.bit_length()} bits"
        raise ParameterError(f"Expected {name} {bound}, got {name}={shown}.")
    return result


def positive(name: str, value: object, *, low: float = 0.0, high: float = math.inf) -> float:
    """Returns `value` as a finite float in the open interval (low, high), or raises."""
    result = finite(name, value)
    if not low < result < high:
        bound = f"> {low:g}" if math.isinf(high) else f"in ({low:g}, {high:g})"
        raise ParameterError(f"Expected {name} {bound}, got {name}={result!r}.")
    return result


def finite(name: str, value: object) -> float:
    """Returns `value` as a finite float, or raises."""
    if isinstance(value, bool) or not isinstance(value, _REALS):
        raise ParameterError(f"Expected {name} to be a number, got {reprlib.repr(value)}.")
    try:
        result = float(value)
    except OverflowError:
        raise ParameterError(f"Expected a finite {name}, got an integer that no float can hold.") from None
    if not math.isfinite(result):
        raise ParameterError(f"Expected a finite {name}, got {name}={result!r}.")
    return result


def probability(name: str, value: object) -> float:
    """Returns `value` as a float strictly between 0 and 1, or raises."""
    return positive(name, value, low=0.0, high=1.0)


def fraction(name: str, value: object) -> float:
    """Returns `value` as a float in [0, 1), or raises."""
    result = finite(name, value)
    if not 0.0 <= result < 1.0:
        raise ParameterError(f"Expected {name} in [0, 1), got {name}={result!r}.")
    return result


def non_negative(name: str, value: object) -> float:
    """Returns `value` as a finite float that is at least 0, or raises."""
    result = finite(name, value)
    if result < 0.0:
        raise ParameterError(f"Expected {name} >= 0, got {name}={result!r}.")
    return result


def instance(name: str, value: object, kind: type[object], remedy: str = "") -> None:
    """Raises `ParameterError` unless `value` is of a class; `remedy` is added to the message."""
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ParameterError(f"Expected {name} of type {kind.__name__}, got {found}.{remedy and ' '}{remedy}")


def choice(name: str, value: object, known: Sequence[str]) -> str:
    """Returns `value` if it is one of the known names, or raises."""
    if not isinstance(value, str) or value not in known:
        raise ParameterError(f"Unknown {name} {reprlib.repr(value)}. Known are {', '.join(known)}.")
    return value
