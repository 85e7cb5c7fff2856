"""The masses of a sum of clients' integers in every coordinate, by convolution: no transform, so that tails are exact.

Three kinds of sums: integer noise beside the clients' rounding, integers whose rounding is the noise, and noise before
the rounding. In all of them a client's *point* says where it lies between the levels, from 0 to k - 1. Coordinates in
which all clients have the same points, which are most of them, are convolved once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cpsgd.errors import ParameterError
from cpsgd.mechanisms.law import Law, RoundedNormal, Steps

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

Groups = Sequence[tuple[Array, int]]
"""Points in every coordinate, and how many clients have them."""

# Outcomes rarer than about e^-200 are left out.
_NATS = 200.0
_DEVIATIONS = 20.0
_MAX_ENTRIES = 2**24
# Points that agree to so many digits are the same: far more than the codec's grid has.
_DIGITS = 12


@dataclass(frozen=True)
class Masses:
    """A law in every coordinate.

    Attributes:
        first: The smallest sum that has a mass, for each coordinate.
        mass: A row of masses for each coordinate, from `first` on.
        largest: The sum is one of independent parts, none of which is ever further from its mean than this.
        narrowing: A mass of the sum of all parts but one is at most so many times one of the whole sum, next to it.
    """

    first: Integers
    mass: Array
    largest: float
    narrowing: float


def of_noise(noise: Law, groups: Groups) -> Masses:
    """Noise, and the rounding of every client to one of the two levels next to its point.

    The noise is a sum of independent coins, or a limit of such sums, as the rounding is.
    """
    window = noise.window(_NATS)
    _check_size(len(groups[0][0]), len(window.mass) + sum(clients for _, clients in groups))

    def law(points: tuple[float, ...]) -> tuple[int, Array]:
        first, mass = window.first, window.mass
        for point, (_, clients) in zip(points, groups, strict=True):
            below = math.floor(point)
            more, ups = _power((1.0 - (point - below), point - below), clients)
            first, mass = first + clients * below + more, np.convolve(mass, ups)
        return first, mass

    return Masses(*_rows(groups, law), largest=1.0, narrowing=2.0)


def of_steps(steps: Steps, groups: Groups) -> Masses:
    """Small integers whose law is affine in a client's point, from 0 to 1."""
    low, high = np.array(steps.low), np.array(steps.high)
    integers = np.arange(len(low))

    def law(points: tuple[float, ...]) -> tuple[int, Array]:
        first, mass = 0, np.ones(1)
        for point, (_, clients) in zip(points, groups, strict=True):
            part = (1.0 - point) * low + point * high
            more, masses = _power(tuple(part.tolist()), clients * steps.copies)
            first, mass = _trimmed(first + more, np.convolve(mass, masses))
            _check_size(len(groups[0][0]), len(mass))
        return first, mass

    first, mass = _rows(groups, law)
    largest = max(float(np.max(np.abs(integers - end @ integers))) for end in (low, high))
    # The largest mass of a part is convex in the point, and the same at points that mirror each other: least at ½.
    return Masses(first, mass, largest, narrowing=2.0 / float(np.max(low + high)))


def of_rounded(noise: RoundedNormal, groups: Groups) -> Masses:
    """Gaussian noise around every client's point, rounded to the nearest integer."""
    reach = math.ceil(_DEVIATIONS * noise.part) + 1

    def law(points: tuple[float, ...]) -> tuple[int, Array]:
        first, mass = 0, np.ones(1)
        for point, (_, clients) in zip(points, groups, strict=True):
            middle = math.floor(noise.lowest + point)
            ends = (np.arange(-reach, reach + 2) - 0.5 + (middle - noise.lowest - point)) / noise.part
            # By the nearer tail, so that small masses keep their digits.
            parts = np.where(ends[1:] <= 0.0, np.diff(ndtr(ends)), -np.diff(ndtr(-ends)))
            more, masses = _power(tuple(parts.tolist()), clients)
            first, mass = _trimmed(first + more + clients * (middle - reach), np.convolve(mass, masses))
            _check_size(len(groups[0][0]), len(mass))
        return first, mass

    # Moments are those of a Gaussian and of numbers uniform on a level, which are sums of ever smaller parts.
    return Masses(*_rows(groups, law), largest=1.0, narrowing=2.0)


def _check_size(dim: int, width: int) -> None:
    if dim * width > _MAX_ENTRIES:
        raise ParameterError(
            f"The exact law of {dim} coordinates with {width} outcomes each is too large to compute; "
            "audit a protocol of fewer coordinates, or with fewer surviving messages."
        )


def _rows(groups: Groups, law: Callable[[tuple[float, ...]], tuple[int, Array]]) -> tuple[Integers, Array]:
    """First outcomes and masses in every coordinate, filled up with zeros to the same width."""
    kinds, which = np.unique(
        np.stack([np.round(points, _DIGITS) for points, _ in groups], axis=1), axis=0, return_inverse=True
    )
    laws = [law(tuple(points.tolist())) for points in kinds]
    mass = np.zeros((len(laws), max(len(masses) for _, masses in laws)))
    for row, (_, masses) in zip(mass, laws, strict=True):
        row[: len(masses)] = masses
    return np.array([first for first, _ in laws])[which.ravel()], mass[which.ravel()]


@lru_cache(maxsize=256)
def _power(part: tuple[float, ...], times: int) -> tuple[int, Array]:
    """The law of the sum of so many independent integers 0, 1, ... with these masses: its first outcome and masses."""
    if times == 0:
        return 0, np.ones(1)
    first, mass = _power(part, times // 2)
    first, mass = 2 * first, np.convolve(mass, mass)
    return _trimmed(first, np.convolve(mass, part) if times % 2 else mass)


def _trimmed(first: int, mass: Array) -> tuple[int, Array]:
    """Without the ends that are rarer than what is computed."""
    kept = np.flatnonzero(mass > math.exp(-_NATS))
    return first + int(kept[0]), mass[kept[0] : kept[-1] + 1]
