"""Searches for numbers: where a falling function reaches zero, and where one that falls and then rises is smallest."""

from __future__ import annotations

import math
from collections.abc import Callable

# Where a bracket is cut, as a share of its length: never all the way to an end, so that both ends move.
_LEAST_SHARE = 0.02
_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)


def smallest_enough(excess: Callable[[float], float], low: float, high: float, *, close: float) -> float:
    """Returns a number at which a falling function is at most zero, within a factor `close` of one where it is not.

    By false positions on a logarithmic scale. The result is always a number that was tried, or `high`.

    Args:
        excess: The function; infinity where it has no value. Not-a-number counts as above zero, and ends the search.
        low: A positive number at which it is above zero.
        high: A larger number at which it is not.
        close: A factor above 1.

    Example:
        >>> tried = []
        >>> found = smallest_enough(lambda x: tried.append(x) or 2.0 - x * x, 1.0, 2.0, close=1.0 + 1e-9)
        >>> f"{found:.8f}", len(tried) < 15
        ('1.41421356', True)
    """
    at_low, at_high, side = excess(low), excess(high), 0
    while high > low * close:
        # The weight of an end that stays is halved (Illinois).
        share = at_low / (at_low - at_high) if at_low < math.inf else 0.5
        middle = low * (high / low) ** min(max(share, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
        if not low < middle < high:
            break
        found = excess(middle)
        if found <= 0.0:
            high, at_high = middle, found
            at_low *= 0.5 if side > 0 else 1.0
            side = 1
        else:
            low, at_low = middle, found
            at_high *= 0.5 if side < 0 else 1.0
            side = -1
    return high


def lowest(function: Callable[[float], float], low: float, high: float, *, close: float) -> float:
    """Returns about the place between two at which a function is smallest that falls and then rises.

    By golden sections until the place is known within `close`, and then the vertex of a parabola. Ends count, too.

    Example:
        >>> f"{lowest(lambda x: (x - 1.0) ** 2, -2.0, 3.0, close=0.1):.6f}"
        '1.000000'
        >>> lowest(lambda x: x, 2.0, 3.0, close=0.1)
        2.0
    """
    values = {place: function(place) for place in (low, high)}
    first, second = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for place in (first, second):
        values[place] = function(place)
    while high - low > close:
        if values[first] <= values[second]:
            high, second = second, first
            first = new = high - _GOLDEN * (high - low)
        else:
            low, first = first, second
            second = new = low + _GOLDEN * (high - low)
        values[new] = function(new)
    left, place, right = (low, first, second) if values[first] <= values[second] else (first, second, high)
    at_vertex = vertex(left, place, right, values[left], values[place], values[right])
    if left < at_vertex < right:
        values[at_vertex] = function(at_vertex)
    return min(values, key=values.__getitem__)


def vertex(left: float, place: float, right: float, at_left: float, at_place: float, at_right: float) -> float:
    """Returns the argument at which the parabola through three points is smallest; inf if it has no minimum."""
    down, up = (at_left - at_place) * (right - place), (at_right - at_place) * (place - left)
    if down + up <= 0.0:
        return math.inf
    return place + 0.5 * (down * (right - place) - up * (place - left)) / (down + up)
